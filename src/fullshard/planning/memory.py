"""Memory of one rank as closed formulas, by cause; docs/memory.md derives each and shows what was measured beside it.
Activations of our own runs are traced (activations.py); of others', and where a model cannot be traced, by formula."""

import math
from fullshard.errors import read_table
from fullshard.frozen import Frozen
from fullshard.planning.activations import Kept, Trace
from fullshard.planning.shape import ModelShape
from fullshard.train.loss import CHUNK_LOGIT_BYTES
from fullshard.train.precision import precision_of

CPU_PROCESS_BYTES = 440_000_000  # torch, transformers, peft, gloo: 422 MB as a rank starts, 15 as it works
DEVICE_CONTEXT_BYTES = 900 * 2**20  # context, cuBLAS workspace and collective buffers, outside the allocator
SLACK = 0.05  # of the transients: what the allocator holds beyond what is in use
HEAP, HEAP_UNIT_BYTES = read_table("planning/heap.yaml"), 32 << 20
LOGIT_BYTES = 16  # a logit elsewhere: fp32 value, log-probability, gradient and one more, or its bf16 form
LOAD_SPARE_BYTES, MERGE_SPARE_BYTES = 30_000_000, 100_000_000
MOMENTS = ("always", "backward", "late", "head", "block", "step")  # late: backward's end; head, block: never together


class Job(Frozen):
    """What besides the model decides a rank's memory."""

    method: str  # full | lora
    optimizer: str  # adamw | sgd
    num_ranks: int
    precision: str  # a mode of train/precision.py
    micro_tokens: int  # of the largest micro-batch on one rank, pads included
    longest: int  # tokens of the longest row
    recompute: bool | int  # how many of the first blocks; True: all
    accumulates: bool  # whole gradients are kept over several micro-batches
    adapters: int  # adapter parameters, 0 for full
    on_cpu: bool
    vocabulary: int = 0  # parameters of embedding and head that LoRA trains as a whole, for new tokens
    gathers_all: bool = False  # blocks stay gathered from forward to backward or longer
    replicas: int = 1  # groups of ranks that each hold everything (HSDP)
    supervised: float = 1.0  # the largest share of a micro-batch's tokens that has logits
    adapted_outputs: int = 0  # output features of a block's layers under LoRA
    engine: str = "simple"
    trace: Trace | None = None  # of the model's blocks; None: by formula
    compute_bytes = property(lambda self: precision_of(self.precision).compute.itemsize)  # of a number in products

    def recomputed(self, num_blocks: int) -> int:
        """How many of the model's blocks are recomputed."""
        return num_blocks if self.recompute is True else min(int(self.recompute), num_blocks)


class Practice(Frozen):
    """How a trainer does it: bytes of one number at rest and on its way. ``own_practice`` gives fullshard's."""

    weight: int  # a trained weight at rest, with a copy in compute precision where one stays
    gradient: int
    states: int  # the optimizer's, of a trained weight
    frozen: int
    gathered: int  # of a weight in a gathered unit
    reduced: int  # of the largest unit's gradients on their way
    temporary: int = 4  # the step's, of a trained weight: 0 with a fused optimizer
    logit: float = LOGIT_BYTES
    positions: int | None = None  # logits at once; 0: all
    gradients_wait: bool = True  # from one step's first micro-batch to its end; else they grow as backward proceeds
    kept: int = 4  # of the whole gradients that wait where micro-batches are not reduced
    extra: int = 0  # bytes a token and block that kernels keep beside, or less than, block_bytes_per_token
    selected: int = 0  # bytes a token and recomputed block that selective recomputation keeps beside the block's input
    mask: bool = True  # rows x rows, of packed or padded rows
    passing: int = 0  # bytes a token of gradients passing through a block in backward
    table: int = 0  # own engines': of the head's and embedding's whole gradients; only a block's are on their way


def own_practice(job: Job) -> Practice:
    """What fullshard's engines do in the job's precision."""
    mode, states = precision_of(job.precision), 8 if job.optimizer == "adamw" else 0
    master, compute = mode.master.itemsize, job.compute_bytes
    return Practice(
        master, master, states, compute, gathered=compute, reduced=4, temporary=0, logit=compute, gradients_wait=False,
        table=compute * job.on_cpu,
    )  # fmt: skip


class Line(Frozen):
    """A cause of memory; ``when``: one of MOMENTS."""

    cause: str
    bytes: int
    formula: str
    when: str


def block_bytes_per_token(shape: ModelShape, compute_bytes: int, longest: int) -> int:
    """Bytes that one block keeps for backward, per token; eager attention: also the scores with ``longest`` keys."""
    mlp, norms = shape.mlp_copies * shape.intermediate_size, 0 if shape.fused_norms else 4 * shape.norm_width
    scores = 12 * shape.num_heads * longest if shape.eager_attention else 0
    return compute_bytes * (2 * shape.hidden_size + shape.norm_width + 4 * shape.attention_width + mlp) + norms + scores


