"""Is this machine able to do the job? Each check states what it found and, where something is wrong, the fix."""

import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml
from packaging.version import Version

from fullshard.errors import ConfigError
from fullshard.planning.hardware import find_accelerator, read_host

FACTS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
MINIMUM_VERSIONS, NEEDED_GB = FACTS["minimum_versions"], FACTS["needed_gb"]
RANKS_TIMEOUT_SECONDS = 30

RANK_PROGRAM = """
import sys, datetime, torch, torch.distributed as dist
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[2]}", rank=int(sys.argv[1]), world_size=2,
                        timeout=datetime.timedelta(seconds=20))
value = torch.full((1000,), float(sys.argv[1]) + 1.0)
dist.all_reduce(value)
assert value.eq(3.0).all(), value[0]
dist.destroy_process_group()
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
            lines += [f"{'':<{width + 8}}-> {check.fix}"] if check.fix else []
        failed = sum(check.ok == "fail" for check in self.checks)
        lines.append("This machine is ready." if not failed else f"{failed} of {len(self.checks)} checks failed.")
        return "\n".join(lines)


def check_machine() -> MachineReport:
    """Run every check in order; about 10 s, nothing is installed or changed. What cannot run is a finding."""
    checks = [Check("Python", "ok", f"{platform.python_version()} ({sys.executable})")]  # an old one installs nothing
    checks += [_check_package(name, least) for name, least in MINIMUM_VERSIONS.items()]
    if checks[1].ok != "fail":  # torch is there
        checks.append(_check_build())
    usable = "fail" not in (checks[1].ok, checks[-1].ok)
    checks += [_check_accelerators()] if usable else []
    checks += _check_host()
    checks += [_check_products(), _check_cache(), check_ranks()] if usable else []
    return MachineReport(tuple(checks))


def _judge(name: str, level: str, finding: str) -> Check:
    return Check(name, level, finding, FACTS["fixes"][name]) if level else Check(name, "ok", finding)


def _check_package(name: str, least: str) -> Check:
    try:
        found = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Check(name, "fail", "not installed", f'pip install "{name}>={least}"')
    if Version(found) < Version(least):
        return Check(name, "fail", f"{found}, older than {least}", f'pip install --upgrade "{name}>={least}"')
    return Check(name, "ok", found)


def _check_build() -> Check:
    name = "torch build"
    try:
        import torch

        from fullshard.device import has_unused_accelerator, torch_build

        build, unused = torch_build(), has_unused_accelerator()
    except (ImportError, OSError, RuntimeError, ConfigError) as error:  # torch loads torch_npu, which wants CANN
        reason = str(error.__cause__ or error).strip().partition("\n")[0]
        return Check(name, "fail", f"torch cannot be used: {reason}", "Ascend: see docs/ascend.md")
    if unused:
        fix = "Install torch for it, or make it visible: CUDA_VISIBLE_DEVICES, ASCEND_RT_VISIBLE_DEVICES."
        return Check(name, "warn", f"{build}; this machine has an accelerator that torch does not use", fix)
    if not torch.distributed.is_available():
        return Check(name, "fail", f"{build}, without torch.distributed", "Install torch's official wheel.")
    return Check(name, "ok", build)


def _check_accelerators() -> Check:
    from fullshard.device import device_kind, device_memory, device_name, num_devices

    if device_kind() == "cpu":
        return Check("accelerators", "ok", "none: training runs on the CPU")
    name, (free, total) = device_name(), device_memory()
    finding = f"{num_devices()} x {name}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free on the first"
    finding += "" if find_accelerator(name) else " (not in our table; its rate is timed here)"
    return _judge("accelerators", "warn" if free < total / 2 else "", finding)


def _check_host() -> list[Check]:
    host, folder = read_host(), Path.cwd()
    free, available = shutil.disk_usage(folder).free / 1e9, host.available_bytes / 1e9
    memory = f"{available:.1f} of {host.total_bytes / 1e9:.1f} GB free"
    return [
        _judge("cores", "warn" if host.cores < 2 else "", f"{host.cores} ({host.processor})"),
        _judge("memory", "warn" if available < NEEDED_GB["memory"] else "", memory),
        _judge("disk", "warn" if free < NEEDED_GB["disk"] else "", f"{free:.1f} GB free at {folder}"),
    ]


def _check_products() -> Check:
    from fullshard.device import device_kind
    from fullshard.planning.speed import measure_rates

    kind = device_kind()
    rates = measure_rates(kind, read_host().cores)
    faster = "bf16" if rates.bf16 > 1.2 * rates.fp32 or (kind != "cpu" and rates.bf16) else "fp32"
    figures = f"fp32 {rates.fp32 / 1e9:,.3g}, bf16 {rates.bf16 / 1e9:,.3g} GFLOP/s"
    where = "a core" if kind == "cpu" else "a device"
    return Check("timed products", "ok", f"{figures} {where}: precision auto means {faster}")


def _check_cache() -> Check:
    from fullshard.device import cache_folder

    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return _judge("cache", "fail", f"{folder} cannot be written: {error.strerror}")
    return Check("cache", "ok", f"{folder} can be written")


def check_ranks(program: str = RANK_PROGRAM, timeout_seconds: float = RANKS_TIMEOUT_SECONDS) -> Check:
    """Start two real processes that sum a tensor over gloo; both are ended, whatever happens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
    options |= {"text": True, "errors": "replace", "timeout": timeout_seconds}
    commands = [[sys.executable, "-c", program, str(rank), str(port)] for rank in range(2)]
    start, trouble = time.monotonic(), ""
    try:
        with ThreadPoolExecutor(2) as pool:  # run() kills a process that takes too long
            ranks = list(pool.map(lambda command: subprocess.run(command, check=False, **options), commands))
        for rank in ranks:
            if rank.returncode:
                trouble = (rank.stdout.strip().splitlines() or [f"exit code {rank.returncode}"])[-1]
    except subprocess.TimeoutExpired:
        trouble = f"no answer within {timeout_seconds:.0f} s"
    except OSError as error:
        trouble = f"could not start a process: {error.strerror}"
    finding = trouble or f"an all-reduce over two processes is right ({time.monotonic() - start:.1f} s with start)"
    return _judge("two ranks (gloo)", "fail" if trouble else "", finding)
