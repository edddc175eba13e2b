"""The merge: a run, another tool's checkpoint or adapter -> an ordinary Hugging Face folder, published once proven."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any
import torch
import yaml
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.repocard import metadata_load
from fullshard import run_folder
from fullshard.checkpoint.format import MANIFEST, hash_file, read_manifest
from fullshard.checkpoint.ranges import OwnCheckpoint
from fullshard.config import LoraSection
from fullshard.data.chat import added_ids, load_tokenizer
from fullshard.device import num_cores
from fullshard.errors import ConfigError, MergeError, refusal
from fullshard.frozen import Frozen
from fullshard.merge import weights
from fullshard.merge.readers.foreign import ForeignCheckpoint
from fullshard.model.fetch import fetch_model
from fullshard.model.load import GENERATION_CONFIG, SIDE_FILES, mended, unfinished_folder, union_of_ids
from fullshard.run_folder import MERGE_FACTS, hold, newest_checkpoint, read_json, require_run, write_json
from fullshard.train.precision import precision_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WRITERS, ALONE_BYTES = 3, 2 * 10**9  # processes, of a merge of so many bytes: each imports for seconds, and holds 50 MB
PROMPT = range(1, 17)  # token ids that a proof is computed on where the source brings none


class MergeResult(Frozen):
    """A published merge. ``line`` is the proof; ``lines`` are all there is to print: what moved, was changed."""

    folder: Path
    step: int | None  # None: of another tool
    line: str
    lines: tuple[str, ...]
    proof: weights.Comparison  # of the stored weights with the training state
    seconds: float


class Inputs:
    """What is merged: its tensors, the base that they belong to, and what is known of them."""

    def __init__(self, place: Path, step: int | None, base: str | None) -> None:
        """Open a run folder, or what another tool saved, for the model ``base``. MergeError, CheckpointError."""
        self.held = ExitStack()  # a run that trains does not prune its checkpoint before this is closed
        if (place / MANIFEST).is_file():  # a checkpoint in a run
            place, step = place.resolve().parents[1], read_manifest(place).step
        self.place, self.compute, self.proof, added = place, torch.float32, (torch.tensor([[*PROMPT]]), None), []
        if (place / run_folder.CHECKPOINTS).is_dir() or (place / run_folder.CONFIG).is_file():
            self.step, folder = newest_checkpoint(require_run(place), step)
            self.held.enter_context(hold(folder))
            self.source: weights.Source = OwnCheckpoint(folder)
            manifest, trainer = self.source.manifest, self.source.manifest.trainer
            if base is not None:
                raise ConfigError("A run brings its own base.", f"fullshard merge {place}")
            self.base, self.format = Path(manifest.base_model), "fullshard"
            lora = LoraSection(**trainer["adapter"]) if manifest.method == "lora" else None
            added = trainer.get("add_tokens", [])
            self.compute, self.proof = precision_of(trainer.get("precision", "fp32")).compute, self.source.proof()
            self.files = {folder / name: file.xxh3 for name, file in manifest.files.items()}
        else:
            if step is not None:
                raise ConfigError(f"--step {step} is for run folders; {place} is none.", "Leave it out.")
            self.step, self.source = None, ForeignCheckpoint(place)
            lora, self.format = self.source.lora, self.source.format
            self.files = dict.fromkeys(self.source.files, "")
            if base is None and not (base := getattr(lora, "base_model_name_or_path", None)):
                raise refusal("which_base", place=place)
            self.base = fetch_model(base)
        if not self.base.is_dir():
            raise MergeError(f"The base model {self.base} is gone.", "Put it back at that path, then merge again.")
        self.tokenizer = load_tokenizer(self.base, added) if added else None
        self.names = weights.ModelNames(self.base, lora, added_ids(self.tokenizer, added))
        if isinstance(self.source, ForeignCheckpoint):
            self.names = self.source.take(self.names, lambda new_ids: weights.ModelNames(self.base, lora, new_ids))
        self.adapters, self.moved = weights.read_adapters(self.source, self.names) if lora else (None, 0)
        self.exact = weights.ExactWeights(self.names, self.source, self.adapters)

    def facts(self) -> dict[str, Any]:
        """What merge.json says of the inputs, and how a run read its rows: answers and eval read them the same."""
        data = read_json(self.place / run_folder.CONFIG, optional=True).get("data") if self.step else None
        settings = ("columns", "system", "template_arguments", "loss_on", "max_length")
        return {
            "run": str(self.place.resolve()), "step": self.step, "method": "full" if self.adapters is None else "lora",
            "base_model": str(self.base.resolve()), "base_name": base_name(self.base), "format": self.format,
            "checkpoint_xxh3": {path.name: found or hash_file(path) for path, found in self.files.items()},
            "base_xxh3": {path.name: hash_file(path) for path in sorted(self.base.glob("*.safetensors"))},
            "adapters": self.adapters and len(self.adapters), "adapters_moved": self.adapters and self.moved,
            "settings": {name: data[name] for name in settings if data.get(name) is not None} if data else {},
        }  # fmt: skip


def merge_run(
    run: str | Path, output: str | Path | None = None, step: int | None = None, dtype: str | None = None,
    overwrite: bool = False, progress: Callable[[str], None] = lambda text: None,
    shard_bytes: int | str = weights.SHARD_SIZE, base: str | None = None, check: bool = False,
) -> MergeResult:  # fmt: skip
    """Merge the newest checkpoint of ``run`` (or that of ``step``), or what another tool saved there for the model
    ``base``, into ``output`` (default ``run``/merged, or ``run``_merged), proven or not at all. ``dtype``: fp32, bf16,
    fp16; else the base's. ``check``: prove the merged folder ``run`` again. MergeError, CheckpointError, ModelError."""
    started = time.monotonic()
    if dtype is not None and dtype not in DTYPES:
        raise MergeError(f"dtype {dtype!r} is unknown.", f"One of: {', '.join(DTYPES)}")
    if check:
        return _check(Path(run), started)
    inputs = Inputs(Path(run), step, base)
    place = inputs.place.resolve()
    output = Path(output or (inputs.place / run_folder.MERGED if inputs.step else f"{place}_merged"))
    _refuse_output(output, inputs, overwrite)
    outputs = weights.plan_outputs(inputs.exact, DTYPES.get(dtype))
    num_bytes = sum(tensor.num_bytes for tensor in outputs)
    largest = max((one for one in outputs if one.dtype.is_floating_point), key=lambda one: one.num_bytes)
    stored_dtype = str(largest.dtype).removeprefix("torch.")
    files = sorted(path for path in (*inputs.files, *inputs.base.iterdir()) if path.is_file())
    stamps = [[str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns] for path in files]
    made_from = [version("fullshard"), dtype, shard_bytes, *stamps]
    with unfinished_folder(output, MergeError, "Choose another with --output.", made_from) as unfinished, inputs.held:
        needed = num_bytes - sum(path.stat().st_size for path in unfinished.glob("*.safetensors"))
        if (free := shutil.disk_usage(unfinished).free) < needed:
            raise refusal("no_room", needed=needed / 1e9, parent=output.parent, free=free / 1e9)
        progress("writing weights")
        weight_files = _write(unfinished, outputs, inputs, dtype, shard_bytes)
        copy_tokenizer_files(inputs.base, inputs.place, unfinished)
        if inputs.tokenizer is not None:
            for key in ("is_local", "local_files_only"):  # how it was read here is no fact of the tokenizer
                inputs.tokenizer.init_kwargs.pop(key, None)
            inputs.tokenizer.save_pretrained(unfinished)
        trained_ids = read_json(inputs.place / run_folder.DATA, optional=True).get("stop_ids", ())
        notes = write_configs(inputs.base, unfinished, stored_dtype, trained_ids, inputs.names.vocabulary_size)
        progress("proving")
        if inputs.step is not None:  # not before: what was just read lies in memory still
            read_manifest(inputs.source.folder, hashes=True)
        stored, proof, lines = weights.prove(inputs, unfinished, outputs)
        notes += [f"tensor {name} is ignored by transformers, as in the base" for name in inputs.names.weights.ignored]
        notes += ["the base has no tokenizer files; none copied"] * (not any(unfinished.glob("tokenizer*")))
        facts = inputs.facts() | {"dtype": stored_dtype, "asked_dtype": dtype, "notes": notes} | proof
        name = place.name if output.name == run_folder.MERGED else output.name
        write_card(inputs.base, unfinished, **facts | {"name": name, "proof": stored.line})
        facts["output_xxh3"] = {name: hash_file(unfinished / name) for name in weight_files}
        write_json(unfinished / MERGE_FACTS, facts)
    lines = (*notes, *lines, f"merged: {output} ({len(outputs)} tensors, {num_bytes / 1e6:,.1f} MB, {stored_dtype})")
    return MergeResult(output, inputs.step, stored.line, lines, stored, time.monotonic() - started)


