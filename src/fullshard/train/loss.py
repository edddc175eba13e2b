"""The loss of a step, inside the sharding root: fully_shard allows no head outside the root's forward; and that over
held-out rows. Shapes: B sequences, S positions, N supervised ones, H hidden, V vocabulary."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any
import numpy as np
import torch
from torch import Tensor, nn
from fullshard.data.pack import lay_out
from fullshard.data.prepared import Batch, PreparedData, make_batch
from fullshard.errors import ConfigError, DataError
from fullshard.model.attention import BY_DOCUMENT, Documents
from fullshard.model.blocks import find_decoder

CHUNK_LOGIT_BYTES = 256 << 20  # fp32 logits of one chunk
PIECES = 16  # of a chunk: fp32 copies are made of one at a time


class LossModel(nn.Module):
    """A causal language model whose forward returns the summed loss; engines remove ``name_prefix`` from its names."""

    name_prefix = "causal_lm."
    attends_by_document = property(lambda self: self.causal_lm.config._attn_implementation == BY_DOCUMENT)

    def __init__(self, causal_lm: nn.Module, router_loss: bool = False) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self._router_loss = find_router_loss(causal_lm) if router_loss else None
        self.uses_own_logits = False  # set by ``check_loss_path`` where our path and the model's own differ
        config = causal_lm.config.get_text_config()
        self.chunk_rows = max(1, CHUNK_LOGIT_BYTES // (4 * config.vocab_size))
        self._factor = (getattr(config, "logit_scale", None) or 1) / (getattr(config, "logits_scaling", None) or 1)
        self._cap = getattr(config, "final_logit_softcapping", None)  # gemma2, gemma3; the factor: granite, cohere

    def forward(
        self, input_ids_BS: Tensor, labels_BS: Tensor | None, position_ids_BS: Tensor | None = None,
        own_logits: bool = False, real_BS: Tensor | None = None, documents: Documents | None = None,
    ) -> Tensor:  # fmt: skip
        """The summed token losses (fp32) over next-token targets ``labels_BS`` (-100: unsupervised); without labels the
        logits (B, S, V) in fp32. Positions are for packed sequences only. ``own_logits``: the model's own path.
        ``documents``: for models that attend by document. ``real_BS`` (1 on real tokens): what a router loss counts."""
        routed = self._router_loss is not None and self.training and labels_BS is not None
        given = {"position_ids": position_ids_BS, "documents": documents, "output_router_logits": routed or None}
        arguments = {"input_ids": input_ids_BS, "use_cache": False}
        arguments |= {name: value for name, value in given.items() if value is not None}
        if own_logits and labels_BS is not None:
            return self.causal_lm(**arguments, labels=input_ids_BS).loss * (labels_BS != -100).sum()
        if own_logits or self.uses_own_logits:
            output = self.causal_lm(**arguments)
            logits_BSV = output.logits.float()
            if labels_BS is None:
                return logits_BSV
            loss = nn.functional.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten(), reduction="sum")
            return loss + self._routing_loss(output, labels_BS, real_BS) if routed else loss
        output, head = find_decoder(self.causal_lm)(**arguments), self.causal_lm.get_output_embeddings()
        hidden_BSH = output[0]
        if labels_BS is None:
            logits_BSV = head(hidden_BSH).float() * self._factor
            return torch.tanh(logits_BSV / self._cap) * self._cap if self._cap else logits_BSV
        chosen = (labels_BS.flatten() != -100).nonzero().flatten()
        if chosen.numel() == 0:  # the first position then, for the collectives
            chosen = chosen.new_zeros(1)
        hidden_NH, labels_N = (whole.flatten(0, 1).index_select(0, chosen) for whole in (hidden_BSH, labels_BS))
        # The head is called once as a module, so that the hooks of its sharding unit run once a forward: for all
        # rows, or, where they are more than a chunk, for few; the others use its plain forward while it is gathered.
        piece_rows = max(1, self.chunk_rows // PIECES)
        first = len(chosen) if len(chosen) <= self.chunk_rows else piece_rows
        turn = partial(loss_and_gradient, piece_rows=piece_rows, factor=self._factor, cap=self._cap)
        loss = _TokenLoss.apply(turn, labels_N[:first], head(hidden_NH[:first]))
        if first < len(chosen):
            trained = [weight for weight in head.parameters() if weight.requires_grad]
            cut = (head.forward, turn, self.chunk_rows, torch.is_grad_enabled())
            loss = loss + _HeadLoss.apply(cut, labels_N[first:], hidden_NH[first:], *trained)
        return loss + self._routing_loss(output, labels_BS, real_BS) if routed else loss

    def _routing_loss(self, output: Any, labels_BS: Tensor, real_BS: Tensor | None) -> Tensor:
        """The family's load-balancing loss of this micro-batch times its coefficient and its supervised positions."""
        model = self.causal_lm
        loss = self._router_loss(output.router_logits, model.num_experts, model.num_experts_per_tok, real_BS)
        return model.router_aux_loss_coef * loss * (labels_BS != -100).sum()


