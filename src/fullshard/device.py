"""The only door to cuda, npu and cpu: kind, number of devices, memory figures, seeds, threads, the cache folder."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import torch


def device_kind() -> str:
    """``cuda``, ``npu`` or ``cpu``: what this machine computes on."""
    accelerator = (
        torch.accelerator.current_accelerator(check_available=True) if torch.accelerator.is_available() else None
    )
    return accelerator.type if accelerator is not None else "cpu"


def num_devices() -> int:
    """Number of accelerators; 0 on a CPU machine."""
    return torch.accelerator.device_count() if device_kind() != "cpu" else 0


def num_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def default_ranks() -> int:
    """Ranks to start where none are asked for: every accelerator, else 2 on a CPU with 2 or more cores, else 1."""
    return num_devices() or min(2, num_cores())


def select_device(local_rank: int) -> torch.device:
    """The device of a local rank; makes it the current one on an accelerator."""
    kind = device_kind()
    if kind == "cpu":
        return torch.device("cpu")
    torch.accelerator.set_device_index(local_rank)
    return torch.device(kind, local_rank)


def set_threads(num_threads: int) -> None:
    """CPU threads for this process's operators."""
    torch.set_num_threads(max(1, num_threads))


def use_exact_fp32() -> None:
    """fp32 products in full fp32: TF32 (cuda) and HF32 (npu) off, since their defaults differ by version."""
    torch.set_float32_matmul_precision("highest")
    if device_kind() == "npu":
        torch.npu.matmul.allow_hf32 = False
        torch.npu.conv.allow_hf32 = False


def collective_backend(kind: str) -> str:
    """The backend string for ``init_process_group``: gloo on CPU; accelerators also keep gloo for CPU tensors."""
    if kind == "cpu":
        return "gloo"
    return f"cpu:gloo,{kind}:{torch.distributed.get_default_backend_for_device(kind)}"


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory since ``reset_peak_memory``: the allocator's on accelerators, the resident
    peak (VmHWM, file pages included) on CPU."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated()
    status = Path("/proc/self/status")
    if not status.is_file():
        return psutil.Process().memory_info().rss
    for line in status.read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return psutil.Process().memory_info().rss


def anonymous_memory_bytes() -> int:
    """Anonymous (not file-backed) resident memory of this process; the resident set where /proc is missing."""
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text().splitlines():
            if line.startswith("RssAnon"):
                return int(line.split()[1]) * 1024
    return psutil.Process().memory_info().rss


def reset_peak_memory(device: torch.device) -> None:
    """Start a new peak measurement; silently impossible in some containers on CPU (the peak then spans the process)."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats()
        return
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def release_memory(device: torch.device) -> None:
    """Give cached accelerator memory back to the driver, so that other processes can use it; nothing on CPU."""
    if device.type != "cpu":
        torch.accelerator.empty_cache()


def seed_everything(seed: int) -> None:
    """Seed torch's generators on every device (dropout)."""
    torch.manual_seed(seed)


def cache_folder() -> Path:
    """Where prepared models and data rest between runs: FULLSHARD_CACHE, else ~/.cache/fullshard."""
    return Path(os.environ.get("FULLSHARD_CACHE") or Path.home() / ".cache" / "fullshard")
