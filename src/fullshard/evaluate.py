"""Judge models on rows of data, by training's loss per supervised token and greedy answers beside the expected ones."""

import gc
import math
import re
import runpy
from collections.abc import Callable, Sequence
from dataclasses import asdict, field, replace
from fractions import Fraction
from functools import partial
from importlib import import_module
from itertools import combinations, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any
import numpy as np
from fullshard import run_folder
from fullshard.config import DataSection, RunConfig
from fullshard.data.chat import Renderer
from fullshard.data.files import open_records
from fullshard.data.prepared import read_splits
from fullshard.data.sources import Account, Row, iterate_rows
from fullshard.errors import Blame, ConfigError, DataError
from fullshard.frozen import Frozen
from fullshard.infer.generate import Answerer, generate_ids, load_for_inference, prompt_tokens
from fullshard.model.fetch import with_model_folder
from fullshard.run_folder import MERGE_FACTS, read_json, read_metrics
from fullshard.train.loss import LossModel, held_out_loss
from fullshard.verdict import compare, say, words

SPARE_TOKENS = 8  # generated beyond the longest expected answer, so that one that runs on is seen to be wrong
NUM_EXAMPLES = 4  # training rows in the prompt, before a run
NUMBER = re.compile(r"(?<![\w.)])-?\d+/[1-9]\d*|(?:(?<![\w)])-)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+")
Model = str | Path | Answerer
Scorer = Callable[[str, Row, str], float]  # of answer, row, expected
SCORER_HINT = "It needs: def score(answer: str, row: dict) -> float"


class Answer(Frozen):
    """One row: the prompt's last message, the expected answer, and what the model said (greedy)."""

    row: int  # its place in the data
    origin: str  # file:line
    prompt: str
    expected: str
    answer: str
    tokens: int  # of the answer, without its stop
    correct: bool  # equal without reasoning and without white space at both ends
    number: bool | None  # whether the extracted number is right; None where the expected answer has none
    refused: bool  # it begins like a refusal
    score: float | None  # by the user's scorer


class EvalResult(Frozen):
    """What a model achieves on a data file; ``base`` holds the same for the model it is compared with."""

    model: str
    rows: int  # rows that the loss covers
    supervised_tokens: int
    loss: float  # nats per supervised token
    row_losses: tuple[tuple[int, str, float, int], ...]  # place in the data, origin, nats, supervised tokens
    left_out: tuple[str, ...]  # "file:line: reason" of each row that the loss or the answers leave out
    name: str = "model"
    answers: tuple[Answer, ...] = ()
    base: "EvalResult | None" = None
    general: "EvalResult | None" = None  # the loss on a general set

    num_answers = property(lambda self: len(self.answers))  # rows with an expected answer; 0 for plain text
    num_correct = property(lambda self: sum(answer.correct for answer in self.answers))
    exact_match = property(lambda self: self.num_correct / self.num_answers if self.answers else None)
    perplexity = property(lambda self: math.exp(min(self.loss, 700.0)))

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON values, with ``num_answers``, ``num_correct``, ``exact_match`` and ``perplexity``."""
        made = {name: getattr(self, name) for name in ("num_answers", "num_correct", "exact_match", "perplexity")}
        return asdict(self) | made | {"base": self.base and self.base.to_json()}


class Judgement(Frozen):
    """Models on the same rows, and comparisons of two each (``verdict.compare``)."""

    data: str
    results: tuple[EvalResult, ...]
    comparisons: tuple[dict[str, Any], ...]  # with ``text``: the verdict in words
    scorer: str | None = None
    suite: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)  # by model and task of lm-eval

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON values."""
        return vars(self) | {"results": [result.to_json() for result in self.results]}

    def to_text(self) -> str:
        """The lines to print."""
        return say("judgement", **vars(self))


def evaluate_run(model: Model, data: str | Path, base: Model | None = None, **options: Any) -> EvalResult:
    """Evaluate one model on a data file, and ``base`` on the same rows. Takes and raises what judge_models does."""
    results = judge_models([model], data, base, **options).results
    return replace(results[-1], base=results[0] if results[1:] else None)


