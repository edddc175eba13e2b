"""Each rank reads only its ranges: anonymous memory stays under shard + largest tensor + 100 MB, over the baseline."""

from __future__ import annotations

import threading
from pathlib import Path

from rank_pool import pool
from tiny_models import make_model

from fullshard.config import config_from_dict

ALLOWANCE_BYTES = 100_000_000


def anonymous_memory_bytes() -> int:
    """Anonymous (not file-backed) resident memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def peak_while_loading(ranks, path):
    """(baseline, peak, shard bytes, largest tensor bytes), sampled every 2 ms by a thread."""
    from fullshard.train.precision import precision_of
    from fullshard.train.setup import build_sharded

    config = config_from_dict({"model": {"path": path}, "data": {"train": "-"}, "method": "full", "output": "-"})
    baseline = anonymous_memory_bytes()
    peak, done = [baseline], threading.Event()

    def watch():
        while not done.wait(0.002):
            peak.append(anonymous_memory_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    built = build_sharded(config, ranks, precision_of("fp32"), False)
    done.set()
    watcher.join()
    peak.append(anonymous_memory_bytes())
    shards = built.sharded.shards()
    mine = sum(shard.value.numel() * 4 for shard in shards)
    largest = max(
        4 * shard.full_shape[0] * (shard.full_shape[1] if len(shard.full_shape) > 1 else 1) for shard in shards
    )
    return baseline, max(peak), mine, largest


def test_loading_stays_under_shard_plus_largest_tensor(tmp_path):
    wide = {"vocab_size": 32768, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 3}
    path = make_model(tmp_path / "model", **wide, num_attention_heads=8, num_key_value_heads=8)
    for baseline, peak, mine, largest in pool(4).run(peak_while_loading, str(path)):
        bound = mine + largest + ALLOWANCE_BYTES
        assert bound < 4 * mine  # the bound means something: a whole model would break it
        assert peak - baseline <= bound, f"{(peak - baseline) / 1e6:.0f} MB, bound {bound / 1e6:.0f} MB"
