"""The order in which units compute: recorded in the first forward, held to afterwards, read ahead for prefetching."""

from collections.abc import Callable

from fullshard.errors import TrainError
from fullshard.shard.simple.unit import Unit

HINT = "All ranks must run the same modules in the same order; a model that skips some at random cannot be sharded."


class Schedule:
    """``agree`` compares a unit with the other ranks' while the order is new: a collective call that raises."""

    def __init__(self, prefetch: int, agree: Callable[[Unit], None]) -> None:
        self._prefetch, self._agree = prefetch, agree
        self.order: list[Unit] = []
        self._is_known = False
        self._place = self._place_back = 0

    def begin(self) -> None:
        """A forward begins."""
        self._place = 0
        if not self._is_known:
            self.order.clear()

    def enter(self, unit: Unit) -> None:
        """``unit`` is about to compute. Raises TrainError where that is not its turn."""
        if self._place and self.order[self._place - 1] is unit:
            return
        if not self._is_known:
            self._agree(unit)
            self.order.append(unit)
        elif self._place == len(self.order) or self.order[self._place] is not unit:
            expected = self.order[self._place].name if self._place < len(self.order) else "the end"
            raise TrainError(f"The order of units has changed: {unit.name} runs where {expected} ran first.", HINT)
        self._place += 1

    def end(self) -> None:
        """The forward is over: its order holds from now on."""
        self._is_known = True
        self._place_back = len(self.order)

    def coming(self) -> list[Unit]:
        """The units that compute next in forward."""
        return self.order[self._place : self._place + self._prefetch] if self._is_known else []

    def coming_back(self, unit: Unit) -> list[Unit]:
        """The units whose backward comes after ``unit``'s."""
        while self._place_back > 0 and self.order[self._place_back - 1] is not unit:
            self._place_back -= 1
        place = max(0, self._place_back - 1)
        return self.order[max(0, place - self._prefetch) : place][::-1]
