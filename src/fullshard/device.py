"""The only door to cuda, npu and cpu. Sources of what is said of npu: docs/ascend.md."""

import functools
import importlib.util
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
import psutil
import torch
from torch.nn.attention.varlen import varlen_attn
from fullshard.errors import Blame, ConfigError, refusal

for cache in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):  # oneDNN's products by shape: of 1,024 each,
    os.environ.setdefault(cache, "128")  # torch's defaults, a run's memory grows by 14 MB a step (LOG, 2026-12-01)
HOST_BACKEND = "gloo"  # carries CPU tensors and Python objects, whatever the device
device_memory = torch.accelerator.get_memory_info  # free and total bytes of an accelerator, by index (default: own)
ATTENTION = "sdpa"  # what to ask of transformers: torch's own attention is the one that cpu, cuda and npu all bring


@functools.cache
def load_npu_backend() -> None:
    """Import torch_npu where torch has not, but never beside another accelerator. ConfigError where that fails."""
    if "torch_npu" in sys.modules or torch.accelerator.is_available() or importlib.util.find_spec("torch_npu") is None:
        return
    hint = "Run CANN's set_env.sh first, see docs/ascend.md. On a machine without NPU: pip uninstall torch_npu"
    with Blame(ConfigError, "torch_npu is installed and cannot be loaded", hint):
        importlib.import_module("torch_npu")


def device_kind() -> str:
    """``cuda``, ``npu`` or ``cpu``: what this machine computes on. Raises ConfigError as ``load_npu_backend``."""
    load_npu_backend()
    return torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"


def kind_of_card(product: str) -> str:
    """The kind of a card that is not here, by its product's name (lower case)."""
    return "npu" if product.startswith("ascend") else "cuda"


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
    if kind == "npu":  # private tensor formats: HCCL refuses their views with an offset, which sharding makes
        torch.npu.config.allow_internal_format = False
    return torch.device(kind, local_rank)


def device_of(mesh: torch.distributed.DeviceMesh) -> torch.device:
    """This rank's device in a mesh."""
    kind = mesh.device_type
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())


def device_name(index: int = 0) -> str:
    """An accelerator's name as its driver gives it: ``NVIDIA A100-SXM4-80GB``, ``Ascend910B3``."""
    return torch.get_device_module(device_kind()).get_device_name(index)


def torch_build() -> str:
    """What torch was built for: ``CUDA 12.8``, ``ROCm 6.4``, ``CPU``, ``CPU + torch_npu 2.13.0``."""
    if found := torch.version.cuda or torch.version.hip:
        return f"{'CUDA' if torch.version.cuda else 'ROCm'} {found}"
    load_npu_backend()
    torch_npu = sys.modules.get("torch_npu")
    return f"CPU + torch_npu {torch_npu.__version__}" if torch_npu else "CPU"


def why_unused() -> str:
    """Torch's reason for computing on the CPU where a driver (NVIDIA's or Ascend's) is on this machine; else empty."""
    has_nvidia = Path("/proc/driver/nvidia/version").exists()
    if device_kind() != "cpu" or not (has_nvidia or Path("/dev/davinci_manager").exists()):
        return ""
    try:
        torch.cuda.init() if has_nvidia else None
    except (RuntimeError, AssertionError) as error:  # a driver that is too old, a build without CUDA
        return str(error).partition("\n")[0]
    return "no card is visible" if has_nvidia else "torch_npu is not installed, or sees no card"


def supports_bf16() -> bool:
    """Whether the device has bf16 products of its own (V100, T4 and Ascend 910A have none); CPUs always can."""
    kind = device_kind()
    return kind == "cpu" or bool(torch.get_device_module(kind).is_bf16_supported(including_emulation=False))


class SideStream:
    """A stream beside the current one, entered after all that it has been given so far; on CPU nothing."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.Stream(device) if device.type != "cpu" else None
        self._outer: torch.Stream | None = None

    def __enter__(self) -> None:
        if self._stream is not None:
            self._outer = torch.accelerator.current_stream()
            self._stream.wait_stream(self._outer)
            torch.accelerator.set_stream(self._stream)

    def __exit__(self, *error: object) -> None:
        if self._stream is not None:
            torch.accelerator.set_stream(self._outer)

    def join(self) -> None:
        """Let the current stream wait for this one."""
        if self._stream is not None:
            torch.accelerator.current_stream().wait_stream(self._stream)


def one_core_environment() -> dict[str, str]:
    """This process's environment for a child that tokenises on one core."""
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"), "1")
    return {**os.environ, **one, "TOKENIZERS_PARALLELISM": "false"}


def require_tf32() -> None:
    """ConfigError where fp32 products cannot run in TF32 (NVIDIA from Ampere on) or HF32 (Ascend 910B on, as bf16)."""
    kind = device_kind()
    if not (torch.cuda.is_tf32_supported() if kind == "cuda" else kind == "npu" and supports_bf16()):
        raise refusal("no_tf32", kind=kind)


def set_fast_fp32(fast: bool) -> None:
    """fp32 products in TF32 or HF32 (ConfigError: the chip has none), or in full fp32: every switch is set."""
    require_tf32() if fast else None
    torch.set_float32_matmul_precision("high" if fast else "highest")
    torch.backends.cudnn.allow_tf32 = fast
    if device_kind() == "npu":
        torch.npu.matmul.allow_hf32, torch.npu.conv.allow_hf32 = fast, fast


def varlen_attention(kind: str, dtype: torch.dtype) -> Callable[..., torch.Tensor] | None:
    """Torch's variable-length attention where it runs: CUDA, 16 bits. None elsewhere. Not run yet."""
    return varlen_attn if kind == "cuda" and dtype in (torch.bfloat16, torch.float16) else None


def collective_backend(kind: str) -> str:
    """The backend string for ``init_process_group``: gloo on CPU; accelerators also keep gloo for CPU tensors."""
    own = f"{kind}:{torch.distributed.get_default_backend_for_device(kind)}"
    return HOST_BACKEND if kind == "cpu" else f"cpu:{HOST_BACKEND},{own}"


def peak_memory_bytes(device: torch.device) -> int:
    """Peak since ``reset_peak_memory``: the allocator's, or on CPU the resident one (VmHWM, file pages included)."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated()
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s*(\d+)", status.read_text() if status.is_file() else "")
    return int(found[1]) * 1024 if found else psutil.Process().memory_info().rss


def reset_peak_memory(device: torch.device) -> None:
    """Start a new peak measurement; silently impossible in some containers on CPU (the peak then spans the process)."""
    if device.type != "cpu":
        return torch.accelerator.reset_peak_memory_stats()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def release_memory() -> None:
    """Give cached accelerator memory back to the driver, so that other processes can use it; nothing on CPU."""
    if device_kind() != "cpu":
        torch.accelerator.empty_cache()


def cache_folder() -> Path:
    """Where prepared models and data rest between runs: FULLSHARD_CACHE, else ~/.cache/fullshard."""
    return Path(os.environ.get("FULLSHARD_CACHE") or Path.home() / ".cache" / "fullshard")
