"""From a recipe to a plan: the largest micro-batch that fits by memory.py, recomputation only where needed."""

import itertools
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any
import numpy as np
import yaml
from fullshard.config import NO_DATA, RunConfig, parse_quantity
from fullshard.data.pack import area_of, heaviest, lay_out, windows, windows_of_run
from fullshard.device import default_ranks, device_kind, device_memory, device_name, kind_of_card, require_tf32
from fullshard.errors import Blame, ConfigError, ModelError, PlanError, read_table, refusal
from fullshard.frozen import Frozen
from fullshard.model.fetch import with_model_folder
from fullshard.planning import shape as shapes
from fullshard.planning.activations import Trace, trace_model
from fullshard.planning.hardware import Accelerator, find_accelerator, parse_devices, read_host
from fullshard.planning.memory import CPU_PROCESS_BYTES, Job, memory_lines, moment_peaks, own_practice
from fullshard.planning.plan import EXPLAIN, Comparison, Plan, find_peak, fit_of, format_bytes, render, step_timeline
from fullshard.planning.speed import DEVICES_OF_A_NODE, EFFICIENCY, Rates, StepWork, measure_rates, run_seconds
from fullshard.planning.volume import Volume, assume_volume, read_volume
from fullshard.shard import choose_engine
from fullshard.train.precision import precision_of

TRIED = read_table("planning/search.yaml")  # micro-batches; how many steps are looked at
USABLE_SHARE = 0.95  # of the memory that is free now
LAUNCHER_BYTES = 400_000_000  # the process that starts the ranks of a CPU machine


class Machine(Frozen):
    """What a rank may use here."""

    kind: str
    memory_bytes: int  # of one accelerator, or of the whole host for the ranks of a CPU machine
    rates: Rates
    card: Accelerator | None = None  # its facts, where they are known
    is_here: bool = True  # else it is that of --devices

    def usable_bytes(self, num_ranks: int) -> int:
        """Memory for one rank; the ranks of a CPU machine and their launcher share the host's."""
        usable = int(self.memory_bytes * USABLE_SHARE)
        return max(0, usable - LAUNCHER_BYTES) // num_ranks if self.kind == "cpu" else usable


class Choice(Frozen):
    """One way to run the recipe, and its memory; ``peak_bytes``: the largest moment of the ranks."""

    job: Job
    micro_batch: tuple[int, str]
    moments: dict[str, int]
    reduce_each: bool  # after each micro-batch, so that no whole gradients are kept
    peak_bytes = property(lambda self: max(size for name, size in self.moments.items() if name != "merge"))


class Facts(Frozen):
    """Everything the search looks at, read once."""

    machine: Machine
    shape: shapes.ModelShape
    adapters: shapes.AdapterShape
    volume: Volume
    trace: Callable[[str, str, int], Trace | None]  # by method, precision and row length; None: it cannot be traced
    price: float | None = None  # of a device-hour
    currency: str = ""


def make_plan(
    config: RunConfig, ranks: int | None = None, devices: str | None = None, rows: int | None = None,
    mean_tokens: int | None = None, price: float | None = None, currency: str | None = None,
    tokens_per_second: float | None = None,
) -> Plan:  # fmt: skip
    """Plan a recipe for ``ranks`` (default: what ``train`` would start) of this machine, or for ``devices``
    (8xa800-80g: a rank each) that need not be here; missing data are assumed, as ``rows`` and ``mean_tokens`` say;
    ``price`` of a device-hour in ``currency``; ``tokens_per_second``: measured. Raises PlanError with changes that fit
    or for a full disk, ConfigError where rows are longer than the model's positions."""
    num_ranks, facts = _start(config, ranks, devices, rows, mean_tokens, price, currency)
    choice = choose(config, num_ranks, facts)
    if fit_of(choice.peak_bytes, facts.machine.usable_bytes(num_ranks)) == "no":
        raise _does_not_fit(config, num_ranks, facts, choice)
    plan = _finish(config, num_ranks, facts, choice, tokens_per_second)
    place = next(path for path in Path(config.output, "checkpoints").absolute().parents if path.exists())
    if facts.machine.is_here and (free := shutil.disk_usage(place).free) < plan.disk_bytes:
        raise refusal("no_disk", needed=format_bytes(plan.disk_bytes), place=place, free=format_bytes(free))
    return plan


