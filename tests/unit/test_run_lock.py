"""One process trains a run at a time; a killed one leaves no lock behind."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fullshard.errors import ConfigError
from fullshard.run_folder import claim_run

HOLD = (
    "import sys; from pathlib import Path; from fullshard.run_folder import claim_run\n"
    "lock = claim_run(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
)


def test_a_second_trainer_is_refused_with_the_process_of_the_first(tmp_path):
    with claim_run(tmp_path), pytest.raises(ConfigError, match=f"trained now, by process {os.getpid()}"):
        claim_run(tmp_path)
    claim_run(tmp_path).close()


def test_a_killed_trainer_leaves_no_lock(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "held\n"
            with pytest.raises(ConfigError, match=f"trained now, by process {holder.pid}"):
                claim_run(tmp_path)
        finally:
            holder.kill()
    claim_run(tmp_path).close()
