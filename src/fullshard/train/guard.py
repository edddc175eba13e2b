"""What may end a run before its last step: a request to stop, or a rank that hangs."""

import faulthandler
import signal
import time
from pathlib import Path

LEAST_SECONDS, SLOWER = 300.0, 20  # a rank hangs: so long without a step, and so many times the longest so far


class Guard:
    """Signals ask a rank to stop after its step. ``beat`` says that it lives: where none comes in time, the stacks of
    its threads are written to ``folder`` and it ends."""

    def __init__(self, folder: Path, rank: int, signals: tuple[int, ...]) -> None:
        folder.mkdir(exist_ok=True)
        self._stacks = open(folder / f"rank_{rank}.stacks", "w", encoding="utf-8")  # noqa: SIM115 - faulthandler keeps it
        self.asked, self._longest, self._last = 0, 0.0, time.monotonic()
        for number in signals:
            signal.signal(number, lambda number, frame: setattr(self, "asked", number))
        if signal.SIGTERM not in signals:  # the launcher ends the others of a failed rank: they leave theirs, too
            faulthandler.register(signal.SIGTERM, self._stacks, chain=True)

    def beat(self, watched: bool = True) -> None:
        """Before a step; not ``watched``: before what may take any time, an evaluation or a checkpoint."""
        now = time.monotonic()
        self._longest, self._last = max(self._longest, 0.0 if watched else now - self._last), now  # of steps only
        faulthandler.cancel_dump_traceback_later()
        if watched:
            faulthandler.dump_traceback_later(max(LEAST_SECONDS, SLOWER * self._longest), exit=True, file=self._stacks)

    def close(self) -> None:
        """The run is over: nothing is watched any more."""
        faulthandler.cancel_dump_traceback_later()
        faulthandler.unregister(signal.SIGTERM)
        Path(self._stacks.name).unlink(missing_ok=True)