def largest_unit(shape: ModelShape) -> int:
    """Parameters of the largest sharding unit; with tied weights the embedding and the final norm are one unit."""
    return max(shape.block, shape.embedding + shape.head if shape.tied else max(shape.embedding, shape.head))


def gathered_parameters(shape: ModelShape) -> int:
    """Most parameters gathered at once: two of the largest unit, or the one held through the step and two blocks."""
    return max(2 * largest_unit(shape), shape.embedding * shape.tied + shape.head + 2 * shape.block)


def memory_lines(shape: ModelShape, job: Job, practice: Practice | None = None) -> list[Line]:
    """A rank's memory in training, by cause. Zero causes are left out. ``practice``: of another trainer."""
    size, ranks, adapters, vocabulary = shape.parameters, job.num_ranks // job.replicas, job.adapters, job.vocabulary
    does = practice or own_practice(job)
    is_full, name = job.method == "full", "fp32" if does.weight >= 4 else "bf16"

    def shared(cause: str, each: int, count: int = size, factor: str = "", when: str = "always") -> Line:
        return Line(cause, -(-each * count // ranks), f"{factor or each} x {count:,} / {ranks}", when)

    libraries = CPU_PROCESS_BYTES + HEAP["products"] * (job.compute_bytes < 4)
    process = ("libraries", libraries) if job.on_cpu else ("device context", DEVICE_CONTEXT_BYTES)
    lines, late = [Line(*process, "fixed", "always")], "always" if does.gradients_wait else "late"
    if is_full:
        lines += [shared(f"{name} masters", does.weight), shared(f"{name} gradients", does.gradient, when=late)]
        lines.append(shared("optimizer state", does.states))
    else:
        each, held = does.weight + does.gradient + does.states, f"({does.weight} + {does.gradient} + {does.states})"
        lines.append(shared("frozen base", does.frozen))
        lines.append(Line("adapters", each * adapters, f"{held} x {adapters:,}, on every rank", "always"))
        lines.append(shared("vocabulary", each, vocabulary, held))
    gathered = size if job.gathers_all else gathered_parameters(shape)
    sharded = size if is_full else vocabulary  # trained parameters that are cut over the ranks
    unit, kept = min(shape.block if does.table else largest_unit(shape), sharded), sharded * job.accumulates
    wide = 4 if does.table and job.micro_tokens > CHUNK_LOGIT_BYTES // (4 * shape.vocab_size) else does.table  # a sum
    table, moving = wide * shape.head_matrix * (sharded > 0), 2 * does.table or does.reduced
    kind, is_torch = job.method + "_16" * (is_full and job.compute_bytes < 4), job.on_cpu and job.engine == "torch"
    part, heads, whole = HEAP["copies"][kind] if is_torch else (0, 0, 0)
    blocks_of, head = (4 if is_full else does.frozen) * shape.blocks * (ranks > 1), 4 * shape.head_matrix
    copied = int(part * blocks_of + heads * head * (is_full or ranks > 1) + whole * does.kept * kept)
    held = f"{part} x {blocks_of:,} + {heads} x {head:,} + {whole} x {does.kept} x {kept:,}"
    copies = (3 if shape.tied else 1) + does.kept * job.accumulates / max(1, wide)  # of tied: two and their sum
    lines += [
        Line("gathered weights", does.gathered * gathered, f"{does.gathered} x {gathered:,}", "backward"),
        Line("kept gradients", does.kept * kept, f"{does.kept} x {kept:,}, more than one micro-batch", "backward"),
        Line("gradient reduction", moving * unit, f"{moving} x {unit:,}", "backward"),
        Line("copies of fully_shard", copied, held, "backward"),
        Line("head's gradient", table, f"{wide} x {shape.head_matrix:,}", "head"),
        Line("embedding's gradient", int(copies * table), f"{copies:g} x {table:,}", "late"),
        *(blocks := _activation_lines(shape, job, does)),
    ]
    if job.on_cpu:
        gradients = next((line.bytes for line in lines if line.cause == f"{name} gradients"), 0)
        lines += _heap_lines(blocks, job, shape, gradients)
    else:
        slack = int(SLACK * (_bytes_at(lines, "backward") + max(_bytes_at(lines, "head"), _bytes_at(lines, "block"))))
        lines.append(Line("allocator slack", slack, f"{SLACK:.0%} of the passing causes", "backward"))
    moved = -(-does.temporary * sharded // ranks) + does.temporary * adapters
    lines.append(Line("optimizer temporary", moved, f"{does.temporary} x trained parameters of this rank", "step"))
    return [line for line in lines if line.bytes]


def _heap_lines(blocks: list[Line], job: Job, shape: ModelShape, gradients: int) -> list[Line]:
    """What glibc's heap adds: holes, one of each adapted layer's output, too; what blocks kept, for gradients only."""
    hole, again = job.compute_bytes * job.adapted_outputs * job.micro_tokens, job.recomputed(shape.num_layers)
    kept = sum(line.bytes for line in blocks if line.cause != "logits chunk") + hole * (shape.num_layers - again)
    block, head = _bytes_at(blocks, "block") + hole * (again > 0), job.compute_bytes * shape.head_matrix
    (share, lost), small = HEAP["holes"][job.method][job.compute_bytes], HEAP["small"] * head * (head < HEAP_UNIT_BYTES)
    slack, holes = int(share * kept + lost * again * block + small), hole * (shape.num_layers - again + (again > 0))
    held = f"{share} x {kept:,} that blocks keep + {lost} x {again * block:,} that passed + {holes:,} of adapters"
    held += f" + {small:,.0f} of a small head" * (small > 0)
    left = max(0, kept + hole * (again > 0) + slack - block - gradients)
    return [
        Line("allocator slack", slack + holes, held, "backward"),
        Line("memory not given back", left, f"{left:,}: what blocks kept, less gradients", "late"),
    ]


def trace_by_formula(shape: ModelShape, job: Job, does: Practice) -> Trace:
    """What ``block_bytes_per_token`` says of the blocks, as a trace; around them is a mask of rows x rows."""
    each = job.longest * (block_bytes_per_token(shape, job.compute_bytes, job.longest) + does.extra)
    mask = (1 + job.compute_bytes) * does.mask * job.longest**2
    again = Kept(each + job.longest * (does.passing - does.selected))
    return Trace(job.longest, (Kept(each),) * shape.num_layers, (again,) * shape.num_layers, Kept(mask))


def _activation_lines(shape: ModelShape, job: Job, does: Practice) -> list[Line]:
    tokens, again = job.micro_tokens, job.recomputed(shape.num_layers)
    trace = job.trace or trace_by_formula(shape, job, does)
    largest = max(trace.again[:again], key=lambda block: block.row + block.fixed, default=Kept())
    inputs = job.compute_bytes * shape.hidden_size + does.selected
    chunk = CHUNK_LOGIT_BYTES // (4 * shape.vocab_size) if does.positions is None else does.positions or tokens
    chunk = min(max(1, chunk), math.ceil(tokens * job.supervised))  # positions at once, as the loss cuts them
    logits = int(chunk * shape.vocab_size * does.logit)
    return [
        Line("block inputs", tokens * again * inputs, f"{tokens:,} tokens x {again} blocks x {inputs:,}", "backward"),
        Line("recomputed block", *trace.bytes_of(tokens, (largest,)), "block"),
        Line("activations", *trace.bytes_of(tokens, trace.blocks[again:]), "backward"),
        Line("around the blocks", *trace.bytes_of(tokens, (trace.around,)), "backward"),
        Line("logits chunk", logits, f"{chunk:,} x {shape.vocab_size:,} x {does.logit:g}", "head"),
    ]


def train_peak(lines: list[Line]) -> int:
    """The largest of backward's start (all activations), its end (all gradients, one block) and the step."""
    always, whole, late, head, block, step = (_bytes_at(lines, when) for when in MOMENTS)
    unit = sum(line.bytes for line in lines if line.cause in ("gathered weights", "gradient reduction"))
    return always + max(whole + head, whole + block, late + unit + block, late + step)


def moment_peaks(shape: ModelShape, job: Job) -> dict[str, int]:
    """Peak bytes of one rank at each moment: load, train, eval; save, whose proof has fp32 copies of a unit and of tied
    weights; and of a merge on the host, whose proof has a block in fp32."""
    lines, mode = memory_lines(shape, job), precision_of(job.precision)
    always, baseline = _bytes_at(lines, "always"), lines[0].bytes
    stored = (mode.master if job.method == "full" else mode.compute).itemsize
    trace = job.trace or trace_by_formula(shape, job, own_practice(job))
    block = max(trace.bytes_of(job.micro_tokens, (block,))[0] for block in trace.blocks)
    logits = next((line.bytes for line in lines if line.cause == "logits chunk"), 0)
    gathered = job.compute_bytes * gathered_parameters(shape)
    copies = 4 * (largest_unit(shape) + shape.tied * shape.block) * (job.compute_bytes < 4)
    return {
        "load": baseline + -(-stored * shape.parameters // job.num_ranks) + 4 * shape.largest_tensor + LOAD_SPARE_BYTES,
        "train": train_peak(lines),
        "eval": always + gathered + block + logits,
        "save": always + max(-(-4 * shape.largest_tensor // job.num_ranks), gathered + copies),
        "merge": CPU_PROCESS_BYTES + 4 * shape.block + MERGE_SPARE_BYTES,
    }


def _bytes_at(lines: list[Line], when: str) -> int:
    return sum(line.bytes for line in lines if line.when == when)
