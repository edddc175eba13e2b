"""Prove that a merged folder is the training state, by the proof tokens' logits in plain transformers, fp32 on the CPU:
*unrounded*, where every rounded tensor must be, bit for bit, the rounding of its exact fp32 value and is replaced by
it, and *as stored*. Shapes: T positions, V vocabulary. Range: largest minus smallest logit of the training state."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from fullshard.errors import MergeError, refusal
from fullshard.merge.adapter import ASK_BASE
from fullshard.merge.writer import ExactWeights, OutputTensor

FP32_RELATIVE = 1e-3  # of the range: the largest difference, unrounded, where training computed in fp32
LOW_PRECISION_RELATIVE = 0.1  # the same where it did not, and as stored, where these hold too:
LOW_PRECISION_KL = 0.02  # nats: the mean divergence
CLEAR_MARGIN = 0.02  # of the range: a top token that was preferred by less may change
CHANGED_SHARE = 1 / 8  # of the positions: there it may change even so


@dataclass(frozen=True)
class Comparison:
    """Two sets of logits for the same tokens, compared."""

    max_difference: float  # logits
    relative: float  # max_difference / range of the training state's logits
    same_top: int  # positions whose most likely token is the same
    changed: int  # positions with another top token although the training state clearly preferred its own
    num_positions: int
    mean_kl: float  # nats a position, training state against merged model

    @property
    def line(self) -> str:
        """The proof in one line."""
        difference = f"largest logit difference {self.max_difference:.2g} ({self.relative:.2%} of the range)"
        same = f"same top token at {self.same_top} of {self.num_positions} positions"
        return f"proof: {difference}, {same}, mean KL {self.mean_kl:.1e}"


def compare_logits(reference: torch.Tensor, logits: torch.Tensor) -> Comparison:
    """Compare ``logits`` (T, V) with the training state's ``reference`` (T, V). Not finite: infinite difference."""
    reference, logits = reference.double(), logits.double()
    num_positions = reference.shape[0]
    if not (torch.isfinite(reference).all() and torch.isfinite(logits).all()):
        return Comparison(math.inf, math.inf, 0, num_positions, num_positions, math.inf)
    extent = max((reference.max() - reference.min()).item(), 1e-30)
    difference = (reference - logits).abs().max().item()
    top, top_of_reference = logits.argmax(-1, keepdim=True), reference.argmax(-1, keepdim=True)
    lost_margin = (reference.gather(-1, top_of_reference) - reference.gather(-1, top)).squeeze(-1)
    log_p, log_q = reference.log_softmax(-1), logits.log_softmax(-1)
    divergence = (log_p.exp() * (log_p - log_q)).sum(-1).mean().clamp(min=0).item()
    same_top, changed = int((top == top_of_reference).sum()), int((lost_margin > CLEAR_MARGIN * extent).sum())
    return Comparison(difference, difference / extent, same_top, changed, num_positions, divergence)


def is_close(comparison: Comparison, low_precision: bool) -> bool:
    """Whether the difference is what fp32 summation order (or, ``low_precision``, 16-bit rounding) explains."""
    if not low_precision:
        return comparison.relative <= FP32_RELATIVE
    few_changed = comparison.changed <= CHANGED_SHARE * comparison.num_positions
    return comparison.relative <= LOW_PRECISION_RELATIVE and comparison.mean_kl <= LOW_PRECISION_KL and few_changed


@torch.no_grad()
def prove(
    folder: Path, outputs: list[OutputTensor], exact: ExactWeights, tokens: torch.Tensor, reference: torch.Tensor,
    compute: str,
) -> tuple[Comparison, Comparison, tuple[str, ...]]:  # fmt: skip
    """Compare logits on ``tokens`` (1, T) with ``reference`` (T, V), computed in ``compute`` (fp32, bf16, fp16): those
    of ``folder``, then of exact fp32 weights; third, what transformers ignores. MergeError: another state."""
    settings = {"dtype": torch.float32, "output_loading_info": True, "local_files_only": True}
    model, info = AutoModelForCausalLM.from_pretrained(folder, **settings)
    unexpected = set(info["unexpected_keys"])
    problems = {"missing": info["missing_keys"], "unexpected": unexpected - set(exact.names.weights.ignored)}
    for what, found in (problems | {"of another shape": map(str, info["mismatched_keys"])}).items():
        if found := sorted(found):
            raise MergeError(f"The merged folder does not load cleanly: {len(found)} {what}, first {found[0]}.", "")
    model.eval()
    if (size := reference.shape[1]) != (known := model.config.get_text_config().vocab_size):
        raise MergeError(f"The proof has logits for {size} tokens, the merged model has {known}.", ASK_BASE)
    stored = unrounded = compare_logits(reference, model(input_ids=tokens, use_cache=False).logits[0])
    if rounded := [output for output in outputs if output.dtype != output.exact_dtype]:
        _put_exact_values(model, rounded, exact)
        unrounded = compare_logits(reference, model(input_ids=tokens, use_cache=False).logits[0])
    if not is_close(unrounded, low_precision=compute != "fp32"):
        raise refusal("other_state", line=unrounded.line)
    if rounded and not is_close(stored, low_precision=True):
        raise refusal("rounding", line=stored.line)
    return stored, unrounded, tuple(sorted(unexpected))


def _put_exact_values(model: Any, rounded: list[OutputTensor], exact: ExactWeights) -> None:
    """Check that each rounded parameter in ``model`` is the rounding of its exact value, then put that value there."""
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    parts = ((name, output.dtype) for output in rounded for name in output.parameters)
    for name, dtype in {exact.names.canonical.get(name, name): dtype for name, dtype in parts}.items():
        rest = tensors[name].data.view(-1)
        for block in exact.blocks(name):
            part, rest = rest[: block.numel()], rest[block.numel() :]
            if not torch.equal(part, block.to(dtype).to(part.dtype)):
                raise MergeError(f"{name} in the merged folder is not what was written.", "Check the disk.")
            part.copy_(block)
