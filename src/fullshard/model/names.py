"""Names of one parameter in the model, in our checkpoints, and in PEFT's adapter files."""

import re

ADAPTER = "default"
PEFT_PREFIX = "base_model.model."
PEFT_CONFIG, PEFT_TENSORS = "adapter_config.json", "adapter_model.safetensors"


def base_name(name: str) -> str:
    """The name without PEFT's wrapping: ``q_proj.base_layer.weight`` -> ``q_proj.weight``."""
    return name.replace(".base_layer", "")


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return ".lora_" in name


def stored_name(name: str) -> str:
    """The name in our checkpoints: PEFT's file name for adapters, the plain model's name for the rest."""
    if is_adapter(name):  # PEFT drops .weight from DoRA's magnitudes
        name = name.replace(f".lora_magnitude_vector.{ADAPTER}.weight", ".lora_magnitude_vector")
        return PEFT_PREFIX + re.sub(rf"\.{ADAPTER}(?=\.|$)", "", name)
    return base_name(name)
