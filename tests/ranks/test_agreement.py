"""``Ranks.agree``: all wait however long one takes, an error of one reaches all; and the check for a shared folder."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from rank_pool import free_port, pool

from fullshard import launch
from fullshard import ranks as ranks_module
from fullshard.errors import ConfigError, DataError, TrainError, UserError
from fullshard.ranks import Ranks, start_ranks

LIMIT_SECONDS = 2  # in place of 600: the longest that a collective may wait
ENDED_WITHIN_SECONDS = 90


def outcome_of(ranks: Ranks, failing: int, kind: str) -> tuple[str, str, bool] | list:
    """What a rank sees when rank ``failing`` fails: class, text, and whether it leaves the telling to another rank."""

    def task() -> int:
        if ranks.rank == failing and kind == "user":
            raise DataError("row 7 is empty.", "Mend it.")
        if ranks.rank == failing and kind == "file":
            Path("/no/such/file").read_text()
        return ranks.rank * 10

    with mock.patch("socket.gethostname", return_value=f"node{ranks.rank}"):
        try:
            return ranks.agree(task)
        except UserError as error:
            return type(error).__name__, str(error), error.told


def test_all_ranks_get_all_results_in_rank_order():
    assert pool(2).run(outcome_of, -1, "none") == [[0, 10], [0, 10]]


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_of_one_rank_is_raised_on_all_and_told_once_on_each_node(failing):
    node = "node1: " if failing else ""
    seen = pool(2).run(outcome_of, failing, "user")
    assert seen == [("DataError", f"{node}row 7 is empty.\nMend it.", rank == 1) for rank in range(2)]


def test_a_file_that_one_rank_cannot_read_is_raised_on_all():
    for name, text, _ in pool(2).run(outcome_of, 1, "file"):
        assert name == "UserError" and text.startswith("node1: Cannot use /no/such/file: No such file")


def look_from(ranks: Ranks, folders: list[str], wait_seconds: float) -> str:
    with (
        mock.patch("socket.gethostname", return_value=f"node{ranks.rank}"),
        mock.patch("fullshard.ranks.SEEN_WITHIN_SECONDS", wait_seconds),
    ):
        try:
            launch._require_shared(Path(folders[ranks.rank]), ranks)
        except ConfigError as error:
            return str(error)
    return "shared"


def test_a_shared_folder_is_seen_and_left_as_it_was(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    assert pool(2).run(look_from, [str(tmp_path / "kept")] * 2, 30) == ["shared"] * 2
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["file"]


def test_a_folder_of_another_node_is_named(tmp_path):
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    Path(second).mkdir()
    for text in pool(2).run(look_from, [first, second], 0.2):
        assert text.startswith(f"The run folder of rank 0, node0 ({first}), is not seen from node1 ({second}).")
        assert "output=/SHARED/FOLDER" in text
    assert not Path(first).exists()


def data_of(ranks: Ranks, folders: list[str]) -> str:
    with mock.patch("socket.gethostname", return_value=f"node{ranks.rank}"):
        try:
            launch._require_same_data(Path(folders[ranks.rank]) / "prepared", ranks)
        except DataError as error:
            return error.message
    return "same"


def test_prepared_data_that_differs_names_the_nodes(tmp_path):
    folders = []
    for name, content in (("first", "a" * 64), ("second", "b" * 64)):
        (tmp_path / name / "prepared").mkdir(parents=True)
        (tmp_path / name / "prepared" / "data.json").write_text(json.dumps({"hash": content}))
        folders.append(str(tmp_path / name))
    assert pool(2).run(data_of, [folders[0]] * 2) == ["same", "same"]
    for text in pool(2).run(data_of, folders):
        assert text.endswith("differs between nodes: aaaaaaaaaaaa on node0, bbbbbbbbbbbb on node1.")


def test_a_new_attempt_does_not_meet_the_last_one_in_the_store():
    """As after an elastic restart: the store still holds the question of a rank that is gone, and an older name."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=ENDED_WITHIN_SECONDS))
    store.set("question/2", "asked by a rank that is gone")
    names = []
    for _ in range(2):
        with ThreadPoolExecutor(3) as threads:
            found = [
                threads.submit(ranks_module._name_attempt, store, rank, 3, ENDED_WITHIN_SECONDS) for rank in range(3)
            ]
            (name,) = {each.result() for each in found}
        names.append(name)
    assert names[0] != names[1]


def rank_of_its_own(rank: int, port: int, beat_seconds: float, kind: str, answers: multiprocessing.Queue) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port), OMP_NUM_THREADS="1",
    )  # fmt: skip
    ranks_module.BEAT_SECONDS = beat_seconds

    def prepare() -> str:
        if kind == "dies":
            os._exit(9)
        threading.Event().wait(3 * LIMIT_SECONDS)  # a preparation that takes longer than a collective may wait
        return "prepared"

    try:
        if (rank, kind) == (0, "dies while it joins"):
            dist.init_process_group = lambda *args, **named: os._exit(9)
        ranks = start_ranks()  # rank 0 may be gone before rank 1 is through here
        if kind == "slow":
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=LIMIT_SECONDS), dist.group.WORLD)
        answers.put((rank, ranks.agree(prepare if rank == 0 else None)[0]))
    except TrainError as error:
        answers.put((rank, error.message))
    answers.close()
    answers.join_thread()
    os._exit(0)


def answers_of_ranks(beat_seconds: float, kind: str, count: int) -> dict[int, str]:
    context = multiprocessing.get_context("spawn")
    answers, port = context.Queue(), free_port()
    started = [
        context.Process(target=rank_of_its_own, args=(rank, port, beat_seconds, kind, answers)) for rank in range(2)
    ]
    try:
        for process in started:
            process.start()
        return dict(answers.get(timeout=ENDED_WITHIN_SECONDS) for _ in range(count))
    finally:
        for process in started:
            process.kill()
            process.join()


def test_a_preparation_longer_than_the_limit_of_a_collective_is_waited_for():
    assert answers_of_ranks(LIMIT_SECONDS / 10, "slow", 2) == {0: "prepared", 1: "prepared"}


def test_without_a_sign_of_life_the_limit_ends_the_wait():
    """The limit is real, and the signs of life are what carries the wait over it."""
    assert "A rank was lost" in answers_of_ranks(100, "slow", 1)[1]


@pytest.mark.parametrize("kind", ["dies", "dies while it joins"])
def test_a_rank_that_dies_while_it_prepares_ends_the_others_long_before_the_limit(kind):
    assert "A rank was lost" in answers_of_ranks(100, kind, 1)[1]
