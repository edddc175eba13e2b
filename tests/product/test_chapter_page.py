"""docs/chapter.md: the pages are what the script makes of templates and stored outputs, and every command exits 0.

Times, rates and whatever else depends on a machine is not compared. The commands of examples/learn run in
test_learn.py; the test here is that it runs the same ones.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
import shlex
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import typer

from fullshard.cli import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / "chapter.md", ROOT / "docs" / "chapter.zh-CN.md"]
both = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@pytest.fixture(scope="module")
def script():
    """The module chapter_page."""
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import chapter_page
    finally:
        sys.path.remove(str(ROOT / "docs"))
    return chapter_page


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.S)


def prose(page: Path) -> str:
    return re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)


def test_the_pages_are_what_the_script_makes(script):
    made = script.pages()
    assert len(made) == 2 + 2 * 7  # seven figures in two languages; the eighth is that of docs/memory.md
    for path, text in made.items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is old: python docs/chapter_page.py"
        if path.suffix == ".svg":
            ElementTree.fromstring(text)


def test_stored_outputs_come_from_the_scripts_as_they_are(script):
    stored = json.loads((script.OUTPUTS / "scripts.json").read_text(encoding="utf-8"))
    assert stored == script.script_hashes(), "a script has changed since: python docs/chapter_page.py --run"
    assert {path.stem for path in script.OUTPUTS.glob("*.txt")} == set(script.COMMANDS)


def test_both_pages_have_the_same_outputs_and_numbers():
    assert blocks(PAGES[0], "text") == blocks(PAGES[1], "text")
    first, second = (re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?%?", prose(page)) for page in PAGES)
    assert sorted(set(first)) == sorted(set(second))
    assert len(set(first)) > 40


@both
def test_eight_sections_each_whole(page):
    """The idea, a command, its output, a figure, what to change: and no section is long."""
    text = page.read_text(encoding="utf-8")
    sections = re.split(r"^## ", text, flags=re.M)[1:]
    assert [section[0] for section in sections] == list("12345678")
    for section in sections:
        assert "```text\n" in section and "![" in section
        assert re.search(r"```bash\n|`python examples/learn/", section)
        assert "**For your own" in section or "**换成自己的" in section
        assert len(section.splitlines()) <= 72
    anchors = re.findall(r"\]\(#([^)]+)\)", text)
    headings = re.findall(r"^## (.*)$", text, re.M)
    assert anchors == [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


@both
def test_links_and_named_files_exist(page):
    text = prose(page)
    links = [target for target in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in target]
    assert len(links) >= 8 + 5
    assert not [name for name in links if not (page.parent / name).exists()]
    if page is PAGES[1]:
        assert all(".zh-CN." in name for name in links if name != "chapter.md")
    paths = re.findall(r"\b((?:examples|docs)/[\w./]*\w)", text)
    assert paths and not [name for name in paths if not (ROOT / name).exists()]


@both
def test_commands_are_those_of_the_script(script, page):
    shown = [line for block in blocks(page, "bash") for line in block.splitlines()]
    assert shown == list(script.COMMANDS.values())


@both
def test_inline_commands_parse(page):
    """Commands with a placeholder (MODEL, RECIPE, RUN) cannot run, but their words exist."""
    group = typer.main.get_command(app)
    found = re.findall(r"`fullshard (\w[^`]*)`", prose(page))
    assert len(found) >= 5
    for line in found:
        verb, *arguments = shlex.split(line)
        with contextlib.suppress(typer.Exit):
            if arguments or verb == "doctor":
                group.commands[verb].make_context(verb, arguments)
            else:
                assert verb in group.commands
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    assert set(re.findall(r"`make ([a-z-]+)", prose(page))) <= targets


def test_learn_commands_are_run_by_test_learn(script):
    """Script, number of ranks and options of each are those of a fast test there; a model's path may be another."""
    tree = ast.parse((ROOT / "tests" / "product" / "test_learn.py").read_text(encoding="utf-8"))
    ran = set()
    for function in tree.body:
        if not isinstance(function, ast.FunctionDef) or function.decorator_list:
            continue
        for call in ast.walk(function):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "run_script":
                words = [word.value for word in call.args]
                ranks = next((key.value.value for key in call.keywords if key.arg == "ranks"), 0)
                ran.add((ranks, *(word for word in words if not word.endswith(".json"))))
    shown = set()
    for name in script.LEARN:
        program, *words = shlex.split(script.COMMANDS[name])
        ranks = int(words[1]) if program == "torchrun" else 0
        words = [word.removeprefix("examples/learn/") for word in words[2 if ranks else 0 :]]
        shown.add((ranks, *(word for word in words if not word.startswith("runs/"))))
    assert shown == ran


def run_twice_at_most(script, command: str, folder: Path) -> str:
    """What it prints; raises where its exit code is not 0. Only doctor's 60 s for two ranks get a second chance."""
    try:
        return script.run_command(command, folder)
    except RuntimeError as error:
        if "clients joined" not in str(error) and "exit code -14" not in str(error):
            raise
        return script.run_command(command, folder)


@pytest.mark.slow
def test_every_other_command_runs(script, tmp_path):
    """In their order, in a new folder; what they print has everything that the pages show, and tuning has worked."""
    folder, outputs = script.workplace(tmp_path / "repository"), script.stored_outputs()
    for name, command in script.COMMANDS.items():
        if name not in script.LEARN:
            outputs[name] = run_twice_at_most(script, command, folder).rstrip()
    for output, first, stop in script.EXCERPTS.values():
        assert script.excerpt(outputs[output], first, stop)
    found = script.numbers_of(outputs)
    assert int(found["base_match"]) <= 4 and int(found["tuned_match"]) >= 36
    assert outputs["generate_base"].split() == ["red", "sea"] and outputs["generate"].split() == ["sun", "wind"]
    settings = json.loads((folder / "runs" / "chapter" / "qwen3_8b" / "config.json").read_text(encoding="utf-8"))
    assert (settings["num_hidden_layers"], settings["hidden_size"], settings["vocab_size"]) == (36, 4096, 151936)


def test_a_command_that_fails_is_noticed(script, tmp_path):
    with pytest.raises(RuntimeError, match="exit code"):
        script.run_command("python examples/no_such_script.py", tmp_path)
