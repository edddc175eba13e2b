"""Prove that a merged folder is the training state: every tensor, bit for bit, and the proof tokens' logits in plain
transformers, fp32 on the CPU, a block at a time; *unrounded*, from the exact values, and *as stored*. Shapes: T
positions, V vocabulary. Range: largest minus smallest logit of the training state."""

import math
from collections.abc import Callable
from pathlib import Path
import torch
from accelerate.hooks import attach_align_device_hook, remove_hook_from_submodules
from torch import nn
from fullshard.errors import MergeError, refusal
from fullshard.frozen import Frozen
from fullshard.merge.adapter import ASK_BASE
from fullshard.merge.writer import ExactWeights, OutputTensor, one_thread
from fullshard.model.blocks import find_blocks
from fullshard.model.load import FileTensor, WeightFiles, build_on_meta
from fullshard.model.weight_map import WeightMap

FP32_RELATIVE = 1e-4  # of the range: the largest difference, unrounded, where training computed in fp32
COMPUTED_KL, STORED_KL = 1e-2, 1e-3  # nats: the mean divergence where it did not; of what is stored from what is exact


class Comparison(Frozen):
    """Two sets of logits for the same tokens, compared."""

    max_difference: float  # logits
    relative: float  # max_difference / range of the training state's logits
    same_top: int  # positions whose most likely token is the same
    num_positions: int
    mean_kl: float  # nats a position, training state against merged model

    @property
    def line(self) -> str:
        """The proof in one line."""
        difference = f"largest logit difference {self.max_difference:.2g} ({self.relative:.2%} of the range)"
        same = f"same top token at {self.same_top} of {self.num_positions} positions"
        return f"proof: {difference}, {same}, mean KL {self.mean_kl:.1e}"


def compare_logits(reference: torch.Tensor, logits: torch.Tensor) -> Comparison:
    """Compare ``logits`` (T, V) with the training state's ``reference`` (T, V). Not finite: NaN, never close."""
    reference, logits = reference.double(), logits.double()
    extent = max((reference.max() - reference.min()).item(), 1e-30)
    difference = (reference - logits).abs().max().item()
    same_top = int((reference.argmax(-1) == logits.argmax(-1)).sum())
    log_p, log_q = reference.log_softmax(-1), logits.log_softmax(-1)
    divergence = (log_p.exp() * (log_p - log_q)).sum(-1).mean().clamp(min=0).item()
    return Comparison(difference, difference / extent, same_top, len(reference), divergence)


def is_close(comparison: Comparison, low_precision: bool) -> bool:
    """Whether the difference is what fp32 summation order (or, ``low_precision``, a forward in 16 bits) explains."""
    return comparison.mean_kl <= COMPUTED_KL if low_precision else comparison.relative <= FP32_RELATIVE


@torch.no_grad()
def logits_by_block(model: nn.Module, read: Callable[[str], torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """Logits (T, V), fp32, of ``model`` (meta) for ``tokens`` (1, T), a block at a time; ``read(name)``: parameters."""

    class OnDemand(dict[str, torch.Tensor]):
        def __missing__(self, name: str) -> torch.Tensor:
            return read(name).float()  # each time

    blocks = [*{type(block).__name__ for block in find_blocks(model)[1]}]
    attach_align_device_hook(model, "cpu", offload=True, weights_map=OnDemand(), preload_module_classes=blocks)
    embedding = getattr(model.get_input_embeddings(), "base_layer", model.get_input_embeddings())
    embedding.weight = nn.Parameter(torch.zeros(1).expand_as(embedding.weight))  # llama4 asks where it lies
    logits = model.eval()(input_ids=tokens, use_cache=False).logits[0]
    remove_hook_from_submodules(model)
    return logits


@torch.no_grad()
def prove(
    folder: Path, outputs: list[OutputTensor], exact: ExactWeights, tokens: torch.Tensor,
    reference: torch.Tensor | None, compute: str,
) -> tuple[Comparison, Comparison, dict[str, float]]:  # fmt: skip
    """Read every tensor of ``folder`` again: each must be, bit for bit, what ``exact`` rounds to. Then compare logits
    on ``tokens`` (1, T) with ``reference`` (T, V; None: those of the unmerged tensors), computed in ``compute`` (fp32,
    bf16, fp16): of the folder, and of exact weights. Third: how far each tensor is from the base. MergeError."""
    model, names = build_on_meta(folder), exact.names
    weights = WeightMap(model, WeightFiles(folder), str(folder))
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
    found = logits_by_block(model, weights.read_whole, tokens)
    true = logits_by_block(model, exact.whole, tokens) if any(o.dtype != o.exact_dtype for o in outputs) else found
    stored, unrounded, rounding = map(compare_logits, (reference, reference, true), (found, true, found))
    if not is_close(unrounded, low_precision=compute != "fp32"):
        raise refusal("other_state", line=unrounded.line)
    if not rounding.mean_kl <= STORED_KL:
        raise refusal("rounding", line=rounding.line)
    return stored, unrounded, changes


@one_thread()
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
