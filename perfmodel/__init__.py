"""Time and memory of distributed training and serving, for every parallel plan: predict, search, run, compare.

The names below are loaded when they are first used: `import perfmodel` itself loads nothing but this file.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # Type checkers and editors read the signatures; at run time each name is loaded when it is first used.
    from perfmodel import search as search
    from perfmodel.signatures import *  # noqa: F403

    __version__: str

#: Where each public name lives, by floor.
_HOME: dict[str, tuple[str, ...]] = {
    "perfmodel.foundation.errors": ("InputError", "PerfModelError", "RunError"),
    "perfmodel.foundation.dtypes": ("Dtype",),
    "perfmodel.foundation.session": ("CacheInfo", "Session"),
    "perfmodel.hardware.chip": ("Chip", "MemoryTier"),
    "perfmodel.hardware.fabric": ("Link", "NetworkTier", "Topology"),
    "perfmodel.hardware.cluster": ("Cluster",),
    "perfmodel.hardware.calibration": ("Calibration",),
    "perfmodel.hardware.reader": (
        "cluster_of_chip",
        "list_calibrations",
        "list_chips",
        "list_clusters",
        "load_calibration",
        "load_chip",
        "load_cluster",
    ),
    "perfmodel.workload.config": ("TransformerConfig",),
    "perfmodel.workload.job": ("Optimizer", "Precision", "TrainingJob"),
    "perfmodel.workload.models": ("list_models", "load_model"),
    "perfmodel.parallel.choices": ("AttentionKernel", "PipelineSchedule", "Recompute", "ZeroStage"),
    "perfmodel.parallel.layout": ("ParallelLayout",),
    "perfmodel.parallel.plan": ("Plan", "make_plan"),
    "perfmodel.parallel.plan_file": ("read_plan", "write_plan"),
    "perfmodel.parallel.prediction": ("Prediction", "Predictions"),
    "perfmodel.parallel.results": ("Comparison", "Measurement"),
    "perfmodel.verbs.api": (
        "audit_plan",
        "calibrate_machine",
        "compare_plans",
        "explain_plan",
        "find_plans",
        "predict",
        "run_plan",
        "validate_cases",
    ),
    "perfmodel.verbs.advice": ("advise",),
    "perfmodel.verbs.exporting": ("export_plan", "export_service"),
    "perfmodel.verbs.doctor": ("Diagnosis", "diagnose"),
    "perfmodel.workload.graph": ("Graph", "Operator"),
    "perfmodel.workload.networks": ("list_networks", "load_network"),
    "perfmodel.verbs.fitting": ("fit_runs",),
    "perfmodel.verbs.explore": ("explore", "explore_sensitivity", "explore_waterfall"),
    "perfmodel.verbs.limits": ("find_limits",),
    "perfmodel.verbs.rows": ("prediction_rows",),
    "perfmodel.verbs.serving_predict": ("serve", "serve_operators", "serve_plan", "serve_several"),
    "perfmodel.verbs.searching": ("find_serving",),
    "perfmodel.frameworks.engine": ("Engine", "list_engines", "load_engine"),
    "perfmodel.parallel.serving_plan": ("Pools", "ServingLayout", "ServingPlan"),
    "perfmodel.parallel.serving_prediction": ("ServingPrediction",),
    "perfmodel.workload.serving": ("ServingJob",),
    "perfmodel.verbs.importing": ("import_graph",),
    "perfmodel.verbs.tracing": ("compare_memory", "compare_trace", "trace_plan"),
    "perfmodel.parallel.measured": ("AllocationSite", "MeasuredMemory", "MeasuredTrace", "MemoryComparison", "TraceComparison"),
    "perfmodel.cost.trace": ("RankTimeline",),
    "perfmodel.verbs.reporting": ("write_report",),
    "perfmodel.report.page": ("Report",),
    "perfmodel.verbs.sizing": ("size_cluster",),
    "perfmodel.planner.sizing": ("SizedRun", "Sizing"),
    "perfmodel.verbs.study": ("Study",),
    "perfmodel.verbs.sweep": ("SweepResult", "run_sweep"),
    "perfmodel.verbs.training": ("estimate_run", "list_assumptions"),
    "perfmodel.cost.training_run": ("TrainingRun",),
    "perfmodel.verbs.networks": ("parallelize", "predict_network_plan", "run_network_plan", "shard_network", "shard_pipeline"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

#: The verbs by the names of the command line. `search` and `calibrate` are packages: `find_plans` and `calibrate_machine` are those verbs.
_SAME = {
    "audit": "audit_plan",
    "compare": "compare_plans",
    "explain": "explain_plan",
    "export": "export_plan",
    "fit": "fit_runs",
    "run": "run_plan",
    "shard": "shard_network",
    "sweep": "run_sweep",
    "trace": "trace_plan",
    "validate": "validate_cases",
}

#: Packages that are there without an import of their own: `perfmodel.search.eliminate`.
_PACKAGES = ("search",)

__all__ = ["__version__", *_MODULE_OF, *_SAME]


def _load(name: str) -> object:
    if name == "__version__":
        return _load_version()
    if name in _SAME:
        return _load(_SAME[name])
    if name in _PACKAGES:
        return import_module(f"perfmodel.{name}")
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'perfmodel' has no attribute {name!r}")
    value: object = getattr(import_module(module), name)
    globals()[name] = value
    return value


def _load_version() -> str:
    """Return the version of the installed package. Its metadata is read on first use, because `importlib.metadata` is slow to load."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        installed = version("perfmodel")
    except PackageNotFoundError:  # a checkout on the path, not installed
        installed = "0+unknown"
    globals()["__version__"] = installed
    return installed


if not TYPE_CHECKING:
    # Hidden from type checkers, which report a name that is not there.
    __getattr__ = _load


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
