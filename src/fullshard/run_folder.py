"""Names inside a run folder. Every file a run writes is named here and nowhere else."""

import fcntl
import itertools
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any
from fullshard.errors import Blame, CheckpointError, ConfigError, refusal

SCHEMA_VERSION = 1
RECIPE, CONFIG, PLAN, ENVIRONMENT = "recipe.yaml", "config.json", "plan.json", "environment.json"
DATA, METRICS, REPORT = "data.json", "metrics.jsonl", "report.html"
METRICS_BEFORE, RESULT = "metrics.before.jsonl", "result.json"  # of a start that never saved; of a finished run
TRACE, EVAL = "trace.json", "eval.json"  # what the engine did in one step, by rank; how the merged model was judged
HELD_OUT = "held_out.jsonl"  # the rows set apart, where data.eval is a share
CHECKPOINTS, MERGED, PREPARED = "checkpoints", "merged", "prepared"  # folders; prepared: a sub-folder a split
MERGE_FACTS = "merge.json"  # in folders that our merge made: run, step, inputs, proof, how rows were read
LOCK = "lock"  # held by the launcher, torchrun's rank 0, with its process id
LAUNCH, ERRORS = "launch.json", "errors"  # torchrun's launchers, what stood there as they began; a file a failed rank


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as JSON to ``path`` whole or not at all (temporary name, fsync, rename)."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    sync_path(temporary)
    os.replace(temporary, path)


def claim_run(run: Path, doing: str = "trained") -> IO[str]:
    """Lock ``run`` until the returned file is closed or the process ends. ConfigError where another trains it."""
    lock = open(run / LOCK, "a+", encoding="utf-8")  # noqa: SIM115 - it stays open
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise refusal("locked", run=run, doing=doing, process=(run / LOCK).read_text(encoding="utf-8")) from None
    except OSError as error:  # a file system without locks
        logging.getLogger(__name__).warning("%s cannot be locked (%s): start no second run in it", run, error.strerror)
    lock.truncate(0)
    print(os.getpid(), end="", file=lock, flush=True)
    return lock


def publish_folder(unfinished: Path, final: Path) -> None:
    """Give a finished folder its name; an older one is set aside first, deleted last. The rename outlives a crash."""
    old = final.with_name(f".{final.name}.{os.urandom(4).hex()}.old")
    if final.exists():
        os.replace(final, old)
    os.replace(unfinished, final)
    sync_path(final.parent)
    with suppress(CheckpointError, FileNotFoundError), hold(old, alone=True):
        shutil.rmtree(old, ignore_errors=True)


@contextmanager
def hold(folder: Path, alone: bool = False) -> Iterator[None]:
    """Lock a folder itself, which leaves no file in it: as a reader of a checkpoint, which is then not pruned, or
    ``alone``. CheckpointError where another has it; for a reader also where its name stands for another at the end."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except OSError as error:  # others: a file system without locks
            if isinstance(error, BlockingIOError):
                raise refusal("held", folder=folder) from None
        yield
        if not alone and not (folder.is_dir() and os.path.samestat(os.fstat(handle), folder.stat())):
            raise refusal("written_anew", folder=folder)
    finally:
        os.close(handle)


def clear_start(run: Path) -> str:
    """Make room for a start after one that never saved, and say so. Prepared rows stay, metrics under another name."""
    if list_checkpoints(run):  # it has gone on until now
        raise ConfigError(f"{run} has saved meanwhile.", f"fullshard resume {run}")
    for name in (PLAN, CONFIG, DATA, ENVIRONMENT, HELD_OUT):
        (run / name).unlink(missing_ok=True)
    shutil.rmtree(run / CHECKPOINTS, ignore_errors=True)  # what a save had not finished
    if (run / METRICS).is_file():
        os.replace(run / METRICS, run / METRICS_BEFORE)
    kept = f" (its metrics: {METRICS_BEFORE})" * (run / METRICS_BEFORE).is_file()
    return f"starting anew in {run}: the last start there ended before its first checkpoint{kept}"


def clear(folder: Path, kept: Path) -> None:
    """Remove what is in a folder but ``kept``, with which the next start goes on; and the folder, where it is empty."""
    for path in set(folder.iterdir()) - {kept}:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()


def sync_path(path: Path) -> None:
    """fsync a folder, so that a rename inside it outlives a crash; or a file."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_json(path: Path, optional: bool = False) -> dict[str, Any]:
    """The object in a JSON file; ``optional``: {} where there is no file. Raises ConfigError where it is damaged."""
    if optional and not path.is_file():
        return {}
    content = path.read_bytes()
    with Blame(ConfigError, f"{path} is damaged", "Put the whole file back."):
        if not isinstance(value := json.loads(content), dict):
            raise ValueError("no object")
    return value


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The records of a run, oldest first; [] where there are none. A line that a kill cut short is left out."""
    records = []
    for line in (run / METRICS).read_bytes().splitlines() if (run / METRICS).is_file() else ():
        with suppress(ValueError):
            records.append(json.loads(line))
    return records


def checkpoint_path(run: Path, step: int) -> Path:
    """The folder of the checkpoint made after optimizer step ``step``."""
    return run / CHECKPOINTS / f"step_{step:06d}"


def list_checkpoints(run: Path) -> list[tuple[int, Path]]:
    """All published checkpoints of a run as (step, folder), oldest first. Unfinished ones have other names."""
    names = ((re.fullmatch(r"step_(\d+)", path.name), path) for path in (run / CHECKPOINTS).glob("step_*"))
    return sorted((int(match[1]), path) for match, path in names if match and path.is_dir())


def newest_checkpoint(run: Path, step: int | None = None) -> tuple[int, Path]:
    """The newest checkpoint of ``run``, or that of ``step``. Raises CheckpointError when there is none."""
    if not (found := dict(list_checkpoints(run))):
        raise refusal("no_checkpoint", run=run, recipe=run / RECIPE)
    if (number := max(found) if step is None else step) not in found:
        raise refusal("no_such_step", run=run, step=step, steps=", ".join(map(str, found)))
    return number, found[number]


def free_run(parent: Path, stem: str) -> Path:
    """The first of parent/stem, parent/stem-2, ... of which neither folder nor recipe (.yaml beside it) exists."""
    runs = (parent / name for name in itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2))))
    return next(run for run in runs if not (run.exists() or run.with_name(f"{run.name}.yaml").exists()))


def require_run(run: Path) -> Path:
    """Return ``run`` if it is a run folder, else raise ConfigError."""
    if not (run / CONFIG).is_file():
        raise ConfigError(f"{run} is not a run folder: {CONFIG} is missing.", "Make one: fullshard train RECIPE")
    return run