def judge_models(
    models: Sequence[Model], data: str | Path | None = None, base: Model | None = None, general: str | None = None,
    scorer: str | None = None, suite: Sequence[str] | None = None, limit: int | None = None,
    template_arguments: dict[str, Any] | None = None, settings: dict[str, Any] | None = None, **options: Any,
) -> Judgement:  # fmt: skip
    """Compare models with ``base`` and each other on the same rows. A run folder stands for its merged model, brings
    its base and held-out rows where none are named, and keeps the result as eval.json. ``general``: rows whose loss
    shows forgetting. ``scorer``: a Python file with ``score(answer, row) -> float``, which is run. ``suite``: tasks of
    lm-eval. ``limit``: only the first rows. ``settings``: keys of the recipe's data section; default those of the first
    model's run; ``template_arguments`` go before. ``options``: of ``_measure``. DataError, ModelError, ConfigError."""
    places, runs = list(models), []
    for index, model in enumerate(models):
        if isinstance(model, str | Path) and (Path(model) / run_folder.RECIPE).is_file():
            runs.append(run_folder.require_run(Path(model)))
            places[index] = (runs[-1] / run_folder.MERGED).resolve()
            if not places[index].is_dir():
                raise ConfigError(f"{model} is not merged yet.", f"First: fullshard merge {model}")
    if runs:
        config, held_out = read_json(runs[0] / run_folder.CONFIG), runs[0] / run_folder.HELD_OUT
        data = data or (held_out if held_out.is_file() else config["data"]["eval"])
        base = base or config["model"]["path"]
    if not data:
        raise ConfigError("There are no held-out rows.", "Name them: --data FILE")
    with Blame(ConfigError, "--suite needs lm-eval, not installed here", 'pip install "fullshard[suite]"'):
        harness = import_module("lm_eval") if suite else None
    settings = _facts_of(places[0]).get("settings", {}) if settings is None else settings
    section = _section(str(data), settings, template_arguments)
    if general:
        options["general"] = _read(_section(str(general), {"template_arguments": section.template_arguments}), None)
    rows, score = _read(section, limit), scorer and _load_scorer(scorer, str(data), section.source)
    if base is not None:
        places.insert(0, base)
    names = ["base"] * (base is not None) + ([str(model) for model in models] if len(models) > 1 else ["model"])
    results = [_measure(*pair, rows, section, score, **options) for pair in zip(places, names, strict=True)]
    hours = dict(zip(names, map(_device_hours, places), strict=True)) | {"base": None}
    found = [compare(*pair, pair[0].name == "base" and hours[pair[1].name]) for pair in combinations(results, 2)]
    kept: dict[str, Any] = {}
    with Blame(ConfigError, f"lm-eval cannot run {', '.join(suite or ())}", "All its tasks: lm-eval ls tasks"):
        for result in results if suite else ():
            told = {"model": "hf", "model_args": {"pretrained": result.model}, "tasks": list(suite), "limit": limit}
            kept[result.name] = harness.simple_evaluate(**told)["results"]
    judgement = Judgement(str(data), tuple(results), tuple(found), scorer, kept)
    for run in runs:
        run_folder.write_json(run / run_folder.EVAL, judgement.to_json())
    return judgement


def judge_recipe(config: RunConfig, scorer: str | None = None, limit: int | None = None, **options: Any) -> Judgement:
    """The base on the recipe's held-out rows, as it is and with four training rows in its prompt: what is to be gained,
    and the smallest difference that so many rows show. Nothing is trained. Takes and raises as judge_models."""
    section, examples, rows = config.data, [], []
    if section.eval is None:
        raise ConfigError("The recipe sets no held-out rows apart.", "Set data.eval=0.1 (a share), or a file.")
    for split, row in read_splits(config, {"train": Account(), "eval": Account()}):
        if split == "eval":
            rows.append(row)
        elif len(examples) < NUM_EXAMPLES and not row.tools and row.messages:
            examples += [row] * (row.messages[-1]["role"] == "assistant")
    data = section.eval if isinstance(section.eval, str) else config.train_files[0].path
    score = scorer and _load_scorer(scorer, data, section.source)
    answerer = load_for_inference(with_model_folder(config).model.path, section.template_arguments)
    results = [_measure(answerer, "base", rows[:limit], section, score, **options)]
    if examples and rows[0].messages:
        told = [_with_examples(row, examples) for row in rows[:limit]]
        name = f"base with {len(examples)} training rows in its prompt"
        results.append(_measure(answerer, name, told, section, score, **options))
    return Judgement(data, tuple(results), (compare(results[0], results[-1], text="before"),), scorer)


