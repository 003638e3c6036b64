"""The verbs of per-operator plans, for Python: the best sharding of every operator of any network, predicted, and run.

    import perfmodel

    result = perfmodel.shard_network("alexnet", cluster="pase-1080ti", chips=32)
    print(result.best.step_time, result.best.plan.shardings["fc1"])

A network is a built-in one by name, any `torch.nn.Module` as `module:factory` with the shapes of its inputs, or a `Graph` object.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from perfmodel.foundation.errors import InputError, bad_field, shown
from perfmodel.foundation.memory_room import DEFAULT_HEADROOM, check_headroom, room
from perfmodel.foundation.units import format_bytes, format_time
from perfmodel.foundation.values import is_path, seconds, share
from perfmodel.foundation.words import Words, takes
from perfmodel.hardware.cluster import Cluster
from perfmodel.parallel.per_operator.plan import NetworkPlan
from perfmodel.parallel.prediction import facts_text
from perfmodel.parallel.request import Request
from perfmodel.workload.graph import Graph
from perfmodel.workload.job import PRECISION_POLICIES, Optimizer, Precision

if TYPE_CHECKING:
    from perfmodel.cost.machine import Machine
    from perfmodel.cost.per_operator.operators import StepSetting
    from perfmodel.cost.per_operator.predict import NetworkPrediction
    from perfmodel.hardware.calibration import Calibration
    from perfmodel.parallel.per_operator.measurement import NetworkMeasurement
    from perfmodel.parallel.profile import ExecutionProfile
    from perfmodel.planner.per_operator.pipeline import PipelinePrediction
    from perfmodel.planner.per_operator.search import NetworkPlanner, NetworkSearch
    from perfmodel.search import Budget

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
    best: NetworkPrediction
    searches: Mapping[int, NetworkSearch]
    strategies: Mapping[str, NetworkPrediction]
    treatments: tuple[str, ...] = ()
    cut_off: str = ""

    @property
    def search(self) -> NetworkSearch:
        """The search that found the best plan."""
        return self.searches[self.zero]

    @property
    def lower_bound(self) -> float:
        """Of the step time of any plan with one of the ZeRO stages that were tried. [s]"""
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
    predictions: tuple[NetworkPrediction | PipelinePrediction, ...]
    measurements: tuple[NetworkMeasurement, ...]

    def error(self, index: int) -> float:
        """Predicted over measured step time, less one."""
        return self.predictions[index].step_time / self.measurements[index].step_time - 1.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Place:
    """A cluster with what predicts on it."""

    reference: str
    cluster: Cluster
    calibration: Calibration
    profile: ExecutionProfile
    machine: Machine
    policy: Precision = field(default=Precision.FP32)


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
    from perfmodel.verbs.api import import_graph
    from perfmodel.workload.imported.network import network_of

    imported = network_of(import_graph(text, inputs))
    return imported.network, imported.treatments


def find_place(
    cluster: Name | Cluster,
    *,
    chips: int | None,
    precision: str | None,
    calibration: Name | Calibration | None,
    profile: Name | ExecutionProfile | None,
) -> Place:
    """Cluster, calibration and profile; the precision is bf16-mixed where an accelerator has bf16, else fp32."""
    from perfmodel.cost.estimate import with_rates_of
    from perfmodel.cost.machine import resolve_machine
    from perfmodel.foundation.dtypes import Dtype
    from perfmodel.verbs.setting import constants_of, find_cluster

    reference, found = find_cluster(cluster, chips)
    chosen, habits = constants_of(found, calibration, profile)
    has_bf16 = found.chip.unit_kind != "core" and Dtype.BF16 in found.chip.peak_flop_rate
    try:
        policy = Precision(precision) if precision is not None else Precision.BF16_MIXED if has_bf16 else Precision.FP32
    except ValueError:
        raise bad_field("precision", precision, "is not known", f"use one of {', '.join(Precision)}") from None
    machine = with_rates_of(habits, resolve_machine(found, chosen, dtype=PRECISION_POLICIES[policy].compute), found.chip.launch_year)
    return Place(reference=reference, cluster=found, calibration=chosen, profile=habits, machine=machine, policy=policy)


def _place_of(asked: Request) -> Place:
    return find_place(asked.cluster, chips=asked.chips, precision=asked.precision, calibration=asked.calibration, profile=asked.profile)


def step_setting(place: Place, *, optimizer: str, zero: int, num_microbatches: int = 1) -> StepSetting:
    from perfmodel.cost.per_operator.operators import StepSetting

    try:
        chosen = Optimizer(optimizer)
    except ValueError:
        raise bad_field("optimizer", optimizer, "is not known", f"use one of {', '.join(Optimizer)}") from None
    return StepSetting(
        policy=PRECISION_POLICIES[place.policy], optimizer=chosen, profile=place.profile, zero=zero, num_microbatches=num_microbatches
    )


#: What a per-operator search takes of a request: where it runs and what is assumed.
_ASKED = Words(Request, only="cluster chips precision optimizer profile calibration memory_headroom", needed="cluster")


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
    place, optimizer, calibration = _place_of(asked), asked.optimizer or Optimizer.ADAMW, asked.calibration
    sizes = _as_run_by(place.profile, network, sizes)
    found, treatments = find_network(network, inputs=inputs, batch=batch, sizes=sizes)
    memory_headroom = share(asked.memory_headroom, "memory_headroom")
    check_headroom(memory_headroom)
    limit = room(place.machine.memory_usable, memory_headroom)
    searches: dict[int, NetworkSearch] = {}
    planners: dict[int, NetworkPlanner] = {}
    reasons: list[InputError] = []
    stages = _ZERO_STAGES if zero is None else (zero,)
    cut_off = ""
    for index, stage in enumerate(stages):
        if searches and budget.is_late:
            cut_off = "time limit"
            break
        if progress is not None:
            progress(index / len(stages), f"ZeRO {stage}")
        planners[stage] = make_planner(found, place, optimizer=optimizer, zero=stage, microbatches=microbatches)
        try:
            searches[stage] = planners[stage].search(memory_limit=limit, budget=budget.part(MOST_WORK))
            cut_off = cut_off or searches[stage].cut_off
        except InputError as error:
            reasons.append(error)
            if isinstance(error, OutOfBudget):
                cut_off = budget.spent or "work limit"
    if not searches:
        raise reasons[-1]
    best = min(searches, key=lambda stage: searches[stage].best.step_time)
    strategies = _strategies(planners[best], found) if with_strategies else {}

    def with_record(prediction: NetworkPrediction) -> NetworkPrediction:
        plan = replace(prediction.plan, inputs=tuple(inputs), num_microbatches=microbatches)
        plan = _recorded(plan, place, sizes=sizes, zero=best, optimizer=optimizer, calibration=calibration)
        return replace(prediction, plan=plan, memory_headroom=memory_headroom)

    return ShardResult(
        network=found,
        zero=best,
        best=with_record(searches[best].best),
        searches=searches,
        strategies={name: with_record(prediction) for name, prediction in strategies.items()},
        treatments=treatments,
        cut_off=cut_off,
    )


def _as_run_by(profile: ExecutionProfile, network: Name | Graph, sizes: Sizes | None) -> Sizes | None:
    """The sizes of a built-in network, attention unfused where the framework has no fused kernel, and its dropout, where nobody said."""
    from perfmodel.parallel.layout import AttentionKernel
    from perfmodel.workload.models import load_model
    from perfmodel.workload.networks import network_sizes

    if isinstance(network, Graph) or ":" in str(network) or not isinstance(sizes or {}, Mapping):
        return sizes
    defaults = network_sizes(str(network))
    drops = "dropout" in defaults and load_model(network).dropout > 0 and profile.dropout
    habits = {"fused_attention": profile.default_attention == AttentionKernel.FLASH, "dropout": drops}
    ours = {name: habit for name, habit in habits.items() if defaults.get(name, habit) != habit}
    return ours | dict(sizes or {}) if ours else sizes


def _budget(time_limit: float | str | None) -> Budget:
    """Of a verb: seconds where its user says so; work is limited in each of its searches."""
    from perfmodel.search import Budget

    return Budget(math.inf, time_limit=math.inf if time_limit is None else seconds(time_limit, "time_limit"))


def _recorded(
    plan: NetworkPlan, place: Place, *, sizes: Sizes | None, zero: int, optimizer: str, calibration: Name | Calibration | None
) -> NetworkPlan:
    """The plan with all that predicts it again. A calibration that was merely the best known is not part of it."""
    from perfmodel.verbs.setting import file_reference

    named = calibration if isinstance(calibration, Name) else calibration.name if calibration is not None else ""
    return replace(
        plan,
        sizes=dict(sizes or {}),
        zero=zero,
        optimizer=str(Optimizer(optimizer)),
        precision=str(place.policy),
        profile=place.profile.name,
        calibration=file_reference(named),
    )


def make_planner(network: Graph, place: Place, *, optimizer: str = Optimizer.ADAMW, zero: int = 0, microbatches: int = 1) -> NetworkPlanner:
    """Space and tables of a network on a cluster."""
    from perfmodel.parallel.per_operator.plan import mesh_axes
    from perfmodel.planner.per_operator.pipeline import MOST_AXES
    from perfmodel.planner.per_operator.search import network_planner

    chips = place.cluster.num_chips
    return network_planner(
        network,
        cluster=place.reference,
        num_chips=chips,
        machine=place.machine,
        setting=step_setting(place, optimizer=optimizer, zero=zero, num_microbatches=microbatches),
        axes=mesh_axes(chips, place.machine.tier_sizes, most=MOST_AXES),
    )


def _strategies(planner: NetworkPlanner, network: Graph) -> dict[str, NetworkPrediction]:
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
) -> tuple[int, PipelinePrediction]:
    """The ZeRO stage and the plan: numbers of stages and microbatches, the cuts, and the sharding of every operator on a stage's chips.

    network   a built-in one by its name; global_batch: samples of a step
    zero      None: the better of 1 and 3
    time_limit   after which the best plan so far is returned; None: the plan does not depend on the machine or its load  [s]
    """
    from perfmodel.planner.per_operator.pipeline import search_pipeline

    budget = _budget(time_limit)
    if ":" in network:
        raise bad_field("network", network, "a pipeline needs the network at several batches", "use a built-in network")
    place, optimizer = _place_of(asked), asked.optimizer or Optimizer.ADAMW
    sizes = _as_run_by(place.profile, network, sizes)
    found: dict[int, PipelinePrediction] = {}
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
                lambda batch: _built_in(network, batch, sizes or {}),
                global_batch=global_batch,
                cluster=place.reference,
                num_chips=place.cluster.num_chips,
                machine=place.machine,
                setting=step_setting(place, optimizer=optimizer, zero=stage),
                memory_limit=room(place.machine.memory_usable, share(asked.memory_headroom, "memory_headroom")),
                stages=stages,
                microbatches=microbatches,
                beat=min((plan.step_time for plan in found.values()), default=math.inf),
                budget=budget,
                progress=report,
            )
        except InputError as error:
            reasons.append(error)
    if not found:
        raise reasons[-1]
    best = min(found, key=lambda stage: found[stage].step_time)
    plan = replace(found[best], cut_off="time limit") if is_late else found[best]
    recorded = _recorded(plan.plan, place, sizes=sizes, zero=best, optimizer=optimizer, calibration=asked.calibration)
    return best, replace(plan, plan=recorded)


def predict_network_plan(
    plan: NetworkPlan | Name,
    *,
    network: Graph | str | None = None,
    cluster: Name | Cluster | None = None,
    precision: str | None = None,
    optimizer: str | None = None,
    zero: int | None = None,
    memory_headroom: float = DEFAULT_HEADROOM,
    profile: Name | ExecutionProfile | None = None,
    calibration: Name | Calibration | None = None,
) -> NetworkPrediction | PipelinePrediction:
    """Step time and memory of a plan of a network, on the cluster that it names or another, by what it records or what is said.

    network   the network itself, or the name that the plan has: needed where that is a module of one's own
    """
    memory_headroom = share(memory_headroom, "memory_headroom")
    check_headroom(memory_headroom)
    found = load_network_plan(plan)
    place = find_place(
        found.cluster if cluster is None else cluster,
        chips=found.num_chips * max(1, len(found.stages)),
        precision=found.precision or None if precision is None else precision,
        calibration=found.calibration or None if calibration is None else calibration,
        profile=found.profile or None if profile is None else profile,
    )
    own = network if isinstance(network, Graph) else network_of_plan(found, named=network)
    setting = step_setting(
        place,
        optimizer=found.optimizer if optimizer is None else optimizer,
        zero=found.zero if zero is None else zero,
        num_microbatches=found.num_microbatches,
    )
    placed = _recorded(
        replace(found, cluster=place.reference),
        place,
        sizes=found.sizes,
        zero=setting.zero,
        optimizer=setting.optimizer,
        calibration=found.calibration if calibration is None else calibration,
    )
    return _predicted(own, placed, place, memory_headroom=memory_headroom)


def load_network_plan(plan: NetworkPlan | Name) -> NetworkPlan:
    from perfmodel.parallel.per_operator.plan_file import read_network_plan

    return plan if isinstance(plan, NetworkPlan) else read_network_plan(plan)


def network_of_plan(plan: NetworkPlan, *, named: str | None = None) -> Graph:
    """The network that a plan is for: a built-in one, or a module that the caller names too, as a plan file alone starts no code."""
    if named is not None and named != plan.network:
        raise bad_field("network", named, f"the plan is for {plan.network}", "name that one")
    if plan.is_imported and named is None:
        rule = "is Python code of your own, which a plan alone does not start"
        raise bad_field("network", plan.network, rule, f"name it again if you trust it: --network {shlex.quote(plan.network)}")
    if plan.is_imported:
        return find_network(plan.network, inputs=plan.inputs)[0]
    return find_network(plan.network, batch=plan.batch, sizes=plan.sizes)[0]


def _built_in(name: str, batch: int, sizes: Sizes) -> Graph:
    from perfmodel.verbs.setting import file_reference
    from perfmodel.workload.networks import load_network

    if not all(isinstance(name, str) for name in sizes):
        raise bad_field("sizes", shown(list(sizes)), "must be names", "write {'image': 64}")
    if "batch" in sizes:
        raise bad_field("size", f"batch={sizes['batch']}", "the batch is no size of a network", "give it as batch (--batch)")
    network = load_network(name, batch=batch, **sizes)
    return replace(network, name=file_reference(name)) if is_path(name) else network


def run_network_plan(
    plan: NetworkPlan | Name,
    *,
    network: Graph | None = None,
    steps: int = 10,
    warmup: int = 1,
    with_strategies: bool = False,
    device: str = "auto",
    calibration: Name | Calibration | None = None,
    progress: Callable[[str], None] | None = None,
) -> NetworkComparison:
    """Run a plan of a network here with torch: gradients and traffic checked against one process, timed, and predicted.

    It runs in float32, with the plan's optimizer, ZeRO stage, microbatches and stages, and is predicted so.

    with_strategies   data parallelism and, of convolutional networks, one weird trick are measured in the same run, step by step in turn
    """
    from perfmodel.foundation.resources import require_torch

    require_torch("run a plan")
    from perfmodel.execute.per_operator.run import measure_network_plans
    from perfmodel.execute.runner import pick_device

    found = load_network_plan(plan)
    if network is None and found.is_imported:
        rule = "a plan of an imported module is predicted, not run: what its operators compute is not imported"
        raise bad_field("network", found.network, rule, "use `perfmodel predict`, or a plan of a built-in network")
    if with_strategies and found.stages:
        raise bad_field("strategies", "yes", "are plans of one stage, this one has several", "leave it out")
    own = network if network is not None else network_of_plan(found)
    device = pick_device(device, found.num_ranks)
    where = "localhost" if device == "cpu" else found.cluster  # the prediction is of what is measured
    place = find_place(where, chips=found.num_ranks, precision=Precision.FP32, calibration=calibration, profile=None)
    plans = {"this plan": _on_tiers(found, place.machine)}
    if with_strategies:
        planner = make_planner(own, place, optimizer=found.optimizer, zero=found.zero, microbatches=found.num_microbatches)
        for name, prediction in _strategies(planner, own).items():
            plans[name] = replace(prediction.plan, zero=found.zero, optimizer=found.optimizer, num_microbatches=found.num_microbatches)
    predictions = tuple(_predicted(_dropping_nothing(own), each, place) for each in plans.values())
    measurements = measure_network_plans(own, list(plans.values()), steps=steps, warmup=warmup, device=device, on_progress=progress)
    return NetworkComparison(network=own, names=tuple(plans), predictions=predictions, measurements=measurements)


def _dropping_nothing(network: Graph) -> Graph:
    """As a run has it, whose gradients are compared: dropout is there and does nothing."""
    operators = (replace(op, forward=(), backward=(), saved=()) if op.kind == "dropout" else op for op in network.operators)
    return replace(network, operators=tuple(operators))


def _on_tiers(plan: NetworkPlan, machine: Machine) -> NetworkPlan:
    """On a machine with fewer network tiers than the plan's: what lay across nodes lies across its outermost tier."""
    outermost = len(machine.tier_sizes) - 1
    return replace(plan, axes=tuple(replace(axis, tier=min(axis.tier, outermost)) for axis in plan.axes))


def _predicted(
    network: Graph, plan: NetworkPlan, place: Place, *, memory_headroom: float = DEFAULT_HEADROOM
) -> NetworkPrediction | PipelinePrediction:
    """Step time and memory of a plan as it says that it is trained, in the precision of the place."""
    from perfmodel.cost.per_operator.predict import predict_network
    from perfmodel.planner.per_operator.pipeline import predict_pipeline

    setting = step_setting(place, optimizer=plan.optimizer, zero=plan.zero, num_microbatches=plan.num_microbatches)
    if plan.stages:
        return replace(predict_pipeline(network, plan, machine=place.machine, setting=setting), plan=plan)
    return predict_network(network, plan, setting, place.machine, memory_headroom=memory_headroom)
