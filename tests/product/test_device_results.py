"""benchmarks/device_check.py and README's device table, which is made of what it writes."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import device_check  # noqa: E402
import device_table  # noqa: E402


@pytest.mark.parametrize("language", ["en", "zh"])
def test_readme_holds_the_table_of_the_results(language):
    """Out of date? python benchmarks/device_table.py"""
    assert device_table.table_in(device_table.PAGES[language]) == device_table.make_table(language)


def record(folder: Path, kind: str, name: str, date: str, **steps) -> None:
    device = {"kind": kind, "name": name, "count": 4}
    text = json.dumps({"device": device, "date": date, "steps": steps})
    (folder / f"device-{name.lower()}-{date}.json").write_text(text)


def test_table(tmp_path):
    modes = {"fp32": "ok", "bf16": "refused"}
    record(tmp_path, "cuda", "V100", "2026-01-01", doctor={"ok": False})
    record(
        tmp_path, "cuda", "V100", "2026-02-01", doctor={"ok": True}, parity={"ok": False},
        precision={"ok": True, "modes": modes},
    )  # fmt: skip
    lines = device_table.make_table("en", tmp_path).splitlines()
    assert lines[2] == "| CUDA | 4 x V100 | 2026-02-01 | ok | failed | ok | refused | - |"
    assert lines[3] == "| Ascend NPU | written for, not run | - | - | - | - | - | - |"
    assert lines[4].startswith("| CPU | written for, not run |")
    assert "未实测" in device_table.make_table("zh", tmp_path)
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1


def test_tables_are_written_between_the_markers(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- devices -->\nold\n<!-- /devices -->\nafter\n")
    device_table.write_tables(tmp_path, {"en": page})
    assert device_table.table_in(page) == device_table.make_table("en", tmp_path)
    assert page.read_text().startswith("before\n<!-- devices -->\n|") and page.read_text().endswith("after\n")
    page.write_text("no markers")
    with pytest.raises(ValueError, match="devices"):
        device_table.write_tables(tmp_path, {"en": page})


def test_a_check_writes_its_record(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(device_check.CHECKS, "doctor", lambda context: {"ok": True, "checks": []})
    assert device_check.main(["--only", "doctor", "--output", str(tmp_path)]) == 0
    written = json.loads(next(tmp_path.glob("device-cpu-*.json")).read_text())
    assert list(written["steps"]) == ["doctor"] and written["steps"]["doctor"]["ok"]
    assert written["device"]["kind"] == "cpu" and written["device"]["versions"]["torch"]
    assert "--only doctor" in written["command"]
    line = device_table.make_table("en", tmp_path).splitlines()[4]
    assert line.endswith("| ok | - | - | - | - |") and "CPU" in line


def test_a_step_that_raises_is_a_failure_with_a_record(tmp_path, monkeypatch):
    def broken(context):
        raise RuntimeError("the driver is gone")

    monkeypatch.setitem(device_check.CHECKS, "parity", broken)
    assert device_check.main(["--only", "parity", "--output", str(tmp_path)]) == 1
    written = json.loads(next(tmp_path.glob("device-*.json")).read_text())
    assert "the driver is gone" in written["steps"]["parity"]["error"]
    with pytest.raises(SystemExit):
        device_check.main(["--only", "nothing"])


@pytest.mark.parametrize(
    ("kind", "ranks", "off", "to_cpu", "fine"),
    [
        ("cpu", 2, 5e-6, 0.0, True), ("cpu", 2, 5e-5, 0.0, False), ("cuda", 4, 5e-6, 5e-5, True),
        ("cuda", 4, 5e-6, 5e-4, False), ("npu", 1, 0.0, 5e-5, True), ("npu", 1, 1e-9, 5e-5, False),
    ],
)  # fmt: skip
def test_parity_is_judged(monkeypatch, kind, ranks, off, to_cpu, fine):
    """One rank first, then all of them (a single device: again), then the CPU; each within its limit."""
    answers = iter([[2.0, 1.0], [2.0, 1.0 + off]] * 2)
    monkeypatch.setattr(device_check, "train_tiny", lambda *arguments: next(answers))
    monkeypatch.setattr(device_check, "train_tiny_on_cpu", lambda method: [2.0 * (1 - to_cpu / (1 + to_cpu)), 1.0])
    found = device_check.check_parity({"kind": kind, "ranks": ranks})
    assert found["ok"] == fine
    assert ("difference_to_cpu" in found["full"]) == (kind != "cpu")


def test_the_doctors_findings_are_kept_without_paths(monkeypatch):
    from fullshard.doctor import Check, MachineReport

    checks = (Check("cores", "ok", "2 (AMD)"), Check("cache", "ok", "/home/li/.cache can be written"))
    monkeypatch.setattr("fullshard.launch.check_machine", lambda: MachineReport(checks))
    found = device_check.check_doctor({})
    assert found["ok"] and found["checks"][0]["finding"] == "2 (AMD)"
    assert found["checks"][1] == {"name": "cache", "ok": "ok"}


def test_differences():
    assert device_check.difference([1.0, 2.2], [1.0, 2.0]) == pytest.approx(0.1)
    assert device_check.difference([1.0], [1.0, 2.0]) == math.inf
    assert device_check.difference([math.nan], [1.0]) == math.inf


def test_a_refused_precision_is_no_failure(monkeypatch):
    from fullshard import UserError

    def train(method, mode, ranks, optimizer):
        if mode == "bf16":
            raise UserError("this accelerator has no bf16")
        return [3.0, 2.0]

    monkeypatch.setattr(device_check, "train_tiny", train)
    found = device_check.check_precision({"ranks": 1})
    assert found["ok"] and found["modes"] == {"fp32": "ok", "bf16": "refused"}


@pytest.mark.slow
def test_parity_and_precision_run_here(tmp_path):
    assert device_check.main(["--only", "parity,precision", "--output", str(tmp_path)]) == 0
