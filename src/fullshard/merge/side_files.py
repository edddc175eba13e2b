"""Everything in a merged folder that is not weights: config, generation config, tokenizer files, model card."""

import math
import re
import shutil
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.repocard import metadata_load

from fullshard.data.chat import load_tokenizer
from fullshard.merge.writer import OutputTensor
from fullshard.model.load import GENERATION_CONFIG, SIDE_FILES, mended, union_of_ids
from fullshard.run_folder import read_json, write_json


def main_dtype(outputs: list[OutputTensor]) -> str:
    """The floating-point dtype that most weights are stored in, as config.json names it: float32, bfloat16."""
    count: Counter[torch.dtype] = Counter()
    for output in outputs:
        count[output.dtype] += math.prod(output.shape) if output.dtype.is_floating_point else 0
    return str(count.most_common(1)[0][0]).removeprefix("torch.")


def copy_tokenizer_files(base: Path, trained: Path, folder: Path) -> list[str]:
    """Copy tokenizer files, chat templates and licence texts byte for byte, those beside what was trained (where it has
    a tokenizer) before the base's; return their names."""
    homes, copied = [base, trained] if any(trained.glob("tokenizer*")) else [base], []
    for home in homes:
        for path in (path for pattern in SIDE_FILES for path in sorted(home.glob(pattern)) if path.is_file()):
            copied.append(name := path.relative_to(home).as_posix())
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, folder / name)
    return list(dict.fromkeys(copied))


def write_configs(base: Path, folder: Path, dtype: str, trained_ids: Iterable[int], vocabulary_size: int) -> list[str]:
    """Write config.json and generation_config.json with the tensors' dtype and every stop id; a line a change."""
    config = read_json(base / "config.json")
    if not (generation := read_json(base / GENERATION_CONFIG, optional=True)):
        generation = {key: config[key] for key in ("bos_token_id", "pad_token_id") if config.get(key) is not None}
    end_id = load_tokenizer(folder).eos_token_id if any(folder.glob("tokenizer*")) else None
    ids = union_of_ids(generation.get("eos_token_id"), config.get("eos_token_id"), trained_ids, end_id)
    generation, notes = mended(generation)
    for values in (config, generation) if ids else ():
        values["eos_token_id"] = ids if len(ids) > 1 else ids[0]
    (config["text_config"] if "vocab_size" in config.get("text_config", {}) else config)["vocab_size"] = vocabulary_size
    config["torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"] = dtype
    write_json(folder / "config.json", config)
    write_json(folder / GENERATION_CONFIG, generation)
    return notes


def base_name(base: Path) -> str:
    """The base's public name where its path or card tells, else its folder's name."""
    if cached := re.search(r"models(?:--|/)([^/]+)--([^/]+)/snapshots", base.as_posix()):  # of either hub
        return f"{cached.group(1)}/{cached.group(2)}"
    named = _front_matter(base).get("base_model")
    return named if isinstance(named, str) and named else base.name


def _front_matter(base: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError, yaml.YAMLError):
        return metadata_load(base / "README.md") or {}
    return {}


def write_card(base: Path, folder: Path, **facts: Any) -> None:
    """Write README.md: base, licence ("see the base model" where its card names none), and ``facts``: name, method,
    what it was made of, dtype, proof."""
    card, front = _front_matter(base), {"library_name": "transformers", "pipeline_tag": "text-generation"}
    front |= {key: card.get(key) for key in ("license", "license_name", "license_link", "language")}
    data = ModelCardData(base_model=base_name(base), **front)
    template = Path(__file__).with_name("model_card.md")
    ModelCard.from_template(data, template, version=version("fullshard"), **facts).save(folder / "README.md")
