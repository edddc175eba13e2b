"""Bytes gathered over real bytes: the simple engine's flat layout beside fully_shard's default, from shapes alone.

    python benchmarks/padding.py                 prints the table and writes benchmarks/results/padding_DATE.json

The parameter lists are those of transformers' model classes and of PEFT's adapters on the meta device: no weights are
needed, about a minute. Ours: each unit's parameters of a kind end to end, cut in equal ranges of whole 256 elements.
``fully_shard`` by default cuts every parameter along dimension 0 and pads that to a multiple of the ranks
(torch/distributed/fsdp/_fully_shard/_fsdp_param.py). Adapters: ours are one group of their own.
"""

from __future__ import annotations

import functools
import json
import math
import platform
import sys
from collections.abc import Iterable
from datetime import date
from pathlib import Path

from fullshard.shard.simple.layout import lay_out_group

RESULTS = Path(__file__).parent / "results"
RANKS = (8, 64, 256)
LORA_RANK = 16
LIMIT = 1.03
# From each model's config.json; parameters: its own count, held against the list that the class gives.
MODELS = {
    "Llama-3.1-8B": {
        "source": "config.json of meta-llama/Llama-3.1-8B; "
        "the same in vulkomilev/oumi, configs/recipes/llama3_1/README.md",
        "parameters": 8_030_261_248,
        "config": {
            "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
        },
    },
    "Qwen3-30B-A3B": {
        "source": "config.json of Qwen/Qwen3-30B-A3B; "
        "the same in zyzshishui/slime, scripts/models/qwen3-30B-A3B.sh",
        "parameters": 30_532_122_624,
        "config": {
            "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
            "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_attention_heads": 32,
            "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False,
            "decoder_sparse_step": 1, "mlp_only_layers": [],
        },
    },
    "Mixtral-8x7B": {
        "source": "config.json of mistralai/Mixtral-8x7B-v0.1; "
        "the same in keras-team/keras-hub, src/models/mixtral/README.md",
        "parameters": 46_702_792_704,
        "config": {
            "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_local_experts": 8,
            "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
            "vocab_size": 32000, "tie_word_embeddings": False,
        },
    },
}  # fmt: skip
Shapes = list[tuple[int, ...]]


def ours(shapes: Shapes, num_ranks: int) -> int:
    """Elements that a gather of one group moves in the simple engine."""
    return lay_out_group([(str(place), shape) for place, shape in enumerate(shapes)], num_ranks).total_elements


def fully_sharded(shapes: Shapes, num_ranks: int) -> int:
    """Elements that a gather of the same parameters moves with fully_shard's default placement."""
    return sum(math.ceil(shape[0] / num_ranks) * num_ranks * math.prod(shape[1:]) for shape in shapes)


def real(shapes: Shapes) -> int:
    """Elements that the parameters have."""
    return sum(map(math.prod, shapes))


@functools.cache
def groups_of(name: str) -> tuple[list[Shapes], Shapes]:
    """The shapes of each unit's parameters, and those of the adapters of LoRA with rank 16 on all linear layers."""
    from transformers import AutoConfig

    from fullshard.config import LoraSection
    from fullshard.model.adapters import add_adapters
    from fullshard.model.blocks import find_units
    from fullshard.model.load import build_from_config

    facts = MODELS[name]
    settings = dict(facts["config"])
    model = build_from_config(AutoConfig.for_model(settings.pop("model_type"), **settings), name)
    if (counted := sum(parameter.numel() for parameter in model.parameters())) != facts["parameters"]:
        raise ValueError(f"{name} has {facts['parameters']:,} parameters, its class makes {counted:,}")
    units = [shapes_in(p for module in unit for p in module.parameters()) for unit in find_units(model)]
    add_adapters(model, LoraSection(rank=LORA_RANK))
    return units, shapes_in(p for p in model.parameters() if p.requires_grad)


def shapes_in(parameters: Iterable) -> Shapes:
    return [tuple(parameter.shape) for parameter in parameters]


def ratios(units: list[Shapes], adapters: Shapes, num_ranks: int) -> dict[str, dict[str, float]]:
    """For ``full`` (all units), ``worst`` (the unit with most padding) and ``lora`` (the adapters): gathered / real."""
    found = {}
    for engine, gathered in (("ours", ours), ("fully_shard", fully_sharded)):
        each = [gathered(shapes, num_ranks) / real(shapes) for shapes in units]
        whole = sum(gathered(shapes, num_ranks) for shapes in units) / sum(map(real, units))
        adapted = gathered(adapters, num_ranks) / real(adapters)
        found[engine] = {"full": whole, "worst": max(each), "lora": adapted}
    return found


def compute() -> dict[str, dict]:
    """By model: source, parameters, adapters' parameters, and the ratios by number of ranks."""
    found = {}
    for name, facts in MODELS.items():
        units, adapters = groups_of(name)
        found[name] = {"source": facts["source"], "parameters": facts["parameters"], "adapters": real(adapters)}
        found[name]["ranks"] = {str(ranks): ratios(units, adapters, ranks) for ranks in RANKS}
    return found


def table(models: dict[str, dict], columns: list[str]) -> str:
    """The table as Markdown: per model and ranks, fully_shard beside ours, each for all, the worst unit and LoRA."""
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, facts in models.items():
        for ranks, both in facts["ranks"].items():
            cells = [both[engine][kind] for kind in ("full", "worst", "lora") for engine in ("fully_shard", "ours")]
            lines.append(f"| {name} | {ranks} | {' | '.join(ratio(cell) for cell in cells)} |")
    return "\n".join(lines)


def ratio(value: float) -> str:
    return f"{value:.4f}" if value < 1.1 else f"{value:.2f}"


def main() -> int:
    import torch
    import transformers

    models = compute()
    columns = [
        "model",
        "ranks",
        *(f"{kind}, {e}" for kind in ("all", "worst unit", "LoRA") for e in ("default", "ours")),
    ]
    print(table(models, columns))
    largest = max(
        value for facts in models.values() for both in facts["ranks"].values() for value in both["ours"].values()
    )
    print(f"ours at most {largest:.4f} (limit {LIMIT})")
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    facts = {"topic": "padding", "command": "python benchmarks/padding.py", "date": date.today().isoformat()}
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"padding_{date.today():%Y%m%d}.json"
    path.write_text(json.dumps({**facts, "versions": versions, "models": models}, indent=1) + "\n", encoding="utf-8")
    return int(largest > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
