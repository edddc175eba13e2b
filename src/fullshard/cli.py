"""The command line: parse, call the Python API, print. Imports neither torch nor transformers itself.

Exit codes: 0 done, 1 an unexpected error, 2 a problem that the user can solve, 130 stopped by Ctrl-C.
"""

import dataclasses
import errno
import json
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

import fullshard
from fullshard.errors import UserError
from fullshard.words import answer_word

MORE = "More"


class _Verbs(typer.core.TyperGroup):
    """The verbs. Those of other tools, and their keys written as options, are answered with the names used here."""

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

Recipe = Annotated[str, typer.Argument(metavar="RECIPE", help="The recipe, a YAML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Changes to the recipe: train.epochs=3", show_default=False),
]
Run = Annotated[str, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)]
Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A Hugging Face model folder or id (owner/name).", show_default=False),
]
Ranks = Annotated[
    int | None,
    typer.Option(min=1, help="Number of ranks. Default: one per accelerator, else 2.", show_default=False),
]
Step = Annotated[
    int | None, typer.Option(min=1, help="Checkpoint of this step. Default: the newest.", show_default=False)
]


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("write a JSON object")
    return value


TemplateArguments = Annotated[
    dict[str, Any] | None,
    typer.Option(
        parser=_json_object,
        metavar="JSON",
        help="Variables of the chat template: '{\"enable_thinking\": false}'. Default: those of the merged run.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else, on stdout.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")]


def _print_schema(wanted: bool) -> None:
    if wanted:
        from fullshard.config import recipe_schema

        _print_json(recipe_schema())
        raise typer.Exit


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"fullshard {fullshard.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
    debug: Debug = False,
) -> None:
    pass


@app.command()
def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    ranks: Ranks = None,
    devices: Annotated[
        str | None,
        typer.Option(help="Cards that need not be here: 4x4090, 8xa800-80g, 8x910b3-64g.", show_default=False),
    ] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Assume this many rows.", show_default=False)] = None,
    mean_tokens: Annotated[int | None, typer.Option(min=1, help="Assume rows this long.", show_default=False)] = None,
    json_output: Json = False,
    debug: Debug = False,
) -> None:
    """Say what a recipe needs before it runs: memory by cause, batches, time. Exit code 2 where it does not fit."""
    config = fullshard.load_config(recipe, overrides or ())
    result = fullshard.make_plan(config, ranks=ranks, devices=devices, rows=rows, mean_tokens=mean_tokens)
    _print_json(result) if json_output else print(result.to_text())


@app.command()
def train(
    recipe: Recipe,
    overrides: Overrides = None,
    ranks: Ranks = None,
    json_output: Json = False,
    schema: Annotated[
        bool,
        typer.Option("--schema", help="Print the recipe's JSON schema.", is_eager=True, callback=_print_schema),
    ] = False,
    debug: Debug = False,
) -> None:
    """Train a recipe, sharded over ranks that this command starts itself (or under torchrun, its ranks)."""
    _print_trained(fullshard.train_run(recipe, overrides or (), ranks=ranks, quiet=json_output), json_output)


@app.command()
def merge(
    run: Run,
    output: Annotated[str | None, typer.Option(help="The new folder. Default: RUN/merged.", show_default=False)] = None,
    step: Step = None,
    dtype: Annotated[
        str | None, typer.Option(help="fp32, bf16 or fp16. Default: the base model's.", show_default=False)
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a merged folder that exists.")] = False,
    json_output: Json = False,
    debug: Debug = False,
) -> None:
    """Write a run's model as an ordinary Hugging Face folder, and prove that it answers as the trained state."""
    result = fullshard.merge_run(run, output=output, step=step, dtype=dtype, overwrite=overwrite)
    if json_output:
        _print_json(result)
        return
    print(result.to_text())
    print(f"Next: fullshard chat {result.folder}")


@app.command()
def chat(
    model: Model,
    system: Annotated[str | None, typer.Option(help="System message.", show_default=False)] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    template_arguments: TemplateArguments = None,
    debug: Debug = False,
) -> None:
    """Talk to a model in the terminal. Ctrl-D or /exit ends it."""
    from fullshard.infer.chat import start_chat

    start_chat(model, system, max_new_tokens, temperature, template_arguments=template_arguments)


@app.command("eval")
def evaluate(
    model: Model,
    data: Annotated[str, typer.Argument(metavar="DATA", help="Held-out rows, a .jsonl file.", show_default=False)],
    base: Annotated[str | None, typer.Option(help="The model before training.", show_default=False)] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first rows.", show_default=False)] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Longest answer in tokens. Default: the longest expected, and 8.", show_default=False),
    ] = None,
    show: Annotated[int, typer.Option(min=0, help="Print the answers to this many rows.")] = 5,
    template_arguments: TemplateArguments = None,
    json_output: Json = False,
    debug: Debug = False,
) -> None:
    """Measure a model on held-out rows: loss and exact match, next to the base model where --base names it."""
    result = fullshard.evaluate_run(
        model, data, base, limit=limit, max_new_tokens=max_new_tokens, template_arguments=template_arguments
    )
    if json_output:
        _print_json(result)
        return
    _print_answers(result, show)
    print(result.to_text())


