"""The figures of the proof, on logits small enough to check by hand."""

from __future__ import annotations

import math

import pytest
import torch

from fullshard.merge.proof import compare_logits, is_close


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


def test_equal_is_close_and_nan_never():
    reference = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    assert compare_logits(reference, reference.clone()).max_difference == 0
    for low_precision in (False, True):
        assert is_close(compare_logits(reference, reference.clone()), low_precision)
        broken = reference.clone()
        broken[3, 5] = math.nan
        assert not is_close(compare_logits(reference, broken), low_precision)
        assert not is_close(compare_logits(broken, broken), low_precision)


def test_bounds_differ_by_precision():
    reference = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)) * 4
    noise = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    assert is_close(compare_logits(reference, reference + 1e-5 * noise), False)
    slightly = compare_logits(reference, reference + 0.03 * noise)
    assert is_close(slightly, True) and not is_close(slightly, False)
    assert not is_close(compare_logits(reference, reference + 1.0 * noise), True)
    assert not is_close(compare_logits(reference, reference.roll(1, 0)), True)
