"""Tests of this machine, with a fix for what is wrong; devices on the ranks ``train`` would start: docs/doctor.md."""

import os
import platform
import re
import shutil
import signal
import socket
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Any
import psutil
from jinja2 import Template
from packaging.version import Version
from fullshard.config import DataFile, RunConfig
from fullshard.errors import ConfigError, UserError, read_table
from fullshard.frozen import Frozen
from fullshard.planning.hardware import find_accelerator, read_host
from fullshard.run_folder import read_json, write_json

FACTS = read_table("doctor.yaml")
LIMIT_SECONDS = 60  # for the ranks to meet, and for each collective
FILE = "doctor.json"  # of ``run_rank``: the place to look at, then what was found
Result = tuple[str, str] | tuple[str, str, str]  # level (empty: ok), finding, name of the fix where not the check's


class Check(Frozen):
    """One finding. ``ok``: ok | warn | fail; ``fix`` is empty where nothing is wrong; ``rate``: a product's FLOP/s."""

    name: str
    ok: str
    finding: str
    fix: str = ""
    rate: float = 0.0


class MachineReport(Frozen):
    """All checks: of this machine, or of all nodes."""

    checks: tuple[Check, ...]
    healthy = property(lambda self: all(check.ok != "fail" for check in self.checks))  # warnings are allowed

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"healthy": self.healthy, **asdict(self)}

    def to_text(self) -> str:
        """One line a check, and its fix below where there is one."""
        return Template(FACTS["report"], trim_blocks=True).render(checks=self.checks)


def check_process(place: Path) -> list[Check]:
    """What one process can say: versions, this host, room at ``place``; last, where torch can be used, the cache."""
    checks = [Check("Python", "ok", f"{platform.python_version()} ({sys.executable})")]  # an old one installs nothing
    checks += [_make(name, _read_package, name, *borders) for name, borders in FACTS["versions"].items()]
    checks += [*_check_host(place), _make("torch build", _read_build)]
    usable = "fail" not in (check.ok for check in checks if check.name.startswith("torch"))
    return [*checks, _make("drivers", _read_drivers), _make("cache", _write_cache)] if usable else checks


def join_ranks(found: Sequence[tuple[str, Sequence[Check]]]) -> Iterator[Check]:
    """Of all ranks' (node, checks) one a name: the worst, with its rank. Unlike versions fail, slow ranks are told."""
    several = len({node for node, _ in found}) > 1
    names = [f"rank {rank}" + f" on {node}" * several for rank, (node, _) in enumerate(found)]
    for same in zip(*(checks for _, checks in found), strict=True):
        worst = max(same, key=lambda check: ("ok", "warn", "fail").index(check.ok))
        usual, each = statistics.median_high(check.rate for check in same), dict(zip(names, same, strict=True))
        slow = [f"{who} ({one.rate / usual:.0%})" for who, one in each.items() if one.rate < FACTS["slow_rank"] * usual]
        slower = f"{worst.finding}; slower than most: {', '.join(slow)}"
        if worst.name in FACTS["same"] and len({check.finding for check in same}) > 1:
            worst = judge(worst.name, "fail", "; ".join(f"{who} {one.finding}" for who, one in each.items()), "same")
        elif worst.ok != "ok":
            worst = replace(worst, finding=f"{names[same.index(worst)]}: {worst.finding}")
        elif slow:
            worst = judge(worst.name, "warn", slower, "slow", worst.rate)
        yield worst


def judge(name: str, level: str, finding: str, fix: str = "", rate: float = 0.0) -> Check:
    """A check; ``level``: empty is ok. ``fix``: the name of what mends it, where it is not the check's."""
    return Check(name, level or "ok", finding, FACTS["fixes"][fix or name] if level else "", rate)


def _make(name: str, test: Callable[..., Result], *given: Any) -> Check:
    try:
        return judge(name, *test(*given))
    except UserError as error:
        return Check(name, "fail", error.message, error.hint or FACTS["fixes"][name])
    except metadata.PackageNotFoundError:
        return judge(name, "fail", "not installed")
    except OSError as error:
        return judge(name, "fail", f"{error.filename}: {error.strerror}")


