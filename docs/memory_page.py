"""Writes docs/memory.md, docs/memory.zh-CN.md and their figures: python docs/memory_page.py

The text is in docs/templates, where every {name} is a number from here; the numbers come from memory_numbers.py, the
words of tables from memory_words.py, the drawings from memory_figures.py;
tests/product/test_memory_page.py holds that the files are as this script writes them.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import memory_figures
import memory_words
from memory_figures import gigabytes
from memory_numbers import (
    DEVICES,
    OURS,
    RECIPE,
    ROOT,
    ROW_TOKENS,
    STAGES,
    TEXTBOOK,
    Numbers,
    checkpointed_bytes,
    compute,
    gathered_in_a_step,
    job_of,
    line_of,
    plan_of,
    refusal_of,
    sent_bytes,
    stage_bytes,
    unfused_bytes,
    working_bytes,
)

from fullshard.planning.memory import DEVICE_CONTEXT_BYTES, MOMENTS, SLACK, largest_unit
from fullshard.planning.plan import format_bytes
from fullshard.planning.search import USABLE_SHARE

# What the page plans besides the recipe as it is: overrides and cards.
VARIANTS = (
    ((), DEVICES),
    ((), "4xa800-80g"),
    (("train.global_batch=512 rows",), DEVICES),
    (("data.max_length=16384",), DEVICES),
    (("train.optimizer=sgd",), DEVICES),
    (("method=lora",), DEVICES),
    ((), "8x910b3-64g"),
    (("method=lora",), "4x4090"),
)
REFUSED = ((("train.recompute=none", "data.max_length=16384"), DEVICES), ((), "1xa800-80g"))


def command(overrides: tuple[str, ...], devices: str) -> str:
    """The command line of a plan."""
    words = [f'"{word}"' if " " in word else word for word in overrides]
    return " ".join(["fullshard plan", RECIPE, *words, "--devices", devices])


def versions() -> dict[str, str]:
    """Versions that the measured numbers were made with: those of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {name: pinned[name] for name in ("torch", "transformers")}


def rows(*cells: tuple[object, ...]) -> str:
    """Lines of a Markdown table."""
    return "\n".join("| " + " | ".join(str(cell) for cell in row) + " |" for row in cells)


def state_numbers(numbers: Numbers) -> dict[str, object]:
    """Sections 1 and 2: states, stages and what crosses the wire."""
    shape, ranks, size = numbers.shape, numbers.plan.ranks, numbers.shape.parameters
    gathered = gathered_in_a_step(shape)
    stages = []
    for stage, (_, worth) in STAGES.items():
        held = sum(stage_bytes(stage, size, ranks).values())
        stages.append((stage, gigabytes(held), worth, gigabytes(sent_bytes(worth, size, ranks, 2))))
    paper = [sum(stage_bytes(stage, 7.5e9, 64).values()) for stage in STAGES]
    gather, reduce = sent_bytes(1, gathered, ranks, 2), sent_bytes(1, size, ranks, 4)
    return {
        "book": TEXTBOOK,
        "ours": OURS,
        "book_sum": sum(TEXTBOOK.values()),
        "ours_sum": sum(OURS.values()),
        "compute_bytes": job_of(numbers.plan).compute_bytes,
        "third": f"{STAGES['ZeRO-3'][1] / STAGES['DDP'][1]:.1f}",
        "size": f"{size:,}",
        "ranks": ranks,
        "sixteen": gigabytes(16 * size),
        "sixteen_share": gigabytes(16 * size / ranks),
        "card": gigabytes(numbers.card_bytes),
        "stages": stages,
        "paper": ", ".join(f"{held / 1e9:.1f}" for held in paper),
        "gathered_worth": f"{gathered / size:.2f}",
        "gather": gigabytes(gather),
        "reduce": gigabytes(reduce),
        "sent": gigabytes(gather + reduce),
        "sent_ddp_half": gigabytes(sent_bytes(2, size, ranks, 2)),
        "sent_ddp_full": gigabytes(sent_bytes(2, size, ranks, 4)),
        "kept_gradients": gigabytes(4 * size),
    }


