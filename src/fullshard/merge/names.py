"""Which parameters the base model (on the meta device) has, which of them are one, which adapters sit on them."""

from pathlib import Path
from typing import Any

from fullshard.config import LoraSection
from fullshard.model.adapters import AdapterPlace, adapter_places, inject_adapters
from fullshard.model.load import WeightFiles, build_on_meta
from fullshard.model.names import PEFT_PREFIX, is_adapter, stored_name
from fullshard.model.weight_map import WeightMap


class ModelNames:
    """Names and adapters of a model's parameters, and its weights in the base's files."""

    def __init__(self, base: Path, adapter: dict[str, Any] | None = None, new_ids: tuple[int, ...] = ()) -> None:
        """Build ``base``; ``adapter``: settings of a LoRA checkpoint; ``new_ids``: tokens that the run added.
        ModelError."""
        model = build_on_meta(base, max(new_ids, default=-1) + 1)
        self.weights = WeightMap(model, WeightFiles(base), str(base), new_ids)
        self.vocabulary_size: int = model.config.get_text_config().vocab_size
        parameters = dict(model.named_parameters(remove_duplicate=False))
        # every parameter name, tied ones included -> the name it is trained under
        self.canonical = {name: self.weights.aliases.get(name, (name,))[0] for name in parameters}
        self.frozen = {name for name, parameter in parameters.items() if not parameter.requires_grad}  # by the model
        self.places: dict[str, AdapterPlace] = {}  # by the module's name in PEFT's files
        self.adapter_shapes: dict[str, tuple[int, ...]] = {}  # by the tensor's name in PEFT's files
        if adapter:
            known = {key: adapter[key] for key in ("rank", "alpha", "targets", "variant") if key in adapter}
            inject_adapters(model, LoraSection(**known))
            self.places = {PEFT_PREFIX + place.module: place for place in adapter_places(model)}
            self.adapter_shapes = {
                stored_name(name): tuple(value.shape) for name, value in model.named_parameters() if is_adapter(name)
            }

    def is_tied(self, name: str) -> bool:
        """Whether the parameter is shared by two modules."""
        return name in self.weights.aliases
