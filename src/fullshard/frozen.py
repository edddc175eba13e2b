"""What the product's values are made of: ``class Shard(Frozen)`` is a frozen dataclass."""

from dataclasses import dataclass
from typing import dataclass_transform


@dataclass_transform(frozen_default=True)
class Frozen:
    """A class whose annotated names are its fields, set once: ``asdict``, ``replace`` and ``field`` work on it."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)
