"""Is every torch_npu name that the package uses defined in torch_npu's wheel? Reads sources; imports nothing of either.

    python benchmarks/check_torch_npu_names.py [--wheel FILE] [--version 2.13.0]

Without --wheel the wheel of the version that fits the torch in constraints.txt is downloaded with pip. The names are
found in src/fullshard/device.py, the only module that may use them. The result goes to
benchmarks/results/npu_names_VERSION_DATE.json; exit code 1 where a name is missing.

torch_npu accepts any attribute on its switch objects and ignores what it does not know, so an attribute counts as
defined only where its class names it: as a method, a class attribute, or a string that ``__setattr__`` compares with.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
DEVICE = ROOT / "src" / "fullshard" / "device.py"
RESULTS = Path(__file__).parent / "results"
PACKAGE = "torch_npu"


def used_names(path: Path = DEVICE) -> list[str]:
    """``torch_npu.X`` for every ``torch.npu.X``, ``torch_npu.X`` and ``torch.get_device_module(...).X`` in a module."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Attribute):
            continue
        names = [node.attr]
        value: ast.expr = node.value
        while isinstance(value, ast.Attribute):
            names.append(value.attr)
            value = value.value
        if isinstance(value, ast.Name):
            names.append(value.id)
        elif isinstance(value, ast.Call) and ast.unparse(value.func) == "torch.get_device_module":
            names += ["npu", "torch"]
        name = ".".join(reversed(names))
        for start in ("torch.npu.", "torch_npu."):
            if name.startswith(start):
                found.add(name.replace("torch.npu.", "torch_npu.npu."))
    # of torch.npu.matmul.allow_hf32 the walk also gives torch.npu.matmul: only the longest names are kept
    return sorted(name for name in found if not any(other.startswith(f"{name}.") for other in found))


class Wheel:
    """The Python sources of a wheel, and where a dotted name is defined in them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            self.sources = {name: archive.read(name).decode() for name in names if name.endswith(".py")}
            metadata = next(name for name in names if name.endswith(".dist-info/METADATA"))
            self.metadata = archive.read(metadata).decode()
        self._trees: dict[str, ast.Module] = {}

    def field(self, name: str) -> list[str]:
        """The values of one field of the wheel's METADATA."""
        return re.findall(rf"^{name}: (.*)$", self.metadata, re.M)

    def find(self, name: str) -> str | None:
        """``file:line`` where ``torch_npu.npu.matmul.allow_hf32`` and the like are defined; None where they are not."""
        parts = name.split(".")
        module = parts.pop(0)
        while parts and self._file(f"{module}.{parts[0]}"):
            module = f"{module}.{parts.pop(0)}"
        return self._find_in(module, parts, set()) if parts else self._file(module)

    def _file(self, module: str) -> str | None:
        base = module.replace(".", "/")
        return next((file for file in (f"{base}.py", f"{base}/__init__.py") if file in self.sources), None)

    def _tree(self, file: str) -> ast.Module:
        if file not in self._trees:
            self._trees[file] = ast.parse(self.sources[file])
        return self._trees[file]

    def _find_in(self, module: str, parts: list[str], seen: set[tuple[str, str]]) -> str | None:
        """``parts`` inside ``module``: an own definition, or one that it imports by name or by star."""
        file = self._file(module)
        if file is None or (module, parts[0]) in seen:
            return None
        seen.add((module, parts[0]))
        for node in ast.walk(self._tree(file)):
            found = None
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == parts[0]:
                found = self._attribute(file, node, parts[1:])
            elif isinstance(node, ast.Assign) and any(ast.unparse(target) == parts[0] for target in node.targets):
                found = self._assigned(module, file, node, parts[1:], seen)
            elif isinstance(node, ast.ImportFrom):
                found = self._imported(module, file, node, parts, seen)
            if found:
                return found
        return None

    def _imported(self, module: str, file: str, node: ast.ImportFrom, parts: list[str], seen: set) -> str | None:
        source = node.module or ""
        if node.level:  # relative: a package's __init__ counts as being inside it
            above = node.level - (1 if file.endswith("__init__.py") else 0)
            base = module.split(".")[: len(module.split(".")) - above]
            source = ".".join([*base, source] if source else base)
        for alias in node.names:
            if alias.name == "*":
                if found := self._find_in(source, parts, seen):
                    return found
            elif (alias.asname or alias.name) == parts[0] and source.split(".")[0] == PACKAGE:
                return self._find_in(source, [alias.name, *parts[1:]], seen)
        return None

    def _assigned(self, module: str, file: str, node: ast.Assign, rest: list[str], seen: set) -> str | None:
        """``name = value``: itself, or an attribute of the class that ``value`` is an instance of."""
        if not rest:
            return f"{file}:{node.lineno}"
        if not isinstance(node.value, ast.Call):
            return None
        *place, name = ast.unparse(node.value.func).split(".")
        return self._find_in(".".join([module, *place]), [name, *rest], seen)

    def _attribute(self, file: str, node: ast.FunctionDef | ast.ClassDef, rest: list[str]) -> str | None:
        if not rest:
            return f"{file}:{node.lineno}"
        for inner in ast.walk(node) if isinstance(node, ast.ClassDef) else ():
            is_method = isinstance(inner, ast.FunctionDef) and inner.name == rest[0]
            is_value = isinstance(inner, ast.Assign) and any(ast.unparse(target) == rest[0] for target in inner.targets)
            is_compared = isinstance(inner, ast.Compare) and any(
                isinstance(side, ast.Constant) and side.value == rest[0] for side in (inner.left, *inner.comparators)
            )
            if is_method or is_value or is_compared:
                return f"{file}:{inner.lineno}"
        return None


def check(wheel: Wheel, names: list[str]) -> dict[str, str | None]:
    """Name -> where the wheel defines it, None where it does not."""
    return {name: wheel.find(name) for name in names}


def pinned_version() -> str:
    """torch_npu's version for the torch in constraints.txt: the same number."""
    return re.search(r"^torch==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.M)[1]


def download(version: str, folder: Path) -> Path:
    """torch_npu's wheel of ``version`` for this Python, from the package index that pip is set up for."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", f"torch-npu=={version}", "-d", str(folder)]
    subprocess.run(command, check=True)
    return next(folder.glob("*.whl"))


def main(arguments: list[str] | None = None) -> int:
    """Check, print one line a name, write the record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--wheel", type=Path)
    parser.add_argument("--version", default=pinned_version())
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        path = options.wheel or download(options.version, Path(folder))
        wheel, digest = Wheel(path), hashlib.sha256(path.read_bytes()).hexdigest()
    found = check(wheel, used_names())
    for name, place in found.items():
        print(f"{'ok  ' if place else 'MISSING'} {name}  {place or ''}")
    version, date = wheel.field("Version")[0], datetime.datetime.now(datetime.UTC).date()
    record = {
        "topic": "npu_names",
        "command": "python benchmarks/check_torch_npu_names.py",
        "date": str(date),
        "torch_npu": version,
        "requires": wheel.field("Requires-Dist"),
        "wheel": path.name,
        "sha256": digest,
        "names": found,
        "missing": [name for name, place in found.items() if not place],
    }
    place = options.output / f"npu_names_{version}_{date:%Y%m%d}.json"
    place.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(f"written: {place}")
    return 1 if record["missing"] else 0


if __name__ == "__main__":
    sys.exit(main())