@app.command(rich_help_panel=MORE)
def init(
    model: Model,
    data: Annotated[str, typer.Argument(metavar="DATA", help="Your data: .jsonl, .json or .txt.", show_default=False)],
    output: Annotated[str, typer.Option(help="The recipe to write.")] = "recipe.yaml",
    debug: Debug = False,
) -> None:
    """Propose a recipe for a model and a data file."""
    from fullshard.recipe_init import write_recipe

    print(write_recipe(model, data, output))


@app.command(rich_help_panel=MORE)
def prepare(
    recipe: Recipe,
    overrides: Overrides = None,
    output: Annotated[
        str | None, typer.Option(help="Keep the prepared rows here. Default: keep nothing.", show_default=False)
    ] = None,
    show: Annotated[int, typer.Option(min=0, help="Print this many rows with what is supervised in them.")] = 3,
    audit: Annotated[bool, typer.Option("--audit", help="Also look for copies and overlap, and write a page.")] = False,
    page: Annotated[str | None, typer.Option(help="Audit, with this page. Default: [OUTPUT/]audit.html.")] = None,
    lang: Annotated[Literal["en", "zh"], typer.Option(help="Language of the audit.")] = "en",
    json_output: Json = False,
    debug: Debug = False,
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

        print("\n".join(result["report"]))
        tokenizer = load_tokenizer(with_model_folder(config, weights=False).model.path, config.model.add_tokens)
        print("\n".join(preview(folder, "train", tokenizer, show)))
        if audit:
            for title, columns, rows in audit_tables(result, lang, limit=5):
                _print_table(columns, rows, title=title, title_justify="left")
            print(f"Page: {path}")


@app.command(rich_help_panel=MORE)
def resume(run: Run, ranks: Ranks = None, step: Step = None, json_output: Json = False, debug: Debug = False) -> None:
    """Continue an interrupted run from its newest checkpoint, on any number of ranks."""
    _print_trained(fullshard.resume_run(run, ranks=ranks, step=step, quiet=json_output), json_output)


@app.command(rich_help_panel=MORE)
def doctor(json_output: Json = False, debug: Debug = False) -> None:
    """Check this machine: versions, accelerators, memory, disk, two ranks. Exit code 2 where a check fails."""
    from fullshard.doctor import check_machine

    result = check_machine()
    _print_json(result) if json_output else print(result.to_text())
    if not result.healthy:
        raise typer.Exit(2)


@app.command(rich_help_panel=MORE)
def generate(
    model: Model,
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT...", help="One or more prompts.", show_default=False)],
    system: Annotated[str | None, typer.Option(help="System message.", show_default=False)] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="For a temperature above 0.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts answered together.")] = 16,
    template_arguments: TemplateArguments = None,
    json_output: Json = False,
    debug: Debug = False,
) -> None:
    """Answer prompts with a model."""
    answers = fullshard.generate_text(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        batch_size=batch_size,
        system=system,
        template_arguments=template_arguments,
    )
    if json_output:
        _print_json([{"prompt": prompt, "answer": answer} for prompt, answer in zip(prompts, answers, strict=True)])
    else:
        print("\n".join(answers))


@app.command(rich_help_panel=MORE)
def quickstart(
    model: Annotated[
        str | None, typer.Option(help="Your own model folder instead of SmolLM2-135M.", show_default=False)
    ] = None,
    ranks: Ranks = None,
    debug: Debug = False,
) -> None:
    """The main job in minutes: plan, train, merge, and compare answers before and after."""
    from fullshard.quickstart import run_quickstart

    run_quickstart(model=model, ranks=ranks)


def _print_trained(result: Any, json_output: bool) -> None:
    """Under torchrun every rank is this program: the first one speaks."""
    from fullshard.launch import speaks

    if not speaks():
        return
    if json_output:
        _print_json(result)
        return
    print(f"Next: fullshard merge {result.run}")


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
    if problem.told:
        return
    print(f"Error: {problem.message}", file=sys.stderr)
    if problem.hint:
        print(f"  -> {problem.hint}", file=sys.stderr)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its code: 0, 1 (unexpected), 2 (the user's to solve) or 130 (Ctrl-C).

    A UserError becomes its message and hint on stderr. Other exceptions become one line. ``--debug`` shows tracebacks.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    debug = "--debug" in arguments
    code = 1
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # a terminal that knows no Chinese is no reason to fail
    try:
        typer.main.get_command(app).main(args=arguments, prog_name="fullshard")
        code = 0
    except UserError as problem:
        if debug:
            traceback.print_exc()
        _report(problem)
        code = 2
    except OSError as problem:
        if debug:
            traceback.print_exc()
        if problem.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            _report(UserError(f"The disk takes no more: {problem.strerror}.", "Free some of it, then try again."))
            code = 2
        elif problem.filename is None:
            print(f"Error: {type(problem).__name__}: {problem} (run again with --debug)", file=sys.stderr)
        else:
            _report(UserError(f"Cannot use {problem.filename}: {problem.strerror}.", "Check the path and its rights."))
            code = 2
    except Exception as problem:
        if debug:
            traceback.print_exc()
        print(f"Error: {type(problem).__name__}: {problem} (run again with --debug)", file=sys.stderr)
    sys.exit(code)
