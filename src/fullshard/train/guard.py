"""What may end a run before its last step: a request to stop, or a rank that hangs."""

import faulthandler
import signal
import time
from pathlib import Path

# A rank hangs: so long without a forward (accelerators: beyond NCCL's 600 s), and so many times the longest; or a save.
LEAST_SECONDS, LEAST_ON_ACCELERATOR, SLOWER, SAVING_SECONDS = 300.0, 660.0, 20, 7200.0


class Guard:
    """Signals ask a rank to stop. Without a ``beat`` in time the stacks of its threads go to ``folder`` and it ends."""

    def __init__(self, folder: Path, rank: int, signals: tuple[int, ...], accelerator: bool = False) -> None:
        folder.mkdir(exist_ok=True)
        self._stacks = open(folder / f"rank_{rank}.stacks", "w", encoding="utf-8")  # noqa: SIM115 - faulthandler keeps it
        self._least = LEAST_ON_ACCELERATOR if accelerator else LEAST_SECONDS
        self.asked, self._longest, self._last = 0, 0.0, float("inf")
        for number in signals:
            signal.signal(number, lambda number, frame: setattr(self, "asked", number))
        if signal.SIGTERM not in signals:  # the launcher ends the others of a failed rank: they leave theirs, too
            faulthandler.register(signal.SIGTERM, self._stacks, chain=True)

    def beat(self, saving: bool = False) -> None:
        """Before a micro-batch, of training or of an evaluation; ``saving``: after the last, before a checkpoint."""
        now = time.monotonic()
        self._longest, self._last = max(self._longest, now - self._last), float("inf") if saving else now
        limit = SAVING_SECONDS if saving else max(self._least, SLOWER * self._longest)
        faulthandler.dump_traceback_later(limit, exit=True, file=self._stacks)

    def close(self) -> None:
        """The run is over: nothing is watched any more."""
        faulthandler.cancel_dump_traceback_later()
        faulthandler.unregister(signal.SIGTERM)
        Path(self._stacks.name).unlink(missing_ok=True)
