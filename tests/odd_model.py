"""A small model of awkward shapes: (15, 7), (7,), (3,), (1,), 0-d, tied or not, with what looks like an adapter."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, VOCABULARY, BLOCKS = 7, 11, 4


class OddBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 15)
        self.narrow = nn.Linear(15, WIDTH, bias=False)
        self.lora_A = nn.Linear(WIDTH, 2, bias=False)
        self.lora_B = nn.Linear(2, WIDTH, bias=False)
        self.three = nn.Parameter(torch.randn(3))
        self.one = nn.Parameter(torch.randn(1))
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.sometimes = nn.Parameter(torch.randn(5))

    def forward(self, hidden: torch.Tensor, uses_all: bool = True) -> torch.Tensor:
        inner = self.narrow(torch.tanh(self.wide(self.norm(hidden)))) * self.scale + self.one
        inner = inner + self.lora_B(self.lora_A(hidden)) * torch.tanh(self.three.sum())
        return hidden + (inner + self.sometimes.mean() if uses_all else inner)


class OddModel(nn.Module):
    """Token ids (B, S + 1) -> summed next-token loss."""

    def __init__(self, tied: bool, recompute: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(OddBlock() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.recompute = recompute
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, uses_all: bool = True) -> torch.Tensor:
        hidden = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            hidden = (
                checkpoint(block, hidden, uses_all, use_reentrant=False) if self.recompute else block(hidden, uses_all)
            )
        logits = self.head(self.norm(hidden)).flatten(0, 1)
        return nn.functional.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum")

    def units(self) -> list[list[nn.Module]]:
        blocks: list[list[nn.Module]] = [[block] for block in self.blocks]
        is_tied = self.head.weight is self.embedding.weight
        return blocks if is_tied else [*blocks, [self.embedding], [self.norm, self.head]]


def make_model(tied: bool, recompute: bool, frozen: bool, dtype: torch.dtype) -> OddModel:
    torch.manual_seed(3)
    model = OddModel(tied, recompute).to(dtype)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or "lora_" in name)
    return model


def tokens_of(step: int, micro: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randint(0, VOCABULARY, (2, 6), generator=generator)
