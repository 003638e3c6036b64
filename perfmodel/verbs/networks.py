"""The verbs of per-operator plans, for Python: the best sharding of every operator of any network, predicted, and run.

    import perfmodel

    result = perfmodel.shard_network("alexnet", cluster="pase-1080ti", chips=32)
    print(result.best.step_time, result.best.plan.cuts.shardings["fc1"])

A network is a built-in one by name, any `torch.nn.Module` as `module:factory` with the shapes of its inputs, or a `Graph` object.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from perfmodel.foundation.errors import InputError, bad_field, shown
from perfmodel.foundation.memory_headroom import DEFAULT_HEADROOM, check_headroom, memory_rule
from perfmodel.foundation.units import format_bytes, format_time
from perfmodel.foundation.values import is_path, optional_share, seconds
from perfmodel.foundation.words import Words, given_words, is_list, takes
from perfmodel.hardware.cluster import Cluster
from perfmodel.parallel.plan import Plan
from perfmodel.parallel.prediction import Prediction, facts_text
from perfmodel.parallel.request import Request
from perfmodel.workload.graph import Graph
from perfmodel.workload.job import Optimizer, Precision, TrainingJob
from perfmodel.workload.network_model import NetworkModel

if TYPE_CHECKING:
    from perfmodel.execute.per_operator.options import ModuleReference
    from perfmodel.frameworks.profile import ExecutionProfile
    from perfmodel.hardware.calibration import Calibration
    from perfmodel.parallel.framework_ref import Stated
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
    """strategies: what people use, by name, on the same cluster; searches: one for each ZeRO stage that was tried.

    treatments   of an imported module: what had to stay whole, and why
    cut_off      what ended a search before it was as close as it should be, or left a ZeRO stage out: `work limit`, `memory limit` or the
                 user's `time limit`; else nothing
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
        """The largest share by which one of the searches may be off."""
        return max(search.gap for search in self.searches.values())

    def __str__(self) -> str:
        best = self.best
        memory = f"{format_bytes(best.memory['total'])} of {format_bytes(best.memory_usable)} usable: {best.verdict}"
        facts = (
            ("network", f"{self.network.name}, {len(self.network.operators)} operators"),
            ("best plan", f"{format_time(best.step_time)} a step with ZeRO {self.zero}; lower bound {format_time(self.lower_bound)}"),
            ("memory", memory),
            *((name, f"{format_time(each.step_time)} a step") for name, each in self.strategies.items()),
        )
        return facts_text(facts)

    __repr__ = __str__


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NetworkComparison:
    """Plans of one network that were measured in one run, each with its prediction. The first is the plan that was asked for."""

    network: Graph
    names: tuple[str, ...]
    predictions: tuple[Prediction, ...]
    measurements: tuple[NetworkMeasurement, ...]

    def error(self, index: int) -> float:
        """Predicted over measured step time, less one."""
        return self.predictions[index].step_time / self.measurements[index].step_time - 1.0


def find_network(
    network: Name | Graph, *, inputs: Sequence[str] = (), batch: int = 0, sizes: Sizes | None = None
) -> tuple[Graph, tuple[str, ...]]:
    """A network, and what had to stay whole where it was imported."""
    if sizes is not None and not isinstance(sizes, Mapping):
        raise bad_field("sizes", shown(sizes), "must name sizes and their values", 'write {"layers": 2}')
    if not isinstance(inputs, (str, list, tuple)) or not all(isinstance(each, str) for each in inputs):
        raise bad_field("inputs", shown(inputs), "must be a text or a list of texts", "write x=float32[8,3,224,224]")
    if isinstance(network, Graph):
        return network, ()
    text = str(network)
    if ":" not in text:
        if inputs:
            raise bad_field("inputs", ", ".join(inputs), f"{text} is built in and has its own", "leave it out")
        return _built_in(text, batch, sizes or {}), ()
    if batch or sizes:
        raise bad_field("batch", batch, "an imported module has the sizes of its inputs", "write them into inputs")
    from perfmodel.verbs.importing import import_graph
    from perfmodel.workload.imported.network import network_of

    imported = network_of(import_graph(text, inputs))
    return imported.network, imported.treatments


