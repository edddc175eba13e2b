"""Facts per accelerator and about this host's CPU and memory. Imports neither torch nor transformers.

Peaks are dense bf16 with fp32 accumulation; usable memory is what PyTorch reports as the device's total. Links are one
way, per device. Sources: shared notes "published_runs" section 4, which cites the vendor sheets, stas00/ml-engineering
(accelerator and network README at 744d01e), torchtitan tools/utils.py and, for usable GiB, training logs.
"""

from __future__ import annotations

import difflib
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

import psutil

from fullshard.errors import PlanError

GIB = 2**30


@dataclass(frozen=True)
class Accelerator:
    """One kind of device. ``matched``: words of its device name (lower case); the first kind with all wins."""

    matched: tuple[str, ...]
    usable_bytes: int
    bf16_flops: float  # per second, dense; 0.0 where the device has no bf16
    reachable: float  # largest matmul rate seen in practice, as a share of the peak
    link_bytes_per_second: float

    @property
    def name(self) -> str:
        """As ``--devices`` takes it: 4090, a100-40gb, 910b3."""
        return "-".join(self.matched).removeprefix("rtx-").removeprefix("ascend")


# More special names come first: ("a100",) also fits the 40 GB card.
ACCELERATORS = (
    Accelerator(("gb300",), int(276.6 * GIB), 2500e12, 0.73, 900e9),
    Accelerator(("gb200",), int(184.3 * GIB), 2500e12, 0.73, 900e9),
    Accelerator(("b200",), int(178.35 * GIB), 2250e12, 0.78, 900e9),
    Accelerator(("h200",), int(139.7 * GIB), 989e12, 0.80, 450e9),
    Accelerator(("h20",), int(95.0 * GIB), 148e12, 0.80, 450e9),  # usable not seen: 96 GB sold, as the 96 GB H100
    Accelerator(("h100", "pcie"), int(79.1 * GIB), 756e12, 0.80, 63e9),
    Accelerator(("h100", "nvl"), int(92.0 * GIB), 835e12, 0.80, 63e9),
    Accelerator(("h100",), int(79.18 * GIB), 989e12, 0.80, 450e9),
    Accelerator(("a100", "40gb"), int(39.4 * GIB), 312e12, 0.87, 300e9),
    Accelerator(("a100", "pcie"), int(79.2 * GIB), 312e12, 0.81, 31e9),
    Accelerator(("a100",), int(79.14 * GIB), 312e12, 0.87, 300e9),
    # A800: A100 with NVLink cut from 600 to 400 GB/s, both ways together (tweakers.net/nieuws/203182, after Reuters);
    # usable GiB as in the messages of github.com/hahnyuan/PB-LLM/issues/3 and MoonshotAI/Kimi-VL/issues/51.
    Accelerator(("a800", "pcie"), int(79.33 * GIB), 312e12, 0.81, 31e9),
    Accelerator(("a800",), int(79.33 * GIB), 312e12, 0.87, 200e9),
    Accelerator(("l40s",), int(44.5 * GIB), 362e12, 0.80, 31e9),
    Accelerator(("a6000",), int(47.4 * GIB), 154.85e12, 0.80, 31e9),
    Accelerator(("rtx", "5090"), int(31.37 * GIB), 209.5e12, 0.80, 63e9),
    Accelerator(("rtx", "4090"), int(23.64 * GIB), 165.2e12, 0.80, 31e9),
    Accelerator(("rtx", "3090"), int(23.7 * GIB), 71e12, 0.80, 31e9),
    Accelerator(("a10g",), int(22.0 * GIB), 70e12, 0.80, 31e9),
    Accelerator(("l4",), int(22.0 * GIB), 121e12, 0.50, 31e9),  # 72 W: sustained rate far below the peak
    Accelerator(("v100",), int(31.74 * GIB), 0.0, 0.0, 150e9),
    Accelerator(("t4",), int(14.7 * GIB), 0.0, 0.0, 16e9),
    Accelerator(("mi300x",), int(191.98 * GIB), 1307e12, 0.51, 448e9),
    Accelerator(("ascend910b1",), int(60.96 * GIB), 373.9e12, 0.75, 196e9),
    Accelerator(("ascend910b2",), int(60.96 * GIB), 353.9e12, 0.75, 196e9),
    Accelerator(("ascend910b3",), int(60.96 * GIB), 294.9e12, 0.75, 196e9),
    Accelerator(("ascend910b4",), int(29.5 * GIB), 245.8e12, 0.75, 196e9),  # usable not seen
    Accelerator(("ascend910", "9392"), int(61.27 * GIB), 353.9e12, 0.75, 196e9),
)


