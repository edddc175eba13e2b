"""Linear layers for answers on a CPU: weights in fp16 where that loses nothing, for reading them sets the pace. FBGEMM
(torch's, on x86) adds in fp32; a row's result does not depend on the rows beside it. Figures: docs/performance.md."""

import torch
from torch import Tensor, nn


class PackedLinear(nn.Module):
    """An ``nn.Linear`` for inference, its weight packed in fp16."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self._packed, self.bias = torch.ops.quantized.linear_prepack_fp16(linear.weight, linear.bias), linear.bias

    weight = property(lambda self: torch.ops.quantized.linear_unpack_fp16(self._packed)[0])  # a copy in fp32

    def forward(self, inputs: Tensor) -> Tensor:
        """``inputs`` (..., features in) to (..., features out), both fp32."""
        return torch.ops.quantized.linear_dynamic_fp16(inputs, self._packed)


@torch.no_grad()
def pack_linears(model: nn.Module) -> None:
    """Replace an fp32 model's linear layers whose weights fp16 holds: those once stored in bf16 or fp16. Only what lies
    under fp16's normal range moves, by at most 2**-25: less than the rounding of an fp32 sum."""
    for name in [name for name, module in model.named_modules() if type(module) is nn.Linear]:
        weight = (linear := model.get_submodule(name)).weight
        if (weight.half().float() - weight).abs().max() <= 2**-25:
            model.set_submodule(name, PackedLinear(linear))
