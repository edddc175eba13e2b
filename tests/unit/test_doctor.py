import json

import pytest

from fullshard import doctor
from fullshard.doctor import Check, MachineReport, check_machine, check_ranks


@pytest.fixture(scope="module")
def report():
    return check_machine()


def test_every_subject_is_checked_here(report):
    found = {check.name: check for check in report.checks}
    subjects = {"Python", "torch", "transformers", "peft", "accelerators", "cores", "memory", "disk", "timed products"}
    assert subjects | {"cache", "two ranks (gloo)"} <= set(found)
    assert found["two ranks (gloo)"].ok == "ok", found["two ranks (gloo)"].finding
    assert report.healthy
    assert all(check.ok in ("ok", "warn", "fail") and check.finding for check in report.checks)
    assert all(bool(check.fix) == (check.ok != "ok") for check in report.checks)


def test_report_is_json_and_text(report):
    stored = json.loads(json.dumps(report.to_json()))
    assert stored["healthy"] is True
    assert len(stored["checks"]) == len(report.checks)
    assert len(report.to_text().splitlines()) >= len(report.checks) + 1


def test_a_failed_check_is_counted_and_its_fix_printed():
    report = MachineReport((Check("Python", "ok", "3.12"), Check("peft", "fail", "not installed", "pip install peft")))
    assert not report.healthy
    assert "-> pip install peft" in report.to_text()
    assert "1 of 2 checks failed" in report.to_text()


def test_ranks_that_hang_are_ended():
    found = check_ranks("import time; time.sleep(60)", timeout_seconds=0.5)
    assert found.ok == "fail"
    assert "no answer" in found.finding
    assert found.fix


def test_a_rank_that_fails_is_named():
    found = check_ranks("raise SystemExit('no route to 127.0.0.1')", timeout_seconds=20)
    assert found.ok == "fail"
    assert "no route to 127.0.0.1" in found.finding


@pytest.mark.parametrize(
    ("version", "ok"), [("2.10.1+cpu", "fail"), ("2.11.0", "ok"), ("3.0", "ok"), ("2.13.0a0", "ok")]
)
def test_old_packages(monkeypatch, version, ok):
    monkeypatch.setattr(doctor.metadata, "version", lambda name: version)
    assert doctor._check_package("torch", "2.11").ok == ok


def test_missing_package():
    assert "not installed" in doctor._check_package("no-such-package-here", "1.0").finding


def test_unwritable_cache(monkeypatch, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setattr("fullshard.device.cache_folder", lambda: blocked / "cache")
    found = doctor._check_cache()
    assert found.ok == "fail"
    assert "FULLSHARD_CACHE" in found.fix


def test_minimum_versions_are_the_projects():
    from importlib.metadata import requires

    wanted = {
        line.split(">=")[0]: line.split(">=")[1] for line in requires("fullshard") if ">=" in line and ";" not in line
    }
    for name, least in doctor.MINIMUM_VERSIONS.items():
        assert wanted[name] == least
