"""The verbs of per-operator plans, for Python: the best sharding of every operator of any network, predicted, and run.

    import perfmodel

    result = perfmodel.shard_network("alexnet", cluster="pase-1080ti", chips=32)
    print(result.best.step_time, result.best.plan.cuts.shardings["fc1"])

A network is a built-in one by name, any `torch.nn.Module` as `module:factory` with the shapes of its inputs, or a `Graph` object.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from perfmodel.foundation.errors import InputError, bad_field, shown
from perfmodel.foundation.memory_headroom import DEFAULT_HEADROOM, check_headroom, memory_rule
from perfmodel.foundation.text import facts_text
from perfmodel.foundation.units import format_bytes, format_time
from perfmodel.foundation.values import is_path, optional_share, seconds
from perfmodel.foundation.words import Words, given_words, is_list, takes
from perfmodel.hardware.cluster import Cluster
from perfmodel.parallel.plan import Plan
from perfmodel.parallel.prediction import Prediction
from perfmodel.parallel.request import Request
from perfmodel.workload.graph import Graph
from perfmodel.workload.job import Optimizer, Precision, TrainingJob
from perfmodel.workload.network_model import NetworkModel

if TYPE_CHECKING:
    from perfmodel.execute.per_operator.options import ModuleReference
    from perfmodel.frameworks.profile import ExecutionProfile
    from perfmodel.hardware.calibration import Calibration
    from perfmodel.parallel.framework_ref import SettingValues
    from perfmodel.parallel.per_operator.measurement import NetworkMeasurement
    from perfmodel.planner.per_operator.pipeline import PipelineSearch
    from perfmodel.planner.per_operator.search import NetworkPlanner, NetworkSearch
    from perfmodel.planner.per_operator.tables import TableMaker
    from perfmodel.search import Budget
    from perfmodel.verbs.setting import Setting

Name: TypeAlias = str | Path
Sizes: TypeAlias = Mapping[str, int | tuple[int, ...]]

#: ZeRO stages that are tried where none is given.
_ZERO_STAGES = (0, 1, 3)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class ShardResult:
    """Result of `shard_network`.

    searches     one for each ZeRO stage that was tried
    strategies   common strategies by name, on the same cluster
    treatments   operators of an imported module that could not be sharded, with the reasons
    cut_off      reason why a search ended early or a ZeRO stage was left out: `work limit`, `memory limit` or the user's `time limit`;
                 empty if none
    """

    network: Graph
    zero: int
    best: Prediction
    searches: Mapping[int, NetworkSearch[Prediction]]
    strategies: Mapping[str, Prediction]
    treatments: tuple[str, ...] = ()
    cut_off: str = ""

    @property
    def search(self) -> NetworkSearch[Prediction]:
        """The search that found the best plan."""
        return self.searches[self.zero]

    @property
    def lower_bound(self) -> float:
        """Lower bound of the step time of any plan with one of the ZeRO stages that were tried. [s]"""
        return min(search.lower_bound for search in self.searches.values())

    @property
    def is_proved(self) -> bool:
        return all(search.is_proved for search in self.searches.values())

    @property
    def gap(self) -> float:
        """Largest relative gap of the searches to their lower bounds."""
        return max(search.gap for search in self.searches.values())

    def __str__(self) -> str:
        best = self.best
        memory = f"{format_bytes(best.memory['total'])} of {format_bytes(best.memory_usable)} usable: {best.verdict}"
        facts = (
            ("network", f"{self.network.name}, {len(self.network.operators)} operators"),
            ("best plan", f"{format_time(best.step_time)} a step with ZeRO {self.zero}; lower bound {format_time(self.lower_bound)}"),
            ("memory", memory),
            *((name, f"{format_time(prediction.step_time)} a step") for name, prediction in self.strategies.items()),
        )
        return facts_text(facts)

    __repr__ = __str__


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NetworkComparison:
    """Plans of one network that were measured in one run, each with its prediction. The first is the requested plan."""

    network: Graph
    names: tuple[str, ...]
    predictions: tuple[Prediction, ...]
    measurements: tuple[NetworkMeasurement, ...]

    def error(self, index: int) -> float:
        """Return predicted over measured step time, less one."""
        return self.predictions[index].step_time / self.measurements[index].step_time - 1.0


def find_network(
    network: Name | Graph, *, inputs: Sequence[str] = (), batch: int = 0, sizes: Sizes | None = None
) -> tuple[Graph, tuple[str, ...]]:
    """Return a network, and the operators of an imported one that cannot be sharded, with the reasons."""
    if sizes is not None and not isinstance(sizes, Mapping):
        raise bad_field("sizes", shown(sizes), "must name sizes and their values", 'write {"layers": 2}')
    if not isinstance(inputs, (str, list, tuple)) or not all(isinstance(text, str) for text in inputs):
        raise bad_field("inputs", shown(inputs), "must be a text or a list of texts", "write x=float32[8,3,224,224]")
    if isinstance(network, Graph):
        return network, ()
    text, sizes = str(network), sizes or {}
    if ":" in text:
        if batch or sizes:
            raise bad_field("batch", batch, "an imported module has the sizes of its inputs", "write them into inputs")
        from perfmodel.verbs.importing import import_graph
        from perfmodel.workload.imported.network import network_of

        imported = network_of(import_graph(text, inputs))
        return imported.network, imported.treatments
    from perfmodel.verbs.setting import check_sizes, file_reference
    from perfmodel.workload.networks import load_network

    if inputs:
        raise bad_field("inputs", ", ".join(inputs), f"{text} is built in and has its own", "leave it out")
    if not all(isinstance(name, str) for name in sizes):
        raise bad_field("sizes", shown(list(sizes)), "must be names", "write {'image': 64}")
    check_sizes(sizes, "batch (--batch)")
    built_in = load_network(text, batch=batch, **sizes)
    return (replace(built_in, name=file_reference(text)) if is_path(text) else built_in), ()


def default_precision(cluster: Cluster, asked: str | None = None) -> Precision:
    """Return the given precision; else bf16-mixed on accelerators with bf16, else fp32."""
    from perfmodel.foundation.dtypes import Dtype
    from perfmodel.foundation.values import choice_of

    if asked is not None:
        return choice_of(Precision, asked, "precision")
    has_bf16 = cluster.chip.units.unit_kind != "core" and Dtype.BF16 in cluster.chip.peak_flop_rate
    return Precision.BF16_MIXED if has_bf16 else Precision.FP32


def network_setting(
    network: Name | Graph,
    asked: Request,
    *,
    inputs: Sequence[str] = (),
    batch: int = 0,
    sizes: Sizes | None = None,
    microbatches: int = 1,
    global_batch: int = 0,
) -> tuple[Setting, Graph, tuple[str, ...]]:
    """Return the setting of a network's training, the network at the batch of one microbatch, and its operators that cannot be sharded.

    batch          of one microbatch
    global_batch   of a step, in place of `batch`: the network is then built at every requested batch
    """
    from perfmodel.foundation.values import choice_of
    from perfmodel.parallel.choices import AttentionKernel
    from perfmodel.verbs.setting import constants_of, find_cluster, make_setting
    from perfmodel.workload.models import load_model
    from perfmodel.workload.networks import load_network, network_sizes

    _, cluster = find_cluster(asked.cluster, asked.chips)
    _, profile = constants_of(cluster, asked.calibration, asked.profile, asked.settings)
    if not isinstance(network, Graph) and ":" not in str(network) and isinstance(sizes or {}, Mapping):
        # a built-in network has the framework's defaults of attention kernel and dropout, where they are not given
        defaults = network_sizes(str(network))
        drops = "dropout" in defaults and load_model(network).dropout > 0 and profile.kernels.dropout
        behaviours = {"fused_attention": profile.kernels.default_attention == AttentionKernel.FLASH, "dropout": drops}
        overrides = {name: behaviour for name, behaviour in behaviours.items() if defaults.get(name, behaviour) != behaviour}
        sizes = overrides | dict(sizes or {})
    found_network, treatments = find_network(network, inputs=inputs, batch=batch or global_batch, sizes=sizes)
    given = dict(sizes or {})
    job = TrainingJob(
        model=NetworkModel(name=found_network.name, sizes=given, inputs=tuple(inputs)),
        global_batch=global_batch or found_network.batch * microbatches,
        seq_len=1,
        precision=default_precision(cluster, asked.precision),
        optimizer=choice_of(Optimizer, asked.optimizer or Optimizer.ADAMW, "optimizer"),
    )
    setting = make_setting(
        job,
        asked.cluster,
        chips=asked.chips,
        calibration=asked.calibration,
        profile=asked.profile,
        settings=asked.settings,
        network_at=(lambda size: load_network(str(network), batch=size, **given)) if global_batch else (lambda _: found_network),
    )
    return setting, found_network, treatments


#: Fields of a request that a per-operator search accepts: its cluster and its assumptions.
_ASKED = Words(Request, only="cluster chips precision optimizer profile settings calibration memory_headroom", needed="cluster")


@takes(asked=_ASKED)
def shard_network(
    network: Name | Graph,
    *,
    asked: Request,
    inputs: Sequence[str] = (),
    batch: int = 0,
    sizes: Sizes | None = None,
    microbatches: int = 1,
    zero: int | None = None,
    time_limit: float | str | None = None,
    with_strategies: bool = True,
    progress: Callable[[float, str], None] | None = None,
) -> ShardResult:
    """Find the best sharding of every operator that fits, and predict common strategies.

    batch          of one microbatch, on all chips together; 0: the network's default
    sizes          of a built-in network, in addition to its batch: {"image": 64}
    zero           ZeRO stage; None: the best of 0, 1 and 3
    time_limit     after which the best plan so far is returned with its gap. None: searches end after a fixed amount of work, so that
                   the plan does not depend on the machine or its load  [s]
    """
    from perfmodel.search import OutOfBudget
    from perfmodel.search.budget import MOST_WORK

    budget = _budget(time_limit)
    memory_headroom = _headroom(asked.memory_headroom)
    setting, found_network, treatments = network_setting(network, asked, inputs=inputs, batch=batch, sizes=sizes, microbatches=microbatches)
    limit = memory_rule(memory_headroom).allowed(setting.estimator.machine.memory.usable)
    searches: dict[int, NetworkSearch[Prediction]] = {}
    planners: dict[int, NetworkPlanner[Prediction]] = {}
    reasons: list[InputError] = []
    stages = _ZERO_STAGES if zero is None else (zero,)
    cut_off = ""
    for index, stage in enumerate(stages):
        if searches and budget.is_late:
            cut_off = "time limit"
            break
        if progress is not None:
            progress(index / len(stages), f"ZeRO {stage}")
        maker = next((planner.maker for planner in planners.values()), None)
        planners[stage] = make_planner(setting, zero=stage, microbatches=microbatches, maker=maker)
        try:
            searches[stage] = planners[stage].search(memory_limit=limit, budget=budget.part(MOST_WORK))
            cut_off = cut_off or searches[stage].cut_off
        except InputError as error:
            reasons.append(error)
            if isinstance(error, OutOfBudget):
                cut_off = budget.spent or "work limit"
    if not searches:
        raise reasons[-1]
    zero = min(searches, key=lambda stage: searches[stage].best.step_time)
    strategies = _strategies(planners[zero], found_network) if with_strategies else {}
    # a strategy of the same space may have the faster complete prediction
    fitting = [prediction for prediction in strategies.values() if prediction.memory["total"] <= limit]
    best = min([searches[zero].best, *fitting], key=lambda prediction: prediction.step_time)
    return ShardResult(
        network=found_network,
        zero=zero,
        best=_predicted(setting, best.plan, memory_headroom),
        searches=searches,
        strategies={name: _predicted(setting, prediction.plan, memory_headroom) for name, prediction in strategies.items()},
        treatments=treatments,
        cut_off=cut_off,
    )


def _headroom(given: float | str | None) -> float:
    """Return the headroom of a network's plan; its search limits bytes, so the default is a headroom and no risk."""
    headroom = optional_share(given, "memory_headroom")
    headroom = DEFAULT_HEADROOM if headroom is None else headroom
    check_headroom(headroom)
    return headroom


