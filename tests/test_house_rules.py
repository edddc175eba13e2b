"""The house rules (DESIGN.md sections 3 and 7) as tests. There is no ignore list: change the code, or the rule here."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "fullshard"

# The layer of a module is that of its longest prefix. Layer 3 names the job in the second place.
LAYERS: dict[str, tuple[int, str]] = {
    "errors": (0, ""),
    "frozen": (0, ""),
    "config": (0, ""),
    "run_folder": (0, ""),
    "words": (0, ""),
    "verdict": (0, ""),
    "planning.hardware": (0, ""),
    "shard.simple.layout": (0, ""),
    "checkpoint.format": (0, ""),
    "data.pack": (0, ""),
    "device": (1, ""),
    "model": (1, ""),
    "data": (1, ""),
    "train.loss": (1, ""),
    "train.precision": (1, ""),
    "ranks": (2, ""),
    "shard": (2, ""),
    "checkpoint": (2, ""),
    "planning": (2, ""),
    "infer.generate": (2, ""),
    "train": (3, "train"),
    "merge": (3, "merge"),
    "evaluate": (3, "evaluate"),
    "doctor": (3, "doctor"),
    "report": (3, "report"),
    "infer.chat": (3, "chat"),
    "__init__": (4, ""),
    "__main__": (4, ""),
    "cli": (4, ""),
    "launch": (4, ""),
    "quickstart": (4, ""),
}
FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "helper", "misc", "tools", "stuff"}
RECIPE_KEY_LINES = """
    model.path model.source model.revision model.add_tokens
    data.train data.eval data.source data.shape data.on_bad data.max_length data.packing data.columns data.system
    data.template_arguments data.loss_on data.too_long
    method
    lora.rank lora.alpha lora.targets lora.variant
    train.epochs train.max_steps train.learning_rate train.global_batch train.drop_last train.micro_batch
    train.precision train.optimizer train.weight_decay train.schedule train.warmup train.clip_norm train.recompute
    train.sharding train.replicas
    train.eval_every train.save_every train.keep_last train.keep_best train.trackers train.router_loss train.seed
    engine
    output
"""
RECIPE_KEYS = RECIPE_KEY_LINES.split()


def source_files(folder: Path = PACKAGE) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def module_of(path: Path) -> str:
    """``merge.job`` for src/fullshard/merge/job.py, ``merge`` for its __init__.py, ``__init__`` for the package."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {module_of(path): path for path in source_files()}


def layer_of(module: str) -> tuple[int, str] | None:
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        if found := LAYERS.get(".".join(parts[:length])):
            return found
    return None


def nodes_outside_type_checking(tree: ast.AST):
    """All nodes, except those under ``if TYPE_CHECKING``, which no program runs."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for inner in node.orelse:
                yield inner
                yield from nodes_outside_type_checking(inner)
            continue
        yield node
        yield from nodes_outside_type_checking(node)


def imports_of(module: str) -> set[str]:
    """The modules of the package that ``module`` imports, also inside functions."""
    found = set()
    for node in nodes_outside_type_checking(tree_of(MODULES[module])):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import, line {node.lineno}; write the whole name"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.split(".")[0] != "fullshard":
                continue
            inner = name.removeprefix("fullshard").lstrip(".")
            while inner and inner not in MODULES:  # the last parts may be functions or classes
                inner = inner.rpartition(".")[0]
            found.add(inner or "__init__")
    return found - {module}


def outside_imports_of(module: str) -> set[str]:
    found = set()
    for node in ast.walk(tree_of(MODULES[module])):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] != "fullshard"}


def dotted_names(tree: ast.AST):
    """Every ``a.b.c`` expression with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node), node.lineno


def functions_of(tree: ast.AST):
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_every_module_has_a_layer():
    unknown = [module for module in MODULES if layer_of(module) is None and MODULES[module].stat().st_size]
    assert not unknown, f"give each of these a layer in tests/test_house_rules.py: {unknown}"


def test_imports_point_down():
    wrong = []
    for module in MODULES:
        layer, job = layer_of(module) or (0, "")
        for target in imports_of(module):
            other_layer, other_job = layer_of(target) or (0, "")
            if other_layer > layer:
                wrong.append(f"{module} (layer {layer}) imports {target} (layer {other_layer})")
            elif layer == 3 and other_layer == 3 and job != other_job:
                wrong.append(f"the job {job} imports the job {other_job}: {module} -> {target}")
    assert not wrong, "\n".join(wrong)


def test_no_import_cycles():
    state: dict[str, int] = {}

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert state.get(module) != 1, " -> ".join([*trail, module])
        if module in state:
            return
        state[module] = 1
        for target in sorted(imports_of(module)):
            visit(target, (*trail, module))
        state[module] = 2

    for module in MODULES:
        if module != "__init__":  # the API names its modules as text, and imports them on first use
            visit(module, ())


def test_package_files_hold_no_imports():
    """An __init__ that imports would load a whole package for one of its modules. shard/ is the one door."""
    for module, path in MODULES.items():
        if path.name == "__init__.py" and module not in ("__init__", "shard"):
            assert not imports_of(module) | outside_imports_of(module) - {"__future__", "__future__.annotations"}, path


def test_the_engines_do_not_know_each_other():
    for module in MODULES:
        if module.startswith("shard.simple"):
            assert "shard.torch_engine" not in imports_of(module), module
        if module == "shard.torch_engine":
            assert not [target for target in imports_of(module) if target.startswith("shard.simple")], module