def _measure(
    model: Model, name: str, rows: list[Row], section: DataSection, score: Scorer | None,
    general: Sequence[Row] = (), max_new_tokens: int | None = None, batch_size: int = 16, progress: Any = None,
) -> EvalResult:  # fmt: skip
    """What a model achieves on rows. ``progress``: called with what is being done, rows done and rows in all."""
    gc.collect()  # the weights of a model measured before go first
    say_done = progress or (lambda what, done, total: None)
    answerer = load_for_inference(model, section.template_arguments)
    place = str(model) if isinstance(model, str | Path) else str(getattr(answerer.model, "name_or_path", ""))
    found = _measure_loss(answerer, rows, section, partial(say_done, "loss"))
    if general:
        found["general"] = EvalResult(place, **_measure_loss(answerer, general, section, partial(say_done, "general")))
    options = {"batch_size": batch_size, "progress": partial(say_done, "answers")}
    answers, skipped = _answers(answerer, rows, max_new_tokens, score, options)
    found["left_out"] += tuple(skipped)
    return EvalResult(place, name=name, answers=tuple(answers), **found)


def extract_number(text: str) -> Fraction | None:
    """The last number behind ``####`` in its line (GSM8K), else of the whole text: 1,234.50 and 1/2 too. None: none."""
    found = NUMBER.findall(text.partition("####")[2].strip().partition("\n")[0]) or NUMBER.findall(text)
    return Fraction(found[-1].replace(",", "")) if found else None


def _facts_of(model: Model) -> dict[str, Any]:
    """What the merge says of a folder."""
    return {} if isinstance(model, Answerer) else read_json(Path(model).expanduser() / MERGE_FACTS, optional=True)


def _section(data: str, settings: dict[str, Any], template_arguments: dict[str, Any] | None = None) -> DataSection:
    if template_arguments is not None:
        settings = settings | {"template_arguments": template_arguments}
    if columns := settings.get("columns"):  # a run writes its held-out rows as messages or text, whatever they were
        records = (record for file in open_records(data, "huggingface") for _, record in file[1])
        first = next((record for record in records if isinstance(record, dict)), {})
        settings = settings | {"columns": columns if first.keys() & columns.keys() else None}
    return DataSection(train=data, **{key: settings[key] for key in settings if key != "max_length"})


def _read(section: DataSection, limit: int | None) -> list[Row]:
    if limit is not None and limit < 1:
        raise DataError(f"limit must be at least 1; it is {limit}.", "Leave it out to use every row.")
    if not (rows := list(islice(iterate_rows(section.train, section), limit))):
        raise DataError(f"{section.train} holds no rows.", "Give a file with at least one row.")
    return rows


def _with_examples(row: Row, examples: list[Row]) -> Row:
    """``row`` with the conversations of ``examples``, which the loss does not count, behind its system message."""
    start = sum(message["role"] in ("system", "developer") for message in row.messages[:1])
    told = [message | {"train": False} for each in examples for message in each.messages if message["role"] != "system"]
    return replace(row, messages=[*row.messages[:start], *told, *row.messages[start:]])


def _measure_loss(answerer: Answerer, rows: Sequence[Row], section: DataSection, progress: Any) -> dict[str, Any]:
    """EvalResult's figures of the loss, one row at a time: each row's nats, and why others are left out."""
    limit, model, device = answerer.max_positions, LossModel(answerer.model), answerer.model.device
    renderer, losses, left_out = Renderer(answerer.tokenizer, section.loss_on, answerer.renderer.arguments), [], []
    for place, row in enumerate(rows):
        progress(place, len(rows))
        used = []
        for part in renderer.row(row):
            if len(part.ids) > limit:
                left_out.append(f"{row.origin}: {len(part.ids)} tokens, the model has {limit} positions (loss)")
            elif not any(part.supervised[1:]):
                left_out.append(f"{row.origin}: no supervised token (loss)")
            else:
                used.append((np.array(part.ids), np.array(part.supervised)))
        if used:
            sizes, counts = np.transpose([(len(ids), marks[1:].sum()) for ids, marks in used])
            alone = SimpleNamespace(row=used.__getitem__, lengths=sizes, supervised=counts)
            loss = held_out_loss(model, alone, (1, "rows"), answerer.pad_id, device)
            losses.append((place, row.origin, loss * int(counts.sum()), int(counts.sum())))
    if not losses:
        raise DataError(f"No row can be evaluated; the first: {left_out[0]}.", "Check the data file.")
    nats, tokens = (sum(each[place] for each in losses) for place in (2, 3))
    found = {"rows": len(losses), "supervised_tokens": tokens, "loss": nats / tokens, "row_losses": tuple(losses)}
    return found | {"left_out": tuple(left_out)}


