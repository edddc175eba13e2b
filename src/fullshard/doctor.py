"""Is this machine able to do the job? Each check states what it found and, where something is wrong, the fix."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.version import Version

from fullshard.errors import ConfigError
from fullshard.planning.hardware import find_accelerator, read_host

MINIMUM_PYTHON = (3, 11)
MINIMUM_VERSIONS = {"torch": "2.11", "transformers": "5.17", "peft": "0.21", "safetensors": "0.8"}
RANKS_TIMEOUT_SECONDS = 30
NEEDED_MEMORY_BYTES = 4_000_000_000  # the quickstart: two processes and a 135M model in fp32
NEEDED_DISK_BYTES = 3_000_000_000

RANK_PROGRAM = """
import sys, datetime, torch, torch.distributed as dist
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[2]}", rank=int(sys.argv[1]), world_size=2,
                        timeout=datetime.timedelta(seconds=20))
value = torch.full((1000,), float(sys.argv[1]) + 1.0)
dist.all_reduce(value)
assert value.eq(3.0).all(), value[0]
dist.destroy_process_group()
print("sum is right")
"""


@dataclass(frozen=True)
class Check:
    """One finding. ``ok``: ok | warn | fail; ``fix`` is empty where nothing is wrong."""

    name: str
    ok: str
    finding: str
    fix: str = ""


@dataclass(frozen=True)
class MachineReport:
    """All checks of this machine."""

    checks: tuple[Check, ...]

    @property
    def healthy(self) -> bool:
        """Whether no check failed (warnings are allowed)."""
        return all(check.ok != "fail" for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"healthy": self.healthy, "checks": [asdict(check) for check in self.checks]}

    def to_text(self) -> str:
        """One line a check, and its fix below where there is one."""
        width = max(len(check.name) for check in self.checks)
        lines = []
        for check in self.checks:
            lines.append(f"{check.ok:<4}  {check.name:<{width}}  {check.finding}")
            if check.fix:
                lines.append(f"{'':<{width + 8}}-> {check.fix}")
        failed = sum(check.ok == "fail" for check in self.checks)
        lines.append("This machine is ready." if not failed else f"{failed} of {len(self.checks)} checks failed.")
        return "\n".join(lines)


def check_machine() -> MachineReport:
    """Run every check in order; about 10 s, nothing is installed or changed. What cannot run is a finding."""
    checks = [_check_python(), *(_check_package(name, least) for name, least in MINIMUM_VERSIONS.items())]
    if checks[1].ok != "fail":  # torch is there
        checks.append(_check_build())
    if "fail" in (checks[1].ok, checks[-1].ok):
        return MachineReport((*checks, _check_memory(), _check_disk(Path.cwd())))
    checks += [_check_accelerators(), _check_cores(), _check_memory(), _check_disk(Path.cwd())]
    return MachineReport((*checks, _check_products(), _check_cache(), check_ranks()))


def _check_python() -> Check:
    found = ".".join(str(part) for part in sys.version_info[:3])
    if sys.version_info[:2] < MINIMUM_PYTHON:
        return Check("Python", "fail", found, "Use Python 3.11 or newer.")
    return Check("Python", "ok", f"{found} ({sys.executable})")


def _check_package(name: str, least: str) -> Check:
    try:
        found = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Check(name, "fail", "not installed", f'pip install "{name}>={least}"')
    if Version(found) < Version(least):
        return Check(name, "fail", f"{found}, older than {least}", f'pip install --upgrade "{name}>={least}"')
    return Check(name, "ok", found)


def _check_build() -> Check:
    try:
        import torch

        from fullshard.device import has_unused_accelerator, torch_build

        build, unused = torch_build(), has_unused_accelerator()
    except (ImportError, OSError, RuntimeError, ConfigError) as error:  # torch loads torch_npu, which wants CANN
        reason = str(error.__cause__ or error).strip().partition("\n")[0]
        return Check("torch build", "fail", f"torch cannot be used: {reason}", "Ascend: see docs/ascend.md")
    if unused:
        fix = "Install torch for it, or make it visible: CUDA_VISIBLE_DEVICES, ASCEND_RT_VISIBLE_DEVICES."
        return Check("torch build", "warn", f"{build}; this machine has an accelerator that torch does not use", fix)
    if not torch.distributed.is_available():
        return Check("torch build", "fail", f"{build}, without torch.distributed", "Install torch's official wheel.")
    return Check("torch build", "ok", build)


def _check_accelerators() -> Check:
    from fullshard.device import device_kind, device_memory, device_name, num_devices

    if device_kind() == "cpu":
        return Check("accelerators", "ok", "none: training runs on the CPU")
    name = device_name()
    free, total = device_memory()
    finding = f"{num_devices()} x {name}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free on the first"
    if free < total / 2:
        return Check("accelerators", "warn", finding, "Another process holds memory: see nvidia-smi or npu-smi.")
    if find_accelerator(name) is None:
        finding += " (not in our table; its rate is timed here)"
    return Check("accelerators", "ok", finding)


def _check_cores() -> Check:
    host = read_host()
    if host.cores < 2:
        return Check("cores", "warn", f"1 ({host.processor})", "CPU training starts one rank; two cores make it two.")
    return Check("cores", "ok", f"{host.cores} ({host.processor})")


def _check_memory() -> Check:
    host = read_host()
    finding = f"{host.available_bytes / 1e9:.1f} of {host.total_bytes / 1e9:.1f} GB free"
    if host.available_bytes < NEEDED_MEMORY_BYTES:
        return Check(
            "memory", "warn", finding, f"The quickstart wants {NEEDED_MEMORY_BYTES / 1e9:.0f} GB: close programs."
        )
    return Check("memory", "ok", finding)


def _check_disk(folder: Path) -> Check:
    free = shutil.disk_usage(folder).free
    finding = f"{free / 1e9:.1f} GB free at {folder}"
    if free < NEEDED_DISK_BYTES:
        wanted = f"The quickstart writes about {NEEDED_DISK_BYTES / 1e9:.0f} GB: free some or run elsewhere."
        return Check("disk", "warn", finding, wanted)
    return Check("disk", "ok", finding)


def _check_products() -> Check:
    from fullshard.device import device_kind
    from fullshard.planning.speed import measure_rates

    kind = device_kind()
    rates = measure_rates(kind, read_host().cores)
    faster = "bf16" if rates.bf16 > 1.2 * rates.fp32 or (kind != "cpu" and rates.bf16) else "fp32"
    unit = "a core" if kind == "cpu" else "a device"
    finding = (
        f"fp32 {rates.fp32 / 1e9:,.3g}, bf16 {rates.bf16 / 1e9:,.3g} GFLOP/s {unit}: precision auto means {faster}"
    )
    return Check("timed products", "ok", finding)


def _check_cache() -> Check:
    from fullshard.device import cache_folder

    folder = cache_folder()
    fix = "Set FULLSHARD_CACHE to a folder that you may write."
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return Check("cache", "fail", f"{folder} cannot be written: {error.strerror}", fix)
    return Check("cache", "ok", f"{folder} can be written")


def check_ranks(program: str = RANK_PROGRAM, timeout_seconds: float = RANKS_TIMEOUT_SECONDS) -> Check:
    """Start two real processes that sum a tensor over gloo; both are ended, whatever happens."""
    name = "two ranks (gloo)"
    fix = "Ranks talk over 127.0.0.1: check firewall and container limits; GLOO_SOCKET_IFNAME=lo may help."
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    start = time.monotonic()
    processes = []
    try:
        for rank in range(2):
            command = [sys.executable, "-c", program, str(rank), str(port)]
            processes.append(
                subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
            )
        outputs = [
            process.communicate(timeout=max(0.1, timeout_seconds - (time.monotonic() - start)))[0].decode(
                errors="replace"
            )
            for process in processes
        ]
    except subprocess.TimeoutExpired:
        return Check(name, "fail", f"no answer within {timeout_seconds:.0f} s", fix)
    except OSError as error:
        return Check(name, "fail", f"could not start a process: {error.strerror}", fix)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
    for process, output in zip(processes, outputs, strict=True):
        if process.returncode:
            last = output.strip().splitlines()[-1] if output.strip() else f"exit code {process.returncode}"
            return Check(name, "fail", last, fix)
    return Check(name, "ok", f"an all-reduce over two processes is right ({time.monotonic() - start:.1f} s with start)")
