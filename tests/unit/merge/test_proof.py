"""The figures of the proof, on logits small enough to check by hand."""

from __future__ import annotations

import math

import pytest
import torch

from fullshard.merge.weights import compare_logits


def test_figures_by_hand():
    reference = torch.tensor([[0.0, 2.0], [1.0, 0.99]])
    logits = torch.tensor([[0.0, 1.0], [1.0, 1.01]])
    result = compare_logits(reference, logits)
    assert result.max_difference == pytest.approx(1.0)
    assert result.relative == pytest.approx(0.5)
    assert (result.same_top, result.num_positions) == (1, 2)
    p = math.exp(2) / (1 + math.exp(2))
    q = math.exp(1) / (1 + math.exp(1))
    first = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    assert result.mean_kl == pytest.approx(first / 2, abs=1e-4)


def test_line():
    reference = torch.linspace(0, 15.5, 32).reshape(16, 2)
    line = compare_logits(reference, reference + torch.tensor([0.0, 0.0031])).line
    assert line.startswith(
        "proof: largest logit difference 0.0031 (0.02% of the range), same top token at 16 of 16 pos"
    )


def test_equal_is_zero_and_nan_is_never_within_a_bound():
    reference = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    same = compare_logits(reference, reference.clone())
    assert (same.max_difference, same.relative, same.mean_kl) == (0, 0, 0)
    broken = reference.clone()
    broken[3, 5] = math.nan
    for pair in ((reference, broken), (broken, broken)):
        found = compare_logits(*pair)
        assert not found.relative <= 1e9 and not found.mean_kl <= 1e9
