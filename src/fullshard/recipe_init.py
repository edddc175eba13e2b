"""``fullshard init MODEL DATA``: a recipe for one's own job, proposed from the data's shape and the memory here."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fullshard.config import DataSection, RunConfig, config_from_dict
from fullshard.data.sources import Row, Source, read_source
from fullshard.errors import ConfigError, PlanError

if TYPE_CHECKING:
    from fullshard.planning.plan import Plan

DEFAULT_RECIPE = "recipe.yaml"
SAMPLED_ROWS = 200  # spread over the file; the longest hundred by characters are measured besides
LONGEST_ROWS = 100
COMFORT = 0.8  # full fine-tuning is proposed where it needs at most this share of the memory
ROUNDING = 32  # max_length is a multiple


@dataclass(frozen=True)
class Lengths:
    """What the sample says of the rows' tokens."""

    longest: int
    mean: float
    over_limit: int  # sampled rows over the model's positions
    max_length: int  # proposed


def write_recipe(model: str | Path, data: str | Path, output: str | Path | None = None) -> str:
    """Propose a recipe, write it to ``output`` (default recipe.yaml) and return what to print.

    Nothing is overwritten: ConfigError where the file exists or cannot be written.
    """
    text, path = propose_recipe(model, data, output)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(
            f"The recipe {path} cannot be written: {error.strerror}.", "Name another: --output FILE"
        ) from None
    return f"{text}\nWritten to {path}. Next: fullshard plan {path}, then: fullshard train {path}"


def propose_recipe(model: str | Path, data: str | Path, output: str | Path | None = None) -> tuple[str, Path]:
    """A commented recipe of at most 15 lines and the path it is meant for; nothing is written.

    Raises ConfigError where that path exists, ModelError for a missing or incomplete model folder, DataError for data
    that is missing, empty or of no known shape.
    """
    from fullshard.data.chat import Renderer, load_tokenizer
    from fullshard.model.fetch import fetch_model
    from fullshard.model.load import read_config

    path = Path(output or DEFAULT_RECIPE)
    if path.exists():
        raise ConfigError(f"The recipe {path} exists already.", "Name another: --output FILE")
    is_local = Path(model).expanduser().is_dir()
    folder = fetch_model(model, weights=is_local)
    source = read_source(str(data), DataSection(train=str(data)))
    positions = getattr(read_config(folder).get_text_config(), "max_position_embeddings", None)
    lengths = measure_lengths(source.rows, Renderer(load_tokenizer(folder)), positions)
    values = _values(folder if is_local else model, Path(data), source, lengths)
    method, why, plan = choose_method(values)
    return _write_out(values | {"method": method}, source, lengths, why, plan), path


def measure_lengths(rows: list[Row], renderer: Any, positions: int | None) -> Lengths:
    """Token lengths of a sample that holds the longest rows by characters, and the max_length that follows."""
    by_size = sorted(range(len(rows)), key=lambda number: -len(rows[number].content))[:LONGEST_ROWS]
    spread = np.linspace(0, len(rows) - 1, min(SAMPLED_ROWS, len(rows))).astype(int).tolist()

    def count(number: int) -> int:
        return max(len(part.ids) for part in renderer.row(rows[number]))

    measured = {number: count(number) for number in {*by_size, *spread}}
    longest = max(measured.values())
    rounded = max(ROUNDING, math.ceil(longest / ROUNDING) * ROUNDING)
    max_length = min(rounded, positions) if positions else rounded
    over = sum(length > max_length for length in measured.values())
    mean = sum(measured[number] for number in spread) / len(spread)
    return Lengths(longest, mean, over, max_length)


def choose_eval(num_rows: int) -> float | None:
    """Share of the rows to set apart: about 5 %, ten rows of a small file, at most 2,000; none below 10 rows."""
    if num_rows < 10:
        return None
    if num_rows < 200:
        return min(0.2, round(10 / num_rows, 2))
    return 0.05 if num_rows <= 40_000 else max(0.0001, float(f"{2000 / num_rows:.1g}"))


def choose_batch(num_rows: int) -> int:
    """Rows a step: a power of two that leaves about twenty steps an epoch, between 4 and 32."""
    return 2 ** int(min(5, max(2, math.log2(max(1, num_rows / 20)))))


