"""Attention among the tokens of one document only, through transformers' attention registry. Shapes: B sequences (each
documents end to end, pads as one more), H heads, S positions, D features a head."""

import sys
from dataclasses import dataclass, field
from typing import Any
import torch
from transformers import AttentionInterface
from fullshard.device import varlen_attention

BY_DOCUMENT = "by_document"  # the name in transformers' registry, given as attn_implementation


@dataclass
class Documents:
    """Where documents lie: lengths per sequence, pads included (sum: S), and which attention modules were told."""

    lengths: list[list[int]]
    layers: set[int] = field(default_factory=set)  # identity of each attention module that has used this
    unmasked: bool = False  # windows need no mask: a plan's stand-in for ``varlen_attention`` where that cannot run


def attend(
    module: torch.nn.Module, query_BHSD: torch.Tensor, key_BHSD: torch.Tensor, value_BHSD: torch.Tensor,
    attention_mask: torch.Tensor | None, scaling: float | None = None, dropout: float = 0.0,
    sliding_window: int | None = None, softcap: float | None = None, s_aux: torch.Tensor | None = None,
    documents: Documents | None = None, **unused: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Causal attention within each document (None: each sequence is one), (B, S, H, D). Key and value may have fewer
    heads. ``softcap`` (gemma2) and ``s_aux`` (gpt_oss's sinks) have no fused kernel: the family's own code does it."""
    batch, _, size, _ = query_BHSD.shape
    documents = documents or Documents([[size]] * batch)
    documents.layers.add(id(module))
    plain = softcap is None and s_aux is None
    if plain and not dropout and (kernel := varlen_attention(query_BHSD.device.type, query_BHSD.dtype)):
        # all documents in one call of torch's kernel, which takes tokens end to end: (B S, H, D)
        lengths = [length for row in documents.lengths for length in row]
        borders = torch.tensor([0, *lengths], device=query_BHSD.device).cumsum(0).int()
        tokens = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (query_BHSD, key_BHSD, value_BHSD)]
        window, longest = (-1 if sliding_window is None else sliding_window - 1, 0), max(lengths)
        out = kernel(*tokens, borders, borders, longest, longest, scale=scaling, window_size=window, enable_gqa=True)
        return out.unflatten(0, (batch, -1)), None
    rows = []
    for row, lengths in enumerate(documents.lengths):
        # split, not slices: its backward joins the pieces once instead of adding each to a whole of zeros
        pieces, parts = [whole[row : row + 1].split(lengths, 2) for whole in (query_BHSD, key_BHSD, value_BHSD)], []
        for length, inner in zip(lengths, zip(*pieces, strict=True), strict=True):
            window, seen = length if documents.unmasked else min(length, sliding_window or length), None
            if not plain or window < length:  # which keys each query sees: itself and those before it, window in all
                seen = torch.ones(length, length, dtype=torch.bool, device=query_BHSD.device).tril().triu(1 - window)
            if plain:
                fused = {"is_causal": seen is None, "dropout_p": dropout, "scale": scaling, "enable_gqa": True}
                parts.append(torch.nn.functional.scaled_dot_product_attention(*inner, attn_mask=seen, **fused))
            else:
                mask = torch.zeros_like(seen, dtype=query_BHSD.dtype).masked_fill_(~seen, float("-inf"))[None, None]
                eager = sys.modules[type(module).__module__].eager_attention_forward
                settings = {"scaling": scaling, "dropout": dropout, "softcap": softcap, "s_aux": s_aux}
                parts.append(eager(module, *inner, mask, **settings)[0].transpose(1, 2))
        rows.append(parts[0] if len(parts) == 1 else torch.cat(parts, 2))
    return (rows[0] if batch == 1 else torch.cat(rows)).transpose(1, 2).contiguous(), None


AttentionInterface.register(BY_DOCUMENT, attend)
