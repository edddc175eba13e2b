"""Both engines against one unsharded process: gradients and losses over every combination, ranks 1 to 4."""

from __future__ import annotations

import copy
import itertools
import multiprocessing
import os
from typing import Any

import pytest
import torch
from odd_model import OddModel, make_model, tokens_of
from rank_pool import free_port, pool

from fullshard.ranks import Ranks

STEPS = 2
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}  # of the largest gradient


def shard(model: OddModel, ranks: Ranks, engine: str, dtype: torch.dtype, **options: Any) -> Any:
    from fullshard.shard.simple.engine import SimpleShardedModel
    from fullshard.shard.torch_engine import TorchShardedModel
    from fullshard.train.precision import Precision

    adapters = {p for name, p in model.named_parameters() if "lora_" in name and not model.blocks[0].one.requires_grad}
    kind = SimpleShardedModel if engine == "simple" else TorchShardedModel
    precision = Precision("test", dtype, master=dtype, reduce=dtype)
    return kind(model, model.units(), adapters, options.pop("mesh", ranks.mesh), precision, **options)


def one_case(ranks: Ranks, engine: str, dtype: torch.dtype, case: tuple[Any, ...], options: dict[str, Any]) -> float:
    """Largest difference of gradients, over the largest gradient, and of losses, from the unsharded process."""
    tied, recompute, frozen, micros = case
    model = make_model(tied, recompute, frozen, dtype)
    oracle = copy.deepcopy(model)
    sharded = shard(model, ranks, engine, dtype, **options)
    optimizer = torch.optim.SGD([{"params": group["params"]} for group in sharded.optimizer_groups()], lr=1e-3)
    plain = torch.optim.SGD([p for p in oracle.parameters() if p.requires_grad], lr=1e-3)
    worst = 0.0
    for step in range(STEPS):
        total = 0.0
        for micro in range(micros):
            with sharded.microbatch(micro == micros - 1):
                loss = sharded.module(tokens_of(step, micro, ranks.rank), uses_all=ranks.rank != 1)
                loss.backward()
            total += float(ranks.sum(loss.detach().clone()))
        right = 0.0
        for micro, rank in itertools.product(range(micros), range(ranks.num_ranks)):
            loss = oracle(tokens_of(step, micro, rank), uses_all=rank != 1)
            loss.backward()
            right += float(loss.detach())
        worst = max(worst, abs(total - right) / right)
        parameters = dict(oracle.named_parameters())
        largest = max(float(p.grad.abs().max()) for p in parameters.values() if p.grad is not None)
        covered = 0
        for part in sharded.shards():
            assert (part.gradient is not None) == part.trainable, part.name
            if part.trainable and part.stop > part.start:
                gradient = parameters[part.name].grad
                gradient = torch.zeros_like(parameters[part.name]) if gradient is None else gradient
                difference = gradient.reshape(-1)[part.start : part.stop] - part.gradient
                worst = max(worst, float(difference.abs().max()) / largest)
                covered += (part.stop - part.start) / sharded.replicas(part.name)
        trained = sum(p.numel() for p in parameters.values() if p.requires_grad)
        assert round(float(ranks.sum(torch.tensor(float(covered))))) == trained
        for one in (optimizer, plain):
            one.step()
            one.zero_grad(set_to_none=True)
        sharded.after_step()
        with torch.no_grad():
            tokens = tokens_of(99, 0, 0)
            worst = max(worst, float((sharded.module(tokens) - oracle(tokens)).abs()) / float(oracle(tokens)))
        sharded.after_step()
    return worst


FEW = [(True, True, False, 3), (False, False, False, 1), (False, False, True, 3)]


def all_cases(ranks: Ranks, engine: str, dtype: torch.dtype, options: dict[str, Any]) -> dict[str, float]:
    cases = FEW if options else itertools.product((True, False), (False, True), (False, True), (1, 3))
    return {str(case): one_case(ranks, engine, dtype, case, options) for case in cases}


SLOW_IN_FP32 = [pytest.param(torch.float32, num_ranks, marks=pytest.mark.slow) for num_ranks in (1, 3, 4)]


@pytest.mark.parametrize("engine", ["simple", "torch"])
@pytest.mark.parametrize(
    ("dtype", "num_ranks"), [*((torch.float64, n) for n in (1, 2, 3, 4)), (torch.float32, 2), *SLOW_IN_FP32]
)
def test_gradients_equal_one_unsharded_process(num_ranks: int, engine: str, dtype: torch.dtype) -> None:
    for found in pool(num_ranks).run(all_cases, engine, dtype, {}):
        assert found and not {case: worst for case, worst in found.items() if worst > TOLERANCE[dtype]}


