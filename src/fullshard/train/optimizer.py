"""Optimizer, learning rate, clipping and the finite check, on whatever shards the engine holds."""

import math
import re
from collections import Counter
import torch
from fullshard.checkpoint.ranges import Moments
from fullshard.config import RunConfig
from fullshard.errors import refusal
from fullshard.ranks import Ranks
from fullshard.shard import Shard, ShardedModel, local_part
from fullshard.train.precision import LossScale, round_stochastically

ROUNDED_AT_ONCE = 1 << 22  # elements; their random bits take 8 bytes each
ADAM_BETAS, MOMENTS = (0.9, 0.999), ("exp_avg", "exp_avg_sq")


def learning_rate_at(step: int, num_steps: int, peak: float, schedule: str, warmup: float) -> float:
    """Rate of ``step`` (1-based): linear over ``warmup`` (share or steps), then constant, linear or cosine."""
    warmup_steps = math.ceil(warmup * num_steps) if warmup < 1 else int(warmup)
    if step <= warmup_steps:
        return peak * step / warmup_steps
    progress = (step - 1 - warmup_steps) / max(1, num_steps - warmup_steps)
    return peak * {"linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress))}.get(schedule, 1.0)


def build_optimizer(config: RunConfig, sharded: ShardedModel) -> tuple[torch.optim.Optimizer, Moments]:
    """AdamW (fused) or SGD over the engine's stable tensors, weight decay on matrices only; and its moments."""
    decay = config.train.weight_decay
    groups = [{"params": one["params"], "weight_decay": decay * one["decay"]} for one in sharded.optimizer_groups()]
    if config.train.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.learning_rate), {}
    optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=ADAM_BETAS, fused=True)
    moments: Moments = {}  # from the start: the trial step then holds all that a real step holds, resuming only copies
    for group in optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            state = {moment: torch.zeros_like(parameter, dtype=torch.float32) for moment in MOMENTS}
            moments |= {(name, moment): local_part(value) for moment, value in state.items()}
            optimizer.state[parameter] = state | {"step": torch.zeros((), device=parameter.device)}
    return optimizer, moments


@torch.no_grad()
def take_step(optimizer: torch.optim.Optimizer, shards: list[Shard], key: str, peak: float = 0) -> Counter:
    """One update; bf16 weights in fp32, rounded stochastically by ``key``. With ``peak``, a learning rate: how many
    elements are "asked" to move at it, and how many rounding to nearest would have "left"."""
    counts: Counter[tuple[str, str]] = Counter()
    if all(shard.value.dtype == torch.float32 for shard in shards if shard.trainable):
        optimizer.step()
        return counts
    starts = {shard.name: shard.start for shard in shards}
    for group in optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            if parameter.grad is None:
                continue
            kept, exact, state = local_part(parameter), local_part(parameter).float(), optimizer.state[parameter]
            exact.grad = local_part(parameter.grad).float()
            single = type(optimizer)([{**group, "params": [(name, exact)]}])
            single.state[exact] = {k: local_part(value) if value.dim() else value for k, value in state.items()}
            single.step()
            if peak:
                update, place = (exact - kept) * (peak / group["lr"]), re.sub(r"\.\d+\.", ".*.", name)
                counts[place, "asked"] += int((update != 0).sum())
                counts[place, "left"] += int(((update != 0) & ((kept + update).bfloat16() == kept)).sum())
            for low in range(0, len(exact), ROUNDED_AT_ONCE):
                part = slice(low, low + ROUNDED_AT_ONCE)
                kept[part] = round_stochastically(exact[part], starts[name] + low, f"{key}:{name}")
    return counts


def gradient_norm(sharded: ShardedModel, shards: list[Shard], ranks: Ranks, scale: float = 1.0) -> float:
    """Global L2 norm of the gradients, divided in place by ``scale`` first: one on all ranks; NaN if not finite."""
    held = [shard for shard in shards if shard.gradient is not None and shard.gradient.numel()]
    for shard in held if scale != 1 else ():
        shard.gradient.div_(scale)
    size = 1 << (18 if ranks.device.type == "cpu" else 24)  # elements, of which a CPU keeps the squares in its cache
    pieces = [(shard.name, one) for shard in held for one in shard.gradient.split(size)]
    squares = [one.float().square().sum() / sharded.replicas(name) for name, one in pieces]
    total = float(ranks.sum(torch.stack(squares).sum() if squares else torch.zeros((), device=ranks.device)))
    return math.sqrt(total) if math.isfinite(total) else math.nan


def clip_gradients(shards: list[Shard], norm: float, clip_norm: float) -> None:
    """Scale all gradients by clip_norm / norm where the norm is larger; 0 switches clipping off."""
    for shard in shards if clip_norm and norm > clip_norm else ():
        if shard.gradient is not None:
            shard.gradient.mul_(clip_norm / norm)


def require_finite(shards: list[Shard], norm: float, loss: float, step: int, ranks: Ranks, scale: LossScale) -> str:
    """Empty, or the line of a skipped step (fp16 lowers ``scale``); else TrainError on all ranks. A collective call."""
    if math.isfinite(norm) and math.isfinite(loss):
        scale.update(good=True)
        return ""
    bad = [s.name for s in shards if s.gradient is not None and not bool(torch.isfinite(s.gradient).all())]
    gathered = enumerate(ranks.gather_objects(bad))
    found = [f"rank {rank}, {own[0]}" + f" and {len(own) - 1} more" * (len(own) > 1) for rank, own in gathered if own]
    problem = f"non-finite gradient ({'; '.join(found)})" if found else f"non-finite loss {loss} or norm {norm}"
    if found and math.isfinite(loss) and scale.update(good=False):
        return f"skipped step {step}: {problem}"
    raise refusal("not_finite_in_training", step=step, problem=problem)
