"""From a config and a plan to a sharded model with its weights loaded, each rank reading only its own ranges."""

import hashlib
from collections import Counter
from functools import partial
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from fullshard.config import RunConfig
from fullshard.errors import TrainError, refusal
from fullshard.frozen import Frozen
from fullshard.model.adapters import AdapterPlace, adapter_places, add_adapters, start_value
from fullshard.model.attention import Documents
from fullshard.model.blocks import base_name, find_blocks, find_units, is_adapter
from fullshard.model.load import WeightFiles, attention_for, build_on_meta
from fullshard.model.weight_map import WeightMap
from fullshard.ranks import Ranks
from fullshard.shard import Shard, ShardedModel, shard_model
from fullshard.train.loss import LossModel
from fullshard.train.precision import NAMES, Precision, log_text, set_storage

LOSS_CHECK_TOKENS = 64
LEAK_TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}  # of the largest logit
LOSS_PATH_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2.5e-3}  # of the largest logit


class Built(Frozen):
    """A loaded, sharded model ready to train."""

    sharded: ShardedModel
    loss_model: LossModel
    num_parameters: int
    num_trainable: int
    report: tuple[str, ...]  # what was verified and held, for the log
    fingerprint: str  # of the base model's files


def build_sharded(
    config: RunConfig, ranks: Ranks, precision: Precision, recompute: bool | int, new_ids: tuple[int, ...] = (),
    reduce_each: bool = False, micro_tokens: int = 0,
) -> Built:  # fmt: skip
    """Build on meta, add adapters, shard, load: collective. ``new_ids``: added tokens; ``reduce_each``: shard_model;
    ``micro_tokens``: the most that one micro-batch has on one rank."""
    causal_lm = build_on_meta(config.model.path, max(new_ids, default=-1) + 1, config.data.packing)
    fingerprint = (files := WeightFiles(config.model.path)).fingerprint()
    for rank, other in enumerate(ranks.gather_objects(fingerprint)):
        if other != fingerprint:
            raise refusal("other_model", path=config.model.path, rank=rank, own=ranks.rank)
    weights = WeightMap(causal_lm, files, config.model.path, new_ids)
    if config.method == "lora":
        add_adapters(causal_lm, config.lora, trains_vocabulary=bool(new_ids))
    magnitudes = {place.module: place for place in adapter_places(causal_lm) if place.has_magnitude}
    recomputed = recompute_blocks(causal_lm, recompute)
    set_storage(causal_lm, precision)
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in causal_lm.parameters()]
    weights.load_buffers(causal_lm)
    loss_model = LossModel(causal_lm, config.train.router_loss)
    head = causal_lm.get_output_embeddings().parameters()  # its gradient is a sum in fp32 where its loss goes in chunks
    loss_model.fp32_gradients = {one for one in head if one.requires_grad and micro_tokens > loss_model.chunk_rows}
    adapters = {parameter for name, parameter in causal_lm.named_parameters() if is_adapter(name)}
    mesh, how = ranks.mesh_of(config.train.replicas), (precision, config.engine, config.train.sharding, reduce_each)
    sharded = shard_model(loss_model, find_units(causal_lm), adapters, mesh, *how)
    load_weights(sharded, weights, magnitudes, config.train.seed)
    loss_model.train()
    report = [*_storage_table(sharded, weights, precision), check_buffers(causal_lm, ranks)]
    report += log_text("router", config.train.router_loss, hasattr(causal_lm, "router_aux_loss_coef")).splitlines()
    report += [*recomputed, "torch.compile: off (docs/performance.md says what it costs and brings)"]
    num_trainable = sum(size for size, trained in sizes if trained)
    return Built(sharded, loss_model, sum(size for size, _ in sizes), num_trainable, tuple(report), fingerprint)