def _predicted(setting: Setting, plan: Plan, memory_headroom: float) -> Prediction:
    """Predict a plan with the names of its cluster, calibration and profile."""
    from perfmodel.verbs.setting import placed, predict_in

    return predict_in(setting, placed(plan, setting), memory_headroom=memory_headroom)


def _budget(time_limit: float | str | None) -> Budget:
    """Return the budget of a verb: seconds if the user sets them; the work is limited in each of its searches."""
    from perfmodel.search import Budget

    return Budget(math.inf, time_limit=math.inf if time_limit is None else seconds(time_limit, "time_limit"))


def make_planner(setting: Setting, *, zero: int = 0, microbatches: int = 1, maker: TableMaker | None = None) -> NetworkPlanner[Prediction]:
    """Return the space and the tables of a network on a cluster; `maker` as for `network_planner`."""
    from perfmodel.parallel.per_operator.mesh import mesh_axes
    from perfmodel.planner.per_operator.pipeline import MOST_AXES
    from perfmodel.planner.per_operator.search import network_planner

    return network_planner(
        setting.estimator,
        cluster=setting.reference,
        num_microbatches=microbatches,
        zero=zero,
        axes=mesh_axes(setting.cluster.num_chips, setting.estimator.machine.tier_sizes, most=MOST_AXES),
        maker=maker,
    )


