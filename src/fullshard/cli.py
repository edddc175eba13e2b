"""The command line: parse, call the Python API, print. Imports neither torch nor transformers itself.

Exit codes: 0 done, 1 an unexpected error, 2 a problem that the user can solve, 130 stopped by Ctrl-C."""

import dataclasses
import errno
import json
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Argument, Option

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
        from fullshard.config import recipe_schema

        _print_json(recipe_schema())
        raise typer.Exit


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"fullshard {fullshard.__version__}")
        raise typer.Exit


ARGUMENTS = "Variables of the chat template: '{\"enable_thinking\": false}'. Default: those of the merged run."
Text, Number = str | None, int | None
Recipe = Annotated[str, Argument(metavar="RECIPE", help="The recipe, a YAML file.")]
Overrides = Annotated[
    list[str] | None, Argument(metavar="[KEY=VALUE]...", help="Changes to the recipe: train.epochs=3")
]
Run = Annotated[str, Argument(metavar="RUN", help="A run folder.")]
Model = Annotated[str, Argument(metavar="MODEL", help="A Hugging Face model folder or id (owner/name).")]
Ranks = Annotated[Number, Option(min=1, help="Number of ranks. Default: one per accelerator, else 2.")]
Step = Annotated[Number, Option(min=1, help="Checkpoint of this step. Default: the newest.")]
System = Annotated[Text, Option(help="System message.")]
Longest = Annotated[int, Option(min=1, help="Longest answer in tokens.")]
Temperature = Annotated[float, Option(min=0.0, help="0 is greedy.")]
TemplateArguments = Annotated[dict[str, Any] | None, Option(parser=_json_object, metavar="JSON", help=ARGUMENTS)]
Json = Annotated[bool, Option("--json", help="Print the result as JSON, and nothing else, on stdout.")]
Debug = Annotated[bool, Option("--debug", help="Show the whole traceback of an error.")]
Version = Annotated[bool, Option("--version", help="Print the version.", is_eager=True, callback=_print_version)]
Schema = Annotated[
    bool, Option("--schema", help="Print the recipe's JSON schema.", is_eager=True, callback=_print_schema)
]


@app.callback()
def _root(version: Version = False, debug: Debug = False) -> None:
    pass


@app.command()
def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    ranks: Ranks = None,
    devices: Annotated[Text, Option(help="Cards that need not be here: 4x4090, 8xa800-80g, 8x910b3-64g.")] = None,
    rows: Annotated[Number, Option(min=1, help="Assume this many rows.")] = None,
    mean_tokens: Annotated[Number, Option(min=1, help="Assume rows this long.")] = None,
    json_output: Json = False,
) -> None:
    """Say what a recipe needs before it runs: memory by cause, batches, time. Exit code 2 where it does not fit."""
    config = fullshard.load_config(recipe, overrides or ())
    result = fullshard.make_plan(config, ranks=ranks, devices=devices, rows=rows, mean_tokens=mean_tokens)
    _print_json(result) if json_output else print(result.to_text())


@app.command()
def train(
    recipe: Recipe, overrides: Overrides = None, ranks: Ranks = None, json_output: Json = False, schema: Schema = False
) -> None:
    """Train a recipe, sharded over ranks that this command starts itself (or under torchrun, its ranks)."""
    _print_trained(fullshard.train_run(recipe, overrides or (), ranks=ranks, quiet=json_output), json_output)


@app.command()
def merge(
    run: Run,
    output: Annotated[Text, Option(help="The new folder. Default: RUN/merged.")] = None,
    step: Step = None,
    dtype: Annotated[Text, Option(help="fp32, bf16 or fp16. Default: the base model's.")] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace a merged folder that exists.")] = False,
    json_output: Json = False,
) -> None:
    """Write a run's model as an ordinary Hugging Face folder, and prove that it answers as the trained state."""
    result = fullshard.merge_run(run, output=output, step=step, dtype=dtype, overwrite=overwrite)
    _print_json(result) if json_output else print(f"{result.to_text()}\nNext: fullshard chat {result.folder}")


@app.command()
def chat(
    model: Model,
    system: System = None,
    max_new_tokens: Longest = 256,
    temperature: Temperature = 0.0,
    template_arguments: TemplateArguments = None,
) -> None:
    """Talk to a model in the terminal. Ctrl-D or /exit ends it."""
    from fullshard.infer.chat import start_chat

    start_chat(model, system, max_new_tokens, temperature, template_arguments=template_arguments)


@app.command("eval")
def evaluate(
    model: Model,
    data: Annotated[str, Argument(metavar="DATA", help="Held-out rows, a .jsonl file.")],
    base: Annotated[Text, Option(help="The model before training.")] = None,
    limit: Annotated[Number, Option(min=1, help="Only the first rows.")] = None,
    max_new_tokens: Annotated[
        Number, Option(min=1, help="Longest answer in tokens. Default: the longest expected, and 8.")
    ] = None,
    show: Annotated[int, Option(min=0, help="Print the answers to this many rows.")] = 5,
    template_arguments: TemplateArguments = None,
    json_output: Json = False,
) -> None:
    """Measure a model on held-out rows: loss and exact match, next to the base model where --base names it."""
    settings = {"limit": limit, "max_new_tokens": max_new_tokens, "template_arguments": template_arguments}
    result = fullshard.evaluate_run(model, data, base, **settings)
    if json_output:
        _print_json(result)
        return
    _print_answers(result, show)
    print(result.to_text())


