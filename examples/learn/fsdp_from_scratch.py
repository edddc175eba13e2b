"""Fully sharded data parallelism from scratch: flatten, shard, gather, free, gather again, reduce-scatter, step.

Run: ``torchrun --nproc-per-node 2 fsdp_from_scratch.py``. A small model is trained as DDP, ZeRO-1, 2 and 3, each
compared with an unsharded process, and the bytes that are held and sent are counted. Suffixes: B rows, T tokens,
V vocabulary; P one unit's parameters with padding, S = P / ranks one rank's share of them.
"""

import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

rank, ranks, device = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), torch.device("cpu")
if torch.accelerator.is_available():
    device = torch.accelerator.current_accelerator()
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
dist.init_process_group(dist.get_default_backend_for_device(device))
B, T, D, V, BLOCKS, STEPS, LEARNING_RATE, DECAY = 16, 8, 32, 64, 3, 3, 0.001, 0.01
sent_bytes, events, say = 0, [], print if rank == 0 else lambda text: None


def ring(full_P, add):
    # Cut a buffer in one piece per rank and pass the pieces around; all that a training sends, it sends here.
    # add=False is all-gather: rank r brings piece r, and every rank ends with all pieces.
    # add=True is reduce-scatter: rank r ends with the sum over the ranks of piece r (the others are half done).
    global sent_bytes
    pieces_S = full_P.chunk(ranks)
    for step in range(ranks - 1):
        send_S, receive_S = pieces_S[(rank - step - add) % ranks], pieces_S[(rank - step - add - 1) % ranks]
        arrived_S = torch.empty_like(receive_S)
        sending = dist.P2POp(dist.isend, send_S, (rank + 1) % ranks)
        for work in dist.batch_isend_irecv([sending, dist.P2POp(dist.irecv, arrived_S, (rank - 1) % ranks)]):
            work.wait()
        receive_S.copy_(receive_S + arrived_S if add else arrived_S)
        sent_bytes += send_S.nbytes


class Unit:
    """A module whose parameters lie end to end in one flat buffer: what is gathered, freed and reduced at once."""

    def __init__(self, number, module, zero, dtype):
        # zero 0 is DDP; ZeRO-1 shares out the FP32 copy and Adam's moments, 2 the gradients too, 3 the weights too
        self.number, self.module, self.zero, self.parameters = number, module, zero, list(module.parameters())
        flat_P = parameters_to_vector(self.parameters).detach()  # flatten
        self.padding = (0, -len(flat_P) % ranks)  # zeros at the end, so that all shares are equally long
        flat_P = nn.functional.pad(flat_P, self.padding)
        self.own = slice(rank * len(flat_P) // ranks, (rank + 1) * len(flat_P) // ranks) if zero else slice(None)
        self.copy_S = flat_P[self.own].clone()  # shard: our share of the FP32 copy and of Adam's two moments
        self.mean_S, self.square_S = torch.zeros_like(self.copy_S), torch.zeros_like(self.copy_S)
        self.weights_P = flat_P.to(dtype)  # the low-precision weights that compute
        self.weights_S, self.nbytes = self.weights_P[self.own], self.weights_P.nbytes
        vector_to_parameters(self.weights_P, self.parameters)  # the module's parameters look into the flat buffer
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self.after_gradient)
        if zero == 3:
            self.weights_S = self.weights_S.clone()
            self.free()
            module.register_forward_pre_hook(lambda *_: self.gather())
            module.register_forward_hook(self.after_forward)

    def free(self):  # the full weights' memory goes; the tensors that look into it stay, autograd's too
        self.weights_P.untyped_storage().resize_(0)
        events.append(f"free {self.number}")

    def gather(self):  # memory again: our share is put in its place, the others' shares come from them
        self.weights_P.untyped_storage().resize_(self.nbytes)
        self.weights_P[self.own] = self.weights_S
        ring(self.weights_P, add=False)
        events.append(f"gather {self.number}")

    def after_forward(self, module, inputs, output):  # come back just before this unit's backward pass
        self.free()
        output.register_hook(lambda gradient: self.gather())

    def after_gradient(self, parameter):  # after the unit's last: sum over the ranks, keep what the stage keeps
        if all(p.grad is not None for p in self.parameters):
            self.gradient = nn.functional.pad(parameters_to_vector([p.grad for p in self.parameters]), self.padding)
            self.module.zero_grad()  # the gradients by parameter go
            ring(self.gradient, add=True)
            events.append(f"reduce-scatter {self.number}")
            if self.zero == 0:
                ring(self.gradient, add=False)  # after the reduce-scatter an all-gather: together DDP's all-reduce
            if self.zero >= 2:  # ZeRO-1 keeps the room of the whole gradient until the next one
                self.gradient = self.gradient[self.own].clone()
            if self.zero == 3:
                self.free()

    def step(self, number):  # AdamW in FP32 on our share; its low-precision image goes to all who keep full weights
        gradient_S = (self.gradient[self.own] if self.zero == 1 else self.gradient).float()
        self.mean_S.lerp_(gradient_S, 0.1)
        self.square_S.lerp_(gradient_S**2, 0.001)
        update_S = self.mean_S / (1 - 0.9**number) / ((self.square_S / (1 - 0.999**number)).sqrt() + 1e-8)
        self.copy_S.mul_(1 - LEARNING_RATE * DECAY).sub_(LEARNING_RATE * update_S)
        self.weights_S.copy_(self.copy_S)
        if self.zero in (1, 2):
            ring(self.weights_P, add=False)