def _strategies(planner: NetworkPlanner[Prediction], network: Graph) -> dict[str, Prediction]:
    """Predict data parallelism and, with convolutions, one weird trick, whether they fit or not."""
    from perfmodel.planner.per_operator.strategies import data_parallel, one_weird_trick

    wanted = {"data parallel": data_parallel(network)}
    if any(operator.kind == "convolution" for operator in network.operators):
        wanted["one weird trick"] = one_weird_trick(network)
    predictions = {}
    for name, allowed in wanted.items():
        try:
            predictions[name] = planner.search(allowed).best
        except InputError:
            continue  # the chips do not divide the sharded dims
    return predictions


@takes(asked=_ASKED)
def shard_pipeline(
    network: str,
    *,
    asked: Request,
    global_batch: int,
    sizes: Sizes | None = None,
    stages: Sequence[int] = (),
    microbatches: Sequence[int] = (),
    zero: int | None = None,
    time_limit: float | str | None = None,
    progress: Callable[[float, str], None] | None = None,
) -> PipelineSearch:
    """Find the ZeRO stage and the plan: numbers of stages and microbatches, cuts, and the sharding of every operator on a stage's chips.

    network   name of a built-in network; global_batch: samples of a step
    zero      None: the better of 1 and 3
    time_limit   after which the best plan so far is returned; None: the plan does not depend on the machine or its load  [s]
    """
    from perfmodel.planner.per_operator.pipeline import search_pipeline

    budget = _budget(time_limit)
    if ":" in network:
        raise bad_field("network", network, "a pipeline needs the network at several batches", "use a built-in network")
    memory_headroom = _headroom(asked.memory_headroom)
    setting, _, _ = network_setting(network, asked, sizes=sizes, global_batch=global_batch)
    searches: dict[int, PipelineSearch] = {}
    reasons: list[InputError] = []
    tried = (3, 1) if zero is None else (zero,)
    is_late = False
    for index, stage in enumerate(tried):
        if searches and budget.is_late:
            is_late = True
            break

        def report(done: float, what: str, start: float = index / len(tried), stage: int = stage) -> None:
            if progress is not None:
                progress(start + done / len(tried), f"ZeRO {stage}, {what}")

        try:
            searches[stage] = search_pipeline(
                setting.estimator,
                cluster=setting.reference,
                zero=stage,
                memory_limit=memory_rule(memory_headroom).allowed(setting.estimator.machine.memory.usable),
                stages=stages,
                microbatches=microbatches,
                beat=min((search.step_time for search in searches.values()), default=math.inf),
                budget=budget,
                progress=report,
            )
        except InputError as error:
            reasons.append(error)
    if not searches:
        raise reasons[-1]
    best = min(searches.values(), key=lambda search: search.step_time)
    return replace(best, best=_predicted(setting, best.best.plan, memory_headroom), cut_off="time limit" if is_late else best.cut_off)


