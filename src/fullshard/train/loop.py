"""The training loop: what one step does, on one screen."""

import os
import shutil
import statistics
import time
from collections import Counter
from contextlib import ExitStack, closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
import numpy as np
import torch
from fullshard.checkpoint.ranges import PROOF, Saver, load_checkpoint
from fullshard.config import RunConfig
from fullshard.data.chat import added_ids, choose_pad_id, load_tokenizer
from fullshard.data.pack import area_of, heaviest, lay_out, windows_of_run
from fullshard.data.prepared import PreparedData, make_batch, open_prepared
from fullshard.device import peak_memory_bytes, reset_peak_memory, set_fast_fp32
from fullshard.errors import ConfigError, TrainError, refusal
from fullshard.frozen import Frozen
from fullshard.model.adapters import peft_config_text
from fullshard.model.blocks import PEFT_CONFIG, exchanged, find_units
from fullshard.planning.speed import timed_product
from fullshard.ranks import Ranks
from fullshard.run_folder import ERRORS, METRICS, PREPARED, RESULT, TRACE, checkpoint_path, read_json, write_json
from fullshard.shard import choose_engine
from fullshard.train import optimizer as updates
from fullshard.train.guard import Guard
from fullshard.train.loss import batch_loss, held_out_loss
from fullshard.train.metrics import MetricsLog
from fullshard.train.precision import LossScale, held_line, log_text, precision_of, unmoved_line
from fullshard.train.setup import LOSS_CHECK_TOKENS, Built, GradientReach, build_sharded, check_loss_path, check_packing

PROOF_TOKENS, SPIKE, SPIKE_STEPS = 16, 3.0, 20  # a loss over 3 x the median of the last 20 (at least 8) is a spike


class TrainResult(Frozen):
    """What a finished run says of itself."""

    run: Path
    steps: int
    final_loss: float  # of the last step, per supervised token
    eval_loss: float | None  # over the held-out rows after the last step
    first_eval_loss: float | None  # before the first step
    seconds: float
    tokens_per_second: float
    peak_memory_bytes: int  # largest over the ranks

    @classmethod
    def read(cls, run: Path) -> "TrainResult":
        """That of a finished run."""
        return cls(**{**read_json(run / RESULT), "run": run})


def run_rank(
    run: Path, config: RunConfig, plan: dict[str, Any], ranks: Ranks, resume: int | None, quiet: bool,
    signals: tuple[int, ...] = (),
) -> None:  # fmt: skip
    """Train (or resume) ``run`` on this rank; rank 0 writes and prints. ``signals``: save, then raise Stopped."""
    set_fast_fp32(False)
    guard = Guard(run / ERRORS, ranks.rank, signals, accelerator=ranks.host is not None)
    started, data = time.perf_counter(), open_prepared(run / PREPARED, "train")
    held_out = open_prepared(run / PREPARED, "eval") if (run / PREPARED / "eval").is_dir() else None
    steps = windows_of_run(data.lengths, config.train)
    log = MetricsLog(run / METRICS, len(steps), resume or 0, ranks.is_first, quiet, config.train.trackers)
    with closing(log), closing(guard):
        trainer = Trainer(run, config, plan, ranks, data, held_out, steps, log, guard)
        first_step = trainer.resume(resume) if resume else 0
        trainer.prove_start()
        first_eval = trainer.evaluate(0) if held_out is not None and not first_step else None
        set_fast_fp32(trainer.precision.fast_fp32)  # what stands before compares products of different shapes
        trainer.train(first_step)
        peak = int(ranks.maximum(trainer.peak_bytes))
        if ranks.is_first:
            seconds, rate = time.perf_counter() - started, trainer.tokens_done / max(trainer.step_seconds, 1e-9)
            result = TrainResult(run, len(steps), trainer.last_loss, trainer.last_eval, first_eval, seconds, rate, peak)
            write_json(run / RESULT, {**asdict(result), "run": str(run)})
            log.say(log_text("trained", result, trainer.scale.skipped, trainer.planned_bytes))
        ranks.barrier()  # the result is there for whoever returns from here


