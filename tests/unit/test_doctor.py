"""What ``fullshard doctor`` says of one machine: each test passes, warns and fails for its own reason."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rank_pool import free_port
from tiny_models import K2_TEMPLATE, make_job, make_tokenizer

from fullshard import cli, doctor, load_config
from fullshard.doctor import Check, MachineReport
from fullshard.launch import check_machine

CPU = torch.device("cpu")
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
COLLECTIVES = {"sum", "average", "all-to-all"}
ROOM = SimpleNamespace(free=10**12, total=2 * 10**12)


@pytest.fixture(scope="module")
def report():
    return check_machine()


def named(checks) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_every_subject_is_tested_here(report):
    found = named(report.checks)
    subjects = {"Python", "torch", "transformers", "peft", "safetensors", "torch build", "cores", "memory", "disk"}
    subjects |= {"drivers", "interfaces", "cache", "shared folder", "ranks", "accelerators"}
    subjects |= {f"{name} products" for name in ("fp32", "tf32", "bf16", "fp16")}
    assert found.keys() == subjects | COLLECTIVES
    assert report.healthy, report.to_text()
    assert all(check.ok in ("ok", "warn", "fail") and check.finding for check in report.checks)
    assert all(bool(check.fix) == (check.ok != "ok") for check in report.checks)
    assert "2 have met, over gloo" in found["ranks"].finding or found["cores"].finding.startswith("1 ")
    assert found["tf32 products"].finding == "not on this device"
    for name in ("fp32", "bf16", "fp16"):
        assert re.match(r"error [\de.-]+, [\d.]+ GFLOP/s a core", found[f"{name} products"].finding)
        assert found[f"{name} products"].rate > 1e7
    for name in COLLECTIVES:
        assert re.match(r"right, 4 KB [\d.]+ ms.*, 1 MB .*, 16 MB [\d.]+ ms", found[name].finding)


def test_report_is_json_and_text(report):
    stored = json.loads(json.dumps(report.to_json()))
    assert stored.keys() == {"healthy", "checks"} and stored["healthy"] is True
    assert all(check.keys() == {"name", "ok", "finding", "fix", "rate"} for check in stored["checks"])
    assert len(stored["checks"]) == len(report.checks)
    assert len(report.to_text().splitlines()) >= len(report.checks) + 1
    assert report.to_text().endswith("This machine is ready.")


def test_a_failed_check_is_counted_and_its_fix_printed():
    report = MachineReport((Check("Python", "ok", "3.12"), Check("peft", "fail", "not installed", "pip install peft")))
    assert not report.healthy
    assert "-> pip install peft" in report.to_text()
    assert "1 of 2 checks failed" in report.to_text()


@pytest.mark.parametrize(("ok", "code"), [("ok", 0), ("warn", 0), ("fail", 2)])
def test_exit_codes(monkeypatch, capsys, ok, code):
    asked = []

    def check(**given):
        asked.append(given)
        return MachineReport((Check("disk", ok, "1 GB free", "Free some." if ok != "ok" else ""),))

    monkeypatch.setattr("fullshard.launch.check_machine", check)
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", "recipe.yaml", "train.epochs=2", "--json"])
    assert ended.value.code == code
    assert json.loads(capsys.readouterr().out)["healthy"] == (code == 0)
    assert asked == [{"recipe": "recipe.yaml", "overrides": ["train.epochs=2"]}]


def test_only_the_first_rank_speaks_and_fails(monkeypatch, capsys):
    monkeypatch.setattr("fullshard.launch.check_machine", lambda **_: MachineReport((Check("x", "fail", "bad"),)))
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, code in (("0", 2), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as ended:
            cli.main(["doctor"])
        assert ended.value.code == code
        assert ("1 of 1 checks failed" in capsys.readouterr().out) == (rank == "0")


# Versions


@pytest.mark.parametrize(
    ("version", "ok"),
    [("2.10.1+cpu", "fail"), ("2.11.0", "ok"), ("2.13.0a0", "ok"), ("2.13.0+cu130", "ok"), ("3.0", "warn")],
)
def test_versions(monkeypatch, version, ok):
    monkeypatch.setattr(doctor.metadata, "version", lambda name: version)
    found = doctor._make("torch", doctor._read_package, "torch", "2.11", "3")
    assert found.ok == ok and version in found.finding
    assert found.fix == ('pip install --upgrade "torch>=2.11,<3"' if ok != "ok" else "")


def test_missing_package():
    found = doctor._make("peft", doctor._read_package, "no-such-package-here", "1.0", "2")
    assert (found.ok, found.finding) == ("fail", "not installed") and "pip install" in found.fix


def test_versions_are_the_projects():
    from importlib.metadata import requires

    wanted = dict(line.split(">=") for line in requires("fullshard") if ">=" in line and ";" not in line)
    for name, (least, newest) in doctor.FACTS["versions"].items():
        assert wanted[name] == least
        assert doctor.FACTS["fixes"][name] == f'pip install --upgrade "{name}>={least},<{newest}"'


def test_an_accelerator_that_torch_does_not_use(monkeypatch):
    """The reason is torch's own: of this build, that it has no CUDA."""
    real = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: str(path) == "/proc/driver/nvidia/version" or real(path))
    found = doctor._make("torch build", doctor._read_build)
    assert found.ok == "warn" and "Torch not compiled with CUDA enabled" in found.finding
    assert "CUDA_VISIBLE_DEVICES" in found.fix
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    assert "no card is visible" in doctor._read_build()[1]
    monkeypatch.setattr(Path, "exists", lambda path: str(path) == "/dev/davinci_manager" or real(path))
    assert "torch_npu is not installed" in doctor._read_build()[1]