WAYS = [("simple", way, each) for way in ("keep", "replicate") for each in (False, True)]
WAYS += [("torch", "keep", False), ("torch", "keep", True), ("torch", "full", True), ("simple", "full", True)]


@pytest.mark.parametrize(("engine", "strategy", "reduce_each"), WAYS)
def test_other_strategies(engine: str, strategy: str, reduce_each: bool) -> None:
    options = {"strategy": strategy, "reduce_each": reduce_each}
    for found in pool(3).run(all_cases, engine, torch.float64, options):
        assert not {case: worst for case, worst in found.items() if worst > 1e-12}


def hybrid_cases(ranks: Ranks, engine: str) -> dict[str, float]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return {str(case): one_case(ranks, engine, torch.float64, case, {"mesh": mesh}) for case in FEW}


def ask_for_replicas(ranks: Ranks, replicas: int) -> str:
    from fullshard.errors import ConfigError

    with pytest.raises(ConfigError) as caught:
        ranks.mesh_of(replicas)
    return caught.value.message


def test_replicas_that_do_not_divide_the_ranks() -> None:
    assert pool(3).run(ask_for_replicas, 2) == ["train.replicas=2 does not divide 3 ranks."] * 3


@pytest.mark.parametrize("engine", ["simple", "torch"])
def test_shard_inside_and_replicate_across(engine: str) -> None:
    """HSDP on 2 x 2 ranks."""
    for found in pool(4).run(hybrid_cases, engine):
        assert not {case: worst for case, worst in found.items() if worst > 1e-12}


def take_gradients(sharded: Any) -> list[torch.Tensor]:
    """The sums of this rank's ranges; then the step is over."""
    found = [part.gradient.clone() for part in sharded.shards() if part.trainable]
    for group in sharded.optimizer_groups():
        for _, tensor in group["params"]:
            tensor.grad = None
    sharded.after_step()
    return found


def gradients_of_a_step(ranks: Ranks, sharded: Any, step: int) -> list[torch.Tensor]:
    with sharded.microbatch(True):
        sharded.module(tokens_of(step, 0, ranks.rank)).backward()
    return take_gradients(sharded)


def fail_in_the_middle(ranks: Ranks, recompute: bool) -> bool:
    """A step, one that raises in a block's forward, one that raises in backward, and the first step again."""
    model = make_model(False, recompute, False, torch.float32)
    sharded = shard(model, ranks, "simple", torch.float32)
    first = gradients_of_a_step(ranks, sharded, 0)

    def fail(*anything: Any) -> None:
        raise KeyError("in the middle")

    for place in (model.blocks[2].register_forward_hook(fail), model.blocks[1].norm.register_full_backward_hook(fail)):
        with pytest.raises(KeyError):
            gradients_of_a_step(ranks, sharded, 1)
        place.remove()
        assert all(buffer.held_bytes == 0 for buffer in sharded._buffers)
    again = gradients_of_a_step(ranks, sharded, 0)
    return all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("recompute", [False, True])
def test_a_failed_step_leaves_no_trace_and_reruns_are_bit_equal(recompute: bool) -> None:
    assert all(pool(2).run(fail_in_the_middle, recompute))


def fail_between_sums(ranks: Ranks, frozen: bool, strategy: str, reduce_each: bool) -> bool:
    """Two micro-batches, one that raises in the second's forward, then in its backward, and the two again."""
    model = make_model(False, False, frozen, torch.float32)
    sharded = shard(model, ranks, "simple", torch.float32, strategy=strategy, reduce_each=reduce_each)

    def fail(*anything: Any) -> None:
        raise KeyError("in the middle")

    def step(failing: Any = None) -> list[torch.Tensor]:
        for micro in range(2):
            hook = failing(fail) if micro and failing else None
            try:
                with sharded.microbatch(micro == 1):
                    sharded.module(tokens_of(0, micro, ranks.rank)).backward()
            finally:
                if hook:
                    hook.remove()
        return take_gradients(sharded)

    first = step()
    for failing in (model.blocks[2].register_forward_hook, model.blocks[1].lora_B.register_full_backward_hook):
        with pytest.raises(KeyError):
            step(failing)
        assert all(buffer.held_bytes == 0 for buffer in sharded._buffers)
    return all(torch.equal(a, b) for a, b in zip(first, step(), strict=True))


