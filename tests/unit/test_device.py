"""device.py: what it sets on an NPU (against the recording stand-in for torch_npu) and on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import make_model

from fullshard import device
from fullshard.errors import ConfigError
from fullshard.planning.search import Machine, choose_precision
from fullshard.planning.speed import Rates

TESTS = Path(__file__).parents[1]

# Runs in a process of its own, since a torch that has met "npu" keeps it.
PROGRAM = """
import json, os, sys
import torch
from fullshard import device, ranks
found = {"loaded_by_torch": "torch_npu" in sys.modules}
found["kind"] = device.device_kind()
found["loaded"] = "torch_npu" in sys.modules
import torch.distributed as dist
import torch_npu
found["name"], found["devices"], found["ranks"] = device.device_name(), device.num_devices(), device.default_ranks()
found["bf16"], found["build"] = device.supports_bf16(), device.torch_build()
group = ranks.start_ranks()
found["set_before_the_group"] = torch_npu.RECORD["set"][:]
found["device"] = str(group.device)
device.set_fast_fp32(False)
found["switches_off"] = torch_npu.RECORD["set"][1:]
device.set_fast_fp32(True)
found["switches_on"] = torch_npu.RECORD["set"][3:]
torch_npu.DeviceModule.is_bf16_supported = lambda self, including_emulation=False: False  # 910A: no HF32 either
try:
    device.set_fast_fp32(True)
except device.ConfigError as error:
    found["refused"] = error.message
torch.manual_seed(5)
found["backend"], found["host"] = dist.get_backend_config(), dist.get_backend_config(group.host)
found["mesh"] = group.mesh.device_type
found["objects"] = [group.maximum(2.5), group.gather_objects({"a": 1}), group.gather_objects("first")[0]]
group.barrier()
found["record"] = torch_npu.RECORD
from fullshard.model.load import build_on_meta
found["attention"] = [build_on_meta(folder).config._attn_implementation for folder in sys.argv[1:]]
try:
    torch.npu.matmul.allow_tf32 = False
    found["unknown_switch"] = "accepted"
except AttributeError:
    found["unknown_switch"] = "refused"
