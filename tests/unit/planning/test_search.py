"""make_plan: what it decides on a machine that the test makes up."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from fullshard.config import config_from_dict
from fullshard.data.pack import lay_out, windows, windows_of_run
from fullshard.errors import ConfigError, DataError, ModelError, PlanError
from fullshard.planning import search
from fullshard.planning.plan import format_bytes, format_minutes
from fullshard.planning.search import Machine, choose, longest_row, make_plan, measure_work, read_facts
from fullshard.planning.speed import Rates
from fullshard.planning.volume import Volume, read_volume

CPU = Machine("cpu", 20_000_000_000, Rates(80e9, 1e9, 2))
GPU = Machine("cuda", 24_000_000_000, Rates(20e12, 150e12, 1))


@pytest.fixture
def on_machine(monkeypatch):
    def use(machine):
        monkeypatch.setattr(search, "read_machine", lambda: machine)

    use(CPU)
    return use


@pytest.fixture
def data_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"question": "red blue green", "answer": "one two"} for _ in range(100)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


@pytest.fixture
def recipe(k1_folder, data_file, tmp_path):
    def make(**changes):
        values = {
            "model": {"path": str(k1_folder)},
            "data": {"train": str(data_file), "max_length": 32},
            "train": {"global_batch": "10 rows"},
            "output": str(tmp_path / "run"),
        }
        for key, value in changes.items():
            values[key] = {**values[key], **value} if isinstance(value, dict) and key in values else value
        return config_from_dict(values)

    return make


def with_memory(machine, count):
    return dataclasses.replace(machine, memory_bytes=count)


def test_plan_of_a_small_job(on_machine, recipe):
    plan = make_plan(recipe(data={"eval": 0.1}), ranks=2)
    # (14 + 7 bytes) / 4 and the template: 3 + 1 + 1 + 1 + 12 tokens a row by the estimate
    assert (plan.rows, plan.tokens, plan.is_estimate) == (90, 90 * 18, True)
    assert (plan.ranks, plan.device, plan.precision, plan.recompute) == (2, "cpu", "fp32", False)
    assert plan.num_steps == 9
    assert plan.batch == "10 rows = ~180 tokens = 2 ranks x 1 micro-batch"
    assert plan.peak_bytes == max(plan.moments[name] for name in ("load", "train", "eval", "save"))
    assert plan.peak_bytes < plan.usable_bytes == (19_000_000_000 - 400_000_000) // 2
    assert 0 < plan.seconds_low < plan.seconds_high


def test_plan_is_json_with_what_the_ranks_need(on_machine, recipe):
    stored = json.loads(json.dumps(dataclasses.asdict(make_plan(recipe(), ranks=1))))
    assert stored["micro_batch"][1] == "tokens"
    assert stored["precision"] == "fp32"
    assert stored["recompute"] is False
    assert stored["ranks"] == 1
    assert {"cause", "bytes", "formula", "when"} == set(stored["lines"][0])


def test_report_names_bytes_batch_and_time(on_machine, recipe):
    text = make_plan(recipe(), ranks=2).to_text()
    for words in (
        "frozen base",
        "adapters",
        "activations",
        "10 rows = ~180 tokens = 2 ranks x 1 micro-batch",
        "Time: ",
    ):
        assert words in text
    assert "estimated" in text


@pytest.mark.parametrize(
    ("machine", "asked", "chosen"),
    [
        (CPU, "auto", "fp32"),
        (CPU, "bf16", "bf16"),
        (dataclasses.replace(CPU, rates=Rates(80e9, 160e9, 2)), "auto", "bf16"),
        (dataclasses.replace(CPU, rates=Rates(80e9, 90e9, 2)), "auto", "fp32"),
        (GPU, "auto", "bf16"),
        (GPU, "fp32", "fp32"),
    ],
)
def test_precision(on_machine, recipe, machine, asked, chosen):
    on_machine(machine)
    assert make_plan(recipe(train={"precision": asked}), ranks=2).precision == chosen


def test_the_recipes_micro_batch_is_kept(on_machine, recipe):
    plan = make_plan(recipe(train={"micro_batch": "2 rows"}), ranks=1)
    assert plan.micro_batch == (2, "rows")
    assert plan.micro_batches == 5


@pytest.mark.parametrize("micro_batch", ["1000 rows", "100000 tokens"])
def test_a_micro_batch_larger_than_a_step_costs_no_more_than_the_step(on_machine, recipe, micro_batch):
    """Of ten rows a rank of two gets five, and before they are prepared each may have max_length tokens: 5 x 32."""
    plan = make_plan(recipe(train={"micro_batch": micro_batch}), ranks=2)
    assert plan.is_estimate and plan.micro_batches == 1
    assert next(line.formula for line in plan.lines if line.cause == "activations").startswith("160 tokens x ")


def test_micro_batch_is_bounded_by_the_step_and_holds_the_longest_row(on_machine, recipe):
    facts = read_facts(recipe())
    assert choose(recipe(), 2, facts).micro_batch == (128, "tokens")  # 5 rows x 18 tokens, in steps of 64
    large = recipe(data={"max_length": 64}, train={"global_batch": "1 rows"})
    assert choose(large, 2, facts).micro_batch == (64, "tokens")


def test_the_largest_step_is_one_micro_batch_where_that_fits(on_machine, recipe, tmp_path):
    """4 rows a step on 2 ranks: mostly 100 tokens a rank, but 500 and more where long rows are in the step. Sizes are
    multiples of 64: with 64 less some step would take two micro-batches and keep whole gradients."""
    lengths = [50] * 70 + [500] * 30
    config, facts = facts_of_a_larger_model(recipe, tmp_path, lengths)
    train = config.train.model_copy(update={"global_batch": "4 rows", "micro_batch": None})
    data = config.data.model_copy(update={"max_length": 512, "packing": True})
    found = choose(config.model_copy(update={"train": train, "data": data}), 2, facts)
    size, unit = found.micro_batch
    steps = [window for _, window in windows_of_run(np.array(lengths), train)]
    counts = {
        less: max(len(lay_out(window, np.array(lengths), 2, (size - less, "tokens"), True, 512)) for window in steps)
        for less in (0, 64)
    }
    assert unit == "tokens" and counts == {0: 1, 64: 2} and not found.job.accumulates


def test_full_fine_tuning_in_several_micro_batches_keeps_whole_gradients(on_machine, recipe):
    several = make_plan(recipe(method="full", train={"micro_batch": "2 rows"}), ranks=2)
    single = make_plan(recipe(method="full", train={"micro_batch": "5 rows"}), ranks=2)
    assert (several.micro_batches, single.micro_batches) == (3, 1)
    assert "kept gradients" in {line.cause for line in several.lines}
    assert "kept gradients" not in {line.cause for line in single.lines}


def test_gradients_are_reduced_each_time_where_whole_sums_do_not_fit(on_machine, recipe, tmp_path):
    """Full, 4 ranks, 1 row a micro-batch: whole fp32 sums are 4 bytes a parameter on each rank, on top."""
    config, facts = facts_of_a_larger_model(recipe, tmp_path, [64] * 100)
    config = config.model_copy(
        update={"train": config.train.model_copy(update={"micro_batch": "1 rows", "recompute": "none"})}
    )
    roomy = choose(config, 4, facts)
    causes = {line.cause: line.bytes for line in search.memory_lines(facts.shape, roomy.job)}
    assert not roomy.reduce_each and causes["kept gradients"] == 4 * facts.shape.parameters
    usable = roomy.peak_bytes - 1_000_000
    tight = dataclasses.replace(facts, machine=with_memory(CPU, int((4 * usable + 4e8) / search.USABLE_SHARE) + 1))
    found = choose(config, 4, tight)
    assert found.reduce_each and not found.job.accumulates
    saved = roomy.moments["train"] - found.moments["train"]
    assert saved == causes["kept gradients"]


def test_sharding_and_replicas_cost_what_they_hold(on_machine, recipe, tmp_path):
    """HSDP 2 x 2: each rank has the share that 2 ranks would have. keep: all gathered weights at once."""
    config, facts = facts_of_a_larger_model(recipe, tmp_path, [64] * 100)

    def causes(num_ranks, **changes):
        changed = config.model_copy(update={"train": config.train.model_copy(update=changes)})
        return {
            line.cause: line.bytes for line in search.memory_lines(facts.shape, choose(changed, num_ranks, facts).job)
        }

    states = [causes(4, replicas=2)["optimizer state"], causes(2)["optimizer state"], causes(4)["optimizer state"]]
    assert states[0] == states[1] == 2 * states[2] == 8 * facts.shape.parameters // 2
    assert causes(4, sharding="keep")["gathered weights"] == 4 * facts.shape.parameters
    with pytest.raises(PlanError, match=r"train\.replicas=3 does not divide 4 ranks") as caught:
        make_plan(recipe(train={"replicas": 3}), ranks=4)
    assert caught.value.hint == "Take one of 1, 2, 4."


def facts_of_a_larger_model(recipe, tmp_path, lengths=None):
    from tiny_models import make_model

    settings = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8}
    folder = make_model(tmp_path / "larger", **settings, num_attention_heads=4, max_position_embeddings=2048)
    config = recipe(model={"path": str(folder)}, data={"max_length": 512}, method="full")
    facts = read_facts(config)
    if lengths is not None:
        facts = dataclasses.replace(facts, volume=Volume(np.array(lengths), 0.5, 0, False))
    return config, facts


def test_recomputation_only_where_needed(on_machine, recipe, tmp_path):
    config, facts = facts_of_a_larger_model(recipe, tmp_path, [512] * 100)
    roomy = choose(config, 1, facts)
    assert not roomy.job.recompute
    least_without = min(choice.peak_bytes for choice in search._choices(config, 1, facts) if not choice.job.recompute)
    needed = int((least_without - 1_000_000 + search.LAUNCHER_BYTES) / search.USABLE_SHARE)
    tight = dataclasses.replace(facts, machine=with_memory(CPU, needed))
    found = choose(config, 1, tight)
    assert found.job.recompute
    assert found.peak_bytes <= tight.machine.usable_bytes(1)


def test_error_names_changes_that_fit(on_machine, recipe, tmp_path):
    config, facts = facts_of_a_larger_model(recipe, tmp_path)
    config = config.model_copy(
        update={"train": config.train.model_copy(update={"recompute": "none", "micro_batch": "8 rows"})}
    )
    peak = choose(config, 2, facts).peak_bytes
    tight = with_memory(CPU, int((2 * 0.91 * peak + search.LAUNCHER_BYTES) / search.USABLE_SHARE))
    on_machine(tight)  # within the error: it starts, and says so
    plan = make_plan(config, ranks=2)
    assert not plan.fits and "Tight, may fit or not" in plan.to_text()
    assert any("within its error" in note for note in plan.notes)
    small = with_memory(CPU, int((2 * 0.89 * peak + search.LAUNCHER_BYTES) / search.USABLE_SHARE))
    on_machine(small)
    with pytest.raises(PlanError) as caught:
        make_plan(config, ranks=2)
    assert format_bytes(peak) in caught.value.message
    changes = caught.value.hint.splitlines()[1:]
    assert len(changes) == 3
    assert "train.micro_batch=null" in changes[0]
    # each proposed change really fits by the same formulas
    for line in changes:
        words = line.split("   (")[0].split()
        ranks = int(words[words.index("--ranks") + 1]) if "--ranks" in words else 2
        changed = config.model_dump()
        if changed["method"] == "full":
            del changed["lora"]
        for word in words:
            key, _, value = word.partition("=")
            if "." in key:
                section, name = key.split(".")
                changed[section][name] = None if value == "null" else int(value) if value.isdigit() else value
            elif value:
                changed[key] = value
        assert make_plan(config_from_dict(changed), ranks=ranks).peak_bytes > 0


def test_error_where_nothing_fits_says_the_least(on_machine, recipe):
    on_machine(with_memory(CPU, 700_000_000))
    with pytest.raises(PlanError) as caught:
        make_plan(recipe(), ranks=2)
    assert "No change of the recipe fits" in caught.value.hint
    assert "smaller model or more memory" in caught.value.hint


def test_ranks_of_a_cpu_share_its_memory():
    assert CPU.usable_bytes(2) == CPU.usable_bytes(1) // 2
    assert GPU.usable_bytes(2) == GPU.usable_bytes(1)


@pytest.mark.parametrize("epochs", [0.5, 1, 2, 2.5])
@pytest.mark.parametrize("batch", ["7 rows", "64 tokens"])
def test_steps_are_those_of_the_windows(recipe, epochs, batch):
    lengths = np.arange(4, 44, dtype=np.int64)
    config = recipe(train={"epochs": epochs, "global_batch": batch, "seed": 3})
    count, unit = batch.split()
    wanted = 0
    for epoch in range(int(np.ceil(epochs))):
        of_epoch = len(windows(lengths, 3, epoch, (int(count), unit)))
        wanted += max(1, round(min(1.0, epochs - epoch) * of_epoch))
    assert len(windows_of_run(lengths, config.train)) == wanted
    capped = recipe(train={"epochs": epochs, "global_batch": batch, "seed": 3, "max_steps": 2})
    assert len(windows_of_run(lengths, capped.train)) == 2


def test_work_counts_each_token_and_the_padding(recipe):
    config = recipe(train={"global_batch": "4 rows", "epochs": 2}, data={"max_length": 64})
    volume = Volume(np.full(8, 16, dtype=np.int64), 0.25, 64, False)
    work = measure_work(config, 2, volume, (32, "tokens"))
    assert (work.num_steps, *work.first) == (4, 4, 64, 1)
    assert work.padded_tokens == 4 * 32  # two rows of 16 a rank and step
    assert work.supervised_tokens == 4 * 64 * 0.25 / 2
    assert work.num_micro_batches == 4
    assert work.evaluated_tokens == pytest.approx((1 + 2) * 1.1 * 64 / 2)


def test_prepared_rows_are_counted_exactly(on_machine, recipe):
    from fullshard.data.prepared import prepare
    from fullshard.run_folder import CONFIG, PREPARED, write_json

    config = recipe(data={"eval": 0.1})
    run = Path(config.output)
    run.mkdir()
    prepare(config, run / PREPARED)
    write_json(run / CONFIG, config.model_dump(mode="json"))
    plan = make_plan(config, ranks=2)
    # bos, role, 3 words, end, role, 2 words, end
    assert (plan.is_estimate, plan.rows, plan.tokens, plan.longest) == (False, 90, 900, 10)
    assert "10 rows = 100 tokens" in plan.batch
    # memory is that of what is laid out: of ten rows of ten tokens a rank gets five, whatever a micro-batch may have
    large = make_plan(recipe(data={"eval": 0.1}, train={"global_batch": "10 rows", "micro_batch": "10 rows"}), ranks=2)
    for one in (plan, large):
        assert next(line.formula for line in one.lines if line.cause == "activations").startswith("50 tokens x ")
    assert (large.micro_batch, large.peak_bytes) == ((10, "rows"), plan.peak_bytes)
    assert read_volume(recipe(data={"eval": 0.2})).is_estimate  # prepared for another recipe


def test_a_probes_speed_is_the_plans_whatever_the_first_step_holds(on_machine, recipe, data_file):
    rows = [{"question": "red " * (1 + number % 9), "answer": "one two"} for number in range(30)]
    data_file.write_text("\n".join(map(json.dumps, rows)))
    plan = make_plan(recipe(train={"global_batch": "3 rows"}), ranks=2, tokens_per_second=1000.0)
    steps = 30 // 3
    assert plan.num_steps == steps
    assert f"~{plan.tokens / steps:.0f} tokens" not in plan.batch  # the first step is no mean one
    assert plan.tokens_per_second == pytest.approx((900, 1100))  # real speed / a probe's: 0.9 to 1.1
    assert plan.step_seconds == pytest.approx((plan.tokens / steps / 1100, plan.tokens / steps / 900))


def test_rows_longer_than_the_models_positions(on_machine, recipe, monkeypatch):
    config = recipe(data={"max_length": 1024})
    facts = read_facts(config)
    assert longest_row(config, facts) == 64  # K1 has 64 positions
    too_long = dataclasses.replace(facts, volume=Volume(np.array([80]), 0.5, 0, False))
    monkeypatch.setattr(search, "read_facts", lambda *given: too_long)
    with pytest.raises(ConfigError, match="80 tokens"):
        make_plan(config)


def test_bad_inputs(on_machine, recipe, tmp_path):
    with pytest.raises(ModelError):
        make_plan(recipe(model={"path": str(tmp_path / "nowhere")}))
    with pytest.raises(DataError):
        make_plan(recipe(data={"train": str(tmp_path / "nothing.jsonl")}))


def test_formats():
    assert [format_bytes(count) for count in (12, 1500, 310_000_000, 1_250_000_000, 16_060_522_496)] == [
        "12 B",
        "1.5 kB",
        "310 MB",
        "1.25 GB",
        "16.1 GB",
    ]
    assert format_minutes(20, 50) == "20 - 50 seconds"
    assert format_minutes(180, 420) == "3 - 7 minutes"
    assert format_minutes(5400, 10800) == "1.5 - 3.0 hours"


def test_a_device_without_bf16_is_never_told_to_use_it(on_machine, recipe):
    """V100, Ascend 910A: a job that does not fit gets other changes, and auto is fp32."""
    old = dataclasses.replace(GPU, rates=Rates(14e12, 0.0, 1))
    on_machine(old)
    assert make_plan(recipe()).precision == "fp32"
    on_machine(with_memory(old, 100_000))
    with pytest.raises(PlanError) as caught:
        make_plan(recipe())
    assert "bf16" not in str(caught.value)
