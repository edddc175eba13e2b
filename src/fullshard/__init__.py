"""The Python API, which the command line calls. Names are imported on first use: importing this loads no torch."""

from pkgutil import resolve_name
from typing import Any

_NAMES = {  # of a module
    "errors": "UserError", "config": "load_config", "merge.job": "merge_run", "checkpoint.format": "verify",
    "planning.search": "make_plan compare_plans", "launch": "train_run resume_run trace_run probe_run",
    "report.page": "write_plan_page audit_data write_run_report write_recipe_report",
    "infer.generate": "generate_text answer_file", "evaluate": "evaluate_run judge_models judge_recipe",
}  # fmt: skip
_PLACES = {name: f"{module}:{name}" for module, names in _NAMES.items() for name in names.split()}
_PLACES["prepare_data"] = "data.prepared:prepare"

__all__ = ["__version__", *_PLACES]
__dir__ = __all__.copy


def __getattr__(name: str) -> Any:
    """Import a name of the API on first use. AttributeError for every other name."""
    if name == "__version__":
        return resolve_name("importlib.metadata:version")("fullshard")
    if name not in _PLACES:
        raise AttributeError(f"module 'fullshard' has no attribute {name!r}")
    return resolve_name(f"fullshard.{_PLACES[name]}")
