"""The command line as a user meets it: speed, help, exit codes, and one clear message for every kind of bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fullshard import cli

ROWS = [{"messages": [{"role": "user", "content": "red blue"}, {"role": "assistant", "content": "green"}]}] * 8
HEAVY = ["torch", "transformers", "datasets", "peft", "pyarrow", "pandas"]


def run_cli(capsys, *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one command, in this process."""
    with pytest.raises(SystemExit) as stopped:
        cli.main(list(arguments))
    printed = capsys.readouterr()
    return stopped.value.code or 0, printed.out, printed.err


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def recipe(tmp_path, k1_folder):
    """Write a good recipe, with changes by dotted key, and return its path."""

    def write(**changes) -> Path:
        data = write_rows(tmp_path / "rows.jsonl", ROWS)
        values = {
            "model": {"path": str(k1_folder)},
            "data": {"train": str(data), "max_length": 32},
            "train": {"max_steps": 1, "global_batch": "4 rows"},
            "output": str(tmp_path / "run"),
        }
        for key, value in changes.items():
            place = values
            *parents, last = key.split("__")
            for parent in parents:
                place = place.setdefault(parent, {})
            place[last] = value
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(values), encoding="utf-8")
        return path

    return write


def test_help_lists_what_exists_and_nothing_else(capsys):
    code, out, _ = run_cli(capsys, "--help")
    assert code == 0
    verbs = ("plan", "train", "merge", "chat", "eval", "report", "init", "serve", "quickstart")
    places = [out.index(f"│ {verb} ") for verb in verbs]
    assert places == sorted(places)
    assert out.index(" More ") > places[4]


