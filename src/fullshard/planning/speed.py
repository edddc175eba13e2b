"""Time as arithmetic. On a card that is known: the work of each kernel class by the card's facts times the shares of
efficiency.yaml (docs/planning.md has the formulas and the published runs); else by a product that this machine timed."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.utils.benchmark import Timer

from fullshard.device import supports_bf16
from fullshard.planning.hardware import Accelerator
from fullshard.planning.memory import Job, Practice, block_bytes_per_token, own_practice
from fullshard.planning.shape import ModelShape

# Share of the timed product that whole steps reach: by the notes' step costs (engine.md 1.4), by published runs.
CPU_EFFICIENCY = (0.55, 0.95)
DEVICE_EFFICIENCY = (0.25, 0.60)
# gloo on loopback, 2 ranks, fp32 (engine.md 1.3): all-gather 0.7 - 1.2 GB/s, reduce-scatter about 0.5 - 0.75 GB/s.
GLOO_GATHER_BYTES_PER_SECOND = (0.6e9, 1.3e9)
GLOO_REDUCE_BYTES_PER_SECOND = (0.45e9, 0.8e9)
CPU_OPTIMIZER_BYTES_PER_SECOND = (3e9, 8e9)
DEVICE_OPTIMIZER_BYTES_PER_SECOND = (0.5e12, 2e12)
START_SECONDS = (6.0, 15.0)  # imports, ranks, loading the weights of a small model, the trial step
DISK_BYTES_PER_SECOND = (0.2e9, 1.5e9)


@dataclass(frozen=True)
class Rates:
    """Floating-point operations per second of one core (CPU) or one device, in fp32 and bf16 (0.0 without bf16)."""

    fp32: float
    bf16: float
    cores: int  # cores that share the work of a CPU machine; 1 on accelerators
    fp16: float = 0.0  # measured where there is no bf16; else as fast as that


@dataclass(frozen=True)
class StepWork:
    """One rank's work in all steps together."""

    padded_tokens: float  # area laid out on this rank
    supervised_tokens: float
    mean_length: float
    num_micro_batches: float
    num_steps: float
    evaluated_tokens: float  # padded tokens of forward-only passes


@dataclass(frozen=True)
class Run:
    """What besides shape and job decides a known card's speed; the defaults are fullshard's."""

    length: float  # mean tokens of a row
    tokens: float  # of a micro-batch, padding included
    head_tokens: float  # of those, with logits
    accumulation: float = 1.0  # micro-batches a step
    devices: int = 1
    nodes: int = 1
    link_bytes_per_second: float | None = None  # inside a node; None: the card's
    node_bytes_per_second: float | None = None  # one device's to other nodes; None: as such machines are usually built
    kernels: str = "plain"  # plain | fused | compiled: elementwise kernels, by efficiency.yaml
    attention: str = "flash2"  # flash1 | flash2 | flash3
    again: float | None = None  # share of the block's products that recomputation repeats; None: all of recomputed blocks
    adapted: int = 0  # input and output features of a block's adapted layers
    units: int = 1  # sharding units of a block
    host_seconds: float = 0.0  # of a step: states or gradients that pass through host memory


@functools.cache
def efficiency() -> dict[str, Any]:
    """The fitted shares; docs/planning.md says how they were found."""
    return yaml.safe_load(Path(__file__).with_name("efficiency.yaml").read_text(encoding="utf-8"))


