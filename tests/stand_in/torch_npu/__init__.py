"""A recording stand-in for torch_npu: importing it gives torch a device "npu" on which nothing can be computed.

It has the names that device.py uses, and those that transformers imports, under the types that torch_npu 2.13 gives
them; a name that torch_npu would silently ignore (``torch.npu.matmul.allow_tf32``) is an error here. ``RECORD`` holds
what was set and asked for.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

__version__ = "2.13.0"
NUM_DEVICES = 2
RECORD: dict[str, list] = {"set": [], "backends": [], "asked": []}


class Switches:
    """An object of switches; setting one is recorded."""

    def __init__(self, place: str, *names: str) -> None:
        object.__setattr__(self, "_place", place)
        object.__setattr__(self, "_names", names)

    def __setattr__(self, name: str, value: object) -> None:
        if name not in self._names:
            raise AttributeError(f"torch.npu.{self._place} has no switch {name}")
        RECORD["set"].append((f"{self._place}.{name}", value))


class DeviceModule:
    """What torch calls ``torch.npu``."""

    matmul = Switches("matmul", "allow_hf32")
    conv = Switches("conv", "allow_hf32")
    config = Switches("config", "allow_internal_format")

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return NUM_DEVICES

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        RECORD["asked"].append(("manual_seed_all", seed))

    def get_device_name(self, index: int = 0) -> str:
        return "Ascend910B3"

    def is_bf16_supported(self, including_emulation: bool = False) -> bool:
        return True


class Guard(torch._C._acc.DeviceGuard):
    """What torch needs to make a device the current one."""

    def type_(self):
        return torch._C._autograd.DeviceType.PrivateUse1


def make_group(store, rank: int, size: int, timeout):
    """The "hccl" backend: gloo in truth, so that a group can be made; recorded."""
    RECORD["backends"].append(("hccl", rank, size))
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def npu_fusion_attention(*arguments, **keywords):
    """transformers imports this name for its flash_attention_2 on an NPU; SDPA is asked for, so nobody may call it."""
    raise AssertionError("flash_attention_2 was used")


if torch._C._get_privateuse1_backend_name() != "npu":
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(rename="npu", backend_module=DeviceModule(), device_guard=Guard())
    dist.Backend.register_backend("hccl", make_group, devices=["npu"])
