"""fullshard: fine-tune transformer language models with fully sharded data parallelism. The Python API is what the
command line calls; names are imported on first use, so that ``import fullshard`` does not load torch."""

from importlib import import_module
from typing import Any

_PLACES = {
    "UserError": ("fullshard.errors", "UserError"),
    "load_config": ("fullshard.config", "load_config"),
    "make_plan": ("fullshard.planning.search", "make_plan"),
    "compare_plans": ("fullshard.planning.search", "compare_plans"),
    "write_plan_page": ("fullshard.report.plan", "write_plan_page"),
    "prepare_data": ("fullshard.data.prepared", "prepare"),
    "audit_data": ("fullshard.report.data", "audit_data"),
    "train_run": ("fullshard.launch", "train_run"),
    "resume_run": ("fullshard.launch", "resume_run"),
    "trace_run": ("fullshard.launch", "trace_run"),
    "probe_run": ("fullshard.launch", "probe_run"),
    "merge_run": ("fullshard.merge.job", "merge_run"),
    "generate_text": ("fullshard.infer.generate", "generate_text"),
    "evaluate_run": ("fullshard.evaluate", "evaluate_run"),
    "judge_models": ("fullshard.evaluate", "judge_models"),
    "judge_recipe": ("fullshard.evaluate", "judge_recipe"),
    "write_run_report": ("fullshard.report.run", "write_run_report"),
    "write_recipe_report": ("fullshard.report.run", "write_recipe_report"),
}

__all__ = ["__version__", *_PLACES]


def __getattr__(name: str) -> Any:
    """Import a name of the API on first use. AttributeError for every other name."""
    if name == "__version__":
        from importlib.metadata import version

        return version("fullshard")
    if name not in _PLACES:
        raise AttributeError(f"module 'fullshard' has no attribute {name!r}")
    return getattr(import_module(_PLACES[name][0]), _PLACES[name][1])


def __dir__() -> list[str]:
    """The names of the API."""
    return sorted(__all__)
