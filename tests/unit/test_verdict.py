"""Paired statistics against brute force, and a verdict in every direction, in both languages."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from fullshard.evaluate import Answer, EvalResult
from fullshard.verdict import LEAST_ROWS, MEASURES, amount, compare, decide, paired_test, say, words


def result(name: str, right: list[bool | None], nats: list[float], general=None, **changes) -> EvalResult:
    """Rows of two tokens each; None: the row has no answer."""
    answers = tuple(
        Answer(
            row,
            f"f:{row}",
            "q",
            "a",
            "a",
            3,
            bool(value),
            changes.get("number"),
            False,
            changes.get("score", [None])[0],
        )
        for row, value in enumerate(right)
        if value is not None
    )
    losses = tuple((row, f"f:{row}", value, 2) for row, value in enumerate(nats))
    beside = (
        EvalResult(name, 9, 18, 1.0, tuple((r, f"g:{r}", v, 2) for r, v in enumerate(general)), ()) if general else None
    )
    total = sum(nats) / (2 * len(nats))
    return EvalResult(name, len(nats), 2 * len(nats), total, losses, (), name, answers, general=beside)


def test_the_p_value_is_that_of_all_sign_flips():
    values = np.array([0.5, -0.1, 0.7, 0.2, -0.3, 0.4, 0.9, 0.05])
    sums = [abs(np.dot(signs, values)) for signs in itertools.product((-1, 1), repeat=len(values))]
    exact = np.mean([value >= abs(values.sum()) - 1e-12 for value in sums])
    assert paired_test(values, np.ones(8))[2] == pytest.approx(exact, abs=0.015)


@pytest.mark.parametrize(("better", "worse"), [(5, 0), (6, 0), (9, 1), (30, 12)])
def test_of_answers_it_is_mcnemars_exact_test(better, worse):
    flips, low = better + worse, min(better, worse)
    exact = min(1.0, 2 * sum(math.comb(flips, k) for k in range(low + 1)) / 2**flips)
    differences = [1.0] * better + [-1.0] * worse + [0.0] * 40
    assert paired_test(differences, np.ones(len(differences)))[2] == pytest.approx(exact, abs=0.015)


def test_the_interval_is_that_of_all_resamples():
    """Four rows have 256 resamples: their exact percentiles, with weights."""
    values, sizes = np.array([3.0, -1.0, 2.0, 6.0]), np.array([1.0, 2.0, 1.0, 4.0])
    rows = [list(each) for each in itertools.product(range(4), repeat=4)]
    exact = [values[each].sum() / sizes[each].sum() for each in rows]
    low, high, _ = paired_test(values, sizes)
    assert low == pytest.approx(np.percentile(exact, 2.5), abs=0.06)
    assert high == pytest.approx(np.percentile(exact, 97.5), abs=0.06)
    assert paired_test(values, sizes) == paired_test(values, sizes)  # seeded


def test_the_interval_covers_the_truth_in_19_of_20_cases():
    chance = np.random.default_rng(1)
    hits = 0
    for _ in range(100):
        low, high, _ = paired_test(chance.normal(0.3, 1, 80), np.ones(80))
        hits += low <= 0.3 <= high
    assert 88 <= hits <= 100


def test_what_so_many_rows_can_show():
    """A difference of the stated size is found in about 80% of simulated judgements."""
    chance, seen, sizes = np.random.default_rng(2), 0, []
    for _ in range(60):
        nats = chance.normal(4, 1, 50)
        found = compare(
            result("base", [None] * 50, list(nats)), result("x", [None] * 50, list(nats + chance.normal(0, 1, 50)))
        )
        sizes.append(found["smallest"])
    size = float(np.mean(sizes))
    for _ in range(100):
        change = chance.normal(-2 * size, 1, 50)  # nats of a row of two tokens
        _, high, p = paired_test(change, np.full(50, 2.0))
        seen += p <= 0.05 and high < 0
    assert 65 <= seen <= 95
    few = compare(result("base", [None] * 5, [4.0] * 5), result("x", [None] * 5, [3.0] * 5))
    assert few["smallest"] is None and few["verdict"] == "none", "five rows show nothing, however alike"
    six = compare(result("base", [None] * 6, [4.0] * 6), result("x", [None] * 6, [3.0, 3.1, 3.2, 3.0, 3.1, 3.3]))
    assert LEAST_ROWS == 6 and six["verdict"] == "keep"


NATS = [4.0 + row % 3 for row in range(80)]
LOWER = [value - 1 - row % 2 for row, value in enumerate(NATS)]


def test_a_clear_gain_is_kept():
    base = result("base", [row < 3 for row in range(80)], NATS)
    found = compare(base, result("model", [row > 18 for row in range(80)], LOWER), hours=0.5)
    assert (found["verdict"], found["measure"], len(found["better"]), len(found["worse"])) == ("keep", "exact", 61, 3)
    assert found["before"] == pytest.approx(3 / 80) and found["after"] == pytest.approx(61 / 80)
    assert found["gain_per_device_hour"] == pytest.approx(2 * 58 / 80)
    assert found["text"].startswith("better on 61 of 80 held-out rows, worse on 3; exact match 3.8% -> 76.2%")
    assert found["text"].endswith(": keep.") and "interval +" in found["text"]
    assert found["worse"] == ["f:0", "f:1", "f:2"]


def test_no_change_is_no_evidence():
    base = result("base", [row % 2 == 0 for row in range(80)], NATS)
    found = compare(base, result("model", [row % 2 == 0 or row == 1 for row in range(80)], LOWER))
    assert found["verdict"] == "none" and found["text"].startswith("no evidence of gain: better on 1 of 80")
    assert "it learned the form" in found["text"] and "can show a difference of 7.5% or more" in found["text"]
    same = compare(base, base)
    assert same["verdict"] == "none" and (same["low"], same["high"], same["p"]) == (0, 0, 1)


def test_few_flips_are_no_evidence_even_if_none_goes_back():
    """4 flips of 100: the percentile interval leaves zero out, McNemar's test (p 0.125) does not believe it."""
    base = result("base", [row < 20 for row in range(100)], [4.0] * 100)
    found = compare(base, result("model", [row < 24 for row in range(100)], [4.0] * 100))
    assert found["p"] == pytest.approx(0.125, abs=0.02) and found["verdict"] == "none"


