"""What the README files tell a reader to type exists: every command parses, every named file is there."""

from __future__ import annotations

import contextlib
import re
import shlex
from pathlib import Path

import pytest
import typer

from fullshard.cli import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "README.zh-CN.md", "CONTRIBUTING.md")]
MAKE_TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))


def commands_of(page: Path) -> list[str]:
    """The lines of every ```bash block, without comments and prompts."""
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.S)
    lines = [line.split("  #")[0].strip().removeprefix("$ ") for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


COMMANDS = [(page.name, line) for page in PAGES for line in commands_of(page)]


def test_every_page_has_commands():
    assert {page for page, _ in COMMANDS} == {page.name for page in PAGES}


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=[f"{page}: {line}" for page, line in COMMANDS])
def test_command_parses(page, line):
    program, *arguments = shlex.split(line)
    if program in ("git", "cd", "apt-get"):
        return
    if program == "source":
        assert arguments == [".venv/bin/activate"]
        return
    if program == "make":
        targets = [word for word in arguments if "=" not in word]
        assert targets and set(targets) <= MAKE_TARGETS
        return
    if program.endswith("torchrun"):
        arguments = arguments[arguments.index("fullshard") + 1 :]
    else:
        assert program in ("fullshard", ".venv/bin/fullshard", ".venv/bin/python", ".venv/bin/ruff"), line
        if not program.endswith("fullshard"):
            return
    group = typer.main.get_command(app)
    verb = group.commands[arguments[0]]
    with contextlib.suppress(typer.Exit):  # --schema prints and is done
        verb.make_context(arguments[0], arguments[1:])  # raises where an option or argument does not exist


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_exist(page):
    text = page.read_text(encoding="utf-8")
    links = [target for target in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in target]
    paths = re.findall(r"`((?:src|tests|examples|benchmarks|docs)/[\w./-]+)`", text)
    missing = [name for name in links + paths if not (ROOT / name).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tree_is_true(page):
    """Every name in the annotated tree exists."""
    for block in re.findall(r"```text\n(src/fullshard/.*?)```", page.read_text(encoding="utf-8"), re.S):
        folders: list[str] = []
        for line in block.splitlines()[1:]:
            if not (match := re.match(r"^( *)([\w/.]+)", line)):
                continue
            depth = len(match.group(1)) // 2 - 1
            folders[depth:] = [match.group(2)]
            place = ROOT / "src" / "fullshard" / Path(*folders)
            assert place.exists(), f"{page.name}: {place}"


def test_readme_does_not_promise_an_index():
    for page in PAGES:
        assert "pip install fullshard" not in page.read_text(encoding="utf-8")
