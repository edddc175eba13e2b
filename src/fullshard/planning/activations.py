"""What autograd keeps of a model's blocks for backward, traced on the family's own code with fake tensors: shapes and
storages are real, values do not exist, so that a model of any size is traced in a second or two."""

from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import masking_utils
from fullshard.device import varlen_attention
from fullshard.frozen import Frozen
from fullshard.model.attention import BY_DOCUMENT, Documents
from fullshard.model.blocks import find_blocks, find_decoder, is_adapter
from fullshard.train.precision import Precision


class Kept(Frozen):
    """Bytes kept for backward, linear in the rows: ``fixed`` + ``row`` x rows of the traced length."""

    row: int = 0
    fixed: int = 0


class Trace(Frozen):
    """What a rank keeps of a micro-batch. ``again``: of a block that is recomputed, beside its input."""

    length: int  # tokens of a row
    blocks: tuple[Kept, ...]
    again: tuple[Kept, ...]
    around: Kept  # outside of blocks: embedding, tables and masks that blocks share, last norm

    def bytes_of(self, tokens: int, parts: tuple[Kept, ...]) -> tuple[int, str]:
        """Bytes of ``parts`` in a micro-batch of rows of the traced length, ``tokens`` together; and the formula."""
        row, fixed = sum(part.row for part in parts), sum(part.fixed for part in parts)
        formula = f"{tokens:,} tokens x {row:,} / {self.length:,}" + f" + {fixed:,}" * bool(fixed)
        return tokens * row // self.length + fixed, formula


def trace_model(model: nn.Module, precision: Precision, length: int, packing: bool, kind: str) -> Trace:
    """Trace the forward in training of a model on meta (changed in place), adapters included, on rows of ``length``
    tokens. ``packing``: documents of that length share a sequence. ``kind``: of device; traced as on a CPU, whose fused
    attention keeps what others keep. Raises what the family's code raises where it needs values."""
    varlen = varlen_attention(kind, precision.compute) is not None
    with FakeTensorMode(allow_non_fake_inputs=True):
        made: dict[int, nn.Parameter] = {}
        for path, module in model.train().named_modules():
            for name, weight in module._parameters.items():
                dtype = precision.master if is_adapter(f".{path}.{name}") else precision.compute
                if weight is not None and id(weight) not in made:  # tied ones are one
                    fake = torch.empty(weight.shape, dtype=dtype, device="cpu")
                    made[id(weight)] = nn.Parameter(fake, requires_grad=weight.requires_grad)
                module._parameters[name] = weight if weight is None else made[id(weight)]
        counts = zip(*(kept_bytes(model, length, rows, packing, varlen) for rows in (2, 3)), strict=True)
    whole, again = (tuple(Kept(b - a, 3 * a - 2 * b) for a, b in zip(*pair, strict=True)) for pair in counts)
    return Trace(length, whole[:-1], again, whole[-1])


def kept_bytes(model: nn.Module, length: int, rows: int, packing: bool, varlen: bool) -> tuple[list[int], list[int]]:
    """Bytes that a forward keeps, each storage once, where it was first saved: by block and, last, outside of them;
    and by block without its input. Of blocks that are alike two are run, and count for the others."""
    blocks, decoder = list(find_blocks(model)[1]), find_decoder(model)
    saved = {weight.untyped_storage()._cdata: weight for weight in model.parameters()}
    sizes, inputs, place = [0] * (len(blocks) + 1), [0] * len(blocks), len(blocks)  # place: of what is saved now
    forwards, ran = [block.forward for block in blocks], {}  # ran: of each kind the (number, output) of two

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in saved:
            saved[storage._cdata] = tensor  # it stays, so that no other takes its place
            sizes[place] += storage.nbytes()
        return tensor

    def run(number: int, *given: Any, **named: Any) -> Any:
        nonlocal place
        hidden, alike = given[0] if given else named["hidden_states"], ran.setdefault(_kind_of(blocks[number]), [])
        if len(alike) == 2:
            twin, output = alike[1]
            sizes[number], inputs[number] = sizes[twin], inputs[twin]
            return (hidden, *output[1:]) if isinstance(output, tuple) else hidden
        is_known, place = hidden.untyped_storage()._cdata in saved, number
        output, place = forwards[number](*given, **named), len(blocks)
        inputs[number] = hidden.nbytes * (not is_known and hidden.untyped_storage()._cdata in saved)
        alike.append((number, output))
        return output

    shape, given = (rows, length), {}
    if packing and model.config._attn_implementation == BY_DOCUMENT:
        lengths = [rows * length] if varlen else [length] * rows  # one kernel takes all, as if they were one document
        shape, given = (1, rows * length), {"documents": Documents([lengths], unmasked=varlen)}
    for number, block in enumerate(blocks):
        block.forward = partial(run, number)
    # Whether positions begin anew, so that a mask is needed, is read from their values: fake ones always do.
    known = nullcontext() if packing else patch.object(masking_utils, "find_packed_sequence_indices", lambda _: None)
    with known, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        decoder(input_ids=torch.zeros(shape, dtype=torch.long, device="cpu"), use_cache=False, **given)
    for block in blocks:
        del block.forward
    return sizes, [size - known for size, known in zip(sizes, inputs, strict=False)]


def _kind_of(block: nn.Module) -> str:
    """The same for blocks that do the same: classes, plain attributes and shapes of the weights."""
    found: list[Any] = []
    for module in block.modules():
        plain = {name: value for name, value in vars(module).items() if isinstance(value, int | float | str)}
        for own in ("layer_idx", "layer_id", "layer_number"):  # in which alike blocks differ
            plain.pop(own, None)
        found.append((type(module), plain, [weight.shape for weight in module.parameters(recurse=False)]))
    return repr(found)