def _write(folder: Path, outputs: weights.Outputs, inputs: Inputs, dtype: str | None, size: int | str) -> list[str]:
    """``write_weights``, of a large model by several processes; what one leaves undone is done, or refused, here."""
    for begun in folder.glob("*.part"):  # by a merge that was killed
        begun.unlink()
    count = min(WRITERS, num_cores()) if sum(tensor.num_bytes for tensor in outputs) >= ALONE_BYTES else 1
    what = [str(inputs.place), inputs.step, None if inputs.step else str(inputs.base), str(folder), dtype, size]
    command = [sys.executable, "-c", f"from {__name__} import be_writer; be_writer()", json.dumps(what)]
    apart = {"start_new_session": True, "stdin": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with ExitStack() as stack:  # leaving it closes their stdin
        children = [stack.enter_context(subprocess.Popen(command, **apart)) for _ in range(1, count)]
        weights.write_weights(folder, outputs, size, alone=count == 1)
        for child in children:
            child.wait()
        return weights.write_weights(folder, outputs, size)


def be_writer() -> None:
    """A child of ``_write``: write files, as long as the parent holds this process's stdin."""
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(1)), daemon=True).start()
    place, step, base, folder, dtype, size = json.loads(sys.argv[1])
    exact = Inputs(Path(place), step, base).exact
    weights.write_weights(Path(folder), weights.plan_outputs(exact, DTYPES.get(dtype)), size, alone=False)


