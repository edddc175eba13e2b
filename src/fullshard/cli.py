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
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any, Literal

import typer
import yaml

import fullshard
from fullshard.errors import UserError
from fullshard.words import answer_word

TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


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


app = typer.Typer(cls=_Verbs, **TABLE["app"])


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("write a JSON object")
    return value


def _say_at_once(option: typer.CallbackParam, wanted: bool) -> None:
    if wanted:
        from fullshard.config import RunConfig

        version = f"fullshard {fullshard.__version__}"
        print(version) if option.name == "version" else _print_json(RunConfig.model_json_schema())
        raise typer.Exit


TYPES = {"word": str, "text": str | None, "words": list[str] | None, "number": int | None, "share": float}
TYPES |= {"switch": bool, "object": dict[str, Any] | None, "language": Literal["en", "zh"], "amount": float | None}
CALLS = {"schema": {"callback": _say_at_once}, "version": {"callback": _say_at_once}}
CALLS |= {"template_arguments": {"parser": _json_object}}


def _with_options(function: Callable[..., None], takes: str, name: str) -> Callable[..., None]:
    """``function`` as typer reads it: its parameters, given by name, are as cli.yaml has them."""

    def run(**given: Any) -> None:
        function(**given)

    parameters, table = [], TABLE["parameters"]
    for key in takes.split():
        words = dict(table.get(f"{name}.{key}") or table[key]) | CALLS.get(key, {})
        kind, default = TYPES[words.pop("type")], words.pop("default", inspect.Parameter.empty)
        describe, names = typer.Argument if words.pop("argument", False) else typer.Option, words.pop("names", ())
        run.__annotations__[key] = hint = Annotated[kind, describe(*names, **words)]
        parameters.append(inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint))
    run.__signature__ = inspect.Signature(parameters)
    return run


def _plan(recipe: str, overrides: list[str] | None, json_output: bool, probe: bool, **options: Any) -> None:
    compare, explain, html, lang = (options.pop(key) for key in ("compare", "explain", "html", "lang"))
    if compare and explain:
        raise UserError("--explain is about one plan, --compare shows several.", "Leave one of them out.")
    if probe and (compare or any([options.pop(key) for key in ("devices", "rows", "mean_tokens")])):
        raise UserError("--probe runs real steps of this one recipe on this machine.", "Leave the other options out.")
    if probe:
        made = fullshard.probe_run(recipe, overrides or (), **options)
    else:
        make = fullshard.compare_plans if compare else fullshard.make_plan
        made = make(fullshard.load_config(recipe, overrides or ()), **options)
    page = fullshard.write_plan_page(made, html or "plan.html", lang) if html or lang != "en" else None
    if explain and not json_output:
        return print(made.to_text(explain=True), *([f"Page: {page}"] if page else []), sep="\n")
    _print_result(made, json_output, *([f"Page: {page}"] if page else []))


def _train(recipe: str, overrides: list[str] | None, ranks: int | None, json_output: bool, schema: bool) -> None:
    _print_trained(fullshard.train_run(recipe, overrides or (), ranks=ranks, quiet=json_output), json_output)


def _merge(run: str, json_output: bool, **options: Any) -> None:
    result = fullshard.merge_run(run, **options)
    _print_result(result, json_output, f"Next: fullshard chat {result.folder}")


def _eval(models: list[str], data: str | None, show: int, json_output: bool, **options: Any) -> None:
    if data is None and len(models) == 2 and not Path(models[1]).is_dir():
        *models, data = models
    if models[0].endswith((".yaml", ".yml")):
        own = {key: options.pop(key) for key in ("scorer", "limit", "max_new_tokens")}
        if models[1:] or data or any(options.values()):
            raise UserError("A recipe brings its own base, rows and settings.", f"fullshard eval {models[0]}")
        result = fullshard.judge_recipe(fullshard.load_config(models[0]), **own)
    else:
        result = fullshard.judge_models(models, data, **options)
    if not json_output and show:
        names = ["question", "expected", *(f"{each.name} answer".removeprefix("model ") for each in result.results)]
        said = [{one.row: one for one in each.answers} for each in result.results]
        both = [[each[row] for each in said] for row in said[0] if all(row in each for each in said)]
        rows = [[each[0].prompt, each[0].expected, *(one.answer for one in each)] for each in both]
        _print_table(names, rows[:show], show_lines=True)
    _print_result(result, json_output)