def micro_batch_seconds(
    shape: ModelShape, job: Job, card: Accelerator, run: Run, does: Practice | None = None, shares: Any = None
) -> dict[str, float]:
    """Seconds of one micro-batch by kernel class, with its part of the step, and their ``total``, overlap taken off."""
    does, shares, layers = does or own_practice(job), shares or efficiency(), shape.num_layers
    family, is_full, memory = shares["families"][card.family], job.method == "full", card.memory_bytes_per_second
    peak = card.flops.get(job.precision.split("_")[0], card.flops.get("fp16", 0.0))
    blocks = job.recomputed(layers) / layers
    again, passes = blocks if run.again is None else run.again, 3 if is_full else 2
    products = 2 * run.tokens * shape.active_block_matrices * (passes + again)
    products += 2 * run.head_tokens * shape.head_matrix * passes
    scores = 2 * run.tokens * run.length * shape.attention_width * layers * (3.5 + blocks * (run.again is None))  # causal
    wide = shape.hidden_size / (shape.hidden_size + shares["width"])  # narrow matrices fill a card worse
    scores /= shares["small_heads"] if shape.attention_width <= 64 * shape.num_heads else 1
    moved = block_bytes_per_token(shape, job.compute_bytes, 0) * shares["kernels"][run.kernels]
    moved = run.tokens * layers * (3 + blocks) * (moved + 2 * run.adapted * shares["kernels"]["adapter"])
    latency = shares["unit"] + shares["hop"] * job.num_ranks  # of one collective: its launch, and a ring through all ranks
    trained = shape.parameters / job.num_ranks if is_full else job.adapters
    touched = trained * (2 * (does.weight + does.states) + 3 * does.gradient) * shares["optimizer"]
    logits = 3 * run.head_tokens * shape.vocab_size * does.logit
    seconds = {
        "matrices": products / (peak * card.reachable * family["matrices"] * wide),
        "attention": scores / (peak * card.reachable * family[run.attention]),
        "elementwise": (moved + logits) / memory,
        "launches": layers * (shares["block"] + 3 * run.units * latency * (job.num_ranks > 1)),
        "optimizer": touched / memory / run.accumulation + run.host_seconds / run.accumulation,
        "wire": wire_of_card(shape, job, card, run, does, shares),
    }
    busy = sum(seconds.values()) - seconds["wire"] - seconds["optimizer"]
    return seconds | {"total": sum(seconds.values()) - shares["overlap"] * min(busy, seconds["wire"])}