def compare_plans(config: RunConfig, **options: Any) -> Comparison:
    """Plans of a recipe as full and as LoRA, what does not fit too, on its number of ranks and on half, twice and four
    times as many devices (a CPU machine: 1, 2 and 4 ranks). Takes and raises what make_plan does, but for the size."""
    own, facts = _start(config, **options)
    others = {1, 2, 4} if facts.machine.kind == "cpu" else {own // 2 or 1, 2 * own, 4 * own}
    counts, plans = [count for count in sorted({own, *others}) if not count % config.train.replicas], {}
    for method, count in itertools.product(sorted(("full", "lora"), key=config.method.__ne__), counts):
        changed = config.model_copy(update={"method": method})
        plans[method, count] = _finish(changed, count, facts, choose(changed, count, facts))
    return Comparison(plans[config.method, own], tuple(plans.values()))


def _start(
    config: RunConfig, ranks: int | None = None, devices: str | None = None, rows: int | None = None,
    mean_tokens: int | None = None, price: float | None = None, currency: str | None = None,
) -> tuple[int, Facts]:  # fmt: skip
    if price is not None and not 0 < price < float("inf"):
        raise PlanError(f"--price {price:g}: the price of a device-hour must be above 0.", "--price 12 --currency CNY")
    if currency and price is None:
        raise PlanError(f"--currency {currency} without a price.", f"--price 12 --currency {currency}")
    count, card = parse_devices(devices) if devices else (None, None)
    num_ranks = count or ranks or default_ranks()
    if ranks not in (None, num_ranks):
        raise PlanError(f"--ranks {ranks} with --devices {devices}: a device has one rank.", "Leave --ranks out.")
    if num_ranks % config.train.replicas:
        fitting = ", ".join(str(n) for n in range(1, num_ranks + 1) if not num_ranks % n)
        raise refusal("replicas_planned", replicas=config.train.replicas, ranks=num_ranks, fitting=fitting)
    files = [file.path for file in config.train_files] + [config.data.eval] * isinstance(config.data.eval, str)
    given = not rows and not mean_tokens and config.data.train != NO_DATA
    read_here = given and (card is None or all(Path(file).exists() for file in files))
    facts = read_facts(config, card, None if read_here else assume_volume(config, rows, mean_tokens))
    kind = choose_precision(config, facts.machine).partition("_")[0]
    if card and kind not in card.flops:
        raise PlanError(f"--devices {devices}: no facts about its {kind}.", f"train.precision={next(iter(card.flops))}")
    positions, longest = facts.shape.max_positions, facts.volume.longest
    if positions and longest > positions and not facts.volume.is_estimate:
        raise refusal("too_few_positions", longest=longest, path=config.model.path, positions=positions)
    return num_ranks, replace(facts, price=price, currency=currency or "")


def read_facts(config: RunConfig, card: Accelerator | None = None, volume: Volume | None = None) -> Facts:
    """Read the machine, the model's shape, the adapters' size (also of a full recipe: as the way out) and the data."""
    if config.model.revision or not shapes.shipped_config(config.model.path):
        config = with_model_folder(config, weights=False)
    volume = volume or read_volume(config)
    build = partial(shapes.build_for_plan, config.model.path, len(config.model.add_tokens), config.data.packing)
    adapt = partial(shapes.add_adapter_shape, lora=config.lora, trains_vocabulary=bool(config.model.add_tokens))
    shape, adapters = shapes.shape_of(model := build()), adapt(model)
    if card is None:
        machine = read_machine()
    else:
        rates = Rates(*(card.flops.get(kind, 0.0) * card.reachable for kind in ("fp32", "bf16")), 1)
        machine = Machine(kind_of_card(card.matched[0]), card.usable_bytes, rates, card, is_here=False)

    @cache
    def trace(method: str, precision: str, length: int) -> Trace | None:
        model = build()
        if method == "lora":
            adapt(model)
        with suppress(ModelError), Blame(ModelError, "not traced", ""):
            return trace_model(model, precision_of(precision), length, config.data.packing, machine.kind)

    return Facts(machine, shape, adapters, volume, trace)


def read_machine() -> Machine:
    """This machine: its kind of device, free memory, rates, and facts where they are known."""
    kind, host = device_kind(), read_host()
    rates = measure_rates(kind, host.cores)
    if kind == "cpu":
        return Machine(kind, host.available_bytes, rates)
    return Machine(kind, min(device_memory()), rates, find_accelerator(device_name()))


def choose_precision(config: RunConfig, machine: Machine) -> str:
    """The recipe's precision (ConfigError: not on this chip); auto: bf16 on accelerators, on CPU if 1.2 x faster."""
    rates, asked = machine.rates, config.train.precision
    if asked.startswith("bf16") and not rates.bf16:
        raise ConfigError(f"train.precision={asked}: this accelerator has no bf16.", "Set train.precision=fp16 or fp32")
    if asked == "tf32" and machine.is_here:
        require_tf32()
    fastest = "bf16" if rates.bf16 > (1.2 * rates.fp32 if machine.kind == "cpu" else 0) else "fp32"
    return fastest if asked == "auto" else asked


def choose(config: RunConfig, num_ranks: int, facts: Facts) -> Choice:
    """The fastest choice that fits, if one can reducing gradients once a step (on CPU the first); else the least."""
    machine, fitting, others = facts.machine, [], []
    for choice in _choices(config, num_ranks, facts):
        if fitting and (machine.card is None or choice.reduce_each > fitting[0].reduce_each):
            break  # they come in order: nothing after these can be taken
        (fitting if choice.peak_bytes <= machine.usable_bytes(num_ranks) else others).append(choice)
    if len(fitting) < 2:
        return min(fitting or others, key=lambda choice: choice.peak_bytes)
    sizes, speeds = {choice.micro_batch for choice in fitting}, (machine.rates, machine.card)
    works = {size: measure_work(config, num_ranks, facts.volume, size) for size in sizes}
    return min(fitting, key=lambda one: run_seconds(facts.shape, works[one.micro_batch], one.job, *speeds)[1])


def _choices(config: RunConfig, num_ranks: int, facts: Facts) -> Iterator[Choice]:
    train, packing, limit = config.train, config.data.packing, config.data.max_length
    longest, is_lora, adapters = longest_row(config, facts), config.method == "lora", facts.adapters
    lengths = np.minimum(facts.volume.lengths, limit)
    steps = heaviest(windows_of_run(lengths, train), lengths)
    recomputes = {"auto": (False, True), "blocks": (True,), "none": (False,)}.get(train.recompute, (train.recompute,))

    @cache
    def laid_out(micro: tuple[int, str]) -> tuple[int, int, bool]:  # most tokens, most sequences; several in a step?
        layouts = [lay_out(w, lengths, num_ranks, micro, packing, limit) for w in steps]
        cells = [cell for layout in layouts for cells in layout for cell in cells]
        return max(area_of(cell, lengths, packing) for cell in cells), max(map(len, cells)), max(map(len, layouts)) > 1

    precision, kind = choose_precision(config, facts.machine), facts.machine.kind
    sizes = _micro_batches(config, facts, laid_out((1 << 40, "tokens"))[0])
    for reduce_each, recompute, micro_batch in itertools.product((False, True), recomputes, sizes):
        (laid, count, accumulates), (size, unit) = laid_out(micro_batch), micro_batch
        if reduce_each and not accumulates:
            continue
        most = count * longest if unit == "rows" else min(count * longest, max(size, longest))  # by an estimate
        job = Job(
            method=config.method, optimizer=train.optimizer, num_ranks=num_ranks, precision=precision,
            micro_tokens=most if facts.volume.is_estimate else laid, longest=longest, recompute=recompute,
            accumulates=accumulates and not reduce_each, trace=facts.trace(config.method, precision, longest),
            engine=choose_engine(config.engine, train.sharding, kind), on_cpu=kind == "cpu",
            adapters=adapters.parameters * is_lora, adapted_outputs=adapters.outputs_per_block * is_lora,
            vocabulary=adapters.vocabulary * is_lora, gathers_all=train.sharding != "full",
            supervised=min(1.0, TRIED["long_rows"] * facts.volume.supervised_share), replicas=train.replicas,
        )  # fmt: skip
        yield Choice(job, micro_batch, moment_peaks(facts.shape, job), reduce_each)


def longest_row(config: RunConfig, facts: Facts) -> int:
    """Tokens of the longest sequence that memory must hold: the longest prepared row, else the recipe's max_length."""
    limit = min(config.data.max_length, facts.shape.max_positions or config.data.max_length)
    return limit if config.data.packing or facts.volume.is_estimate else min(limit, facts.volume.longest)


def _micro_batches(config: RunConfig, facts: Facts, share: int) -> list[tuple[int, str]]:
    """Sizes to try, best first, to ``share`` tokens: a whole step at once keeps no gradients; one row is the least."""
    if config.train.micro_batch is not None:
        return [parse_quantity(config.train.micro_batch)]
    bound = max(longest := longest_row(config, facts), -(-share // 64) * 64)
    tried = TRIED["micro_tokens"]["cpu" if facts.machine.kind == "cpu" else "device"]
    sizes = [max(min(size, bound), longest) for size in tried]
    return [(size, "tokens") for size in dict.fromkeys([*sizes, bound, longest])]


def _does_not_fit(config: RunConfig, num_ranks: int, facts: Facts, best: Choice) -> PlanError:
    machine, fitting = facts.machine, []
    may_use_bf16 = machine.rates.bf16 and choose_precision(config, machine) == "fp32"
    known = {"ranks": num_ranks, "on_cpu": machine.kind == "cpu", "longest": longest_row(config, facts), **dict(config)}
    singles = yaml.safe_load(render("changes.txt", **known, may_use_bf16=may_use_bf16)) or []
    for chosen in (some for size in (1, 2, 3) for some in itertools.combinations(singles, size)):
        changes = {key: value for change in chosen for key, value in change.items()}
        if len(changes) < sum(map(len, chosen)) or any(fit.items() <= changes.items() for fit, *_ in fitting):
            continue
        changed, ranks = config, changes.get("ranks", num_ranks)  # which is no key of the recipe
        for key, value in (item for item in changes.items() if item[0] != "ranks"):
            section, _, name = key.rpartition(".")
            value = getattr(changed, section).model_copy(update={name: value}) if section else value
            changed = changed.model_copy(update={section or name: value})
        peak, allowed = choose(changed, ranks, facts).peak_bytes, machine.usable_bytes(ranks)
        fitting += [(changes, peak, allowed)] * (peak <= allowed)
        if len(fitting) == 3:
            break
    known |= {"machine": machine, "best": best, "usable": machine.usable_bytes(num_ranks), "fitting": fitting}
    return PlanError(*render("no_fit.txt", **known, lines=memory_lines(facts.shape, best.job)).split("\n", 1))


def _finish(config: RunConfig, num_ranks: int, facts: Facts, choice: Choice, measured: float | None = None) -> Plan:
    machine, volume, job, price = facts.machine, facts.volume, choice.job, facts.price
    work, card = measure_work(config, num_ranks, volume, choice.micro_batch), machine.card
    (rows, tokens, micro_batches), lines = work.first, tuple(memory_lines(facts.shape, job))
    inputs = facts.shape, work, job, machine.rates, card
    low, high, quick, slow, numbers = run_seconds(*inputs, work.step_tokens / measured if measured else None)
    hours = low * num_ranks / 3600, high * num_ranks / 3600
    numbers |= _storage(facts.shape, choice) | {"ranks": num_ranks, "hours": hours}
    usable, copied = machine.usable_bytes(num_ranks), numbers["copied"]
    beside = not job.on_cpu or choice.peak_bytes + copied <= usable  # a checkpoint is written while training goes on
    saving = {"save": choice.moments["train"] + copied} if job.on_cpu and beside else {}
    step = f"{rows:,} rows = {'~' * volume.is_estimate}{tokens:,} tokens"
    layout = f"{num_ranks} rank{'s' * (num_ranks > 1)} x {micro_batches} micro-batch{'es' * (micro_batches > 1)}"
    known = {**dict(config), **vars(facts), **vars(choice), "peak": choice.peak_bytes, "usable": usable}
    return Plan(
        method=config.method, device=machine.kind, usable_bytes=usable, longest=job.longest, currency=facts.currency,
        ranks=num_ranks, micro_batch=choice.micro_batch, reduce_each=choice.reduce_each, is_estimate=volume.is_estimate,
        precision=job.precision, recompute=job.recompute, num_steps=work.num_steps, step_seconds=(quick, slow),
        engine=job.engine, explained={name: formula.format(**numbers) for name, formula in EXPLAIN["formulas"].items()},
        lines=lines, saves_beside=beside, device_hours=hours, seconds_low=low, seconds_high=high, price=price,
        moments=choice.moments | saving, disk_bytes=numbers["disk_bytes"], host_bytes=numbers["host_bytes"],
        timeline=(timeline := step_timeline(lines, choice.moments["load"])), card="" if machine.is_here else card.name,
        peak=find_peak(timeline, lines, choice.moments), cost=(hours[0] * price, hours[1] * price) if price else None,
        peak_bytes=choice.peak_bytes, rows=len(volume.lengths), micro_batches=micro_batches, batch=f"{step} = {layout}",
        fits=choice.peak_bytes <= usable, tokens=int(volume.lengths.sum()), kernel_seconds=numbers["seconds"],
        is_assumed=bool(volume.assumption), tokens_per_second=(work.step_tokens / slow, work.step_tokens / quick),
        checked_rows=EFFICIENCY["devices"]["checked"].get(card.name, 0) if card and job.compute_bytes < 4 else 0,
        notes=tuple(render("notes.txt", **known, is_shipped=shapes.shipped_config(config.model.path)).splitlines()),
    )  # fmt: skip


def _storage(shape: shapes.ModelShape, choice: Choice) -> dict[str, int]:
    """Bytes on disk of a checkpoint, and on a machine's host: a rank on a card reads and saves through host memory."""
    job, does, is_full = choice.job, own_practice(choice.job), choice.job.method == "full"
    written = shape.parameters if is_full else job.adapters + job.vocabulary
    stored, near = does.weight + does.states, job.num_ranks if job.on_cpu else min(job.num_ranks, DEVICES_OF_A_NODE)
    copied = stored * written * job.replicas // job.num_ranks
    each = choice.peak_bytes if job.on_cpu else CPU_PROCESS_BYTES + max(4 * shape.largest_tensor, copied)
    stored += 0 if is_full else does.weight  # once more, as PEFT has it
    return {
        "disk_bytes": stored * written + 64 * shape.vocab_size, "host_bytes": near * each + LAUNCHER_BYTES,
        "stored": stored, "written": written, "vocabulary": shape.vocab_size, "near": near, "host_each": each,
        "launcher": LAUNCHER_BYTES, "copied": copied,
    }  # fmt: skip


def measure_work(config: RunConfig, num_ranks: int, volume: Volume, micro_batch: tuple[int, str]) -> StepWork:
    """A rank's work, from windows laid out as in training."""
    packing, limit, every = config.data.packing, config.data.max_length, config.train.eval_every
    lengths = np.minimum(volume.lengths, limit)
    first = windows(lengths, config.train.seed, 0, parse_quantity(config.train.global_batch), config.train.drop_last)
    num_steps = len(windows_of_run(lengths, config.train))
    sampled = first[: min(TRIED["sampled_windows"], num_steps)]
    layouts = [lay_out(window, lengths, num_ranks, micro_batch, packing, limit) for window in sampled]
    tokens = [int(lengths[window].sum()) for window in sampled]
    area = sum(max(area_of(cell, lengths, packing) for cell in cells) for layout in layouts for cells in layout)
    scale, evaluations = num_steps / len(sampled), 1 + (num_steps // every if every else -(-num_steps // len(first)))
    supervised = sum(tokens) * scale * volume.supervised_share / num_ranks
    return StepWork(
        padded_tokens=area * scale, supervised_tokens=supervised, mean_length=area / sum(map(len, sampled)) * num_ranks,
        num_micro_batches=sum(map(len, layouts)) * scale, num_steps=num_steps,
        evaluated_tokens=evaluations * 1.1 * volume.eval_tokens / num_ranks, step_tokens=sum(tokens) / len(tokens),
        first=(len(sampled[0]), tokens[0], len(layouts[0])),
    )  # fmt: skip