print("FOUND" + json.dumps(found))
sys.stdout.flush()
os._exit(0)
"""


def environment(*folders: Path, autoload: str) -> dict[str, str]:
    import fullshard

    path = os.pathsep.join([*map(str, folders), str(Path(fullshard.__file__).parents[1])])
    return {**os.environ, "PYTHONPATH": path, "TORCH_DEVICE_BACKEND_AUTOLOAD": autoload, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def on_npu(tmp_path_factory):
    """What a process with the stand-in found, with torch's autoload off: device.py has to load torch_npu itself."""
    from rank_pool import free_port

    folder = tmp_path_factory.mktemp("models")
    models = [make_model(folder / family, family) for family in ("llama", "gemma2")]
    config = json.loads((models[0] / "config.json").read_text())
    (models[0] / "config.json").write_text(json.dumps(config | {"attn_implementation": "flash_attention_2"}))
    variables = environment(TESTS / "stand_in", autoload="0") | {
        "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    command = [sys.executable, "-c", PROGRAM, *map(str, models)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)
    assert "FOUND" in done.stdout, done.stderr
    return json.loads(done.stdout.partition("FOUND")[2])


def test_torch_npu_is_loaded_where_torch_does_not(on_npu):
    assert not on_npu["loaded_by_torch"] and on_npu["loaded"]
    assert (on_npu["kind"], on_npu["devices"], on_npu["ranks"]) == ("npu", 2, 2)
    assert (on_npu["device"], on_npu["mesh"], on_npu["name"]) == ("npu:0", "npu", "Ascend910B3")
    assert (on_npu["bf16"], on_npu["build"]) == (True, "CPU + torch_npu 2.13.0")


def test_hccl_carries_device_tensors_and_gloo_the_rest(on_npu):
    assert on_npu["backend"] == "cpu:gloo,npu:hccl"
    assert on_npu["host"] == "cpu:gloo"
    assert on_npu["record"]["backends"] == [["hccl", 0, 1]]  # one group of devices; objects have none
    assert on_npu["objects"] == [2.5, [{"a": 1}], "first"]


def test_numeric_switches(on_npu):
    """HF32 for matrices and convolutions, both set for on and for off (the second is on by default), refused where the
    chip has none; private formats off before any tensor."""
    assert on_npu["set_before_the_group"] == [["config.allow_internal_format", False]]
    assert on_npu["switches_off"] == [["matmul.allow_hf32", False], ["conv.allow_hf32", False]]
    assert on_npu["switches_on"] == [["matmul.allow_hf32", True], ["conv.allow_hf32", True]]
    assert on_npu["refused"] == "train.precision=tf32: this npu has no TF32 or HF32 products."
    assert len(on_npu["record"]["set"]) == 5
    assert ["manual_seed_all", 5] in on_npu["record"]["asked"]
    assert on_npu["unknown_switch"] == "refused"  # the stand-in is strict where torch_npu ignores a wrong name


def test_sdpa_is_asked_for(on_npu):
    """Whatever the model's config.json says; a family without it keeps its own attention."""
    assert on_npu["attention"] == ["sdpa", "eager"]


def broken_torch_npu(folder: Path) -> Path:
    """A torch_npu as it is in a shell without CANN's set_env.sh, with the entry point by which torch loads it."""
    (folder / "torch_npu").mkdir()
    failing = "raise ImportError('libhccl.so: cannot open shared object file')\n"
    (folder / "torch_npu" / "__init__.py").write_text(failing)
    facts = folder / "torch_npu-2.13.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.13.0\n")
    (facts / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    return folder


def test_a_torch_npu_that_cannot_be_loaded_is_named(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(broken_torch_npu(tmp_path))
    with pytest.raises(ConfigError, match="libhccl") as caught:
        device.load_npu_backend.__wrapped__()
    assert "set_env.sh" in caught.value.hint


def test_torch_npu_is_left_alone_beside_another_accelerator(tmp_path, monkeypatch):
    """It would refuse to share the process."""
    monkeypatch.syspath_prepend(broken_torch_npu(tmp_path))
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    device.load_npu_backend.__wrapped__()
    assert "torch_npu" not in sys.modules


def test_doctor_names_a_torch_that_cannot_be_imported(tmp_path):
    """With autoload on, `import torch` itself fails: a finding, not a traceback."""
    variables = environment(broken_torch_npu(tmp_path), autoload="1")
    command = [sys.executable, "-m", "fullshard", "doctor"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "Traceback" not in done.stderr + done.stdout, done.stderr
    assert "torch cannot be used: libhccl.so" in done.stdout and "docs/ascend.md" in done.stdout


def test_on_a_cpu():
    assert device.device_kind() == "cpu" and device.num_devices() == 0
    assert device.collective_backend("cpu") == "gloo"
    assert device.torch_build() == "CPU" and device.supports_bf16()


def test_an_accelerator_without_bf16(tmp_path):
    """V100, T4, Ascend 910A: auto means fp32, and bf16 is refused."""
    from fullshard.config import config_from_dict

    machine = Machine("cuda", 10**10, Rates(10e12, 0.0, 1))
    recipe = {"model": {"path": "m"}, "data": {"train": "d.jsonl"}, "train": {"global_batch": "4 rows"}, "output": "o"}
    assert choose_precision(config_from_dict(recipe), machine) == "fp32"
    for precision in ("bf16", "bf16_pure"):
        recipe["train"]["precision"] = precision
        with pytest.raises(ConfigError, match=f"{precision}: this accelerator has no bf16"):
            choose_precision(config_from_dict(recipe), machine)
    recipe["train"]["precision"] = "fp16"
    assert choose_precision(config_from_dict(recipe), machine) == "fp16"


@pytest.mark.parametrize(("kind", "has_tf32"), [("cpu", False), ("cuda", False), ("cuda", True)])
def test_tf32_is_set_where_the_chip_has_it_and_refused_elsewhere(monkeypatch, kind, has_tf32):
    """CPUs, V100 and T4 have none: refused before anything runs, by plan and by train. Off means off."""
    import torch

    from fullshard.config import config_from_dict

    monkeypatch.setattr("fullshard.device.device_kind", lambda: kind)
    monkeypatch.setattr("torch.cuda.is_tf32_supported", lambda: has_tf32)
    recipe = {"model": {"path": "m"}, "data": {"train": "d.jsonl"}, "train": {"precision": "tf32"}, "output": "o"}
    config, machine = config_from_dict(recipe), Machine(kind, 10**10, Rates(10e12, 80e12, 1))
    device.set_fast_fp32(False)
    assert not torch.backends.cuda.matmul.allow_tf32 and not torch.backends.cudnn.allow_tf32
    if has_tf32:
        device.set_fast_fp32(True)
        assert torch.backends.cuda.matmul.allow_tf32 and torch.backends.cudnn.allow_tf32
        assert choose_precision(config, machine) == "tf32"
        device.set_fast_fp32(False)
    else:
        for refused in (lambda: device.set_fast_fp32(True), lambda: choose_precision(config, machine)):
            with pytest.raises(ConfigError, match=f"this {kind} has no TF32"):
                refused()
    assert not torch.backends.cuda.matmul.allow_tf32 and not torch.backends.cudnn.allow_tf32
    assert torch.get_float32_matmul_precision() == "highest"


GROWTH = """
import re, torch
{setting}
def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
weight = torch.ones(512, 512, dtype=torch.bfloat16)
torch.nn.functional.linear(torch.ones(807, 512, dtype=torch.bfloat16), weight)
before = resident()
for rows in range(8, 807):
    torch.nn.functional.linear(torch.ones(rows, 512, dtype=torch.bfloat16), weight)
print(resident() - before)
"""


def test_products_of_ever_other_shapes_do_not_fill_the_memory():
    """torch and oneDNN keep what they made for each shape, 1,024 of them: 14 MB a step where lengths differ (LOG). What
    a CPU keeps of 799 shapes without bounds is halved, unless it is next to nothing."""
    grown = []
    for setting in ("", "import fullshard.device"):
        clean = {name: value for name, value in os.environ.items() if "CACHE_CAPACITY" not in name}
        code = [sys.executable, "-c", GROWTH.format(setting=setting)]
        grown.append(int(subprocess.run(code, capture_output=True, text=True, check=True, env=clean).stdout))
    assert grown[1] < max(0.5 * grown[0], 2e7), grown