def loss_and_gradient(logits_CV: Tensor, labels_C: Tensor, piece_rows: int, factor: float, cap: float | None) -> Tensor:
    """The summed loss (fp32) of a head's outputs, scaled by ``factor`` and then capped; turns them into its gradient,
    0 where unsupervised. By pieces of rows, so that fp32 copies exist of one piece at a time."""
    loss = torch.zeros((), dtype=torch.float32, device=logits_CV.device)
    for piece_DV, labels_D in zip(logits_CV.split(piece_rows), labels_C.split(piece_rows), strict=True):
        logits_DV = piece_DV.float()  # itself where it is fp32
        if factor != 1:
            logits_DV.mul_(factor)
        if cap:
            slope_DV = 1 - logits_DV.div_(cap).tanh_().square()
            logits_DV.mul_(cap)
        used_D1, labels_D1 = (labels_D != -100).float()[:, None], labels_D.clamp_min(0)[:, None]
        logits_DV.sub_(logits_DV.amax(1, keepdim=True))
        own_D1 = logits_DV.gather(1, labels_D1)
        sums_D1 = logits_DV.exp_().sum(1, keepdim=True)
        loss += ((sums_D1.log() - own_D1) * used_D1).sum()
        logits_DV.mul_(used_D1 * factor / sums_D1).scatter_add_(1, labels_D1, -used_D1 * factor)
        piece_DV.copy_(logits_DV.mul_(slope_DV) if cap else logits_DV)
    return loss


class _TokenLoss(torch.autograd.Function):
    """Summed cross-entropy that writes its gradient over the head's output: one copy of it, ever."""

    @staticmethod
    def forward(ctx: Any, turn: Callable[..., Any], labels_C: Tensor, logits_CV: Tensor) -> Tensor:
        ctx.gradients = [logits_CV.detach()]
        return turn(ctx.gradients[0], labels_C)

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None  # else they would live until the whole backward is over
        return None, None, *(gradient.mul_(outer) for gradient in gradients)


class _HeadLoss(_TokenLoss):
    """Head and cross-entropy chunk by chunk, forward and backward together: logits of one chunk exist at a time."""

    @staticmethod
    def forward(ctx: Any, cut: tuple[Any, ...], labels_N: Tensor, hidden_NH: Tensor, *weights: nn.Parameter) -> Tensor:
        (head, turn, rows, wanted), loss, hidden_gradients, weight_gradients = cut, 0.0, [], []
        for hidden_CH, labels_C in zip(hidden_NH.detach().split(rows), labels_N.split(rows), strict=True):
            with torch.set_grad_enabled(wanted):
                hidden_CH.requires_grad_(wanted)
                logits_CV = head(hidden_CH)
            loss = loss + turn(logits_CV.detach(), labels_C)  # and from here on they are their own gradient
            if wanted:
                hidden, *own = torch.autograd.grad(logits_CV, (hidden_CH, *weights), logits_CV.detach())
                hidden_gradients.append(hidden)
                for total, gradient in zip(weight_gradients, own, strict=False):
                    total.add_(gradient)
                weight_gradients = weight_gradients or [gradient.float() for gradient in own]
            del logits_CV  # before the next chunk's come
        ctx.gradients = [torch.cat(hidden_gradients), *weight_gradients] if wanted else []
        return loss


def find_router_loss(causal_lm: nn.Module) -> Any:
    """The family's load-balancing loss function. ConfigError where it has none."""
    found = getattr(sys.modules[type(causal_lm).__module__], "load_balancing_loss_func", None)
    if found is None or not hasattr(causal_lm, "router_aux_loss_coef"):
        raise ConfigError(f"{type(causal_lm).__name__} has no router loss.", "Set train.router_loss=false")
    return found


def batch_loss(loss_model: nn.Module, batch: Batch, device: torch.device) -> Tensor:
    """Summed loss of one batch. Positions go to the model only where documents lie in one sequence."""
    lengths, documents = [length for row in batch.lengths for length in row], None
    tensors, told = [batch.input_ids, batch.labels, batch.position_ids, batch.attention_mask], len(batch.lengths)
    if loss_model.attends_by_document and len(lengths) > 1:  # one sequence without any pad
        tensors = [tensor[batch.attention_mask.bool()][None] for tensor in tensors]
        documents, told = Documents([lengths]), 1
    input_ids, labels, position_ids, mask = (tensor.to(device) for tensor in tensors)
    position_ids = position_ids if len(lengths) > told else None
    return loss_model(input_ids, labels, position_ids, real_BS=mask, documents=documents)


def held_out_loss(
    loss_model: nn.Module, data: PreparedData, micro_batch: tuple[int, str], pad_id: int, device: torch.device,
    rank: int = 0, num_ranks: int = 1, sum_over_ranks: Callable[[Tensor], Tensor] = float,
) -> float:  # fmt: skip
    """Loss per supervised token over all rows, each exactly once. A collective call on all ranks."""
    if (num_tokens := int(data.supervised.sum())) == 0:
        raise DataError("The held-out rows have no supervised token.", "Look at them: fullshard prepare RECIPE")
    window, total = np.arange(len(data.lengths)), torch.zeros((), dtype=torch.float32, device=device)
    was_training = loss_model.training
    loss_model.eval()
    with torch.no_grad():
        for micro in lay_out(window, data.lengths, num_ranks, micro_batch, False, int(data.lengths.max())):
            total += batch_loss(loss_model, make_batch(data, micro[rank], pad_id), device)
    loss_model.train(was_training)
    return float(sum_over_ranks(total)) / num_tokens
