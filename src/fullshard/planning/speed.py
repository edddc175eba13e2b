"""Time as arithmetic: the work of each kernel class by a card's facts (or, for this machine, a timed product) times the
shares of efficiency.yaml; docs/planning.md has the formulas and every published run beside its prediction."""

import functools
from types import SimpleNamespace
from typing import Any
import torch
from torch.utils.benchmark import Timer
from fullshard.device import supports_bf16
from fullshard.errors import read_table
from fullshard.frozen import Frozen
from fullshard.planning.hardware import Accelerator
from fullshard.planning.memory import LOGIT_BYTES, Job, Practice, block_bytes_per_token, own_practice
from fullshard.planning.shape import ModelShape

DEVICES_OF_A_NODE = 8  # as sold
EFFICIENCY = read_table("planning/efficiency.yaml")


class Rates(Frozen):
    """Floating-point operations per second of one core (CPU) or one device, in fp32 and bf16 (0.0 without bf16)."""

    fp32: float
    bf16: float
    cores: int  # cores that share the work of a CPU machine; 1 on accelerators
    fp16: float = 0.0  # measured where there is no bf16; else as fast as that


class StepWork(Frozen):
    """One rank's work in all steps together."""

    padded_tokens: float  # area laid out on this rank
    supervised_tokens: float
    mean_length: float
    num_micro_batches: float
    num_steps: float
    evaluated_tokens: float  # padded tokens of forward-only passes
    step_tokens: float = 0.0  # of all ranks, without padding, in a mean step
    first: tuple[int, int, int] = (0, 0, 0)  # rows, tokens and micro-batches of the first step


class Run(Frozen):
    """What besides shape and job decides a known card's speed; the defaults are fullshard's."""

    length: float  # mean tokens of a row
    tokens: float  # of a micro-batch, padding included
    head_tokens: float  # of those, with logits
    accumulation: float = 1.0  # micro-batches a step
    nodes: int = 1
    kernels: str = "plain"  # plain | fused | compiled: elementwise kernels, by efficiency.yaml
    attention: str = "flash2"  # flash1 | flash2 | flash3
    again: float | None = None  # share of all products that recomputation repeats; None: those of recomputed blocks
    adapted: int = 0  # input and output features of a block's adapted layers
    units: int = 1  # sharding units of a block


def kernel_numbers(
    shape: ModelShape, job: Job, card: Accelerator, run: Run, does: Practice | None = None, shares: Any = None
) -> dict[str, float]:
    """What the formulas of a micro-batch are made of: counts, bytes, and rates a second."""
    shares = shares or EFFICIENCY["cpu" if job.on_cpu else "devices"]
    logit = does.logit if does else LOGIT_BYTES  # written and read, which our loss does in place
    does, kernels, is_full = does or own_practice(job), shares["kernels"], job.method == "full"
    family, passes = shares["families"][card.family], 3 if is_full else 2
    peak = card.flops.get(job.precision.split("_")[0], card.flops["fp16"]) * card.reachable
    blocks = job.recomputed(shape.num_layers) / shape.num_layers
    wide = shape.hidden_size / (shape.hidden_size + shares["width"])  # narrow matrices fill a card worse
    small = shares["small_heads"] if shape.attention_width <= 64 * shape.num_heads else 1
    moved = block_bytes_per_token(shape, job.compute_bytes, 0) * kernels[run.kernels]
    cut = job.num_ranks // job.replicas
    sent, wire_rate = _wire(shape, job, card, run, does, shares)
    return {
        "tokens": run.tokens, "head_tokens": run.head_tokens, "length": run.length, "layers": shape.num_layers,
        "weights": shape.active_block_matrices, "head": shape.head_matrix, "head_passes": passes,
        "passes": passes + (blocks if run.again is None else run.again),
        "product_rate": peak * family["matrices"] * wide, "width": shape.attention_width,
        "repeats": 3.5 + blocks * (run.again is None),  # backward: 2.5 forwards; selective recomputation keeps them
        "score_rate": peak * family[run.attention] * small, "memory_rate": card.memory_bytes_per_second,
        "moved": (3 + blocks) * (moved + 2 * run.adapted * kernels["adapter"]),  # bytes a token and block
        "logits": shape.vocab_size * logit * kernels["logits"], "block": shares["block"], "collectives": 3 * run.units,
        "latency": shares["unit"] + shares["hop"] * job.num_ranks if cut > 1 else 0.0,  # a ring through all ranks
        "trained": shape.parameters / cut if is_full else job.adapters,
        "touched": (2 * (does.weight + does.states) + 3 * does.gradient) * shares["optimizer"],
        "accumulation": run.accumulation, "sent": sent, "wire_rate": wire_rate, "overlap": shares["overlap"],
    }  # fmt: skip


def micro_batch_seconds(*inputs: Any) -> dict[str, float]:
    """Seconds of one micro-batch by kernel class, with its part of the step, what is ``hidden``, and their ``total``.
    ``inputs``: those of ``kernel_numbers``. explain.yaml has the same formulas in words."""
    n = SimpleNamespace(**kernel_numbers(*inputs))
    seconds = {
        "matrices": 2 * (n.tokens * n.weights * n.passes + n.head_tokens * n.head * n.head_passes) / n.product_rate,
        "attention": 2 * n.tokens * n.length * n.width * n.layers * n.repeats / n.score_rate,  # causal: half of all
        "elementwise": (n.tokens * n.layers * n.moved + n.head_tokens * n.logits) / n.memory_rate,
        "launches": n.layers * (n.block + n.collectives * n.latency),
        "optimizer": n.trained * n.touched / n.memory_rate / n.accumulation,
    }
    busy, wire = sum(seconds.values()), n.sent / n.wire_rate
    hidden = n.overlap * min(wire, busy - seconds["optimizer"])
    return seconds | {"wire": wire, "hidden": hidden, "total": busy + wire - hidden}


