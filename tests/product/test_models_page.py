"""docs/models.md says what the tiny models show, and names every family that the tests train."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_pages_are_what_the_script_makes():
    spec = importlib.util.spec_from_file_location("models_page", ROOT / "docs" / "models_page.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for path, text in script.pages().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is old: python docs/models_page.py"
