"""The figures of docs/memory.md, each computed from a formula or measured here; memory_page.py puts them into words.

Bytes throughout. N parameters, W ranks, h width, s tokens of a row, a attention heads, L blocks.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fullshard
from fullshard.errors import PlanError
from fullshard.planning.hardware import parse_devices
from fullshard.planning.memory import Job, Line, block_bytes_per_token
from fullshard.planning.plan import Plan
from fullshard.planning.shape import ModelShape, build_for_plan, shape_of, shipped_config

ROOT = Path(__file__).parents[1]
MODEL = "Qwen/Qwen3-8B"
RECIPE = "examples/qwen3_8b_full_8xa800.yaml"
DEVICES = "8xa800-80g"
SHIPPED = ("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B", "Qwen/Qwen2.5-7B")
ROW_TOKENS = 4096  # data.max_length of the recipe: one row is the batch of the activation formulas

# The textbook's bytes a parameter (ZeRO, section 3.1): what is held, by part.
TEXTBOOK = {"weights": 2, "gradients": 2, "copy": 4, "momentum": 4, "variance": 4}
OURS = {"copy": 4, "gradients": 4, "momentum": 4, "variance": 4}
# Which parts each stage divides over the ranks, and how many parameters' worth a rank sends a step.
STAGES = {
    "DDP": ((), 2),
    "ZeRO-1": (("copy", "momentum", "variance"), 2),
    "ZeRO-2": (("copy", "momentum", "variance", "gradients"), 2),
    "ZeRO-3": (("copy", "momentum", "variance", "gradients", "weights"), 3),
}


def stage_bytes(stage: str, parameters: float, ranks: int) -> dict[str, float]:
    """Bytes of model states on one rank, by part, in the textbook's precision."""
    divided = STAGES[stage][0]
    return {part: size * parameters / (ranks if part in divided else 1) for part, size in TEXTBOOK.items()}


def sent_bytes(worth: float, parameters: float, ranks: int, bytes_each: int) -> float:
    """Bytes that one rank sends for ``worth`` x ``parameters`` values, in ring collectives: (W - 1) / W of them."""
    return worth * parameters * bytes_each * (ranks - 1) / ranks


def gathered_in_a_step(shape: ModelShape, micro_batches: int = 1) -> int:
    """Parameters that the torch engine gathers in a step: blocks twice a micro-batch, embedding and [norm, head] once.

    For models whose head is a matrix of its own.
    """
    assert not shape.tied
    return micro_batches * (2 * shape.blocks + shape.embedding + shape.head)


def checkpointed_bytes(tokens: int, hidden: int, layers: int, interval: int) -> int:
    """ZeRO-Infinity: 2 x batch x seq x hidden x layers / interval."""
    return 2 * tokens * hidden * layers // interval


def working_bytes(tokens: int, row: int, hidden: int, heads: int, interval: int) -> int:
    """ZeRO-Infinity: batch x seq x interval x (16 x hidden + 2 x heads x seq)."""
    return tokens * interval * (16 * hidden + 2 * heads * row)


def unfused_bytes(tokens: int, row: int, hidden: int, heads: int) -> int:
    """Korthikanti et al.: s b h (34 + 5 a s / h) for one block, in 16 bits, dropout masks included."""
    return 34 * tokens * hidden + 5 * tokens * heads * row


def measured_block_bytes(
    config: dict[str, Any], attention: str, tokens: int, packed: bool = False, fake: bool = True
) -> dict[str, int]:
    """What autograd keeps of one block's forward on one row, in bf16, by what it is (see ``_kind``).

    ``packed``: with the mask that packed documents need. ``fake``: on torch's fake CPU tensors, which have shapes and
    no data, so that a block of any size costs nothing. What all blocks share (rotary tables, the mask that
    transformers makes) and the weights are left out.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    one = AutoConfig.for_model(**(config | {"num_hidden_layers": 1, "vocab_size": 64}), attn_implementation=attention)
    with FakeTensorMode() if fake else contextlib.nullcontext(), no_init_weights():
        decoder = AutoModelForCausalLM.from_config(one, dtype=torch.bfloat16).model
        hidden = torch.zeros(1, tokens, one.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        tables = decoder.rotary_emb(hidden, torch.arange(tokens)[None])
        mask = None  # as transformers makes it: none for SDPA on whole rows, of truth values where rows are packed
        if attention == "eager" or packed:
            mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool if packed else torch.bfloat16)
        shared = [*decoder.parameters(), *tables, *([mask] if mask is not None else [])]
        ignored = {tensor.untyped_storage()._cdata for tensor in shared}
        kept: dict[int, tuple[str, int, Any]] = {}

        def keep(tensor):
            storage = tensor.untyped_storage()
            if storage._cdata not in ignored:
                elements = storage.nbytes() / tensor.dtype.itemsize / tokens
                kept[storage._cdata] = (_kind(elements, tensor.dtype.itemsize, one, tokens), storage.nbytes(), tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            decoder.layers[0](hidden, attention_mask=mask, position_embeddings=tables)
    found: dict[str, int] = {}
    for kind, size, _ in kept.values():
        found[kind] = found.get(kind, 0) + size
    return found


def _kind(elements: float, itemsize: int, config: Any, tokens: int) -> str:
    """Of a kept tensor, by its elements a token: scores are rows x rows, statistics one number a head, norms fp32."""
    if elements == config.intermediate_size:
        return "mlp"
    if elements >= config.num_attention_heads * tokens:
        return "scores"
    if itemsize == 4:
        return "statistics" if elements <= config.num_attention_heads else "norms"
    return "tensors"


@dataclass(frozen=True)
class Counted:
    """12 L h^2 beside what a model really has. ``attention`` and ``mlp``: matrices of a block in units of h^2."""

    model: str
    shape: ModelShape
    formula: int
    attention: float
    mlp: float


def count_model(model: str) -> Counted:
    """Count a shipped model on the meta device."""
    shape = shape_of(build_for_plan(model))
    hidden = shape.hidden_size
    attention = (2 * shape.attention_width + 2 * shape.key_value_width) / hidden
    return Counted(model, shape, 12 * shape.num_layers * hidden**2, attention, 3 * shape.intermediate_size / hidden)


def shipped_settings(model: str) -> dict[str, Any]:
    """The settings of a config that fullshard ships."""
    return json.loads(shipped_config(model).read_text(encoding="utf-8"))["config"]


def plan_of(*overrides: str, devices: str = DEVICES) -> Plan:
    """The plan of the recipe with overrides, on cards that need not be here. Data files are taken as missing."""
    config = fullshard.load_config(ROOT / RECIPE, list(overrides))
    return fullshard.make_plan(config, devices=devices, rows=10_000)


def refusal_of(*overrides: str, devices: str = DEVICES) -> str:
    """What the command line says where the job does not fit."""
    try:
        plan_of(*overrides, devices=devices)
    except PlanError as error:
        return f"Error: {error.message}\n  -> {error.hint}"
    raise AssertionError(f"{overrides} on {devices} fits: the page says that it does not")


def job_of(plan: Plan) -> Job:
    """The planner's job behind a full plan, for the timeline."""
    return Job(
        method="full",
        optimizer="adamw",
        num_ranks=plan.ranks,
        precision="bf16",
        micro_tokens=plan.micro_batch[0],
        longest=plan.longest,
        recompute=plan.recompute,
        accumulates=plan.micro_batches > 1,
        adapters=0,
        on_cpu=False,
    )


