"""``fullshard init MODEL DATA``: a recipe for one's own job, proposed from the data's shape and the memory here."""

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import StrictUndefined, Template

from fullshard.config import DataSection, RunConfig, config_from_dict
from fullshard.data.chat import Renderer, load_tokenizer
from fullshard.data.sources import Account, Row, iterate_rows
from fullshard.data.workers import BatchRenderer
from fullshard.errors import Blame, ConfigError, PlanError
from fullshard.model.fetch import fetch_model
from fullshard.model.load import read_config
from fullshard.planning import search
from fullshard.planning.plan import Plan, format_bytes, format_minutes
from fullshard.run_folder import free_run

SAMPLED_ROWS = 200  # spread over the file; the longest hundred by characters are measured besides
LONGEST_ROWS = 100
COMFORT = 0.8  # full fine-tuning is proposed where it needs at most this share of the memory
ROUNDING = 32  # max_length is a multiple


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
    facts |= {"shapes": ", ".join(account.shapes), "rate": _config_of(values, method).learning_rate}
    facts |= {"minutes": format_minutes, "bytes": format_bytes}
    template = Template(Path(__file__).with_suffix(".txt").read_text(encoding="utf-8"), undefined=StrictUndefined)
    text = template.render(facts, quote=lambda value: json.dumps(value, ensure_ascii=False))  # which writes no tab
    lines = [line.split("\t") for line in text.split("\n")]
    width = min(44, max(len(left) for left, *note in lines if note))
    return "\n".join("  # ".join([left.ljust(width), *note]) if note else left for left, *note in lines) + "\n", path


def measure_lengths(rows: list[Row], renderer: Any, positions: int | None) -> dict[str, Any]:
    """Token lengths of a sample that holds the longest rows by characters: ``longest``, ``mean``, how many are
    ``over_limit`` of the model's positions, and the ``max_length`` that follows."""
    by_size = sorted(range(len(rows)), key=lambda number: -len(rows[number].content))[:LONGEST_ROWS]
    spread = np.linspace(0, len(rows) - 1, min(SAMPLED_ROWS, len(rows))).astype(int).tolist()
    numbers = sorted({*by_size, *spread})
    rendered = BatchRenderer(renderer).render(rows[number] for number in numbers)
    measured = {n: max(len(part.ids) for part in parts) for n, (_, parts) in zip(numbers, rendered, strict=True)}
    longest = max(measured.values())
    max_length = min(max(1, math.ceil(longest / ROUNDING)) * ROUNDING, positions or 2**24)
    mean, over = np.mean([measured[number] for number in spread]), sum(n > max_length for n in measured.values())
    return {"longest": longest, "mean": float(mean), "over_limit": over, "max_length": max_length}


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


def choose_method(values: dict[str, Any]) -> tuple[str, Plan | None, Plan | None]:
    """full where it fits in comfort, else lora; its plan, and that of the other way (None: that does not fit)."""
    full, lora = _plan_of(values, "full"), _plan_of(values, "lora")
    in_comfort = full is not None and full.peak_bytes <= COMFORT * full.usable_bytes
    return ("full", full, lora) if in_comfort else ("lora", lora, full)


def _config_of(values: dict[str, Any], method: str) -> RunConfig:
    return config_from_dict(values | {"method": method}, "proposed recipe")


def _plan_of(values: dict[str, Any], method: str) -> Plan | None:
    with suppress(PlanError):
        return search.make_plan(_config_of(values, method))
