"""Time as arithmetic: work divided by a rate that this machine showed in a timed product."""

import functools
from dataclasses import dataclass

import torch
from torch.utils.benchmark import Timer

from fullshard.device import supports_bf16
from fullshard.planning.memory import Job
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


def run_seconds(shape: ModelShape, work: StepWork, job: Job, rates: Rates, link: float | None) -> tuple[float, float]:
    """(low, high) seconds of a run: start, compute, wire, optimizer and the final save. ``link``: ``wire_seconds``."""
    is_full, ranks = job.method == "full", job.num_ranks
    trained = shape.parameters if is_full else job.adapters
    flops = training_flops(shape, work, job.method, job.recomputed(shape.num_layers) / shape.num_layers)
    touched = 28 * trained * work.num_steps / (ranks if is_full else 1)  # bytes that the optimizer reads and writes
    moved = 4 * shape.parameters + 12 * trained  # read the base, write the last checkpoint
    wire = wire_seconds(shape, work, job.method, job.compute_bytes, ranks, link)
    rate = {"fp32": rates.fp32, "tf32": rates.bf16 / 2}.get(job.precision, rates.bf16 or rates.fp16)  # data sheets
    efficiency, optimizer = DEVICE_EFFICIENCY, DEVICE_OPTIMIZER_BYTES_PER_SECOND
    if job.on_cpu:
        rate *= rates.cores / ranks  # also where ranks share a core
        efficiency, optimizer = CPU_EFFICIENCY, CPU_OPTIMIZER_BYTES_PER_SECOND
    low, high = (
        START_SECONDS[end]
        + flops / (rate * efficiency[1 - end])
        + wire[end]
        + touched / optimizer[1 - end]
        + moved / DISK_BYTES_PER_SECOND[1 - end]
        for end in (0, 1)
    )
    return low, high
