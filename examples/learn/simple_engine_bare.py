"""The simple engine on a bare module, without recipe, launcher or loop; its losses beside those of an unsharded copy.

Run: ``torchrun --nproc-per-node 2 simple_engine_bare.py`` (fullshard must be installed). B rows, D features.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fullshard.device import collective_backend, select_device
from fullshard.shard.simple.engine import SimpleShardedModel
from fullshard.train.precision import MODES

STEPS, B, D, BLOCKS = 5, 16, 48, 4


class Block(nn.Sequential):
    def forward(self, x_BD):
        return x_BD + super().forward(x_BD)


def make_model():
    torch.manual_seed(0)
    layers = [(nn.LayerNorm(D), nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D)) for _ in range(BLOCKS)]
    return nn.Sequential(nn.Linear(8, D), *(Block(*block) for block in layers), nn.Linear(D, 1))


def loss_of(model, x_B8):  # summed, not averaged: the engine adds the ranks' gradients up and divides by nothing
    return nn.functional.mse_loss(model(x_B8).squeeze(1), x_B8.prod(1), reduction="sum") / B


rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
device = select_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group(collective_backend(device.type))
mesh = init_device_mesh(device.type, (ranks,))
whole, model = make_model().to(device), make_model().to(device)
# A unit is a list of modules that are gathered together; what is in none (the two Linears) is one unit more.
units = [[module] for module in model if isinstance(module, Block)]
sharded = SimpleShardedModel(model, units, replicated=set(), mesh=mesh, precision=MODES["fp32"])
shards = [tensor for group in sharded.optimizer_groups() for _, tensor in group["params"]]  # flat, 1 / ranks of each
optimizers = [torch.optim.AdamW(parameters, lr=0.01) for parameters in (shards, whole.parameters())]
for step in range(STEPS):
    torch.manual_seed(step + 1)
    x_B8 = torch.randn(B, 8).to(device)
    with sharded.microbatch(last=True):  # gathers, frees and sums happen in here
        (loss := loss_of(model, x_B8.chunk(ranks)[rank])).backward()
    (whole_loss := loss_of(whole, x_B8)).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    sharded.after_step()
    dist.all_reduce(loss := loss.detach())
    if rank == 0:
        print(f"step {step}: loss {loss.item():.6f} on {ranks} ranks, {whole_loss.item():.6f} unsharded")
own, total = sum(tensor.numel() for tensor in shards), sum(p.numel() for p in whole.parameters())
print(f"rank {rank} holds {own:,} of {total:,} parameters")
dist.destroy_process_group()
