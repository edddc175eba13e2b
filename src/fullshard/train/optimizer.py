"""Optimizer, learning rate, clipping and the finite check, on whatever shards the engine holds."""

from __future__ import annotations

import math

import torch

from fullshard.config import RunConfig
from fullshard.errors import TrainError
from fullshard.ranks import Ranks
from fullshard.shard import Shard, ShardedModel, local_part

ADAM_BETAS = (0.9, 0.999)
MOMENTS = ("exp_avg", "exp_avg_sq")


def learning_rate_at(step: int, num_steps: int, peak: float, schedule: str, warmup: float) -> float:
    """Learning rate of step ``step`` (1-based) of ``num_steps``.

    ``warmup`` below 1 is a share of all steps (rounded up), else a number of steps: linear from peak / warmup to peak.
    After it: constant; linear to peak / rest at the last step; cosine from peak at the first step after warm-up towards
    0.
    """
    warmup_steps = math.ceil(warmup * num_steps) if warmup < 1 else int(warmup)
    if step <= warmup_steps:
        return peak * step / warmup_steps
    progress = (step - 1 - warmup_steps) / max(1, num_steps - warmup_steps)
    if schedule == "linear":
        return peak * (1 - progress)
    if schedule == "cosine":
        return peak * 0.5 * (1 + math.cos(math.pi * progress))
    return peak


def build_optimizer(config: RunConfig, sharded: ShardedModel) -> torch.optim.Optimizer:
    """AdamW (fused) or SGD over the engine's stable tensors; weight decay on matrices only."""
    groups = [
        {"params": group["params"], "weight_decay": config.train.weight_decay if group["decay"] else 0.0}
        for group in sharded.optimizer_groups()
    ]
    if config.train.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.learning_rate)
    optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=ADAM_BETAS, fused=True)
    # The moments exist from the start: the trial step then holds all that a real step holds, and resuming only copies.
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                **{moment: torch.zeros_like(parameter) for moment in MOMENTS},
            }
    return optimizer


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[tuple[str, str], torch.Tensor]:
    """(parameter name, moment) -> local flat view of the moment, laid out like the parameter's shard."""
    found = {}
    for group in optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            for moment in MOMENTS:
                if moment in optimizer.state[parameter]:
                    found[name, moment] = local_part(optimizer.state[parameter][moment])
    return found


def set_step_count(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Set AdamW's own step counter (its bias correction) on every parameter."""
    for state in optimizer.state.values():
        if "step" in state:
            state["step"].fill_(float(step))


def gradient_norm(sharded: ShardedModel, shards: list[Shard], ranks: Ranks) -> float:
    """Global L2 norm of the trainable gradients, the same plain number on every rank; not finite if any element is
    not."""
    squares = [
        shard.gradient.float().square().sum() / sharded.replicas(shard.name)
        for shard in shards
        if shard.gradient is not None and shard.gradient.numel()
    ]
    total = torch.stack(squares).sum() if squares else torch.zeros((), device=ranks.device)
    total = float(ranks.sum(total))
    return math.sqrt(total) if math.isfinite(total) else math.nan


def clip_gradients(shards: list[Shard], norm: float, clip_norm: float) -> None:
    """Scale all gradients by clip_norm / norm where the norm is larger; 0 switches clipping off."""
    if clip_norm and norm > clip_norm:
        scale = clip_norm / norm
        for shard in shards:
            if shard.gradient is not None:
                shard.gradient.mul_(scale)


def require_finite(shards: list[Shard], norm: float, loss: float, step: int, ranks: Ranks) -> None:
    """Raise TrainError on every rank, naming rank and parameter, where the norm or the loss is not finite."""
    if math.isfinite(norm) and math.isfinite(loss):
        return
    bad = [s.name for s in shards if s.gradient is not None and not bool(torch.isfinite(s.gradient).all())]
    places = [
        f"rank {rank}, {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}"
        for rank, names in enumerate(ranks.gather_objects(bad))
        if names
    ]
    raise TrainError(
        f"Step {step}: the {'gradient' if places else 'loss'} is not finite ({'; '.join(places) or f'loss {loss}'}).",
        "Lower train.learning_rate, or train with train.precision=fp32; the last checkpoint is untouched.",
    )
