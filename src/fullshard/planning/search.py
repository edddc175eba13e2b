"""From a recipe to a plan: the largest micro-batch that fits, recomputation only where needed, else a PlanError.

Everything is decided by the formulas of memory.py; nothing is run but a short timed product.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fullshard.config import RunConfig, parse_quantity
from fullshard.data.pack import lay_out, windows, windows_of_run
from fullshard.errors import ConfigError, PlanError
from fullshard.planning.hardware import GIB, Accelerator, find_accelerator, parse_devices, read_host
from fullshard.planning.memory import Job, memory_lines, moment_peaks
from fullshard.planning.plan import Plan, format_bytes
from fullshard.planning.shape import (
    AdapterShape,
    ModelShape,
    add_adapter_shape,
    build_for_plan,
    shape_of,
    shipped_config,
)
from fullshard.planning.speed import Rates, StepWork, measure_rates, run_seconds
from fullshard.planning.volume import Volume, assume_volume, read_volume

CPU_MICRO_TOKENS = (2048, 1024, 512)  # larger ones gain nothing on a CPU, smaller ones gather weights too often
DEVICE_MICRO_TOKENS = (16384, 8192, 4096, 2048, 1024)
USABLE_SHARE = 0.95  # of the memory that is free now
LAUNCHER_BYTES = 400_000_000  # the process that starts the ranks of a CPU machine
SAMPLED_WINDOWS = 40  # steps laid out to learn the padding; the rest is scaled


@dataclass(frozen=True)
class Machine:
    """What a rank may use here."""

    kind: str
    memory_bytes: int  # of one accelerator, or of the whole host for the ranks of a CPU machine
    rates: Rates
    link_bytes_per_second: float | None
    card: Accelerator | None = None  # of --devices: not this machine

    def usable_bytes(self, num_ranks: int) -> int:
        """Memory for one rank; the ranks of a CPU machine and their launcher share the host's."""
        if self.kind == "cpu":
            return max(0, int(self.memory_bytes * USABLE_SHARE) - LAUNCHER_BYTES) // num_ranks
        return int(self.memory_bytes * USABLE_SHARE)


@dataclass(frozen=True)
class Choice:
    """One way to run the recipe, and its memory."""

    job: Job
    micro_batch: tuple[int, str]
    moments: dict[str, int]

    @property
    def peak_bytes(self) -> int:
        """The largest moment of the ranks."""
        return max(size for moment, size in self.moments.items() if moment != "merge")


@dataclass(frozen=True)
class Facts:
    """Everything the search looks at, read once."""

    machine: Machine
    shape: ModelShape
    adapters: AdapterShape
    volume: Volume


def make_plan(
    config: RunConfig,
    ranks: int | None = None,
    devices: str | None = None,
    rows: int | None = None,
    mean_tokens: int | None = None,
) -> Plan:
    """Plan a recipe on this machine for ``ranks`` (default: what ``train`` would start). Trains nothing.

    ``devices``: cards that need not be here, ``8xa800-80g``, one rank each; data files that are missing are assumed.
    ``rows``, ``mean_tokens``: assume these instead of reading the data. A model id of planning/models needs no folder.

    Raises PlanError, with up to three changes that were checked to fit, where the job does not fit; ConfigError where
    rows are longer than the model's positions; ModelError and DataError for unusable inputs.
    """
    from fullshard.device import default_ranks

    count, card = parse_devices(devices) if devices else (None, None)
    num_ranks = count or ranks or default_ranks()
    if ranks not in (None, num_ranks):
        raise PlanError(f"--ranks {ranks} with --devices {devices}: a device has one rank.", "Leave --ranks out.")
    files = [file.path for file in config.train_files] + [config.data.eval] * isinstance(config.data.eval, str)
    read_here = not rows and not mean_tokens and (card is None or all(Path(file).exists() for file in files))
    facts = read_facts(config, card, None if read_here else assume_volume(config, rows, mean_tokens))
    if card and (not card.bf16_flops or choose_precision(config, facts.machine) != "bf16"):
        raise PlanError(f"--devices {devices}: only bf16 can be planned there.", "A card with bf16, no train.precision")
    _require_positions(config, facts)
    choice = choose(config, num_ranks, facts)
    usable = facts.machine.usable_bytes(num_ranks)
    if choice.peak_bytes > usable:
        raise _does_not_fit(config, num_ranks, facts, choice, usable)
    return _finish(config, num_ranks, facts, choice)


