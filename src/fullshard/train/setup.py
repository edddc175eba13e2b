"""From a config and a plan to a sharded model with its weights loaded, each rank reading only its own ranges."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fullshard.config import RunConfig
from fullshard.model.adapters import add_adapters, start_value
from fullshard.model.blocks import find_units, is_tied
from fullshard.model.load import WeightFiles, build_on_meta, check_weights, load_buffers
from fullshard.model.names import is_adapter
from fullshard.ranks import Ranks
from fullshard.shard import ShardedModel, shard_model
from fullshard.train.loss import LossModel
from fullshard.train.precision import Precision, set_storage
from fullshard.train.recompute import set_recompute

LOSS_CHECK_TOKENS = 64
LOSS_PATH_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # of the largest logit


@dataclass(frozen=True)
class Built:
    """A loaded, sharded model ready to train."""

    sharded: ShardedModel
    loss_model: LossModel
    num_parameters: int
    num_trainable: int
    tied: bool


def build_sharded(config: RunConfig, ranks: Ranks, precision: Precision, recompute: bool) -> Built:
    """Build on the meta device, add adapters, shard, load. A collective call on all ranks."""
    causal_lm = build_on_meta(config.model.path)
    tied = is_tied(causal_lm)
    if config.method == "lora":
        add_adapters(causal_lm, config.lora)
    set_recompute(causal_lm, recompute)
    set_storage(causal_lm, precision)
    num_parameters = sum(parameter.numel() for parameter in causal_lm.parameters())
    num_trainable = sum(parameter.numel() for parameter in causal_lm.parameters() if parameter.requires_grad)
    files = WeightFiles(config.model.path)
    file_names = check_weights(causal_lm, files, config.model.path)
    load_buffers(causal_lm, files, causal_lm.base_model_prefix)
    loss_model = LossModel(causal_lm)
    units = find_units(causal_lm)
    adapters = {parameter for name, parameter in causal_lm.named_parameters() if is_adapter(name)}
    sharded = shard_model(loss_model, units, adapters, ranks.mesh, precision, config.engine)
    _materialize(loss_model, ranks.device)
    load_weights(sharded, files, file_names, config.train.seed)
    loss_model.train()
    return Built(sharded, loss_model, num_parameters, num_trainable, tied)


def _materialize(model: torch.nn.Module, device: torch.device) -> None:
    """Give meta parameters storage on ``device``; keep buffers, which ``to_empty`` would turn to garbage."""
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    model.to_empty(device=device)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])


@torch.no_grad()
def load_weights(sharded: ShardedModel, files: WeightFiles, file_names: dict[str, str], seed: int) -> None:
    """Fill this rank's shards: base weights from the rows that hold them, adapters from their seeded start values."""
    for shard in sharded.shards():
        if is_adapter(shard.name):
            whole = start_value(shard.name, shard.full_shape, seed).reshape(-1)
            shard.value.copy_(whole[shard.start : shard.stop])
        elif shard.start < shard.stop:
            shard.value.copy_(read_range(files, file_names[shard.name], shard.full_shape, shard.start, shard.stop))


def read_range(files: WeightFiles, name: str, shape: tuple[int, ...], start: int, stop: int) -> torch.Tensor:
    """Elements [start, stop) of a flattened file tensor, 1-d: reads the covering rows, copies nothing else."""
    if not shape:
        return files.read(name).reshape(-1)
    row_elements = 1
    for size in shape[1:]:
        row_elements *= size
    first_row = start // row_elements
    rows = files.read(name, first_row, -(-stop // row_elements)).reshape(-1)
    return rows[start - first_row * row_elements : stop - first_row * row_elements]


@torch.no_grad()
def check_loss_path(built: Built, input_ids: torch.Tensor, precision: Precision) -> str:
    """Compare our head path with the model's own logits on at most 64 tokens; fall back to the model's own if they differ.

    A collective call. Returns the line for the log.
    """
    built.loss_model.eval()
    ours = built.loss_model(input_ids, None)
    own = built.loss_model(input_ids, None, own_logits=True)
    built.loss_model.train()
    built.sharded.after_step()
    difference = float((ours - own).abs().max() / own.abs().max().clamp_min(1e-6))
    if difference <= LOSS_PATH_TOLERANCE[precision.compute]:
        return f"loss path: equal to the model's own logits (largest relative difference {difference:.1e})"
    built.loss_model.uses_own_logits = True
    return (
        f"loss path: the model's own logits, since ours differ by {difference:.1e} (full logits then exist in memory)"
    )
