"""Two models on the same rows: paired statistics, and what they mean in words (verdict.yaml, English and Chinese)."""

from collections.abc import Sequence
from typing import Any
import numpy as np
from jinja2 import Environment, StrictUndefined
from fullshard.errors import read_table

Facts = dict[str, Any]
DRAWS, BLOCK = 10_000, 4_000_000  # resamples and sign flips; numbers in memory at once
LEAST_ROWS = 6  # 2 x 0.5 ** 6 is below 5%, 2 x 0.5 ** 5 is not
MEASURES = {"score": "score", "number": "number", "exact": "correct"}  # the first that fits judges, else the loss


def paired_test(differences: Sequence[float], weights: Sequence[float]) -> tuple[float, float, float]:
    """Of sum(differences) / sum(weights), both by row: the 95% bootstrap interval over rows (percentiles), and the
    two-sided p of random sign flips, which of right and wrong answers is McNemar's. The seed is fixed."""
    values, sizes = np.asarray(differences, dtype=np.float64), np.asarray(weights, dtype=np.float64)
    generator, means, sums = np.random.default_rng(0), [], []
    for start in range(0, DRAWS, block := max(1, BLOCK // len(values))):
        shape = (min(block, DRAWS - start), len(values))
        chosen = generator.integers(len(values), size=shape)
        means.append(values[chosen].sum(1) / sizes[chosen].sum(1))
        sums.append(np.abs(generator.choice((-1.0, 1.0), size=shape) @ values))
    low, high = np.percentile(np.concatenate(means), (2.5, 97.5))
    as_far = np.concatenate(sums) >= abs(values.sum()) - 1e-9 * np.abs(values).sum()
    return float(low), float(high), float((1 + as_far.sum()) / (1 + DRAWS))


def compare(before: Any, after: Any, hours: float | None = None, text: str = "") -> Facts:
    """Compare two EvalResults on the rows that both cover. ``measures``: by name, _paired of the rows; the first that
    fits judges: ``measure``, its values, ``smallest``, the least difference that so many rows can show; ``general``
    (loss), ``answers`` (tokens, refusals), ``verdict`` (keep, forgets, none, worse), ``text`` (in words, by a key of
    verdict.yaml). ``hours``: of devices, to train ``after``."""
    said = [{answer.row: answer for answer in each.answers} for each in (before, after)]
    rows, measures, basis = [row for row in said[0] if row in said[1]], {}, words("basis")
    for name, key in MEASURES.items():
        values = [(said[0][row].origin, *(getattr(each[row], key) for each in said), 1) for row in rows]
        if known := [each for each in values if each[1] is not None]:
            measures[name] = _paired(known)
    measures["loss"] = _losses(before, after)
    rare = "exact" in measures and max(measures["exact"][key] for key in ("before", "after")) < basis["rare"]
    measure = next(name for name in measures if name != "exact" or not rare)
    found, sign = measures[measure], -1 if measure == "loss" else 1
    general = _losses(before.general, after.general) if before.general and after.general else None
    verdict, forgets = "none", general and general["low"] > 0 and general["share"] >= basis["forgetting"]
    if found["p"] <= basis["evidence"] and (found["low"] > 0 or found["high"] < 0):
        verdict = "worse" if sign * found["difference"] < 0 else "forgets" if forgets else "keep"
    seen = basis["power_factor"] * found["spread"] / found["rows"] ** 0.5
    least = max(LEAST_ROWS / found["rows"] * (measure != "loss"), seen)
    answers = {key: [float(sum(getattr(each[row], key) for row in rows)) for each in said] for key in basis["answers"]}
    found = found | {"before_name": before.name, "after_name": after.name, "measure": measure, "verdict": verdict}
    found |= {"smallest": least if found["rows"] >= LEAST_ROWS else None, "rare": rare and measure == "loss"}
    found |= {"measures": measures, "general": general, "answers": {"rows": len(rows), **answers}}
    gain = sign * found["difference"] / hours if hours else None
    found |= {"device_hours": hours or None, "gain_per_device_hour": gain}
    return found | {"text": say(text or verdict, **found)}


def _losses(before: Any, after: Any) -> Facts:
    """Per token of ``before``: a tokenizer with other tokens changes the count, not the nats of a row."""
    known = {row: (nats, tokens) for row, _, nats, tokens in after.row_losses}
    pairs = [(*each, *known[each[0]]) for each in before.row_losses if each[0] in known]
    found = _paired([(origin, nats, other, tokens) for _, origin, nats, tokens, other, _ in pairs], -1)
    same = all(tokens == others for *_, tokens, _, others in pairs)
    return found | {"share": found["difference"] / max(found["before"], 1e-12), "same_tokens": same}


def _paired(rows: list[tuple[str, float, float, int]], sign: int = 1) -> Facts:
    """Of (origin, before, after, weight) a row; ``sign`` -1 where less is better. before, after, difference: weighted
    means; low, high, p: paired_test; rows; better and worse: the origins; ``spread``: of one row's difference."""
    before, after, sizes = (np.array([row[place] for row in rows], dtype=np.float64) for place in (1, 2, 3))
    change = after - before
    found = dict(zip(("low", "high", "p"), paired_test(change, sizes), strict=True))
    found |= {"before": float(before.sum() / sizes.sum()), "after": float(after.sum() / sizes.sum())}
    found["difference"] = found["after"] - found["before"]
    found["spread"] = float(np.std((change - found["difference"] * sizes) / sizes.mean()))
    better, worse = ([rows[row][0] for row in np.flatnonzero(way * change > 0)] for way in (sign, -sign))
    return found | {"rows": len(rows), "better": better, "worse": worse}


def decide(before: Facts, data: Facts, problem: str = "", lang: str = "en") -> tuple[str, list[str]]:
    """Whether to train, by the rules of verdict.yaml: a decision (train, not_yet, mend) and its reasons in words. From
    ``compare`` of the base as it is and with rows in its prompt, an audited data.json, and why there is no plan."""
    facts = {"found": before, "data": data, "train": data["train"], "problem": problem, "least_rows": LEAST_ROWS}
    holds = [rule for rule in words("rules") if Environment().compile_expression(rule["if"])(**facts)]
    reasons = [say(rule["why"], lang, **facts) for rule in holds if rule["decision"] == holds[0]["decision"]]
    return holds[0]["decision"], reasons


def words(lang: str) -> Any:
    """The words of verdict.yaml in one language (en, zh), or its ``basis`` or ``rules``."""
    return read_table("verdict.yaml")[lang]


def say(key: str, lang: str = "en", **facts: Any) -> str:
    """A text of verdict.yaml with its facts in it; texts may hold others."""
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.globals |= {"words": words(lang), "amount": amount, "least_rows": LEAST_ROWS}
    environment.globals["say"] = lambda key, **more: say(key, lang, **facts | more)
    return environment.from_string(words(lang)[key]).render(facts).strip()


def amount(value: float, measure: str, sign: str = "") -> str:
    """A value of a measure as a reader wants it; ``sign`` "+": with its sign."""
    return format(value, sign + {"loss": ".4f", "score": ".3g"}.get(measure, ".1%"))