def _storage_table(sharded: ShardedModel, weights: WeightMap, precision: Precision) -> list[str]:
    """Lines for the log: what dtype each group of parameters has in the files, at rest, in compute and on the wire."""
    counts: Counter[tuple[str, str, str, str, bool]] = Counter()
    for shard in sharded.shards():
        adapter = is_adapter(shard.name)
        group = "adapters" if adapter else "matrices" if len(shard.full_shape) > 1 else "norms and biases"
        file_dtype = "-" if adapter else weights.dtype(base_name(shard.name)).lower()
        owner = sharded.module.causal_lm.get_submodule(shard.name.rpartition(".")[0])
        own_dtype = adapter and not hasattr(owner, "follows_input")  # embeddings, experts, DoRA: as PEFT does it
        compute = shard.value.dtype if own_dtype else precision.compute
        counts[group, file_dtype, NAMES[shard.value.dtype], NAMES[compute], shard.trainable] += 1
    return log_text("storage", counts, precision.reduce).splitlines()


def check_buffers(model: torch.nn.Module, ranks: Ranks) -> str:
    """Compare every buffer's bytes over the ranks; TrainError names the first that differs. Returns the log's line."""
    flat = {name: buffer.detach().cpu().contiguous().view(-1) for name, buffer in model.named_buffers()}
    digests = {name: hashlib.blake2b(values.view(torch.uint8).numpy()).hexdigest() for name, values in flat.items()}
    for rank, other in enumerate(ranks.gather_objects(digests)):
        if wrong := [name for name, digest in digests.items() if other.get(name) != digest]:
            raise TrainError(f"Buffer {wrong[0]} on rank {rank} differs from rank {ranks.rank}'s.", "Start again.")
    return f"{len(digests)} buffers verified on {ranks.num_ranks} rank{'s' if ranks.num_ranks > 1 else ''}"


@torch.no_grad()
def load_weights(sharded: ShardedModel, weights: WeightMap, magnitudes: dict[str, AdapterPlace], seed: int) -> None:
    """Fill this rank's shards. ``magnitudes``: DoRA's places by module, read whole one at a time."""
    for shard in (shard for shard in sharded.shards() if shard.start < shard.stop):
        if ".lora_magnitude_vector." in shard.name:
            place = magnitudes[shard.name.split(".lora_magnitude_vector.")[0]]  # B is 0: norms (arXiv 2402.09353, 4)
            whole = weights.read(place.parameter).view(weights.shapes[place.parameter]).float()
            values = whole.norm(dim=0 if place.layout == "conv1d" else 1)[shard.start : shard.stop]
        elif is_adapter(shard.name):
            values = start_value(shard.name, shard.full_shape, seed).reshape(-1)[shard.start : shard.stop]
        else:
            values = weights.read(base_name(shard.name), shard.start, shard.stop)
        shard.value.copy_(values)


@torch.no_grad()
def check_loss_path(built: Built, input_ids: torch.Tensor, precision: Precision) -> str:
    """Compare our head path with the model's own, at most 64 tokens; these are taken if they differ. Collective."""
    model, labels = built.loss_model, torch.nn.functional.pad(input_ids[:, 1:], (0, 1), value=-100)
    model.eval()
    ours, changed = model(input_ids, None), torch.cat([input_ids[:, :-1], (input_ids[:, -1:] == 0).long()], 1)
    ahead = (model(changed, None) - ours)[:, :-1].abs().max() if input_ids.shape[1] > 1 else torch.zeros(())
    own = model(input_ids, None, own_logits=True)
    loss, own_loss = float(model(input_ids, labels)), float(model(input_ids, labels, own_logits=True))
    model.train()
    built.sharded.after_step()
    largest, limit = own.abs().max().clamp_min(1e-6), LOSS_PATH_TOLERANCE[precision.compute]
    if float(ahead / largest) > LEAK_TOLERANCE[precision.compute]:
        raise refusal("looks_ahead", family=type(model.causal_lm).__name__)
    difference = float((ours - own).abs().max() / largest)
    of_loss = abs(loss / own_loss - 1) if input_ids.shape[1] > 1 else 0.0  # one token has no target
    model.uses_own_logits = difference > limit
    return log_text("loss_path", difference, of_loss, limit, labels.shape[1])


