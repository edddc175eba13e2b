"""Every collective that a run asks for, as torch's dispatcher sees it: sums only, no fp64, on any backend.

An average, a pre-multiplied sum and fp64 are what HCCL lacks or does in another way (docs/ascend.md): nobody asks.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_pool import pool
from test_training import make_run
from tiny_models import make_model, make_tokenizer
from torch.utils._python_dispatch import TorchDispatchMode

from fullshard.config import config_from_dict

REDUCTIONS = [name for name in dir(dist.ProcessGroup) if "reduce" in name and not name.startswith("__")]


class CollectiveRecorder(TorchDispatchMode):
    """Notes (operator, dtype) of every c10d operator, in forward and backward, and the operation of every reduction.

    The dispatcher hides which reduction is meant in an opaque object, so that is read where Python hands it to the
    process group; functional collectives (DTensor's) name it in a string.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: set[tuple[str, str]] = set()
        self.reductions: set[tuple[str, str]] = set()

    def __torch_dispatch__(self, operator, types, arguments=(), keywords=None):
        if operator.namespace in ("c10d", "_c10d_functional"):
            values = [*arguments, *(keywords or {}).values()]
            self.calls |= {(operator._opname, dtype) for dtype in dtypes_in(values)}
            if operator.namespace == "_c10d_functional" and "reduce" in operator._opname:
                self.reductions.add((operator._opname, str(values[1]).upper()))
        return operator(*arguments, **(keywords or {}))

    @contextlib.contextmanager
    def recording(self):
        """Record until the end of the block."""
        with self, pytest.MonkeyPatch.context() as patch:
            for name in REDUCTIONS:
                patch.setattr(dist.ProcessGroup, name, self._wrap(name, getattr(dist.ProcessGroup, name)))
            yield

    def _wrap(self, name, method):
        def wrapped(group, *arguments, **keywords):
            for value in [*arguments, *keywords.values()]:
                if hasattr(value, "reduceOp"):
                    self.reductions.add((name, operation_of(value.reduceOp)))
                elif isinstance(value, dist.ReduceOp | dist.ReduceOp.RedOpType):
                    self.reductions.add((name, operation_of(value)))
            return method(group, *arguments, **keywords)

        return wrapped


def operation_of(reduction) -> str:
    """``SUM`` for ReduceOp.SUM, in each of the forms that torch gives it."""
    return str(getattr(reduction, "op", reduction)).rpartition(".")[2]


def dtypes_in(value) -> set[str]:
    if isinstance(value, torch.Tensor):
        return {str(value.dtype).removeprefix("torch.")}
    return set().union(*map(dtypes_in, value)) if isinstance(value, (list, tuple)) else set()


def record_training(ranks, run: str, config: dict, precision: str) -> list:
    from fullshard.train.loop import run_rank

    plan = {"micro_batch": [1, "rows"], "precision": precision, "recompute": False}
    recorder = CollectiveRecorder()
    with recorder.recording():
        run_rank(Path(run), config_from_dict(config), plan, ranks, None, True)
    return recorder.calls, recorder.reductions


def record_forbidden(ranks):
    """What the recorder must be able to see: averages and pre-multiplied sums, fp64."""
    recorder = CollectiveRecorder()
    with recorder.recording():
        dist.all_reduce(torch.ones(2, dtype=torch.float64), op=dist.ReduceOp.MAX)
        for forbidden in (dist.ReduceOp.AVG, dist._make_nccl_premul_sum(0.5)):
            with contextlib.suppress(RuntimeError, ValueError):  # gloo has neither
                dist.reduce_scatter_tensor(torch.ones(1), torch.ones(2), op=forbidden)
    ranks.barrier()
    return recorder.calls, recorder.reductions


@pytest.mark.parametrize(("method", "precision"), [("full", "fp32"), ("full", "bf16"), ("lora", "fp32")])
def test_a_run_asks_for_sums_only_and_never_for_fp64(tmp_path, method, precision):
    model = make_tokenizer(make_model(tmp_path / "model"))
    config = make_run(tmp_path / "run", model, method, max_steps=2, clip_norm=1.0)
    values = config.model_dump(exclude_unset=True)
    for calls, reductions in pool(2).run(record_training, str(tmp_path / "run"), values, precision):
        scattered = {"_reduce_scatter_base_"} if method == "full" else set()  # adapters are replicated: all-reduced
        assert {"allreduce_", "_allgather_base_"} | scattered <= {name for name, _ in calls}
        assert {operation for _, operation in reductions} == {"SUM"}
        assert any("scatter" in name for name, _ in reductions) == bool(scattered)
        assert not [call for call in calls if call[1] in ("float64", "complex128")]


def test_the_recorder_sees_what_is_forbidden():
    for calls, reductions in pool(2).run(record_forbidden):
        assert ("allreduce_", "float64") in calls
        assert {operation for _, operation in reductions} == {"MAX", "AVG", "PREMUL_SUM"}
