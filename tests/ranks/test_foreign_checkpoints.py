"""What FSDP1 and FSDP2 save on several ranks merges into the model that was saved, name by name and bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rank_pool import pool
from tiny_models import make_model, make_tokenizer

from fullshard.merge.job import merge_run

ODD = {"vocab_size": 65, "hidden_size": 20, "intermediate_size": 33}  # uneven shards (HO-11)


def moved(base):
    """``base`` with every weight changed by its position alone, the same on all ranks."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.add_(torch.arange(parameter.numel()).view(parameter.shape).remainder(7 + number) * 0.01)
    return model


def save(ranks, base, folder, kind):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    model = moved(base)
    if kind == "fsdp2":
        for layer in model.model.layers:
            fully_shard(layer, mesh=ranks.mesh)
        fully_shard(model, mesh=ranks.mesh)
        return dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
    policy = ModuleWrapPolicy({type(model.model.layers[0])})
    model = FullyShardedDataParallel(
        model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True
    )
    if kind == "fsdp1":
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            return dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        state = model.state_dict()
    if ranks.is_first:
        Path(folder).mkdir()
        torch.save(state, Path(folder) / "pytorch_model.bin")
    ranks.barrier()


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1", "fsdp1_full"])
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_merged_is_what_was_saved(tmp_path, kind, num_ranks):
    from transformers import AutoModelForCausalLM

    base = make_tokenizer(make_model(tmp_path / "base", **ODD))
    pool(num_ranks).run(save, base, str(tmp_path / "saved"), kind)
    result = merge_run(tmp_path / "saved", tmp_path / "out", base=str(base))
    found = AutoModelForCausalLM.from_pretrained(result.folder, dtype=torch.float32).state_dict()
    for name, value in moved(base).state_dict().items():
        assert torch.equal(found[name], value), name
