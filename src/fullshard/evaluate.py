"""Judge models on rows of data: training's loss per supervised token and greedy answers next to the expected ones,
before a run (the base, with and without training rows in its prompt) and after it (base and tuned models)."""

import gc
import importlib.util
import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from functools import partial
from itertools import combinations, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from fullshard import run_folder
from fullshard.config import DataSection, RunConfig
from fullshard.data.batches import make_batch
from fullshard.data.chat import Renderer
from fullshard.data.files import open_records
from fullshard.data.prepared import read_splits
from fullshard.data.sources import Account, Row, iterate_rows
from fullshard.errors import Blame, ConfigError, DataError
from fullshard.infer.generate import Answerer, generate_ids, load_for_inference, prompt_tokens
from fullshard.model.fetch import fetch_model, with_model_folder
from fullshard.model.load import MERGE_FACTS
from fullshard.run_folder import read_json, read_metrics, require_run, write_json
from fullshard.train.loss import LossModel, batch_loss
from fullshard.verdict import MEASURES, compare, say, words

NO_LIMIT = 1 << 30
SPARE_TOKENS = 8  # generated beyond the longest expected answer, so that one that runs on is seen to be wrong
NUM_EXAMPLES = 4  # training rows in the prompt, before a run
NUMBER = re.compile(r"(?<![\w.)])-?\d+/[1-9]\d*|(?:(?<![\w)])-)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+")
Progress = Callable[[str, int, int], None]  # what is being done, rows done, rows in all
Scorer = Callable[[str, Row, str], float]  # answer, row, expected


@dataclass(frozen=True)
class Answer:
    """One row: the prompt's last message, the expected answer, and what the model said (greedy)."""

    origin: str  # file:line
    prompt: str
    expected: str
    answer: str
    correct: bool  # equal without reasoning and without white space at both ends
    row: int = 0  # its place in the data
    number: bool | None = None  # whether the extracted number is right; None where the expected answer has none
    score: float | None = None  # by the user's scorer
    tokens: int = 0  # of the answer, without its stop
    refused: bool = False  # it begins like a refusal


