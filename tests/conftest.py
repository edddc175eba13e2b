"""Settings of every test run: no network, a home folder of its own, and the tests folder on sys.path."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"


@pytest.fixture(scope="session", autouse=True)
def home_folder(tmp_path_factory):
    """HOME is a temporary folder for the session, so that no test reads or writes the user's files."""
    folder = tmp_path_factory.mktemp("home")
    before = os.environ.get("HOME")
    os.environ["HOME"] = str(folder)
    yield folder
    if before is None:
        del os.environ["HOME"]
    else:
        os.environ["HOME"] = before


@pytest.fixture(scope="session")
def k1_folder(tmp_path_factory) -> Path:
    """The K1 model and the K2 tokenizer in one folder. Read only: copy it before changing it."""
    from tiny_models import make_model, make_tokenizer

    folder = tmp_path_factory.mktemp("k1")
    make_model(folder)
    return make_tokenizer(folder)


@pytest.fixture(scope="session", autouse=True)
def resident_ranks():
    """Stop the resident pools of ranks at the end, so that no process is left behind."""
    yield
    from rank_pool import stop_all

    stop_all()
