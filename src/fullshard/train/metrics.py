"""What a run writes down and shows: metrics.jsonl and the progress line. Rank 0 only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINES_WITHOUT_TERMINAL = 10  # progress lines of a whole run where no terminal can redraw a bar


class MetricsLog:
    """Appends one JSON object a line to metrics.jsonl and keeps the progress bar. Silent on every rank but the
    first."""

    def __init__(self, path: Path, num_steps: int, first_step: int, active: bool, quiet: bool) -> None:
        self._console = Console(quiet=quiet or not active)
        self._active = active
        self._num_steps = num_steps
        self._file = open(path, "a", encoding="utf-8") if active else None  # noqa: SIM115 - closed in close()
        self._bar: Progress | None = None
        if active and not quiet and self._console.is_terminal:
            self._bar = Progress(
                TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[state]}"),
                TimeRemainingColumn(), console=self._console,
            )  # fmt: skip
            self._task = self._bar.add_task("train", total=num_steps, completed=first_step, state="")
            self._bar.start()
        self._step_seconds = 0.0
        self._first_step = first_step

    def say(self, line: str) -> None:
        """Print one line."""
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def step(self, **values: Any) -> None:
        """Record a training step: step, loss, gradient_norm, learning_rate, tokens, tokens_per_second, memory_bytes."""
        self.record("train", **values)
        self._step_seconds += values["seconds"]
        state = f"loss {values['loss']:.4f}  {values['tokens_per_second']:,.0f} tok/s"
        state += f"  {values['memory_bytes'] / 1e9:.1f} GB"
        if "loss_scale" in values:
            state += f"  scale {values['loss_scale']:g}, {values['skipped_steps']} skipped"
        if self._bar is not None:
            self._bar.update(self._task, completed=values["step"], state=state)
        elif self._active:
            every = max(1, (self._num_steps - self._first_step) // LINES_WITHOUT_TERMINAL)
            if values["step"] % every == 0 or values["step"] in (self._first_step + 1, self._num_steps):
                done = values["step"] - self._first_step
                left = self._step_seconds / done * (self._num_steps - values["step"])
                self.say(f"step {values['step']}/{self._num_steps}  {state}  {left:.0f} s left")

    def record(self, kind: str, **values: Any) -> None:
        """Append one line to metrics.jsonl: {"kind": kind, ...}."""
        if self._file is not None:
            self._file.write(json.dumps({"kind": kind, **values}) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Stop the bar and close the file."""
        if self._bar is not None:
            self._bar.stop()
        if self._file is not None:
            self._file.close()
