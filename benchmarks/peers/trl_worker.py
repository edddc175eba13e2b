"""One rank of TRL's SFTTrainer under Accelerate FSDP2 on the CPU; in the peer's environment, without fullshard."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer


class StepClock(TrainerCallback):
    """Seconds and loss of each step, taken where TRL begins and ends one."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def on_step_begin(self, args, state, control, **_):
        self.started = time.perf_counter()

    def on_step_end(self, args, state, control, **_):
        self.seconds.append(time.perf_counter() - self.started)

    def on_log(self, args, state, control, logs=None, **_):
        if logs and "loss" in logs:
            self.losses.append(logs["loss"])


def peak_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    rows = [json.loads(line) for line in Path(job["rows"]).read_text().splitlines()]
    dataset = Dataset.from_list([{"input_ids": row["ids"], "completion_mask": row["supervised"]} for row in rows])
    model = AutoModelForCausalLM.from_pretrained(
        job["model"], dtype=torch.float32, attn_implementation=job["attention"]
    )
    bf16 = job["precision"] == "bf16"
    arguments = SFTConfig(
        output_dir=job["folder"], use_cpu=True, bf16=bf16, max_steps=job["steps"], report_to="none",
        save_strategy="no", logging_steps=1, disable_tqdm=True, seed=0, dataloader_num_workers=0,
        learning_rate=job["learning_rate"], warmup_steps=0,
        per_device_train_batch_size=job["rows_a_rank"], gradient_accumulation_steps=1,
        **{"max_length": job["max_length"], **job["sft"]},
    )  # fmt: skip
    clock = StepClock()
    trainer = SFTTrainer(
        model=model, args=arguments, train_dataset=dataset, callbacks=[clock],
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
    )  # fmt: skip
    trainer.train()
    rank = trainer.accelerator.process_index
    found = {"seconds": clock.seconds, "losses": clock.losses, "peak_bytes": peak_bytes()}
    found["used_tokens"] = (
        None if not job["sft"].get("packing") else [len(ids) for ids in trainer.train_dataset["input_ids"]]
    )
    Path(job["folder"], f"rank{rank}.json").write_text(json.dumps(found))


main()
