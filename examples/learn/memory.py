"""Memory of a training run estimated by hand, and every formula measured on a small model beside it.

Run: ``python memory.py MODEL --ranks 8`` (a model folder or its config.json; no weights are read). Textbook mixed
precision: weights, gradients and activations in BF16; an FP32 copy of the weights and Adam's two moments in FP32.
"""

import argparse
import copy
import os
import re
from collections import Counter
from functools import partial

import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model")
parser.add_argument("--ranks", type=int, required=True, help="number of devices")
parser.add_argument("--batch", type=int, default=1, help="rows per device and micro-batch")
parser.add_argument("--sequence", type=int, default=2048, help="tokens per row")
parser.add_argument("--interval", type=int, default=1, help="one activation checkpoint every so many blocks")
arguments = parser.parse_args()
if os.environ.get("RANK", "0") != "0":
    raise SystemExit  # under torchrun one process is enough
device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
config = AutoConfig.from_pretrained(arguments.model.removesuffix("config.json") or ".").get_text_config()
shape = {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 8, "num_key_value_heads": 2}
small_config = AutoConfig.for_model("llama", num_hidden_layers=4, vocab_size=512, **shape)
B, S = 2, 128  # the small model's rows and tokens per row; it has one checkpoint per block


def build(config, where, kernel="sdpa"):
    """A BF16 model with random weights on ``where`` ("meta": shapes, no memory), and the list of its blocks."""
    with torch.device(where):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=kernel, dtype=torch.bfloat16).train()
    return model, max((m for m in model.modules() if isinstance(m, torch.nn.ModuleList)), key=len)


def sizes(config, **layout):
    """The names that the formulas use."""
    model, blocks = build(config, "meta")
    whole, block = ([p.numel() for p in module.parameters()] for module in (model, blocks[0]))
    names = {"P": sum(whole), "block": sum(block), "largest": max(whole)}
    names |= {"layers": len(blocks), "hidden": config.hidden_size, "heads": config.num_attention_heads}
    return names | layout | {"vocabulary": config.vocab_size, "ranks": arguments.ranks}


def saved(model, run):
    """Sizes in bytes of what autograd keeps for the backward pass of ``run()``: each storage once, no weights."""
    kept = []  # the tensors themselves, so that no storage's address is used again
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        run()
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in kept}
    return Counter(size for storage, size in storages.items() if storage not in weights)


def saved_by_block(config, batch, sequence, kernel, fake=False):
    """Sizes of what one block keeps: a model of two blocks less a model of one. Fake tensors have shapes only."""
    config, kept = copy.deepcopy(config), []
    for layers in (1, 2):
        config.num_hidden_layers = layers
        with FakeTensorMode() if fake else torch.enable_grad():
            model, blocks = build(config, device, "sdpa" if kernel == "checkpointed" else kernel)
            for block in blocks if kernel != "eager" else ():  # causal without a mask, as in a real run
                block.register_forward_pre_hook(lambda m, a, k: (a, k | {"attention_mask": None}), with_kwargs=True)
                if kernel == "checkpointed":  # keep what enters the block; run it again in the backward pass
                    block.forward = lambda x, f=block.forward, **k: checkpoint(partial(f, **k), x, use_reentrant=True)
            tokens = torch.zeros(batch, sequence, dtype=torch.long, device=device)
            kept.append(saved(model, lambda model=model, tokens=tokens: model(tokens, use_cache=False)))
    return kept[1] - kept[0]


def line(name, formula, measured, unit="bytes"):
    """Print a formula, then with the numbers of MODEL, then with the small model's and its measurement beside."""
    print(f"{name}: {formula}")
    for label, names in NAMES.items():
        with_numbers = re.sub(r"[A-Za-z]\w+|P", lambda match, names=names: str(names[match[0]]), formula)
        total = round(eval(with_numbers.replace(" x ", " * ").replace("^", "**")))
        size = f"{total / 2**30:.3f} GiB" if unit == "bytes" else f"{total / 1e9:.3f} billion"
        beside = f"measured {measured:,}" if label == "small" else size
        print(f"    {label}  {with_numbers} = {total:,} {unit}; {beside}")
    return total


