"""Saving from several ranks: what is written beside training is the state of that moment, and a rank that cannot write
ends the save on all of them, at once, with the older checkpoint whole."""

from __future__ import annotations

import errno
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rank_pool import pool

from fullshard.checkpoint.format import verify
from fullshard.checkpoint.ranges import OwnCheckpoint
from fullshard.run_folder import checkpoint_path, list_checkpoints

FACTS = {"method": "full", "base_model": "/m", "trainer": {}}


def save_twice(ranks, folder, beside, failing):
    """Save step 1, change the values at once, save step 2 with rank ``failing`` on a full disk; what each was told."""
    from fullshard.checkpoint import ranges
    from fullshard.errors import CheckpointError
    from fullshard.shard import Shard

    start = 1000 * ranks.rank
    value = torch.arange(start, start + 1000).float()
    shard = Shard("w", (1000 * ranks.num_ranks,), start, start + 1000, value, None, trainable=True, is_copy=False)
    model, saver = SimpleNamespace(shards=lambda: [shard]), ranges.Saver(Path(folder), ranks, keep_last=2)
    saver.save(1, model, {("w", "exp_avg"): value.clone()}, FACTS, {}, beside)
    value += 1  # training goes on
    saver.wait()
    write = ranges._write_file

    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    ranges._write_file = full if ranks.rank == failing else write
    try:
        saver.save(2, model, {}, FACTS, {}, beside)
        saver.wait()
        return ""
    except CheckpointError as error:
        return error.message
    finally:
        ranges._write_file = write


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("failing", [0, 1, None])
def test_a_save_is_of_its_moment_and_fails_on_all_ranks(tmp_path, beside, failing):
    said = pool(2).run(save_twice, str(tmp_path), beside, failing)
    steps = [step for step, _ in list_checkpoints(tmp_path)]
    if failing is None:
        assert said == ["", ""] and steps == [1, 2]
    else:
        assert steps == [1] and all("step_000002 cannot be written: No space left" in one for one in said)
    assert verify(tmp_path).healthy
    stored = OwnCheckpoint(checkpoint_path(tmp_path, 1))
    assert torch.equal(stored.read("w"), torch.arange(2000).float())
    assert torch.equal(stored.read("w", "exp_avg", 500, 1500), torch.arange(500, 1500).float())


def save_within(ranks, folder, limits, beside):
    """Save step 2 under each limit (bytes) of a file's size; what each save said, "" where it was done."""
    import shutil

    from fullshard.checkpoint import ranges
    from fullshard.errors import CheckpointError
    from fullshard.shard import Shard

    start, said = 300 * ranks.rank, []
    value = torch.arange(start, start + 300).float()
    shard = Shard("w", (300 * ranks.num_ranks,), start, start + 300, value, None, trainable=True, is_copy=False)
    model, saver = SimpleNamespace(shards=lambda: [shard]), ranges.Saver(Path(folder), ranks, keep_last=1)
    extra = {"proof.safetensors": {"tokens": torch.zeros(400)}, "adapter_config.json": "{}" + " " * 200}
    moments = {("w", "exp_avg"): value.clone()}
    saver.save(1, model, moments, FACTS, extra)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in limits:
        ranks.barrier()
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            saver.save(2, model, moments, FACTS, extra, beside)
            saver.wait()
            said.append("")
        except CheckpointError as error:
            said.append(error.message)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        ranks.barrier()
        found = [step for step, _ in list_checkpoints(Path(folder))]
        assert verify(folder).healthy and found == ([1] if said[-1] else [2]), (limit, found, said[-1])
        ranks.barrier()
        if not said[-1]:  # begin again with step 1 alone
            ranks.agree(lambda: shutil.rmtree(checkpoint_path(Path(folder), 2)) if ranks.is_first else None)
            saver.save(1, model, moments, FACTS, extra)
    return said


@pytest.mark.parametrize("beside", [False, True])
def test_a_disk_that_is_full_at_any_write_leaves_the_older_checkpoint(tmp_path, beside):
    """The limit falls into every file of the save (adapter and proof, parts, notes of ranks, manifest, mark)."""
    limits = [*range(0, 2000, 40), 2400, 2800, 3200, 1 << 20]
    said = pool(2).run(save_within, str(tmp_path), limits, beside)
    assert said[0][-1] == "" and "" not in said[0][:40]
    assert all("step_000002 cannot be written" in each and "File too large" in each for each in said[0][:40]), said[0]
    assert [bool(each) for each in said[0]] == [bool(each) for each in said[1]]


LARGE = 6_000_000  # elements; 24 MB of fp32 a kind


def part_of(ranks, border):
    from fullshard.shard import Shard

    start, stop = (0, border) if ranks.is_first else (border, LARGE)
    value = torch.arange(start, stop).float()
    moments = {("w", "exp_avg"): -value}
    shard = Shard("w", (LARGE,), start, stop, value, None, trainable=True, is_copy=False)
    return SimpleNamespace(shards=lambda: [shard]), moments, value


def save_and_load(ranks, folder):
    """Save with one border between the ranks, load with another: bytes read and owned, growth of the peak in bytes."""
    import psutil

    from fullshard.checkpoint import ranges
    from fullshard.device import peak_memory_bytes, reset_peak_memory
    from fullshard.model.load import Part

    ranges.Saver(Path(folder), ranks, keep_last=1).save(1, *part_of(ranks, LARGE // 4)[:2], FACTS, {})
    model, moments, value = part_of(ranks, LARGE // 2)
    kept, count, read = value.clone(), [], Part._values
    value.zero_()
    moments["w", "exp_avg"].zero_()

    def counted(self, start, stop, dtype, out=None):
        count.append((stop - start) * dtype.itemsize)
        return read(self, start, stop, dtype, out)

    Part._values = counted
    try:
        reset_peak_memory(ranks.device)
        before = psutil.Process().memory_info().rss
        measured = abs(peak_memory_bytes(ranks.device) - before) < 1 << 20  # else the peak cannot be reset here
        ranges.load_checkpoint(checkpoint_path(Path(folder), 1), model, moments)
        growth = peak_memory_bytes(ranks.device) - before if measured else 0
    finally:
        Part._values = read
    right = torch.equal(value, kept) and torch.equal(moments["w", "exp_avg"], -kept)
    return right, sum(count), 2 * value.nbytes, growth


def test_each_rank_reads_its_ranges_only_and_into_their_place(tmp_path):
    """Resuming needs no more memory than training: what is loaded lies there already."""
    for right, read, owned, growth in pool(2).run(save_and_load, str(tmp_path)):
        assert right and read == owned and growth < owned // 4, (read, owned, growth)