def choose_method(values: dict[str, Any]) -> tuple[str, str, Plan | None]:
    """full where it fits in comfort, else lora: (method, the reason with figures, its plan or None if none fits)."""
    from fullshard.planning.plan import format_bytes

    full, lora = _plan_of(values, "full"), _plan_of(values, "lora")
    if full is not None and full.peak_bytes <= COMFORT * full.usable_bytes:
        beside = f"; lora: {format_bytes(lora.peak_bytes)}" if lora is not None else ""
        needs = f"{format_bytes(full.peak_bytes)} of {format_bytes(full.usable_bytes)}"
        return "full", f"all weights; needs {needs} a rank{beside}", full
    if lora is None:
        return "lora", "does not fit this machine as it is: fullshard plan says what would", None
    needs = f"{format_bytes(lora.peak_bytes)} of {format_bytes(lora.usable_bytes)} a rank"
    beside = f"full: {format_bytes(full.peak_bytes)}" if full is not None else "full does not fit"
    return "lora", f"adapters only; needs {needs}; {beside}", lora


def _plan_of(values: dict[str, Any], method: str) -> Plan | None:
    from fullshard.planning.search import make_plan

    try:
        return make_plan(_config(values | {"method": method}))
    except PlanError:
        return None


def _config(values: dict[str, Any]) -> RunConfig:
    return config_from_dict(values, "proposed recipe")


def _values(model: str | Path, data: Path, source: Source, lengths: Lengths) -> dict[str, Any]:
    num_rows = len(source.rows)
    section: dict[str, Any] = {"train": str(data), "eval": choose_eval(num_rows), "max_length": lengths.max_length}
    if lengths.over_limit:
        section["too_long"] = "drop"
    train = {"epochs": 3 if num_rows < 2000 else 1, "global_batch": f"{choose_batch(num_rows)} rows"}
    return {"model": {"path": str(model)}, "data": section, "train": train, "output": str(_free_run(data.stem))}


def _free_run(stem: str) -> Path:
    """A run folder that does not exist yet."""
    run = Path("runs") / stem
    number = 2
    while run.exists():
        run, number = Path("runs") / f"{stem}-{number}", number + 1
    return run


def _write_out(values: dict[str, Any], source: Source, lengths: Lengths, why: str, plan: Plan | None) -> str:
    """The recipe as text; JSON strings are YAML strings, so any path is safe."""
    data, train = values["data"], values["train"]
    config = _config(values)
    num_rows = len(source.rows)
    held_out = round(data["eval"] * num_rows) if data["eval"] else 0
    eval_value = data["eval"] if data["eval"] else "null"
    eval_note = f"about {held_out:,} rows set apart, never trained on" if held_out else "too few rows to set some apart"
    steps = f"{plan.num_steps:,} steps in all" if plan is not None else "documents of one step"
    lines: list[tuple[str, str]] = [
        (f"# Every key: fullshard train --schema. Plan: {_plan_words(plan)}", ""),
        (f"model: {{path: {_quote(values['model']['path'])}}}", ""),
        ("data:", ""),
        (f"  train: {_quote(data['train'])}", f"{num_rows:,} rows, read as {source.shape}"),
        (f"  eval: {eval_value}", eval_note),
        (
            f"  max_length: {data['max_length']}",
            f"tokens; longest sampled row {lengths.longest:,}, mean {lengths.mean:.0f}",
        ),
    ]
    if lengths.over_limit:
        lines.append(("  too_long: drop", f"{lengths.over_limit} sampled rows are longer than the model's positions"))
    lines += [
        (f"method: {values['method']}", why),
        ("train:", ""),
        (f"  epochs: {train['epochs']}", "passes over the rows"),
        (f"  learning_rate: {config.learning_rate:.1e}", f"the usual start for {values['method']}"),
        (f"  global_batch: {train['global_batch']}", steps),
        (f"output: {_quote(values['output'])}", "the run folder"),
    ]
    width = min(44, max(len(left) for left, note in lines if note))
    return "\n".join(f"{left:<{width}}  # {note}" if note else left for left, note in lines) + "\n"


def _plan_words(plan: Plan | None) -> str:
    from fullshard.planning.plan import format_minutes

    return (
        f"about {format_minutes(plan.seconds_low, plan.seconds_high)} here" if plan is not None else "does not fit yet"
    )


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
