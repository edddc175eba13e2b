"""Read the weights of a fullshard checkpoint, range by range, without any process group."""

from pathlib import Path

import torch

from fullshard.checkpoint.format import PROOF
from fullshard.checkpoint.load import RangeReader
from fullshard.errors import CheckpointError


class OwnCheckpoint(RangeReader):
    """The trained weights of one checkpoint folder, and the proof that lies beside them."""

    def __init__(self, folder: Path) -> None:
        """Open ``folder``. Raises CheckpointError where it is incomplete or does not fit its manifest."""
        super().__init__(folder)
        self.weights = {name: stored for (name, kind), stored in self._stored.items() if kind == "weight"}

    def whole(self, name: str) -> torch.Tensor:
        """The whole weight ``name`` in its full shape, in its stored dtype (fp32)."""
        return self.read(name).reshape(self.weights[name].shape)

    def proof(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The proof: tokens (1, T) int64 and the training state's logits (T, vocabulary) fp32."""
        place = self.folder / PROOF
        if not place.is_file():
            raise CheckpointError(f"{place} is missing: a merge cannot be proven.", "Use another step.")
        file = self.open_file(PROOF)
        tokens, logits = file.get_tensor("tokens"), file.get_tensor("logits").float()
        if tokens.ndim != 2 or logits.ndim != 2 or tokens.shape != (1, logits.shape[0]):
            shapes = f"tokens {tuple(tokens.shape)} do not fit logits {tuple(logits.shape)}"
            raise CheckpointError(f"{place}: {shapes}.", "Use another step.")
        return tokens, logits
