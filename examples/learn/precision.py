"""Number formats and mixed precision: what FP32, TF32, BF16 and FP16 can hold, and what a training step loses in each.

Run: ``python precision.py`` (less than a minute on two CPU cores). Every number printed is computed here.
Shape suffixes: B rows of a batch, C bytes of context, E embedding, H hidden, V vocabulary, N a square matrix's side.
"""

import math
import os
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

if int(os.environ.get("RANK", 0)) > 0:
    sys.exit()  # under torchrun one process is enough: there is nothing to share
device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
chip_has_tf32 = device.type == "cuda" and torch.cuda.is_tf32_supported()
mark = "" if chip_has_tf32 else " (emulated)"


def round_to_tf32(x):
    """Keep 10 of FP32's 23 mantissa bits, round to nearest, ties to even: what TF32 hardware does to its inputs."""
    bits = x.view(torch.int32)
    last_kept_bit = (bits >> 13) & 1
    return ((bits + 0xFFF + last_kept_bit) & ~0x1FFF).view(torch.float32)


FORMATS = {
    "FP32": lambda x: x.to(torch.float32),
    "TF32" + mark: lambda x: round_to_tf32(x.to(torch.float32)),
    "BF16": lambda x: x.to(torch.bfloat16),
    "FP16": lambda x: x.to(torch.float16),
}

print("== 1. What each format can hold (probed by rounding numbers to it)")
print(f"{'format':<16}{'bits':>20}{'largest':>14}{'least normal':>14}{'least subnormal':>17}{'spacing at 1':>15}")
for name, rounded in FORMATS.items():

    def hold(x, rounded=rounded):
        """The number that the format keeps when given x."""
        return rounded(torch.tensor(x, dtype=torch.float64)).item()

    spacing = 1.0  # the least step that 1 + step can still show
    while hold(1 + spacing / 2) != 1:
        spacing /= 2
    top, bottom, least = 0, 0, 1.0  # the exponents of the largest and of the smallest normal number
    while math.isfinite(hold((2 - spacing) * 2.0 ** (top + 1))):
        top += 1
    while hold(2.0 ** (bottom - 1) * (1 + spacing)) == 2.0 ** (bottom - 1) * (1 + spacing):
        bottom -= 1  # below the normal numbers the last mantissa bit is lost first
    while hold(least / 2) != 0:
        least /= 2
    mantissa, exponent = round(-math.log2(spacing)), round(math.log2(top - bottom + 3))  # + zero's and infinity's
    bits, largest = f"1 + {exponent} + {mantissa} = {1 + exponent + mantissa}", (2 - spacing) * 2.0**top
    print(f"{name:<16}{bits:>20}{largest:>14.6g}{2.0**bottom:>14.3e}{least:>17.3e}{spacing:>15.9g}")

print("\n== 2. FP16's two borders")
for x in (65504.0, 65519.0, 65520.0, 2.0**-24, 2.0**-25):
    fp16, bf16 = (torch.tensor(x).to(dtype).item() for dtype in (torch.float16, torch.bfloat16))
    print(f"{x:<12.6g} FP16 holds {fp16:<12.6g} BF16 holds {bf16:.6g}")

print("\n== 3. One update: weight 1, learning rate x gradient = 0.0001")
for name, dtype in (("FP16", torch.float16), ("BF16", torch.bfloat16)):
    low, copy, steps = torch.ones((), dtype=dtype), torch.ones(()), 1
    low, copy = low + 0.0001, copy + 0.0001
    print(f"{name} weight after it: {low.item():.6g} (vanished); its FP32 copy: {copy.item():.6g} (arrived)")
    while copy.to(dtype) == 1:  # the copy collects updates until the low-precision weight can show them
        low, copy, steps = low + 0.0001, copy + 0.0001, steps + 1
    print(f"     after {steps} such updates: {low.item():.6g} without a copy, {copy.to(dtype).item():.6g} through it")

# A small model that predicts the next byte of this file from the 8 before it. Its loss is divided by the tokens of a
# whole global batch, as large runs do; one micro-batch's gradients are then small numbers, and FP16 loses them.
text_T = torch.tensor(list(Path(__file__).read_bytes()), device=device)
alphabet, text_T = text_T.unique(return_inverse=True)
B, C, E, H, V = 128, 8, 16, 64, len(alphabet)
GLOBAL_TOKENS, LEARNING_RATE, STEPS, GROWTH_INTERVAL = 2**24, 0.001, 250, 60