@dataclass(frozen=True)
class EvalResult:
    """What a model achieves on a data file; ``base`` holds the same for the model it is compared with."""

    model: str
    rows: int  # rows that the loss covers
    supervised_tokens: int
    loss: float  # nats per supervised token
    num_answers: int  # rows with an expected answer; 0 for plain text
    num_correct: int
    answers: tuple[Answer, ...]
    left_out: tuple[str, ...]  # "file:line: reason" of each row that the loss or the answers leave out
    base: "EvalResult | None" = None
    name: str = "model"
    row_losses: tuple[tuple[int, str, float, int], ...] = ()  # place in the data, origin, nats, supervised tokens
    general: "EvalResult | None" = None  # the loss on a general set

    @property
    def exact_match(self) -> float | None:
        """Share of correct answers; None where no row has an expected answer."""
        return self.num_correct / self.num_answers if self.num_answers else None

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON values, with ``exact_match`` and ``perplexity``."""
        made = {"exact_match": self.exact_match, "perplexity": perplexity(self.loss)}
        return asdict(self) | made | {"base": self.base and self.base.to_json()}

    def to_text(self) -> str:
        """The lines to print: the figures of the model, below those of the base where there is one."""
        lines = [] if self.base is None else [self.base.line("base")]
        lines += [self.line(), *([f"left out: {len(self.left_out)} rows, first {self.left_out[0]}"] * bool(self.left_out))]
        return "\n".join(lines)

    def line(self, name: str = "") -> str:
        """Its figures in one line."""
        numbers = [answer.number for answer in self.answers if answer.number is not None]
        scores = [answer.score for answer in self.answers if answer.score is not None]
        facts = {"numbers": numbers, "scores": scores, "perplexity": perplexity(self.loss)}
        return say("result", result=self, name=name or self.name, **facts)


@dataclass(frozen=True)
class Judgement:
    """Models on the same rows, and comparisons of two each (``verdict.compare``). ``before``: of a recipe's base."""

    data: str
    results: tuple[EvalResult, ...]
    comparisons: tuple[dict[str, Any], ...]
    notes: tuple[str, ...] = ()
    suite: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)  # by model and task of lm-eval
    before: bool = False

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON values; ``comparisons`` with ``text``: the verdict in words."""
        said = [found | {"text": self.verdict(found)} for found in self.comparisons]
        return vars(self) | {"results": [result.to_json() for result in self.results], "comparisons": said}

    def verdict(self, found: dict[str, Any], lang: str = "en") -> str:
        """One comparison in a sentence."""
        return say("before" if self.before else found["verdict"], lang, **found)

    def to_text(self) -> str:
        """The lines to print."""
        lines = [result.line() for result in self.results]
        left_out = {line: None for result in self.results for line in result.left_out}
        lines += [f"left out: {len(left_out)} rows, first {next(iter(left_out))}"] if left_out else []
        lines += [say("suite", name=name, tasks=tasks) for name, tasks in self.suite.items()]
        for found in self.comparisons:
            lines += ["", say("details", **found), self.verdict(found)]
        return "\n".join([*lines, *self.notes])


@dataclass(frozen=True)
class Task:
    """The rows on which models are judged, and how."""

    rows: list[Row]
    section: DataSection
    general: list[Row] = field(default_factory=list)
    scorer: Scorer | None = None
    max_new_tokens: int | None = None
    batch_size: int = 16
    progress: Progress = lambda what, done, total: None

    def measure(self, model: str | Path | Answerer, name: str = "model", base: EvalResult | None = None) -> EvalResult:
        """What ``model`` achieves."""
        answerer = load_for_inference(model, self.section.template_arguments)
        place = str(model) if isinstance(model, str | Path) else str(getattr(answerer.model, "name_or_path", ""))
        losses, left_out = _row_losses(answerer, self.rows, self.section, partial(self.progress, "loss"))
        answers, skipped = _answers(answerer, self)
        general = None
        if self.general:
            kept, out = _row_losses(answerer, self.general, self.section, partial(self.progress, "general loss"))
            general = EvalResult(place, *_totals(kept), 0, 0, (), tuple(out), None, name, tuple(kept))
        counts = len(answers), sum(answer.correct for answer in answers), tuple(answers), tuple(left_out + skipped)
        return EvalResult(place, *_totals(losses), *counts, base, name, tuple(losses), general)


def evaluate_run(
    model: str | Path | Answerer, data: str | Path, base: str | Path | Answerer | None = None, limit: int | None = None,
    max_new_tokens: int | None = None, batch_size: int = 16, settings: dict[str, Any] | None = None,
    progress: Progress | None = None, template_arguments: dict[str, Any] | None = None,
) -> EvalResult:  # fmt: skip
    """Evaluate a model folder on a data file, and ``base`` on the same rows. ``limit``: only the first rows.
    ``max_new_tokens``: default the longest expected answer and 8 more. ``settings``: keys of the recipe's data section
    that say how rows are read; default: those of the merged run. ``template_arguments`` go before theirs. Raises
    DataError where no row can be used, ModelError, ConfigError."""
    section = _section(str(data), settings if settings is not None else _settings_of(model), template_arguments)
    task = Task(_read(data, section, limit), section, (), None, max_new_tokens, batch_size, progress or Task.progress)
    compared = None if base is None else task.measure(base, "base")
    gc.collect()  # the base's weights go before the model's come
    return task.measure(model, base=compared)


def judge_models(
    models: Sequence[str | Path], data: str | Path | None = None, base: str | Path | None = None,
    general: str | Path | None = None, scorer: str | Path | None = None, suite: Sequence[str] | None = None,
    by: str | None = None, limit: int | None = None, max_new_tokens: int | None = None, batch_size: int = 16,
    progress: Progress | None = None, template_arguments: dict[str, Any] | None = None,
) -> Judgement:  # fmt: skip
    """Compare models with their base and each other on the same rows. A run folder stands for its merged model, brings
    its base and held-out rows where none are named, and keeps the result as eval.json. ``general``: rows whose loss
    shows forgetting. ``scorer``: a Python file with ``score(answer, row) -> float``, which is run. ``suite``: tasks of
    lm-eval. ``by``: the measure that judges (verdict.MEASURES). Raises UserError as evaluate_run."""
    runs = {str(model): require_run(Path(model)) for model in models if (Path(model) / run_folder.RECIPE).is_file()}
    if bare := [run for run in runs.values() if not (run / run_folder.MERGED).is_dir()]:
        raise ConfigError(f"{bare[0]} is not merged yet.", f"First: fullshard merge {bare[0]}")
    for run in list(runs.values())[:1]:
        settings = read_json(run / run_folder.CONFIG)
        held_out = run / run_folder.HELD_OUT
        data = data or (held_out if held_out.is_file() else settings["data"]["eval"])
        base = base or settings["model"]["path"]
    if not data:
        raise ConfigError("There are no rows to judge on.", "Name held-out rows: --data FILE")
    if by not in (None, *MEASURES):
        raise ConfigError(f"--by {by} is no measure.", f"One of: {', '.join(MEASURES)}")
    harness = _import_harness() if suite else None
    folders = [runs[str(model)] / run_folder.MERGED if str(model) in runs else Path(model) for model in models]
    section = _section(str(data), _settings_of(folders[0]), template_arguments)
    rows, score = _read(data, section, limit), scorer and _load_scorer(Path(scorer), str(data), section)
    common = _section(str(general), {"template_arguments": section.template_arguments}) if general else section
    rest = (score or None, max_new_tokens, batch_size, progress or Task.progress)
    task = Task(rows, section, _read(general, common, None) if general else [], *rest)
    names = [str(model) for model in models] if len(models) > 1 else ["model"]
    places, results = [*([base] if base else []), *folders], []
    for place, name in zip(places, ["base", *names] if base else names, strict=True):
        results.append(task.measure(place if isinstance(place, str) else str(place), name))
        gc.collect()  # its weights go before the next come
    pairs = [(results[0], result) for result in results[1:]] if base else []
    pairs += combinations(results[bool(base) :], 2)
    measured = {name for result in results for name in _measures_of(result)}
    if by and by not in measured:
        raise ConfigError(f"--by {by}: these rows have {', '.join(sorted(measured))}.", "Leave --by out.")
    hours = {name: _device_hours(folder) for name, folder in zip(names, folders, strict=True)}
    found = [compare(*pair, by, hours[pair[1].name] if pair[0].name == "base" else None) for pair in pairs]
    notes = [f"{scorer} is your own file: it was run here, with your rights"] if scorer else []
    kept = {result.name: _run_harness(harness, result.model, suite, limit) for result in results} if suite else {}
    judgement = Judgement(str(data), tuple(results), tuple(found), tuple(notes), kept)
    for run in runs.values():
        write_json(run / run_folder.EVAL, judgement.to_json())
    return judgement


def judge_recipe(
    config: RunConfig, scorer: str | Path | None = None, by: str | None = None, limit: int | None = None,
    max_new_tokens: int | None = None, batch_size: int = 16, progress: Progress | None = None,
) -> Judgement:  # fmt: skip
    """The base on the recipe's held-out rows, as it is and with four training rows in its prompt: what there is to gain,
    and the smallest difference that so many rows can show. Nothing is trained. Raises UserError as evaluate_run."""
    if config.data.eval is None:
        raise ConfigError("The recipe sets no held-out rows apart.", "Set data.eval=0.1 (a share), or a file.")
    held_out, examples, chance = [], [], random.Random(config.train.seed)
    seen = 0
    for split, row in read_splits(config, {"train": Account(), "eval": Account()}):
        if split == "eval":
            held_out.append(row)
        elif row.messages and row.messages[-1]["role"] == "assistant" and not row.tools:
            place = seen if seen < NUM_EXAMPLES else chance.randrange(seen + 1)  # a fair sample of a stream
            examples[place : place + 1] = [row] if place < NUM_EXAMPLES else []
            seen += 1
    rows = held_out[:limit]
    source = config.data.eval if isinstance(config.data.eval, str) else config.train_files[0].path
    score = _load_scorer(Path(scorer), source, config.data) if scorer else None
    task = Task(rows, config.data, [], score, max_new_tokens, batch_size, progress or Task.progress)
    answerer = load_for_inference(with_model_folder(config).model.path, config.data.template_arguments)
    results = [task.measure(answerer, "base")]
    if examples and rows[0].messages:
        told = replace(task, rows=[_with_examples(row, examples) for row in rows])
        results.append(told.measure(answerer, f"base with {len(examples)} training rows in its prompt"))
    notes = () if len(results) > 1 else ("plain text has no questions: it is not asked with training rows",)
    found = compare(results[0], results[-1], by)
    return Judgement(source, tuple(results), (found,), notes, before=True)


def extract_number(text: str) -> Fraction | None:
    """The last number behind ``####`` in its line (GSM8K), else of the whole text: 1,234.50 and 1/2 too. None: none."""
    marked = text.partition("####")[2].strip().partition("\n")[0]
    found = NUMBER.findall(marked) or NUMBER.findall(text)
    return Fraction(found[-1].replace(",", "")) if found else None


