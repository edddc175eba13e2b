"""A merged model's weights by blocks of rows: LoRA folded into the base's (W + scale * B A, fp32; DoRA: m * V / |V|),
written, read again, proven bit for bit and by the logits of fixed tokens, *unrounded* and *as stored*. Shapes as in
model/adapters.py; embeddings: W (tokens, width), A (rank, tokens), B (width, rank); T positions, V vocabulary."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from functools import lru_cache, partial
from mmap import mmap
from pathlib import Path
from typing import Any
import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import nn
from fullshard.checkpoint.ranges import OwnCheckpoint
from fullshard.errors import Blame, MergeError, read_table, refusal
from fullshard.frozen import Frozen
from fullshard.merge.readers.foreign import ForeignCheckpoint
from fullshard.model.adapters import adapter_places, inject_adapters
from fullshard.model.blocks import PEFT_PREFIX, exchanged, find_blocks, is_adapter, stored_name
from fullshard.model.load import DTYPE_NAMES, INDEX, FileTensor, WeightFiles, build_on_meta
from fullshard.model.weight_map import WeightMap

ASK_BASE = "Is this the base that the run was trained on?"
Source = OwnCheckpoint | ForeignCheckpoint  # ``weights`` by name, ``read(name, start, stop)``
Outputs, Adapters = list["OutputTensor"], dict[str, Callable[[], "Adapter"]]
SHARD_SIZE = "1GB"
FACTS = read_table("merge/proof.yaml")
MEAN_KL = 1e-3  # nats: of the folder from the training state, as it computed or as its masters are
BLOCK_ELEMENTS = 1 << 18  # 1 MB in fp32: larger ones leave holes in glibc's heap


class ModelNames:
    """Names and adapters of a model's parameters, and its weights in the base's files."""

    def __init__(self, base: Path, lora: Any = None, new_ids: tuple[int, ...] = ()) -> None:
        """Build ``base``, or ModelError; ``lora``: a recipe's section or PEFT's config; ``new_ids``: added tokens."""
        self.model = model = build_on_meta(base, max(new_ids, default=-1) + 1)
        self.weights = WeightMap(model, WeightFiles(base), str(base), new_ids)
        self.vocabulary_size: int = model.config.get_text_config().vocab_size
        parameters = dict(model.named_parameters(remove_duplicate=False))  # tied ones under each of their names
        self.canonical = {name: self.weights.aliases.get(name, (name,))[0] for name in parameters}  # -> trained under
        self.vocabulary = {self.canonical[name] for name in self.weights.vocabulary}
        self.frozen = {name for name, parameter in parameters.items() if not parameter.requires_grad}  # by the model
        self.places, self.adapter_shapes = {}, {}  # by the names of modules, and of tensors, in PEFT's files
        if lora:
            inject_adapters(model, lora)
            self.places = {PEFT_PREFIX + place.module: place for place in adapter_places(model)}
            added = ((name, value) for name, value in model.named_parameters() if is_adapter(name))
            self.adapter_shapes = {stored_name(name): tuple(value.shape) for name, value in added}


class Adapter(Frozen):
    """The update of one weight, fp32: ``left`` @ ``right`` * ``scale``; stacked experts have one dimension in front."""

    left: torch.Tensor  # (rows, rank)
    right: torch.Tensor  # (rank, columns)
    scale: float
    has_moved: bool  # from its start, B A = 0
    factor: torch.Tensor | None = None  # (rows, 1) or (1, columns): multiplies the sum (DoRA)

    def fold(self, weight_rows: torch.Tensor, first_row: int) -> torch.Tensor:
        """Rows ``first_row ...`` of the folded weight, fp32; of ``weight_rows`` (rows, ...) in float64 so."""
        rows = slice(first_row, first_row + weight_rows.shape[0])
        left, right = self.left[rows], self.right[rows] if self.right.dim() == 3 else self.right
        factor = self.factor[rows] if self.factor is not None and len(self.factor) > 1 else self.factor
        again = weight_rows.dtype == torch.float64  # for the proof
        product = left.double() @ right.double() if again else left @ right
        folded = torch.add(weight_rows if again else weight_rows.float(), product, alpha=self.scale)
        return folded if factor is None else folded.mul_(factor)


def read_adapters(checkpoint: Source, names: ModelNames) -> tuple[Adapters, int]:
    """What reads an adapter, by the parameter it changes; how many moved. MergeError: one is unfit, or none moved."""
    if not (found := [name for name in checkpoint.weights if ".lora_" in name or name.startswith(PEFT_PREFIX)]):
        raise MergeError(f"{checkpoint.folder} holds no adapter tensors.", "Use another step, or train again.")
    for name in found:
        if (shape := checkpoint.weights[name].shape) != (expected := names.adapter_shapes.get(name)):
            raise MergeError(f"{name} has shape {shape}; this base needs {expected or 'no such adapter'}.", ASK_BASE)
    if absent := [name for name in names.adapter_shapes if name not in checkpoint.weights]:
        raise MergeError(f"{absent[0]} is missing ({len(absent)} such tensors).", "Use another step.")
    adapters, moved, read = {}, 0, lru_cache(1)(partial(_read_one, checkpoint, names))
    for module, place in names.places.items():
        if place.parameter in names.weights.aliases:
            raise refusal("shared_weight", module=module, weight=place.parameter.removesuffix(".weight"))
        adapters[names.canonical[place.parameter]] = partial(read, module)
        moved += read(module).has_moved
    if not moved:
        raise refusal("never_moved", count=len(adapters), place=checkpoint.folder)
    return adapters, moved


def _read_one(checkpoint: Source, names: ModelNames, module: str) -> Adapter:
    """One adapter; it has moved where its B A is not zero (an embedding starts from A = 0, the others from B = 0)."""
    place = names.places[module]
    suffixes = ("embedding_A", "embedding_B") if place.layout == "embedding" else ("A.weight", "B.weight")
    stored = [f"{module}.lora_{suffix}" for suffix in suffixes]
    down, up = (checkpoint.read(name).view(names.adapter_shapes[name]).float() for name in stored)
    if place.layout in ("experts", "experts_in_out"):
        experts = names.weights.shapes[place.parameter][0]
        down = down.reshape(experts, -1, down.shape[-1])  # (experts, rank, in)
        up = up.reshape(up.shape[0], -1, experts).permute(2, 0, 1)  # (experts, out, rank)
    turned = place.layout not in ("linear", "experts")
    sides = (down.transpose(-2, -1), up.transpose(-2, -1)) if turned else (up, down)
    adapter = Adapter(*sides, place.scale, has_moved=bool(up.count_nonzero() and down.count_nonzero()))
    if not place.has_magnitude:
        return adapter
    magnitude, over = checkpoint.read(f"{module}.lora_magnitude_vector").float(), int(place.layout != "conv1d")
    whole = adapter.fold(names.weights.read(place.parameter).view(names.weights.shapes[place.parameter]), 0)
    return replace(adapter, factor=(magnitude / whole.norm(dim=over)).unsqueeze(over))


@contextmanager
def one_thread() -> Iterator[None]:
    """Blocks are too small to be shared: on busy cores torch's threads wait for each other, 20 s instead of 3 (LOG)."""
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        yield