def predict_network_plan(
    plan: Plan | Name,
    *,
    network: Graph | str | None = None,
    cluster: Name | Cluster | None = None,
    precision: str | None = None,
    optimizer: str | None = None,
    zero: int | None = None,
    memory_headroom: float | str | None = None,
    profile: Name | ExecutionProfile | None = None,
    settings: SettingValues = None,
    calibration: Name | Calibration | None = None,
) -> Prediction:
    """Predict step time and memory of a plan of a network, on its own cluster or another, with its own job options or the given ones.

    network   the network itself, or its name in the plan: needed for a module of your own
    """
    memory_headroom = _headroom(memory_headroom)
    trained = trained_otherwise(load_network_plan(plan), precision=precision, optimizer=optimizer, zero=zero)
    setting = setting_of_network_plan(
        trained, network=network, cluster=cluster, profile=profile, settings=settings, calibration=calibration
    )
    return _predicted(setting, placed_on_tiers(trained, setting), memory_headroom)


#: Fields of a request that a plan of `shard` does not determine.
_OPEN_IN_NETWORK_PLANS = ("cluster", "profile", "settings", "calibration", "memory_headroom")


def predict_requested(plan: Plan, asked: Request, *, network: Graph | str | None = None, **others: object) -> tuple[Prediction, ...]:
    """Predict a plan of `shard` for the clusters of a request of `predict`, or for the plan's own.

    others   further arguments of the verb, which such a plan determines: refused if they are given
    """
    given = {name: value for name, value in given_words(asked).items() if value != []}
    for name, value in (given | others).items():
        if name not in _OPEN_IN_NETWORK_PLANS and value not in (None, "", []):
            raise bad_field(
                name, shown(str(value) if isinstance(value, Path) else value), "is fixed by a plan of `perfmodel shard`", "leave it out"
            )
    clusters = given.pop("cluster", None)
    for name, value in given.items():
        if is_list(value):
            if len(value) != 1:
                raise bad_field(name, shown(value), "takes one value with a plan of `perfmodel shard`", "give one")
            given[name] = value[0]
    graph = network if isinstance(network, Graph) else network_of_plan(plan, named=network)
    cluster_names = clusters if is_list(clusters) else [clusters]
    return tuple(predict_network_plan(plan, network=graph, cluster=cluster, **given) for cluster in cluster_names)