@dataclass(frozen=True)
class Moment:
    """One unit's turn in a step. ``phase``: rest | forward | backward | step."""

    phase: str
    unit: str
    live: dict[str, int]

    @property
    def total(self) -> int:
        """Live bytes of the rank."""
        return sum(self.live.values())


def step_moments(shape: ModelShape, job: Job, lines: dict[str, int]) -> list[Moment]:
    """Live bytes of one rank, unit by unit, in a step of one micro-batch with recomputation; ``lines``: the plan's.

    The planner's causes, each where it lives: the unit in use and the next one are gathered, the head from its forward
    to its backward; block inputs come in forward and go in backward; the reduction's buffer holds the larger of this
    unit's and the one on its way; gradient shards grow.
    """
    assert job.recompute and not job.accumulates and not shape.tied
    ranks, compute = job.num_ranks, job.compute_bytes
    units = [("embedding", shape.embedding), *[(f"block {i + 1}", shape.block) for i in range(shape.num_layers)]]
    units.append(("head", shape.head))
    fixed = {"masters": lines["fp32 masters"], "moments": lines["optimizer state"], "context": lines["device context"]}
    one_input = lines["block inputs"] // shape.num_layers
    moments = [Moment("rest", "", dict(fixed))]

    def gathered(index: int, neighbour: int) -> int:
        return compute * sum(units[i][1] for i in (index, neighbour) if 0 <= i < len(units))

    for index, (name, _) in enumerate(units):
        live = {**fixed, "gathered": gathered(index, index + 1), "inputs": one_input * min(index, shape.num_layers)}
        if name == "head":
            live["logits"] = lines["logits chunk"]
        moments.append(Moment("forward", name, live))
    reduced = 0
    for index in range(len(units) - 1, -1, -1):
        name, size = units[index]
        before = units[index + 1][1] if index + 1 < len(units) else 0
        reduced += size
        live = {**fixed, "gathered": gathered(index, index - 1), "inputs": one_input * min(index, shape.num_layers)}
        live |= {"reduction": 4 * max(size, before), "gradients": -(-4 * reduced // ranks)}
        live |= {"logits": lines["logits chunk"]} if name == "head" else {}
        live |= {"recomputed": lines["recomputed block"]} if name.startswith("block") else {}
        moments.append(Moment("backward", name, live))
    update = {"gradients": lines["fp32 gradients"]}
    return [*moments, Moment("step", "", fixed | update), Moment("rest", "", dict(fixed))]


def line_of(plan: Plan, cause: str) -> Line:
    """A plan's line by its cause."""
    return next(line for line in plan.lines if line.cause == cause)


@dataclass(frozen=True)
class Numbers:
    """Everything that the pages and the figures show."""

    models: tuple[Counted, ...]
    plan: Plan
    moments: tuple[Moment, ...]
    sdpa: dict[str, int]  # what one block keeps of one row, by kind
    packed: dict[str, int]  # SDPA with a mask
    eager: dict[str, int]
    card_bytes: int

    @property
    def shape(self) -> ModelShape:
        """The page's model."""
        return self.models[0].shape

    @property
    def predicted_block_bytes(self) -> int:
        """The planner's formula for one block and one row."""
        return ROW_TOKENS * block_bytes_per_token(self.shape, 2, ROW_TOKENS)


def compute() -> Numbers:
    """All numbers, in some ten seconds."""
    models = tuple(count_model(model) for model in SHIPPED)
    plan, settings = plan_of(), shipped_settings(MODEL)
    return Numbers(
        models=models,
        plan=plan,
        moments=tuple(step_moments(models[0].shape, job_of(plan), {line.cause: line.bytes for line in plan.lines})),
        sdpa=measured_block_bytes(settings, "sdpa", ROW_TOKENS),
        packed=measured_block_bytes(settings, "sdpa", ROW_TOKENS, packed=True),
        eager=measured_block_bytes(settings, "eager", ROW_TOKENS),
        card_bytes=parse_devices(DEVICES)[1].usable_bytes,
    )
