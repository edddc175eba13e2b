"""What a run writes down and shows: metrics.jsonl, trackers and the progress line. Rank 0 only."""

import json
import os
from collections.abc import Callable, Sequence
from importlib import import_module, util
from pathlib import Path
from typing import Any
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from fullshard.errors import refusal
from fullshard.train.precision import log_text

STEPS_TO_JUDGE = 3  # after which the plan's memory and time stand beside what was measured
LINES_WITHOUT_TERMINAL = 10  # progress lines of a whole run where no terminal can redraw a bar


def start_tracker(name: str, run: Path) -> tuple[Callable[[dict[str, float], int], Any], Callable[[], Any]]:
    """To log (values, step), and to end. tensorboard: in the run folder; others: as WANDB_MODE, SWANLAB_MODE say."""
    if name == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        to = SummaryWriter(run / "tensorboard")
        return lambda values, step: [to.add_scalar(key, value, step) for key, value in values.items()], to.close
    wandb, swanlab = {"name": run.name, "dir": run}, {"experiment_name": run.name, "logdir": str(run / "swanlab")}
    (module := import_module(name)).init(project="fullshard", **(wandb if name == "wandb" else swanlab))
    return lambda values, step: module.log(values, step=step), module.finish


class MetricsLog:
    """Appends to metrics.jsonl, moves the bar; silent where not ``active``. ConfigError: no package of a tracker."""

    def __init__(
        self, path: Path, num_steps: int, first_step: int, active: bool, quiet: bool, trackers: Sequence[str] = ()
    ) -> None:
        if absent := [name for name in trackers if util.find_spec(name) is None]:
            raise refusal("no_tracker", name=absent[0])
        self._trackers = [start_tracker(name, path.parent) for name in trackers if active]
        self._console = Console(quiet=quiet or not active)
        self._num_steps, self._first_step, self._step_seconds = num_steps, first_step, 0.0
        self._file = open(path if active else os.devnull, "a", encoding="utf-8")  # noqa: SIM115 - closed in close()
        columns = TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[state]}")
        no_bar = self._console.quiet or not self._console.is_terminal
        self._bar = Progress(*columns, TimeRemainingColumn(), console=self._console, disable=no_bar)
        self._task = self._bar.add_task("train", total=num_steps, completed=first_step, state="")
        self._bar.start()

    def say(self, line: str) -> None:
        """Print one line."""
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def step(self, **values: Any) -> None:
        """Record a training step: step, loss, gradient_norm, learning_rate, tokens, tokens_per_second, memory_bytes."""
        self.record("train", **values)
        self._step_seconds += values["seconds"]
        step, first, last = values["step"], self._first_step, self._num_steps
        self._bar.update(self._task, completed=step, state=(state := log_text("state", values)))
        every = max(1, (last - first) // LINES_WITHOUT_TERMINAL)
        if self._bar.disable and (step % every == 0 or step in (first + 1, last)):
            self.say(f"step {step}/{last}  {state}  {self._step_seconds / (step - first) * (last - step):.0f} s left")
        if values.get("planned_seconds") and step == min(first + STEPS_TO_JUDGE, last):
            self.say(log_text("against_plan", values))

    def record(self, kind: str, **values: Any) -> None:
        """Append one line to metrics.jsonl: {"kind": kind, ...}."""
        print(json.dumps({"kind": kind, **values}), file=self._file, flush=True)
        shown = {f"{kind}/{name}": value for name, value in values.items() if isinstance(value, int | float)}
        for log, _ in self._trackers:
            log(shown, values["step"])

    def close(self) -> None:
        """Stop the bar and close the file and the trackers."""
        for _, finish in self._trackers:
            finish()
        self._bar.stop()
        self._file.close()
