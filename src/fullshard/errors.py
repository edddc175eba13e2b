"""Errors that users meet. Each carries what was given, what fits, and the next command to type."""

import re
from functools import cache
from pathlib import Path
from typing import Any
import yaml


@cache
def read_table(name: str) -> Any:
    """What a YAML file of the package holds; ``name``: its path below this folder."""
    return yaml.safe_load((Path(__file__).parent / name).read_text(encoding="utf-8"))


class UserError(Exception):
    """A problem the user can solve. ``message`` says what was given and what fits; ``hint`` is the next step."""

    told = False  # another rank of this machine prints it
    exit_code = 2  # of the command

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message, self.hint = message, hint

    def __str__(self) -> str:
        return f"{self.message}\n{self.hint}" if self.hint else self.message


def _kind(name: str) -> type[UserError]:
    return type(name, (UserError,), {"__module__": __name__, **read_table("errors.yaml")[name]})


ConfigError, DataError, ModelError, MergeError = map(_kind, ("ConfigError", "DataError", "ModelError", "MergeError"))
CheckpointError, PlanError, TrainError, Stopped = map(_kind, ("CheckpointError", "PlanError", "TrainError", "Stopped"))
ERROR_TYPES = {error.__name__: error for error in (UserError, *UserError.__subclasses__())}


@cache
def read_refusals() -> dict[str, tuple[type[UserError], list[str]]]:
    """The kind of error, message and hint of each name in refusals.yaml."""
    kinds = read_table("refusals.yaml").items()
    return {name: (ERROR_TYPES[kind], texts) for kind, found in kinds for name, texts in found.items()}


def refusal(name: str, /, **facts: object) -> UserError:
    """The error NAME of refusals.yaml, with the facts in its message and hint."""
    kind, texts = read_refusals()[name]
    return kind(*(text.format(**facts) for text in texts))


def without_secrets(text: str) -> str:
    """``text`` without what addresses and servers may repeat: passwords, signatures, tokens."""
    text = re.sub(r"\?[^\s'\"]*", "", re.sub(r"(\w+://)[^\s/@]*@", r"\1", text))
    return re.sub(r"\b(hf_|ms-)\w[\w-]*", r"\1***", text)


class Blame:
    """``with Blame(ModelError, "No tokenizer in x", hint):`` - all that a foreign reader raises becomes that error."""

    def __init__(self, kind: type[UserError], message: str, hint: str) -> None:
        self.kind, self.message, self.hint = kind, message, hint

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, UserError):
            text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            first = next(iter(text.strip().splitlines()), "") or type(error).__name__
            raise self.kind(f"{self.message}: {without_secrets(first)}", self.hint) from error
