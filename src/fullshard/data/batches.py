"""From row ids to the tensors of one forward. B = sequences, S = tokens of the longest sequence."""

from dataclasses import dataclass

import torch

from fullshard.data.prepared import PreparedData

IGNORED = -100  # label of a position that has no target
FILL_TOKENS = 8


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank. All tensors are int64 of shape (B, S)."""

    input_ids: torch.Tensor
    labels: torch.Tensor  # already shifted: the id at t+1 where that position is supervised and of the same row
    position_ids: torch.Tensor  # restart at 0 in each row; 0 on pads
    attention_mask: torch.Tensor  # 1 on real tokens, 0 on pads
    lengths: list[list[int]]  # of each sequence's documents


def make_batch(data: PreparedData, sequences: list[list[int]], pad_id: int) -> Batch:
    """The batch of these sequences (lists of row ids), padded on the right with ``pad_id`` (known by length, so it may
    be eos). No sequences: the fill batch, the first tokens (at most 8) of row 0 without labels."""
    if not (content := [[data.row(row) for row in sequence] for sequence in sequences]):
        ids, supervised = data.row(0)
        content = [[(ids[:FILL_TOKENS], supervised[:FILL_TOKENS] & False)]]
    shape = len(content), max(sum(len(ids) for ids, _ in rows) for rows in content)
    tensors = [torch.full(shape, value, dtype=torch.int64) for value in (pad_id, IGNORED, 0, 0)]
    input_ids, labels, position_ids, attention_mask = tensors
    for place, rows in enumerate(content):
        start = 0
        for ids, supervised in rows:
            stop = start + len(ids)
            tokens = torch.tensor(ids, dtype=torch.int64)  # copies out of the memory map
            targets = torch.tensor(supervised[1:], dtype=torch.bool)
            input_ids[place, start:stop] = tokens
            labels[place, start : stop - 1] = torch.where(targets, tokens[1:], IGNORED)
            position_ids[place, start:stop] = torch.arange(len(ids))
            attention_mask[place, start:stop] = 1
            start = stop
    return Batch(*tensors, [[len(ids) for ids, _ in rows] for rows in content])