def test_caps():
    too_long, total = [], 0
    for path in [*source_files(), *source_files(ROOT / "tests")]:
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > 500:
            too_long.append(f"{path.relative_to(ROOT)}: {lines} lines, 500 are allowed")
        if path.is_relative_to(PACKAGE):
            total += lines
            lengths = [(f.end_lineno - f.lineno + 1, f.name) for f in functions_of(tree_of(path))]
            if module_of(path) == "train.loop" and lengths:  # the step loop may be as long as one screen and a half
                longest = max(lengths)
                lengths.remove(longest)
                lengths.append((longest[0] - 70, longest[1]))
            place = path.relative_to(ROOT)
            too_long += [f"{place}: {name} has {n} lines, 80 are allowed" for n, name in lengths if n > 80]
    assert not too_long, "\n".join(too_long)
    assert total <= 10_000, f"the package has {total} lines, 10,000 are allowed"


def test_names():
    for folder in (PACKAGE, ROOT / "tests"):
        for path in folder.rglob("*"):
            assert path.stem not in FORBIDDEN_NAMES, path
    for module, path in MODULES.items():
        for node in tree_of(path).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                assert node.name.lower() not in FORBIDDEN_NAMES, f"{module}: {node.name}"


def test_public_names_have_docstrings():
    missing = []
    for module, path in MODULES.items():
        tree = tree_of(path)
        if tree.body and not ast.get_docstring(tree):
            missing.append(module)
        scopes: list[tuple[str, ast.AST]] = [(module, tree)]
        while scopes:
            place, scope = scopes.pop()
            for node in ast.iter_child_nodes(scope):
                if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    continue
                if node.name.startswith("_"):
                    continue
                if not ast.get_docstring(node):
                    missing.append(f"{place}.{node.name}")
                if isinstance(node, ast.ClassDef):
                    scopes.append((f"{place}.{node.name}", node))
    assert not missing, missing


def test_one_process_code_does_not_mention_ranks():
    for module, path in MODULES.items():
        if module.split(".")[0] in ("model", "data"):
            text = path.read_text(encoding="utf-8")
            assert "torch.distributed" not in text and "from torch import distributed" not in text, module


def test_layer_0_needs_no_torch():
    heavy = {"torch", "transformers", "datasets", "peft", "pyarrow"}
    for module in MODULES:
        if (layer_of(module) or (1, ""))[0] == 0:
            assert not heavy & {name.split(".")[0] for name in outside_imports_of(module)}, module


def test_environment_variables_have_three_doors():
    for module, path in MODULES.items():
        if module in ("launch", "ranks", "device"):
            continue
        used = {name for name, _ in dotted_names(tree_of(path))} | outside_imports_of(module)
        wrong = used & {"os.environ", "os.getenv", "os.putenv", "os.environ.get", "os.environb"}
        assert not wrong, f"{module} uses {wrong}"


def test_pickles_are_read_in_one_place():
    for module, path in MODULES.items():
        if module.startswith("merge.readers"):
            continue
        roots = {name.split(".")[0] for name in outside_imports_of(module)}
        assert not roots & {"pickle", "cloudpickle", "dill", "shelve", "joblib"}, module
        for name, line in dotted_names(tree_of(path)):
            assert name not in ("torch.load", "torch.save"), f"{module}:{line} {name}"
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                assert isinstance(node.value, ast.Constant) and node.value.value is False, f"{module}: allow_pickle"


def test_no_broad_except_outside_cli_and_launch():
    for module, path in MODULES.items():
        if module in ("cli", "launch"):
            continue
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ExceptHandler):
                caught = ast.unparse(node.type) if node.type else "everything"
                broad = {"everything", "Exception", "BaseException"} & set(caught.strip("()").split(", "))
                assert not broad, f"{module}:{node.lineno} catches {caught}"


def test_nothing_patches_another_library():
    """No assignment to an attribute of an imported foreign module or class. device.py alone sets torch's switches."""
    for module, path in MODULES.items():
        tree = tree_of(path)
        foreign = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                foreign |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("fullshard"):
                foreign |= {alias.asname or alias.name for alias in node.names}
        for node in ast.walk(tree):
            targets: list[ast.expr] = []
            if isinstance(node, ast.Assign):
                targets = node.targets
            elif isinstance(node, ast.AugAssign):
                targets = [node.target]
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
                targets = [ast.Attribute(value=node.args[0], attr="")]
            for target in targets:
                if isinstance(target, ast.Attribute):
                    root = ast.unparse(target.value)
                    wrong = root.split(".")[0] in foreign and not (module == "device" and root.startswith("torch."))
                    assert not wrong, f"{module}:{node.lineno} assigns to {ast.unparse(target)}"


def test_recipe_keys_are_pinned():
    from fullshard.config import RunConfig, recipe_keys

    assert recipe_keys() == RECIPE_KEYS, "a key came, went or was renamed: change the list, CHANGELOG and the examples"
    assert len(RECIPE_KEYS) <= 70
    for name, field in RunConfig.model_fields.items():
        assert field.description, name
        for inner, inner_field in getattr(field.annotation, "model_fields", {}).items():
            assert inner_field.description, f"{name}.{inner}"


def test_api_names():
    import fullshard

    for name in fullshard.__all__:
        assert getattr(fullshard, name) is not None
    assert not set(fullshard.__all__) & set(MODULES), "a function shares its name with a module"
    with pytest.raises(AttributeError):
        fullshard.no_such_name  # noqa: B018
