"""A few cells of benchmarks/merge_families.py: what two ranks trained and saved merges without a difference."""

from __future__ import annotations

import merge_cells
import pytest
from merge_cells import compare, sources_of, train
from rank_pool import pool
from tiny_models import make_model, make_tokenizer

CELLS = [("gpt2", "LoRA"), ("mixtral", "LoRA, new tokens"), ("llama", "tied, full")]


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    return make_tokenizer(make_model(tmp_path_factory.mktemp("words")))


@pytest.mark.parametrize(("family", "kind"), CELLS)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::RuntimeWarning")
def test_no_difference(tmp_path, words, family, kind):
    trained = train(tmp_path, family, kind, words, pool(2))
    for source in sources_of(kind):
        found = compare(trained, source, tmp_path / f"merged from {source}")
        assert found["parameters_differ"] == [] and found["moved"] > 1e-3, source
        assert found["logits"] <= (1e-5 if "LoRA" in kind else 0), source


def test_twelve_families_are_whole():
    from families import CORE

    assert len(set(merge_cells.FAMILIES) - {"qwen2"}) == 12 and set(merge_cells.FAMILIES) <= set(CORE)