def read_facts(config: RunConfig, card: Accelerator | None = None, volume: Volume | None = None) -> Facts:
    """Read the machine, the model's shape, the adapters' size (also of a full recipe: as the way out) and the data."""
    from fullshard.model.fetch import with_model_folder

    if config.model.revision or not shipped_config(config.model.path):
        config = with_model_folder(config, weights=False)
    volume = volume or read_volume(config)
    added = len(config.model.add_tokens)
    model = build_for_plan(config.model.path, added)
    shape = shape_of(model)
    adapters = add_adapter_shape(model, config.lora, trains_vocabulary=added > 0)
    return Facts(machine_of(card) if card else read_machine(), shape, adapters, volume)


def machine_of(card: Accelerator) -> Machine:
    """A machine with this card, from its facts: the rate is the share of the peak that products reach in practice."""
    from fullshard.device import kind_of_card

    rates = Rates(0.0, card.bf16_flops * card.reachable, 1)
    return Machine(kind_of_card(card.matched[0]), card.usable_bytes, rates, card.link_bytes_per_second, card)


def read_machine() -> Machine:
    """This machine's kind of device, free memory, rates and links."""
    from fullshard.device import device_kind, device_memory, device_name

    kind = device_kind()
    host = read_host()
    rates = measure_rates(kind, host.cores)
    if kind == "cpu":
        return Machine(kind, host.available_bytes, rates, None)
    known = find_accelerator(device_name())
    free, total = device_memory()
    return Machine(kind, min(free, total), rates, known.link_bytes_per_second if known else 31e9)


def choose_precision(config: RunConfig, machine: Machine) -> str:
    """The recipe's precision (ConfigError for bf16 without it); auto: bf16 on accelerators, on CPU if 1.2 x faster."""
    if config.train.precision == "bf16" and not machine.rates.bf16:
        raise ConfigError("train.precision=bf16: this accelerator has no bf16.", "Set train.precision=fp32")
    if config.train.precision != "auto":
        return config.train.precision
    if machine.kind != "cpu":
        return "bf16" if machine.rates.bf16 else "fp32"
    return "bf16" if machine.rates.bf16 > 1.2 * machine.rates.fp32 else "fp32"


def choose(config: RunConfig, num_ranks: int, facts: Facts) -> Choice:
    """The first choice that fits, by speed; where none fits, the one with the smallest peak."""
    usable = facts.machine.usable_bytes(num_ranks)
    smallest: Choice | None = None
    for choice in _choices(config, num_ranks, facts):
        if choice.peak_bytes <= usable:
            return choice
        if smallest is None or choice.peak_bytes < smallest.peak_bytes:
            smallest = choice
    assert smallest is not None
    return smallest


def _choices(config: RunConfig, num_ranks: int, facts: Facts) -> Iterator[Choice]:
    longest = longest_row(config, facts)
    share = _tokens_of_a_rank(config, num_ranks, facts.volume)
    recomputes = {"auto": (False, True), "on": (True,), "off": (False,)}[config.train.recompute]
    for recompute in recomputes:
        for micro_batch in _micro_batches(config, facts.machine.kind, longest, share):
            count, unit = micro_batch
            area = count * longest if unit == "rows" else max(count, longest)
            job = Job(
                method=config.method,
                optimizer=config.train.optimizer,
                num_ranks=num_ranks,
                compute_bytes=2 if choose_precision(config, facts.machine) == "bf16" else 4,
                micro_tokens=area,
                longest=longest,
                recompute=recompute,
                accumulates=_accumulates(config, num_ranks, facts.volume, micro_batch),
                adapters=facts.adapters.parameters if config.method == "lora" else 0,
                adapted_inputs=facts.adapters.inputs_per_block if config.method == "lora" else 0,
                on_cpu=facts.machine.kind == "cpu",
                vocabulary=facts.adapters.vocabulary if config.method == "lora" else 0,
            )
            yield Choice(job, micro_batch, moment_peaks(facts.shape, job))