class OutputTensor(Frozen):
    """A tensor to write. ``blocks()`` yields its flattened values in order, exact (before rounding to ``dtype``)."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    blocks: Callable[[], Iterator[torch.Tensor]]
    exact_dtype: torch.dtype  # of the blocks; equal to dtype where writing rounds nothing
    parameters: tuple[str, ...] = ()  # or buffers, that it is a part of
    num_bytes = property(lambda self: math.prod(self.shape) * self.dtype.itemsize)  # in the file


def row_blocks(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Ranges [start, stop) of the elements of whole rows, at most BLOCK_ELEMENTS (at least one row), of a tensor."""
    size, width = math.prod(shape), max(1, math.prod(shape[1:]))
    step = width * max(1, BLOCK_ELEMENTS // width)
    return ((start, min(start + step, size)) for start in range(0, size, step))


class ExactWeights:
    """The exact value of every parameter after training: as trained, folded in fp32, or the base's own."""

    def __init__(self, names: ModelNames, checkpoint: Source, adapters: Adapters | None) -> None:
        """``adapters``: None for a full fine-tuning, which must hold all parameters. MergeError: one does not fit."""
        self.names, self._checkpoint, self.folded = names, checkpoint, adapters or {}
        self._trained = {name for name in checkpoint.weights if ".lora_" not in name}
        for name in sorted(self._trained):
            found, shape = tuple(checkpoint.weights[name].shape), names.weights.shapes.get(name)
            if names.canonical.get(name, name) != name or found != shape:
                expected = f"it has shape {shape} there" if shape else "it has no such parameter"
                raise MergeError(f"{name} {found} does not fit the base model: {expected}.", ASK_BASE)
        changed = self._trained | self.folded.keys()
        self.changed = {name for name, canonical in names.canonical.items() if canonical in changed}
        wanted = [name for name in names.canonical.values() if name not in names.frozen]
        if adapters is None and (absent := dict.fromkeys(name for name in wanted if name not in self._trained)):
            raise refusal("lacking", names=", ".join([*absent][:5]), count=len(absent))

    def read(self, name: str, start: int, stop: int, compute: torch.dtype | None = None) -> torch.Tensor:
        """Elements [start, stop), whole rows, flattened: exact, or from weights in ``compute`` as training computed."""
        canonical, weights = self.names.canonical.get(name, name), self.names.weights
        source, stored = (self._checkpoint, canonical) if canonical in self._trained else (weights, name)
        values, shape = source.read(stored, start=start, stop=stop).to(compute), weights.shapes[name]
        if canonical not in self.folded:
            return values
        return self.folded[canonical]().fold(values.view(-1, *shape[1:]), start // math.prod(shape[1:])).reshape(-1)

    def blocks(self, name: str) -> Iterator[torch.Tensor]:
        """The flattened exact values in order, a block of rows at a time."""
        return (self.read(name, *block) for block in row_blocks(self.names.weights.shapes[name]))

    def unmerged(self, name: str, start: int, stop: int) -> torch.Tensor:
        """As ``read``, of a parameter of the model that ``names`` wrapped in adapters: nothing is folded."""
        stored = self.names.canonical.get(plain := stored_name(name), plain)
        is_saved = is_adapter(name) or stored in self._trained
        return (self._checkpoint if is_saved else self.names.weights).read(stored, start=start, stop=stop)


def plan_outputs(exact: ExactWeights, dtype: torch.dtype | None) -> Outputs:
    """One OutputTensor per name in the base's weight files; ``dtype`` (None: the base's own) is that of floats."""
    weights, outputs = exact.names.weights, []
    for name, tensor in weights.files.tensors.items():
        stored_dtype = dtype if dtype and tensor.dtype.is_floating_point else tensor.dtype
        parameters = tuple(group.outputs) if (group := weights.groups.get(name)) else ()
        changed = not exact.changed.isdisjoint(parameters)
        if group and group.converter is None:
            shape, blocks = weights.shapes[parameters[0]], partial(exact.blocks, parameters[0])  # grown by new tokens
        else:
            read = partial(weights.restore, name, exact.blocks) if changed else tensor.read
            shape, blocks = tensor.shape, partial(lambda read: iter([read().reshape(-1)]), read)
        exact_dtype = torch.float32 if changed else tensor.dtype
        outputs.append(OutputTensor(name, shape, stored_dtype, blocks, exact_dtype, parameters))
    return outputs


@one_thread()
def write_weights(folder: Path, tensors: Outputs, size: int | str = SHARD_SIZE, alone: bool = True) -> list[str]:
    """Write ``tensors`` in Hugging Face's layout, but files that are there; the names of all. Not ``alone``: files that
    another process has begun are left to it. MergeError: not finite."""
    by_name = {tensor.name: tensor for tensor in tensors}
    sizes = {"get_storage_size": lambda tensor: tensor.num_bytes, "max_shard_size": size}
    with Blame(MergeError, f"--max-shard-size {size} cannot be used", "A number and its unit: 4GB, 500MB"):
        plan = split_state_dict_into_shards_factory(by_name, filename_pattern="model{suffix}.safetensors", **sizes)
    for file, names in plan.filename_to_tensors.items():
        with suppress(FileExistsError):  # another process has begun it
            if not (folder / file).is_file():  # else of a merge that was killed: a file gets its name when it is whole
                _write_file(folder / f"{file}.part", [by_name[name] for name in names], "wb" if alone else "xb")
                (folder / f"{file}.part").replace(folder / file)
    if not plan.is_sharded:
        return list(plan.filename_to_tensors)
    index = {"metadata": plan.metadata, "weight_map": dict(sorted(plan.tensor_to_filename.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return [*plan.filename_to_tensors, INDEX]


def _write_file(path: Path, tensors: Outputs, mode: str) -> None:
    tensors = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    header, position = {"__metadata__": {"format": "pt"}}, 0
    for tensor in tensors:
        place = [position, position + tensor.num_bytes]
        facts = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}
        header[tensor.name], position = facts, place[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, mode) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            for block in tensor.blocks():
                stored = block.to(tensor.dtype).reshape(-1).contiguous()
                checked = stored.dtype.is_floating_point and stored.dtype.itemsize > 1 and stored.numel()
                if checked and not torch.stack(torch.aminmax(stored)).isfinite().all():  # 20 x as fast as on all
                    raise refusal("not_finite", name=tensor.name, dtype=str(tensor.dtype).removeprefix("torch."))
                file.write(memoryview(stored.view(torch.uint8).numpy()))
        assert file.tell() == 8 + len(text) + position, f"{path}: the blocks of a tensor are not its size"


class Comparison(Frozen):
    """Two sets of logits for the same tokens, compared."""

    max_difference: float  # logits
    relative: float  # max_difference / range of the training state's logits
    same_top: int  # positions whose most likely token is the same
    num_positions: int
    mean_kl: float  # nats a position, training state against merged model
    line = property(lambda self: FACTS["line"].format(**vars(self)))  # the proof in one line


def compare_logits(reference: torch.Tensor, logits: torch.Tensor) -> Comparison:
    """Compare ``logits`` (T, V) with the training state's ``reference`` (T, V). Not finite: NaN, never close."""
    reference, logits = reference.double(), logits.double()
    extent = max((reference.max() - reference.min()).item(), 1e-30)
    difference = (reference - logits).abs().max().item()
    same_top = int((reference.argmax(-1) == logits.argmax(-1)).sum())
    kl = nn.functional.kl_div(logits.log_softmax(-1), reference.log_softmax(-1), reduction="batchmean", log_target=True)
    return Comparison(difference, difference / extent, same_top, len(reference), kl.clamp(min=0).item())


@torch.no_grad()
def logits_by_block(model: nn.Module, read: Callable[..., torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """Logits (T, V), fp32, of ``model`` (meta) for ``tokens`` (1, T): a block at a time, of the embedding the tokens'
    rows, of a plain head a few rows at a time. ``read(name, start, stop)``: elements of a flattened parameter."""
    names = {module: name for name, module in model.named_modules()}
    embedding = getattr(model.get_input_embeddings(), "base_layer", model.get_input_embeddings())
    ids, width, head = tokens.unique(), embedding.weight.shape[1], model.get_output_embeddings()
    rows = [read(f"{names[embedding]}.weight", index * width, (index + 1) * width) for index in ids.tolist()]
    embedding.weight, embedding.padding_idx = nn.Parameter(torch.stack(rows).float()), None

    def fetch(name: str, value: nn.Parameter) -> torch.Tensor:
        made = torch.frombuffer(mmap(-1, 4 * value.numel()), dtype=torch.float32)  # glibc's heap would keep holes
        for start, stop in row_blocks(value.shape) if value.is_meta else ():
            made[start:stop] = read(name, start, stop)
        return made.view(value.shape) if value.is_meta else value

    def by_rows(hidden: torch.Tensor) -> torch.Tensor:
        logits, width = hidden.new_empty(*hidden.shape[:-1], head.weight.shape[0]), head.weight.shape[1]
        for start, stop in row_blocks(head.weight.shape):  # results of their own between blocks would make holes
            rows = read(f"{names[head]}.weight", start, stop).float().view(-1, width)
            logits[..., start // width : stop // width] = nn.functional.linear(hidden, rows)
        return logits if head.bias is None else logits + fetch(f"{names[head]}.bias", head.bias)

    hook = embedding.register_forward_pre_hook(lambda _, given: torch.searchsorted(ids, given[0]))
    with hook, exchanged(model, [*find_blocks(model)[1], head], fetch):
        if type(head) is nn.Linear:
            head.forward = by_rows
        return model.eval()(input_ids=tokens, use_cache=False).logits[0]


@torch.no_grad()
@one_thread()
def prove(inputs: Any, folder: Path, outputs: Outputs) -> tuple[Comparison, dict[str, Any], list[str]]:
    """Read every tensor of ``folder`` again: each must be, bit for bit, what the exact one of ``inputs`` (of a job)
    rounds to. Then compare logits on their tokens (1, T) with their reference (T, V; None: of the unmerged tensors),
    fp32 products of weights in their ``compute``: of the folder, which is returned, and of those weights here. With
    what merge.json says of it, also how far each tensor is from the base, and the lines to print. MergeError."""
    exact, names, (tokens, reference) = inputs.exact, inputs.names, inputs.proof
    weights = WeightMap(model := build_on_meta(folder), WeightFiles(folder), str(folder))
    weights.load_buffers(model)
    written, base = weights.files.tensors, names.weights.files.tensors
    if strange := written.keys() ^ base.keys():
        raise MergeError(f"{folder} has not the tensors of its base: {len(strange)}, first {min(strange)}.", ASK_BASE)
    if reference is None:
        names.weights.load_buffers(names.model)
        reference = logits_by_block(names.model, exact.unmerged, tokens)
    if (size := reference.shape[1]) != (known := model.config.get_text_config().vocab_size):
        raise MergeError(f"The proof has logits for {size} tokens, the merged model has {known}.", ASK_BASE)
    changes = {output.name: _compare_bits(output, written[output.name], base[output.name]) for output in outputs}
    for name, block in ((each, block) for each in exact.folded for block in row_blocks(names.weights.shapes[each])):
        folded, again = (exact.read(name, *block, compute=dtype) for dtype in (None, torch.float64))
        if not (folded - again).abs_().max() <= FACTS["fold_relative"] * again.abs_().max():
            raise refusal("folded_wrong", name=name)
    found = logits_by_block(model, weights.read, tokens)
    is_same = inputs.compute == torch.float32 and all(output.dtype == output.exact_dtype for output in outputs)
    again = found if is_same else logits_by_block(model, partial(exact.read, compute=inputs.compute), tokens)
    stored, computed = compare_logits(reference, found), compare_logits(reference, again)
    if not computed.relative <= FACTS["fp32_relative"]:
        raise refusal("other_state", line=computed.line)
    masters = partial(logits_by_block, model, exact.read, tokens)
    if not (stored.mean_kl <= MEAN_KL or compare_logits(masters(), found).mean_kl <= MEAN_KL):
        raise refusal("rounding", line=stored.line)
    changed = [output for output in outputs if not exact.changed.isdisjoint(output.parameters)]
    still = [output.name for output in changed if not changes[output.name]]
    count = len(inputs.adapters or ())
    lines = [f"adapters: {inputs.moved} of {count} have moved (B A is not zero)"] if count else []
    lines.append(f"{len(outputs)} tensors read again, each bit for bit the rounding of its exact value")
    lines += [f"{len(still)} of {len(changed)} trained tensors equal the base's, first {still[0]}"] if still else []
    facts = {"proof": asdict(stored), "proof_computed": asdict(computed), "change_norms": changes}
    return stored, facts, [*lines, stored.line]


def _compare_bits(output: OutputTensor, written: FileTensor, base: FileTensor) -> float:
    """How far (Euclidean) a tensor's old rows are from the base's. MergeError unless it is written, bit for bit."""
    position, squares = 0, 0.0
    for block in output.blocks():
        stop = position + block.numel()
        if not torch.equal(written.read(position, stop), block.to(output.dtype)):
            raise MergeError(f"{output.name} in the merged folder is not what was written.", "Check the disk.")
        known = min(stop, math.prod(base.shape)) - position
        if output.exact_dtype.is_floating_point and known > 0:
            old = base.read(position, position + known)
            squares += float((block[:known].float() - old.float()).square_().sum(dtype=torch.float64))
        position = stop
    return math.sqrt(squares)