def default_precision(cluster: Cluster, asked: str | None = None) -> Precision:
    """The given precision; else bf16-mixed on accelerators with bf16, else fp32."""
    from perfmodel.foundation.dtypes import Dtype
    from perfmodel.foundation.values import choice_of

    if asked is not None:
        return choice_of(Precision, asked, "precision")
    has_bf16 = cluster.chip.unit_kind != "core" and Dtype.BF16 in cluster.chip.peak_flop_rate
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
    """The training of a network on a cluster, the network at the batch of one microbatch, and what had to stay whole of an imported one.

    batch          of one microbatch; global_batch: of a step, in its place: the network is then built at every batch that is asked for
    """
    from perfmodel.foundation.values import choice_of
    from perfmodel.verbs.setting import constants_of, find_cluster, make_setting
    from perfmodel.workload.networks import load_network

    _, cluster = find_cluster(asked.cluster, asked.chips)
    _, profile = constants_of(cluster, asked.calibration, asked.profile, asked.settings)
    sizes = _as_run_by(profile, network, sizes)
    found, treatments = find_network(network, inputs=inputs, batch=batch or global_batch, sizes=sizes)
    given = dict(sizes or {})
    job = TrainingJob(
        model=NetworkModel(name=found.name, sizes=given, inputs=tuple(inputs)),
        global_batch=global_batch or found.batch * microbatches,
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
        network_at=(lambda size: load_network(str(network), batch=size, **given)) if global_batch else (lambda _: found),
    )
    return setting, found, treatments


#: What a per-operator search takes of a request: where it runs and what is assumed.
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
    """The best sharding of every operator that fits, and what common strategies would take.

    batch          of one microbatch, on all chips together; 0: the network's default
    sizes          of a built-in network, beside its batch: {"image": 64}
    zero           ZeRO stage; None: the best of 0, 1 and 3
    time_limit     after which the best plan so far is returned with its gap. None: searches end by the work that they have done, so that
                   the plan does not depend on the machine or its load  [s]
    """
    from perfmodel.search import OutOfBudget
    from perfmodel.search.budget import MOST_WORK

    budget = _budget(time_limit)
    memory_headroom = _headroom(asked.memory_headroom)
    check_headroom(memory_headroom)
    setting, found, treatments = network_setting(network, asked, inputs=inputs, batch=batch, sizes=sizes, microbatches=microbatches)
    limit = memory_rule(memory_headroom).allowed(setting.estimator.machine.memory_usable)
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
    strategies = _strategies(planners[zero], found) if with_strategies else {}

    def predicted(prediction: Prediction) -> Prediction:
        return _predicted(setting, prediction.plan, memory_headroom)

    return ShardResult(
        network=found,
        zero=zero,
        best=predicted(_best(searches[zero].best, strategies.values(), limit)),
        searches=searches,
        strategies={name: predicted(prediction) for name, prediction in strategies.items()},
        treatments=treatments,
        cut_off=cut_off,
    )


def _best(found: Prediction, strategies: Iterable[Prediction], limit: float) -> Prediction:
    """The plan of a search, or a strategy of the same space if its whole prediction is faster."""
    fitting = [each for each in strategies if each.memory["total"] <= limit]
    return min([found, *fitting], key=lambda each: each.step_time)


def _headroom(given: float | str | None) -> float:
    """Read the memory that a network's plan leaves free; its search limits bytes, so the default is a headroom and no risk."""
    found = optional_share(given, "memory_headroom")
    return DEFAULT_HEADROOM if found is None else found


def _predicted(setting: Setting, plan: Plan, memory_headroom: float) -> Prediction:
    """A plan with the names of what predicts it, and what its prediction rests on."""
    from perfmodel.verbs.setting import placed, predict_in

    return predict_in(setting, placed(plan, setting), memory_headroom=memory_headroom)


def _as_run_by(profile: ExecutionProfile, network: Name | Graph, sizes: Sizes | None) -> Sizes | None:
    """The sizes of a built-in network, attention unfused where the framework has no fused kernel, and its dropout, where nobody said."""
    from perfmodel.parallel.layout import AttentionKernel
    from perfmodel.workload.models import load_model
    from perfmodel.workload.networks import network_sizes

    if isinstance(network, Graph) or ":" in str(network) or not isinstance(sizes or {}, Mapping):
        return sizes
    defaults = network_sizes(str(network))
    drops = "dropout" in defaults and load_model(network).dropout > 0 and profile.kernels.dropout
    behaviours = {"fused_attention": profile.kernels.default_attention == AttentionKernel.FLASH, "dropout": drops}
    ours = {name: behaviour for name, behaviour in behaviours.items() if defaults.get(name, behaviour) != behaviour}
    return ours | dict(sizes or {}) if ours else sizes


def _budget(time_limit: float | str | None) -> Budget:
    """Budget of a verb: seconds if the user gives them; the work is limited in each of its searches."""
    from perfmodel.search import Budget

    return Budget(math.inf, time_limit=math.inf if time_limit is None else seconds(time_limit, "time_limit"))


