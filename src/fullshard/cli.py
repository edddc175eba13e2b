"""The command line: parse, call the Python API, print. Imports neither torch nor transformers itself. Exit codes: 0
done, 1 an unexpected error, 2 a problem that the user can solve, 130 stopped by Ctrl-C."""

import dataclasses
import errno
import inspect
import json
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
import yaml

import fullshard
from fullshard.errors import UserError
from fullshard.words import answer_word

MORE = "More"


class _Verbs(typer.core.TyperGroup):
    """The verbs. Those of other tools, and their keys written as options, are answered with the names used here."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        debug = next(option for option in self.params if option.name == "debug")
        debug.expose_value = False  # main looks whether it is given
        for command in self.commands.values():
            command.params.append(debug)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is None and (answer := answer_word(cmd_name)):
            raise UserError(answer, "All verbs: fullshard --help")
        return command

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as problem:  # click's NoSuchOption, of which newer versions of typer have a copy
            if answer := answer_word(getattr(problem, "option_name", None) or ""):
                raise UserError(answer, "Keys go into the recipe, or behind it as KEY=VALUE.") from None
            raise


app = typer.Typer(
    cls=_Verbs,
    help="Plan, train, merge and judge fine-tuned language models.",
    epilog="Start: fullshard quickstart. Your own job: fullshard init MODEL DATA. Each verb has --help.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("write a JSON object")
    return value


def _print_schema(wanted: bool) -> None:
    if wanted:
        from fullshard.config import RunConfig

        _print_json(RunConfig.model_json_schema())
        raise typer.Exit


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"fullshard {fullshard.__version__}")
        raise typer.Exit


TYPES = {"word": str, "text": str | None, "words": list[str] | None, "number": int | None, "share": float}
TYPES |= {"switch": bool, "object": dict[str, Any] | None, "language": Literal["en", "zh"]}
CALLS = {"schema": {"callback": _print_schema}, "version": {"callback": _print_version}}
CALLS |= {"template_arguments": {"parser": _json_object}}
TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


def _with_options(function: Callable[..., None], takes: str, name: str) -> Callable[..., None]:
    """``function`` as typer reads it: its parameters, given by name, are as cli.yaml has them."""

    def run(**given: Any) -> None:
        function(**given)

    parameters, run.__doc__ = [], function.__doc__
    for key in takes.split():
        words = dict(TABLE.get(f"{name}.{key}") or TABLE[key]) | CALLS.get(key, {})
        kind, default = TYPES[words.pop("type")], words.pop("default", inspect.Parameter.empty)
        describe, names = typer.Argument if words.pop("argument", False) else typer.Option, words.pop("names", ())
        run.__annotations__[key] = annotation = Annotated[kind, describe(*names, **words)]
        parameters.append(
            inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        )
    run.__signature__ = inspect.Signature(parameters)
    return run


def _verb(takes: str, panel: str | None = None, verb: str = "") -> Callable[[Any], Any]:
    def declare(function: Callable[..., None]) -> Callable[..., None]:
        name = verb or function.__name__
        app.command(name, rich_help_panel=panel)(_with_options(function, takes, name))
        return function

    return declare


app.callback()(_with_options(lambda **_: None, "version debug", ""))


@_verb("recipe overrides ranks devices rows mean_tokens json_output")
def plan(recipe: str, overrides: list[str] | None, json_output: bool, **options: Any) -> None:
    """Say what a recipe needs before it runs: memory by cause, batches, time. Exit code 2 where it does not fit."""
    result = fullshard.make_plan(fullshard.load_config(recipe, overrides or ()), **options)
    _print_json(result) if json_output else print(result.to_text())


@_verb("recipe overrides ranks json_output schema")
def train(recipe: str, overrides: list[str] | None, ranks: int | None, json_output: bool, schema: bool) -> None:
    """Train a recipe, sharded over ranks that this command starts itself (or under torchrun, its ranks)."""
    _print_trained(fullshard.train_run(recipe, overrides or (), ranks=ranks, quiet=json_output), json_output)


@_verb("run output step dtype overwrite json_output")
def merge(run: str, json_output: bool, **options: Any) -> None:
    """Write a run's model as an ordinary Hugging Face folder, and prove that it answers as the trained state."""
    result = fullshard.merge_run(run, **options)
    _print_json(result) if json_output else print(f"{result.to_text()}\nNext: fullshard chat {result.folder}")


@_verb("model system max_new_tokens temperature template_arguments")
def chat(model: str, **options: Any) -> None:
    """Talk to a model in the terminal. Ctrl-D or /exit ends it."""
    from fullshard.infer.chat import start_chat

    start_chat(model, **options)


@_verb("model data base limit max_new_tokens show template_arguments json_output", verb="eval")
def evaluate(model: str, data: str, show: int, json_output: bool, **options: Any) -> None:
    """Measure a model on held-out rows: loss and exact match, next to the base model where --base names it."""
    result = fullshard.evaluate_run(model, data, **options)
    if json_output:
        _print_json(result)
        return
    _print_answers(result, show)
    print(result.to_text())


@_verb("model data output", MORE)
def init(model: str, data: str, output: str) -> None:
    """Propose a recipe for a model and a data file."""
    from fullshard.recipe_init import write_recipe

    print(write_recipe(model, data, output))


