"""The built wheel holds everything, installs, and its command runs."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*command: str | Path, **options) -> str:
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}  # another tree may stand there
    done = subprocess.run(
        [str(part) for part in command], env=env, capture_output=True, text=True, timeout=300, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=ROOT)
    (path,) = folder.glob("fullshard-*.whl")
    return path


def test_wheel_holds_the_package_and_its_data(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for path in (ROOT / "src" / "fullshard").rglob("*"):
        if path.is_file() and path.suffix in (".py", ".jsonl", ".yaml", ".json", ".html", ".txt"):
            assert str(path.relative_to(ROOT / "src")) in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith("tests")]


def test_wheel_installs_and_runs(wheel, tmp_path):
    """In a venv of its own, which reads its dependencies from this environment: no network."""
    venv = tmp_path / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", venv)
    python = venv / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel)
    (site,) = (venv / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(
        "\n".join({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}) + "\n"
    )
    command = venv / "bin" / "fullshard"
    assert "quickstart" in run(command, "--help", cwd=tmp_path)
    assert "learning_rate" in run(command, "train", "--schema", cwd=tmp_path)
    place = run(python, "-c", "import fullshard.cli; print(fullshard.cli.__file__)", cwd=tmp_path)
    assert Path(place.strip()).is_relative_to(venv)
