from dataclasses import replace

import pytest

from fullshard.planning.memory import Job
from fullshard.planning.shape import ModelShape
from fullshard.planning.speed import Rates, StepWork, measure_rates, run_seconds, training_flops, wire_seconds

SHAPE = ModelShape(
    parameters=1_200_000,
    num_layers=2,
    block=500_000,
    blocks=1_000_000,
    embedding=100_000,
    head=100_000,
    tied=False,
    active_block_matrices=1_000_000,
    head_matrix=100_000,
    vocab_size=1000,
    hidden_size=100,
    attention_width=100,
    key_value_width=100,
    intermediate_size=400,
    mlp_copies=4,
    norm_width=200,
    fused_norms=False,
    num_heads=4,
    eager_attention=False,
    max_positions=None,
    largest_tensor=100_000,
)
WORK = StepWork(
    padded_tokens=1000, supervised_tokens=200, mean_length=50, num_micro_batches=10, num_steps=5, evaluated_tokens=0
)


def test_full_is_six_and_lora_four_operations_a_weight():
    attention = 12 * 2 * 100 * 50 * 1000
    assert training_flops(SHAPE, WORK, "full", False) == 6 * 1_000_000 * 1000 + attention + 200 * 6 * 100_000
    assert training_flops(SHAPE, WORK, "lora", False) == 4 * 1_000_000 * 1000 + attention + 200 * 4 * 100_000


def test_recomputation_adds_a_forward_of_the_blocks():
    added = training_flops(SHAPE, WORK, "full", True) - training_flops(SHAPE, WORK, "full", False)
    assert added == 2 * 1_000_000 * 1000 + 4 * 2 * 100 * 50 * 1000


def test_one_rank_sends_nothing():
    assert wire_seconds(SHAPE, WORK, "full", 4, 1, None) == (0.0, 0.0)


def test_gloo_wire_by_hand():
    low, high = wire_seconds(SHAPE, WORK, "full", 4, 2, None)
    gathered, reduced = 2 * 10 * 4 * 1_200_000, 5 * 4 * 1_200_000
    assert low == pytest.approx(gathered / 1.3e9 + reduced / 0.8e9)
    assert high == pytest.approx(gathered / 0.6e9 + reduced / 0.45e9)
    assert wire_seconds(SHAPE, WORK, "lora", 4, 2, None)[0] == pytest.approx(gathered / 1.3e9)


def test_more_work_takes_longer_and_low_is_below_high():
    settings = {"optimizer": "adamw", "precision": "fp32", "micro_tokens": 1, "longest": 1, "recompute": False}
    settings |= {"accumulates": False, "adapted_inputs": 0, "on_cpu": True}
    rates = Rates(50e9, 1e9, 2)
    full_job = Job(method="full", num_ranks=2, adapters=0, **settings)
    lora_job = Job(method="lora", num_ranks=2, adapters=1000, **settings)
    full = run_seconds(SHAPE, WORK, full_job, rates, None)
    lora = run_seconds(SHAPE, WORK, lora_job, rates, None)
    assert full[0] < full[1]
    assert lora[0] < full[0]
    assert lora[1] < full[1]
    crowded = run_seconds(SHAPE, WORK, replace(full_job, num_ranks=4), rates, None)
    assert crowded[1] > full[1]  # four ranks on two cores are no faster each


def testtimed_product_restores_the_threads():
    import torch

    before = torch.get_num_threads()
    rates = measure_rates("cpu", 2)
    assert torch.get_num_threads() == before
    assert rates.fp32 > 0
    assert rates.bf16 > 0