def _refuse_output(output: Path, inputs: Inputs, overwrite: bool) -> None:
    """MergeError where ``output`` would replace an input, or a folder that no merge made."""
    place, exists, other = output.resolve(), os.path.lexists(output), "choose another with --output."
    if any(place in (one, *one.parents) for one in (inputs.base.resolve(), inputs.source.folder.resolve())):
        raise MergeError(f"{output} is where the base model or the checkpoint lies.", other.capitalize())
    if exists and not overwrite:
        raise MergeError(f"{output} exists already.", f"Replace it with --overwrite, or {other}")
    if exists and not (output / MERGE_FACTS).is_file():
        raise MergeError(f"{output} was not made by a merge: no {MERGE_FACTS}.", other.capitalize())


def _check(folder: Path, started: float) -> MergeResult:
    """Prove a merged folder again: hashes of its files and of its inputs, every tensor, logits."""
    if not (facts := read_json(folder / MERGE_FACTS, optional=True)):
        raise MergeError(f"{folder} was not made by a merge: no {MERGE_FACTS}.", "Give a merged folder.")
    inputs = Inputs(Path(facts["run"]), facts["step"], facts["base_model"] if facts["step"] is None else None)
    now = {path.name: path for path in [*inputs.files, *inputs.base.glob("*.safetensors")]}
    then = facts["checkpoint_xxh3"] | facts["base_xxh3"]
    files = [(now.get(name, folder / name), wanted) for name, wanted in then.items()]
    for path, wanted in [*files, *((folder / name, wanted) for name, wanted in facts["output_xxh3"].items())]:
        if not path.is_file() or hash_file(path) != wanted:
            raise refusal("not_as_merged", path=path)
    with inputs.held:
        outputs = weights.plan_outputs(inputs.exact, DTYPES.get(facts["asked_dtype"]))
        stored, _, lines = weights.prove(inputs, folder, outputs)
    lines.append(f"checked: {folder} is what was merged; {len(files)} input files unchanged")
    return MergeResult(folder, inputs.step, stored.line, tuple(lines), stored, time.monotonic() - started)


def copy_tokenizer_files(base: Path, trained: Path, folder: Path) -> None:
    """Copy tokenizer files, chat templates, licence texts as they are; over the base's those of a trained tokenizer."""
    for home in [base, trained] if any(trained.glob("tokenizer*")) else [base]:
        for path in (path for pattern in SIDE_FILES for path in home.glob(pattern) if path.is_file()):
            (target := folder / path.relative_to(home)).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)


def write_configs(base: Path, folder: Path, dtype: str, trained_ids: Iterable[int], vocabulary_size: int) -> list[str]:
    """Write config.json and generation_config.json with the tensors' dtype and every stop id; a line a change."""
    config = read_json(base / "config.json")
    known = {key: config[key] for key in ("bos_token_id", "pad_token_id") if config.get(key) is not None}
    generation = read_json(base / GENERATION_CONFIG, optional=True) or known
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
    """Write README.md: base, licence (none: "see the base model"); ``facts``: merge.json's, name, line of the proof."""
    card, front = _front_matter(base), {"library_name": "transformers", "pipeline_tag": "text-generation"}
    front |= {key: card.get(key) for key in ("license", "license_name", "license_link", "language")}
    data, template = ModelCardData(base_model=base_name(base), **front), Path(__file__).with_name("model_card.md")
    ModelCard.from_template(data, template, version=version("fullshard"), **facts).save(folder / "README.md")
