"""Facts per accelerator (accelerators.yaml: dense bf16 peaks, links one way) and about this host. Imports no torch."""

import difflib
import os
import platform
import re
from contextlib import suppress
from dataclasses import field
from pathlib import Path
import psutil
from fullshard.errors import PlanError, read_table, refusal
from fullshard.frozen import Frozen

GIB, CONTROL_GROUP = 2**30, Path("/sys/fs/cgroup")


class Accelerator(Frozen):
    """One kind of device. ``matched``: words of its device name (lower case); the first kind with all wins."""

    matched: tuple[str, ...]
    usable_bytes: int
    flops: dict[str, float] = field(hash=False)  # per second, dense, by precision; without those that the device lacks
    reachable: float  # largest matmul rate seen in practice, as a share of the peak
    memory_bytes_per_second: float
    link_bytes_per_second: float  # to the devices of the same node, one way
    node_bytes_per_second: float  # of one device to other nodes, one way
    family: str  # of efficiency.yaml
    # as ``--devices`` takes it: 4090, 4090d, a100-40gb, 910b3
    name = property(lambda self: "-".join(self.matched).removeprefix("rtx-").removeprefix("ascend").replace("-d", "d"))


def _read(words: str, facts: dict) -> Accelerator:
    flops = {name: facts[name] * 1e12 for name in ("bf16", "fp16", "tf32", "fp32", "fp8") if name in facts}
    usable, memory, link, node = int(facts["usable"] * GIB), *(facts[name] * 1e9 for name in ("memory", "link", "node"))
    return Accelerator(tuple(words.split()), usable, flops, facts["reachable"], memory, link, node, facts["family"])


ACCELERATORS = tuple(_read(*entry) for entry in read_table("planning/accelerators.yaml").items())


def find_accelerator(device_name: str) -> Accelerator | None:
    """The table's entry for a device name as torch gives it ("NVIDIA A100-SXM4-80GB"); None where it is unknown."""
    words = set(re.split(r"[^a-z0-9]+", device_name.lower()))  # whole words: an L40 is no L4
    return next((card for card in ACCELERATORS if words.issuperset(card.matched)), None)


def parse_devices(text: str) -> tuple[int, Accelerator]:
    """``4x4090``, ``8xh100-sxm-80g``, ``8x910b3-64g`` -> (count, card). PlanError with nearest names if unknown."""
    if not (match := re.fullmatch(r"([1-9]\d*)x(?:(?:nvidia|rtx|ascend)-?)*(.+?)(?:-(\d+)gb?)?", text.lower())):
        raise PlanError(f"--devices {text}: a count and a card are needed.", "4x4090, 8xa800-80g or 8x910b3-64g")
    count, name, size = match.groups()
    name = re.sub(r"-(?:sxm\d?|hbm\d\w?|(d$))", r"\1", name)  # SXM is what a plain name means
    cards = {card.name: card for card in ACCELERATORS}
    if (card := cards.get(f"{name}-{size}gb") or cards.get(name)) is None:
        nearest = difflib.get_close_matches(name, cards, 3, 0.4) or cards
        raise PlanError(f"--devices {text}: no facts about a card {name!r}.", f"Nearest known: {', '.join(nearest)}")
    if size and not 1 <= int(size) * GIB / card.usable_bytes <= 1.1:  # sold 80 GB, usable 79.3 GiB; sold 24, usable 22
        raise refusal("other_size", text=text, card=card.name, gib=card.usable_bytes / GIB, size=size, count=count)
    return int(count), card


class Host(Frozen):
    """This machine's CPU side. ``available_bytes`` may be given to new processes now, container limits included."""

    processor: str
    cores: int
    total_bytes: int
    available_bytes: int


def read_host() -> Host:
    """Facts of this machine as this process may use them: affinity and control-group limits are respected."""
    total, available = psutil.virtual_memory()[:2]  # or what control groups, version 2 or 1, leave of it: limit - used
    for folder, limit, used in (("", "memory.max", "anon"), ("memory", "memory.limit_in_bytes", "rss")):
        with suppress(OSError):
            text, statistics = ((CONTROL_GROUP / folder / name).read_text().strip() for name in (limit, "memory.stat"))
            if text.isdigit() and int(text) < total:
                found = re.search(rf"^{used} (\d+)$", statistics, re.MULTILINE)
                total, available = int(text), min(available, max(0, int(text) - int(found[1] if found else 0)))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    text = information.read_text(errors="replace") if (information := Path("/proc/cpuinfo")).is_file() else ""
    found = re.search(r"^model name\s*:(.*)$", text, re.MULTILINE | re.IGNORECASE)
    return Host(found[1].strip() if found else platform.processor() or platform.machine(), cores, total, available)