@pytest.mark.parametrize(
    ("frozen", "strategy", "reduce_each"),
    [(False, "full", False), (False, "full", True), (True, "full", False), (False, "replicate", False)],
)
def test_a_failed_micro_batch_takes_the_sums_of_those_before_with_it(frozen, strategy, reduce_each) -> None:
    assert all(pool(3).run(fail_between_sums, frozen, strategy, reduce_each))


def twice(ranks: Ranks, engine: str, frozen: bool) -> bool:
    """Three recomputed micro-batches and an update, twice, on models made anew: the same bits of every range."""
    runs = []
    for _ in range(2):
        sharded = shard(make_model(False, True, frozen, torch.float32), ranks, engine, torch.float32)
        optimizer = torch.optim.AdamW([{"params": group["params"]} for group in sharded.optimizer_groups()], lr=1e-2)
        for step, micro in itertools.product(range(STEPS), range(3)):
            with sharded.microbatch(micro == 2):
                sharded.module(tokens_of(step, micro, ranks.rank)).backward()
            if micro == 2:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                sharded.after_step()
        runs.append([part.value.clone() for part in sharded.shards()])
    return all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("engine", ["simple", "torch"])
def test_a_rerun_has_the_same_bits(engine: str, frozen: bool) -> None:
    assert all(pool(3).run(twice, engine, frozen))


def disagree(ranks: Ranks, later: bool, order: tuple[int, ...]) -> str:
    """Blocks in another ``order``: on rank 1 in the first step, or ``later`` on all. Tied: nothing comes after them."""
    from fullshard.errors import TrainError

    model = make_model(True, False, False, torch.float32)
    sharded = shard(model, ranks, "simple", torch.float32)
    if later:
        gradients_of_a_step(ranks, sharded, 0)
    if ranks.rank == 1 or later:
        model.blocks = torch.nn.ModuleList([model.blocks[i] for i in order])
    with pytest.raises(TrainError) as caught:
        gradients_of_a_step(ranks, sharded, 1)
    return caught.value.message


@pytest.mark.parametrize(
    ("order", "here", "there"),
    [((0, 2, 1, 3), "blocks.1", "blocks.2"), ((0, 1, 3), "blocks.2", "blocks.3"), ((0, 1, 2), "blocks.3", "the rest")],
)
def test_ranks_that_disagree_about_the_order_are_told_both_names(order, here, there) -> None:
    """Another order, a block less in the middle or at the end: an error on both ranks at once, and no wait."""
    first, second = pool(2).run(disagree, False, order)
    assert first == f"Rank 0 runs {here} where rank 1 runs {there}."
    assert second == f"Rank 1 runs {there} where rank 0 runs {here}."
    for message in pool(2).run(disagree, True, order):
        assert message == f"The order of units has changed: {there} runs where {here} ran first."


def rank_that_may_change(rank: int, port: int, answers: Any) -> None:
    """A process of its own: a step, then one in which rank 1 alone runs its blocks in another order."""
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port), OMP_NUM_THREADS="1",
    )  # fmt: skip
    from fullshard.ranks import start_ranks

    ranks = start_ranks()
    torch.set_num_threads(1)
    model = make_model(True, False, False, torch.float32)
    sharded = shard(model, ranks, "simple", torch.float32)
    gradients_of_a_step(ranks, sharded, 0)
    if rank == 1:
        model.blocks = torch.nn.ModuleList([model.blocks[i] for i in (0, 2, 1, 3)])
    try:
        gradients_of_a_step(ranks, sharded, 1)
    except Exception as error:
        answers.put((rank, type(error).__name__, getattr(error, "message", str(error))))
    answers.close()
    answers.join_thread()
    os._exit(1)  # as a rank that has raised does


def test_one_rank_that_changes_the_order_later_is_told_and_the_other_does_not_wait() -> None:
    """The order was agreed on: rank 1 names both units and ends; rank 0, which waits for it, ends with it."""
    context, port = multiprocessing.get_context("spawn"), free_port()
    answers = context.Queue()
    started = [context.Process(target=rank_that_may_change, args=(rank, port, answers)) for rank in range(2)]
    try:
        for process in started:
            process.start()
        found = {rank: told for rank, *told in (answers.get(timeout=90) for _ in range(2))}
    finally:
        for process in started:
            process.kill()
            process.join()
    assert found[1] == ["TrainError", "The order of units has changed: blocks.2 runs where blocks.1 ran first."]
    assert found[0][0] != "TrainError" and "onnection" in found[0][1]


