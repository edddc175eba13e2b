"""The command line: parse, call the Python API, print what cli.yaml says. Imports neither torch nor transformers."""

import errno
import inspect
import json
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, is_dataclass
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any, Literal
import typer
import fullshard
from fullshard.errors import UserError, read_table
from fullshard.words import answer_word

TABLE = read_table("cli.yaml")


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


app = typer.Typer(cls=_Verbs, **TABLE["app"])


def _say_at_once(option: typer.CallbackParam, wanted: bool) -> None:
    if wanted:
        schema = resolve_name("fullshard.config:RunConfig.model_json_schema")
        print(f"fullshard {fullshard.__version__}" if option.name == "version" else _json_text(schema()))
        raise typer.Exit


TYPES = {"word": str, "text": str | None, "words": list[str] | None, "number": int | None, "share": float}
TYPES |= {"switch": bool, "object": dict[str, Any] | None, "language": Literal["en", "zh"], "amount": float | None}
CALLS = {"schema": {"callback": _say_at_once}, "version": {"callback": _say_at_once}}
CALLS["template_arguments"] = {"parser": lambda text: resolve_name("pydantic:TypeAdapter")(dict).validate_json(text)}


def _command(verb: Callable[..., Iterator[Any]], takes: str, name: str) -> Callable[..., None]:
    """``verb`` for typer, keys as in cli.yaml. It prints what ``verb`` yields: the result as JSON, or the rest."""

    def run(**given: Any) -> None:
        as_json = given.pop("json_output", given.get("quiet", False))
        said = verb(**{key: value for key, value in given.items() if key not in ("debug", "schema", "version")})
        if (result := next(said, None)) is not None and resolve_name("fullshard.launch:speaks")():
            for part in [_json_text(result)] if as_json else said:
                print(part) if isinstance(part, str) else resolve_name("rich.console:Console")().print(part)
            if not getattr(result, "healthy", True):
                raise typer.Exit(2)

    parameters, table = [], TABLE["parameters"]
    for key in [*takes.split(), "debug"]:  # main looks whether it is given
        words = dict(table.get(f"{name}.{key}") or table[key]) | CALLS.get(key, {})
        kind, default = TYPES[words.pop("type")], words.pop("default", inspect.Parameter.empty)
        describe, names = typer.Argument if words.pop("argument", False) else typer.Option, words.pop("names", ())
        run.__annotations__[key] = hint = Annotated[kind, describe(*names, **words)]
        parameters.append(inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint))
    run.__signature__ = inspect.Signature(parameters)
    return run


def _call(place: str, says: str, **given: Any) -> Iterator[Any]:
    """Call ``module:function``. Jinja's template ``says`` is the text; without one the function prints for itself."""
    yield (result := resolve_name(place)(**given))
    yield from [resolve_name("jinja2:Template")(says).render(result=result)] if says else []


def _plan(recipe: str, overrides: list[str], probe: bool, method: str | None, **options: Any) -> Iterator[Any]:
    overrides = [*overrides, *([f"method={method}"] if method else [])]
    compare, explain, html, lang = (options.pop(key) for key in ("compare", "explain", "html", "lang"))
    if compare and explain:
        raise UserError("--explain is about one plan, --compare shows several.", "Leave one of them out.")
    if probe and (compare or any([options.pop(key) for key in ("devices", "rows", "mean_tokens")])):
        raise UserError("--probe runs real steps of this one recipe on this machine.", "Leave the other options out.")
    if probe:
        made = fullshard.probe_run(recipe, overrides, **options)
    else:
        config = fullshard.load_config(recipe, overrides, or_model=True)
        made = (fullshard.compare_plans if compare else fullshard.make_plan)(config, **options)
    page = fullshard.write_plan_page(made, html or "plan.html", lang) if html or lang != "en" else None
    yield made
    yield made.to_text(explain=True) if explain else made.to_text()
    yield from [f"Page: {page}"] if page else []


def _eval(models: list[str], data: str | None, show: int, **options: Any) -> Iterator[Any]:
    if data is None and len(models) == 2 and not Path(models[1]).is_dir():
        *models, data = models
    if models[0].endswith((".yaml", ".yml")):
        own = {key: options.pop(key) for key in ("scorer", "limit", "max_new_tokens")}
        if models[1:] or data or any(options.values()):
            raise UserError("A recipe brings its own base, rows and settings.", f"fullshard eval {models[0]}")
        result = fullshard.judge_recipe(fullshard.load_config(models[0]), **own)
    else:
        result = fullshard.judge_models(models, data, **options)
    yield result
    names = ["question", "expected", *(f"{each.name} answer".removeprefix("model ") for each in result.results)]
    said = [{one.row: one for one in each.answers} for each in result.results]
    both = [[each[row] for each in said] for row in said[0] if all(row in each for each in said)]
    rows = [[each[0].prompt, each[0].expected, *(one.answer for one in each)] for each in both]
    yield from _tables(names, rows[:show], show_lines=True)
    yield result.to_text()