@_verb("recipe overrides output show audit page lang json_output", MORE)
def prepare(
    recipe: str, overrides: list[str] | None, output: str | None, show: int, audit: bool, json_output: bool, **made: Any
) -> None:
    """Tokenise a recipe's data, account for every row, and show what is supervised. Trains nothing."""
    config, page, lang = fullshard.load_config(recipe, overrides or ()), made["page"], made["lang"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(output or Path(temporary) / "prepared")
        audit, path = audit or page or lang != "en", Path(page or Path(output or "") / "audit.html")
        result = fullshard.audit_data(config, folder, path, lang) if audit else fullshard.prepare_data(config, folder)
        if json_output:
            _print_json(result)
            return
        from fullshard.data.chat import load_tokenizer
        from fullshard.data.prepared import preview
        from fullshard.model.fetch import with_model_folder
        from fullshard.report.data import audit_tables

        tokenizer = load_tokenizer(with_model_folder(config, weights=False).model.path, config.model.add_tokens)
        print("\n".join([*result["report"], *preview(folder, "train", tokenizer, show)]))
        if audit:
            for title, columns, rows in audit_tables(result, lang, limit=5):
                _print_table(columns, rows, title=title, title_justify="left")
            print(f"Page: {path}")


@_verb("run ranks step json_output", MORE)
def resume(run: str, json_output: bool, **options: Any) -> None:
    """Continue an interrupted run from its newest checkpoint, on any number of ranks."""
    _print_trained(fullshard.resume_run(run, quiet=json_output, **options), json_output)


@_verb("recipe overrides output ranks lang json_output", MORE)
def trace(recipe: str, overrides: list[str] | None, json_output: bool, **options: Any) -> None:
    """Draw one step, run on real ranks: gathers, compute, reductions and bytes. Always on the simple engine."""
    result = fullshard.trace_run(recipe, overrides or (), **options)
    _print_json(result) if json_output else print("\n".join(result["report"]))


@_verb("json_output", MORE)
def doctor(json_output: bool) -> None:
    """Check this machine: versions, accelerators, memory, disk, two ranks. Exit code 2 where a check fails."""
    from fullshard.doctor import check_machine

    result = check_machine()
    _print_json(result) if json_output else print(result.to_text())
    if not result.healthy:
        raise typer.Exit(2)


@_verb("model prompts system max_new_tokens temperature seed batch_size template_arguments json_output", MORE)
def generate(model: str, prompts: list[str], json_output: bool, **options: Any) -> None:
    """Answer prompts with a model."""
    answers = fullshard.generate_text(model, prompts, **options)
    pairs = [{"prompt": prompt, "answer": answer} for prompt, answer in zip(prompts, answers, strict=True)]
    _print_json(pairs) if json_output else print("\n".join(answers))


@_verb("model ranks", MORE)
def quickstart(**options: Any) -> None:
    """The main job in minutes: plan, train, merge, and compare answers before and after."""
    from fullshard.quickstart import run_quickstart

    run_quickstart(**options)


def _print_trained(result: Any, json_output: bool) -> None:
    """Under torchrun every rank is this program: the first one speaks."""
    from fullshard.launch import speaks

    if speaks():
        _print_json(result) if json_output else print(f"Next: fullshard merge {result.run}")


def _print_answers(result: Any, count: int) -> None:
    names = ["question", "expected", *(["base answer"] if result.base else []), "answer"]
    said = zip(*(each.answers[:count] for each in (result.base, result) if each), strict=False)
    rows = [[each[-1].prompt, each[-1].expected, *(answer.answer for answer in each)] for each in said]
    _print_table(names, rows, show_lines=True)


def _print_table(columns: list[str], rows: list[list[Any]], **options: Any) -> None:
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    sides = ["left" if isinstance(cell, str) else "right" for cell in rows[0]] if rows else []
    table = Table(*(Column(name, justify=side, overflow="fold") for name, side in zip(columns, sides)), **options)  # noqa
    for row in rows:
        table.add_row(*(Text(f"{cell:,}" if isinstance(cell, int) else str(cell)) for cell in row))
    if rows:
        Console().print(table)


def _print_json(value: Any) -> None:
    if hasattr(value, "to_json"):
        value = value.to_json()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its code. ``--debug`` shows tracebacks."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # a terminal that knows no Chinese is no reason to fail
    try:
        typer.main.get_command(app).main(args=arguments, prog_name="fullshard")
        code = 0
    except Exception as problem:
        if "--debug" in arguments:
            traceback.print_exc()
        known = _as_user_error(problem)
        code, text = 2 if known else 1, f"{type(problem).__name__}: {problem} (run again with --debug)"
        if known:
            text = f"{known.message}\n  -> {known.hint}" if known.hint else known.message
        if not (known and known.told):
            print(f"Error: {text}", file=sys.stderr)
    sys.exit(code)


def _as_user_error(problem: Exception) -> UserError | None:
    """What the user can solve: also a full disk, and a file that cannot be used. None for all else."""
    if isinstance(problem, OSError) and problem.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return UserError(f"The disk takes no more: {problem.strerror}.", "Free some of it, then try again.")
    if isinstance(problem, OSError) and problem.filename is not None:
        return UserError(f"Cannot use {problem.filename}: {problem.strerror}.", "Check the path and its rights.")
    return problem if isinstance(problem, UserError) else None