def misuse(ranks: Ranks) -> list[str]:
    from fullshard.shard.simple.unit import Phase

    sharded = shard(make_model(True, False, False, torch.float32), ranks, "simple", torch.float32)
    group, found = sharded._units[0].groups[0], []
    for before, after in itertools.product(Phase, Phase):
        group.phase = before
        try:
            group.enter(after)
        except AssertionError as error:
            found.append(str(error))
    group.phase = Phase.SHARDED
    group.gather()
    with pytest.raises(AssertionError, match=r"blocks\.0 still uses its buffer \(live\)"):
        group.buffer.take(sharded._units[3].groups[0])
    sharded.after_step()
    return found


def test_illegal_phases_are_refused_by_name() -> None:
    """10 of the 16 pairs of phases; and a buffer that is still in use."""
    [found] = pool(1).run(misuse)
    assert len(found) == 10 and "blocks.0: gathering cannot become reducing" in found


def sums_of_bf16(ranks: Ranks) -> tuple[torch.Tensor, torch.Tensor]:
    from fullshard.shard.simple.wire import Wire

    wire = Wire(ranks.mesh.get_group(), torch.device("cpu"))
    pieces = torch.full((3, 2), [256.0, 1.0, 1.0][ranks.rank], dtype=torch.bfloat16)
    order = torch.tensor([2.0**24, 1.0, -(2.0**24)][ranks.rank]).expand(3, 2).contiguous()
    return wire.total(wire.reduce(pieces), pieces), wire.total(wire.reduce(order), order)


def test_sums_are_fp32_and_in_rank_order_on_every_rank() -> None:
    """256 + 1 + 1 is 256 in bf16. (2^24 + 1) - 2^24 is 0 in fp32, and any other order gives 1."""
    for found, ordered in pool(3).run(sums_of_bf16):
        assert found.dtype == torch.float32 and found.tolist() == [258, 258] and ordered.tolist() == [0, 0]