NVIDIA = "NVRM version: NVIDIA UNIX {}  {}  Release Build  (root@host)\nGCC version:  12.3.0\n"
CANN = "package_name=Ascend-cann-toolkit\nversion={}\narch=aarch64\n"


@pytest.fixture
def driver_files(monkeypatch, tmp_path):
    """A machine's files of drivers are those below tmp_path."""
    real = Path.glob
    monkeypatch.setattr(Path, "glob", lambda path, pattern: real(tmp_path if path == Path("/") else path, pattern))
    monkeypatch.setenv("ASCEND_HOME_PATH", "/latest")

    def write(name, text):
        (file := tmp_path / name.strip("/")).parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    return write


@pytest.mark.parametrize(
    ("driver", "kernel", "build", "ok"),
    [
        ("570.86.15", "Open Kernel Module for x86_64", "CUDA 12.8", "ok"),
        ("550.54.15", "x86_64 Kernel Module", "CUDA 13.0", "fail"),
        ("580.65.06", "x86_64 Kernel Module", "CUDA 13.0", "ok"),
        ("470.57.02", "x86_64 Kernel Module", "CUDA 12.6", "fail"),
        ("470.57.02", "x86_64 Kernel Module", "CPU", "ok"),
    ],
)
def test_the_driver_is_new_enough_for_torch(driver_files, monkeypatch, driver, kernel, build, ok):
    driver_files("/proc/driver/nvidia/version", NVIDIA.format(kernel, driver))
    monkeypatch.setattr("fullshard.device.torch_build", lambda: build)
    found = doctor._make("drivers", doctor._read_drivers)
    assert found.ok == ok and found.finding.startswith(f"NVIDIA driver {driver}")
    assert ("Update the driver" in found.fix and f"{build} needs NVIDIA driver 5" in found.finding) == (ok == "fail")


@pytest.mark.parametrize(("cann", "ok"), [("8.5.0", "ok"), ("8.3.RC1", "fail"), ("9.0.0.beta1", "ok")])
def test_cann_is_new_enough_for_torch_npu(driver_files, monkeypatch, cann, ok):
    driver_files("latest/aarch64-linux/ascend_toolkit_install.info", CANN.format(cann))
    driver_files("/usr/local/Ascend/driver/version.info", "Version=25.2.0\nascendhal_version=7.35.23\n")
    monkeypatch.setattr("fullshard.device.torch_build", lambda: "CPU + torch_npu 2.13.0")
    found = doctor._make("drivers", doctor._read_drivers)
    assert found.ok == ok and f"Ascend driver 25.2.0, CANN {cann}" in found.finding
    assert ("docs/ascend.md" in found.fix) == (ok == "fail")


def test_a_machine_without_drivers(driver_files):
    assert doctor._make("drivers", doctor._read_drivers) == Check("drivers", "ok", "none found")


