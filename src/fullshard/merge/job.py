"""The merge: run folder -> an ordinary Hugging Face folder, proven before it is published."""

import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fullshard import run_folder
from fullshard.checkpoint.format import hash_file, verify_checkpoint
from fullshard.checkpoint.ranges import OwnCheckpoint
from fullshard.data.chat import added_ids, load_tokenizer
from fullshard.errors import MergeError, refusal
from fullshard.merge.adapter import Adapter, ModelNames, read_adapters
from fullshard.merge.proof import Comparison, prove
from fullshard.merge.side_files import base_name, copy_tokenizer_files, main_dtype, write_card, write_configs
from fullshard.merge.writer import SHARD_BYTES, ExactWeights, plan_outputs, write_weights
from fullshard.model.load import MERGE_FACTS, unfinished_folder
from fullshard.run_folder import newest_checkpoint, read_json, require_run, write_json

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class MergeResult:
    """A published merge. ``line`` is the proof; ``to_text()`` is all there is to print."""

    folder: Path
    step: int
    line: str
    lines: tuple[str, ...]
    proof: Comparison  # of the stored weights with the training state
    seconds: float

    def to_text(self) -> str:
        """The lines to print: adapters that moved, what had to be changed, the proof, the folder."""
        return "\n".join(self.lines)


def merge_run(
    run: str | Path, output: str | Path | None = None, step: int | None = None, dtype: str | None = None,
    overwrite: bool = False, progress: Callable[[str], None] = lambda text: None, shard_bytes: int = SHARD_BYTES,
) -> MergeResult:  # fmt: skip
    """Merge the newest checkpoint of ``run`` (or that of ``step``) into ``output`` (default ``run``/merged), whole and
    proven or not at all. ``dtype``: fp32, bf16, fp16 for the base's own. MergeError, CheckpointError, ModelError."""
    started = time.monotonic()
    if dtype is not None and dtype not in DTYPES:
        raise MergeError(f"dtype {dtype!r} is unknown.", f"One of: {', '.join(DTYPES)}")
    run = require_run(Path(run))
    step, folder = newest_checkpoint(run, step)
    output = Path(output) if output is not None else run / run_folder.MERGED
    checkpoint = OwnCheckpoint(folder)
    manifest, trainer = checkpoint.manifest, checkpoint.manifest.trainer
    base, is_lora = Path(manifest.base_model), manifest.method == "lora"
    if output.resolve() in (base.resolve(), *base.resolve().parents):
        raise MergeError(f"{output} is where the base model lies.", "Choose another folder with --output.")
    if output.exists() or output.is_symlink():
        other = "choose another with --output."
        if not overwrite:
            raise MergeError(f"{output} exists already.", f"Replace it with --overwrite, or {other}")
        if not (output / MERGE_FACTS).is_file():
            raise MergeError(f"{output} was not made by a merge: no {MERGE_FACTS}.", other.capitalize())
    if not base.is_dir():
        raise MergeError(f"The base model {base} of this run is gone.", "Put it back at that path, then merge again.")
    tokens, logits = checkpoint.proof()
    progress("checking the checkpoint")
    verify_checkpoint(folder)
    added = trainer.get("add_tokens", [])
    tokenizer = load_tokenizer(base, added) if added else None
    names = ModelNames(base, trainer["adapter"] if is_lora else None, added_ids(tokenizer, added))
    adapters = read_adapters(checkpoint, names) if is_lora else None
    exact = ExactWeights(names, checkpoint, adapters)
    outputs = plan_outputs(exact, DTYPES[dtype] if dtype else None)
    num_bytes, stored_dtype = sum(tensor.num_bytes for tensor in outputs), main_dtype(outputs)
    with unfinished_folder(output, MergeError, "Choose another with --output.") as unfinished:
        if (free := shutil.disk_usage(unfinished).free) < num_bytes:
            raise refusal("no_room", needed=num_bytes / 1e9, parent=output.parent, free=free / 1e9)
        progress("writing weights")
        weight_files = write_weights(unfinished, outputs, shard_bytes)
        copied = copy_tokenizer_files(base, unfinished)
        if tokenizer is not None:
            for key in ("is_local", "local_files_only"):  # how it was read here is no fact of the tokenizer
                tokenizer.init_kwargs.pop(key, None)
            tokenizer.save_pretrained(unfinished)
        trained_ids = read_json(run / run_folder.DATA, optional=True).get("stop_ids", ())
        notes = write_configs(base, unfinished, stored_dtype, trained_ids, names.vocabulary_size)
        progress("proving")
        stored, unrounded, ignored = prove(unfinished, outputs, exact, tokens, logits, trainer.get("precision", "fp32"))
        notes += [f"tensor {name} is ignored by transformers, as in the base; copied" for name in ignored]
        if not any(name.startswith("tokenizer") for name in copied):
            notes.append("the base has no tokenizer files; none copied")
        name = run.resolve().name if output.name == run_folder.MERGED else output.name
        write_card(base, unfinished, name, manifest, stored_dtype, stored.line)
        record = _record(run, checkpoint, base, adapters) | {"dtype": stored_dtype, "notes": notes}
        record |= {"proof": asdict(stored), "proof_unrounded": asdict(unrounded)}
        record["output_blake2b"] = {name: hash_file(unfinished / name) for name in weight_files}
        write_json(unfinished / MERGE_FACTS, record)
    published = f"merged: {output} ({len(outputs)} tensors, {num_bytes / 1e6:,.1f} MB, {stored_dtype})"
    if adapters:
        notes.insert(0, f"adapters: {record['adapters_moved']} of {len(adapters)} have moved (B A is not zero)")
    return MergeResult(output, step, stored.line, (*notes, stored.line, published), stored, time.monotonic() - started)


def _record(run: Path, checkpoint: OwnCheckpoint, base: Path, adapters: dict[str, Adapter] | None) -> dict[str, Any]:
    """What merge.json says of the inputs, and how the run read its rows: answers and eval read them the same."""
    manifest, data = checkpoint.manifest, read_json(run / run_folder.CONFIG).get("data") or {}
    settings = ("columns", "system", "template_arguments", "loss_on", "max_length")
    return {
        "run": str(run.resolve()), "step": manifest.step, "method": manifest.method,
        "base_model": str(base), "base_name": base_name(base),
        "checkpoint_blake2b": {name: facts.blake2b for name, facts in manifest.files.items()},
        "base_blake2b": {path.name: hash_file(path) for path in sorted(base.glob("*.safetensors"))},
        "adapters": len(adapters) if adapters else None,
        "adapters_moved": sum(adapter.has_moved for adapter in adapters.values()) if adapters else None,
        "settings": {name: data[name] for name in settings if data.get(name) is not None},
    }  # fmt: skip
