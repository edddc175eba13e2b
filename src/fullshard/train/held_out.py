"""The loss over held-out rows, by the same loss function as training, on any number of ranks."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

from fullshard.data.batches import Batch, make_batch
from fullshard.data.pack import lay_out
from fullshard.data.prepared import PreparedData
from fullshard.errors import DataError
from fullshard.model.attention import Documents


def batch_loss(loss_model: nn.Module, batch: Batch, device: torch.device) -> torch.Tensor:
    """Summed loss of one batch. Positions go to the model only where documents share a sequence."""
    packed = bool((batch.document_ids.diff(dim=1).masked_fill(batch.document_ids[:, 1:] < 0, 0) != 0).any())
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
    rank: int = 0, num_ranks: int = 1, sum_over_ranks: Callable[[torch.Tensor], torch.Tensor] | None = None,
    rows: Sequence[int] | None = None,
) -> float:  # fmt: skip
    """Loss per supervised token over ``rows`` (default: all), each row exactly once. A collective call on all ranks."""
    window = np.arange(len(data)) if rows is None else np.asarray(rows)
    num_tokens = int(data.supervised[window].sum())
    if num_tokens == 0:
        raise DataError("The held-out rows have no supervised token.", "Look at them: fullshard prepare RECIPE")
    layout = lay_out(window, data.lengths, num_ranks, micro_batch, False, int(data.lengths.max()))
    total = torch.zeros((), dtype=torch.float32, device=device)
    was_training = loss_model.training
    loss_model.eval()
    with torch.no_grad():
        for micro in layout:
            total += batch_loss(loss_model, make_batch(data, micro[rank], pad_id), device)
    loss_model.train(was_training)
    if sum_over_ranks is not None:
        total = sum_over_ranks(total)
    return float(total) / num_tokens