def make_planner(setting: Setting, *, zero: int = 0, microbatches: int = 1, maker: TableMaker | None = None) -> NetworkPlanner[Prediction]:
    """Space and tables of a network on a cluster; `maker` as `network_planner` has it."""
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
    """Data parallelism and, where there are convolutions, one weird trick; predicted whether they fit or not."""
    from perfmodel.planner.per_operator.strategies import data_parallel, one_weird_trick

    wanted = {"data parallel": data_parallel(network)}
    if any(operator.kind == "convolution" for operator in network.operators):
        wanted["one weird trick"] = one_weird_trick(network)
    found = {}
    for name, allowed in wanted.items():
        try:
            found[name] = planner.search(allowed).best
        except InputError:
            continue  # the chips do not divide what it cuts
    return found


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
    """The ZeRO stage and the plan: numbers of stages and microbatches, the cuts, and the sharding of every operator on a stage's chips.

    network   a built-in one by its name; global_batch: samples of a step
    zero      None: the better of 1 and 3
    time_limit   after which the best plan so far is returned; None: the plan does not depend on the machine or its load  [s]
    """
    from perfmodel.planner.per_operator.pipeline import search_pipeline

    budget = _budget(time_limit)
    if ":" in network:
        raise bad_field("network", network, "a pipeline needs the network at several batches", "use a built-in network")
    memory_headroom = _headroom(asked.memory_headroom)
    check_headroom(memory_headroom)
    setting, _, _ = network_setting(network, asked, sizes=sizes, global_batch=global_batch)
    found: dict[int, PipelineSearch] = {}
    reasons: list[InputError] = []
    tried = (3, 1) if zero is None else (zero,)
    is_late = False
    for index, stage in enumerate(tried):
        if found and budget.is_late:
            is_late = True
            break

        def report(done: float, what: str, start: float = index / len(tried), stage: int = stage) -> None:
            if progress is not None:
                progress(start + done / len(tried), f"ZeRO {stage}, {what}")

        try:
            found[stage] = search_pipeline(
                setting.estimator,
                cluster=setting.reference,
                zero=stage,
                memory_limit=memory_rule(memory_headroom).allowed(setting.estimator.machine.memory_usable),
                stages=stages,
                microbatches=microbatches,
                beat=min((each.step_time for each in found.values()), default=math.inf),
                budget=budget,
                progress=report,
            )
        except InputError as error:
            reasons.append(error)
    if not found:
        raise reasons[-1]
    best = min(found.values(), key=lambda each: each.step_time)
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
    settings: Stated = None,
    calibration: Name | Calibration | None = None,
) -> Prediction:
    """Step time and memory of a plan of a network, on the cluster that it names or another, by what it records or what is said.

    network   the network itself, or the name that the plan has: needed where that is a module of one's own
    """
    memory_headroom = _headroom(memory_headroom)
    check_headroom(memory_headroom)
    found = trained_otherwise(load_network_plan(plan), precision=precision, optimizer=optimizer, zero=zero)
    setting = setting_of_network_plan(found, network=network, cluster=cluster, profile=profile, settings=settings, calibration=calibration)
    return _predicted(setting, on_tiers(found, setting), memory_headroom)


#: Words of a request that a plan of `shard` does not decide.
_OPEN_IN_NETWORK_PLANS = ("cluster", "profile", "settings", "calibration", "memory_headroom")


def predict_requested(plan: Plan, asked: Request, *, network: Graph | str | None = None, **others: object) -> tuple[Prediction, ...]:
    """Predict a plan of `shard` as a request of `predict` asks: for each of its clusters, or for the plan's own.

    others   further arguments of the verb, which such a plan decides: refused where they are given
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
    own = network if isinstance(network, Graph) else network_of_plan(plan, named=network)
    each = clusters if is_list(clusters) else [clusters]
    return tuple(predict_network_plan(plan, network=own, cluster=cluster, **given) for cluster in each)


def trained_otherwise(plan: Plan, *, precision: str | None = None, optimizer: str | None = None, zero: int | None = None) -> Plan:
    """The plan with another precision, optimizer or ZeRO stage."""
    from perfmodel.foundation.values import choice_of
    from perfmodel.parallel.layout import ZeroStage

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
    settings: Stated = None,
    calibration: Name | Calibration | None = None,
) -> Setting:
    """Setting of a plan of a network: a built-in one, or a module that the caller names, as a plan file alone starts no code."""
    from perfmodel.verbs.setting import setting_of_plan

    check_network(plan, network)
    network_at: Callable[[int], Graph] | None = None
    if isinstance(network, Graph) or (network is not None and ":" in network):
        own = network if isinstance(network, Graph) else network_of_plan(plan, named=network)
        network_at = lambda _: own  # noqa: E731
    return setting_of_plan(plan, cluster=cluster, profile=profile, settings=settings, calibration=calibration, network_at=network_at)


def on_tiers(plan: Plan, setting: Setting) -> Plan:
    """On a cluster with fewer network tiers than the plan's: what lay across nodes lies across its outermost tier."""
    outermost = len(setting.estimator.machine.tier_sizes) - 1
    axes = tuple(replace(axis, tier=min(axis.tier, outermost)) for axis in plan.cuts.axes)
    return replace(plan, assignment=replace(plan.cuts, axes=axes))


