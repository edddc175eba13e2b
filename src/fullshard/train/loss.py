"""The loss of a step, inside the sharding root: fully_shard allows no head outside the root's forward; and that over
held-out rows. Shapes: B sequences, S positions, N supervised ones, H hidden, V vocabulary."""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
from torch import nn

from fullshard.data.batches import Batch, make_batch
from fullshard.data.pack import lay_out
from fullshard.data.prepared import PreparedData
from fullshard.errors import ConfigError, DataError
from fullshard.model.attention import BY_DOCUMENT, Documents
from fullshard.model.blocks import find_decoder

CHUNK_LOGIT_BYTES = 256 << 20  # fp32 logits of one chunk


class LossModel(nn.Module):
    """A causal language model whose forward returns the summed loss; engines remove ``name_prefix`` from its names."""

    name_prefix = "causal_lm."

    def __init__(self, causal_lm: nn.Module, router_loss: bool = False) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self._router_loss = find_router_loss(causal_lm) if router_loss else None
        self.uses_own_logits = False  # set by ``check_loss_path`` where our path and the model's own differ
        self.chunk_rows = max(1, CHUNK_LOGIT_BYTES // (4 * causal_lm.config.get_text_config().vocab_size))

    @property
    def attends_by_document(self) -> bool:
        """Whether the model's attention is ours (model/attention.py), which can keep packed documents apart."""
        return self.causal_lm.config._attn_implementation == BY_DOCUMENT

    def forward(
        self, input_ids_BS: torch.Tensor, labels_BS: torch.Tensor | None, position_ids_BS: torch.Tensor | None = None,
        own_logits: bool = False, real_BS: torch.Tensor | None = None, documents: Documents | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """The summed token losses (fp32) over next-token targets ``labels_BS`` (-100: unsupervised); without labels the
        logits (B, S, V) in fp32. Positions are for packed sequences only. ``own_logits``: the model's own path.
        ``documents``: for models that attend by document. ``real_BS`` (1 on real tokens): what a router loss counts."""
        arguments = {"input_ids": input_ids_BS, "use_cache": False}
        given = {"position_ids": position_ids_BS, "documents": documents}
        arguments |= {name: value for name, value in given.items() if value is not None}
        routed = self._router_loss is not None and self.training and labels_BS is not None
        if routed:
            arguments["output_router_logits"] = True
        if own_logits and labels_BS is not None:
            return self.causal_lm(**arguments, labels=input_ids_BS).loss * (labels_BS != -100).sum()
        if own_logits or self.uses_own_logits:
            output = self.causal_lm(**arguments)
            logits_BSV = output.logits.float()
            if labels_BS is None:
                return logits_BSV
            loss = functional.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten(), reduction="sum")
            return loss + self._routing_loss(output, labels_BS, real_BS) if routed else loss
        output = find_decoder(self.causal_lm)(**arguments)
        hidden_BSH = output[0]
        head = self.causal_lm.get_output_embeddings()
        if labels_BS is None:
            return self._finish(head(hidden_BSH))
        chosen = (labels_BS.flatten() != -100).nonzero().flatten()
        if chosen.numel() == 0:  # the first position then, for the collectives
            chosen = chosen.new_zeros(1)
        hidden_NH, labels_N = (whole.flatten(0, 1).index_select(0, chosen) for whole in (hidden_BSH, labels_BS))
        first_CH, *rest = hidden_NH.split(self.chunk_rows)
        # The head is called once as a module, so that the sharding hooks of its unit run exactly once a forward; the
        # other chunks use its plain forward while its weights are gathered.
        loss = _TokenLoss.apply(self._finish(head(first_CH)), labels_N[: len(first_CH)])
        if rest:
            trained = [weight for weight in head.parameters() if weight.requires_grad]
            place, wanted = slice(len(first_CH), None), torch.is_grad_enabled()
            forward, cut = lambda hidden_CH: self._finish(head.forward(hidden_CH)), (self.chunk_rows, wanted)
            loss = loss + _HeadLoss.apply(forward, cut, labels_N[place], hidden_NH[place], *trained)
        return loss + self._routing_loss(output, labels_BS, real_BS) if routed else loss

    def _routing_loss(self, output: Any, labels_BS: torch.Tensor, real_BS: torch.Tensor | None) -> torch.Tensor:
        """The family's load-balancing loss of this micro-batch times its coefficient and its supervised positions."""
        model = self.causal_lm
        loss = self._router_loss(output.router_logits, model.num_experts, model.num_experts_per_tok, real_BS)
        return model.router_aux_loss_coef * loss * (labels_BS != -100).sum()

    def _finish(self, logits: torch.Tensor) -> torch.Tensor:
        """The family's own rule between head and loss, by config field; fp32 from here on."""
        config = self.causal_lm.config.get_text_config()
        logits = logits.float()
        if getattr(config, "logits_scaling", None):  # granite
            logits = logits / config.logits_scaling
        if getattr(config, "logit_scale", None):  # cohere
            logits = logits * config.logit_scale
        if getattr(config, "final_logit_softcapping", None):  # gemma2, gemma3
            cap = config.final_logit_softcapping
            logits = torch.tanh(logits / cap) * cap
        return logits


def loss_and_gradient(logits_CV: torch.Tensor, labels_C: torch.Tensor) -> torch.Tensor:
    """The summed loss; turns fp32 ``logits_CV`` into its gradient (softmax minus one-hot, 0 where unsupervised)."""
    used_C1 = (labels_C != -100).to(logits_CV.dtype)[:, None]
    labels_C1 = labels_C.clamp_min(0)[:, None]
    logits_CV.sub_(logits_CV.amax(1, keepdim=True))
    own_C1 = logits_CV.gather(1, labels_C1)
    sums_C1 = logits_CV.exp_().sum(1, keepdim=True)
    logits_CV.mul_(used_C1 / sums_C1).scatter_add_(1, labels_C1, -used_C1)
    return ((sums_C1.log() - own_C1) * used_C1).sum()


class _TokenLoss(torch.autograd.Function):
    """Summed cross-entropy that writes its gradient over the logits: one copy of them, ever."""

    @staticmethod
    def forward(ctx: Any, logits_CV: torch.Tensor, labels_C: torch.Tensor) -> torch.Tensor:
        ctx.gradient_CV = logits_CV.detach()
        return loss_and_gradient(ctx.gradient_CV, labels_C)

    @staticmethod
    def backward(ctx: Any, outer: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient_CV, ctx.gradient_CV = ctx.gradient_CV, None  # else it would live until the whole backward is over
        return gradient_CV.mul_(outer), None


class _HeadLoss(torch.autograd.Function):
    """Head and cross-entropy chunk by chunk, forward and backward together: logits of one chunk exist at a time."""

    @staticmethod
    def forward(
        ctx: Any, head: Callable[[torch.Tensor], torch.Tensor], cut: tuple[int, bool], labels_N: torch.Tensor,
        hidden_NH: torch.Tensor, *weights: nn.Parameter,
    ) -> torch.Tensor:  # fmt: skip
        (rows, wanted), loss, hidden_gradients, weight_gradients = cut, 0.0, [], []
        for hidden_CH, labels_C in zip(hidden_NH.detach().split(rows), labels_N.split(rows), strict=True):
            with torch.set_grad_enabled(wanted):
                hidden_CH.requires_grad_(wanted)
                logits_CV = head(hidden_CH)
            gradient_CV = logits_CV.detach()
            loss = loss + loss_and_gradient(gradient_CV, labels_C)
            if wanted:
                hidden, *own = torch.autograd.grad(logits_CV, (hidden_CH, *weights), gradient_CV)
                hidden_gradients.append(hidden)
                for total, gradient in zip(weight_gradients, own, strict=False):
                    total.add_(gradient)
                weight_gradients = weight_gradients or own
        ctx.gradients = [torch.cat(hidden_gradients), *weight_gradients] if wanted else []
        return loss

    @staticmethod
    def backward(ctx: Any, outer: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        return None, None, None, *(gradient.mul_(outer) for gradient in gradients)


def find_router_loss(causal_lm: nn.Module) -> Any:
    """The family's load-balancing loss function. ConfigError where it has none."""
    found = getattr(sys.modules[type(causal_lm).__module__], "load_balancing_loss_func", None)
    if found is None or not hasattr(causal_lm, "router_aux_loss_coef"):
        raise ConfigError(f"{type(causal_lm).__name__} has no router loss.", "Set train.router_loss=false")
    return found


def batch_loss(loss_model: nn.Module, batch: Batch, device: torch.device) -> torch.Tensor:
    """Summed loss of one batch. Positions go to the model only where documents share a sequence."""
    packed = any(len(lengths) > 1 for lengths in batch.lengths)
    tensors = [batch.input_ids, batch.labels, batch.position_ids, batch.attention_mask]
    documents = None
    if packed and loss_model.attends_by_document:  # one sequence without any pad
        real = batch.attention_mask.bool()
        tensors = [tensor[real][None] for tensor in tensors]
        documents = Documents([[length for row in batch.lengths for length in row]])
    input_ids, labels, position_ids, mask = (tensor.to(device) for tensor in tensors)
    return loss_model(input_ids, labels, position_ids if packed else None, real_BS=mask, documents=documents)


def held_out_loss(
    loss_model: nn.Module, data: PreparedData, micro_batch: tuple[int, str], pad_id: int, device: torch.device,
    rank: int = 0, num_ranks: int = 1, sum_over_ranks: Callable[[torch.Tensor], torch.Tensor] = float,
) -> float:  # fmt: skip
    """Loss per supervised token over all rows, each exactly once. A collective call on all ranks."""
    if (num_tokens := int(data.supervised.sum())) == 0:
        raise DataError("The held-out rows have no supervised token.", "Look at them: fullshard prepare RECIPE")
    window, longest = np.arange(len(data.lengths)), int(data.lengths.max())
    total = torch.zeros((), dtype=torch.float32, device=device)
    was_training = loss_model.training
    loss_model.eval()
    with torch.no_grad():
        for micro in lay_out(window, data.lengths, num_ranks, micro_batch, False, longest):
            total += batch_loss(loss_model, make_batch(data, micro[rank], pad_id), device)
    loss_model.train(was_training)
    return float(sum_over_ranks(total)) / num_tokens
