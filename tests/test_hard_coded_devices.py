"""device.py is the only door to an accelerator: no other module names a device, a backend or torch's device modules.

Four rules, without an ignore list. What they leave out is named here: text for people ("see nvidia-smi or npu-smi") is
no device string, since a device string is nothing but the device; product names in planning/hardware.py ("a100",
"ascend910b3") are no device kinds; "cpu" may be named, since every machine has one and it is where code falls back to.
"""

from __future__ import annotations

import ast
import re

import pytest
from test_house_rules import MODULES, tree_of

KINDS = r"(?:cuda|npu|privateuseone|xpu|hpu|mps|mlu|musa)"
BACKENDS = r"(?:nccl|hccl|lccl|xccl|ucc)"
# The whole string: "cuda", "npu:0", "nccl", "cpu:gloo,npu:hccl", and "cuda:" as in f"cuda:{index}".
DEVICE_STRING = re.compile(rf"(?:cpu:\w+,)?(?:{KINDS}|{BACKENDS})(?::\w*)?(?:,.*)?", re.I)
DEVICE_MODULES = {"cuda", "npu", "xpu", "mps", "hip", "accelerator", "cudnn", "get_device_module", "torch_npu"}


def findings(tree: ast.AST) -> list[str]:
    """What in a module names an accelerator, each with its line."""
    found = []
    documentation = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            if DEVICE_STRING.fullmatch(node.value):
                found.append(f"line {node.lineno}: the string {node.value!r}")
            elif "import " in node.value:  # a program for another process
                inner = findings(_parsed(node.value))
                found += [f"line {node.lineno}: in a program, {finding}" for finding in inner]
        elif isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if name.split(".")[0] == "torch" and node.attr in DEVICE_MODULES:
                found.append(f"line {node.lineno}: {name}")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("cuda", "npu"):
            found.append(f"line {node.lineno}: .{node.func.attr}()")
        elif isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None) or ""
            names = {part for alias in node.names for part in f"{module}.{alias.name}".split(".")}
            if ("torch" in names or "torch_npu" in names) and names & DEVICE_MODULES:
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def _parsed(text: str) -> ast.AST:
    try:
        return ast.parse(text)
    except SyntaxError:  # a sentence
        return ast.Module([], [])


@pytest.mark.parametrize("module", sorted(set(MODULES) - {"device"}))
def test_only_device_py_names_a_device(module):
    assert not findings(tree_of(MODULES[module])), f"ask device.py instead ({module})"


def test_device_py_is_seen_to_name_them():
    found = "\n".join(findings(tree_of(MODULES["device"])))
    assert "torch.npu" in found and "torch.accelerator" in found and "'npu'" in found


@pytest.mark.parametrize(
    "line",
    [
        'model.to("cuda")', "x.cuda()", "x.npu()", "torch.cuda.synchronize()", "torch.npu.empty_cache()",
        'dist.init_process_group("nccl")', 'backend = "cpu:gloo,npu:hccl"', 'kind in ("cpu", "npu")',
        'torch.device(f"cuda:{index}")', "import torch_npu", "from torch import cuda", "from torch.npu import matmul",
        "torch.get_device_module(kind).synchronize()", "torch.backends.cudnn.allow_tf32 = True",
        'PROGRAM = "import torch; torch.ones(1, device=\'npu:0\')"', "torch.version.hip",
        "torch.accelerator.synchronize()",
    ],
)  # fmt: skip
def test_what_the_rule_finds(line):
    assert findings(ast.parse(line))


@pytest.mark.parametrize(
    "line",
    ['kind == "cpu"', 'hint = "Another process holds memory: see nvidia-smi or npu-smi."', '("ascend910b3",)',
     '"""cuda"""', "device.synchronize()", "import torch.distributed as dist", 'dist.init_process_group("gloo")'],
)  # fmt: skip
def test_what_the_rule_leaves_alone(line):
    assert not findings(ast.parse(line))


def test_collectives_are_sums_of_no_fp64():
    """No source asks for an average or a pre-multiplied sum, and no module that speaks to other ranks makes fp64."""
    for module, path in MODULES.items():
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"ReduceOp\.(?!SUM\b)|premul_sum|PREMUL", text), module
        names = {ast.unparse(node) for node in ast.walk(tree_of(path)) if isinstance(node, ast.Attribute)}
        if "torch.distributed" in text and module != "device":
            assert not names & {"torch.float64", "torch.double"} and ".double()" not in text, module


def test_the_torch_engine_forces_sums():
    """fully_shard's default is an average: each of its groups is told otherwise."""
    text = MODULES["shard.torch_engine"].read_text(encoding="utf-8")
    assert "set_force_sum_reduction_for_comms(True)" in text and "set_gradient_divide_factor(1.0)" in text