def load_network_plan(plan: Plan | Name) -> Plan:
    """A plan in which every operator has a sharding of its own."""
    from perfmodel.verbs.setting import load_plan

    found = load_plan(plan)
    _ = found.cuts
    return found


def check_network(plan: Plan, network: Graph | str | None) -> None:
    """A network that is named or given must be the plan's."""
    named = network.name if isinstance(network, Graph) else network
    if named is not None and named != plan.job.model.name:
        raise bad_field("network", named, f"the plan is for {plan.job.model.name}", "name that one")


def network_of_plan(plan: Plan, *, named: str | None = None) -> Graph:
    """The network that a plan is for, at its micro-batch; a module of one's own only where the caller names it too."""
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


def _built_in(name: str, batch: int, sizes: Sizes) -> Graph:
    from perfmodel.verbs.setting import check_sizes, file_reference
    from perfmodel.workload.networks import load_network

    if not all(isinstance(name, str) for name in sizes):
        raise bad_field("sizes", shown(list(sizes)), "must be names", "write {'image': 64}")
    check_sizes(sizes, "batch (--batch)")
    network = load_network(name, batch=batch, **sizes)
    return replace(network, name=file_reference(name)) if is_path(name) else network


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
    """Run a plan of a network here with torch: gradients and traffic checked against one process, timed, and predicted.

    It runs in float32, with the plan's optimizer, ZeRO stage, microbatches and stages, and is predicted so.

    network           the network itself; of an imported module its name, as the plan has it: the module is made and run with its weights
    with_strategies   data parallelism and, of convolutional networks, one weird trick are measured in the same run, step by step in turn
    calibration       None: of the CPUs, this machine's own (`perfmodel calibrate`), else one that is measured now, in about a minute
    """
    from perfmodel.foundation.resources import require_torch

    require_torch("run a plan")
    from perfmodel.execute.per_operator.run import TIMED, measure_network_plans
    from perfmodel.execute.runner import pick_device
    from perfmodel.hardware.reader import LOCALHOST
    from perfmodel.verbs.own_calibration import own_calibration

    found = trained_otherwise(load_network_plan(plan), precision=Precision.FP32)
    if with_strategies and found.cuts.stages:
        raise bad_field("strategies", "yes", "are plans of one stage, this one has several", "leave it out")
    own, module = _runnable(found, network)
    device = pick_device(device, found.num_chips)
    where = LOCALHOST if device == "cpu" else found.cluster  # the prediction is of what is measured
    if device == "cpu":
        calibration = own_calibration(calibration, ranks=found.num_chips, progress=progress)
    setting = setting_of_network_plan(replace(found, profile=""), network=_dropping_nothing(own), cluster=where, calibration=calibration)
    plans = {"this plan": on_tiers(found, setting)}
    if with_strategies:
        planner = make_planner(setting, zero=int(found.zero), microbatches=found.num_microbatches)
        plans |= {name: prediction.plan for name, prediction in _strategies(planner, own).items()}
    predictions = tuple(_predicted(setting, each, 0.0) for each in plans.values())
    options = replace(TIMED, module=module)
    measurements = measure_network_plans(
        own, list(plans.values()), options, steps=steps, warmup=warmup, device=device, on_progress=progress
    )
    return NetworkComparison(network=own, names=tuple(plans), predictions=predictions, measurements=measurements)


def parallelize(module: Any, plan: Plan | Name) -> Any:
    """Return a torch.nn.Module that trains `module` under a plan of `perfmodel shard`, in the caller's process group and loop.

    Every rank calls it with the whole micro-batch that the plan is for, and gets the whole outputs. Its parameters are the shards of this
    rank; after backward their gradients are complete. Batch norms take the statistics of the whole batch. (Any: no torch is imported here.)

    module   a torch.nn.Module with its weights, equal on all ranks; it gives them up, as with `fully_shard`
    plan     the plan or its file, for as many chips as the process group has ranks
    """
    from perfmodel.foundation.resources import require_torch

    require_torch("parallelize a module")
    from perfmodel.execute.modules.parallel_module import ParallelModule

    return ParallelModule(module, load_network_plan(plan))


def _runnable(plan: Plan, network: Graph | str | None) -> tuple[Graph, ModuleReference | None]:
    """The network of a plan as it is run, and the user's module where it is one."""
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


def _dropping_nothing(network: Graph) -> Graph:
    """As a run has it, whose gradients are compared: dropout is there and does nothing."""
    operators = (replace(op, forward=(), backward=(), saved=()) if op.kind == "dropout" else op for op in network.operators)
    return replace(network, operators=tuple(operators))