def trained_otherwise(plan: Plan, *, precision: str | None = None, optimizer: str | None = None, zero: int | None = None) -> Plan:
    """Return the plan with another precision, optimizer or ZeRO stage."""
    from perfmodel.foundation.values import choice_of
    from perfmodel.parallel.choices import ZeroStage

    job = replace(
        plan.job,
        precision=plan.job.precision if precision is None else choice_of(Precision, precision, "precision"),
        optimizer=plan.job.optimizer if optimizer is None else choice_of(Optimizer, optimizer, "optimizer"),
    )
    if zero is not None and (isinstance(zero, bool) or zero not in list(ZeroStage)):
        raise bad_field("zero", shown(zero), "is no stage of ZeRO", "use 0, 1, 2 or 3")
    return replace(plan, job=job, zero=plan.zero if zero is None else ZeroStage(zero))


def setting_of_network_plan(
    plan: Plan,
    *,
    network: Graph | str | None = None,
    cluster: Name | Cluster | None = None,
    profile: Name | ExecutionProfile | None = None,
    settings: SettingValues = None,
    calibration: Name | Calibration | None = None,
) -> Setting:
    """Return the setting of a network's plan: a built-in one, or a module that the caller names, because a plan file alone runs no code."""
    from perfmodel.verbs.setting import setting_of_plan

    check_network(plan, network)
    network_at: Callable[[int], Graph] | None = None
    if isinstance(network, Graph) or (network is not None and ":" in network):
        graph = network if isinstance(network, Graph) else network_of_plan(plan, named=network)
        network_at = lambda _: graph  # noqa: E731
    return setting_of_plan(plan, cluster=cluster, profile=profile, settings=settings, calibration=calibration, network_at=network_at)


def placed_on_tiers(plan: Plan, setting: Setting) -> Plan:
    """Return the plan for a cluster with fewer network tiers than the plan's: axes beyond the outermost tier move to it."""
    outermost = len(setting.estimator.machine.tier_sizes) - 1
    axes = tuple(replace(axis, tier=min(axis.tier, outermost)) for axis in plan.cuts.axes)
    return replace(plan, sharding=replace(plan.cuts, axes=axes))


def load_network_plan(plan: Plan | Name) -> Plan:
    """Load a plan in which every operator has its own sharding."""
    from perfmodel.verbs.setting import load_plan

    loaded = load_plan(plan)
    _ = loaded.cuts
    return loaded


def check_network(plan: Plan, network: Graph | str | None) -> None:
    """Raise InputError if a named or given network is not the plan's."""
    named = network.name if isinstance(network, Graph) else network
    if named is not None and named != plan.job.model.name:
        raise bad_field("network", named, f"the plan is for {plan.job.model.name}", "name that one")


def network_of_plan(plan: Plan, *, named: str | None = None) -> Graph:
    """Return the network of a plan, at its micro-batch; a module of the user only if the caller names it too."""
    model = plan.job.model
    check_network(plan, named)
    if not isinstance(model, NetworkModel):
        raise bad_field("model", model.name, "is no network", "use a plan of `perfmodel shard`")
    if model.is_imported and named is None:
        from perfmodel.verbs.setting import own_code

        raise own_code(model)
    if model.is_imported:
        return find_network(model.name, inputs=model.inputs)[0]
    return find_network(model.name, batch=plan.micro_batch, sizes=model.sizes)[0]  # type: ignore[arg-type]


