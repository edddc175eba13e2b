"""What the planner needs to know of a model, read off its class built on the meta device: counts and widths."""

import math
from pathlib import Path
from typing import Any
from torch import nn
from transformers import AutoConfig
from fullshard.config import LoraSection
from fullshard.frozen import Frozen
from fullshard.model.adapters import add_adapters
from fullshard.model.blocks import find_blocks, is_adapter, is_tied
from fullshard.model.load import build_from_config, read_config
from fullshard.run_folder import read_json


class ModelShape(Frozen):
    """Counts are numbers of parameters (tied ones once); widths are features per token."""

    parameters: int
    num_layers: int
    block: int  # the largest repeated block
    blocks: int  # all blocks together
    embedding: int  # token and position embeddings; with tied weights this is also the head
    head: int  # final norm and head; 0 where the head is the embedding
    tied: bool
    active_block_matrices: int  # weights of all blocks that one token is multiplied with (experts: the chosen ones)
    head_matrix: int  # vocabulary x width
    vocab_size: int
    hidden_size: int
    attention_width: int  # heads x head_dim
    key_value_width: int  # key heads x head_dim
    intermediate_size: int  # active expert width where there are experts
    mlp_copies: int  # tensors of the MLP's width that autograd keeps: 4 gated, 2 with a fused activation, 5 without
    norm_width: int  # features of all norms in a block
    fused_norms: bool  # LayerNorm keeps its input only; RMSNorm in Python also an fp32 copy
    num_heads: int
    eager_attention: bool  # the family refuses fused attention, so scores of rows x rows exist
    max_positions: int | None
    largest_tensor: int


def shipped_config(path: str) -> Path | None:
    """The config shipped for a model id (``Qwen/Qwen3-8B``), where no folder of that name is here; else None."""
    file = Path(__file__).parent / "models" / f"{path.replace('/', '--')}.json"
    return file if file.is_file() and not Path(path).expanduser().exists() else None


def build_for_plan(path: str, num_added: int = 0, packing: bool = False) -> nn.Module:
    """``build_on_meta`` of a folder or a shipped config, with more tokens."""
    shipped = shipped_config(path)
    config = AutoConfig.for_model(**read_json(shipped)["config"]) if shipped else read_config(path)
    config.get_text_config().vocab_size += num_added
    return build_from_config(config, path, packing)


def shape_of(model: nn.Module) -> ModelShape:
    """Shape of a built model, on any device."""
    settings, blocks = model.config.get_text_config(), list(find_blocks(model)[1])
    block_sizes = [sum(parameter.numel() for parameter in block.parameters()) for block in blocks]
    parameters = dict(model.named_parameters())  # tied weights appear once
    sizes, table = [weight.numel() for weight in parameters.values()], model.get_input_embeddings().weight
    positions = ("wpe.weight", "embed_positions.weight", "position_embeddings.weight")
    tables = [weight for name, weight in parameters.items() if weight is table or name.endswith(positions)]
    embeddings = sum(weight.numel() for weight in tables if weight.dim() == 2)
    head_matrix = (model.get_output_embeddings() or model.get_input_embeddings()).weight.numel()
    widths = ("moe_intermediate_size", "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
    intermediate, heads = _first(settings, *widths) or 4 * settings.hidden_size, settings.num_attention_heads
    head_dim = _first(settings, "head_dim") or settings.hidden_size // heads
    key_heads = _first(settings, "num_key_value_heads") or heads
    return ModelShape(
        parameters=sum(sizes), embedding=embeddings, num_heads=heads, tied=is_tied(model),
        num_layers=len(blocks), eager_attention=getattr(model.config, "_attn_implementation", None) == "eager",
        block=max(block_sizes), mlp_copies=_mlp_copies(blocks[0], settings), hidden_size=settings.hidden_size,
        blocks=sum(block_sizes), active_block_matrices=sum(_active_matrices(block, settings) for block in blocks),
        head=sum(sizes) - sum(block_sizes) - embeddings, vocab_size=head_matrix // settings.hidden_size,
        attention_width=heads * head_dim, max_positions=_first(settings, "max_position_embeddings", "n_positions"),
        key_value_width=key_heads * head_dim, norm_width=_norm_width(blocks[0], heads * head_dim, key_heads * head_dim),
        intermediate_size=intermediate * (_first(settings, "num_experts_per_tok") or 1), head_matrix=head_matrix,
        fused_norms=any(isinstance(module, nn.LayerNorm) for module in blocks[0].modules()), largest_tensor=max(sizes),
    )  # fmt: skip


class AdapterShape(Frozen):
    """What LoRA adds to a model."""

    parameters: int  # of all adapters together
    outputs_per_block: int
    vocabulary: int  # parameters of embedding and head, where they are trained too


def add_adapter_shape(model: nn.Module, lora: LoraSection, trains_vocabulary: bool = False) -> AdapterShape:
    """Inject the adapters into ``model`` (on the meta device, in place) and measure them. ModelError if none fits."""
    num_blocks = len(find_blocks(model)[1])
    add_adapters(model, lora, trains_vocabulary)
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    adapters = {name: weight for name, weight in trained.items() if is_adapter(name)}
    outputs = sum(weight.shape[0] for name, weight in adapters.items() if ".lora_B." in name)
    size, whole = (sum(weight.numel() for weight in found.values()) for found in (adapters, trained))
    return AdapterShape(size, math.ceil(outputs / num_blocks), whole - size)


def _active_matrices(block: nn.Module, settings: Any) -> int:
    """Matrix weights of a block that one token meets; of stacked or listed experts only the chosen share."""
    chosen = _first(settings, "num_experts_per_tok")
    experts = _first(settings, "num_experts", "num_local_experts", "n_routed_experts")
    share = chosen / experts if chosen and experts else 1.0
    matrices = [(f".{name}", weight.numel()) for name, weight in block.named_parameters() if weight.dim() >= 2]
    return math.ceil(sum(size * (share if ".experts." in name else 1.0) for name, size in matrices))


def _mlp_copies(block: nn.Module, settings: Any) -> int:
    names = [name for name, _ in block.named_parameters()]
    if any("gate_proj" in name or "gate_up_proj" in name or name.endswith("w3.weight") for name in names):
        return 4
    activation = getattr(settings, "hidden_act", None) or getattr(settings, "activation_function", None)
    return 5 if activation in ("gelu_new", "gelu_fast", "quick_gelu") else 2


def _norm_width(block: nn.Module, attention_width: int, key_value_width: int) -> int:
    """Features that all norms of a block see; norms of one head's queries or keys see every head."""
    norms = [(name, module) for name, module in block.named_modules() if "norm" in type(module).__name__.lower()]
    weights = [(name.split(".")[-1], getattr(module, "weight", None)) for name, module in norms]
    own = {"q_norm": attention_width, "k_norm": key_value_width}
    return sum(own.get(name, one.numel()) for name, one in weights if one is not None and one.dim() == 1)


def _first(settings: Any, *names: str) -> int | None:
    values = (getattr(settings, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)
