"""docs/fsdp.md: the example on a bare module, the padding table, and the pages as their script makes them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from rank_pool import free_port

ROOT = Path(__file__).parents[2]
BARE = ROOT / "examples" / "learn" / "simple_engine_bare.py"


def test_a_bare_module_learns_as_unsharded(tmp_path):
    assert len(BARE.read_text(encoding="utf-8").splitlines()) <= 60
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, *launcher, str(BARE)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=240)
    assert done.returncode == 0, done.stderr
    pairs = re.findall(r"^step \d: loss (\S+) on 2 ranks, (\S+) unsharded$", done.stdout, re.M)
    assert len(pairs) == 5
    for sharded, whole in pairs:
        assert abs(float(sharded) / float(whole) - 1) < 1e-5, done.stdout
    held = re.findall(r"rank \d holds ([\d,]+) of ([\d,]+)", done.stdout)
    whole = (8 * 48 + 48) + 4 * (2 * 48 + 2 * 4 * 48 * 48 + 5 * 48) + (48 + 1)
    assert {int(total.replace(",", "")) for _, total in held} == {whole}
    assert sum(int(own.replace(",", "")) for own, _ in held) == whole
