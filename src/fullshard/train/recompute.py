"""Activations recomputed in backward, block by block, and the proof that gradients still reach every trained tensor."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fullshard.errors import TrainError
from fullshard.model.blocks import find_blocks
from fullshard.model.names import is_adapter
from fullshard.ranks import Ranks
from fullshard.shard import Shard


def recompute_blocks(causal_lm: nn.Module, recompute: bool | int) -> list[str]:
    """Recompute the first ``recompute`` blocks (True: all), inside the engine's hooks. Returns log lines."""
    blocks, lines = find_blocks(causal_lm)[1], []
    own = [module for module in causal_lm.modules() if getattr(module, "gradient_checkpointing", False) is True]
    for module in own:
        module.gradient_checkpointing = False
    if own:
        lines.append("recomputation: the model's own gradient checkpointing was on and is now off")
    count = len(blocks) if recompute is True else min(int(recompute), len(blocks))
    for block in blocks[:count]:
        block.forward = partial(_forward, block, block.forward)
    return [*lines, f"recomputation: the first {count} of {len(blocks)} blocks"] if count else lines


def _forward(block: nn.Module, forward: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
    if block.training and torch.is_grad_enabled():
        return checkpoint(forward, *inputs, use_reentrant=False, **named)
    return forward(*inputs, **named)


class GradientReach:
    """Watches the first step: which adapters were used in forward, and which trained tensors got a gradient."""

    def __init__(self, causal_lm: nn.Module) -> None:
        owners = {_owner(name) for name, _ in causal_lm.named_parameters() if is_adapter(name)}
        self._used: set[str] = set()
        self._hooks = [
            module.register_forward_hook(lambda *_, name=name: self._used.add(name))
            for name, module in causal_lm.named_modules()
            if name in owners
        ]

    def report(self, shards: list[Shard], ranks: Ranks) -> str:
        """The log's line after the first backward; TrainError where a used adapter (A or B) got nothing. Collective."""
        for hook in self._hooks:
            hook.remove()
        mine = {s.name for s in shards if s.gradient is not None and (not is_adapter(s.name) or bool(s.gradient.any()))}
        found = ranks.gather_objects((mine, self._used))
        got, used = (set().union(*(pair[place] for pair in found)) for place in (0, 1))
        alive = {_owner(name) for name in got if is_adapter(name)}
        trained = [shard.name for shard in shards if shard.trainable]
        missing = [name for name in trained if name not in got and _owner(name) not in alive]
        dead = [name for name in missing if _owner(name) in used]
        if dead:
            message = f"{len(dead)} adapter tensors took part and got no gradient, first {dead[0]}."
            raise TrainError(message, "Set train.recompute=none; if that is no help, leave the layer out: lora.targets")
        line = f"trainable tensors that received a gradient: {len(trained) - len(missing)} of {len(trained)}"
        return f"{line}; the first that this step did not use: {missing[0]}" if missing else line


def _owner(name: str) -> str:
    return name.split(".lora_")[0]