def test_torch_npu_of_another_number(monkeypatch):
    monkeypatch.setattr("fullshard.device.torch_build", lambda: "CPU + torch_npu 2.11.0")
    found = doctor._make("torch build", doctor._read_build)
    assert found.ok == "fail" and "torch_npu 2.11.0 with torch 2." in found.finding and "docs/ascend.md" in found.fix
    monkeypatch.setattr("fullshard.device.torch_build", lambda: f"CPU + torch_npu {torch.__version__[:4]}.0.post2")
    assert doctor._make("torch build", doctor._read_build).ok == "ok"


def test_a_build_without_process_groups(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    report = check_machine()
    assert named(report.checks)["torch build"].ok == "fail"
    assert "ranks" not in named(report.checks) and not report.healthy  # no more is tried


# This host


def test_a_host_with_little_of_everything(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=10**8))
    host = SimpleNamespace(cores=1, processor="old", total_bytes=2 * 10**9, available_bytes=10**9)
    monkeypatch.setattr(doctor, "read_host", lambda: host)

    def unknown(name):
        raise OSError(f"{name} is not known")

    monkeypatch.setattr(doctor.socket, "gethostbyname", unknown)
    found = named(doctor._check_host(tmp_path))
    assert {name: check.ok for name, check in found.items()} == dict.fromkeys(found, "warn")
    assert found["disk"].finding == f"0.1 GB free at {tmp_path}" and "has no address" in found["interfaces"].finding
    assert all(check.fix for check in found.values())


def test_unwritable_cache(monkeypatch, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setattr("fullshard.device.cache_folder", lambda: blocked / "cache")
    found = doctor._make("cache", doctor._write_cache)
    assert found.ok == "fail" and str(blocked) in found.finding
    assert "FULLSHARD_CACHE" in found.fix


# Products


def wrong_product(share: float, dtype: torch.dtype):
    real = torch.Tensor.__matmul__

    def multiply(left, right):
        product = real(left, right)
        return product * (1 + share) if product.dtype == dtype else product

    return multiply


@pytest.mark.parametrize(
    ("name", "dtype", "share", "ok"),
    [
        ("fp32", torch.float32, 1e-6, "ok"),
        ("fp32", torch.float32, 4e-4, "fail"),  # as TF32 where full fp32 is asked for
        ("bf16", torch.bfloat16, 0, "ok"),
        ("bf16", torch.bfloat16, 0.03, "fail"),
        ("fp16", torch.float16, 0, "ok"),
        ("fp16", torch.float16, 0.005, "fail"),
        ("fp32", torch.float32, float("nan"), "fail"),
    ],
)
def test_wrong_products(monkeypatch, name, dtype, share, ok):
    monkeypatch.setattr("fullshard.planning.speed.timed_product", lambda dtype, kind: 1e9)
    monkeypatch.setattr(torch.Tensor, "__matmul__", wrong_product(share, dtype))
    found = doctor._test_product(name, CPU, "", 0.0)
    assert (found.name, found.ok) == (f"{name} products", ok), found.finding
    assert ("rounding explains at most" in found.finding) == (ok == "fail")
    assert ("Do not train on it" in found.fix) == (ok == "fail")


@pytest.mark.parametrize(
    ("card", "rate", "ok", "words"),
    [
        ("", 1.1e9, "ok", "1.1 GFLOP/s a core, 60 x slower than fp32: emulated"),
        ("", 120e9, "ok", "120 GFLOP/s a core"),
        ("NVIDIA H100 80GB HBM3", 700e12, "ok", "71% of the rated 989 TFLOP/s"),
        ("NVIDIA H100 80GB HBM3", 200e12, "warn", "20% of the rated 989 TFLOP/s"),
        ("Some New Card", 200e12, "ok", "200 TFLOP/s a device"),
    ],
)
def test_rates(monkeypatch, card, rate, ok, words):
    monkeypatch.setattr("fullshard.planning.speed.timed_product", lambda dtype, kind: rate)
    monkeypatch.setattr(doctor.psutil, "getloadavg", lambda: (0.1, 0, 0))
    found = doctor._test_product("bf16", CPU, card, 66e9)
    assert found.ok == ok and words in found.finding and "busy" not in found.finding
    assert found.rate == rate and ("emulated" in found.finding) == (rate < 33e9)
    assert ("nvidia-smi" in found.fix) == (ok == "warn")


def test_a_busy_machine_is_said_to_be(monkeypatch):
    monkeypatch.setattr("fullshard.planning.speed.timed_product", lambda dtype, kind: 1e9)
    monkeypatch.setattr(doctor.psutil, "getloadavg", lambda: (31.0, 0, 0))
    assert "(busy: load 31.0 on " in doctor._test_product("fp32", CPU, "", 0.0).finding


def test_a_device_without_bf16(monkeypatch):
    monkeypatch.setattr("fullshard.device.supports_bf16", lambda: False)
    found = doctor._test_product("bf16", CPU, "", 66e9)
    assert (found.ok, found.finding, found.rate) == ("ok", "not on this device", 0.0)


# Several ranks


def test_joined_checks_name_the_rank():
    fine, bad = Check("sum", "ok", "right"), Check("sum", "fail", "wrong here", "Leave it out.")
    speeds = [Check("bf16 products", "ok", "fast", rate=rate) for rate in (700e12, 710e12, 300e12)]
    versions = [Check("torch", "ok", number) for number in ("2.13.0", "2.13.0", "2.12.1")]
    found = [("a", [fine, speeds[0], versions[0]]), ("a", [fine, speeds[1], versions[1]])]
    joined = named(doctor.join_ranks([*found, ("b", [bad, speeds[2], versions[2]])]))
    assert joined["sum"] == Check("sum", "fail", "rank 2 on b: wrong here", "Leave it out.")
    assert joined["bf16 products"].ok == "warn"
    assert (
        joined["bf16 products"].finding == "fast; slower than most: rank 2 on b (43%)" and joined["bf16 products"].fix
    )
    assert joined["torch"].ok == "fail" and "rank 2 on b 2.12.1" in joined["torch"].finding
    assert "pip freeze" in joined["torch"].fix
    alone = named(doctor.join_ranks(found))
    assert [alone[name].ok for name in alone] == ["ok"] * 3 and alone["torch"].finding == "2.13.0"
    assert (
        named(doctor.join_ranks([*found, ("a", [bad, speeds[2], versions[0]])]))["sum"].finding == "rank 2: wrong here"
    )


def test_ranks_that_cannot_meet(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    report = check_machine()
    found = named(report.checks)["ranks"]
    assert found.ok == "fail" and "nosuch0" in found.finding and "GLOO_SOCKET_IFNAME" in found.fix
    assert not report.healthy and "sum" not in named(report.checks)


def test_a_rank_that_hangs_ends(tmp_path):
    """Started as by the launcher, alone; its test never ends."""
    program = (
        "import sys, time, pathlib; from fullshard import doctor; doctor.LIMIT_SECONDS = 1;"
        "doctor.examine_rank = lambda *given: time.sleep(600); doctor.run_rank(pathlib.Path(sys.argv[1]))"
    )
    (tmp_path / doctor.FILE).write_text(json.dumps({"place": str(tmp_path)}))
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], env={**os.environ, **place}, timeout=60)
    assert done.returncode == -signal.SIGALRM


