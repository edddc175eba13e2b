"""A row of published_runs.csv as the planner's inputs: the model's shape, the job, and what its trainer does.

What is typed here are facts of trainers and model families, each with its reason; no value belongs to a row.
"""

from __future__ import annotations

import csv
import dataclasses
import itertools
import re
from dataclasses import dataclass
from pathlib import Path

from fullshard.planning.hardware import Accelerator, parse_devices
from fullshard.planning.memory import Job, Practice
from fullshard.planning.shape import ModelShape
from fullshard.planning.speed import Run

CARDS = {  # words in the file's "gpu" column: the name that --devices takes; more special ones first
    "h100.*96gb": "h100-96g", "h100.*pcie": "h100-pcie", "h100.*nvl": "h100-nvl", "gb300": "gb300", "gb200": "gb200",
    "a100.*40gb": "a100-40g", "a100.*pcie": "a100-pcie", "4090 ?d": "4090d", "a800.*pcie": "a800-pcie", "910c": "910c",
}  # fmt: skip
PLAIN_CARDS = (
    "b200 h200 h20 h800 h100 a100 a800 l40s l20 l4 a6000 5090 4090 3090 a10g v100 t4 mi300x "
    "910b1 910b2 910b3 910b4 910a"
)
RESERVED_BAND = (0.95, 1.36)  # the allocator's reserved peak over the predicted allocated one: the stated band
PADDING = 1.5  # four rows of random length as long as the longest, over their mean (lengths spread by half their mean)
HOST_MEMORY = (
    12e9  # bytes per second of one of 8 ranks whose optimizer runs on the CPU: a share of about 100 - 200 GB/s
)
SLOW_LANES = 8e9  # "old board, slow lanes": PCIe 3.0 x8, assumed
PCIE = 25e9  # PCIe 4.0 x16 in practice
ROOT = Path(__file__).parents[1]
ROWS = ROOT.parent / "shared" / "data" / "published_runs.csv"
ONE_NORM = ("phi-1", "phi-2", "falcon")  # attention and MLP read the same normed input
HEAD_NORMS = ("qwen3",)  # norms of every head's queries and keys

# Bytes that one logit costs at the peak, by the loss that ran:
TORCH_LOGIT = 12  # torch's cross-entropy on fp32 logits: the logits, log-probabilities and gradient, 4 each
COMPILED_LOGIT = 10  # compiled: the fp32 form of the bf16 logits is not written
FUSED_LOGIT = (
    8  # Triton kernels (foak, Liger, flash-attn): the gradient over fp32 logits, beside the bf16 form and its gradient
)
SHIFTED_LOGIT = (
    24  # transformers before 4.45: bf16, fp32, shifted fp32 copy, log-probabilities, gradient and its padded form
)
LITGPT_LOGIT = 4  # bf16 logits and log-probabilities; gradients exist for one chunk of 128 at a time
SHIFTED = ("fsdp_qlora", "ms-swift 2", "llama-recipes")  # trainers on transformers 4.36 - 4.44
EAGER_LOSS = ("kempnerforge",)  # compiles blocks, not the loss
# Gradients of all but the last micro-batch are not reduced, so that they wait whole (scripts/train.py: maybe_no_sync)
NO_SYNC = ("kempnerforge",)
DROPOUT_BYTES = 3  # LoRA's dropout keeps a mask and its bf16 output for every input feature of an adapted layer
FUSED_POSITIONS = 2048  # fused linear + cross-entropy works on chunks of about this many positions


@dataclass(frozen=True)
class Case:
    """A published run as the planner sees it."""

    row: dict[str, str]
    shape: ModelShape
    job: Job
    practice: Practice
    run: Run
    card: Accelerator | None  # None: the row names no card
    host_seconds: float  # of a micro-batch: states or weights that pass through host memory

    @property
    def published_memory(self) -> float | None:
        """Peak in GiB."""
        return number(self.row["peak_mem_gib"])

    @property
    def published_speed(self) -> float | None:
        """Tokens per second and device."""
        return number(self.row["tok_s_per_gpu"])

    @property
    def memory_kind(self) -> str:
        """allocated | reserved | unknown: what the published peak means (notes, section 2)."""
        words = self.row["mem_kind"].lower()
        if words.startswith(("peak allocated", "peak active")):
            return "allocated"
        return (
            "reserved" if "reserved" in words and "not stated" not in words and "probably" not in words else "unknown"
        )


def read_rows(path: Path = ROWS) -> list[dict[str, str]]:
    """All rows of the file."""
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def number(text: str) -> float | None:
    """The first number of a cell; None where there is none."""
    found = re.search(r"\d[\d,]*\.?\d*(e\d+)?", text or "")
    return float(found[0].replace(",", "")) if found else None


