"""PyTorch's own fully sharded data parallelism: shard by block, train in BF16, save, load, generate.

Run: ``torchrun --nproc-per-node 2 fsdp_torch.py [MODEL]`` (a model folder; without one, a small random llama). Trained
twice: as ZeRO-2, where gathered weights stay until the backward pass is over, and as ZeRO-3, where each block's weights
are freed after its forward pass and gathered again for its backward pass. Suffixes: B rows, T tokens.
"""

import os
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

rank, ranks, device = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), torch.device("cpu")
if torch.accelerator.is_available():
    device = torch.accelerator.current_accelerator()
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
dist.init_process_group(dist.get_default_backend_for_device(device))
warnings.filterwarnings("ignore", message=".*returned a view tensor")  # about writing into logits; we only read them
say = print if rank == 0 else lambda text: None
B, T, STEPS, LEARNING_RATE = 4, 32, 8, 0.01
folder = sys.argv[1] if len(sys.argv) > 1 else None

# The data: this file's own text. The small model reads bytes; a model folder brings its tokenizer.
text = Path(__file__).read_text(encoding="utf-8")
tokenizer = AutoTokenizer.from_pretrained(folder) if folder else None
tokens_N = torch.tensor(tokenizer(text).input_ids if folder else list(text.encode()))


def unsharded_model():
    """The whole model in FP32 on this rank's CPU, the same on every rank."""
    if folder:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=256, num_hidden_layers=4, **shape))


def shard(model, zero):
    """Each block is a unit of its own, and what is left (embedding, norm, head) another: the root."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)  # gather BF16, sum FP32
    blocks = max((m for m in model.modules() if isinstance(m, torch.nn.ModuleList)), key=len)
    for unit in (*blocks, model):
        fully_shard(unit, reshard_after_forward=zero == 3, mp_policy=policy)
    return model


def loss_of(model, step):  # mean over this rank's rows; fully_shard averages the gradients over the ranks
    generator = torch.Generator().manual_seed(step * ranks + rank)
    start_B1 = torch.randint(len(tokens_N) - T, (B, 1), generator=generator)
    tokens_BT = tokens_N[start_B1 + torch.arange(T)].to(device)
    return model(tokens_BT, labels=tokens_BT).loss


def make_optimizer(model):  # the FP32 shards are the FP32 copy; AdamW's moments are sharded like them
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)


class Gathers(TorchDispatchMode):
    """While it is on, sees every operation and counts the all-gathers."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.count += "allgather" in str(operation)
        return operation(*args, **(kwargs or {}))


for zero in (2, 3):
    model = shard(unsharded_model(), zero)
    optimizer = make_optimizer(model)
    for step in range(STEPS):
        with Gathers() as forward:
            loss = loss_of(model, step)
        # A weight is a DTensor, this rank's shard, except while it is gathered: then it is whole and in BF16.
        whole_bytes = sum(p.nbytes for p in model.parameters() if not isinstance(p, DTensor))
        with Gathers() as backward:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (0, STEPS - 1):
            say(f"ZeRO-{zero}, step {step}: loss on rank 0 {loss.item():.3f}; {forward.count} all-gathers in forward,")
            say(f"  {backward.count} in backward; whole weights kept between the two: {whole_bytes:,} bytes")

# Save: every rank writes its own shards of weights and optimizer. The folder must be one that all ranks see.
place = [tempfile.mkdtemp()]
dist.broadcast_object_list(place)
weights, states = get_state_dict(model, optimizer)
dcp.save({"weights": weights, "states": states}, checkpoint_id=place[0])

# Load: into a fresh model, sharded in the same way (the number of ranks may be another one). Both then go on as one.
loaded = shard(unsharded_model(), zero=3)
loaded_optimizer = make_optimizer(loaded)
weights, states = get_state_dict(loaded, loaded_optimizer)
dcp.load({"weights": weights, "states": states}, checkpoint_id=place[0])
set_state_dict(loaded, loaded_optimizer, model_state_dict=weights, optim_state_dict=states)
losses = []
for one, its_optimizer in ((model, optimizer), (loaded, loaded_optimizer)):
    loss_of(one, STEPS).backward()
    its_optimizer.step()
    losses.append(loss_of(one, STEPS + 1).item())
assert abs(losses[0] - losses[1]) < 1e-3, losses
say(f"saved, loaded, one step further with both: loss {losses[0]:.6f} and {losses[1]:.6f}")

# Generate: rank 0 gets the whole weights, writes them as an ordinary model folder, and works with that folder alone.
whole = get_model_state_dict(loaded, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
if rank == 0:
    model = unsharded_model()
    model.load_state_dict(whole)
    model.save_pretrained(place[0])
    reloaded = AutoModelForCausalLM.from_pretrained(place[0]).to(device)
    prompt_1T = tokens_N[None, :T].to(device)
    answer_N = reloaded.generate(prompt_1T, max_new_tokens=24, do_sample=False, pad_token_id=0)[0, T:].tolist()
    say(f"generated: {tokenizer.decode(answer_N) if folder else bytes(answer_N)!r}")
    shutil.rmtree(place[0])
dist.barrier()
dist.destroy_process_group()
