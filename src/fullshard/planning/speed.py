"""Time as arithmetic: work divided by a rate that this machine showed in a timed product.

Work per token, forward and backward: 6 x matrix weights for full fine-tuning, 4 x for LoRA (no gradients of frozen
weights), plus 2 x for recomputation; 12 x width x row length per block for attention (score and value products, whole
rows: the padded CPU kernels skip nothing). Blocks work on the padded area, the head on supervised positions only.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass

from fullshard.planning.shape import ModelShape

# Share of the timed product that whole steps reach. CPU: 0.55 - 0.95 by the notes' step costs (engine.md 1.4: 868 of
# about 900 tokens/s without communication, less where rows are short). Accelerators: published runs, 20 - 55 % of peak.
CPU_EFFICIENCY = (0.55, 0.95)
DEVICE_EFFICIENCY = (0.25, 0.60)
# gloo on loopback, 2 ranks, fp32 (engine.md 1.3): all-gather 0.7 - 1.2 GB/s, reduce-scatter about 0.5 - 0.75 GB/s.
GLOO_GATHER_BYTES_PER_SECOND = (0.6e9, 1.3e9)
GLOO_REDUCE_BYTES_PER_SECOND = (0.45e9, 0.8e9)
CPU_OPTIMIZER_BYTES_PER_SECOND = (3e9, 8e9)
START_SECONDS = (6.0, 15.0)  # imports, ranks, loading the weights of a small model, the trial step
DISK_BYTES_PER_SECOND = (0.2e9, 1.5e9)


@dataclass(frozen=True)
class Rates:
    """Floating-point operations per second of one core (CPU) or one device, in fp32 and bf16 (0.0 without bf16)."""

    fp32: float
    bf16: float
    cores: int  # cores that share the work of a CPU machine; 1 on accelerators

    def of(self, precision: str) -> float:
        """The rate of ``fp32`` or ``bf16``, one core or device."""
        return self.bf16 if precision == "bf16" else self.fp32


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
    import torch

    from fullshard.device import supports_bf16

    threads = torch.get_num_threads()
    if kind == "cpu":
        torch.set_num_threads(1)
    try:
        fp32 = _timed_product(torch.float32, kind)
        bf16 = _timed_product(torch.bfloat16, kind) if supports_bf16() else 0.0
    finally:
        torch.set_num_threads(threads)
    return Rates(fp32, bf16, cores if kind == "cpu" else 1)


def _timed_product(dtype, kind: str) -> float:
    import torch

    from fullshard.device import synchronize

    rows, inner, columns = (64, 768, 768) if kind == "cpu" else (8192, 8192, 8192)
    left, right = (
        torch.ones(rows, inner, dtype=dtype, device=kind),
        torch.ones(inner, columns, dtype=dtype, device=kind),
    )
    left @ right  # the first product also builds the kernel
    best, spent, repeats = float("inf"), 0.0, 0
    while spent < 0.05 and repeats < 30:
        synchronize()
        start = time.perf_counter()
        left @ right
        synchronize()
        seconds = time.perf_counter() - start
        best, spent, repeats = min(best, seconds), spent + seconds, repeats + 1
    return 2 * rows * inner * columns / best


def training_flops(shape: ModelShape, work: StepWork, method: str, recompute: bool) -> float:
    """Operations of one rank over the whole run, evaluation included."""
    per_weight = (6 if method == "full" else 4) + (2 if recompute else 0)
    attention = (12 + (4 if recompute else 0)) * shape.num_layers * shape.attention_width * work.mean_length
    training = work.padded_tokens * (per_weight * shape.active_block_matrices + attention)
    head = work.supervised_tokens * (6 if method == "full" else 4) * shape.head_matrix
    forward = work.evaluated_tokens * (
        2 * shape.active_block_matrices + 4 * shape.num_layers * shape.attention_width * work.mean_length
    )
    return training + head + forward


def wire_seconds(
    shape: ModelShape, work: StepWork, method: str, compute_bytes: int, num_ranks: int, link: float | None
) -> tuple[float, float]:
    """(low, high) seconds on the wire: weights gathered twice a micro-batch, gradients reduced once a step.

    ``link``: bytes per second of an accelerator's link, None for gloo on this machine.
    """
    if num_ranks == 1:
        return 0.0, 0.0
    gathered = 2 * work.num_micro_batches * compute_bytes * shape.parameters * (num_ranks - 1) / num_ranks * 2
    reduced = work.num_steps * 4 * (shape.parameters if method == "full" else 0)
    if link is not None:  # mostly hidden behind compute on accelerators
        total = (gathered / 2 + reduced) / (0.7 * link)
        return 0.0, total
    low = gathered / GLOO_GATHER_BYTES_PER_SECOND[1] + reduced / GLOO_REDUCE_BYTES_PER_SECOND[1]
    high = gathered / GLOO_GATHER_BYTES_PER_SECOND[0] + reduced / GLOO_REDUCE_BYTES_PER_SECOND[0]
    return low, high


def run_seconds(
    shape: ModelShape,
    work: StepWork,
    *,
    method: str,
    precision: str,
    recompute: bool,
    num_ranks: int,
    rates: Rates,
    on_cpu: bool,
    link: float | None,
    trained_parameters: int,
) -> tuple[float, float]:
    """(low, high) seconds of a run: start, compute, wire, optimizer and the final save."""
    flops = training_flops(shape, work, method, recompute)
    rate = rates.of(precision) * (max(1.0, rates.cores / num_ranks) if on_cpu else 1.0)
    if on_cpu and num_ranks > rates.cores:
        rate *= rates.cores / num_ranks
    slow, fast = CPU_EFFICIENCY if on_cpu else DEVICE_EFFICIENCY
    compute_bytes = 2 if precision == "bf16" else 4
    wire_low, wire_high = wire_seconds(shape, work, method, compute_bytes, num_ranks, link)
    touched = 28 * trained_parameters * work.num_steps / (num_ranks if method == "full" else 1)
    optimizer_low, optimizer_high = (
        (touched / CPU_OPTIMIZER_BYTES_PER_SECOND[1], touched / CPU_OPTIMIZER_BYTES_PER_SECOND[0])
        if on_cpu
        else (touched / 2e12, touched / 0.5e12)
    )
    moved = 4 * shape.parameters + 12 * trained_parameters  # read the base, write the last checkpoint
    low = START_SECONDS[0] + flops / (rate * fast) + wire_low + optimizer_low + moved / DISK_BYTES_PER_SECOND[1]
    high = START_SECONDS[1] + flops / (rate * slow) + wire_high + optimizer_high + moved / DISK_BYTES_PER_SECOND[0]
    return low, high
