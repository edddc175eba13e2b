from dataclasses import replace

import pytest

from fullshard.planning.hardware import ACCELERATORS, Accelerator
from fullshard.planning.memory import Job
from fullshard.planning.shape import ModelShape
from fullshard.planning.speed import (
    EFFICIENCY,
    Rates,
    Run,
    StepWork,
    measure_rates,
    micro_batch_seconds,
    run_seconds,
)

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


CARD = Accelerator(("card",), 0, {"bf16": 1e12, "fp16": 1e12, "fp32": 1e11}, 0.5, 1e9, 1e9, 1e8, "family")
SHARES = {  # of a card that reaches everything and hides nothing, with numbers that are easy to follow
    "families": {"family": {"matrices": 0.5, "flash2": 0.25}},
    "kernels": {"plain": 2.0, "adapter": 1.0, "logits": 3.0},
    "width": 100.0,  # SHAPE is as narrow, so that its products reach half
    "small_heads": 0.5,
    "optimizer": 1.0,
    "block": 1e-3,
    "unit": 1e-4,
    "hop": 1e-5,
    "overlap": 0.0,
    "link": 1.0,
    "bus": 0.5,
    "node": 0.5,
}
RUN = Run(length=50, tokens=100, head_tokens=20, accumulation=2)


def job(**changes):
    values = {"method": "full", "optimizer": "adamw", "num_ranks": 1, "precision": "bf16", "micro_tokens": 100}
    values |= {"longest": 50, "recompute": False, "accumulates": False, "adapters": 0}
    return Job(**(values | {"on_cpu": False} | changes))


def seconds(run=RUN, shares=SHARES, practice=None, **changes):
    return micro_batch_seconds(SHAPE, job(**changes), CARD, run, practice, shares)


def test_products_are_six_operations_a_weight_and_four_under_lora():
    rate = 1e12 * 0.5 * 0.5 * 0.5  # reachable, the family's share, a width of 100 beside 100
    assert seconds()["matrices"] == pytest.approx((6 * 1_000_000 * 100 + 6 * 100_000 * 20) / rate)
    assert seconds(method="lora", adapters=1)["matrices"] == pytest.approx((4e8 + 4 * 100_000 * 20) / rate)
    # one of two blocks recomputed: half a forward more; selective recomputation says its own share
    assert seconds(recompute=1)["matrices"] == pytest.approx((7e8 + 12_000_000) / rate)
    assert seconds(replace(RUN, again=0.5), recompute=True)["matrices"] == pytest.approx((7e8 + 12_000_000) / rate)


def test_attention_sees_half_of_all_pairs_and_small_heads_are_slow():
    scores = (
        2 * 100 * 50 * 100 * 2
    )  # of a forward: 2 operations x 2 products x half of tokens x length x width, 2 blocks
    rate = 1e12 * 0.5 * 0.25 * 0.5  # heads of 25 features
    assert seconds()["attention"] == pytest.approx(3.5 * scores / rate)
    assert seconds(recompute=True)["attention"] == pytest.approx(4.5 * scores / rate)
    assert seconds(replace(RUN, again=0.5), recompute=True)["attention"] == pytest.approx(3.5 * scores / rate)


def test_elementwise_work_is_bytes_over_the_memory_rate():
    block = 2 * (2 * 100 + 200 + 4 * 100 + 4 * 400) + 4 * 200  # as memory.py counts what one token keeps
    logits = 20 * 1000 * 16 * 3
    assert seconds()["elementwise"] == pytest.approx((100 * 2 * 3 * block * 2 + logits) / 1e9)
    adapted = seconds(replace(RUN, adapted=300))["elementwise"] - seconds()["elementwise"]
    assert adapted == pytest.approx(100 * 2 * 3 * 2 * 300 / 1e9)


def test_launches_and_the_ring_grow_with_the_ranks():
    assert seconds()["launches"] == pytest.approx(2 * 1e-3)
    assert seconds(num_ranks=10)["launches"] == pytest.approx(2 * (1e-3 + 3 * (1e-4 + 10e-5)))
    many = seconds(replace(RUN, units=5), num_ranks=10)["launches"]
    assert many == pytest.approx(2 * (1e-3 + 3 * 5 * (1e-4 + 10e-5)))


def test_the_optimizer_is_shared_by_the_ranks_and_the_micro_batches():
    # weight and states are read and written, the gradient written once and read twice: 2 x (4 + 8) + 3 x 4 bytes
    assert seconds(num_ranks=4)["optimizer"] == pytest.approx(1_200_000 / 4 * 36 / 1e9 / 2)
    assert seconds(method="lora", adapters=1000, num_ranks=4)["optimizer"] == pytest.approx(1000 * 36 / 1e9 / 2)