class Trainer:
    """One run on one rank: the sharded model, its optimizer and its place in the data."""

    def __init__(
        self, run: Path, config: RunConfig, plan: dict[str, Any], ranks: Ranks, data: PreparedData,
        held_out: PreparedData | None, steps: list[tuple[int, np.ndarray]], log: MetricsLog, guard: Guard,
    ) -> None:  # fmt: skip
        self.guard, self.saver = guard, Saver(run, ranks, config.train.keep_last, config.train.keep_best)
        self.run, self.config, self.ranks, self.data, self.held_out = run, config, ranks, data, held_out
        self.steps, self.log, self.packing = steps, log, config.data.packing
        count, unit = self.micro_batch = (int(plan["micro_batch"][0]), str(plan["micro_batch"][1]))
        self.saves_beside, self.steps_may_change = bool(plan.get("saves_beside")), bool(plan.get("steps_may_change"))
        self.precision = precision_of(str(plan["precision"]))
        tokenizer = load_tokenizer(config.model.path, config.model.add_tokens)
        self.pad_id = choose_pad_id(tokenizer)
        reset_peak_memory(ranks.device)
        self.start_bytes = peak_memory_bytes(ranks.device)  # libraries; nothing of the model yet
        planned = plan["recompute"], added_ids(tokenizer, config.model.add_tokens), plan.get("reduce_each", False)
        most = max(count * (config.data.max_length if unit == "rows" else 1), int(data.lengths.max()))
        self.built: Built = build_sharded(config, ranks, self.precision, *planned, most)
        self.sharded = self.built.sharded
        self.optimizer, self.moments = updates.build_optimizer(config, self.sharded)
        self.scale, self.last_loss, self.last_eval = LossScale(self.precision.loss_scale), float("nan"), None
        self.losses, self.tokens_done, self.step_seconds, self.peak_bytes = [], 0, 0.0, 0
        self.planned_bytes, self.planned_save_bytes = (plan.get("moments", {}).get(name) for name in ("train", "save"))
        self.planned_speeds: list[float] = plan.get("tokens_per_second", [])  # of all ranks, low and high
        self.reach: GradientReach | None = GradientReach(self.built.loss_model.causal_lm)
        engine = choose_engine(config.engine, config.train.sharding, ranks.device.type)
        log.say(log_text("model", self.built, config.method, ranks, engine))
        held = held_line(self.built.loss_model.causal_lm, self.sharded.shards(), self.precision)
        for line in (log_text("mode", self.precision), *self.built.report, held):
            log.say(line)

    def prove_start(self) -> None:
        """Before step 1: our loss path equals the model's own logits, and the worst case fits."""
        tokens = torch.tensor(self.data.row(0)[0][:LOSS_CHECK_TOKENS].tolist(), device=self.ranks.device)[None]
        self.log.say(check_loss_path(self.built, tokens, self.precision))
        if self.packing:
            rows = [self.data.row(row % len(self.data))[0][: LOSS_CHECK_TOKENS // 2].tolist() for row in (0, 1)]
            try:
                self.log.say(check_packing(self.built, rows, self.precision, self.ranks.device))
            except ConfigError as error:
                if self.packing != "auto":
                    raise
                self.packing = False
                self.log.say(f"packing is off: {error.message}")
        self._trial_step()
        rate = timed_product(self.precision.compute, self.ranks.device.type)
        rate *= torch.get_num_threads() if self.ranks.device.type == "cpu" else 1
        self.flops_per_second = sum(self.ranks.gather_objects(rate))
        self.built.loss_model.register_forward_pre_hook(lambda *_: self.guard.beat())
        self.log.say(log_text("speed", self.ranks.num_ranks, self.flops_per_second))

    def _trial_step(self) -> None:
        """Forward and backward of the run's largest micro-batch; where some accumulate, whole gradients are kept."""
        layouts = [self._layout(window) for window in heaviest(self.steps, self.data.lengths)]
        area = partial(area_of, lengths=self.data.lengths, packing=bool(self.packing))
        worst = max((micro for layout in layouts for micro in layout), key=lambda micro: max(map(area, micro)))
        batch = make_batch(self.data, worst[self.ranks.rank], self.pad_id)
        for last in (False, True)[max(map(len, layouts)) < 2 :]:
            with self.sharded.microbatch(last):
                batch_loss(self.built.loss_model, batch, self.ranks.device).backward()
        self.optimizer.zero_grad(set_to_none=True)
        self.sharded.after_step()
        peak, tokens = self.ranks.maximum(peak_memory_bytes(self.ranks.device)), max(map(area, worst))
        self.log.say(f"trial step on the largest micro-batch ({tokens} tokens): peak {peak / 1e9:.2f} GB a rank")

    def train(self, first_step: int) -> None:
        """Steps ``first_step`` + 1 to the end, with evaluations and checkpoints on their way."""
        train = self.config.train
        for number, (epoch, window) in enumerate(self.steps[first_step:], first_step + 1):
            with ExitStack() as stack:
                stack.push(partial(self._say_where, number, window))
                asked = self._step(number, epoch, window)
            last = number == len(self.steps)
            ends_epoch = last or self.steps[number][0] != epoch
            due = number % train.eval_every == 0 if train.eval_every else ends_epoch
            if self.held_out is not None and (due or last):
                self.last_eval = self.evaluate(number)
            if last or asked or (number % train.save_every == 0 if train.save_every else ends_epoch):
                self.save(number)
            if asked and not last:
                self.saver.wait()
                raise refusal("stopped", step=number, run=self.run)
        self.saver.wait()

    def _say_where(self, number: int, window: np.ndarray, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error:
            rows = [row for micro in self._layout(window) for cell in micro[self.ranks.rank] for row in cell]
            places = ", ".join(f"{row} ({self.data.origin(row)})" for row in rows[:8])
            error.add_note(f"step {number}, this rank's rows: {places}{' ...' * (len(rows) > 8)}")

    def _step(self, number: int, epoch: int, window: np.ndarray) -> int:
        """One optimizer step over whole documents, whose supervised tokens divide the loss; the stop signal, or 0."""
        started, train, ranks, device = time.perf_counter(), self.config.train, self.ranks, self.ranks.device
        layout = self._layout(window)
        num_supervised, num_tokens = (int(each[window].sum()) for each in (self.data.supervised, self.data.lengths))
        if number == 1:
            self.log.say(log_text("window", len(window), num_tokens, ranks.num_ranks, len(layout)))
        if num_supervised == 0:
            self.scale.skipped += 1
            self.log.say(log_text("unsupervised", number, len(window)))
            self.log.record("skipped", step=number, epoch=epoch, rows=len(window), **self.scale.metrics)
            return 0
        loss_sum = torch.zeros((), dtype=torch.float32, device=device)
        for index, micro in enumerate(layout):
            rows = micro[ranks.rank]
            first = rows[0][0] if rows else 0  # the dropout's seed follows from the place, so that nothing is stored
            torch.manual_seed((train.seed * 1_000_003 + number * 8_191 + first) % (1 << 63))
            batch = make_batch(self.data, rows, self.pad_id)
            with self.sharded.microbatch(last=index == len(layout) - 1):
                loss = batch_loss(self.built.loss_model, batch, device) / num_supervised
                (loss * self.scale.value).backward()
            loss_sum += loss.detach()
        ask = torch.full_like(loss_sum, self.guard.asked / ranks.num_ranks)
        loss_value, asked = ranks.sum(torch.stack([loss_sum, ask])).tolist()
        shards = self.sharded.shards()
        if self.reach is not None:
            self.log.say(self.reach.report(shards, ranks))
            self.reach = None
        if len(self.losses) >= 8 and SPIKE * statistics.median(self.losses[-SPIKE_STEPS:]) < loss_value < float("inf"):
            self._keep_state_before(number, window, f"loss {loss_value:.4f}, a spike", aside=True)
        norm = updates.gradient_norm(self.sharded, shards, ranks, self.scale.value)
        try:
            problem = updates.require_finite(shards, norm, loss_value, number, ranks, self.scale)
        except TrainError:
            self._keep_state_before(number, window, f"loss {loss_value}, gradient norm {norm}")
            raise
        self.losses.append(loss_value)
        if problem:  # fp16 only: the weights, the optimizer and the schedule stay where they are
            self.optimizer.zero_grad(set_to_none=True)
            self.log.say(problem)
            self.log.record("skipped", step=number, epoch=epoch, rows=len(window), reason=problem, **self.scale.metrics)
            return round(asked)
        updates.clip_gradients(shards, norm, train.clip_norm)
        taken, peak = number - self.scale.skipped, self.config.learning_rate
        rate = updates.learning_rate_at(taken, len(self.steps), peak, train.schedule, train.warmup)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        counts = updates.take_step(self.optimizer, shards, f"{train.seed}:{number}", peak * (number == 1))
        if number == 1 and self.precision.master != torch.float32:
            self.log.say(unmoved_line(sum(ranks.gather_objects(counts), Counter()), peak))
        self.optimizer.zero_grad(set_to_none=True)
        self.sharded.after_step()
        self.last_loss, self.peak_bytes = loss_value, peak_memory_bytes(device)
        seconds = time.perf_counter() - started
        self.tokens_done, self.step_seconds = self.tokens_done + num_tokens, self.step_seconds + seconds
        work = (6 if self.config.method == "full" else 4) * self.built.num_parameters * num_tokens
        self.log.step(
            step=number, epoch=epoch, loss=loss_value, gradient_norm=norm, learning_rate=rate, rows=len(window),
            row_ids=window.tolist(), tokens=num_tokens, supervised_tokens=num_supervised, seconds=seconds,
            tokens_per_second=num_tokens / seconds, memory_bytes=self.peak_bytes, planned_bytes=self.planned_bytes,
            planned_seconds=[num_tokens / each for each in reversed(self.planned_speeds)], start_bytes=self.start_bytes,
            share_of_peak=work / seconds / self.flops_per_second, **self.scale.metrics,
        )  # fmt: skip
        return round(asked)

    def evaluate(self, step: int) -> float:
        """Held-out loss per supervised token, recorded; a collective call."""
        ranks, inputs = self.ranks, (self.built.loss_model, self.held_out, self.micro_batch, self.pad_id)
        loss = held_out_loss(*inputs, ranks.device, ranks.rank, ranks.num_ranks, ranks.sum)
        self.sharded.after_step()
        self.log.record("eval", step=step, loss=loss, rows=len(self.held_out))
        self.log.say(f"step {step}: held-out loss {loss:.4f} over {len(self.held_out)} rows")
        return loss

    def _keep_state_before(self, number: int, window: np.ndarray, what: str, aside: bool = False) -> None:
        """Say which rows step ``number`` saw and save the state before it, ``aside`` where it stays. Collective."""
        places = [f"{row} ({self.data.origin(int(row))})" for row in window]
        self.log.record("bad_step", step=number, what=what, rows=places)
        self.log.say(log_text("bad_step", number, what, places, METRICS))
        if not aside:
            self.optimizer.zero_grad(set_to_none=True)
        if number == 1:
            return self.log.say("the state before it is the start: the base model and new adapters")
        kept, held = checkpoint_path(self.run, number - 1), self.run / f"before_step_{number:06d}"
        if not kept.is_dir():
            self.save(number - 1)
        self.saver.wait()
        if aside and self.ranks.is_first and not held.exists():
            shutil.copytree(kept, held, copy_function=os.link)
        self.log.say(f"the state before it is kept in {held if aside else kept}")

    def save(self, step: int) -> None:
        """Write the checkpoint of ``step``, with the logits by which a merge is proven."""
        tokens, model = torch.tensor(self.data.row(0)[0][:PROOF_TOKENS].tolist())[None], self.built.loss_model.eval()
        units = [module for unit in find_units(model.causal_lm) for module in unit]
        set_fast_fp32(False)  # fp32 products of the weights as they are gathered: a forward in 16 bits would blur it
        with torch.no_grad(), exchanged(model, units, lambda _, value: value.float()):
            logits = model(tokens.to(self.ranks.device), None, own_logits=True)[0].cpu()
        set_fast_fp32(self.precision.fast_fp32)
        model.train()
        self.sharded.after_step()
        trainer = {"step": step, "num_steps": len(self.steps), "last_eval": self.last_eval, "data_hash": self.data.hash}
        trainer |= {"position": self._position(step), "precision": self.precision.name, "base": self.built.fingerprint}
        trainer |= {"loss_scale": asdict(self.scale), "add_tokens": self.config.model.add_tokens}
        extra: dict[str, Any] = {PROOF: {"tokens": tokens, "logits": logits.contiguous()}}
        if self.config.method == "lora":
            trainer["adapter"] = self.config.lora.model_dump(mode="json")
            extra[PEFT_CONFIG] = peft_config_text(self.built.loss_model.causal_lm, self.config)
        facts = {"method": self.config.method, "base_model": str(Path(self.config.model.path).resolve())}
        beside, started = self.saves_beside and step < len(self.steps), time.perf_counter()
        if beside and self.ranks.device.type == "cpu":
            self.planned_bytes = self.planned_save_bytes
        self.guard.beat(saving=True)
        folder = self.saver.save(step, self.sharded, self.moments, facts | {"trainer": trainer}, extra, beside)
        self.log.record("checkpoint", step=step, path=str(folder), seconds=time.perf_counter() - started)

    def resume(self, step: int) -> int:
        """Load the checkpoint of ``step`` into the shards and the optimizer; returns the step to go on from."""
        manifest = load_checkpoint(checkpoint_path(self.run, step), self.sharded, self.moments)
        if self.config.method == "lora" and manifest.trainer["base"] != self.built.fingerprint:
            raise refusal("other_base", step=step, path=self.config.model.path)
        self.scale = LossScale(**manifest.trainer["loss_scale"])
        for state in self.optimizer.state.values():  # AdamW's own counter, for its bias correction
            state["step"].fill_(float(step - self.scale.skipped))
        self.last_eval = manifest.trainer.get("last_eval")
        if (done := manifest.trainer["position"]) != (wanted := self._position(step)):
            raise refusal("other_windows", step=step, done=done, wanted=wanted)
        if (old := manifest.trainer["num_steps"]) != (new := len(self.steps)):
            train, taken, peak = self.config.train, step + 1 - self.scale.skipped, self.config.learning_rate
            was, now = (updates.learning_rate_at(taken, n, peak, train.schedule, train.warmup) for n in (old, new))
            if not self.steps_may_change:
                raise refusal("other_steps", old=old, new=new, next=step + 1, was=was, now=now, run=self.run)
            self.log.say(log_text("steps_changed", old, new, step + 1, was, now))
        if manifest.trainer["data_hash"] != self.data.hash:
            raise refusal("other_data", place=self.run / PREPARED, step=step)
        self.log.say(f"resumed at step {step}: {len(manifest.tensors)} tensors")
        return step

    def _position(self, step: int) -> list[int]:
        epochs = [epoch for epoch, _ in self.steps[:step]]
        return [epochs[-1], epochs.count(epochs[-1])]

    def _layout(self, window: np.ndarray) -> list[list[list[list[int]]]]:
        limit, packing = self.config.data.max_length, bool(self.packing)
        return lay_out(window, self.data.lengths, self.ranks.num_ranks, self.micro_batch, packing, limit)


def trace_rank(run: Path, config: RunConfig, plan: dict[str, Any], ranks: Ranks) -> None:
    """Take the first step twice; the run's trace.json: what the simple engine did in the second, ``events`` by rank."""
    data = open_prepared(run / PREPARED, "train")
    steps = windows_of_run(data.lengths, config.train)
    log = MetricsLog(run / METRICS, 1, 0, ranks.is_first, quiet=True)
    trainer = Trainer(run, config, plan, ranks, data, None, steps, log, Guard(run / ERRORS, ranks.rank, ()))
    epoch, window = next(step for step in steps if data.supervised[step[1]].any())
    trainer.prove_start()  # says how the loss is computed; here the order of the units is recorded
    trainer._step(1, epoch, window)  # here the optimizer's state comes to be
    ranks.barrier()
    trainer.sharded.events = []
    trainer._step(1, epoch, window)
    count, tokens = len(trainer._layout(window)), int(data.lengths[window].sum())
    facts = {"ranks": ranks.num_ranks, "device": ranks.device.type, "precision": trainer.precision.name}
    facts |= {"rows": len(window), "tokens": tokens, "micro_batches": count, "units": trainer.sharded.planned(count)}
    facts["events"] = ranks.gather_objects(trainer.sharded.events)
    if ranks.is_first:
        write_json(run / TRACE, facts)