def test_worse_is_said():
    base = result("base", [row > 18 for row in range(80)], LOWER)
    found = compare(base, result("model", [row < 3 for row in range(80)], NATS))
    assert found["verdict"] == "worse" and "do not use it" in found["text"]


def test_forgetting_is_said():
    general = [6.0 + row % 4 for row in range(40)]
    base = result("base", [row < 3 for row in range(80)], NATS, general)
    right = [row > 18 for row in range(80)]
    a_little = compare(base, result("model", right, LOWER, [1.003 * value for value in general]))
    assert a_little["verdict"] == "keep" and "general loss" in a_little["text"] and "(+0.3%)" in a_little["text"]
    a_lot = compare(base, result("model", right, LOWER, [1.2 * value for value in general]))
    assert a_lot["verdict"] == "forgets" and "(+20.0%)" in a_lot["text"]


def test_the_measure_that_judges():
    rows = range(80)
    loss = compare(result("base", [False] * 80, NATS), result("model", [False] * 80, LOWER))
    assert loss["measure"] == "loss" and loss["verdict"] == "keep" and "too rare" in loss["text"]
    assert loss["difference"] == pytest.approx((sum(LOWER) - sum(NATS)) / 160)
    assert len(loss["better"]) == 80 and loss["worse"] == [] and loss["gain_per_device_hour"] is None
    first, second = (result(name, [row < 40 for row in rows], NATS, number=name == "m") for name in ("base", "m"))
    assert compare(first, second)["measure"] == "number" and compare(first, second)["verdict"] == "keep"
    assert list(compare(first, second)["measures"]) == ["number", "exact", "loss"]


