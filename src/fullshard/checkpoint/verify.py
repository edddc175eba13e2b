"""Is what lies on disk what was written? Checkpoints and merged folders, byte for byte."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fullshard.checkpoint.format import COMPLETE, MANIFEST, hash_file, verify_checkpoint
from fullshard.errors import CheckpointError, ConfigError, UserError
from fullshard.model.load import MERGE_FACTS
from fullshard.run_folder import CHECKPOINTS, MERGED, list_checkpoints, newest_checkpoint, read_json


@dataclass(frozen=True)
class Verification:
    """``found``: each checkpoint or merged folder with what is wrong with it, or nothing."""

    found: tuple[tuple[str, str], ...]

    @property
    def healthy(self) -> bool:
        """Whether all are whole."""
        return not any(problem for _, problem in self.found)

    def to_text(self) -> str:
        """A line each."""
        return "\n".join(f"{'DAMAGED' if problem else 'whole  '}  {place}  {problem}" for place, problem in self.found)


def verify(path: str | Path) -> Verification:
    """Read every byte of a run's checkpoints and merged folder, of one checkpoint, or of one merged folder. Raises
    ConfigError where ``path`` is none of these."""
    return Verification(tuple(_problems(Path(path))))


def _problems(path: Path) -> Iterator[tuple[str, str]]:
    if not any((path / name).exists() for name in (CHECKPOINTS, MANIFEST, COMPLETE, MERGE_FACTS)):
        hint = "Give a run folder, a checkpoint in it, or a merged folder."
        raise ConfigError(f"{path} holds nothing that can be verified.", hint)
    inside = [folder for _, folder in list_checkpoints(path)] + [*path.glob("before_step_*"), path / MERGED]
    for folder in [folder for folder in inside if folder.is_dir()] if (path / CHECKPOINTS).is_dir() else [path]:
        try:
            if (folder / MERGE_FACTS).is_file():
                for name, wanted in read_json(folder / MERGE_FACTS)["output_xxh3"].items():
                    if not (folder / name).is_file() or hash_file(folder / name) != wanted:
                        raise CheckpointError(f"{name} is not what was written.")
            else:
                verify_checkpoint(folder)
            yield str(folder), ""
        except UserError as error:
            yield str(folder), error.message


def newest_good(run: Path, step: int | None = None) -> tuple[int, Path, list[str]]:
    """The newest whole checkpoint of ``run`` and why newer ones are none; that of ``step`` must be whole itself."""
    newest = newest_checkpoint(run, step)
    problems: list[str] = []
    for number, folder in [newest] if step else reversed(list_checkpoints(run)):
        try:
            verify_checkpoint(folder)
            return number, folder, problems
        except UserError as error:
            if step:
                raise
            problems.append(error.message)
    raise CheckpointError(" ".join(problems), f"None of {run} is whole; train anew.")