def longest_row(config: RunConfig, facts: Facts) -> int:
    """Tokens of the longest sequence that memory must hold: the longest prepared row, else the recipe's max_length."""
    limit = min(config.data.max_length, facts.shape.max_positions or config.data.max_length)
    if config.data.packing or facts.volume.is_estimate:
        return limit
    return min(limit, facts.volume.longest)


def _accumulates(config: RunConfig, num_ranks: int, volume: Volume, micro_batch: tuple[int, str]) -> bool:
    """Whether one of the first steps takes more than one micro-batch, laid out as training will."""
    lengths = np.minimum(volume.lengths, config.data.max_length)
    first = windows(lengths, config.train.seed, 0, parse_quantity(config.train.global_batch))[:3]
    packing, limit = config.data.packing, config.data.max_length
    return any(len(lay_out(window, lengths, num_ranks, micro_batch, packing, limit)) > 1 for window in first)


def _tokens_of_a_rank(config: RunConfig, num_ranks: int, volume: Volume) -> int:
    """Padded tokens that one rank sees in a full step, with a third more for padding and unevenness."""
    count, unit = parse_quantity(config.train.global_batch)
    lengths = np.minimum(volume.lengths, config.data.max_length)
    tokens = min(count, len(lengths)) * float(lengths.mean()) if unit == "rows" else min(count, int(lengths.sum()))
    return max(1, int(1.3 * tokens / num_ranks))


