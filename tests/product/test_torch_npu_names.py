"""benchmarks/check_torch_npu_names.py against a small wheel made here, and its record against today's device.py."""

from __future__ import annotations

import json
import re
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import check_torch_npu_names as checker  # noqa: E402

FILES = {
    "torch_npu/__init__.py": "from torch_npu.version import __version__ as __version__\nimport torch_npu.npu\n",
    "torch_npu/version.py": "__version__ = '2.13.0'\n",
    "torch_npu/npu/__init__.py": (
        "from .switches import *\nfrom .tools import is_bf16_supported\nfrom . import switches\n"
        "matmul = switches._Matmul()\ndef get_device_name(device=None):\n    return ''\n"
    ),
    "torch_npu/npu/tools.py": "def is_bf16_supported(including_emulation=False):\n    return True\n",
    "torch_npu/npu/switches.py": (
        "class _Matmul:\n    def __setattr__(self, name, value):\n        if name == 'allow_hf32':\n            pass\n"
        "class Public:\n    answer = 42\n    def method(self):\n        return 1\n"
    ),
    "torch_npu-2.13.0.dist-info/METADATA": "Name: torch_npu\nVersion: 2.13.0\nRequires-Dist: torch==2.13.0.*\n",
}


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "torch_npu-2.13.0-cp311-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in FILES.items():
            archive.writestr(name, text)
    return checker.Wheel(path)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("torch_npu.__version__", "torch_npu/version.py:1"),
        ("torch_npu.npu.get_device_name", "torch_npu/npu/__init__.py:5"),
        ("torch_npu.npu.is_bf16_supported", "torch_npu/npu/tools.py:1"),  # imported by name
        ("torch_npu.npu.Public.answer", "torch_npu/npu/switches.py:6"),  # imported by star
        ("torch_npu.npu.Public.method", "torch_npu/npu/switches.py:7"),
        ("torch_npu.npu.matmul.allow_hf32", "torch_npu/npu/switches.py:3"),
        ("torch_npu.npu.matmul.allow_tf32", None),  # torch_npu would ignore it
        ("torch_npu.npu.conv.allow_hf32", None),
        ("torch_npu.npu.empty_cache", None),
        ("torch_npu.nothing", None),
    ],
)
def test_where_a_wheel_defines_a_name(wheel, name, place):
    assert wheel.find(name) == place


def test_used_names_of_a_source(tmp_path):
    source = tmp_path / "device.py"
    source.write_text(
        "torch.npu.matmul.allow_hf32 = False\nx = torch_npu.__version__\n"
        "torch.get_device_module(kind).get_device_name(0)\ntorch.cuda.synchronize()\n# torch.npu.comment\n"
    )
    wanted = ["torch_npu.__version__", "torch_npu.npu.get_device_name", "torch_npu.npu.matmul.allow_hf32"]
    assert checker.used_names(source) == wanted


def test_a_missing_name_fails_and_is_recorded(wheel, tmp_path, capsys):
    assert checker.main(["--wheel", str(wheel.path), "--output", str(tmp_path)]) == 1  # no conv in the small wheel
    record = json.loads(next(tmp_path.glob("npu_names_2.13.0_*.json")).read_text())
    assert "torch_npu.npu.conv.allow_hf32" in record["missing"]
    assert "MISSING torch_npu.npu.conv.allow_hf32" in capsys.readouterr().out


def test_the_record_covers_todays_device_py():
    """A name that is new in device.py has no record: run benchmarks/check_torch_npu_names.py."""
    version = checker.pinned_version()
    records = sorted((ROOT / "benchmarks" / "results").glob(f"npu_names_{version}_*.json"))
    record = json.loads(records[-1].read_text())
    assert checker.used_names() == sorted(record["names"])
    assert record["missing"] == [] and all(record["names"].values())
    assert f"torch=={version}.*" in record["requires"]


def test_device_modules_are_used_at_once():
    """The scan sees ``torch.get_device_module(...).name``; a device module kept in a variable would hide its names."""
    text = checker.DEVICE.read_text()
    assert len(re.findall(r"torch\.get_device_module\(", text)) == len(
        re.findall(r"torch\.get_device_module\((?:[^()]|\(\))*\)\.\w", text)
    )


def test_the_stand_in_has_the_same_names():
    stand_in = (ROOT / "tests" / "stand_in" / "torch_npu" / "__init__.py").read_text()
    for name in checker.used_names():
        assert name.rpartition(".")[2] in stand_in, name


@pytest.mark.parametrize("page", ["docs/ascend.md", "docs/ascend.zh-CN.md"])
def test_the_ascend_pages_say_what_device_py_does(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    version = checker.pinned_version()
    assert f"torch=={version}" in text and f"torch-npu=={version}" in text
    switches = [name for name in checker.used_names() if ".allow_" in name]
    assert len(switches) == 3
    for name in switches:
        assert name.replace("torch_npu.npu.", "torch.npu.") in text, name
    for word in (
        "cpu:gloo,npu:hccl",
        "sdpa",
        "set_env.sh",
        "ASCEND_RT_VISIBLE_DEVICES",
        "HCCL_CONNECT_TIMEOUT",
        "910C",
    ):
        assert word in text, word
    missing = [name for name in re.findall(r"`((?:src|benchmarks)/[\w./-]+)`", text) if not (ROOT / name).exists()]
    assert not missing


def test_both_ascend_pages_have_the_same_shape():
    pages = [(ROOT / name).read_text(encoding="utf-8") for name in ("docs/ascend.md", "docs/ascend.zh-CN.md")]
    for pattern in (r"^## ", r"^\|", r"^- ", r"^```bash\n(?:.*\n)*?```"):
        counts = [len(re.findall(pattern, text, re.M)) for text in pages]
        assert counts[0] == counts[1] > 0, pattern