def find_accelerator(device_name: str) -> Accelerator | None:
    """The table's entry for a device name as torch gives it ("NVIDIA A100-SXM4-80GB"); None where it is unknown."""
    words = set(re.split(r"[^a-z0-9]+", device_name.lower()))  # whole words: an L40 is no L4
    for accelerator in ACCELERATORS:
        if words.issuperset(accelerator.matched):
            return accelerator
    return None


def parse_devices(text: str) -> tuple[int, Accelerator]:
    """``4x4090``, ``8xa800-80g``, ``8x910b3-64g`` -> (count, card). PlanError with the nearest names where unknown."""
    match = re.fullmatch(r"([1-9]\d*)x(?:(?:nvidia|rtx|ascend)-?)*(.+?)(?:-(\d+)gb?)?", text.lower())
    if not match:
        raise PlanError(f"--devices {text}: a count and a card are needed.", "4x4090, 8xa800-80g or 8x910b3-64g")
    count, name, size = match.groups()
    cards = {card.name: card for card in ACCELERATORS}
    card = cards.get(f"{name}-{size}gb") or cards.get(name)
    if card is None:
        nearest = difflib.get_close_matches(name, cards, 3, 0.4) or cards
        raise PlanError(f"--devices {text}: no facts about a card {name!r}.", f"Nearest known: {', '.join(nearest)}")
    if size and not 1 <= int(size) * GIB / card.usable_bytes <= 1.1:  # sold 80 GB, usable 79.3 GiB; sold 24, usable 22
        usable = f"{card.name} has {card.usable_bytes / GIB:.1f} GiB usable"
        raise PlanError(f"--devices {text}: the {usable}, not {size}.", f"--devices {count}x{card.name}")
    return int(count), card


@dataclass(frozen=True)
class Host:
    """This machine's CPU side. ``available_bytes`` may be given to new processes now, container limits included."""

    processor: str
    cores: int
    total_bytes: int
    available_bytes: int


def read_host() -> Host:
    """Facts of this machine as this process may use them: affinity and control-group limits are respected."""
    memory = psutil.virtual_memory()
    total, available = memory.total, memory.available
    limit = _control_group_limit()
    if limit is not None and limit[0] < total:
        total, available = limit[0], min(available, max(0, limit[0] - limit[1]))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    return Host(_processor_name(), cores, total, available)


def _control_group_limit() -> tuple[int, int] | None:
    """(limit, anonymous bytes in use) of this container, versions 2 and 1; None where there is no limit."""
    root = Path("/sys/fs/cgroup")
    for limit_file, stat_file, key in (
        (root / "memory.max", root / "memory.stat", "anon"),
        (root / "memory" / "memory.limit_in_bytes", root / "memory" / "memory.stat", "rss"),
    ):
        try:
            limit_text = limit_file.read_text().strip()
            statistics = dict(line.split(" ", 1) for line in stat_file.read_text().splitlines() if " " in line)
        except OSError:
            continue
        if limit_text.isdigit():
            return int(limit_text), int(statistics.get(key, 0))
    return None


def _processor_name() -> str:
    information = Path("/proc/cpuinfo")
    if information.is_file():
        for line in information.read_text(errors="replace").splitlines():
            if line.lower().startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
