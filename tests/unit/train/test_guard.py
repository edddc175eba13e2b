"""How long a rank may be silent before it counts as hung."""

from __future__ import annotations

import pytest

from fullshard.ranks import COLLECTIVE_TIMEOUT_SECONDS
from fullshard.train import guard as module
from fullshard.train.guard import Guard


@pytest.fixture
def limits(request, tmp_path, monkeypatch):
    """beat(at, saving) -> the seconds that the watch is set to then."""
    set_to, now = [], [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(module.faulthandler, "dump_traceback_later", lambda limit, **_: set_to.append(limit))
    guard = Guard(tmp_path / "errors", 0, (), **getattr(request, "param", {}))

    def beat(at, saving=False):
        now[0] = at
        guard.beat(saving)
        return set_to[-1]

    yield beat
    guard.close()


def test_twenty_times_the_longest_micro_batch_and_at_least_five_minutes(limits):
    assert limits(1000.0) == 300  # what came before the first, loading, is no micro-batch
    assert limits(1010.0) == 300
    assert limits(1060.0) == 20 * 50
    assert limits(1061.0) == 20 * 50


@pytest.mark.parametrize("limits", [{"accelerator": True}], indirect=True)
def test_nccl_gives_up_first_and_leaves_its_records(limits):
    assert limits(0.0) == 660 > COLLECTIVE_TIMEOUT_SECONDS
    assert limits(40.0) == 20 * 40


def test_a_save_may_take_two_hours_and_is_no_long_micro_batch(limits):
    limits(0.0)
    assert limits(40.0, saving=True) == 7200
    assert limits(5000.0) == 20 * 40
