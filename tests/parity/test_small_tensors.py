"""The torch engine and tensors with fewer rows than ranks: out of fully_shard, whole on every rank, cast by hooks."""

from __future__ import annotations

import copy

import torch
from odd_model import make_model, tokens_of
from rank_pool import pool

from fullshard.ranks import Ranks


def small_ones(ranks: Ranks) -> tuple[set[str], set[str], float]:
    """Of a bf16 step on the torch engine: what is held whole, dtypes of the blocks' outputs, error of ``one``'s sum
    beside the fp32 sum of one unsharded bf16 process."""
    from fullshard.shard.torch_engine import TorchShardedModel
    from fullshard.train.precision import precision_of

    model = make_model(False, True, False, torch.float32)
    oracle = copy.deepcopy(model).bfloat16()
    sharded = TorchShardedModel(model, model.units(), set(), ranks.mesh, precision_of("bf16"))
    dtypes = set()
    for block in model.blocks:
        block.register_forward_hook(lambda module, inputs, output: dtypes.add(str(output.dtype)))
    with sharded.microbatch(True):
        model(tokens_of(0, 0, ranks.rank)).backward()
    wanted = torch.zeros(len(oracle.blocks))
    for rank in range(ranks.num_ranks):
        oracle.zero_grad()
        oracle(tokens_of(0, 0, rank)).backward()
        wanted += torch.cat([block.one.grad.float() for block in oracle.blocks])
    parts = {part.name: part for part in sharded.shards()}
    assert not any("one" in block.__dict__ for block in model.blocks)
    found = torch.cat([parts[f"blocks.{number}.one"].gradient for number in range(len(oracle.blocks))])
    whole = {name.rpartition(".")[2] for name, part in parts.items() if part.stop - part.start == part.value.numel()}
    whole = {name for name in whole if sharded.replicas(f"blocks.0.{name}") == ranks.num_ranks}
    return whole, dtypes, float((found - wanted).norm() / wanted.norm())


def test_tensors_smaller_than_the_ranks_stay_whole() -> None:
    """fully_shard would pad (1,) and (3,) to a row a rank; whole, they are fp32 at rest and bf16 in compute."""
    for whole, dtypes, error in pool(4).run(small_ones):
        assert whole == {"one", "three", "scale"}
        assert dtypes == {"torch.bfloat16"}
        assert error < 1e-5