def _answers(
    answerer: Answerer, rows: list[Row], most: int | None, score: Scorer | None, options: Any
) -> tuple[list[Answer], list[str]]:
    """Greedy answers to every row that ends in an assistant message; and the rows that have no room for an answer. A
    tool call is compared as the template writes it; of an answer with reasoning, what stands behind ``</think>``."""
    several = [(place, row) for place, row in enumerate(rows) if len(row.messages or ()) > 1]
    asked = [(place, row) for place, row in several if row.messages[-1]["role"] == "assistant"]
    if not asked or not answerer.has_template:
        return [], []
    taught = [answerer.renderer.answer(row.messages, row.tools) for _, row in asked]
    most, limit, fitting, left_out = most or max(map(len, taught)) + SPARE_TOKENS, answerer.max_positions, [], []
    for (place, row), wanted in zip(asked, taught, strict=True):
        ids = prompt_tokens(answerer, row.messages[:-1], tools=row.tools)
        if limit - len(ids) < most:
            left_out.append(f"{row.origin}: {len(ids)} tokens leave no room for {most} new ones (answer)")
        else:
            fitting.append((place, row, wanted, ids))
    generated = generate_ids(answerer, [ids for *_, ids in fitting], most, **options)
    answers, decode = [], partial(answerer.tokenizer.decode, skip_special_tokens=True)
    refusal = re.compile("|".join(words("en")["refusals"] + words("zh")["refusals"]), re.IGNORECASE)
    for (place, row, wanted, _), ids in zip(fitting, generated, strict=True):
        last, answer = row.messages[-1], decode(ids).strip()
        expected = (decode(wanted) if last.get("tool_calls") else last["content"]).strip()
        said, right = _conclusion(answer), _conclusion(expected)
        number = extract_number(right) if "####" in right or NUMBER.fullmatch(right) else None
        judged = said == right, None if number is None else extract_number(said) == number, bool(refusal.match(said))
        judged += (score(answer, row, expected) if score else None,)
        answers.append(Answer(place, row.origin, row.messages[-2]["content"], expected, answer, len(ids), *judged))
    return answers, left_out


def _conclusion(answer: str) -> str:
    return answer.rpartition("</think>")[2].strip()


def _load_scorer(path: str, data: str, source: str) -> Scorer:
    """The user's ``score(answer, row)``. ``row``: the record, where its line holds one; messages, prompt, expected."""
    with Blame(ConfigError, f"The scorer {path} cannot be run", SCORER_HINT):
        score = runpy.run_path(path)["score"]
    records: dict[str, list[Any]] = {}
    for label, found, _ in open_records(data, source):
        for number, record in found:
            records.setdefault(f"{label}:{number}", []).append(record)

    def judge(answer: str, row: Row, expected: str) -> float:
        known = {"messages": row.messages, "prompt": row.messages[-2]["content"], "expected": expected}
        own = records[row.origin][0] if len(records.get(row.origin, ())) == 1 else {}
        with Blame(ConfigError, f"{path}: score fails at the answer to {row.origin}", SCORER_HINT):
            if not math.isfinite(value := float(score(answer, known | own))):
                raise ValueError(f"it is {value}")
        return value

    return judge


def _device_hours(model: Model) -> float | None:
    """What the run behind a merged folder took, by its metrics; None where it is not here."""
    run = Path(_facts_of(model).get("run", "/nowhere"))
    seconds = sum(record["seconds"] for record in read_metrics(run) if record["kind"] == "train")
    ranks = read_json(run / run_folder.PLAN, optional=True).get("ranks")
    return seconds * ranks / 3600 if seconds and ranks else None
