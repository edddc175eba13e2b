"""Memory of one rank as closed formulas, by cause; docs/memory.md derives each and shows what was measured beside it.

Activations of one block per token, what autograd keeps with fused attention (c bytes of compute, h width, a heads x
head size, f MLP width, n features of all norms, m ModelShape.mlp_copies): c (2h + n + 4a + mf) + 4n, without 4n for
LayerNorm. DoRA adds about 16 bytes an input feature of each adapted layer; eager attention 12 bytes x heads x longest.
"""

from dataclasses import dataclass

from fullshard.planning.shape import ModelShape
from fullshard.train.precision import precision_of

CPU_PROCESS_BYTES = 600_000_000  # torch, transformers, peft, gloo: a 135M LoRA run's 3.27 GB less the other causes
DEVICE_CONTEXT_BYTES = 900 * 2**20  # context, cuBLAS workspace and collective buffers, outside the allocator
SLACK = 0.05  # of the transients: what the allocator holds beyond what is in use
LOGIT_BYTES = 16  # a logit of the loss's chunk: fp32 value, log-probability, gradient and one more, or its bf16 form
LOAD_SPARE_BYTES = 100_000_000


@dataclass(frozen=True)
class Job:
    """What besides the model decides a rank's memory."""

    method: str  # full | lora
    optimizer: str  # adamw | sgd
    num_ranks: int
    precision: str  # a mode of train/precision.py
    micro_tokens: int  # padded area, rows x longest, of one micro-batch on one rank
    longest: int  # tokens of the longest row
    recompute: bool | int  # how many of the first blocks; True: all
    accumulates: bool  # more than one micro-batch a step
    adapters: int  # adapter parameters, 0 for full
    adapted_inputs: int  # input features of a block's layers under DoRA, else 0
    on_cpu: bool
    vocabulary: int = 0  # parameters of embedding and head that LoRA trains as a whole, for new tokens
    gathers_all: bool = False  # blocks stay gathered from forward to backward or longer
    replicas: int = 1  # groups of ranks that each hold everything (HSDP)

    @property
    def compute_bytes(self) -> int:
        """Bytes of a number in products."""
        return precision_of(self.precision).compute.itemsize

    def recomputed(self, num_blocks: int) -> int:
        """How many of the model's blocks are recomputed."""
        return num_blocks if self.recompute is True else min(int(self.recompute), num_blocks)


@dataclass(frozen=True)
class Line:
    """A cause of memory; ``when``: always | backward (all of it) | head | block (parts, never together) | step."""

    cause: str
    bytes: int
    formula: str
    when: str


def block_bytes_per_token(shape: ModelShape, compute_bytes: int, longest: int, adapted_inputs: int = 0) -> int:
    """Bytes that one block keeps for backward, per token (module docstring). ``adapted_inputs``: DoRA only."""
    features = 2 * shape.hidden_size + shape.norm_width + 4 * shape.attention_width
    total = compute_bytes * (features + shape.mlp_copies * shape.intermediate_size)
    if not shape.fused_norms:
        total += 4 * shape.norm_width
    total += 16 * adapted_inputs
    if shape.eager_attention:
        total += 12 * shape.num_heads * longest
    return total


def largest_unit(shape: ModelShape) -> int:
    """Parameters of the largest sharding unit; with tied weights the embedding and the final norm are one unit."""
    outer = shape.embedding + shape.head if shape.tied else max(shape.embedding, shape.head)
    return max(shape.block, outer)


def gathered_parameters(shape: ModelShape) -> int:
    """Most parameters gathered at once: two of the largest unit, or the one held through the step and two blocks."""
    held = shape.embedding + shape.head if shape.tied else shape.head
    return max(2 * largest_unit(shape), held + 2 * shape.block)


