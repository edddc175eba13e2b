"""How much data a run has: from the prepared rows where they exist, else estimated from the files' bytes."""

from pathlib import Path
import numpy as np
from fullshard.config import DataFile, DataSection, RunConfig
from fullshard.data.sources import Row, iterate_rows
from fullshard.errors import PlanError
from fullshard.frozen import Frozen
from fullshard.run_folder import CONFIG, PREPARED, read_json

BYTES_PER_TOKEN = 4  # English text in the vocabularies of today's models
TEMPLATE_TOKENS = 6  # what a chat template puts around one message
ASSUMED_ROWS = 10_000
READ_WHOLE_BYTES = 64 << 20  # larger files are counted by lines, not read as rows


class Volume(Frozen):
    """Training rows by length. ``lengths``: (rows,) int64 tokens, at most max_length."""

    lengths: np.ndarray
    supervised_share: float  # supervised tokens / tokens
    eval_tokens: int
    is_estimate: bool
    assumption: str = ""  # in words, where no file was read
    longest = property(lambda self: int(self.lengths.max()))  # tokens of the longest row known


def read_volume(config: RunConfig) -> Volume:
    """The run's prepared rows if its folder holds them, else an estimate from its files. DataError for bad files."""
    if prepared := _prepared_volume(Path(config.output), config):
        return prepared
    lengths, supervised = _estimate_files(config.train_files, config.data)
    held_out = lengths[:0]
    if isinstance(config.data.eval, str):
        held_out, _ = _estimate_files([DataFile(path=config.data.eval)], config.data)
    elif config.data.eval and len(lengths) > (count := max(1, round(config.data.eval * len(lengths)))):
        held_out, lengths = lengths[:count], lengths[count:]
    return Volume(lengths, supervised, int(held_out.sum()), True)


def assume_volume(config: RunConfig, rows: int | None, mean_tokens: int | None) -> Volume:
    """Rows of one length each, without a look at the files. Default: 10,000 rows of half of data.max_length."""
    rows, tokens, limit = rows or ASSUMED_ROWS, mean_tokens or config.data.max_length // 2, config.data.max_length
    if tokens > limit:
        raise PlanError(f"--mean-tokens {tokens:,} is above data.max_length, {limit:,}.", f"data.max_length={tokens}")
    held_out = int(rows * (config.data.eval if isinstance(config.data.eval, float) else 0.05 * bool(config.data.eval)))
    words = f"no data was read: {rows:,} rows of {tokens:,} tokens are assumed; set --rows and --mean-tokens"
    share = 1.0 if config.data.loss_on == "all" else 0.5
    return Volume(np.full(rows - held_out, tokens), share, held_out * tokens, True, words)


def _prepared_volume(run: Path, config: RunConfig) -> Volume | None:
    from fullshard.data.prepared import open_prepared

    if not (run / CONFIG).is_file() or not (run / PREPARED / "train").is_dir():
        return None
    made, model = read_json(run / CONFIG), Path(config.model.path).expanduser().resolve()
    wanted = [config.data.model_dump(mode="json"), config.train.seed, config.model.add_tokens, model]
    if wanted != [made["data"], made["train"]["seed"], made["model"]["add_tokens"], Path(made["model"]["path"])]:
        return None
    data = open_prepared(run / PREPARED, "train")
    held_out = int(open_prepared(run / PREPARED, "eval").lengths.sum()) if (run / PREPARED / "eval").is_dir() else 0
    return Volume(data.lengths, float(data.supervised.sum() / max(1, data.lengths.sum())), held_out, False)


def _estimate_files(files: list[DataFile], data: DataSection) -> tuple[np.ndarray, float]:
    found, supervised = [], 0
    for file in files:
        path = Path(file.path)
        if path.is_file() and path.stat().st_size > READ_WHOLE_BYTES and path.suffix.lower() == ".jsonl":
            with open(path, "rb") as lines:
                sizes = [max(4, len(line) // BYTES_PER_TOKEN) for line in lines if line.strip()]
            sizes = (sizes * (int(file.weight) + 1))[: round(len(sizes) * file.weight)]
            found, supervised = found + sizes, supervised + sum(sizes) // 2
            continue
        for row in iterate_rows([file], data):
            tokens, answers = estimate_row(row, data.loss_on)
            found.append(tokens)
            supervised += answers
    lengths = np.array(found, dtype=np.int64)
    return np.minimum(lengths, data.max_length), supervised / max(1, int(lengths.sum()))


def estimate_row(row: Row, loss_on: str) -> tuple[int, int]:
    """(tokens, supervised tokens) of a row by its bytes."""
    if row.messages is None:
        tokens = max(4, len((row.text or "").encode()) // BYTES_PER_TOKEN + 1)
        return tokens, tokens
    sizes = [len((message["content"] or "").encode()) // BYTES_PER_TOKEN + 1 for message in row.messages]
    tokens = sum(sizes) + TEMPLATE_TOKENS * len(sizes)
    answers = [size + 1 for size, message in zip(sizes, row.messages, strict=True) if message["role"] == "assistant"]
    return tokens, tokens if loss_on == "all" else sum(answers[-1:] if loss_on == "last" else answers)