NAMES = {"small": sizes(small_config, batch=B, sequence=S, interval=1)}
batch, sequence, interval = arguments.batch, arguments.sequence, arguments.interval
NAMES["MODEL"] = sizes(config, batch=batch, sequence=sequence, interval=interval)
# One training step of the small model in mixed precision, measured as it goes.
small, small_blocks = build(small_config, device)
tokens_BS = torch.randint(small_config.vocab_size, (B, S), device=device)
logits = small(tokens_BS).logits.float()
loss_saved = saved(small, lambda: F.cross_entropy(logits.flatten(0, 1), tokens_BS.flatten()))
logits.register_hook(lambda gradient: loss_saved.update([gradient.nbytes]))
F.cross_entropy(logits.flatten(0, 1), tokens_BS.flatten()).backward()
master = [p.detach().float().requires_grad_() for p in small.parameters()]  # the FP32 copy
for p, fp32 in zip(small.parameters(), master, strict=True):
    fp32.grad = p.grad.float()
adam = torch.optim.AdamW(master)
adam.step()
moments = [state[key] for state in adam.state.values() for key in ("exp_avg", "exp_avg_sq")]
states = list(small.parameters()), [p.grad for p in small.parameters()], master, moments
flat = [torch.cat([t.detach().flatten() for t in tensors]) for tensors in states]
w, g, c, m = (f.nbytes for f in flat)  # weights, gradients, copy, moments
w1, g1, c1, m1 = (f.chunk(arguments.ranks)[0].nbytes for f in flat)  # the share of rank 0

print("== 1. Parameters")
in_blocks = sum(p.numel() for p in small_blocks.parameters())
line("the blocks' matrices", "12 x layers x hidden^2", in_blocks, "parameters")
line("the real count of the blocks", "layers x block", in_blocks, "parameters")
line("the real count of the whole model", "P", w // 2, "parameters")
print("\n== 2. Model states (without ZeRO every rank holds them all)")
line("weights, BF16", "2 x P", w)
line("gradients, BF16", "2 x P", g)
line("FP32 copy", "4 x P", c)
line("Adam's two moments, FP32", "(4 + 4) x P", m)
line("DDP holds them all", "16 x P", w + g + c + m)
line("ZeRO-1 divides copy and moments", "4 x P + 12 x P / ranks", w + g + c1 + m1)
line("ZeRO-2 divides gradients too", "2 x P + 14 x P / ranks", w + g1 + c1 + m1)
total = line("ZeRO-3 divides weights too", "16 x P / ranks", w1 + g1 + c1 + m1)
print("\n== 3. Residual states: activations")
inputs = len(small_blocks) * sum(saved_by_block(small_config, B, S, "checkpointed").elements())
total += line("checkpointed activations", "2 x batch x sequence x hidden x layers / interval", inputs)
kernels = {"eager": "keeps sequence x sequence scores", "sdpa": "the kernel in use on this device"}
seen = {kernel: saved_by_block(small_config, B, S, kernel) for kernel in kernels}
working = "batch x sequence x interval x (16 x hidden + 2 x heads x sequence)"
line("working activations from one checkpoint to the next", working, sum(seen["eager"].elements()))
for kernel, what in kernels.items():
    block = sum(saved_by_block(config, batch, sequence, kernel, fake=True).elements())
    print(f"    really saved with attention {kernel!r} ({what}):", end=" ")
    print(f"small {sum(seen[kernel].elements()):,}, MODEL {interval * block:,}")
total += interval * block  # the kernel in use

print("\n== 4. Residual states: temporary buffers and fragmentation")
in_block, anywhere = (max(p.nbytes for p in module.parameters()) for module in (small_blocks, small))
line("largest operator, weights and gradients", "4 x hidden x 4 x hidden", 2 * in_block)
total += line("the really largest matrix", "(2 + 2) x largest", 2 * anywhere)
total += line("one block gathered", "2 x block", sum(p.nbytes for p in small_blocks[0].parameters()))
total += line("logits, FP32, and their gradient", "8 x batch x sequence x vocabulary", sum(loss_saved.elements()))
# A pool that uses a freed piece only for the same size again cannot give a shorter batch's pieces to a longer one.
unfit = saved_by_block(small_config, B, S // 2, "eager") - seen["eager"]
line("fragmentation: a batch half as long", working.replace("sequence", "sequence / 2"), sum(unfit.elements()))
if device.type != "cpu":
    unused = torch.accelerator.memory_reserved() - torch.accelerator.memory_allocated()
    print(f"    this device's pool after all the above: {unused:,} bytes reserved and not in use")
print(f"\nZeRO-3 on {arguments.ranks} ranks, MODEL per rank: states + activations + buffers = {total / 2**30:.2f} GiB")