def _report(place: str, overrides: list[str], **options: Any) -> Iterator[Any]:
    if Path(place).is_dir():
        yield (page := fullshard.write_run_report(place, **options))
    else:
        config = fullshard.load_config(place, overrides)
        yield (found := fullshard.write_recipe_report(config, fullshard.judge_recipe(config), **options))
        yield from [found["decision"].replace("_", " ").capitalize(), *found["reasons"]]
        page = found["page"]
    yield f"Page: {page}"


def _prepare(recipe: str, overrides: list[str], output: str | None, **made: Any) -> Iterator[Any]:
    config, page, lang = fullshard.load_config(recipe, overrides), made["page"], made["lang"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(output or Path(temporary) / "prepared")
        audit, path = made["audit"] or page or lang != "en", Path(page or Path(output or "") / "audit.html")
        make = partial(fullshard.audit_data, page_path=path, lang=lang) if audit else fullshard.prepare_data
        with resolve_name("fullshard.data.prepared:rows_bar")() as progress:
            result = make(config, folder, progress=progress)
        yield result
        from fullshard.data import chat, prepared
        from fullshard.model.fetch import with_model_folder

        tokenizer = chat.load_tokenizer(with_model_folder(config, weights=False).model.path, config.model.add_tokens)
        yield from [*result["report"], *prepared.preview(folder, "train", tokenizer, made["show"])]
        if audit:
            for title, *table in resolve_name("fullshard.report.page:audit_tables")(result, lang, limit=5):
                yield from _tables(*table, title=title, title_justify="left")
            yield f"Page: {path}"


def _generate(model: str, prompts: list[str], data: str | None, quiet: bool, **options: Any) -> Iterator[Any]:
    if bool(prompts) == bool(data):
        raise UserError("Prompts come from the command line or from --data.", f'fullshard generate {model} "Hello"')
    if data:
        yield (rows := fullshard.answer_file(model, data, **options))
        yield from (json.dumps(row, ensure_ascii=False) for row in rows)
        return
    stream = None if quiet or len(prompts) > 1 else sys.stdout
    answers = fullshard.generate_text(model, prompts, stream=stream, **options)
    yield [{"prompt": prompt, "answer": answer} for prompt, answer in zip(prompts, answers, strict=True)]
    yield from answers if stream is None else ()


def _tables(columns: list[str], rows: list[list[Any]], **options: Any) -> Iterator[Any]:
    """A table, or none where there are no rows."""
    from rich.table import Column, Table
    from rich.text import Text

    if rows:
        sides = ["left" if isinstance(cell, str) else "right" for cell in rows[0]]
        heads = [Column(name, justify=side, overflow="fold") for name, side in zip(columns, sides, strict=False)]
        table = Table(*heads, **options)
        for row in rows:
            table.add_row(*(Text(f"{cell:,}" if isinstance(cell, int) else str(cell)) for cell in row))
        yield table


def _json_text(value: Any) -> str:
    plain = value.to_json() if hasattr(value, "to_json") else asdict(value) if is_dataclass(value) else value
    return json.dumps(plain, indent=2, ensure_ascii=False, default=str)


FUNCTIONS = {"plan": _plan, "eval": _eval, "report": _report, "prepare": _prepare, "generate": _generate}
app.callback()(_command(lambda: iter(()), "version", ""))
for name, verb in TABLE["verbs"].items():
    command = _command(FUNCTIONS.get(name) or partial(_call, verb["call"], verb.get("says")), verb["takes"], name)
    app.command(name, help=verb["help"], rich_help_panel=verb.get("panel"))(command)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 an unexpected error, 2 a problem that the user can solve, 130 Ctrl-C."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # a terminal that knows no Chinese is no reason to fail
    try:
        typer.main.get_command(app).main(args=arguments, prog_name="fullshard")  # exits itself
    except Exception as problem:
        if "--debug" in arguments:
            traceback.print_exc()
        known, code = problem, getattr(problem, "exit_code", 2)
        if isinstance(problem, OSError) and problem.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            known = UserError(f"The disk takes no more: {problem.strerror}.", "Free some of it, then try again.")
        elif isinstance(problem, OSError) and problem.filename is not None:
            known = UserError(f"Cannot use {problem.filename}: {problem.strerror}.", "Check the path and its rights.")
        elif not isinstance(problem, UserError):
            known, code = UserError(f"{type(problem).__name__}: {problem} (run again with --debug)"), 1
        if not known.told:
            print(f"Error: {known.message}", *([f"  -> {known.hint}"] if known.hint else []), sep="\n", file=sys.stderr)
        sys.exit(code)
