"""Processes that render chunks of rows, as many as there are cores; a small input needs none. One child reads the
tokenizer (without torch) and forks into the others; when its socket to this process closes, a child ends."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from fullshard.data.chunks import ChunkRenderer

ALONE_CHUNKS = 4  # rendered in this process before others are started
SETUP = "setup"  # what the first child asks for


class Workers:
    """``in_order`` renders chunks; ``close`` leaves no process behind. ``setup``: of ChunkRenderer."""

    def __init__(self, setup: tuple[Any, ...], count: int) -> None:
        self._setup, self._count, self._render = setup, count, ChunkRenderer(*setup)
        self._process: subprocess.Popen[bytes] | None = None
        self._busy: dict[Connection, int | None] = {}  # the number of its chunk; None: it starts
        self._idle: list[Connection] = []

    def close(self) -> None:
        """End the children: at once where one is at work or starting."""
        for connection in [*self._busy, *self._idle]:
            connection.close()
        if self._process is not None:
            with suppress(ProcessLookupError):
                if self._busy:
                    os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def in_order(self, chunks: Iterable[Any]) -> Iterator[Any]:
        """What ChunkRenderer makes of each chunk, in order. EOFError or ConnectionError where a child was killed."""
        source, done, number, given = iter(chunks), {}, 0, 0
        chunk = next(source, None)
        while chunk is not None or given < number:
            if number == ALONE_CHUNKS and self._process is None and self._count > 1:
                self._start()
            while self._idle and chunk is not None and number < given + 2 * self._count:
                worker = self._idle.pop()
                self._busy[worker] = number
                worker.send(chunk)
                number, chunk = number + 1, next(source, None)
            if chunk is not None and not self._ready:  # there is nobody yet to give it to
                done[number] = self._render(chunk)
                number, chunk = number + 1, next(source, None)
            while given in done:
                yield done.pop(given)
                given += 1
            if self._busy and (chunk is not None or given < number):
                self._receive(done)

    @property
    def _ready(self) -> bool:
        return bool(self._idle) or any(number is not None for number in self._busy.values())

    def _receive(self, done: dict[int | None, Any]) -> None:
        for worker in wait(list(self._busy), None if self._ready else 0):
            if (answer := worker.recv()) == SETUP:
                worker.send(self._setup)
            else:
                self._idle.append(worker)
                done[self._busy.pop(worker)] = answer  # under None: that it is ready

    def _start(self) -> None:
        from fullshard.device import one_core_environment

        pairs = [Pipe() for _ in range(self._count)]
        theirs = [there.fileno() for _, there in pairs]
        command = [sys.executable, "-m", "fullshard.data.workers", *map(str, theirs)]
        apart = {"env": one_core_environment(), "start_new_session": True}  # Ctrl-C is for us, who then end them
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=theirs, **apart)
        for here, there in pairs:
            there.close()
            self._busy[here] = None


def _be_worker(connections: list[Connection]) -> None:
    """Render what comes, until the socket closes; the first connection is of this process, the others of its forks."""
    mine = connections[0]
    with suppress(EOFError, ConnectionError):
        mine.send(SETUP)
        render = ChunkRenderer(*mine.recv())
        mine = next((connection for connection in connections[1:] if os.fork() == 0), mine)
        for other in set(connections) - {mine}:
            other.close()
        mine.send(None)
        while True:
            mine.send(render(mine.recv()))
    with suppress(ChildProcessError):
        while mine is connections[0]:
            os.wait()
    os._exit(0)  # taking a tokenizer apart takes half a second


if __name__ == "__main__":
    _be_worker([Connection(int(handle)) for handle in sys.argv[1:]])