def sent_in_a_step(ranks: Ranks, micros: int) -> tuple[int, list[tuple[str, int]], list[bool]]:
    """bf16: transfers by the plan; what was sent (dtype, bytes); which reductions send from a gather buffer."""
    import torch.distributed as dist

    from fullshard.shard.simple.engine import SimpleShardedModel
    from fullshard.shard.simple.wire import Wire
    from fullshard.train.precision import precision_of

    model = make_model(False, False, False, torch.float32)
    sharded = SimpleShardedModel(model, model.units(), set(), ranks.mesh, precision_of("bf16"))
    sent, reused = [], []

    def is_a_buffer(pieces: torch.Tensor) -> bool:
        return pieces.data_ptr() in {buffer.flat.data_ptr() for buffer in sharded._buffers}

    isend, reduce = dist.isend, Wire.reduce

    def note_sent(tensor: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        sent.append((str(tensor.dtype).removeprefix("torch."), tensor.nbytes))
        return isend(tensor, *arguments, **named)

    def note_reduced(wire: Wire, pieces: torch.Tensor) -> Any:
        reused.append(is_a_buffer(pieces))
        return reduce(wire, pieces)

    for step in range(2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "isend", note_sent)
            patch.setattr(Wire, "reduce", note_reduced)
            for name in ("all_gather", "all_reduce") if step else ():
                patch.delattr(dist, name)  # nothing else may travel once the order is known
            sent.clear(), reused.clear()
            for micro in range(micros):
                with sharded.microbatch(micro == micros - 1):
                    sharded.module(tokens_of(step, micro, ranks.rank)).backward()
            sharded.after_step()
    planned = [unit["planned"] for unit in sharded.planned(micros)]
    return sum(unit["gather"] + unit["reduce"] for unit in planned), sent, reused


def test_what_travels_in_a_step_is_what_the_plan_says() -> None:
    """Counted where it is sent, on 2 ranks: 4 blocks, embedding, norm and head; one rank's elements each."""
    for planned, sent, reused in pool(2).run(sent_in_a_step, 1):
        assert reused == [True] * 6
        assert planned == len(sent) == 4 * 3 + 2 * 2
        assert {dtype for dtype, _ in sent} == {"bfloat16"}  # fp32 sums are made where it arrives
        assert sum(size for _, size in sent) == 16 * 2 * 256  # 277 elements of a block are 2 x 256, the others too
    for planned, sent, _ in pool(2).run(sent_in_a_step, 3):
        assert planned == len(sent) == 3 * (4 * 2 + 2) + 6
        assert sorted({dtype for dtype, _ in sent}) == ["bfloat16", "float32"]  # sums over micro-batches are fp32
        assert sum(dtype == "float32" for dtype, _ in sent) == 6


def sent_with_lora(ranks: Ranks, micros: int, replicas: int) -> tuple[dict, list[dict], list[str], list[int]]:
    """A frozen base under adapters, or all trained on 2 x 2 ranks: transfers by unit, the plan, sent, sizes summed."""
    import torch.distributed as dist

    model, mesh = make_model(False, False, replicas == 1, torch.float32), ranks.mesh_of(replicas)
    sharded = shard(model, ranks, "simple", torch.float32, mesh=mesh)
    isend, all_reduce, sent, summed = dist.isend, dist.all_reduce, [], []

    def note_sent(tensor: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        sent.append(str(tensor.dtype))
        return isend(tensor, *arguments, **named)

    def note_summed(tensor: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        summed.append(tensor.numel())
        return all_reduce(tensor, *arguments, **named)

    for step in range(2):
        sharded.events = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "isend", note_sent)
            patch.setattr(dist, "all_reduce", note_summed)
            sent.clear(), summed.clear()
            for micro in range(micros):
                with sharded.microbatch(micro == micros - 1):
                    sharded.module(tokens_of(step, micro, ranks.rank)).backward()
            sharded.after_step()
    counts = {
        unit["unit"]: {kind: sum((event["what"], event["unit"]) == (kind, unit["unit"]) for event in sharded.events)
                       for kind in unit["planned"]} for unit in sharded.planned(micros)
    }  # fmt: skip
    return counts, sharded.planned(micros), sent, summed


@pytest.mark.parametrize("micros", [1, 3])
def test_what_travels_with_adapters_is_what_the_plan_says(micros: int) -> None:
    """By hand: each block twice a micro-batch, embedding and [norm, head] once, never reduced; adapters once a step."""
    for counts, planned, sent, summed in pool(2).run(sent_with_lora, micros, 1):
        assert counts == {unit["unit"]: unit["planned"] for unit in planned}
        assert counts["adapters"] == {"gather": 1, "free": 1, "reduce": 1}
        assert counts["blocks.2"] == {"gather": 2 * micros, "free": 2 * micros, "reduce": 0}
        assert len(sent) == (4 * 2 + 2) * micros + 2 and summed == []


@pytest.mark.parametrize("micros", [1, 3])
def test_replicas_add_one_sum_of_a_shard_for_each_group_of_a_step(micros: int) -> None:
    """2 x 2 ranks: what travels inside a replica is as without; then each of 6 shards is summed once."""
    for counts, planned, sent, summed in pool(4).run(sent_with_lora, micros, 2):
        assert counts == {unit["unit"]: unit["planned"] for unit in planned}
        assert len(sent) == (4 * 2 + 2) * micros + 6 and summed == [256] * 6


def events_of_a_step(ranks: Ranks) -> tuple[list[str], list[int], list[int]]:
    """What happens in a second step of 4 blocks; the bytes held then; the bytes of each buffer."""
    model = make_model(False, False, False, torch.float32)
    sharded = shard(model, ranks, "simple", torch.float32)
    gradients_of_a_step(ranks, sharded, 0)
    sharded.events = []
    gradients_of_a_step(ranks, sharded, 1)
    buffers = sharded._buffers
    assert not any(buffer.held_bytes for buffer in buffers)
    happened = [f"{event['what']} {event['unit']}" for event in sharded.events]
    return happened, [event["held_bytes"] for event in sharded.events], [buffer.flat.nbytes for buffer in buffers]


def test_each_collective_happens_as_often_as_it_should() -> None:
    for happened, held, sizes in pool(2).run(events_of_a_step):
        for block in range(4):
            assert happened.count(f"gather blocks.{block}") == happened.count(f"free blocks.{block}") == 2
            assert happened.count(f"reduce blocks.{block}") == happened.count(f"reduce end blocks.{block}") == 1
        for block in (0, 1, 2):  # prefetched while the block before it computes, in both directions
            assert happened.index(f"gather blocks.{block + 1}") < happened.index(f"forward blocks.{block}")
            last = len(happened) - 1 - happened[::-1].index(f"gather blocks.{block}")
            assert last < happened.index(f"backward blocks.{block + 1}")
        assert happened.count("reduce embedding") == happened.count("reduce norm + head") == 1
        block, embedding, norm_and_head = sizes[0], *sizes[3:]  # three for the blocks in turn
        assert len(sizes) == 5 and sizes[:3] == [block] * 3 and max(held) <= 3 * block + embedding + norm_and_head
        at = dict(zip(happened, held, strict=True))
        assert at["forward norm + head"] == norm_and_head  # no block computes, none has memory
        assert at["backward norm + head"] == norm_and_head + block  # the last block's is prefetched