@app.command(rich_help_panel=MORE)
def init(
    model: Model,
    data: Annotated[str, Argument(metavar="DATA", help="Your data: .jsonl, .json or .txt.")],
    output: Annotated[str, Option(help="The recipe to write.")] = "recipe.yaml",
) -> None:
    """Propose a recipe for a model and a data file."""
    from fullshard.recipe_init import write_recipe

    print(write_recipe(model, data, output))


@app.command(rich_help_panel=MORE)
def prepare(
    recipe: Recipe,
    overrides: Overrides = None,
    output: Annotated[Text, Option(help="Keep the prepared rows here. Default: keep nothing.")] = None,
    show: Annotated[int, Option(min=0, help="Print this many rows with what is supervised in them.")] = 3,
    audit: Annotated[bool, Option("--audit", help="Also look for copies and overlap, and write a page.")] = False,
    page: Annotated[Text, Option(help="Audit, with this page. Default: [OUTPUT/]audit.html.")] = None,
    lang: Annotated[Literal["en", "zh"], Option(help="Language of the audit.")] = "en",
    json_output: Json = False,
) -> None:
    """Tokenise a recipe's data, account for every row, and show what is supervised. Trains nothing."""
    config = fullshard.load_config(recipe, overrides or ())
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


@app.command(rich_help_panel=MORE)
def resume(run: Run, ranks: Ranks = None, step: Step = None, json_output: Json = False) -> None:
    """Continue an interrupted run from its newest checkpoint, on any number of ranks."""
    _print_trained(fullshard.resume_run(run, ranks=ranks, step=step, quiet=json_output), json_output)


@app.command(rich_help_panel=MORE)
def doctor(json_output: Json = False) -> None:
    """Check this machine: versions, accelerators, memory, disk, two ranks. Exit code 2 where a check fails."""
    from fullshard.doctor import check_machine

    result = check_machine()
    _print_json(result) if json_output else print(result.to_text())
    if not result.healthy:
        raise typer.Exit(2)


@app.command(rich_help_panel=MORE)
def generate(
    model: Model,
    prompts: Annotated[list[str], Argument(metavar="PROMPT...", help="One or more prompts.")],
    system: System = None,
    max_new_tokens: Longest = 64,
    temperature: Temperature = 0.0,
    seed: Annotated[int, Option(help="For a temperature above 0.")] = 0,
    batch_size: Annotated[int, Option(min=1, help="Prompts answered together.")] = 16,
    template_arguments: TemplateArguments = None,
    json_output: Json = False,
) -> None:
    """Answer prompts with a model."""
    sampling = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed, "batch_size": batch_size}
    answers = fullshard.generate_text(model, prompts, system=system, template_arguments=template_arguments, **sampling)
    pairs = [{"prompt": prompt, "answer": answer} for prompt, answer in zip(prompts, answers, strict=True)]
    _print_json(pairs) if json_output else print("\n".join(answers))


@app.command(rich_help_panel=MORE)
def quickstart(
    model: Annotated[Text, Option(help="Your own model folder instead of SmolLM2-135M.")] = None, ranks: Ranks = None
) -> None:
    """The main job in minutes: plan, train, merge, and compare answers before and after."""
    from fullshard.quickstart import run_quickstart

    run_quickstart(model=model, ranks=ranks)


def _print_trained(result: Any, json_output: bool) -> None:
    """Under torchrun every rank is this program: the first one speaks."""
    from fullshard.launch import speaks

    if speaks():
        _print_json(result) if json_output else print(f"Next: fullshard merge {result.run}")


def _print_answers(result: Any, count: int) -> None:
    """A table of the first answers: expected, the base's where there is one, the model's."""
    rows = [[answer.prompt, answer.expected, answer.answer] for answer in result.answers[:count]]
    names = ["question", "expected", "answer"]
    if result.base:
        names.insert(2, "base answer")
        for row, answer in zip(rows, result.base.answers, strict=False):
            row.insert(2, answer.answer)
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


def _report(problem: UserError) -> None:
    lines = [f"Error: {problem.message}", f"  -> {problem.hint}"] if problem.hint else [f"Error: {problem.message}"]
    if not problem.told:
        print("\n".join(lines), file=sys.stderr)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its code: 0, 1 (unexpected), 2 (the user's to solve) or 130 (Ctrl-C). A
    UserError becomes its message and hint on stderr. Other exceptions become one line. ``--debug`` shows tracebacks."""
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
        code = 2 if known else 1
        if known:
            _report(known)
        else:
            print(f"Error: {type(problem).__name__}: {problem} (run again with --debug)", file=sys.stderr)
    sys.exit(code)


def _as_user_error(problem: Exception) -> UserError | None:
    """What the user can solve: also a full disk, and a file that cannot be used. None for all else."""
    if isinstance(problem, OSError) and problem.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return UserError(f"The disk takes no more: {problem.strerror}.", "Free some of it, then try again.")
    if isinstance(problem, OSError) and problem.filename is not None:
        return UserError(f"Cannot use {problem.filename}: {problem.strerror}.", "Check the path and its rights.")
    return problem if isinstance(problem, UserError) else None