def perplexity(loss: float) -> float:
    """exp of a loss in nats; infinite where that is too large."""
    return math.exp(loss) if loss < 700 else math.inf


def _measures_of(result: EvalResult) -> set[str]:
    known = {"exact": "correct", "number": "number", "score": "score"}
    has = {name for name, key in known.items() if any(getattr(one, key) is not None for one in result.answers)}
    return {"loss"} | has


def _settings_of(model: str | Path | Answerer) -> dict[str, Any]:
    """How the run read its rows that a folder was merged from."""
    made = {} if isinstance(model, Answerer) else read_json(Path(model).expanduser() / MERGE_FACTS, optional=True)
    return made.get("settings", {})


def _section(data: str, settings: dict[str, Any], template_arguments: dict[str, Any] | None = None) -> DataSection:
    if template_arguments is not None:
        settings = settings | {"template_arguments": template_arguments}
    if columns := settings.get("columns"):  # a run writes its held-out rows as messages or text, whatever they were
        records = (record for file in open_records(data, "huggingface") for _, record in file[1])
        first = next((record for record in records if isinstance(record, dict)), {})
        settings = settings | {"columns": columns if first.keys() & columns.keys() else None}
    return DataSection(train=data, **{key: settings[key] for key in settings if key != "max_length"})


