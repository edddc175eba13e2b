"""Names of one parameter in the model, in the weight files, and in PEFT's adapter files."""

from __future__ import annotations

ADAPTER = "default"
PEFT_PREFIX = "base_model.model."


def file_name_of(name: str, available: set[str], prefix: str) -> str | None:
    """The name under which the files hold parameter ``name``, or None.

    Tried in order: the name itself without PEFT's wrapping; with the base model's prefix ("model", "transformer") added;
    with it taken away (the hub's gpt2 has none).
    """
    plain = base_name(name)
    for candidate in (plain, f"{prefix}.{plain}", plain.removeprefix(f"{prefix}.")):
        if candidate in available:
            return candidate
    return None


def base_name(name: str) -> str:
    """The name without PEFT's wrapping: ``q_proj.base_layer.weight`` -> ``q_proj.weight``."""
    return name.replace(".base_layer.", ".")


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return ".lora_" in name


def stored_name(name: str) -> str:
    """The name in our checkpoints: PEFT's file name for adapters, the plain model's name for the rest."""
    if is_adapter(name):
        return PEFT_PREFIX + name.replace(f".{ADAPTER}.", ".")
    return base_name(name)