def out_of_scope(row: dict[str, str]) -> str:
    """Why a row is not scored; empty: it is."""
    method, every = row["method"], " ".join(row[key] for key in ("compute_dtype", "param_dtype", "framework", "method"))
    reasons = {
        "not core": row["core"] not in ("yes", "fit-check"),
        "QLoRA": "QLoRA" in method or bool(row["quant"]),
        "RL": "RL" in method,
        "FP8": "fp8" in every.lower(),
        "model parallel": any(row[key] not in ("", "1") for key in ("tp", "pp", "cp", "ep")),
        "experts": "e" in row["ffn"] or "x" in row["ffn"],
    }
    return ", ".join(reason for reason, holds in reasons.items() if holds)


def shape_of_row(row: dict[str, str]) -> ModelShape:
    """The shape whose parameter count is nearest the published one, over gated or not, tied or not, width of a head."""
    layers, hidden, heads, inner, vocab = (
        int(number(row[key]) or 0) for key in ("n_layers", "hidden", "n_heads", "ffn", "vocab")
    )
    keys, name = int(number(row["n_kv_heads"]) or heads), row["model"].lower()
    inner = inner or 4 * hidden
    total = number(row["params_total"]) or 0

    def count(gated: bool, tied: bool, head_dim: int, positions: int) -> int:
        attention = 2 * hidden * head_dim * (heads + keys)
        block = attention + (3 if gated else 2) * hidden * inner
        return layers * block + (1 if tied else 2) * vocab * hidden + positions * hidden

    widths, length = dict.fromkeys((hidden // heads, 128)), int(number(row["seq_len"]) or 0)
    choices = itertools.product((True, False), (True, False), widths, (0, length))
    gated, tied, head_dim, positions = min(choices, key=lambda choice: abs(count(*choice) - total))
    if "litgpt" in row["framework"].lower() and tied:  # its GPT class keeps a head of its own
        tied, total = False, total + vocab * hidden
    wide, narrow = heads * head_dim, keys * head_dim
    matrices = 2 * hidden * (wide + narrow) + (3 if gated else 2) * hidden * inner
    embedding = (vocab + positions) * hidden
    head = 0 if tied else vocab * hidden
    norms = (1 if name.startswith(ONE_NORM) else 2) * hidden + (wide + narrow) * name.startswith(HEAD_NORMS)
    return ModelShape(
        parameters=int(total), num_layers=layers, block=matrices, blocks=layers * matrices, embedding=embedding,
        head=head, tied=tied, active_block_matrices=layers * matrices, head_matrix=vocab * hidden, vocab_size=vocab,
        hidden_size=hidden, attention_width=wide, key_value_width=narrow, intermediate_size=inner,
        mlp_copies=4 if gated else 2, norm_width=norms,
        fused_norms=not gated or row["torch_compile"].startswith("yes"),  # LayerNorm, or fused by the compiler
        num_heads=heads, eager_attention=False, max_positions=None, largest_tensor=vocab * hidden,
    )  # fmt: skip


def adapters_of_row(row: dict[str, str], shape: ModelShape) -> tuple[int, int]:
    """(adapter parameters, input features of a block's adapted layers): rank x (inputs + outputs) of each."""
    rank, targets = int(number(row["lora_rank"]) or 0), row["lora_targets"].lower()
    hidden, wide, narrow, inner = (
        shape.hidden_size,
        shape.attention_width,
        shape.key_value_width,
        shape.intermediate_size,
    )
    sizes = {"q": (hidden, wide), "k": (hidden, narrow), "v": (hidden, narrow), "o": (wide, hidden)}
    sizes |= {"gate": (hidden, inner), "up": (hidden, inner), "down": (inner, hidden)}
    if shape.mlp_copies != 4:
        del sizes["gate"]
    if row["framework"].lower().startswith("litgpt"):  # q, k and v are one layer
        sizes |= {"q": (hidden, wide + 2 * narrow), "k": (0, 0), "v": (0, 0)}
    words = re.split(r"[^a-z_]+", targets)
    if "c_attn" in words:
        chosen = [(hidden, wide + 2 * narrow)]
    else:
        chosen = [pair for name, pair in sizes.items() if name in words or "all" in targets]
    return rank * sum(map(sum, chosen)) * shape.num_layers, sum(inputs for inputs, _ in chosen)


def practice_of_row(row: dict[str, str], shape: ModelShape, tokens: int, inputs: int) -> Practice:
    """What the row's trainer holds, from its columns."""
    kinds, sharding, optimizer = row["param_dtype"], row["sharding"], row["optimizer"].lower()
    compute = 2
    frozen = 4 if kinds.startswith("fp32") else 2
    weight = 4 if kinds.startswith("fp32") or "lora fp32" in kinds.lower() else 2
    master = 4 if "master" in kinds else 0  # DeepSpeed: bf16 weights and gradients, fp32 master and states
    states = {"fp32": 8, "bf16": 4, "int8": 2}.get(re.split(r"[?/ ]", row["optim_state_dtype"])[0])
    states = 8 if master else 2 * weight if states is None else states
    gradient = 0 if "step in backward" in optimizer else weight
    whole = "full-size grads" in sharding  # the flat unit holds adapters and base, so the base has gradients too
    is_sharded = number(row["fsdp_degree"]) > 1 or (sharding.startswith("FSDP2") and frozen != compute)
    offloads = row["cpu_offload"].startswith("yes")
    if "paged" in optimizer:
        states = 0  # paged out to host memory while blocks run
    if offloads:  # shards live in host memory; only gathered units are on the card
        weight = frozen = gradient = states = 0
    plain = not any(word in optimizer for word in ("fused)", "fused,", "8bit", "paged", "step in backward", "cpu"))
    passing = compute * 2 * (shape.intermediate_size + shape.hidden_size)
    reduced = {"fp32": 4}.get(row["reduce_dtype"].strip("?"), compute)
    return Practice(
        weight=weight + master, gradient=gradient, states=states, 
        frozen=frozen + whole * compute * int(number(row["fsdp_degree"]) or 1),
        gathered=compute if is_sharded else 0, reduced=reduced if is_sharded else 0,
        temporary=weight if plain and not offloads else 0, logit=logit_bytes(row),
        positions=positions_of_row(row, tokens),
        gradients_wait=(number(row["grad_accum"]) or 1) > 1, kept=compute, extra=extra_bytes(row, shape, inputs),
        mask=False, passing=passing,
        selected=selected_bytes(row, shape),
    )  # fmt: skip


def selected_bytes(row: dict[str, str], shape: ModelShape) -> int:
    """Torchtitan's per-op rule: the attention's output and every second product's (q, v, gate, down) are kept."""
    if row["act_offload"].startswith("yes"):
        return -2 * shape.hidden_size  # the block's input waits in host memory
    if not row["act_ckpt"].startswith("selective (per-op"):
        return 0
    products = shape.attention_width + shape.key_value_width + shape.intermediate_size + shape.hidden_size
    return 2 * (products + shape.attention_width)


def logit_bytes(row: dict[str, str]) -> float:
    """Bytes of one logit at the peak, by the loss that ran."""
    loss, trainer = row["chunked_ce"].lower(), row["framework"].lower()
    if trainer.startswith("litgpt"):
        return LITGPT_LOGIT
    if any(word in loss for word in ("liger", "triton fused", "fused lm", "fused ce likely")):
        return FUSED_LOGIT
    if trainer.startswith(SHIFTED):
        return SHIFTED_LOGIT
    compiled = row["torch_compile"] == "yes" and not trainer.startswith(EAGER_LOSS)
    return COMPILED_LOGIT if compiled or "compiled" in loss else TORCH_LOGIT


def extra_bytes(row: dict[str, str], shape: ModelShape, inputs: int) -> int:
    """LoRA: dropout's copies of adapted inputs; a gated MLP's product is kept only where the next layer is adapted."""
    if not inputs:
        return 0
    targets = row["lora_targets"].lower()
    frozen = shape.mlp_copies == 4 and "all" not in targets and "down" not in targets
    return DROPOUT_BYTES * inputs - 2 * shape.intermediate_size * frozen


def positions_of_row(row: dict[str, str], tokens: int) -> int:
    """Logits at once; 0: of all tokens."""
    loss = row["chunked_ce"].lower()
    if found := re.search(r"(\d+) chunks", loss):
        return -(-tokens // int(found[1]))
    if "liger" in loss or "fused lm" in loss:
        return FUSED_POSITIONS
    return 0  # LitGPT's 128-token chunks are of finished logits


def case_of_row(row: dict[str, str]) -> Case:
    """The planner's inputs for one row in scope."""
    shape = shape_of_row(row)
    numbers = [int(found) for found in re.findall(r"\d+", row["seq_len"])] or [1024]
    batch, accumulation = int(number(row["micro_batch"]) or 1), int(number(row["grad_accum"]) or 1)
    mean, is_full = numbers[-1], "LoRA" not in row["method"]
    adapters, inputs = (0, 0) if is_full else adapters_of_row(row, shape)
    kept, tokens = row["act_ckpt"], numbers[0] * batch
    recompute = {"full": True, "none": False}.get(re.split(r"[? ]", kept)[0], shape.num_layers // 2)
    if kept.startswith("selective (per-op"):
        recompute = True
    devices = int(number(row["n_gpus"]) or 1)
    degree = int(number(row["fsdp_degree"]) or devices)
    stays = any(word in row["sharding"] + row["reshard_after_forward"] for word in ("GRAD_OP", "ZeRO-2"))
    job = Job(
        method="full" if is_full else "lora", optimizer="adamw", num_ranks=devices, replicas=devices // degree,
        gathers_all=stays, precision="bf16",
        micro_tokens=tokens, longest=numbers[0], recompute=recompute,
        accumulates=is_full and accumulation > 1 and row["framework"].lower().startswith(NO_SYNC),
        adapters=adapters, on_cpu=False,
    )  # fmt: skip
    practice = practice_of_row(row, shape, tokens, inputs)
    features = adapters // (shape.num_layers * int(number(row["lora_rank"]) or 1))
    run = run_of_row(row, shape, job, practice, (numbers[0], mean, batch, accumulation), features)
    host = host_seconds_of_row(row, shape, job) / accumulation
    return Case(row, shape, job, practice, run, card_of_row(row), host)


def card_of_row(row: dict[str, str]) -> Accelerator | None:
    """The card of the row, as the planner knows it."""
    text = row["gpu"].lower().replace("(sxm/pcie not stated)", "")
    names = [name for words, name in CARDS.items() if re.search(words, text)]
    names += [name for name in PLAIN_CARDS.split() if name in text and "/" not in text.split(" (")[0]]
    if not names:
        return None
    card, node = parse_devices(f"1x{names[0]}")[1], node_of_row(row)
    link = SLOW_LANES if "slow lanes" in row["interconnect"] else card.link_bytes_per_second
    node = card.node_bytes_per_second if node is None else node
    return dataclasses.replace(card, link_bytes_per_second=link, node_bytes_per_second=node)


def run_of_row(
    row: dict[str, str], shape: ModelShape, job: Job, does: Practice, sizes: tuple[int, int, int, int], features: int
) -> Run:
    """What decides the row's speed. ``sizes``: longest, mean tokens, rows of a micro-batch, accumulation."""
    longest, mean, batch, accumulation = sizes
    tokens = (mean * PADDING if mean < longest else longest) * batch
    trainer, attention, kept = row["framework"].lower(), row["attention"].lower(), row["act_ckpt"]
    fused = "foak" in row["notes"] or trainer.startswith(
        ("llm-foundry", "nemo")
    )  # own kernels for norms, rotation, loss
    kernels = "compiled" if row["torch_compile"].startswith("yes") else "fused" if fused else "plain"
    flash = "flash1" if "triton/cuda" in attention else "flash2"
    if re.search(r"attention.?3|fa3|cudnn", attention):
        flash = "flash3"
    # peft's and fsdp_qlora's wrap policy makes every adapter matrix a unit of its own under FSDP1
    layers = {"q,k,v,o": 4, "q,v": 2}.get(row["lora_targets"].split(" ")[0], 6)
    units = 1 + 2 * layers * ("FSDP1" in row["sharding"] and job.method == "lora")
    return Run(
        length=mean, tokens=tokens, head_tokens=tokens, accumulation=accumulation,
        nodes=int(number(row["n_nodes"]) or 1),
        kernels=kernels, attention=flash,
        again=0.5 if kept.startswith("selective (per-op") else None,  # every second product; never attention
        adapted=features, units=units,
    )  # fmt: skip


def host_seconds_of_row(row: dict[str, str], shape: ModelShape, job: Job) -> float:
    """Seconds of a step in which states, weights or gradients pass through host memory."""
    trained, host, optimizer = shape.parameters * job.replicas / job.num_ranks, 0.0, row["optimizer"].lower()
    if "paged" in optimizer:  # states go through host memory and back
        host = 2 * trained * (2 if "8bit" in optimizer else 8) / PCIE
    elif row["cpu_offload"].startswith(
        "yes"
    ):  # weights come up twice a micro-batch; the CPU's optimizer reads and writes
        host = 2 * does_gather(job, shape) / PCIE * (number(row["grad_accum"]) or 1)
        host += trained * 14 / HOST_MEMORY if job.method == "full" else 0.0
    return host


def does_gather(job: Job, shape: ModelShape) -> float:
    """Bytes of a rank's share of the weights in compute precision."""
    return job.compute_bytes * shape.parameters / job.num_ranks


def node_of_row(row: dict[str, str]) -> float | None:
    """Bytes per second of one device to other nodes, where the row says."""
    if found := re.search(r"(\d+) ?Gb/s per node|EFA (\d+) Gb/s|(\d+) Gb/s RoCE per node", row["interconnect"]):
        inside = -(-int(number(row["n_gpus"]) or 8) // int(number(row["n_nodes"]) or 1))
        return float(found[1] or found[2] or found[3]) / 8 * 1e9 / inside
    return None
