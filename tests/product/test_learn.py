"""examples/learn: every script runs, plainly or under torchrun, and prints the numbers that come out by hand."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rank_pool import free_port

FOLDER = Path(__file__).parents[2] / "examples" / "learn"
BARE = "simple_engine_bare"  # the one that uses the product; test_fsdp_page.py runs it
SCRIPTS = sorted(path for path in FOLDER.glob("*.py") if path.stem != BARE)
TIMEOUT_SECONDS = 240  # of a busy machine; each takes less than 30 seconds alone
QWEN3_8B = {
    "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False,
}  # fmt: skip


def run_script(name: str, *arguments: str, ranks: int = 0, cwd: Path) -> str:
    """What the script prints; under torchrun when ``ranks`` is given. No process is left behind."""
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", f"--master-port={free_port()}"]
    command = [sys.executable, *(launcher if ranks else []), str(FOLDER / name), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    process = subprocess.Popen(
        command, cwd=cwd, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    try:
        out, errors = process.communicate(timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    assert process.returncode == 0, f"{command}\n{out}\n{errors}"
    return out


def number(text: str) -> int:
    return int(text.replace(",", ""))


def test_there_are_five():
    names = {path.stem for path in SCRIPTS}
    assert names == {"precision", "memory", "fsdp_torch", "fsdp_from_scratch", "lora_from_scratch"}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_stands_alone(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    imported = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(node.module.split(".")[0])
    assert imported - set(sys.stdlib_module_names) <= {"torch", "transformers"}
    for forbidden in ("cuda()", '.to("cuda', '"nccl"', '"hccl"', "fullshard"):
        assert forbidden not in text


@pytest.mark.parametrize("language", ["README.md", "README.zh-CN.md"])
def test_readme_names_every_script(language):
    text = (FOLDER / language).read_text(encoding="utf-8")
    for path in FOLDER.glob("*.py"):
        assert path.name in text


def test_precision(tmp_path):
    out = run_script("precision.py", cwd=tmp_path)
    rows = {line[:16].strip(): line[16:].split() for line in out.splitlines() if " = " in line[16:36]}
    assert {name.removesuffix(" (emulated)") for name in rows} == {"FP32", "TF32", "BF16", "FP16"}
    # bits; the largest value; the least normal and the least subnormal number; the spacing at 1
    assert rows["FP32"] == [
        "1",
        "+",
        "8",
        "+",
        "23",
        "=",
        "32",
        "3.40282e+38",
        "1.175e-38",
        "1.401e-45",
        "1.1920929e-07",
    ]
    assert rows["BF16"] == ["1", "+", "8", "+", "7", "=", "16", "3.38953e+38", "1.175e-38", "9.184e-41", "0.0078125"]
    assert rows["FP16"] == ["1", "+", "5", "+", "10", "=", "16", "65504", "6.104e-05", "5.960e-08", "0.0009765625"]
    tf32 = next(rows[name] for name in rows if name.startswith("TF32"))
    assert tf32 == ["1", "+", "8", "+", "10", "=", "19", "3.40116e+38", "1.175e-38", "1.148e-41", "0.0009765625"]
    assert re.search(r"^65504 +FP16 holds 65504 ", out, re.M) and re.search(r"^65519 +FP16 holds 65504 ", out, re.M)
    assert re.search(r"^65520 +FP16 holds inf ", out, re.M)
    assert re.search(r"^2.98023e-08 +FP16 holds 0 +BF16 holds 2.98023e-08$", out, re.M)
    assert out.count("weight after it: 1 (vanished); its FP32 copy: 1.0001 (arrived)") == 2
    # half the spacing at 1 is 0.000488 in FP16 and 0.0039 in BF16: 5 and 40 updates of 0.0001 pass it
    assert "after 5 such updates: 1 without a copy, 1.00098 through it" in out
    assert "after 40 such updates: 1 without a copy, 1.00781 through it" in out
    zeros = [int(match) for match in re.findall(r"loss scale \d+ *: (\d+) of", out)]
    assert zeros[1] > 10 * max(zeros[0], 1) and zeros[2] == zeros[0]
    assert "overflow, step skipped, scale falls" in out and "60 good steps, scale rises" in out
    fp32, bf16, bf16_copy, fp16, fp16_scale = map(float, re.search(r"^step 250(.*)$", out, re.M)[1].split())
    assert abs(bf16_copy - fp32) < 0.02 and abs(fp16_scale - fp32) < 0.05
    assert bf16 > bf16_copy + 0.02 and fp16 > fp16_scale + 0.3
    assert len(re.findall(r"\d GFLOP/s$", out, re.M)) == 4


def test_memory(tmp_path):
    from transformers import AutoConfig

    AutoConfig.for_model("qwen3", **QWEN3_8B).save_pretrained(tmp_path)
    out = run_script("memory.py", "config.json", "--ranks", "8", cwd=tmp_path)
    attention, mlp = 2 * 4096 * 4096 + 2 * 4096 * 1024, 3 * 4096 * 12288
    block = attention + mlp + 2 * 4096 + 2 * 128
    parameters = 2 * 151936 * 4096 + 36 * block + 4096
    totals, measured = {}, {}
    for name, small, model in re.findall(r"^(\S.*?): .*\n    small(.*)\n    MODEL(.*)$", out, re.M):
        totals[name] = number(re.search(r" = ([\d,]+) ", model)[1])
        measured[name] = (number(re.search(r" = ([\d,]+) ", small)[1]), number(small.rsplit(" ", 1)[1]))
    assert totals["the real count of the whole model"] == parameters == 8_190_735_360
    assert totals["the blocks' matrices"] == 12 * 36 * 4096**2 == 7_247_757_312
    assert totals["the real count of the blocks"] == 36 * block
    assert totals["DDP holds them all"] == 16 * parameters
    assert totals["ZeRO-1 divides copy and moments"] == 4 * parameters + 12 * parameters // 8
    assert totals["ZeRO-2 divides gradients too"] == 2 * parameters + 14 * parameters // 8
    assert totals["ZeRO-3 divides weights too"] == 2 * parameters
    assert totals["checkpointed activations"] == 2 * 2048 * 4096 * 36
    assert totals["working activations from one checkpoint to the next"] == 2048 * (16 * 4096 + 2 * 32 * 2048)
    assert totals["largest operator, weights and gradients"] == 4 * 4096 * 4 * 4096
    assert totals["logits, FP32, and their gradient"] == 2048 * 151936 * (4 + 4)
    for name in measured:  # the states and what enters a checkpoint are exact
        if "BF16" in name or "FP32 copy" in name or "ZeRO" in name or "moments" in name or "checkpointed" in name:
            assert measured[name][0] == measured[name][1], name
    # What a block keeps for its backward pass, bytes a token, sdpa: two norms (FP32 input, its square's root, BF16
    # product and output), q, k, v, output, one FP32 sum a head, four BF16 tensors of the MLP's width.
    small = 2 * (4 * 128 + 4 + 2 * 128 + 2 * 128) + 2 * (2 * 128 + 2 * 32) + 4 * 8 + 4 * 2 * 384
    norms_of_q_and_k = (4 + 2) * (4096 + 1024) + 4 * (32 + 8)
    model = 2 * (8 * 4096 + 4) + 2 * (2 * 4096 + 2 * 1024) + 4 * 32 + 4 * 2 * 12288 + norms_of_q_and_k
    assert re.search(rf"'sdpa'.* small {256 * small:,}, MODEL {2048 * model:,}$", out, re.M)
    eager = re.search(r"'eager'.* small ([\d,]+), MODEL ([\d,]+)$", out, re.M)
    assert number(eager[1]) > 256 * small + 2 * 2 * 8 * 128 * 128 and number(eager[2]) > 2 * 2048 * model


def test_fsdp_torch(tmp_path):
    out = run_script("fsdp_torch.py", ranks=2, cwd=tmp_path)
    parameters = 2 * 256 * 64 + 4 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160 + 2 * 64) + 64
    steps = re.findall(
        r"ZeRO-(\d), step (\d+): loss on rank 0 (\S+); (\d+) all-gathers in forward,\n"
        r"  (\d+) in backward; whole weights kept between the two: ([\d,]+) bytes",
        out,
    )
    assert [step[0] for step in steps] == ["2", "2", "3", "3"]
    for zero, _, _, forward, backward, kept in steps:  # 5 units: 4 blocks and the root
        expected = (5, 0, 2 * parameters) if zero == "2" else (5, 5, 0)
        assert (int(forward), int(backward), number(kept)) == expected
    losses = [float(step[2]) for step in steps]
    assert losses[1] < losses[0] - 1 and losses[:2] == pytest.approx(losses[2:], abs=0.01)
    assert re.search(r"one step further with both: loss (\S+) and \1$", out, re.M)
    assert "generated: b" in out


def test_fsdp_from_scratch(tmp_path):
    out = run_script("fsdp_from_scratch.py", ranks=2, cwd=tmp_path)
    block = 4 * 32 * 32 + 2 * 4 * 32 * 32 + 2 * 32
    parameters = 64 * 32 + 3 * block + 32 * 64 + 64
    assert f"P = {parameters:,} with padding" in out
    runs = re.findall(
        r"^torch\.(\w+), (\S+): weights differ by at most (\S+), .*\n  held ([\d,]+) bytes; .* = ([\d,]+)\n"
        r"  sent ([\d,]+) bytes; .* = ([\d,]+)$",
        out,
        re.M,
    )
    assert len(runs) == 8
    for dtype, stage, difference, held, held_formula, sent, sent_formula in runs:
        assert float(difference) <= 1e-5
        low = 2 if dtype == "bfloat16" else 4  # bytes of a weight or gradient; copy and moments are 12
        by_hand = {"DDP": 2 * low + 12, "ZeRO-1": 2 * low + 12 / 2, "ZeRO-2": low + (low + 12) / 2,
                   "ZeRO-3": (2 * low + 12) / 2}[stage]  # fmt: skip
        assert number(held) == number(held_formula) == by_hand * parameters
        worth = 3 if stage == "ZeRO-3" else 2  # times the parameters, of which a rank sends all but its share
        assert number(sent) == number(sent_formula) == worth * low * parameters // 2
    forward = " > ".join(f"gather {unit} > free {unit}" for unit in range(5))
    backward = " > ".join(f"gather {unit} > reduce-scatter {unit} > free {unit}" for unit in reversed(range(5)))
    assert f"{forward} > {backward}\n" in out
    assert f"at most {2 * block:,} bytes more" in out


def check_lora(out: str) -> None:
    losses = [float(loss) for loss in re.findall(r"loss (\S+)$", out, re.M)]
    assert losses[-1] < losses[-2]
    moved, difference = re.search(r"logits by up to (\S+); folded .* differ by (\S+) at most", out).groups()
    assert float(difference) < 1e-3 * float(moved)


def test_lora_from_scratch(tmp_path):
    out = run_script("lora_from_scratch.py", cwd=tmp_path)
    check_lora(out)
    widths = [(64, 64), (64, 32), (64, 32), (64, 64), (64, 160), (64, 160), (160, 64)]
    adapters = 2 * 8 * sum(inputs + outputs for inputs, outputs in widths)
    base = 2 * (sum(inputs * outputs for inputs, outputs in widths) + 2 * 64) + 2 * 256 * 64 + 64
    assert f"14 layers get an adapter of rank 8: {adapters:,} of {base + adapters:,} parameters are trained" in out
    assert f"parameters now: {base:,}, those of the base" in out


@pytest.mark.slow
def test_with_a_model_folder(k1_folder, tmp_path):
    check_lora(run_script("lora_from_scratch.py", str(k1_folder), ranks=2, cwd=tmp_path))
    out = run_script("fsdp_torch.py", str(k1_folder), ranks=2, cwd=tmp_path)
    assert re.search(r"one step further with both: loss (\S+) and \1$", out, re.M) and "generated: '" in out
    assert "ZeRO-3 on 4 ranks" in run_script("memory.py", str(k1_folder), "--ranks", "4", cwd=tmp_path)


@pytest.mark.slow
def test_one_of_two_ranks_prints(k1_folder, tmp_path):
    assert run_script("precision.py", ranks=2, cwd=tmp_path).count("== 1.") == 1
    assert run_script("memory.py", str(k1_folder), "--ranks", "2", ranks=2, cwd=tmp_path).count("== 1.") == 1


@pytest.mark.slow
def test_from_scratch_with_uneven_shares(tmp_path):
    assert "P = 41,223 with padding" in run_script("fsdp_from_scratch.py", ranks=3, cwd=tmp_path)