def residual_numbers(numbers: Numbers) -> dict[str, object]:
    """Section 3: activations, buffers, and the largest operator."""
    shape, plan = numbers.shape, numbers.plan
    hidden, heads, layers, row = shape.hidden_size, shape.num_heads, shape.num_layers, ROW_TOKENS
    tokens, sdpa, packed = plan.micro_batch[0], sum(numbers.sdpa.values()), sum(numbers.packed.values())
    # What a mask brings: keys and values for every head, and a 16-bit mask for each block.
    repeated = 4 * (shape.attention_width - shape.key_value_width)
    assert packed - sdpa == row * (repeated + 2 * row)
    intervals = []
    for interval in (1, 2, 4):
        inputs = checkpointed_bytes(tokens, hidden, layers, interval)
        working = tokens // row * sdpa * interval
        intervals.append((interval, gigabytes(inputs), gigabytes(working), gigabytes(inputs + working)))
    per_token = {f"token_{kind}": f"{size // row:,}" for kind, size in numbers.sdpa.items()}
    return per_token | {
        "row": f"{row:,}",
        "hidden": f"{hidden:,}",
        "heads": heads,
        "layers": layers,
        "micro_tokens": f"{tokens:,}",
        "micro_rows": tokens // row,
        "infinity": gigabytes(working_bytes(row, row, hidden, heads, 1)),
        "infinity_token": f"{working_bytes(1, row, hidden, heads, 1):,}",
        "infinity_scores": f"{2 * heads * row:,}",
        "unfused": gigabytes(unfused_bytes(row, row, hidden, heads)),
        "unfused_token": f"{unfused_bytes(1, row, hidden, heads):,}",
        "unfused_scores": f"{5 * heads * row:,}",
        "packed": f"{packed / 1e9:.2f}",
        "packed_token": f"{packed // row:,}",
        "mask_token": f"{2 * row:,}",
        "eager": gigabytes(sum(numbers.eager.values())),
        "eager_token": f"{sum(numbers.eager.values()) // row:,}",
        "eager_scores": f"{numbers.eager['scores'] // row:,}",
        "sdpa": f"{sdpa / 1e9:.2f}",
        "sdpa_token": f"{sdpa // row:,}",
        "sdpa_widths": f"{sdpa / row / hidden:.1f}",
        "traced_token": f"{line_of(numbers.plan, 'recomputed block').bytes // tokens:,}",
        "predicted_token": f"{numbers.predicted_block_bytes // row:,}",
        "predicted_more": f"{numbers.predicted_block_bytes / sdpa - 1:.1%}",
        "repeated": f"{repeated:,}",
        "all_blocks": gigabytes(tokens // row * sdpa * layers),
        "intervals": rows(*intervals),
        "full_logits": gigabytes(4 * tokens * shape.vocab_size),
        "logits": format_bytes(line_of(plan, "logits chunk").bytes),
        "logits_rows": line_of(plan, "logits chunk").formula.split(" x ")[0],
        "operator": format_bytes(4 * hidden * 4 * hidden),
        "unit_weights": format_bytes(2 * largest_unit(shape)),
        "unit_gradients": format_bytes(4 * largest_unit(shape)),
        "block_weights": format_bytes(2 * shape.block),
        "slack_share": f"{SLACK:.0%}",
    }


def model_numbers(numbers: Numbers) -> dict[str, object]:
    """Section 4: 12 L h^2 beside the count."""
    table = []
    for counted in numbers.models:
        shape = counted.shape
        matrices = f"{counted.attention:.2f} + {counted.mlp:.2f} = {counted.attention + counted.mlp:.2f}"
        counts = (f"{counted.formula:,}", f"{shape.blocks:,}", f"{shape.parameters:,}")
        wrong = f"{counted.formula / shape.blocks - 1:+.1%}", f"{counted.formula / shape.parameters - 1:+.1%}"
        table.append((counted.model, shape.num_layers, f"{shape.hidden_size:,}", matrices, *counts, *wrong))
    shape, counted = numbers.shape, numbers.models[0]
    wide, narrow = shape.attention_width / shape.hidden_size, shape.key_value_width / shape.hidden_size
    return {
        "attention": f"{wide:g} + {wide:g} + {narrow:g} + {narrow:g} = {counted.attention:g}",
        "mlp_widths": f"{counted.mlp / 3:g}",
        "mlp": f"{counted.mlp:g}",
        "block_widths": f"{counted.attention + counted.mlp:g}",
        "models": rows(*table),
        "formula": f"{numbers.models[0].formula:,}",
        "key_share": f"{shape.key_value_width:,} / {shape.hidden_size:,}",
        "vocabulary": f"{shape.vocab_size:,}",
        "outside": f"{shape.embedding + shape.head:,}",
        "outside_share": f"{(shape.embedding + shape.head) / shape.parameters:.1%}",
    }


def plan_numbers(numbers: Numbers, words: dict) -> dict[str, object]:
    """Section 5: the plan line by line, its moments, and other plans."""
    plan, highest = numbers.plan, max(numbers.moments, key=lambda moment: moment.total)
    sums = dict.fromkeys(MOMENTS, 0)
    for line in plan.lines:
        sums[line.when] += line.bytes
    causes = [
        (line.cause, format_bytes(line.bytes), words["when"][line.when], words["causes"][line.cause])
        for line in plan.lines
    ]
    variants = []
    for overrides, devices in VARIANTS:
        other = plan_of(*overrides, devices=devices)
        kept = next((line.bytes for line in other.lines if line.cause == "kept gradients"), 0)
        variants.append(
            (
                f"`{' '.join((*overrides, '--devices ' + devices))}`",
                words["recomputed"] if other.recompute else words["kept"],
                f"{other.micro_batches} x {other.micro_batch[0]:,}",
                format_bytes(kept) if kept else "-",
                format_bytes(other.peak_bytes),
                format_bytes(other.usable_bytes),
            )
        )
    counted = {line.cause: line.bytes for line in plan.lines}
    more = {
        "gradients": -highest.live["gradients"],
        "gathered": counted["gathered weights"] - highest.live["gathered"],
        "mask": counted["around the blocks"],
        "slack": counted["allocator slack"],
        "inputs": counted["block inputs"] - highest.live["inputs"],
    }
    assert plan.moments["train"] - highest.total == sum(more.values())
    return {
        "command": command((), DEVICES),
        "report": plan.to_text(),
        "causes": rows(*causes),
        "always": gigabytes(sums["always"]),
        "passing": gigabytes(sums["backward"] + max(sums["head"], sums["block"])),
        "at_end": gigabytes(sums["late"]),
        "train": gigabytes(plan.moments["train"]),
        "usable": gigabytes(plan.usable_bytes),
        "usable_share": f"{USABLE_SHARE:.0%}",
        "highest": gigabytes(highest.total),
        "highest_unit": highest.unit.removeprefix("block "),
        **{f"more_{name}": f"{size / 1e9:.2f}" for name, size in more.items()},
        **{f"peak_{moment}": gigabytes(size) for moment, size in plan.moments.items()},
        "context": format_bytes(DEVICE_CONTEXT_BYTES),
        "variants": rows(*variants),
        "commands": "\n".join(command(*variant) for variant in VARIANTS[1:]),
        "refusals": "\n".join(
            f"$ {command(overrides, devices)}\n{refusal_of(*overrides, devices=devices)}"
            for overrides, devices in REFUSED
        ),
    }


def page(numbers: Numbers, template: str, words: dict) -> str:
    """The page in one language."""
    values = state_numbers(numbers) | residual_numbers(numbers) | model_numbers(numbers)
    values |= plan_numbers(numbers, words) | versions()
    divided = words["divided"]
    values["stages"] = rows(*[(stage, divided[stage], *rest) for stage, *rest in values["stages"]])
    return template.format(**values)


def pages() -> dict[Path, str]:
    """Both pages and all figures by their file."""
    numbers, docs = compute(), ROOT / "docs"
    found = {}
    for ending, words, labels in (
        ("", memory_words.ENGLISH, memory_figures.ENGLISH),
        (".zh-CN", memory_words.CHINESE, memory_figures.CHINESE),
    ):
        template = (docs / "templates" / f"memory{ending}.md").read_text(encoding="utf-8")
        found[docs / f"memory{ending}.md"] = page(numbers, template, words)
        for name, drawing in memory_figures.figures(numbers, labels).items():
            found[docs / "figures" / f"{name}{ending}.svg"] = drawing
    return found


if __name__ == "__main__":
    for path, text in pages().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path)