def _read_package(name: str, least: str, newest: str) -> Result:
    found = metadata.version(name)
    level = "fail" if Version(found) < Version(least) else "warn" * (Version(found) >= Version(newest))
    return level, found + f": {least} or newer is needed, below {newest} is tried" * bool(level)


def _read_build() -> Result:
    try:
        import torch
        from fullshard.device import torch_build, why_unused

        build, unused = torch_build(), why_unused()
    except (ImportError, OSError, RuntimeError, ConfigError) as error:  # torch loads torch_npu, which wants CANN
        return "fail", f"torch cannot be used: {str(error.__cause__ or error).strip().partition(chr(10))[0]}"
    number = build.partition("torch_npu ")[2] or torch.__version__
    if Version(number).release[:2] != Version(torch.__version__).release[:2]:
        return "fail", f"{build} with torch {torch.__version__}: both need the same number"
    if not torch.distributed.is_available():
        return "fail", f"{build}, without torch.distributed", "distributed"
    return "warn" * bool(unused), build + f"; this machine's accelerator is not used: {unused}" * bool(unused), "unused"


def _read_drivers() -> Result:
    from fullshard.device import torch_build

    build, found = torch_build(), {}
    for name, (file, pattern, _) in FACTS["drivers"].items():
        for path in sorted(Path("/").glob(os.path.expandvars(file).lstrip("/"))):
            if match := re.search(pattern, path.read_text(errors="replace"), re.MULTILINE):
                found[name] = match[1]
    told = ", ".join(f"{name} {number}" for name, number in found.items()) or "none found"
    for name, number in found.items():
        for start, least in FACTS["drivers"][name][2].items():
            if start in build and [*map(int, re.findall(r"\d+", number)[:2])] < least:  # 8.3.RC1: 8, 3
                return "fail", f"{told}: {build} needs {name} {'.'.join(map(str, least))} or newer", name
    return "", told


def _check_host(place: Path) -> Iterator[Check]:
    host, needed, free = read_host(), FACTS["needed_gb"], shutil.disk_usage(place).free / 1e9
    left, total = host.available_bytes / 1e9, host.total_bytes / 1e9
    yield judge("cores", "warn" * (host.cores < 2), f"{host.cores} ({host.processor})")
    yield judge("memory", "warn" * (left < needed["memory"]), f"{left:.1f} of {total:.1f} GB free")
    yield judge("disk", "warn" * (free < needed["disk"]), f"{free:.1f} GB free at {place}")
    up = {name: stats.speed for name, stats in psutil.net_if_stats().items() if stats.isup}
    finding = ", ".join(name + f" ({speed:,} Mbit/s)" * (speed > 0) for name, speed in up.items())
    try:
        yield Check("interfaces", "ok", f"{finding}; this host is {socket.gethostbyname(socket.gethostname())}")
    except OSError:
        yield judge("interfaces", "warn", f"{finding}; this host's name {socket.gethostname()} has no address")


def _write_cache() -> Result:
    from fullshard.device import cache_folder

    (folder := cache_folder()).mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()
    return "", f"{folder} can be written"


def run_rank(folder: Path) -> None:
    """Be one rank that the launcher has started for this; rank 0 leaves what all have found in ``folder``."""
    from fullshard.ranks import start_ranks, stop_ranks

    signal.alarm(2 * LIMIT_SECONDS)  # ends this rank wherever it hangs
    ranks = start_ranks(LIMIT_SECONDS)
    mine = list(examine_rank(ranks, Path(read_json(folder / FILE)["place"])))
    found = join_ranks(ranks.gather_objects((socket.gethostname(), mine)))
    if ranks.is_first:
        write_json(folder / FILE, {"found": [asdict(check) for check in found]})
    stop_ranks()