def wire_of_card(shape: ModelShape, job: Job, card: Accelerator, run: Run, does: Practice, shares: Any) -> float:
    """Seconds on the links for a micro-batch: rings inside a node and, at the same time, across nodes; the slower counts."""
    inside = -(-run.devices // run.nodes)  # devices of a node
    gathers = (1 if does.gathers_all else 2) * job.compute_bytes * shape.parameters * (job.num_ranks > 1)
    reduced = (does.reduced or 4) * (shape.parameters if job.method == "full" else job.adapters)
    reduced /= run.accumulation if job.accumulates else 1
    link = run.link_bytes_per_second or card.link_bytes_per_second
    link *= shares["link" if link > 64e9 else "bus"]  # NVLink and the like, or PCIe
    node = run.node_bytes_per_second or card.node_bytes_per_second
    cut_inside, cut_nodes = min(job.num_ranks, inside), max(1, job.num_ranks // inside)
    near = (gathers + reduced) * (1 - 1 / cut_inside) / link
    far = (gathers + reduced) * (1 - 1 / cut_nodes) / (node * inside * shares["node"])
    if job.num_ranks < run.devices:  # replicas add their gradients: across nodes, or inside where nothing is cut
        copies = run.devices // job.num_ranks
        rate = link if run.nodes == 1 else node * inside * shares["node"]
        far = max(far, 2 * reduced * (1 - 1 / copies) / rate)
    return max(near, far)


@functools.cache
def measure_rates(kind: str, cores: int) -> Rates:
    """Time one product in fp32 and bf16, on one thread or one device. Under half a second on a CPU; cached."""
    bf16 = timed_product(torch.bfloat16, kind) if supports_bf16() else 0.0
    fp16 = 0.0 if bf16 else timed_product(torch.float16, kind)
    return Rates(timed_product(torch.float32, kind), bf16, cores if kind == "cpu" else 1, fp16)


def timed_product(dtype: torch.dtype, kind: str) -> float:
    """Operations per second of one matrix product on one thread or device."""
    rows, inner, columns = (64, 768, 768) if kind == "cpu" else (8192, 8192, 8192)
    left = torch.ones(rows, inner, dtype=dtype, device=kind)
    right = torch.ones(inner, columns, dtype=dtype, device=kind)
    timer = Timer("left @ right", globals={"left": left, "right": right})  # on one thread; waits for an accelerator
    return 2 * rows * inner * columns / min(timer.blocked_autorange(min_run_time=0.05).times)


def training_flops(shape: ModelShape, work: StepWork, method: str, recompute: float) -> float:
    """Operations of one rank over the whole run, evaluation included. ``recompute``: share of the blocks."""
    is_full, layers = method == "full", shape.num_layers * shape.attention_width * work.mean_length
    weights, scores = (6 if is_full else 4) + 2 * recompute, 12 + 4 * recompute
    training = work.padded_tokens * (weights * shape.active_block_matrices + scores * layers)
    head = work.supervised_tokens * (6 if is_full else 4) * shape.head_matrix
    return training + head + work.evaluated_tokens * (2 * shape.active_block_matrices + 4 * layers)


def wire_seconds(
    shape: ModelShape, work: StepWork, method: str, compute_bytes: int, num_ranks: int, link: float | None
) -> tuple[float, float]:
    """(low, high): weights gathered twice a micro-batch, gradients reduced once a step. ``link``: bytes/s, or gloo."""
    if num_ranks == 1:
        return 0.0, 0.0
    gathered = 2 * work.num_micro_batches * compute_bytes * shape.parameters * (num_ranks - 1) / num_ranks * 2
    reduced = work.num_steps * 4 * (shape.parameters if method == "full" else 0)
    if link is not None:  # mostly hidden behind compute on accelerators
        return 0.0, (gathered / 2 + reduced) / (0.7 * link)
    slow, fast = zip(GLOO_GATHER_BYTES_PER_SECOND, GLOO_REDUCE_BYTES_PER_SECOND, strict=True)
    return gathered / fast[0] + reduced / fast[1], gathered / slow[0] + reduced / slow[1]


def run_seconds(
    shape: ModelShape, work: StepWork, job: Job, rates: Rates, link: float | None, card: Accelerator | None = None
) -> tuple[float, float]:
    """(low, high) seconds of a run: start, compute, wire, optimizer and the final save. ``link``: ``wire_seconds``."""
    is_full, ranks = job.method == "full", job.num_ranks
    trained = shape.parameters if is_full else job.adapters
    moved = 4 * shape.parameters + 12 * trained  # read the base, write the last checkpoint
    fixed = [START_SECONDS[end] + moved / DISK_BYTES_PER_SECOND[1 - end] for end in (0, 1)]
    if card is not None:
        micro = micro_batch_seconds(shape, job, card, run_of(work, job))["total"]
        steps = micro * (work.num_micro_batches + work.evaluated_tokens / run_of(work, job).tokens / 3)
        slow, fast = efficiency()["error"]  # of the speed, as a share of the predicted
        return fixed[0] + steps / fast, fixed[1] + steps / slow
    flops = training_flops(shape, work, job.method, job.recomputed(shape.num_layers) / shape.num_layers)
    touched = 28 * trained * work.num_steps / (ranks if is_full else 1)  # bytes that the optimizer reads and writes
    wire = wire_seconds(shape, work, job.method, job.compute_bytes, ranks, link)
    rate = {"fp32": rates.fp32, "tf32": rates.bf16 / 2}.get(job.precision, rates.bf16 or rates.fp16)  # data sheets
    share, optimizer = DEVICE_EFFICIENCY, DEVICE_OPTIMIZER_BYTES_PER_SECOND
    if job.on_cpu:
        rate *= rates.cores / ranks  # also where ranks share a core
        share, optimizer = CPU_EFFICIENCY, CPU_OPTIMIZER_BYTES_PER_SECOND
    low, high = (
        fixed[end] + flops / (rate * share[1 - end]) + wire[end] + touched / optimizer[1 - end] for end in (0, 1)
    )
    return low, high


def run_of(work: StepWork, job: Job) -> Run:
    """A planned run on a known card: 8 devices a node, as such machines are sold."""
    tokens, nodes = work.padded_tokens / work.num_micro_batches, -(-job.num_ranks // 8)
    head = work.supervised_tokens / work.num_micro_batches
    each = work.num_micro_batches / work.num_steps
    return Run(work.mean_length, tokens, head, each, devices=job.num_ranks, nodes=nodes)