def _wire(shape: ModelShape, job: Job, card: Accelerator, run: Run, does: Practice, shares: Any) -> tuple[float, float]:
    """Bytes of a micro-batch on the slowest links, and their rate: rings in a node and, at once, across nodes."""
    inside, cut = -(-job.num_ranks // run.nodes), job.num_ranks // job.replicas  # devices of a node; of a replica
    gathered = (1 if job.gathers_all else 2) * job.compute_bytes * shape.parameters
    reduced = (does.reduced or 4) * (shape.parameters if job.method == "full" else job.adapters)
    reduced /= run.accumulation if job.accumulates else 1
    link = card.link_bytes_per_second * shares["link" if card.link_bytes_per_second > 64e9 else "bus"]  # bus: PCIe
    node = card.node_bytes_per_second * inside * shares["node"]
    far = link if run.nodes == 1 else node
    ways = [((gathered + reduced) * (1 - 1 / min(cut, inside)), link), (2 * reduced * (1 - 1 / job.replicas), far)]
    if run.nodes > 1:
        ways.append(((gathered + reduced) * (1 - inside / max(cut, inside)), node))
    return max(ways, key=lambda way: way[0] / way[1])


@functools.cache
def measure_rates(kind: str, cores: int) -> Rates:
    """Time one product in fp32 and bf16, on one thread or one device. Under half a second on a CPU; cached."""
    bf16 = timed_product(torch.bfloat16, kind) if supports_bf16() else 0.0
    fp16 = 0.0 if bf16 else timed_product(torch.float16, kind)
    return Rates(timed_product(torch.float32, kind), bf16, cores if kind == "cpu" else 1, fp16)


def timed_product(dtype: torch.dtype, kind: str) -> float:
    """Operations per second of one matrix product on one thread or device."""
    rows, inner, columns = (64, 768, 768) if kind == "cpu" else (8192, 8192, 8192)
    left, right = (torch.ones(size, dtype=dtype, device=kind) for size in ((rows, inner), (inner, columns)))
    timer = Timer("left @ right", globals={"left": left, "right": right})  # on one thread; waits for an accelerator
    return 2 * rows * inner * columns / min(timer.blocked_autorange(min_run_time=0.05).times)


def run_seconds(
    shape: ModelShape, work: StepWork, job: Job, rates: Rates, card: Accelerator | None = None,
    measured: float | None = None,
) -> tuple[float, float, float, float, dict[str, Any]]:  # fmt: skip
    """Seconds of the run, low and high, and of a step; the numbers behind them, with the kernels' ``seconds``.
    ``rates`` count where no card is known; ``measured`` (seconds of a step) in place of all."""
    each = work.num_micro_batches / work.num_steps
    tokens, head = (count / work.num_micro_batches for count in (work.padded_tokens, work.supervised_tokens))
    run = Run(work.mean_length, tokens, head, each, 1 if job.on_cpu else -(-job.num_ranks // DEVICES_OF_A_NODE))
    inputs = (shape, job, card or _measured(rates, job), run)
    seconds = micro_batch_seconds(*inputs)
    step = measured or each * seconds["total"]
    known = EFFICIENCY["cpu" if job.on_cpu else "devices"]["error"] if job.on_cpu or card else EFFICIENCY["unknown"]
    slow, fast = EFFICIENCY["probed"] if measured else known
    count = work.num_steps * (1 + work.evaluated_tokens / work.padded_tokens / 3)  # a forward is a third of a step
    moved = 4 * shape.parameters + 12 * (shape.parameters if job.method == "full" else job.adapters)  # load and save
    starts = [start + moved / disk for start, disk in EFFICIENCY["fixed"]]
    low, high = starts[0] + count * step / fast, starts[1] + count * step / slow
    numbers = {"seconds": seconds, "step": step, "fast": fast, "slow": slow, "count": count, "starts": starts}
    numbers |= {"low": low, "high": high, "quick": step / fast, "late": step / slow}
    return low, high, step / fast, step / slow, kernel_numbers(*inputs) | numbers


def _measured(rates: Rates, job: Job) -> Accelerator:
    """What is timed on this machine in the place of facts; the ranks of a CPU machine share its cores."""
    share, here = rates.cores / job.num_ranks if job.on_cpu else 1.0, EFFICIENCY["here"]
    half = (rates.bf16 or rates.fp16) * share
    flops = {"fp32": rates.fp32 * share, "tf32": half / 2, "bf16": half, "fp16": half}  # tf32: as data sheets have it
    memory = here["cpu_memory"] if job.on_cpu else max(flops.values()) / here["flops_per_byte"]
    link = here["gloo" if job.on_cpu else "link"]
    return Accelerator((), 0, flops, 1.0, memory, link, link / DEVICES_OF_A_NODE, "measured")