def test_ranks_that_do_not_come(monkeypatch):
    """As rank 0 of two where the other node is not started: named after a while, with all that one node can say."""
    monkeypatch.setattr(doctor, "LIMIT_SECONDS", 2)
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    found = named(check_machine().checks)
    assert found["ranks"].ok == "fail" and "1/2" in found["ranks"].finding and "firewall" in found["ranks"].fix
    assert found["torch"].ok == "ok" and "sum" not in found


# A recipe


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A folder with a tiny model, data and a recipe, as working directory."""
    monkeypatch.chdir(make_job(tmp_path, 8))
    monkeypatch.setattr(shutil, "disk_usage", lambda place: ROOM)
    return tmp_path


def needs(*overrides: str) -> dict[str, Check]:
    return named(doctor.check_recipe(load_config("recipe.yaml", overrides), Path.cwd(), 2))


def test_a_recipe_that_can_run(job):
    found = needs()
    assert [check.ok for check in found.values()] == ["ok"] * 4, found
    assert list(found) == ["data", "template", "memory for it", "disk for it"]
    assert found["data"].finding == "the first 8 rows of rows.jsonl can be read"
    assert "29% of the tokens are learned; answers end with '<|end|>' (id 7)" in found["template"].finding
    assert re.search(r"[\d.]+ [MG]B of [\d.]+ GB a rank in (fp32|bf16); to merge", found["memory for it"].finding)
    parameters = sum(value.numel() for value in load_all(job / "model"))
    assert f"2 + 1 checkpoints of {(12 * parameters + 64 * 64) / 1e3:.3g} kB" in found["disk for it"].finding
    assert not (job / "run").exists()


def load_all(folder: Path) -> list[torch.Tensor]:
    from safetensors.torch import load_file

    return list(load_file(folder / "model.safetensors").values())


def test_only_what_trains_is_counted_on_the_disk(job):
    full = needs("train.optimizer=sgd", "train.keep_last=5")["disk for it"].finding
    parameters = sum(value.numel() for value in load_all(job / "model"))
    assert f"5 + 1 checkpoints of {(4 * parameters + 64 * 64) / 1e3:.3g} kB" in full
    lora = needs("method=lora", "lora.rank=1")["disk for it"].finding
    size, unit = re.search(r"checkpoints of ([\d.]+) (k?B)", lora).groups()
    assert float(size) * (1000 if unit == "kB" else 1) < 12 * parameters


def test_a_full_disk(job, monkeypatch):
    for free, ok in ((200_000, "fail"), (280_000, "warn")):
        monkeypatch.setattr(shutil, "disk_usage", lambda place, free=free: SimpleNamespace(free=free))
        found = needs()["disk for it"]
        assert found.ok == ok, found.finding
        assert "train.keep_last=1" in found.fix and "free at" in found.finding


def test_memory_that_does_not_suffice(job, monkeypatch):
    from fullshard.planning import search

    real = search.read_host()
    small = SimpleNamespace(**{**vars(real), "available_bytes": 10**8})
    monkeypatch.setattr(doctor, "read_host", lambda: small)
    found = needs()["memory for it"]
    assert found.ok == "warn" and "merging" in found.fix.lower()
    monkeypatch.setattr(search, "read_host", lambda: small)
    found = needs()["memory for it"]
    assert found.ok == "fail" and "does not fit" in found.finding and found.fix


def test_data_that_cannot_be_read(job):
    with open(job / "rows.jsonl", "a") as file:
        file.write('\n{"messages": [{"role": "user"')
    found = needs()
    assert found["data"].ok == "fail" and "rows.jsonl:9" in found["data"].finding and found["data"].fix
    assert needs("data.train=nowhere.jsonl")["data"].finding == "Data file nowhere.jsonl does not exist."
    assert needs("data.eval=nowhere.csv")["data"].ok == "fail"


def test_files_of_a_folder_are_each_read(job):
    (job / "many").mkdir()
    for number in range(3):
        shutil.copy(job / "rows.jsonl", job / "many" / f"{number}.jsonl")
    assert "the first 24 rows of many" in needs("data.train=many")["data"].finding
    (job / "many" / "2.jsonl").write_text("no JSON")
    assert "2.jsonl:1" in needs("data.train=many")["data"].finding


def test_a_model_without_a_template(job):
    make_tokenizer(job / "model", chat_template=None)
    for file in (job / "model").glob("chat_template*"):
        file.unlink()
    found = needs()["template"]
    assert found.ok == "fail" and "no chat template" in found.finding and found.fix


def test_a_template_that_never_ends_an_answer(job):
    make_tokenizer(job / "model", chat_template=K2_TEMPLATE.replace("{{ '<|end|>' }}", "{{ ' ' }}"))
    found = needs()["template"]
    assert found.ok == "warn" and "answers end with no token" in found.finding and "does not learn to stop" in found.fix


def test_a_token_that_the_model_lacks(job):
    from tiny_models import VOCABULARY

    make_tokenizer(job / "model", vocabulary=[*VOCABULARY, "<new>"], pad_token="<new>")
    found = needs()["template"]
    assert found.ok == "fail" and "id 64" in found.finding and "add_tokens" in found.fix


def test_a_model_that_is_not_there_or_not_whole(job):
    assert needs("model.path=nowhere/at/all")["template"].ok == "fail"
    (job / "model" / "model.safetensors").unlink()
    found = needs()["template"]
    assert found.ok == "fail" and "safetensors" in found.finding and found.fix


def test_the_recipe_is_part_of_the_report(job):
    report = check_machine("recipe.yaml", ["train.keep_last=3"])
    assert named(report.checks)["disk for it"].finding.startswith("3 + 1 checkpoints")
    assert str(job) in named(report.checks)["shared folder"].finding and report.healthy