def examine_rank(ranks: Any, place: Path) -> Iterator[Check]:
    """What one of ``Ranks`` finds, all calling it: its device in each precision, the collectives, rank 0's file."""
    from fullshard.device import collective_backend, device_memory, device_name

    yield Check("ranks", "ok", f"{ranks.num_ranks} have met, over {collective_backend(ranks.device.type)}")
    index, plain = ranks.device.index or 0, 0.0
    card = device_name(index) if ranks.device.type != "cpu" else ""
    free, total = device_memory(index) if card else (0, 0)
    finding = f"{ranks.num_ranks} x {card}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free"
    yield judge("accelerators", "warn" * (free < total / 2), finding if card else "none: training runs on the CPU")
    for precision in FACTS["error_limits"]:
        yield (check := _test_product(precision, ranks.device, card, plain))
        plain = plain or check.rate
    yield from _test_collectives(ranks)

    def look() -> Result:
        where, seen = ranks.who_sees(place)[ranks.rank]
        return "fail" * (not seen), f"{where}: rank 0's file is {'seen' if seen else 'not seen'}"

    yield _make("shared folder", look)


def _test_product(name: str, device: Any, card_name: str, plain: float) -> Check:
    """Error against fp64 and rate of a product, next to ``plain``, that of fp32."""
    import torch
    from fullshard.device import num_cores, set_fast_fp32, supports_bf16
    from fullshard.planning.speed import timed_product
    from fullshard.train.precision import precision_of

    mode, title, draw = precision_of(name), f"{name} products", torch.Generator().manual_seed(0)
    try:
        set_fast_fp32(mode.fast_fp32)
    except ConfigError:  # no TF32
        return Check(title, "ok", "not on this device")
    if name == "bf16" and not supports_bf16():
        return Check(title, "ok", "not on this device")
    left, right = (torch.randn(size, generator=draw).to(mode.compute) for size in ((128, 1024), (1024, 128)))
    exact = left.float().numpy().astype("float64") @ right.float().numpy().astype("float64")
    product = (left.to(device) @ right.to(device)).cpu().float().numpy()
    error = float((((product - exact) ** 2).sum() / (exact**2).sum()) ** 0.5)
    rate = timed_product(mode.compute, device.type)
    set_fast_fp32(False)
    card, load, limit = find_accelerator(card_name), psutil.getloadavg()[0], FACTS["error_limits"][name]
    peak = card.flops.get(name, 0.0) if card else 0.0
    numbers = {"error": error, "limit": limit, "rate": rate, "peak": peak, "plain": plain, "load": load}
    finding = Template(FACTS["product"]).render(numbers, card=card_name, cores=num_cores())
    level = "warn" * (rate < FACTS["slow_card"] * peak) if error <= limit else "fail"
    return judge(title, level, finding, "slow" if error <= limit else "wrong", rate)


