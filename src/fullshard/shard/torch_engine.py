"""The torch engine: PyTorch's ``fully_shard`` (FSDP2) behind our interface, with guards for what it would do silently:
gradients are summed, never divided; adapters, 0-d and small tensors stay out, replicated; the root is resharded."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from fullshard.device import device_of
from fullshard.shard.interface import Shard, in_later_replica, local_part
from fullshard.train.precision import Precision

SMALL = 1 << 14  # elements: a tensor of fewer rows than ranks, which fully_shard would pad, is then kept whole


def _compute_in(dtype: torch.dtype | None, names: list[str], module: nn.Module, given: Any, *_: Any) -> None:
    kind = next((one.dtype for one in given if isinstance(one, torch.Tensor) and one.is_floating_point()), dtype)
    for name in names:  # what stands in __dict__ hides the parameter; fp32 products of rounded values are a proof's
        module.__dict__.pop(name, None)
        if dtype is not None:
            module.__dict__[name] = module._parameters[name].to(dtype).to(kind)


class TorchShardedModel:
    """A ``ShardedModel`` over ``fully_shard``; Shard(0) only, so that each rank's rows are one contiguous range."""

    def __init__(
        self, model: nn.Module, units: list[list[nn.Module]], replicated: set[nn.Parameter], mesh: DeviceMesh,
        precision: Precision, strategy: str = "full", reduce_each: bool = False,
    ) -> None:  # fmt: skip
        self.module, self._reduce_each = model, reduce_each
        self._num_ranks, self._rank = mesh.size(-1), mesh.get_coordinate()[-1]  # among which parameters are cut
        self._num_replicas, self._is_copy = mesh.size() // mesh.size(-1), in_later_replica(mesh)
        self._prefix = getattr(model, "name_prefix", "")
        self._full_shapes = {name: tuple(parameter.shape) for name, parameter in self._named_parameters()}
        small = {p for p in model.parameters() if not p.dim() or (len(p) < self._num_ranks and p.numel() <= SMALL)}
        for module in model.modules():  # fully_shard casts only its own
            own = [name for name, p in module._parameters.items() if p in small - replicated]
            module.register_forward_pre_hook(partial(_compute_in, precision.compute, own)) if own else None
            module.register_forward_hook(partial(_compute_in, None, own), always_call=True) if own else None
        whole = replicated | small
        self._replicated = {name for name, parameter in self._named_parameters() if parameter in whole}
        policy = MixedPrecisionPolicy(precision.compute, precision.reduce, cast_forward_inputs=False)
        for unit in units:
            keep = len(unit) > 1  # the head's, needed again first thing in backward: freeing it in between is waste
            modules, frees = unit if keep else unit[0], not keep and strategy == "full"
            fully_shard(modules, mesh=mesh, mp_policy=policy, reshard_after_forward=frees, ignored_params=whole)
            if isinstance(unit[0], nn.Embedding) and not keep:
                unit[0].set_unshard_in_backward(False)  # its gradient needs no weights
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False, ignored_params=whole)
        self._fsdp_modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for module in self._fsdp_modules:
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
            module.set_reduce_scatter_unused_params(True)  # else ranks that use different ones mix them up
        device = device_of(mesh)  # as to_empty does it, which would turn buffers to garbage
        model._apply(lambda one: torch.empty_like(one, device=device) if one.is_meta else one.to(device))

    def shards(self) -> list[Shard]:
        """This rank's ranges, in parameter order, tied parameters once."""
        self.after_step()
        found = []
        for name, parameter in self._named_parameters():
            shape, value = self._full_shapes[name], local_part(parameter)
            gradient = local_part(parameter.grad) if parameter.grad is not None else None
            whole = name in self._replicated
            rows = 0 if whole else min(self._rank * -(-shape[0] // self._num_ranks), shape[0])  # before this rank's
            start, is_copy = rows * math.prod(shape[1:]), self._is_copy or (whole and self._rank > 0)
            stop, trainable = start + value.numel(), parameter.requires_grad
            found.append(Shard(name, shape, start, stop, value, gradient, trainable, is_copy))
        return found

    @contextmanager
    def microbatch(self, last: bool) -> Iterator[None]:
        """Around one forward and backward; ``last``: sum the gradients over the ranks."""
        self.module.set_requires_gradient_sync(last or self._reduce_each)
        yield
        if last:
            self._sum_replicated()

    def after_step(self) -> None:
        """Free what a forward without backward left gathered (the root and the head's group)."""
        for module in self._fsdp_modules:
            module.reshard()

    def optimizer_groups(self) -> list[dict[str, Any]]:
        """(name, tensor) pairs by decay (matrices), sharded and replicated ones apart: fused ones cannot mix them."""
        self.after_step()
        groups: dict[tuple[bool, bool], list[tuple[str, torch.Tensor]]] = {}
        for name, parameter in self._named_parameters():
            if parameter.requires_grad:
                key = (len(self._full_shapes[name]) > 1, name in self._replicated)
                groups.setdefault(key, []).append((name, parameter))
        return [{"params": pairs, "decay": decay} for (decay, _), pairs in groups.items()]

    def replicas(self, name: str) -> int:
        """That of a mesh's replicas (1 without) where sharded, the number of ranks where replicated."""
        return self._num_replicas * (self._num_ranks if name in self._replicated else 1)

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self.module.named_parameters():
            yield name.removeprefix(self._prefix), parameter

    def _sum_replicated(self) -> None:
        parameters = [p for name, p in self._named_parameters() if name in self._replicated and p.requires_grad]
        if not parameters or dist.get_world_size() == 1:
            return
        for parameter in parameters:  # one that this rank did not use takes part with zeros: every rank has the same
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        dtype = torch.promote_types(parameters[0].dtype, torch.float32)
        flat = torch.cat([parameter.grad.reshape(-1).to(dtype) for parameter in parameters])
        dist.all_reduce(flat, op=dist.ReduceOp.SUM)
        for parameter, part in zip(parameters, flat.split([one.numel() for one in parameters]), strict=True):
            parameter.grad.copy_(part.view_as(parameter))