def run_network_plan(
    plan: Plan | Name,
    *,
    network: Graph | str | None = None,
    steps: int = 10,
    warmup: int = 1,
    with_strategies: bool = False,
    device: str = "auto",
    calibration: Name | Calibration | None = None,
    progress: Callable[[str], None] | None = None,
) -> NetworkComparison:
    """Run a plan of a network on this machine with torch: gradients and traffic checked against one process, timed, and predicted.

    It runs in float32, with the plan's optimizer, ZeRO stage, microbatches and stages, and is predicted so.

    network           the network itself; of an imported module its name in the plan: the module is made and run with its weights
    with_strategies   data parallelism and, of convolutional networks, one weird trick are measured in the same run, step by step in turn
    calibration       None: of the CPUs, this machine's own (`perfmodel calibrate`), else one that is measured now, in about a minute
    """
    from perfmodel.foundation.resources import require_torch

    require_torch("run a plan")
    from perfmodel.execute.per_operator.run import TIMED, measure_network_plans
    from perfmodel.execute.runner import pick_device
    from perfmodel.hardware.reader import LOCALHOST
    from perfmodel.verbs.own_calibration import own_calibration

    trained = trained_otherwise(load_network_plan(plan), precision=Precision.FP32)
    if with_strategies and trained.cuts.stages:
        raise bad_field("strategies", "yes", "are plans of one stage, this one has several", "leave it out")
    graph, module = _runnable(trained, network)
    device = pick_device(device, trained.num_chips)
    measured_cluster = LOCALHOST if device == "cpu" else trained.cluster  # the prediction is for the measured machine
    if device == "cpu":
        calibration = own_calibration(calibration, ranks=trained.num_chips, progress=progress)
    operators = (replace(op, forward=(), backward=(), saved=()) if op.kind == "dropout" else op for op in graph.operators)
    setting = setting_of_network_plan(
        replace(trained, profile=""), network=replace(graph, operators=tuple(operators)), cluster=measured_cluster, calibration=calibration
    )
    plans = {"this plan": placed_on_tiers(trained, setting)}
    if with_strategies:
        planner = make_planner(setting, zero=int(trained.zero), microbatches=trained.num_microbatches)
        plans |= {name: prediction.plan for name, prediction in _strategies(planner, graph).items()}
    predictions = tuple(_predicted(setting, planned, 0.0) for planned in plans.values())
    options = replace(TIMED, module=module)
    wanted = list(plans.values())
    measurements = measure_network_plans(graph, wanted, options, steps=steps, warmup=warmup, device=device, on_progress=progress)
    return NetworkComparison(network=graph, names=tuple(plans), predictions=predictions, measurements=measurements)


def parallelize(module: object, plan: Plan | Name) -> Any:
    """Return a torch.nn.Module that trains `module` under a plan of `perfmodel shard`, in the caller's process group and loop.

    Every rank calls it with the full micro-batch of the plan, and gets the full outputs. Its parameters are the shards of this
    rank; after backward their gradients are complete. Batch norms use the statistics of the full batch. (Any: no torch is imported here.)

    module   a torch.nn.Module with its weights, equal on all ranks; it gives them up, as with `fully_shard`
    plan     the plan or its file, with the same number of chips as the process group has ranks
    """
    from perfmodel.foundation.resources import require_torch

    require_torch("parallelize a module")
    from perfmodel.execute.modules.parallel_module import ParallelModule

    return ParallelModule(module, load_network_plan(plan))


def _runnable(plan: Plan, network: Graph | str | None) -> tuple[Graph, ModuleReference | None]:
    """Return the network of a plan as it is run, and the reference of an imported module."""
    model = plan.job.model
    if isinstance(network, Graph):
        return network, None
    if not isinstance(model, NetworkModel) or not model.is_imported:
        return network_of_plan(plan, named=network), None
    if network is None:
        from perfmodel.verbs.setting import own_code

        raise own_code(model, "run")
    from perfmodel.execute.modules.refuse import readable_module
    from perfmodel.execute.per_operator.options import ModuleReference

    check_network(plan, network)
    module = ModuleReference(name=model.name, inputs=model.inputs)
    return readable_module(module, plan).network, module
