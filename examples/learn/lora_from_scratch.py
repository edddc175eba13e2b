"""A low-rank adapter from scratch: freeze the base, train two thin matrices beside it, fold them in, compare logits.

Run: ``python lora_from_scratch.py [MODEL]`` (a model folder; without one, a small llama trained here first), or under
``torchrun --nproc-per-node 2``: then every rank holds the whole base, and only the adapters' gradients are summed.
Suffixes: B rows, T tokens, I inputs and O outputs of a linear layer, R the adapter's rank, V vocabulary.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
if ranks > 1:
    if device.type != "cpu":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(dist.get_default_backend_for_device(device))
say = print if rank == 0 else lambda text: None
folder = sys.argv[1] if len(sys.argv) > 1 else None
B, T, R, ALPHA, BASE_STEPS, STEPS = 8, 32, 8, 16, 60, 80


class LoraLinear(nn.Module):
    """A linear layer with an adapter beside it: y = x W' + (ALPHA / R) (x A') B'."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.A_RI = nn.Parameter(torch.randn(R, base.in_features, device=base.weight.device) * base.in_features**-0.5)
        self.B_OR = nn.Parameter(
            torch.zeros(base.out_features, R, device=base.weight.device)
        )  # so it starts as nothing

    def forward(self, x_BTI):
        return self.base(x_BTI) + (ALPHA / R) * F.linear(F.linear(x_BTI, self.A_RI), self.B_OR)

    def folded(
        self,
    ):  # the base layer with W + (ALPHA / R) B A: no extra work, no extra memory, no trace of the adapter
        self.base.weight.data += (ALPHA / R) * self.B_OR.detach() @ self.A_RI.detach()
        return self.base


def replace_linears(blocks, new_layer):
    """Put ``new_layer(module)`` where it returns one; returns how many were replaced."""
    replaced = 0
    for block in blocks:
        for parent in list(block.modules()):
            for name, child in list(parent.named_children()):
                if (layer := new_layer(child)) is not None:
                    setattr(parent, name, layer)
                    replaced += 1
    return replaced


def train(model, text_N, steps, learning_rate):
    """AdamW on whatever is not frozen; prints the first and the last loss."""
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=learning_rate)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step * ranks + rank)
        start_B1 = torch.randint(len(text_N) - T, (B, 1), generator=generator)
        tokens_BT = text_N[start_B1 + torch.arange(T)].to(device)
        loss = model(tokens_BT, labels=tokens_BT).loss
        loss.backward()
        for p in weights if ranks > 1 else ():
            dist.all_reduce(p.grad)
            p.grad /= ranks
        optimizer.step()
        optimizer.zero_grad()
        if step in (0, steps - 1):
            say(f"  step {step}: loss {loss.item():.3f}")


# The base has learnt this file; an adapter is to teach it to write _ for every space.
text = Path(__file__).read_text(encoding="utf-8")
torch.manual_seed(0)
if folder:
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    base_N, new_N = (torch.tensor(tokenizer(t).input_ids) for t in (text, text.replace(" ", "_")))
else:
    shape = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model("llama", vocab_size=256, num_hidden_layers=2, **shape)
    model = AutoModelForCausalLM.from_config(config)
    base_N, new_N = (torch.tensor(list(t.encode())) for t in (text, text.replace(" ", "_")))
model.float().to(device)
if not folder:
    say("the base learns this file")
    train(model, base_N, BASE_STEPS, 0.003)

model.requires_grad_(False)
probe_1T = new_N[None, :T].to(device)
with torch.no_grad():
    base_logits_1TV = model(probe_1T).logits
blocks = max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=len)
num_layers = replace_linears(blocks, lambda m: LoraLinear(m) if type(m) is nn.Linear else None)
with torch.no_grad():
    assert torch.equal(model(probe_1T).logits, base_logits_1TV)  # B is zero: nothing has changed yet
trained, total = (sum(p.numel() for p in model.parameters() if p.requires_grad or every) for every in (False, True))
say(f"{num_layers} layers get an adapter of rank {R}: {trained:,} of {total:,} parameters are trained")
say(f"  gradients and Adam's moments, FP32: {12 * trained:,} bytes; for full training {12 * (total - trained):,}")
say("the adapter learns _ for every space; the base is frozen")
frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
train(model, new_N, STEPS, 0.02)
assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen)

with torch.no_grad():
    adapted_logits_1TV = model(probe_1T).logits
    replace_linears(blocks, lambda m: m.folded() if isinstance(m, LoraLinear) else None)
    folded_logits_1TV = model(probe_1T).logits
moved = (adapted_logits_1TV - base_logits_1TV).abs().max().item()
difference = (folded_logits_1TV - adapted_logits_1TV).abs().max().item()
assert difference < moved / 1000, (difference, moved)
say(f"the adapter moved the logits by up to {moved:.3f}; folded into the base they differ by {difference:.1e} at most")
say(f"parameters now: {sum(p.numel() for p in model.parameters()):,}, those of the base")
if ranks > 1:
    dist.destroy_process_group()
