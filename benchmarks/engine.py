"""Step time, peak memory and bytes on the wire: our simple engine, fully_shard (default, best settings), DDP.

    python benchmarks/engine.py                  all of it, about 12 minutes on 2 quiet cores
    python benchmarks/engine.py --pairs 1        a short look

A 30 M llama (8 layers, width 512, MLP 1408, 8,192 tokens tied), AdamW, clipping, 2 ranks of 1 thread on gloo. All
engines live in the same two processes and take turns (``--pairs`` rounds of ``--steps`` steps each, medians of rounds);
memory and bytes come from processes of their own. bf16 steps are timed only where the CPU multiplies bf16 at least as
fast as fp32. Written to benchmarks/results/engine_HARDWARE_DATE.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import socket
import statistics
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from measuring import hardware_name
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

RESULTS = Path(__file__).parent / "results"
ENGINES = ("simple", "fully_shard", "fully_shard best", "DDP")
NOTHING_AHEAD = "simple, nothing gathered ahead"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MEMORY_CASES = (("fp32", False, 1), ("bf16", False, 1), ("bf16", True, 1), ("bf16", False, 2))


def build_model() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=8,
        vocab_size=8192, tie_word_embeddings=True, max_position_embeddings=2048, attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


class Loss(nn.Module):
    """Causal language model -> loss, so that head and loss lie inside the sharding root."""

    def __init__(self, model: nn.Module, recompute: bool) -> None:
        super().__init__()
        self.model = model
        for layer in model.model.layers if recompute else []:
            inner = layer.forward
            layer.forward = lambda *args, inner=inner, **kwargs: checkpoint(inner, *args, use_reentrant=False, **kwargs)

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        logits = self.model(tokens_BS[:, :-1], use_cache=False).logits.float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens_BS[:, 1:].flatten())


class Trainer:
    """One engine with its optimizer; ``step`` is one optimizer step of this rank."""

    def __init__(self, engine: str, precision: str, recompute: bool = False) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        self.engine, self.ranks = engine, dist.get_world_size()
        model = Loss(build_model(), recompute)
        layers = list(model.model.model.layers)
        mesh, dtype = init_device_mesh("cpu", (self.ranks,)), DTYPES[precision]
        self.sharded = None
        if engine in ("simple", NOTHING_AHEAD):
            from fullshard.shard.simple import engine as simple
            from fullshard.shard.simple.engine import SimpleShardedModel
            from fullshard.train.precision import MODES

            simple.PREFETCH = 1 if engine == "simple" else 0
            self.sharded = SimpleShardedModel(model, [[layer] for layer in layers], set(), mesh, MODES[precision])
            parameters = [tensor for group in self.sharded.optimizer_groups() for _, tensor in group["params"]]
        elif engine == "DDP":
            model = DistributedDataParallel(model)
            parameters = list(model.parameters())
        else:
            policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
            for layer in layers:
                fully_shard(layer, mesh=mesh, mp_policy=policy)
            fully_shard(model, mesh=mesh, mp_policy=policy)
            if engine == "fully_shard best":
                use_best_settings(model, layers, mesh)
            parameters = list(model.parameters())
        self.model, self.parameters = model, parameters
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)

    def step(self, batches: list[torch.Tensor]) -> float:
        total = 0.0
        for number, tokens in enumerate(batches):
            last = number == len(batches) - 1
            if self.sharded is not None:
                with self.sharded.microbatch(last):
                    loss = self.model(tokens) / (self.ranks * len(batches))
                    loss.backward()
            else:
                if self.engine != "DDP":
                    self.model.set_requires_gradient_sync(last)
                scale = len(batches) if self.engine in ("DDP", "fully_shard") else self.ranks * len(batches)
                loss = self.model(tokens) / scale
                loss.backward()
            total += float(loss.detach())
        if self.sharded is not None:
            gradients = [tensor.grad for tensor in self.parameters]
            norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
            dist.all_reduce(norm)
            scale = (1.0 / (norm.sqrt() + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(gradients, scale)
        else:
            nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.sharded is not None:
            self.sharded.after_step()
        return total


def use_best_settings(model: nn.Module, layers: list[nn.Module], mesh: Any) -> None:
    """What helps fully_shard on gloo: asynchronous unshard with prefetch lists, and a reduction by all-to-all."""
    from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

    class AllToAll(ReduceScatter):
        def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any,
                     async_op: bool = False) -> None:  # fmt: skip
            received = torch.empty_like(input_tensor)
            dist.all_to_all_single(received, input_tensor, group=group)
            torch.sum(received.view(group.size(), -1), 0, out=output_tensor.view(-1))

    for module in [*layers, model]:
        module.set_custom_reduce_scatter(AllToAll())
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
    for before, after in itertools.pairwise(layers):
        before.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([before])
    model._set_unshard_async_op(True)  # without it (torch 2.13) a prefetched gather blocks


def peak_over_start(action: Any) -> int:
    """Bytes of resident peak (VmHWM) above what was resident before ``action``."""

    def status(key: str) -> int:
        return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if key in line)

    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    action()
    return (status("VmHWM") - before) * 1024


def loopback_bytes() -> int:
    return next(int(line.split()[1]) for line in Path("/proc/net/dev").read_text().splitlines() if "lo:" in line)


def batches_of(tokens: int, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return [torch.randint(0, 8192, (1, tokens + 1), generator=generator) for _ in range(count)]


def time_steps(precision: str, tokens: int, pairs: int, steps: int) -> dict[str, Any]:
    engines = [engine for engine in ENGINES if precision == "fp32" or engine != "DDP"]
    engines += [NOTHING_AHEAD] if tokens == 256 else []
    trainers = {engine: Trainer(engine, precision) for engine in engines}
    rounds: dict[str, list[float]] = {engine: [] for engine in engines}
    losses = {engine: [trainer.step(batches_of(tokens, 1)) for _ in range(2)] for engine, trainer in trainers.items()}
    for _ in range(pairs):
        for engine, trainer in trainers.items():
            times = []
            for _ in range(steps):
                dist.barrier()
                started = time.perf_counter()
                trainer.step(batches_of(tokens, 1))
                dist.barrier()
                times.append(time.perf_counter() - started)
            rounds[engine].append(statistics.median(times))
    ratios = {
        engine: statistics.median(ours / theirs for ours, theirs in zip(rounds["simple"], rounds[engine], strict=True))
        for engine in engines
    }
    return {
        "precision": precision, "tokens_per_rank": tokens, "seconds": rounds, "losses": losses,
        "median_seconds": {engine: statistics.median(values) for engine, values in rounds.items()},
        "simple_over": ratios,
    }  # fmt: skip


def memory_and_bytes(engine: str, precision: str, recompute: bool, micro_batches: int, tokens: int) -> dict[str, Any]:
    trainer = Trainer(engine, precision, recompute)
    batches = batches_of(tokens, micro_batches)
    trainer.step(batches)
    dist.barrier()
    before = loopback_bytes()
    peaks = []
    for _ in range(3):
        peaks.append(peak_over_start(lambda: trainer.step(batches)))
        dist.barrier()
    peak, sent = statistics.median(peaks), (loopback_bytes() - before) // 3
    return {"engine": engine, "precision": precision, "recompute": recompute, "micro_batches": micro_batches,
            "peak_over_start_bytes": peak, "peaks": peaks, "loopback_bytes": sent}  # fmt: skip


def serve(rank: int, ranks: int, port: int, task: tuple[Any, ...], box: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    result = globals()[task[0]](*task[1:])
    if rank == 0:
        box.put(result)
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(*task: Any, ranks: int = 2) -> Any:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    box = multiprocessing.get_context("spawn").SimpleQueue()
    multiprocessing.spawn(serve, (ranks, port, task, box), ranks)
    return box.get()


def product_rate(dtype: torch.dtype) -> float:
    """GFLOP/s of a matrix product on one core."""
    torch.set_num_threads(1)
    size = 512
    left, right = (torch.randn(size, size).to(dtype) for _ in range(2))
    left @ right
    started, count = time.perf_counter(), 0
    while time.perf_counter() - started < 1:
        left @ right
        count += 1
    return 2 * size**3 * count / (time.perf_counter() - started) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", MALLOC_MMAP_THRESHOLD_="65536", MALLOC_ARENA_MAX="2")
    rates = {name: product_rate(dtype) for name, dtype in DTYPES.items()}
    precisions = ["fp32"] + (["bf16"] if rates["bf16"] >= rates["fp32"] else [])
    timings, held = [], []
    for precision, tokens in itertools.product(precisions, (256, 1024)):
        timings.append(on_ranks("time_steps", precision, tokens, options.pairs, options.steps))
        print(precision, tokens, json.dumps(timings[-1]["median_seconds"]), json.dumps(timings[-1]["simple_over"]))
    for precision, recompute, micro_batches in MEMORY_CASES:
        for engine in ENGINES[:2]:
            tokens = 256 if precision == "fp32" or rates["bf16"] > 20 else 32
            held.append(on_ranks("memory_and_bytes", engine, precision, recompute, micro_batches, tokens))
            print(json.dumps(held[-1]))
    output = options.output or RESULTS / f"engine_{hardware_name()}_{date.today():%Y%m%d}.json"
    facts = {
        "command": " ".join(["python", *sys.argv]), "date": f"{date.today()}",
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__, "backend": "gloo, 2 ranks x 1 thread", "gflops_per_core": rates,
        "pairs": options.pairs, "steps": options.steps, "timings": timings, "memory_and_bytes": held,
    }  # fmt: skip
    output.write_text(json.dumps(facts, indent=1) + "\n")
    print(output)


if __name__ == "__main__":
    main()
