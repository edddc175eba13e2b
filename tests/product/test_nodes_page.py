"""docs/nodes.md tells what exists: torchrun's flags, our verbs, a Slurm script that bash reads, real messages."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import typer
from torch.distributed.run import get_args_parser

from fullshard.cli import app
from fullshard.config import recipe_keys

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / "nodes.md", ROOT / "docs" / "nodes.zh-CN.md"]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.S)


def commands(page: Path) -> list[str]:
    """Every command of the page; of the Slurm script the one that srun starts."""
    lines = [line for block in blocks(page, "bash") for line in block.splitlines()]
    joined = blocks(page, "slurm")[0].replace("\\\n", " ")
    lines += [line.partition("kill-on-bad-exit=1")[2] for line in joined.splitlines() if line.startswith("srun")]
    return lines


def test_both_pages_give_the_same_commands():
    first, second = (
        [blocks(page, language) for language in ("bash", "slurm", "text")] + [commands(page)] for page in PAGES
    )
    assert first == second
    assert sum("torchrun" in line for line in first[-1]) == 6


@pytest.mark.parametrize("line", commands(PAGES[0]))
def test_command_is_real(line, capsys):
    program, *arguments = shlex.split(line)
    if program == "torchrun":
        place = arguments.index("-m")
        parser = get_args_parser()
        parsed = parser.parse_args(arguments)  # unknown flags would be taken for the script or refused
        assert parsed.module and parsed.training_script == "fullshard"
        flags = [flag for flag in arguments[:place] if flag.startswith("--")]
        with pytest.raises(SystemExit):
            parser.parse_args(["--help"])
        shown = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
        assert flags and set(flags) <= shown  # whole names, as torchrun --help has them
        arguments = arguments[place + 2 :]
    else:
        assert program == "fullshard"
    verb = typer.main.get_command(app).commands[arguments[0]]
    verb.make_context(arguments[0], arguments[1:])
    for override in (word for word in arguments[2:] if re.match(r"[\w.]+=", word)):
        assert override.partition("=")[0] in recipe_keys()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_slurm_script_is_bash(page, tmp_path):
    (script,) = blocks(page, "slurm")
    assert script.startswith("#!/bin/bash\n#SBATCH") and "scontrol show hostnames" in script
    (tmp_path / "job.sbatch").write_text(script)
    subprocess.run(["bash", "-n", tmp_path / "job.sbatch"], check=True)
    options = re.findall(r"^#SBATCH (.*)$", script, re.M)
    assert all(re.fullmatch(r"--[a-z-]+=\S+", option) for option in options)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_messages_and_files_are_those_of_the_code(page):
    """The fixed parts of every message that the page shows stand in the source."""
    files = [path for path in (ROOT / "src").rglob("*") if path.suffix in (".py", ".yaml")]
    source = " ".join(path.read_text(encoding="utf-8") for path in files)
    shown = "\n".join(blocks(page, "text"))
    for part in ("The run folder of rank 0, ", "is not seen from ", "No model folder at "):
        assert part in shown and part in source
    assert "Put `output` on a file system that all nodes share: output=/SHARED/FOLDER" in source
    for name in re.findall(r"`((?:src|tests|docs)/[\w./-]+)`", page.read_text(encoding="utf-8")):
        assert (ROOT / name).exists(), name
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HCCL_IF_IP"):
        assert f"`{name}`" in page.read_text(encoding="utf-8")
