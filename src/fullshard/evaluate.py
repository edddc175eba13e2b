"""Judge a model on rows of data: training's loss per supervised token, and greedy answers next to the expected ones."""

import gc
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from fullshard.config import DataSection
from fullshard.data.chat import Renderer
from fullshard.data.files import open_records
from fullshard.data.sources import Row, iterate_rows
from fullshard.errors import DataError
from fullshard.infer.generate import Answerer, generate_ids, load_for_inference, prompt_tokens
from fullshard.model.load import MERGE_FACTS
from fullshard.run_folder import read_json
from fullshard.train.loss import LossModel, held_out_loss

NO_LIMIT = 1 << 30
SPARE_TOKENS = 8  # generated beyond the longest expected answer, so that one that runs on is seen to be wrong
Progress = Callable[[str, int, int], None]  # what is being done, rows done, rows in all


@dataclass(frozen=True)
class Answer:
    """One row: the prompt's last message, the expected answer, and what the model said (greedy)."""

    origin: str  # file:line
    prompt: str
    expected: str
    answer: str
    correct: bool  # equal without reasoning and without white space at both ends


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

    @property
    def exact_match(self) -> float | None:
        """Share of correct answers; None where no row has an expected answer."""
        return self.num_correct / self.num_answers if self.num_answers else None

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON values, with ``exact_match``."""
        return asdict(self) | {"exact_match": self.exact_match, "base": self.base and self.base.to_json()}

    def to_text(self) -> str:
        """The lines to print: the figures of the model, below those of the base where there is one."""
        lines = []
        for name, result in (("base", self.base), ("model", self))[self.base is None :]:
            covered = f"{result.supervised_tokens:,} supervised tokens in {result.rows} rows"
            lines.append(f"{name}: loss {result.loss:.4f} over {covered}")
            if result.exact_match is not None:
                lines[-1] += f"; exact match {result.num_correct} of {result.num_answers} ({result.exact_match:.0%})"
        lines += [f"left out: {len(self.left_out)} rows, first {self.left_out[0]}"] if self.left_out else []
        return "\n".join(lines)


def evaluate_run(
    model: str | Path | Answerer, data: str | Path, base: str | Path | Answerer | None = None, limit: int | None = None,
    max_new_tokens: int | None = None, batch_size: int = 16, settings: dict[str, Any] | None = None,
    progress: Progress | None = None, template_arguments: dict[str, Any] | None = None,
) -> EvalResult:  # fmt: skip
    """Evaluate a model folder on a data file, and ``base`` on the same rows. ``limit``: only the first rows.
    ``max_new_tokens``: default the longest expected answer and 8 more. ``settings``: keys of the recipe's data section
    that say how rows are read; default: those of the merged run. ``template_arguments`` go before theirs. Raises
    DataError where no row can be used, ModelError, ConfigError."""
    if settings is None:
        made = {} if isinstance(model, Answerer) else read_json(Path(model).expanduser() / MERGE_FACTS, optional=True)
        settings = made.get("settings", {})
    if template_arguments is not None:
        settings = settings | {"template_arguments": template_arguments}
    if columns := settings.get("columns"):  # a run writes its held-out rows as messages or text, whatever they were
        records = (record for file in open_records(str(data), "huggingface") for _, record in file[1])
        first = next((record for record in records if isinstance(record, dict)), {})
        settings = settings | {"columns": columns if first.keys() & columns.keys() else None}
    section = DataSection(train=str(data), **{key: settings[key] for key in settings if key != "max_length"})
    if limit is not None and limit < 1:
        raise DataError(f"limit must be at least 1; it is {limit}.", "Leave it out to use every row.")
    if not (rows := list(islice(iterate_rows(str(data), section), limit))):
        raise DataError(f"{data} holds no rows.", "Give a file with at least one row.")
    say = progress or (lambda what, done, total: None)
    options = {"batch_size": batch_size, "progress": partial(say, "answers")}

    def measure(model: str | Path | Answerer, compared: EvalResult | None = None) -> EvalResult:
        answerer = load_for_inference(model, section.template_arguments)
        name = str(model) if isinstance(model, str | Path) else str(getattr(answerer.model, "name_or_path", ""))
        used, left_out = _render_rows(answerer, rows, section)
        say("loss", 0, count := len(used.lengths))
        measured = LossModel(answerer.model), used, (batch_size, "rows"), answerer.pad_id, answerer.model.device
        loss = held_out_loss(*measured)
        say("loss", count, count)
        answers, skipped = _answers(answerer, rows, max_new_tokens, options)
        figures = (count, int(used.supervised.sum()), loss, len(answers), sum(answer.correct for answer in answers))
        return EvalResult(name, *figures, tuple(answers), tuple(left_out + skipped), compared)

    compared = None if base is None else measure(base)
    gc.collect()  # the base's weights go before the model's come
    return measure(model, compared)


def _render_rows(answerer: Answerer, rows: list[Row], section: DataSection) -> tuple[SimpleNamespace, list[str]]:
    """Rows in memory that are read like prepared data, and why others are left out."""
    limit = answerer.max_positions or NO_LIMIT
    used, left_out, renderer = [], [], Renderer(answerer.tokenizer, section.loss_on, answerer.renderer.arguments)
    for row in rows:
        for part in renderer.row(row):
            if len(part.ids) > limit:
                left_out.append(f"{row.origin}: {len(part.ids)} tokens, the model has {limit} positions (loss)")
            elif not any(part.supervised[1:]):
                left_out.append(f"{row.origin}: no supervised token (loss)")
            else:
                used.append((np.asarray(part.ids, dtype=np.int64), np.asarray(part.supervised, dtype=bool)))
    if not used:
        raise DataError(f"No row can be evaluated; the first: {left_out[0]}.", "Check the data file.")
    lengths, supervised = zip(*((len(ids), int(marks[1:].sum())) for ids, marks in used), strict=True)
    return SimpleNamespace(row=used.__getitem__, lengths=np.array(lengths), supervised=np.array(supervised)), left_out


def _answers(answerer: Answerer, rows: list[Row], most: int | None, options: Any) -> tuple[list[Answer], list[str]]:
    """Greedy answers to every row that ends in an assistant message; and the rows that have no room for an answer. A
    tool call is compared as the template writes it; of an answer with reasoning, what stands behind ``</think>``."""
    asked = [row for row in rows if len(row.messages or ()) > 1 and row.messages[-1]["role"] == "assistant"]
    if not asked or not answerer.has_template:
        return [], []
    taught = [answerer.renderer.answer(row.messages, row.tools) for row in asked]
    most = most or max(map(len, taught)) + SPARE_TOKENS
    limit, fitting, prompts, left_out = answerer.max_positions or NO_LIMIT, [], [], []
    for row, wanted in zip(asked, taught, strict=True):
        ids = prompt_tokens(answerer, row.messages[:-1], tools=row.tools)
        if limit - len(ids) < most:
            left_out.append(f"{row.origin}: {len(ids)} tokens leave no room for {most} new ones (answer)")
        else:
            fitting.append((row, wanted))
            prompts.append(ids)
    generated = generate_ids(answerer, prompts, most, **options)
    answers, decode = [], partial(answerer.tokenizer.decode, skip_special_tokens=True)
    for (row, wanted), ids in zip(fitting, generated, strict=True):
        last, answer = row.messages[-1], decode(ids).strip()
        expected = decode(wanted) if last.get("tool_calls") else last["content"]
        is_correct = _conclusion(answer) == _conclusion(expected)
        answers.append(Answer(row.origin, row.messages[-2]["content"], expected.strip(), answer, is_correct))
    return answers, left_out


def _conclusion(answer: str) -> str:
    return answer.rpartition("</think>")[2].strip()