def test_wire_inside_a_node_and_across():
    gathered, reduced = 2 * 2 * 1_200_000, 4 * 1_200_000
    assert seconds()["wire"] == 0.0
    bus = 1e9 * 0.5  # 1 GB/s is no NVLink
    assert seconds(num_ranks=4)["wire"] == pytest.approx((gathered + reduced) * 3 / 4 / bus)
    assert seconds(num_ranks=4, gathers_all=True)["wire"] == pytest.approx((gathered / 2 + reduced) * 3 / 4 / bus)
    # gradients of two micro-batches reduced once
    assert seconds(num_ranks=4, accumulates=True)["wire"] == pytest.approx((gathered + reduced / 2) * 3 / 4 / bus)
    # HSDP in one node: all stays on its links
    assert seconds(num_ranks=4, replicas=2)["wire"] == pytest.approx((gathered + reduced) / 2 / bus)
    # two nodes of two: 2 x 0.1 GB/s, half of it reached, carry half of everything
    two = replace(RUN, nodes=2)
    assert seconds(two, num_ranks=4)["wire"] == pytest.approx((gathered + reduced) / 2 / (2e8 * 0.5))
    # HSDP: only gradients cross, twice
    assert seconds(two, num_ranks=4, replicas=2)["wire"] == pytest.approx(2 * reduced / 2 / (2e8 * 0.5))
    fast = replace(CARD, link_bytes_per_second=1e11)
    wire = micro_batch_seconds(SHAPE, job(num_ranks=4), fast, RUN, None, SHARES)["wire"]
    assert wire == pytest.approx((gathered + reduced) * 3 / 4 / 1e11)


def test_overlap_hides_the_smaller_of_compute_and_wire():
    parts = seconds(num_ranks=4)
    busy = parts["matrices"] + parts["attention"] + parts["elementwise"] + parts["launches"]
    assert parts["total"] == pytest.approx(busy + parts["optimizer"] + parts["wire"])
    hidden = seconds(shares=SHARES | {"overlap": 0.75}, num_ranks=4)["total"]
    assert hidden == pytest.approx(parts["total"] - 0.75 * min(busy, parts["wire"]))


def test_every_card_and_kernel_has_its_shares():
    shares = EFFICIENCY["devices"]
    for card in ACCELERATORS:
        family = shares["families"][card.family]
        assert set(family) == {"matrices", "flash1", "flash2", "flash3"}
        assert all(0.1 < share <= 1.3 for share in family.values())
    assert 0 < shares["error"][0] < 1 < shares["error"][1]
    assert set(shares["checked"]) <= {card.name for card in ACCELERATORS}


def test_more_work_takes_longer_and_low_is_below_high():
    rates = Rates(50e9, 1e9, 2)
    here = {"on_cpu": True, "precision": "fp32", "num_ranks": 2}
    full = run_seconds(SHAPE, WORK, job(**here), rates)
    lora = run_seconds(SHAPE, WORK, job(**here, method="lora", adapters=1000), rates)
    assert full[0] < full[1] and full[2] < full[3]
    assert lora[0] < full[0] and lora[1] < full[1]
    crowded = run_seconds(SHAPE, WORK, job(**here | {"num_ranks": 4}), rates)
    assert crowded[1] > full[1]  # four ranks on two cores are no faster each


def test_a_cpu_step_by_hand():
    """2 ranks on 2 cores of 50 GFLOP/s: products at the timed rate, gloo's traffic, no elementwise kernels."""
    shares, work = EFFICIENCY["cpu"], job(on_cpu=True, precision="fp32", num_ranks=2)
    step = run_seconds(SHAPE, WORK, work, Rates(50e9, 1e9, 2))[2:]
    products = (6 * 1_000_000 * 1000 + 6 * 100_000 * 200) / 5  # of five steps
    scores = 7 * 50 * 100 * 2 * 1000 / 5
    compute = (products + scores) / (50e9 * shares["families"]["measured"]["matrices"])
    wire = 2 * (2 * 4 + 4) * 1_200_000 / 2 / 0.45e9  # two micro-batches gather twice and reduce
    optimizer = 1_200_000 / 2 * 36 * shares["optimizer"] / 5e9
    assert step[0] * shares["error"][1] == pytest.approx(compute + wire + optimizer)
    assert step[1] * shares["error"][0] == pytest.approx(compute + wire + optimizer)


def testtimed_product_restores_the_threads():
    import torch

    before = torch.get_num_threads()
    rates = measure_rates("cpu", 2)
    assert torch.get_num_threads() == before
    assert rates.fp32 > 0
    assert rates.bf16 > 0