def gradients_of(weights, dtype, scale, generator):
    """Loss of one micro-batch (nats a byte) and the gradients, in ``dtype``, of loss x scale / GLOBAL_TOKENS."""
    embedding_VE, inner_EH, outer_HV = weights = [w.to(dtype).detach().requires_grad_() for w in weights]
    start_B = torch.randint(len(text_T) - C, (B,), generator=generator).to(device)
    bytes_BC = text_T[start_B[:, None] + torch.arange(C, device=device)]
    hidden_BH = torch.tanh(embedding_VE[bytes_BC].flatten(1) @ inner_EH)
    loss = F.cross_entropy((hidden_BH @ outer_HV).float(), text_T[start_B + C], reduction="sum")
    return loss.item() / B, torch.autograd.grad(loss * scale / GLOBAL_TOKENS, weights)


def first_weights():
    """The same random FP32 weights at each call."""
    generator = torch.Generator().manual_seed(0)
    shapes, sizes = ((V, E), (C * E, H), (H, V)), (1.0, (C * E) ** -0.5, H**-0.5)
    return [(torch.randn(s, generator=generator) * k).to(device) for s, k in zip(shapes, sizes, strict=True)]


def train(dtype, fp32_copy, scaling):
    """Adam by hand; returns the losses and what happened to the loss scale."""
    weights = [w if fp32_copy else w.to(dtype) for w in first_weights()]
    moments = [(torch.zeros_like(w, dtype=torch.float32), torch.zeros_like(w, dtype=torch.float32)) for w in weights]
    scale, good, taken, losses, events = 2.0**36 if scaling else 1.0, 0, 0, [], []
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        loss, gradients = gradients_of(weights, dtype, scale, generator)
        losses.append(loss)
        if scaling and not all(g.isfinite().all() for g in gradients):  # too large for FP16: skip the step, halve
            scale, good = scale / 2, 0
            events.append(f"step {step}: overflow, step skipped, scale falls to 2^{math.log2(scale):.0f}")
            continue
        good, taken = good + 1, taken + 1
        for i, (gradient, (m, v)) in enumerate(zip(gradients, moments, strict=True)):
            g = gradient.float() * (GLOBAL_TOKENS / B / scale)  # unscaled in FP32; the mean over this batch
            m.lerp_(g, 0.1), v.lerp_(g * g, 0.01)
            update = LEARNING_RATE * (m / (1 - 0.9**taken)) / ((v / (1 - 0.99**taken)).sqrt() + 1e-8)
            weights[i] = (weights[i].float() - update).to(weights[i].dtype)  # rounded here when there is no copy
        if scaling and good == GROWTH_INTERVAL:
            scale, good = scale * 2, 0
            events.append(f"step {step}: {GROWTH_INTERVAL} good steps, scale rises to 2^{math.log2(scale):.0f}")
    return losses, events


print(f"\n== 4. Gradients flushed to zero (loss divided by {GLOBAL_TOKENS} tokens)")
for name, dtype, scale in (("FP32", torch.float32, 1), ("FP16", torch.float16, 1), ("FP16", torch.float16, 2**20)):
    _, gradients = gradients_of(first_weights(), dtype, scale, torch.Generator().manual_seed(1))
    zeros, total = sum((g == 0).sum().item() for g in gradients), sum(g.numel() for g in gradients)
    print(f"{name}, loss scale {scale:<8}: {zeros} of {total} gradients are zero ({zeros / total:.1%})")

RUNS = {"fp32": (torch.float32, True, False), "bf16, no copy": (torch.bfloat16, False, False)}
RUNS |= {"bf16 + copy": (torch.bfloat16, True, False), "fp16, no scale": (torch.float16, True, False)}
RUNS |= {"fp16 + scale": (torch.float16, True, True)}
curves = {name: train(*setting) for name, setting in RUNS.items()}
print("\n== 5. The dynamic loss scale of the run 'fp16 + scale'\n" + "\n".join(curves["fp16 + scale"][1]))
print("\n== 6. Five loss curves (nats a byte, mean of the last 10 steps)")
print(" " * 8 + "".join(f"{name:>16}" for name in RUNS))
for step in range(STEPS // 5, STEPS + 1, STEPS // 5):
    print(f"step {step:<3}" + "".join(f"{sum(losses[step - 10 : step]) / 10:>16.3f}" for losses, _ in curves.values()))

N = 256 if device.type == "cpu" else 4096
print(f"\n== 7. Matrix products of {N} x {N} on this {device.type} (half a second each)")
for name, rounded in FORMATS.items():
    torch.set_float32_matmul_precision("high" if "TF32" in name and chip_has_tf32 else "highest")
    a_NN, count = rounded(torch.randn(N, N, device=device)), 0
    (a_NN @ a_NN).sum().item()  # warm up; .item() waits for the device
    start = time.perf_counter()
    while time.perf_counter() - start < 0.5:
        total, count = (a_NN @ a_NN).sum(), count + 1
        total.item()
    print(f"{name:<16}{2 * N**3 * count / (time.perf_counter() - start) / 1e9:>12.1f} GFLOP/s")
