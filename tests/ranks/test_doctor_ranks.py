"""``fullshard doctor`` on ranks: collectives that are right and wrong, the rank that is to blame, torchrun's agents."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from rank_pool import pool
from test_nodes import Nodes
from tiny_models import make_job

from fullshard import doctor


def examine(ranks, folders: list[str], broken: str = "") -> list[tuple[str, doctor.Check]]:
    """The joined checks of all ranks, of which rank 1 may have a broken collective or a slow device."""
    real = {name: getattr(dist, name) for name in ("all_reduce", "all_to_all_single")}

    def add_one(value, **options):
        real["all_reduce"](value, **options)
        value.view(-1)[-1:] += 1

    def send_wrong(output, given, **options):
        given.view(-1)[:1] += 1  # the first element of what rank 0 gets
        return real["all_to_all_single"](output, given, **options)

    def get_nothing(value, **options):
        real["all_reduce"](value, **options)
        value.fill_(float("nan"))

    faults = {"all_reduce": add_one, "all_to_all_single": send_wrong, "nan": get_nothing}
    with ExitStack() as stack:
        stack.enter_context(mock.patch("fullshard.ranks.SEEN_WITHIN_SECONDS", 0.2))
        stack.enter_context(mock.patch("socket.gethostname", return_value="node"))
        rate = 2e9 if broken == "slow" and ranks.rank == 1 else 9e9
        stack.enter_context(mock.patch("fullshard.planning.speed.timed_product", return_value=rate))
        if ranks.rank == 1 and broken in faults:
            name = "all_reduce" if broken == "nan" else broken
            stack.enter_context(mock.patch.object(dist, name, faults[broken]))
        found = list(doctor.examine_rank(ranks, Path(folders[ranks.rank])))
    return list(doctor.join_ranks(ranks.gather_objects(("node", found))))


def failed(folders: list[str], broken: str = "") -> dict[str, str]:
    first, second = pool(2).run(examine, folders, broken)
    assert first == second
    return {check.name: check.finding for check in first if check.ok != "ok"}


def test_two_ranks_are_fine(tmp_path):
    assert failed([str(tmp_path)] * 2) == {}
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("broken", "names", "words"),
    [
        ("all_reduce", ["sum", "average"], "rank 1: wrong here"),
        ("all_to_all_single", ["all-to-all"], "rank 0: what ranks [1] send arrives wrong here"),
        ("nan", ["sum", "average"], "rank 1: wrong here"),
    ],
)
def test_a_wrong_collective_names_the_rank(tmp_path, broken, names, words):
    assert failed([str(tmp_path)] * 2, broken) == dict.fromkeys(names, words)


def test_a_slow_rank_is_named(tmp_path):
    found = failed([str(tmp_path)] * 2, "slow")
    assert list(found) == ["fp32 products", "bf16 products", "fp16 products"]
    assert all(finding.endswith("; slower than most: rank 1 (22%)") for finding in found.values())


def test_a_folder_that_is_not_shared(tmp_path):
    folders = [str(tmp_path / name) for name in "ab"]
    found = failed(folders)
    assert list(found) == ["shared folder"] and found["shared folder"].startswith("rank 1: node (")
    assert f"({folders[1]}): rank 0's file is not seen" in found["shared folder"]


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    found = failed([str(tmp_path / "file" / "run")] * 2)
    assert list(found) == ["shared folder"] and "Cannot use" in found["shared folder"]


def test_two_nodes_test_each_other(tmp_path, tmp_path_factory):
    """Under torchrun rank 0 alone prints, for all; a second start has another folder and broken data."""
    job = make_job(tmp_path, 8)
    with Nodes(["doctor", "recipe.yaml", "--json"], [job, job]) as nodes:
        assert nodes.wait() == [0, 0], nodes.texts("errors")
        out = sorted(nodes.texts("out"))
    assert out[0] == ""
    found = {check["name"]: check for check in json.loads(out[1])["checks"]}
    assert found["ranks"]["finding"] == "2 have met, over gloo"
    assert {"torch", "all-to-all", "shared folder", "template", "disk for it"} <= found.keys()
    other = tmp_path_factory.mktemp("node1")
    shutil.copytree(job, other, dirs_exist_ok=True)
    (job / "rows.jsonl").write_text("no JSON")
    with Nodes(["doctor", "recipe.yaml"], [job, other], backend="static") as nodes:
        assert nodes.wait() == [1, 0]
        out = nodes.texts("out")
    assert out[1] == "" and "2 of " in out[0] and "checks failed" in out[0], out[0]
    assert "warn  template       no token of 0 rows" in out[0]
    assert f"({other}): rank 0's file is not seen" in out[0] and "rows.jsonl:1" in out[0]
