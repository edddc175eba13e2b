"""A finished plan: what a run needs and how its batches lie, ready to print and to store."""

from dataclasses import dataclass

from fullshard.planning.memory import Line

MOMENT_WORDS = {
    "always": "",
    "backward": "in backward: ",
    "head": "in the head's backward: ",
    "block": "in a block's backward: ",
    "step": "in the optimizer's step: ",
}


@dataclass(frozen=True)
class Plan:
    """What the planner decided and predicts. Bytes are per rank; seconds are a range, low to high."""

    method: str
    ranks: int
    device: str  # cpu | cuda | npu
    engine: str  # torch | simple
    precision: str  # a mode of train/precision.py
    micro_batch: tuple[int, str]  # per rank and forward: (4, "rows") or (2048, "tokens") of padded area
    recompute: bool | int  # how many of the first blocks; True: all
    lines: tuple[Line, ...]
    moments: dict[str, int]  # peak of load, train, eval, save, merge
    peak_bytes: int  # the largest moment of the ranks (merge runs afterwards, alone)
    usable_bytes: int
    rows: int
    tokens: int  # of one epoch
    longest: int
    is_estimate: bool  # tokens come from file sizes, not from prepared rows
    num_steps: int
    micro_batches: int  # of a typical step
    batch: str  # "64 rows = 31,204 tokens = 4 ranks x 2 micro-batches"
    seconds_low: float
    seconds_high: float
    notes: tuple[str, ...]
    card: str = ""  # of --devices: the plan is for machines that are not here
    tokens_per_second: tuple[float, float] = (0.0, 0.0)  # of all ranks, low and high
    checked_rows: int = 0  # published runs of this card beside which the speed model was checked
    reduce_each: bool = False  # gradients are reduced after each micro-batch: there is no memory to keep them whole
    is_assumed: bool = False  # rows and tokens were not read from any file

    def to_text(self) -> str:
        """The report, of several lines."""
        about = "~" if self.is_estimate else ""
        counted = "assumed" if self.is_assumed else "estimated from file sizes" if self.is_estimate else "counted"
        checked = f"checked on {self.checked_rows} published runs" if self.checked_rows else "not checked"
        checked = f" (from the card's facts; {checked} of this card)" if self.card else ""
        kept = f"{self.precision}, activations {'recomputed' if self.recompute else 'kept'}"
        kept += f" in {self.recompute} blocks" if self.recompute > 1 else ""
        micro_batch = f"micro-batches of {self.micro_batch[0]:,} {self.micro_batch[1]}"
        engine = f"engine {self.engine}"
        width = max(len(line.cause) for line in self.lines)
        lines = [
            f"Plan: {self.method} on {self.ranks} x {self.card or self.device}, {kept}, {micro_batch}, {engine}",
            f"Data: {self.rows:,} rows, {about}{self.tokens:,} tokens an epoch ({counted})",
            f"Step: {self.batch}; {self.num_steps:,} steps",
            "Memory of one rank:",
        ]
        for line in self.lines:
            causes = f"  {line.cause:<{width}}  {format_bytes(line.bytes):>9}"
            lines.append(f"{causes}  {MOMENT_WORDS[line.when]}{line.formula}")
        lines += [
            f"Peaks: {', '.join(f'{moment} {format_bytes(size)}' for moment, size in self.moments.items())}",
            f"Fits: {format_bytes(self.peak_bytes)} of {format_bytes(self.usable_bytes)} a rank may use",
            f"Speed: {self.tokens_per_second[0]:,.0f} - {self.tokens_per_second[1]:,.0f} tokens/s{checked}",
            f"Time: {format_minutes(self.seconds_low, self.seconds_high)}",
        ]
        return "\n".join(lines + [f"Note: {note}" for note in self.notes])

    def to_summary(self) -> str:
        """What ``train`` prints of it: steps, fit and time."""
        fit = f"{format_bytes(self.peak_bytes)} of {format_bytes(self.usable_bytes)} a rank may use"
        return f"plan: {self.num_steps:,} steps, {fit}, {format_minutes(self.seconds_low, self.seconds_high)}"


def format_bytes(count: int) -> str:
    """Decimal units: ``1.25 GB``, ``310 MB``."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}" if count < 1000 * size else f"{count / size:,.0f} {unit}"
    return f"{count} B"


def format_minutes(low: float, high: float) -> str:
    """``3 - 7 minutes``, ``20 - 50 seconds``, ``1.5 - 3 hours``."""
    if high < 100:
        return f"{low:.0f} - {high:.0f} seconds"
    if high < 2 * 3600:
        return f"{low / 60:.2g} - {high / 60:.2g} minutes" if low < 600 else f"{low / 60:.0f} - {high / 60:.0f} minutes"
    return f"{low / 3600:.1f} - {high / 3600:.1f} hours"