def test_only_rows_that_both_have_are_compared():
    base = result("base", [True, True, None, False], [4.0, 4.0, 4.0, 4.0])
    found = compare(base, result("model", [True, None, True, True], [1.0, 1.0, 1.0]))
    assert found["measures"]["exact"]["rows"] == 2 and found["measures"]["loss"]["rows"] == 3


def test_another_tokenizer_changes_the_count_not_the_nats():
    base = result("base", [None] * 8, [4.0] * 8)
    other = result("model", [None] * 8, [4.0] * 8)
    other = EvalResult(**{**vars(other), "row_losses": tuple((*each[:3], 5) for each in other.row_losses)})
    found = compare(base, other)
    assert found["difference"] == 0 and not found["measures"]["loss"]["same_tokens"]
    assert "tokenizers differ" in say("details", **found)


def test_both_languages_say_the_same_things():
    english, chinese = words("en"), words("zh")
    only = {"result", "suite", "details", "judgement"}  # of the terminal
    assert set(english) - only == set(chinese)
    for key in ("headlines", "decisions", "measures"):
        assert set(english[key]) == set(chinese[key])
    assert set(english["measures"]) == {*MEASURES, "loss"}
    base = result("base", [row < 3 for row in range(80)], NATS, [4.0] * 8)
    found = compare(base, result("model", [row > 18 for row in range(80)], LOWER, [5.0] * 8))
    for kind in ("keep", "forgets", "none", "worse", "before"):
        text = say(kind, "zh", **found)
        assert "行" in text and not set("abcdefghijklmnopqrstuvwxyz") & set(
            text.replace("base", "").replace("train", "").replace("data", "").replace("learning_rate", "")
        ), text


def test_amounts():
    assert amount(0.125, "exact", "+") == "+12.5%" and amount(-0.5, "loss", "+") == "-0.5000"
    assert amount(3.14159, "score") == "3.14"


CLEAN = {
    "train": {"bad": {}, "dropped": {}, "read": 100, "used": 100, "shape": "messages", "stop_tokens": 100},
    "eval": {"used": 80}, "overlap": {"rows": 0}, "exact_duplicates": {"rows": 0}, "audit": {"near_eval": {"rows": 0}},
}  # fmt: skip


def found_before(rows: int = 80, right: int = 10) -> dict:
    base = result("base", [row < right for row in range(rows)], NATS[:rows])
    return compare(base, result("four", [row < right + 1 for row in range(rows)], NATS[:rows]), text="before")


@pytest.mark.parametrize(
    ("changes", "decision", "word"),
    [
        ({}, "train", "still to be gained"),
        ({"overlap": {"rows": 1}}, "mend", "repeat held-out rows"),
        ({"audit": {"near_eval": {"rows": 5}}}, "mend", "near copies"),
        ({"audit": {"near_eval": {"rows": 4}}}, "train", "no objection"),
        ({"exact_duplicates": {"rows": 11}}, "mend", "repeat an earlier one"),
        ({"train": CLEAN["train"] | {"dropped": {"longer": 4}, "bad": {"not JSON": 2}}}, "mend", "6 training records"),
        ({"train": CLEAN["train"] | {"stop_tokens": 0}}, "mend", "stop token"),
        ({"train": CLEAN["train"] | {"stop_tokens": 0, "shape": "text"}}, "train", "gained"),
    ],
)
def test_train_or_mend_the_data(changes, decision, word):
    said, reasons = decide(found_before(), CLEAN | changes)
    assert said == decision and any(word in reason for reason in reasons), reasons
    assert decide(found_before(), CLEAN | changes, lang="zh")[0] == decision


def test_not_yet():
    said, reasons = decide(found_before(), CLEAN, "It needs 90 GB.")
    assert said == "not_yet" and reasons == ["it does not fit this machine: It needs 90 GB."]
    said, reasons = decide(found_before(right=76), CLEAN)
    assert said == "not_yet" and "96% of the rows are right already" in reasons[0]
    said, reasons = decide(found_before(rows=5, right=1), CLEAN)
    assert said == "mend" and "5 held-out rows can show nothing" in reasons[0]
