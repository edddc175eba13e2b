"""A few kills and damages of the soak (benchmarks/soak.py), whose whole run lies outside CI."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "soak.py"


@pytest.mark.slow
def test_kills_and_damages_lose_nothing(tmp_path):
    command = [sys.executable, str(SCRIPT), "--kills", "6", "--damages", "50", "--folder", str(tmp_path / "soak")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads(done.stdout[done.stdout.index("{\n") :])
    assert (found["runs"], found["damages_named"]) == (2, 50) and found["kills"] >= 4