@torch.no_grad()
def check_packing(built: Built, rows: list[list[int]], precision: Precision, device: torch.device) -> str:
    """Logits of packed ``rows`` must be those of each alone, by our attention or masks; else ConfigError."""
    model, failures, tokens = built.loss_model, [], [torch.tensor([row], device=device) for row in rows]
    positions = torch.cat([torch.arange(len(row), device=device) for row in rows])[None]
    depth = len(find_blocks(model.causal_lm)[1])
    model.eval()  # dropout would make the two differ
    while not failures or model.attends_by_document:
        if failures:
            model.causal_lm.set_attn_implementation(attention_for(model.causal_lm.config))
        documents = Documents([[len(row) for row in rows]]) if model.attends_by_document else None
        apart = torch.cat([model(row, None) for row in tokens], 1)
        packed = model(torch.cat(tokens, 1), None, positions, documents=documents)
        other = model(torch.cat([tokens[0].flip(1), tokens[1]], 1), None, positions, documents=documents)
        built.sharded.after_step()
        largest, second = apart.abs().max().clamp_min(1e-6), slice(len(rows[0]), None)
        difference = float((packed - apart).abs().max() / largest)
        leak = float((packed - other)[:, second].abs().max() / largest)  # sharper: isolated rows hardly differ in a bit
        reached, way = len(documents.layers) if documents else depth, "attention by document" if documents else "masks"
        apart_enough = leak <= LEAK_TOLERANCE[precision.compute] and reached == depth
        if apart_enough and difference <= LOSS_PATH_TOLERANCE[precision.compute]:
            model.train()
            return f"packing: rows kept apart by {way} (logits differ by {difference:.1e} of the largest)"
        failures.append(f"{way}: {reached} of {depth} blocks reached, logits differ by {max(difference, leak):.1e}")
    model.train()
    raise refusal("not_kept_apart", family=type(model.causal_lm).__name__, failures="; ".join(failures))


def recompute_blocks(causal_lm: nn.Module, recompute: bool | int) -> list[str]:
    """Recompute the first ``recompute`` blocks (True: all), inside the engine's hooks. Returns log lines."""
    blocks = find_blocks(causal_lm)[1]
    own = [module for module in causal_lm.modules() if getattr(module, "gradient_checkpointing", False) is True]
    for module in own:
        module.gradient_checkpointing = False
    count = len(blocks) if recompute is True else min(int(recompute), len(blocks))
    for block in blocks[:count]:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # without gradients it only calls it
    return log_text("recomputation", own, count, len(blocks)).splitlines()


class GradientReach:
    """Watches the first step: which adapters were used in forward, and which trained tensors got a gradient."""

    def __init__(self, causal_lm: nn.Module) -> None:
        owners = {_owner(name) for name, _ in causal_lm.named_parameters() if is_adapter(name)}
        self._used: set[str] = set()
        adapted = [(name, module) for name, module in causal_lm.named_modules() if name in owners]
        self._hooks = [one.register_forward_hook(lambda *_, name=name: self._used.add(name)) for name, one in adapted]

    def report(self, shards: list[Shard], ranks: Ranks) -> str:
        """The log's line after the first backward; TrainError where a used adapter (A or B) got nothing. Collective."""
        for hook in self._hooks:
            hook.remove()
        mine = {s.name for s in shards if s.gradient is not None and (not is_adapter(s.name) or bool(s.gradient.any()))}
        found = ranks.gather_objects((mine, self._used))
        got, used = (set().union(*(pair[place] for pair in found)) for place in (0, 1))
        alive = {_owner(name) for name in got if is_adapter(name)}
        trained = [shard.name for shard in shards if shard.trainable]
        missing = [name for name in trained if name not in got and _owner(name) not in alive]
        if dead := [name for name in missing if _owner(name) in used]:
            raise refusal("dead_adapters", count=len(dead), first=dead[0])
        return log_text("reach", trained, missing)


def _owner(name: str) -> str:
    return name.split(".lora_")[0]