def memory_lines(shape: ModelShape, job: Job) -> list[Line]:
    """A rank's memory in training, by cause. Zero causes are left out."""
    size, ranks, compute = shape.parameters, job.num_ranks // job.replicas, job.compute_bytes
    adapters, vocabulary = job.adapters, job.vocabulary
    is_full, states = job.method == "full", 8 if job.optimizer == "adamw" else 0
    master = precision_of(job.precision).master.itemsize  # of a trained weight, and of its gradient
    name = "fp32" if master == 4 else "bf16"

    def shared(cause: str, each: int, count: int, factor: str = "") -> Line:
        return Line(cause, _share(each * count, ranks), f"{factor or each} x {count:,} / {ranks}", "always")

    if job.on_cpu:
        lines = [Line("libraries", CPU_PROCESS_BYTES, "fixed", "always")]
    else:
        lines = [Line("device context", DEVICE_CONTEXT_BYTES, "fixed", "always")]
    if is_full:
        lines += [shared(f"{name} masters", master, size), shared(f"{name} gradients", master, size)]
        lines += [shared("optimizer state", states, size)]
    else:
        held = f"({master} + {master} + {states})"
        lines += [
            shared("frozen base", compute, size),
            Line("adapters", (2 * master + states) * adapters, f"{held} x {adapters:,}, on every rank", "always"),
            shared("vocabulary", 2 * master + states, vocabulary, held),
        ]
    gathered = size if job.gathers_all else gathered_parameters(shape)
    sharded = size if is_full else vocabulary  # trained parameters that are cut over the ranks
    unit, kept = min(largest_unit(shape), sharded), sharded if job.accumulates else 0
    lines += [
        Line("gathered weights", compute * gathered, f"{compute} x {gathered:,}", "backward"),
        Line("kept gradients", 4 * kept, f"4 x {kept:,}, more than one micro-batch", "backward"),
        Line("gradient reduction", 4 * unit, f"4 x {unit:,}", "backward"),
        *_activation_lines(shape, job),
    ]
    slack = int(SLACK * _backward_bytes(lines))
    lines.append(Line("allocator slack", slack, f"{SLACK:.0%} of the passing causes", "backward"))
    if states:
        moved = _share(4 * sharded, ranks) + 4 * adapters
        lines.append(Line("optimizer temporary", moved, "4 x trained parameters of this rank", "step"))
    return [line for line in lines if line.bytes]


def _activation_lines(shape: ModelShape, job: Job) -> list[Line]:
    from fullshard.train.loss import CHUNK_LOGIT_BYTES

    each = block_bytes_per_token(shape, job.compute_bytes, job.longest, job.adapted_inputs)
    tokens, layers, mask = job.micro_tokens, shape.num_layers, 1 + job.compute_bytes
    again, inputs, lines = job.recomputed(layers), job.compute_bytes * shape.hidden_size, []
    if again:
        kept = f"{tokens:,} tokens x {again} blocks x {inputs:,}"
        lines.append(Line("block inputs", tokens * again * inputs, kept, "backward"))
        lines.append(Line("recomputed block", tokens * each, f"{tokens:,} tokens x {each:,}", "block"))
    if again < layers:
        kept = f"{tokens:,} tokens x {layers - again} blocks x {each:,}"
        lines.append(Line("activations", tokens * (layers - again) * each, kept, "backward"))
    chunk = min(max(1, CHUNK_LOGIT_BYTES // (4 * shape.vocab_size)), tokens)  # positions at once, as the loss cuts them
    logits = chunk * shape.vocab_size * LOGIT_BYTES
    return [
        *lines,
        Line("attention mask", mask * tokens * job.longest, f"{mask} x {tokens:,} x {job.longest:,}", "backward"),
        Line("logits chunk", logits, f"{chunk:,} x {shape.vocab_size:,} x {LOGIT_BYTES}", "head"),
    ]


def moment_peaks(shape: ModelShape, job: Job) -> dict[str, int]:
    """Peak bytes of one rank at each moment: load, train, eval, save and merge (merge runs in one process)."""
    lines = memory_lines(shape, job)
    always, in_step = _bytes_at(lines, "always"), _bytes_at(lines, "step")
    baseline = lines[0].bytes
    mode = precision_of(job.precision)
    stored = (mode.master if job.method == "full" else mode.compute).itemsize
    base = baseline + _share(stored * shape.parameters, job.num_ranks)
    per_token = block_bytes_per_token(shape, job.compute_bytes, job.longest, job.adapted_inputs)
    logits = next((line.bytes for line in lines if line.cause == "logits chunk"), 0)
    passing = job.compute_bytes * gathered_parameters(shape) + job.micro_tokens * per_token + logits
    return {
        "load": base + 4 * shape.largest_tensor + LOAD_SPARE_BYTES,
        "train": always + max(_backward_bytes(lines), in_step),
        "eval": always + passing,
        "save": always + _share(4 * shape.largest_tensor, job.num_ranks),
        "merge": baseline + 4 * shape.parameters + 8 * shape.largest_tensor,
    }


def _bytes_at(lines: list[Line], when: str) -> int:
    return sum(line.bytes for line in lines if line.when == when)


def _backward_bytes(lines: list[Line]) -> int:
    return _bytes_at(lines, "backward") + max(_bytes_at(lines, "head"), _bytes_at(lines, "block"))


def _share(count: int, ranks: int) -> int:
    return -(-count // ranks)