def _read(data: str | Path, section: DataSection, limit: int | None) -> list[Row]:
    if limit is not None and limit < 1:
        raise DataError(f"limit must be at least 1; it is {limit}.", "Leave it out to use every row.")
    if not (rows := list(islice(iterate_rows(str(data), section), limit))):
        raise DataError(f"{data} holds no rows.", "Give a file with at least one row.")
    return rows


def _with_examples(row: Row, examples: list[Row]) -> Row:
    """``row`` with the conversations of ``examples``, which the loss does not count, behind its system message."""
    start = sum(message["role"] in ("system", "developer") for message in row.messages[:1])
    told = [message | {"train": False} for each in examples for message in each.messages if message["role"] != "system"]
    return replace(row, messages=[*row.messages[:start], *told, *row.messages[start:]])


def _totals(losses: list[tuple[int, str, float, int]]) -> tuple[int, int, float]:
    tokens = sum(count for *_, count in losses)
    return len(losses), tokens, sum(nats for _, _, nats, _ in losses) / tokens


@torch.inference_mode()
def _row_losses(
    answerer: Answerer, rows: list[Row], section: DataSection, progress: Callable[[int, int], None]
) -> tuple[list[tuple[int, str, float, int]], list[str]]:
    """Place, origin, nats and supervised tokens of each row, one at a time; and why others are left out."""
    limit, device = answerer.max_positions or NO_LIMIT, answerer.model.device
    losses, left_out, model = [], [], LossModel(answerer.model)
    renderer = Renderer(answerer.tokenizer, section.loss_on, answerer.renderer.arguments)
    for place, row in enumerate(rows):
        total, count = 0.0, 0
        for part in renderer.row(row):
            if len(part.ids) > limit:
                left_out.append(f"{row.origin}: {len(part.ids)} tokens, the model has {limit} positions (loss)")
            elif not any(part.supervised[1:]):
                left_out.append(f"{row.origin}: no supervised token (loss)")
            else:
                ids, marks = np.asarray(part.ids, dtype=np.int64), np.asarray(part.supervised, dtype=bool)
                data = SimpleNamespace(row={0: (ids, marks)}.__getitem__, lengths=np.array([len(ids)]))
                total += float(batch_loss(model, make_batch(data, [[0]], answerer.pad_id), device))
                count += int(marks[1:].sum())
        if count:
            losses.append((place, row.origin, total, count))
        progress(place + 1, len(rows))
    if not losses:
        raise DataError(f"No row can be evaluated; the first: {left_out[0]}.", "Check the data file.")
    return losses, left_out