def _report(place: str, overrides: list[str] | None, **options: Any) -> None:
    if Path(place).is_dir():
        return print(f"Page: {fullshard.write_run_report(place, **options)}")
    config = fullshard.load_config(place, overrides or ())
    found = fullshard.write_recipe_report(config, fullshard.judge_recipe(config), **options)
    print(found["decision"].replace("_", " ").capitalize(), *found["reasons"], f"Page: {found['page']}", sep="\n")


def _prepare(recipe: str, overrides: list[str] | None, output: str | None, json_output: bool, **made: Any) -> None:
    config, page, lang = fullshard.load_config(recipe, overrides or ()), made["page"], made["lang"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(output or Path(temporary) / "prepared")
        audit, path = made["audit"] or page or lang != "en", Path(page or Path(output or "") / "audit.html")
        result = fullshard.audit_data(config, folder, path, lang) if audit else fullshard.prepare_data(config, folder)
        if json_output:
            return _print_json(result)
        from fullshard.data.chat import load_tokenizer
        from fullshard.data.prepared import preview
        from fullshard.model.fetch import with_model_folder
        from fullshard.report.data import audit_tables

        tokenizer = load_tokenizer(with_model_folder(config, weights=False).model.path, config.model.add_tokens)
        print("\n".join([*result["report"], *preview(folder, "train", tokenizer, made["show"])]))
        if audit:
            for title, columns, rows in audit_tables(result, lang, limit=5):
                _print_table(columns, rows, title=title, title_justify="left")
            print(f"Page: {path}")


def _resume(run: str, json_output: bool, **options: Any) -> None:
    _print_trained(fullshard.resume_run(run, quiet=json_output, **options), json_output)


def _trace(recipe: str, overrides: list[str] | None, json_output: bool, **options: Any) -> None:
    result = fullshard.trace_run(recipe, overrides or (), **options)
    _print_json(result) if json_output else print("\n".join(result["report"]))


def _doctor(recipe: str | None, overrides: list[str] | None, json_output: bool) -> None:
    from fullshard.launch import check_machine, speaks

    result = check_machine(recipe, overrides or ())
    if speaks():
        _print_result(result, json_output)
        if not result.healthy:
            raise typer.Exit(2)


def _generate(model: str, prompts: list[str], json_output: bool, **options: Any) -> None:
    answers = fullshard.generate_text(model, prompts, **options)
    pairs = [{"prompt": prompt, "answer": answer} for prompt, answer in zip(prompts, answers, strict=True)]
    _print_json(pairs) if json_output else print("\n".join(answers))


def _call(place: str, **given: Any) -> None:
    """Call ``module:function``, which prints for itself or returns the text to print."""
    if isinstance(text := resolve_name(place)(**given), str):
        print(text)


def _print_trained(result: Any, json_output: bool) -> None:
    """Under torchrun every rank is this program: the first one speaks."""
    from fullshard.launch import speaks

    if speaks():
        _print_json(result) if json_output else print(f"Next: fullshard merge {result.run}")


def _print_result(result: Any, json_output: bool, *following: str) -> None:
    _print_json(result) if json_output else print(result.to_text(), *following, sep="\n")


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


FUNCTIONS = {"plan": _plan, "train": _train, "merge": _merge, "eval": _eval, "prepare": _prepare, "resume": _resume}
FUNCTIONS |= {"doctor": _doctor, "generate": _generate, "trace": _trace, "report": _report}
app.callback()(_with_options(lambda **_: None, "version debug", ""))
for name, verb in TABLE["verbs"].items():
    run = _with_options(FUNCTIONS.get(name) or partial(_call, verb["call"]), verb["takes"], name)
    app.command(name, help=verb["help"], rich_help_panel=verb.get("panel"))(run)


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
        known = problem if isinstance(problem, UserError) else None
        if isinstance(problem, OSError) and problem.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            known = UserError(f"The disk takes no more: {problem.strerror}.", "Free some of it, then try again.")
        elif isinstance(problem, OSError) and problem.filename is not None:
            known = UserError(f"Cannot use {problem.filename}: {problem.strerror}.", "Check the path and its rights.")
        code, text = 2 if known else 1, f"{type(problem).__name__}: {problem} (run again with --debug)"
        if known:
            text = f"{known.message}\n  -> {known.hint}" if known.hint else known.message
        if not (known and known.told):
            print(f"Error: {text}", file=sys.stderr)
    sys.exit(code)