def make_model():  # the same random FP32 weights on every rank: embedding, blocks, head
    torch.manual_seed(0)
    blocks = [nn.TransformerEncoderLayer(D, 4, 4 * D, 0, batch_first=True, bias=False) for _ in range(BLOCKS)]
    return nn.Sequential(nn.Embedding(V, D), *blocks, nn.Linear(D, V)).to(device)


def loss_of(model, step, part):  # of one rank's rows, divided by all ranks' rows: then gradients only have to be added
    generator = torch.Generator().manual_seed(1000 * step + part)
    start_B1, stride_B1 = torch.randint(1, V, (2, B, 1), generator=generator).to(device)
    tokens_BT = (start_B1 + stride_B1 * torch.arange(T + 1, device=device)) % V
    logits_BV = model(tokens_BT[:, :-1])[:, -1].float()
    return nn.functional.cross_entropy(logits_BV, tokens_BT[:, -1], reduction="sum") / (B * ranks)


for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-4)):
    copy, model, w = make_model(), make_model().to(dtype), dtype.itemsize
    adam = torch.optim.AdamW(copy.parameters(), lr=LEARNING_RATE, weight_decay=DECAY)
    for step in range(1, STEPS + 1):  # the unsharded process does all ranks' parts in turn
        for part in range(ranks):
            loss_of(model, step, part).backward()
        for fp32, p in zip(copy.parameters(), model.parameters(), strict=True):
            fp32.grad, p.grad = p.grad.float(), None
        adam.step()
        model.load_state_dict(copy.state_dict())
    for zero in range(4):
        model = make_model()
        units = [Unit(number, module, zero, dtype) for number, module in enumerate(model)]
        events, sent_bytes, apart = [], 0, []
        for step in range(1, STEPS + 1):
            loss_of(model, step, rank).backward()
            tensors = [value for unit in units for value in vars(unit).values() if isinstance(value, torch.Tensor)]
            held = sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())
            for unit in units:
                unit.step(step)
        for unit, module in zip(units, copy, strict=True):
            right_P = nn.functional.pad(parameters_to_vector(module.parameters()).detach(), unit.padding)
            apart.append((unit.copy_S - right_P[unit.own]).abs())
        most, mean = torch.cat(apart).max().item(), torch.cat(apart).mean().item()
        assert (most if w == 4 else mean) <= tolerance, f"ZeRO-{zero}, {dtype}: weights differ by {most}, mean {mean}"
        say(
            f"{dtype}, {f'ZeRO-{zero}' if zero else 'DDP'}: weights differ by at most {most:.1e}, on average {mean:.1e}"
        )
        P, sent, worth = sum(unit.nbytes for unit in units) // w, sent_bytes // STEPS, 3 if zero == 3 else 2
        own, divided = ((2 * w + 12, 0), (2 * w, 12), (w, w + 12), (0, 2 * w + 12))[zero]  # bytes a parameter
        say(f"  held {held:,} bytes; {own} P + {divided} P / {ranks} = {own * P + divided * P // ranks:,}")
        say(f"  sent {sent:,} bytes; {worth} x {w} P x {ranks - 1}/{ranks} = {worth * w * P * (ranks - 1) // ranks:,}")
say(f"P = {P:,} with padding. ZeRO-3's step by units (0: embedding): " + " > ".join(events[: len(events) // STEPS]))
say(f"While a unit computes, ZeRO-3 holds its weights too: at most {max(unit.nbytes for unit in units):,} bytes more")
dist.destroy_process_group()