def _micro_batches(config: RunConfig, kind: str, longest: int, share: int) -> list[tuple[int, str]]:
    """Sizes to try, best first."""
    if config.train.micro_batch is not None:
        return [parse_quantity(config.train.micro_batch)]
    bound = max(longest, -(-share // 64) * 64)
    sizes = [min(size, bound) for size in (CPU_MICRO_TOKENS if kind == "cpu" else DEVICE_MICRO_TOKENS)]
    sizes = [max(size, longest) for size in sizes]
    sizes += [bound, longest]  # a whole step at once keeps no gradients over micro-batches; one row is the least
    return [(size, "tokens") for size in dict.fromkeys(sizes)]


def _require_positions(config: RunConfig, facts: Facts) -> None:
    positions, longest = facts.shape.max_positions, facts.volume.longest
    if positions and longest > positions and not facts.volume.is_estimate:
        raise ConfigError(
            f"The longest row has {longest:,} tokens; {config.model.path} has {positions:,} positions.",
            f"Set data.max_length={positions} and data.too_long=drop (or cut).",
        )


def _changes(config: RunConfig, num_ranks: int, facts: Facts) -> list[tuple[str, dict[str, dict[str, object]], int]]:
    """Single changes, cheapest first: (words, updates by section, ranks)."""
    train = config.train
    found: list[tuple[str, dict[str, dict[str, object]], int]] = []
    if train.micro_batch is not None:
        found.append(("train.micro_batch=null", {"train": {"micro_batch": None}}, num_ranks))
    if train.recompute == "off":
        found.append(("train.recompute=auto", {"train": {"recompute": "auto"}}, num_ranks))
    if facts.machine.kind == "cpu" and num_ranks > 1:
        found.append(("--ranks 1", {}, 1))
    if facts.machine.kind != "cpu" and facts.machine.rates.bf16 and choose_precision(config, facts.machine) == "fp32":
        found.append(("train.precision=bf16", {"train": {"precision": "bf16"}}, num_ranks))
    longest = longest_row(config, facts)
    for length in (longest // 2, longest // 4):
        if length >= 64:
            words = f"data.max_length={length} data.too_long=drop"
            found.append((words, {"data": {"max_length": length, "too_long": "drop"}}, num_ranks))
    if config.method == "full":
        found.append(("method=lora", {"": {"method": "lora"}}, num_ranks))
        if train.optimizer == "adamw":
            found.append(("train.optimizer=sgd", {"train": {"optimizer": "sgd"}}, num_ranks))
    if facts.machine.kind != "cpu":
        card = facts.machine.card
        for more in (2 * num_ranks, 4 * num_ranks, 8 * num_ranks):
            found.append((f"--devices {more}x{card.name}" if card else f"--ranks {more} (more devices)", {}, more))
    return found


def _does_not_fit(config: RunConfig, num_ranks: int, facts: Facts, best: Choice, usable: int) -> PlanError:
    changes = _changes(config, num_ranks, facts)
    fitting: list[str] = []
    used: list[set[str]] = []
    least, least_words = best.peak_bytes, ""
    for size in (1, 2, 3):
        for chosen in itertools.combinations(changes, size):
            words = {change[0].split("=")[0].split()[0] for change in chosen}
            names = {change[0] for change in chosen}
            if len(words) < size or any(smaller <= names for smaller in used) or len(fitting) == 3:
                continue
            changed, ranks = config, num_ranks
            for _, updates, new_ranks in chosen:
                changed, ranks = _apply(changed, updates), new_ranks if new_ranks != num_ranks else ranks
            candidate = choose(changed, ranks, facts)
            text = " ".join(change[0] for change in chosen)
            allowed = facts.machine.usable_bytes(ranks)
            if candidate.peak_bytes <= allowed:
                peak = f"{format_bytes(candidate.peak_bytes)} of {format_bytes(allowed)}"
                fitting.append(f"  {text}   ({peak} a rank)")
                used.append(names)
            elif candidate.peak_bytes < least:
                least, least_words = candidate.peak_bytes, text
    kind = "host memory that is free now, shared by the ranks" if facts.machine.kind == "cpu" else "device memory"
    largest = sorted(memory_lines(facts.shape, best.job), key=lambda line: -line.bytes)[:3]
    causes = ", ".join(f"{line.cause} {format_bytes(line.bytes)}" for line in largest)
    message = (
        f"The job does not fit: at its smallest it needs {format_bytes(best.peak_bytes)} a rank on {num_ranks} ranks;"
        f" {format_bytes(usable)} a rank may be used ({kind}). Largest causes: {causes}."
    )
    if fitting:
        return PlanError(message, "Changes that fit, cheapest first:\n" + "\n".join(fitting))
    smallest = f" The least found, {format_bytes(least)} a rank, is with: {least_words}." if least_words else ""
    return PlanError(
        message, f"No change of the recipe fits this machine.{smallest} Take a smaller model or more memory."
    )


def _apply(config: RunConfig, updates: dict[str, dict[str, object]]) -> RunConfig:
    for section, values in updates.items():
        if section:
            values = {section: getattr(config, section).model_copy(update=values)}
        config = config.model_copy(update=values)
    return config


def _finish(config: RunConfig, num_ranks: int, facts: Facts, choice: Choice) -> Plan:
    precision = "bf16" if choice.job.compute_bytes == 2 else "fp32"
    work, step, num_steps = measure_work(config, num_ranks, facts.volume, choice.micro_batch)
    trained = facts.shape.parameters if config.method == "full" else choice.job.adapters
    low, high = run_seconds(
        facts.shape,
        work,
        method=config.method,
        precision=precision,
        recompute=choice.job.recompute,
        num_ranks=num_ranks,
        rates=facts.machine.rates,
        on_cpu=choice.job.on_cpu,
        link=facts.machine.link_bytes_per_second,
        trained_parameters=trained,
    )
    about = "~" if facts.volume.is_estimate else ""
    plural = "" if step.micro_batches == 1 else "es"
    ranks_word = "rank" if num_ranks == 1 else "ranks"
    return Plan(
        method=config.method,
        ranks=num_ranks,
        device=facts.machine.kind,
        precision=precision,
        micro_batch=choice.micro_batch,
        recompute=choice.job.recompute,
        lines=tuple(memory_lines(facts.shape, choice.job)),
        moments=choice.moments,
        peak_bytes=choice.peak_bytes,
        usable_bytes=facts.machine.usable_bytes(num_ranks),
        rows=len(facts.volume.lengths),
        tokens=int(facts.volume.lengths.sum()),
        longest=choice.job.longest,
        is_estimate=facts.volume.is_estimate,
        num_steps=num_steps,
        micro_batches=step.micro_batches,
        batch=f"{step.rows:,} rows = {about}{step.tokens:,} tokens = {num_ranks} {ranks_word} x"
        f" {step.micro_batches} micro-batch{plural}",
        seconds_low=low,
        seconds_high=high,
        notes=tuple(_notes(config, facts, choice, precision)),
        card=facts.machine.card.name if facts.machine.card else "",
        is_assumed=bool(facts.volume.assumption),
    )


def _notes(config: RunConfig, facts: Facts, choice: Choice, precision: str) -> Iterator[str]:
    rates, machine = facts.machine.rates, facts.machine
    if machine.card:
        facts_of_it = f"{machine.memory_bytes / GIB:.1f} GiB, {rates.bf16 / 1e12:.0f} TFLOP/s of bf16 reachable"
        yield f"{machine.card.name}: {facts_of_it}, link {machine.card.link_bytes_per_second / 1e9:.0f} GB/s one way"
    if shipped_config(config.model.path):
        yield f"no folder {config.model.path} is here: the shape is from the config that fullshard ships for this id"
    if facts.volume.assumption:
        yield f"{facts.volume.assumption}; memory is for rows of {choice.job.longest:,} tokens"
    elif facts.volume.is_estimate:
        yield (
            f"tokens are estimated (bytes / 4), memory is for rows of {choice.job.longest:,} tokens;"
            " fullshard prepare counts exactly"
        )
    if machine.kind == "cpu" and config.train.precision == "auto":
        yield f"{precision}: a core does {rates.fp32 / 1e9:.3g} GFLOP/s in fp32 and {rates.bf16 / 1e9:.3g} in bf16"
    if choice.job.recompute and config.train.recompute == "auto":
        yield "activations are recomputed because they would not fit otherwise; a third more work"
    if config.data.max_length > choice.job.longest == facts.shape.max_positions:
        yield f"the model has {facts.shape.max_positions:,} positions, fewer than data.max_length"
    merged = choice.moments["merge"]
    if machine.kind == "cpu" and merged > machine.usable_bytes(1):
        yield f"merging opens the whole model in one process, about {format_bytes(merged)}: more than is free now"


@dataclass(frozen=True)
class TypicalStep:
    """The first full step of the run: rows, tokens, micro-batches on each rank."""

    rows: int
    tokens: int
    micro_batches: int


def measure_work(
    config: RunConfig, num_ranks: int, volume: Volume, micro_batch: tuple[int, str]
) -> tuple[StepWork, TypicalStep, int]:
    """Lay out the run's first windows as training will, and scale to all of them: (work of a rank, a step, steps)."""
    lengths = np.minimum(volume.lengths, config.data.max_length)
    quantity = parse_quantity(config.train.global_batch)
    first = windows(lengths, config.train.seed, 0, quantity, config.train.drop_last)
    per_epoch = len(first)
    num_steps = len(windows_of_run(lengths, config.train))
    sampled = first[: min(SAMPLED_WINDOWS, num_steps)]
    area = micro_batches = 0
    typical: TypicalStep | None = None
    for window in sampled:
        layout = lay_out(window, lengths, num_ranks, micro_batch, config.data.packing, config.data.max_length)
        typical = typical or TypicalStep(len(window), int(lengths[window].sum()), len(layout))
        micro_batches += len(layout)
        area += sum(max(_area(sequences, lengths) for sequences in cells) for cells in layout)
    assert typical is not None
    scale = num_steps / len(sampled)
    evaluations = 0
    if volume.eval_rows:
        evaluations = 1 + (
            num_steps // config.train.eval_every if config.train.eval_every else -(-num_steps // per_epoch)
        )
    tokens = sum(int(lengths[window].sum()) for window in sampled) * scale
    work = StepWork(
        padded_tokens=area * scale,
        supervised_tokens=tokens * volume.supervised_share / num_ranks,
        mean_length=area / max(1, sum(len(window) for window in sampled)) * num_ranks,
        num_micro_batches=micro_batches * scale,
        num_steps=num_steps,
        evaluated_tokens=evaluations * 1.1 * volume.eval_tokens / num_ranks,
    )
    return work, typical, num_steps


def _area(sequences: list[list[int]], lengths: np.ndarray) -> int:
    """Padded tokens of one rank's micro-batch."""
    return len(sequences) * max((int(lengths[rows].sum()) for rows in sequences), default=0)