def _answers(answerer: Answerer, task: Task) -> tuple[list[Answer], list[str]]:
    """Greedy answers to every row that ends in an assistant message; and the rows that have no room for an answer. A
    tool call is compared as the template writes it; of an answer with reasoning, what stands behind ``</think>``."""
    ends_right = [len(row.messages or ()) > 1 and row.messages[-1]["role"] == "assistant" for row in task.rows]
    asked = [(place, row) for place, row in enumerate(task.rows) if ends_right[place]]
    if not asked or not answerer.has_template:
        return [], []
    taught = [answerer.renderer.answer(row.messages, row.tools) for _, row in asked]
    most = task.max_new_tokens or max(map(len, taught)) + SPARE_TOKENS
    limit, fitting, prompts, left_out = answerer.max_positions or NO_LIMIT, [], [], []
    for (place, row), wanted in zip(asked, taught, strict=True):
        ids = prompt_tokens(answerer, row.messages[:-1], tools=row.tools)
        if limit - len(ids) < most:
            left_out.append(f"{row.origin}: {len(ids)} tokens leave no room for {most} new ones (answer)")
        else:
            fitting.append((place, row, wanted))
            prompts.append(ids)
    options = {"batch_size": task.batch_size, "progress": partial(task.progress, "answers")}
    generated = generate_ids(answerer, prompts, most, **options)
    answers, decode = [], partial(answerer.tokenizer.decode, skip_special_tokens=True)
    refusal = re.compile("|".join([*words("en")["refusals"], *words("zh")["refusals"]]), re.IGNORECASE)
    for (place, row, wanted), ids in zip(fitting, generated, strict=True):
        last, answer = row.messages[-1], decode(ids).strip()
        expected = (decode(wanted) if last.get("tool_calls") else last["content"]).strip()
        said, right = _conclusion(answer), _conclusion(expected)
        number = extract_number(right) if "####" in right or NUMBER.fullmatch(right) else None
        is_number = None if number is None else extract_number(said) == number
        score = task.scorer(answer, row, expected) if task.scorer else None
        judged = (said == right, place, is_number, score, len(ids), bool(refusal.match(said)))
        answers.append(Answer(row.origin, row.messages[-2]["content"], expected, answer, *judged))
    return answers, left_out


def _conclusion(answer: str) -> str:
    return answer.rpartition("</think>")[2].strip()


def _load_scorer(path: Path, data: str, section: DataSection) -> Scorer:
    """The user's ``score(answer, row)``. ``row``: the record as the file has it (where its place names but one), with
    what it lacks of origin, messages, prompt and expected."""
    hint = "It needs: def score(answer: str, row: dict) -> float"
    with Blame(ConfigError, f"The scorer {path} cannot be run", hint):
        spec = importlib.util.spec_from_file_location("fullshard_scorer", path)
        spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
        score = module.score
    records: dict[str, list[Any]] = {}
    for label, found, _ in open_records(data, section.source):
        for number, record in found:
            records.setdefault(f"{label}:{number}", []).append(record)

    def judge(answer: str, row: Row, expected: str) -> float:
        known = {"origin": row.origin, "messages": row.messages, "prompt": row.messages[-2]["content"]}
        here = [record for record in records.get(row.origin, []) if isinstance(record, dict)]
        record = known | {"expected": expected} | (here[0] if len(here) == 1 else {})
        with Blame(ConfigError, f"{path}: score of the answer to {row.origin} fails", hint):
            if not math.isfinite(value := float(score(answer, record))):
                raise ValueError(f"it is {value}")
        return value

    return judge


def _device_hours(folder: Path) -> float | None:
    """What the run behind a merged folder took, by its metrics; None where it is not here."""
    run = Path(read_json(folder / MERGE_FACTS, optional=True).get("run", ""))
    steps = [record["seconds"] for record in read_metrics(run) if record["kind"] == "train"]
    return sum(steps) * read_json(run / run_folder.PLAN)["ranks"] / 3600 if steps else None


def _import_harness() -> Any:
    with Blame(ConfigError, "--suite needs lm-eval, not installed here", 'pip install "fullshard[suite]"'):
        return importlib.import_module("lm_eval")


def _run_harness(harness: Any, model: str, tasks: Sequence[str], limit: int | None) -> dict[str, dict[str, float]]:
    settings = {"pretrained": str(fetch_model(model))}
    with Blame(ConfigError, f"lm-eval cannot run {', '.join(tasks)}", "All its tasks: lm-eval ls tasks"):
        made = harness.simple_evaluate(model="hf", model_args=settings, tasks=list(tasks), limit=limit)["results"]
    return {
        task: {name: value for name, value in found.items() if isinstance(value, int | float)}
        for task, found in made.items()
    }
