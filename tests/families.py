"""Tiny settings of the model families that fullshard is tested on, by transformers' model_type; on top of K1's.

``KV``: as many key heads as query heads are said out loud, since some families' defaults do not divide.
"""

from __future__ import annotations

from typing import Any

KV: dict[str, Any] = {"num_key_value_heads": 2}
WIDE = KV | {"head_dim": 8}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 8}
LATENT = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
    "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": KV,
    "mistral": KV,
    "qwen2": KV,
    "qwen3": WIDE,
    "gemma": WIDE,
    "gemma2": WIDE | {"query_pre_attn_scalar": 8, "sliding_window": 32, "final_logit_softcapping": 3.0},
    "gemma3_text": WIDE | {"query_pre_attn_scalar": 8, "sliding_window": 32},
    "phi": {},
    "phi3": KV,
    "gpt2": NO_DROPOUT,
    "gpt_neox": {"hidden_dropout": 0.0, "attention_dropout": 0.0},
    "gptj": {"rotary_dim": 4} | NO_DROPOUT,
    "olmo": KV,
    "olmo2": KV,
    "olmo3": KV | {"sliding_window": 32},
    "granite": KV | {"logits_scaling": 3.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5},
    "cohere": KV | {"logit_scale": 0.25},
    "cohere2": WIDE | {"sliding_window": 32},
    "starcoder2": KV | {"residual_dropout": 0.0, "embedding_dropout": 0.0},
    "stablelm": KV,
    "smollm3": KV,
    "glm4": WIDE,
    "helium": WIDE,
    "exaone4": KV | {"sliding_window": 32},
    "ernie4_5": WIDE,
    "seed_oss": WIDE | {"attention_dropout": 0.0, "residual_dropout": 0.0},
    "hunyuan_v1_dense": WIDE,
    "nemotron": KV,
    "apertus": KV,
    "opt": {"ffn_dim": 32, "word_embed_proj_dim": 16, "dropout": 0.0},
    "bloom": {"hidden_dropout": 0.0, "attention_dropout": 0.0},
    "falcon": KV,
    "codegen": {"rotary_dim": 4} | NO_DROPOUT,
    "gpt_neo": {"num_layers": 2, "num_heads": 2, "attention_types": [[["global"], 2]]},
    "gpt_bigcode": {"n_inner": 32} | NO_DROPOUT,
    "mpt": {"d_model": 16, "n_heads": 2, "n_layers": 2, "max_seq_len": 64, "expansion_ratio": 2},
    "lfm2": KV | {"layer_types": ["conv", "full_attention"]},
    "qwen2_moe": KV | EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 8, "decoder_sparse_step": 1},
    "qwen3_moe": WIDE | EXPERTS | {"num_experts": 4, "decoder_sparse_step": 1},
    "mixtral": KV | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": KV | {"num_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": KV | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": KV | EXPERTS | LATENT,
    "deepseek_v3": KV | EXPERTS | LATENT,
    "glm4_moe": WIDE | EXPERTS | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "ernie4_5_moe": KV | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 8, "moe_layer_start_index": 1},
    "gpt_oss": WIDE | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32},
    "llama4_text": WIDE | {"num_local_experts": 4, "intermediate_size_mlp": 32, "interleave_moe_layer_step": 1},
}

ROUTERS_LEFT_OUT = ("llama4_text",)  # their routers return tuples, so all-linear leaves them out
# Tested at each change; the others in the slow tier.
CORE = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi", "phi3", "gpt2", "gpt_neox", "olmo2",
    "granite", "cohere", "qwen3_moe", "mixtral", "granitemoe", "deepseek_v3", "gpt_oss",
)  # fmt: skip
