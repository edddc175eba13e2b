"""What a model folder says of itself: where answers stop, its generation config (of which transformers refuses to save
some that it reads), and how it was made."""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fullshard.run_folder import read_json

GENERATION_CONFIG = "generation_config.json"
MERGE_FACTS = "merge.json"  # in folders that our merge made: run, step, inputs, proof, how rows were read
SAMPLING_ONLY = ("temperature", "top_p", "top_k", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
BEAMS_ONLY = ("early_stopping", "length_penalty")
TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "transformers_version")


def union_of_ids(*groups: int | Iterable[int] | None) -> list[int]:
    """All token ids of ``groups`` (each an id, ids, or None) without repetition, in order of first appearance."""
    return list(dict.fromkeys(n for ids in groups for n in ([ids] if isinstance(ids, int) else ids or ())))


def stop_ids(folder: Path) -> list[int]:
    """Ids that end an answer: those of the generation config, else those of config.json; possibly none."""
    from_generation = union_of_ids(read_json(folder / GENERATION_CONFIG, optional=True).get("eos_token_id"))
    return from_generation or union_of_ids(read_json(folder / "config.json").get("eos_token_id"))


def check_generation_config(folder: Path) -> list[str]:
    """What ``mended`` would change in this folder's generation config, one line each; empty where it is fine."""
    return mended(read_json(folder / GENERATION_CONFIG, optional=True))[1]


def mended(values: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A generation config that transformers accepts, and one line for each change. Greedy configs lose their sampling
    settings, which had no effect; what still is refused is reduced to its token ids."""
    result, notes = dict(values), []
    if _problem(values) is None:
        return result, notes
    idle = dict.fromkeys(() if result.get("do_sample") else SAMPLING_ONLY, "greedy, do_sample is off")
    idle |= dict.fromkeys(() if (result.get("num_beams") or 1) > 1 else BEAMS_ONLY, "one beam")
    for key, kind in idle.items():
        alone = {name: result[name] for name in (key, "do_sample", "num_beams") if name in result}
        if key in result and _problem(alone):
            without_effect = f"{key} {result.pop(key)} has no effect ({kind})"
            notes.append(f"generation config: {without_effect} and transformers refuses to save it; removed")
    if (problem := _problem(result)) is not None:
        dropped = [key for key in result if key not in TOKEN_KEYS]
        result = {key: result[key] for key in TOKEN_KEYS if key in result}
        notes.append(f"generation config: transformers refuses it ({problem}); removed {', '.join(dropped)}")
    return result, notes


def _problem(values: dict[str, Any]) -> str | None:
    """Why transformers would refuse to save ``values``, or None."""
    from transformers import GenerationConfig

    logger = logging.getLogger("transformers.generation.configuration_utils")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        GenerationConfig.from_dict(values).validate(strict=True)
    except (ValueError, TypeError) as error:
        lines = [line.strip("- ") for line in str(error).splitlines() if line.strip()]
        return lines[1] if len(lines) > 1 and lines[0].endswith(":") else lines[0]
    finally:
        logger.setLevel(level)
    return None
