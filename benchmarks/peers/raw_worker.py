"""One rank of a plain fully_shard loop: transformers' model and its own logits, padded rows: written by hand."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (num_ranks,))
    rows = [json.loads(line) for line in Path(job["rows"]).read_text().splitlines()]
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32, attn_implementation="sdpa")
    compute = torch.bfloat16 if job["precision"] == "bf16" else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in model.modules():
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=job["learning_rate"], weight_decay=0.0, fused=True)
    count, seconds, losses = job["rows_a_rank"], [], []
    for step in range(job["steps"]):
        started = time.perf_counter()
        window = rows[step * count * num_ranks : (step + 1) * count * num_ranks]
        mine = window[rank * count : (rank + 1) * count]
        size = max(len(row["ids"]) for row in mine)
        ids = torch.zeros(count, size, dtype=torch.long)
        labels = torch.full((count, size), -100)
        mask = torch.zeros(count, size, dtype=torch.long)
        for place, row in enumerate(mine):
            length = len(row["ids"])
            ids[place, :length] = torch.tensor(row["ids"])
            mask[place, :length] = 1
            wanted = torch.tensor(row["supervised"], dtype=torch.bool)
            labels[place, : length - 1] = torch.where(wanted[1:], ids[place, 1:length], -100)
        total = sum(sum(row["supervised"][1:]) for row in window)
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits.float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / total
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        seconds.append(time.perf_counter() - started)
        losses.append(float(whole))
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    found = {"seconds": seconds, "losses": losses, "peak_bytes": int(line.split()[1]) * 1024}
    Path(job["folder"], f"rank{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


main()
