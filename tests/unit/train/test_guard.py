"""How long a rank may be silent before it counts as hung."""

from __future__ import annotations

import pytest

from fullshard.train import guard as module
from fullshard.train.guard import Guard


@pytest.fixture
def limits(tmp_path, monkeypatch):
    """beat(at, saving) -> the seconds that the watch is set to then."""
    set_to, now = [], [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(module.faulthandler, "dump_traceback_later", lambda limit, **_: set_to.append(limit))
    guard = Guard(tmp_path / "errors", 0, ())

    def beat(at, saving=False):
        now[0] = at
        guard.beat(saving)
        return set_to[-1]

    yield beat
    guard.close()


def test_twenty_times_the_longest_micro_batch_and_at_least_eleven_minutes(limits):
    assert limits(1000.0) == 660  # what came before the first, loading, is no micro-batch
    assert limits(1010.0) == 660
    assert limits(1060.0) == 20 * 50
    assert limits(1061.0) == 20 * 50


def test_a_save_may_take_two_hours_and_is_no_long_micro_batch(limits):
    limits(0.0)
    assert limits(40.0, saving=True) == 7200
    assert limits(5000.0) == 20 * 40