@pytest.mark.parametrize("verb", sorted(cli.typer.main.get_command(cli.app).commands))
def test_every_verb_has_help(capsys, verb):
    code, out, _ = run_cli(capsys, verb, "--help")
    assert code == 0 and f"fullshard {verb}" in out


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["train", "--schema"], ["train", "bad.yaml"]])
def test_light_commands_load_nothing_heavy(tmp_path, arguments):
    (tmp_path / "bad.yaml").write_text("modell: x\n")
    program = (
        "import sys\nfrom fullshard.cli import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit:\n    pass\n"
        f"print('heavy:', [name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.rstrip().endswith("heavy: []"), done.stdout + done.stderr


def test_schema_is_json(capsys):
    code, out, _ = run_cli(capsys, "train", "--schema")
    assert code == 0 and {"model", "data", "method", "output"} <= json.loads(out)["properties"].keys()


def test_version(capsys):
    code, out, _ = run_cli(capsys, "--version")
    assert code == 0 and out.startswith("fullshard 0.")


@pytest.mark.parametrize("arguments", [["train"], ["nope"], ["plan", "r", "--nope"], ["train", "r", "--ranks", "0"]])
def test_usage_errors_exit_2(capsys, arguments):
    code, _, err = run_cli(capsys, *arguments)
    assert code == 2 and "fullshard" in err and "Traceback" not in err


def check_refusal(capsys, arguments: list[str], *needed: str) -> None:
    code, _, err = run_cli(capsys, *arguments)
    assert code == 2, err
    assert "Traceback" not in err
    for text in needed:
        assert text in err, f"{text!r} is not in:\n{err}"
    assert "\n  -> " in err, f"no next step in:\n{err}"


@pytest.mark.parametrize("verb", ["plan", "train", "prepare"])
def test_missing_recipe(capsys, tmp_path, verb):
    check_refusal(capsys, [verb, str(tmp_path / "none.yaml")], "none.yaml", "fullshard init")


@pytest.mark.parametrize("verb", ["plan", "train"])
def test_unknown_key_is_answered_with_the_nearest(capsys, recipe, verb):
    path = recipe(train__learning_rte=1e-4, data__max_len=12)
    check_refusal(capsys, [verb, str(path)], "2 problems", "train.learning_rate", "data.max_length", "--schema")


def test_wrong_types_are_all_named(capsys, recipe):
    path = recipe(train__epochs="many", train__global_batch=64, method="qlora")
    check_refusal(capsys, ["plan", str(path)], "3 problems", "train.epochs", "'many'", "64", "rows", "method")


def test_override_errors(capsys, recipe):
    check_refusal(capsys, ["plan", str(recipe()), "train.epochs"], "key=value")
    check_refusal(capsys, ["plan", str(recipe()), "train.epoch=3"], "train.epochs")


def test_yaml_that_is_none(capsys, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("a: [1\n")
    check_refusal(capsys, ["train", str(path)], "recipe.yaml", "YAML")
    path.write_text("")
    check_refusal(capsys, ["train", str(path)], "no keys")
    path.write_bytes(b"\xff\xfe\x00")
    check_refusal(capsys, ["train", str(path)], "recipe.yaml")


@pytest.mark.parametrize("verb", ["plan", "train", "prepare"])
def test_missing_data_file(capsys, recipe, tmp_path, verb):
    path = recipe(data__train=str(tmp_path / "none.jsonl"))
    check_refusal(capsys, [verb, str(path)], "none.jsonl")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("content", ["", "\n\n", "not json\n"])
def test_empty_or_unreadable_data(capsys, recipe, tmp_path, content):
    data = tmp_path / "empty.jsonl"
    data.write_text(content)
    check_refusal(capsys, ["train", str(recipe(data__train=str(data))), "--ranks", "1"], "empty.jsonl")
    assert not (tmp_path / "run").exists()


def test_missing_model_folder(capsys, recipe, tmp_path):
    path = recipe(model__path=str(tmp_path / "no_model"))
    check_refusal(capsys, ["train", str(path), "--ranks", "1"], "no_model")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_incomplete_model_folder(capsys, recipe, tmp_path, k1_folder, missing):
    folder = tmp_path / "model"
    folder.mkdir()
    for file in k1_folder.iterdir():
        if file.name != missing:
            (folder / file.name).symlink_to(file)
    check_refusal(capsys, ["train", str(recipe(model__path=str(folder))), "--ranks", "1"], str(folder))
    assert not (tmp_path / "run").exists()


def test_existing_run_folder_is_left_alone(capsys, recipe, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("mine")
    check_refusal(capsys, ["train", str(recipe()), "--ranks", "1"], str(tmp_path / "run"))
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["mine.txt"]


def test_folder_that_cannot_be_made(capsys, recipe, tmp_path):
    (tmp_path / "file").write_text("")
    check_refusal(capsys, ["train", str(recipe(output=str(tmp_path / "file" / "run"))), "--ranks", "1"], "file")


@pytest.mark.parametrize("verb", ["merge", "resume"])
def test_what_is_no_run_folder(capsys, tmp_path, verb):
    check_refusal(capsys, [verb, str(tmp_path)], str(tmp_path), "run folder")


@pytest.mark.parametrize("verb", [["generate"], ["eval"], ["init"]])
def test_what_is_no_model_folder(capsys, tmp_path, verb):
    write_rows(tmp_path / "rows.jsonl", ROWS)
    check_refusal(capsys, [*verb, str(tmp_path / "no_model"), str(tmp_path / "rows.jsonl")], "no_model")


def test_unexpected_errors_are_one_line(capsys, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("inner detail")

    monkeypatch.setattr("fullshard.config.load_config", fail)
    code, _, err = run_cli(capsys, "plan", "r.yaml")
    assert code == 1 and err.strip() == "Error: RuntimeError: inner detail (run again with --debug)"
    code, _, err = run_cli(capsys, "plan", "r.yaml", "--debug")
    assert code == 1 and "Traceback" in err


def test_debug_shows_where_a_refusal_comes_from(capsys, tmp_path):
    code, _, err = run_cli(capsys, "plan", str(tmp_path / "none.yaml"), "--debug")
    assert code == 2 and "Traceback" in err


def test_ctrl_c_exits_130(capsys, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("fullshard.config.load_config", stop)
    code, _, err = run_cli(capsys, "plan", "r.yaml")
    assert code == 130 and "Traceback" not in err
