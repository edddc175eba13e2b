"""HO-9: the gradient norm and clipping on shards equal one process's, whatever is sharded, frozen or tiny."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from rank_pool import pool
from safetensors.torch import load_file, save_file
from tiny_models import make_model

from fullshard.config import config_from_dict
from fullshard.train.precision import precision_of

ROWS = torch.randint(8, 64, (4, 12), generator=torch.Generator().manual_seed(3))
FACTOR, MAX_NORM, RATE = 50.0, 0.5, 0.1
THREE = torch.tensor([0.1, -0.2, 0.3])


def freeze_half(model) -> None:
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number % 2 == 0)


def register_k1_with_three() -> None:
    """A family of its own in this process: K1 plus a parameter of shape (3,), fewer elements than 4 ranks."""
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, LlamaModel
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if "k1_with_three" in CONFIG_MAPPING:
        return

    class ThreeConfig(LlamaConfig):
        model_type = "k1_with_three"

    class ThreeDecoder(LlamaModel):
        def __init__(self, config):
            super().__init__(config)
            self.three = torch.nn.Parameter(torch.zeros(3))

        def forward(self, *arguments, **named):
            output = super().forward(*arguments, **named)
            output.last_hidden_state = output.last_hidden_state + torch.nn.functional.pad(self.three, (0, 13))
            return output

    class ThreeModel(LlamaForCausalLM):
        config_class = ThreeConfig

        def __init__(self, config):
            super().__init__(config)
            self.model = ThreeDecoder(config)
            if config.half_frozen:
                freeze_half(self)

    AutoConfig.register("k1_with_three", ThreeConfig)
    AutoModelForCausalLM.register(ThreeConfig, ThreeModel)


def clipped_step(ranks, path: str, engine: str):
    """Rows dealt over the ranks, one clipped SGD step; norms before and after clipping, and this rank's new shards."""
    from fullshard.train.optimizer import build_optimizer, clip_gradients, gradient_norm, take_step
    from fullshard.train.setup import build_sharded

    register_k1_with_three()
    values = {"model": {"path": path}, "data": {"train": "x"}, "output": "y", "method": "full"}
    config = config_from_dict(values | {"engine": engine} | {"train": {"optimizer": "sgd", "learning_rate": RATE}})
    built = build_sharded(config, ranks, precision_of("fp32"), False)
    (optimizer, _), rows = build_optimizer(config, built.sharded), ROWS[ranks.rank :: ranks.num_ranks]
    with built.sharded.microbatch(True):
        (built.loss_model(rows[:, :-1], rows[:, 1:]) * FACTOR).backward()
    shards = built.sharded.shards()
    norm = gradient_norm(built.sharded, shards, ranks)
    clip_gradients(shards, norm, MAX_NORM)
    after = gradient_norm(built.sharded, built.sharded.shards(), ranks)
    take_step(optimizer, shards, "")
    found = {s.name: (s.start, s.value.clone(), s.trainable) for s in built.sharded.shards()}
    return norm, after, found


def oracle(path: str):
    """One process with plain transformers: (norm, new weights, names of the trained ones)."""
    from transformers import AutoModelForCausalLM

    register_k1_with_three()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    if model.config.half_frozen:
        freeze_half(model)  # loading makes parameters anew
    logits = model(ROWS[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ROWS[:, 1:].flatten(), reduction="sum")
    (loss * FACTOR).backward()
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    norm = math.sqrt(sum(parameter.grad.double().square().sum().item() for parameter in trained.values()))
    with torch.no_grad():
        for parameter in trained.values():
            parameter -= RATE * parameter.grad * (MAX_NORM / norm)
    return norm, {name: parameter.detach() for name, parameter in model.named_parameters()}, set(trained)


@pytest.mark.parametrize("half_frozen", [False, True])
@pytest.mark.parametrize("engine", ["torch", "simple"])
def test_clipping_on_shards(tmp_path, half_frozen, engine):
    from transformers import AutoConfig

    path = make_model(tmp_path / "model")
    settings = AutoConfig.from_pretrained(path).to_dict() | {"model_type": "k1_with_three", "half_frozen": half_frozen}
    register_k1_with_three()
    AutoConfig.for_model(**settings).save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"model.three": THREE}, path / "model.safetensors", {"format": "pt"})
    norm, weights, trained = oracle(str(path))
    assert norm > 100 * MAX_NORM and len(trained) == (11 if half_frozen else 22)
    for num_ranks in (1, 2, 4):
        answers = pool(num_ranks).run(clipped_step, str(path), engine)
        for found, after, shards in answers:
            assert type(found) is float and found == answers[0][0]
            assert found == pytest.approx(norm, rel=1e-5)
            assert after == pytest.approx(MAX_NORM, rel=1e-5)
            assert {name for name, (_, _, is_trained) in shards.items() if is_trained} == trained
        for name, value in weights.items():
            pieces = {answer[2][name][0]: answer[2][name][1] for answer in answers if len(answer[2][name][1])}
            whole = torch.cat([pieces[start] for start in sorted(pieces)])  # a small one is whole on each rank
            assert torch.allclose(whole, value.flatten(), atol=1e-6, rtol=0), name


def test_the_norm_counts_every_piece_of_a_large_gradient():
    """600,007 elements are three pieces on a CPU; divided by the loss scale first, in place, and over two replicas."""
    from fullshard.shard import Shard
    from fullshard.train.optimizer import gradient_norm

    exact = torch.randn(600_007, generator=torch.Generator().manual_seed(0))
    shards = [
        Shard("w", (600_007,), 0, 600_007, exact, exact * 4, True, False),
        Shard("f", (1,), 0, 1, THREE, None, False, False),
    ]
    alone = SimpleNamespace(device=torch.device("cpu"), sum=lambda value: value)
    norm = gradient_norm(SimpleNamespace(replicas=lambda name: 2), shards, alone, scale=4.0)
    assert norm == pytest.approx(float(exact.double().norm()) / math.sqrt(2), rel=1e-6)
    assert torch.equal(shards[0].gradient, exact)