def _test_collectives(ranks: Any) -> Iterator[Check]:
    """Each collective, with its time at each size. Whole numbers, so that sums are exact. R ranks, P elements."""
    import torch
    import torch.distributed as dist
    from torch.utils.benchmark import Timer

    count, me, words = ranks.num_ranks, ranks.rank, FACTS["wrong"]
    wrong, texts, numbers_R1 = dict.fromkeys(words, ""), {}, torch.arange(count, device=ranks.device).float()[:, None]
    for label, (size, repeats) in FACTS["sizes"].items():
        parts_RP = (torch.arange(-(-size // (4 * count)) * count, device=ranks.device) % 251).float().view(count, -1)
        mine_RP, sum_RP = parts_RP + me, count * parts_RP + numbers_R1.sum()
        calls = {
            "sum": (lambda output, given: ranks.sum(output.copy_(given)), mine_RP, sum_RP),
            "average": (lambda output, given: ranks.sum(output.copy_(given)).div_(count), mine_RP, sum_RP / count),
            "all-to-all": (dist.all_to_all_single, mine_RP, parts_RP[me] + numbers_R1),
        }
        for name, (call, given, right) in calls.items():
            values = {"call": call, "given": given.clone(), "output": torch.empty_like(right)}
            call(values["output"], values["given"])
            off = ~torch.isclose(values["output"], right)
            bad = off.any(-1).nonzero().flatten().tolist() if "{" in words[name] else off.any().item()
            wrong[name] = wrong[name] or (words[name].format(bad) if bad else "")
            ranks.barrier()
            seconds = Timer("call(output, given)", globals=values).timeit(repeats).mean
            sent = parts_RP.nbytes * (count - 1) / count * (1 if name == "all-to-all" else 2)
            told = f"{label} {seconds * 1e3:.3g} ms" + f" = {sent / seconds / 1e9:.2g} GB/s" * (sent > 0)
            texts[name] = f"{texts.get(name, 'right')}, {told}"
    yield from (judge(name, "fail" * bool(wrong[name]), wrong[name] or texts[name], "collectives") for name in texts)


def check_recipe(config: RunConfig, place: Path, num_ranks: int) -> list[Check]:
    """What the recipe needs: its model, readable data, a template that marks answers and their end, memory, disk."""
    from fullshard.data import chat, sources
    from fullshard.model.fetch import with_model_folder
    from fullshard.planning import search, volume
    from fullshard.planning.plan import format_bytes

    data, kept, rows = config.data, config.train.keep_last, []

    def read_rows() -> Result:
        files = [*config.train_files, *([DataFile(path=data.eval)] if isinstance(data.eval, str) else [])]
        for file in files:
            for _, _, here in sources.open_records(file.path, data.source):
                part = DataFile(path=str(here)) if Path(here).is_file() else file
                rows.extend(islice(sources.iterate_rows(part, data), FACTS["first_rows"]))
        return "", f"the first {len(rows)} rows of {', '.join(file.path for file in files)} can be read"

    def render() -> Result:
        is_here = Path(config.model.path).expanduser().exists()
        folder = Path(with_model_folder(config, weights=is_here).model.path)  # a folder must be complete
        tokenizer = chat.load_tokenizer(folder, config.model.add_tokens)
        added = [number + 1 for number in chat.added_ids(tokenizer, config.model.add_tokens)]
        chat.check_tokenizer(tokenizer, max(chat.num_embeddings(folder) or len(tokenizer), *added, 0))
        renderer = chat.Renderer(tokenizer, data.loss_on, data.template_arguments)
        made = [one for row in rows for one in renderer.row(row)]
        learned, ends = sum(sum(one.supervised) for one in made), {one.ids[stop] for one in made for stop in one.stops}
        if not learned:
            return "fail" if rows else "warn", f"no token of {len(rows)} rows is learned"
        finding = f"{learned / sum(len(one.ids) for one in made):.0%} of the tokens are learned; answers end with "
        names = [f"{tokenizer.convert_ids_to_tokens(number)!r} (id {number})" for number in sorted(ends)]
        return "warn" * (not ends), finding + (" or ".join(names) or "no token"), "stop"

    def plan_memory() -> Result:
        plan = search.make_plan(config, num_ranks, rows=None if rows else volume.ASSUMED_ROWS)
        free = read_host().available_bytes
        finding = f"{format_bytes(plan.peak_bytes)} of {format_bytes(plan.usable_bytes)} a rank in {plan.precision}"
        finding += f"; to merge {format_bytes(plan.moments['merge'])} of {format_bytes(free)} on the host"
        return "warn" * (plan.moments["merge"] > free), finding

    def plan_disk() -> Result:
        whole = search.read_facts(config, volume=volume.assume_volume(config, None, None)).shape.parameters
        each = search.compare_plans(config, ranks=num_ranks, rows=volume.ASSUMED_ROWS).own.disk_bytes
        needed, free = [each * (kept + 1), 2 * whole], shutil.disk_usage(place).free  # one more while it is written
        finding = f"{kept} + 1 checkpoints of {format_bytes(each)}, merged {format_bytes(needed[1])}"
        level = "fail" if needed[0] > free else "warn" * (sum(needed) > free)
        return level, f"{finding}; {format_bytes(free)} free at {place}"

    tests = ("data", read_rows), ("template", render), ("memory for it", plan_memory), ("disk for it", plan_disk)
    return [_make(*test) for test in tests]
