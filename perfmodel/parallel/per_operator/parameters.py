"""Collectives of parameters in a step: gradients, and weights that ZeRO shards.

A unit is gathered and reduced in one collective: the parameters of one layer whose gradients are partial on the same axes. It is sharded
over those axes except `dp_replicate` and the parts of `tp`, over which the gradient of a shard is all-reduced once a step.

Without ZeRO a unit's gradients are all-reduced once a step. With ZeRO they are reduce-scattered once a step (stage 1) or each micro-batch
(2 and 3). Its weights are gathered once a step (1 and 2) or in each pass of each micro-batch (3). In a pipeline each is done once a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, prod

from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.parallel.algebra.parameters import shard_axes
from perfmodel.parallel.algebra.sharding import TENSOR_AXES
from perfmodel.parallel.per_operator.mesh import STAGES
from perfmodel.parallel.per_operator.recompute import issued_again
from perfmodel.parallel.per_operator.stages import sections_of, stage_runs
from perfmodel.parallel.per_operator.traffic import NetworkTraffic, derive_assigned, network_traffic
from perfmodel.parallel.plan import Plan
from perfmodel.workload.graph import Graph
from perfmodel.workload.work import Pass


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterUnit:
    """Parameters of one section that are gathered, reduced and sharded together; their gradients are partial on the same axes.

    axes      axes on which the gradients are partial; the unit is sharded over `shard_axes` of them and replicated over the others
    ways      shards of each parameter
    stage     pipeline stage
    holders   all stages that hold it: several for a tied parameter, which is its own unit
    section   index of the section in the stage; -1: parameters that several sections read
    summed    parameters whose gradients are also partial over parts of tp, and are all-reduced over these at once (ZeRO 2 and 3 without
              a pipeline, as in torch); they belong to the same unit
    is_wanted_at_once   backward begins with it: it is not freed in between
    is_frozen   the parameters have no gradients: they are only gathered, in backward if something in their section runs backward
    shapes    local shapes of the parameters without ZeRO
    """

    stage: int
    holders: tuple[int, ...]
    section: int
    is_wanted_at_once: bool
    axes: frozenset[str]
    ways: int
    parameters: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    operator: str
    summed: Mapping[str, frozenset[str]] = field(default_factory=dict)
    is_frozen: bool = False
    runs_backward: bool = True

    @property
    def num_elements(self) -> int:
        return sum(prod(shape) for shape in self.shapes)

    @property
    def shard_axes(self) -> frozenset[str]:
        return shard_axes(self.axes)

    @property
    def replica_axes(self) -> frozenset[str]:
        return self.axes - self.shard_axes

    def padded_elements(self, *, together: bool) -> int:
        """Return the elements with padding to equal shards, per parameter (ZeRO 2 and 3) or for all of them together (ZeRO 1)."""
        sizes = [self.num_elements] if together else [prod(shape) for shape in self.shapes]
        return sum(ceil(size / self.ways) * self.ways for size in sizes)


def parameter_units(network: Graph, plan: Plan) -> tuple[ParameterUnit, ...]:
    """Return every unit of every stage, in the order of the operators; also units of a single rank."""
    derivation = derive_assigned(network, plan.cuts)
    layouts = {parameter.name: derivation.layout_of(parameter) for parameter in derivation.parameters}
    frozen = {parameter.name for parameter in derivation.parameters if parameter.is_frozen}
    groups: dict[tuple[int, tuple[int, ...], int, bool, frozenset[str], bool], list[str]] = {}
    runs = stage_runs(network, plan)
    summed: dict[str, frozenset[str]] = {}
    for stage, run in enumerate(runs):
        sections = sections_of(network, run)
        section_of = {i: number for number, (start, end) in enumerate(sections) for i in range(start, end)}
        blocks = {
            number for number, (start, _) in enumerate(sections) if not network.blocks or network.operators[start].layer in network.blocks
        }
        readers_of = {name: [index for index, _ in network.readers()[name] if run[0] <= index < run[1]] for name in layouts}
        sections_of_each = {name: {section_of[index] for index in reading} for name, reading in readers_of.items() if reading}
        # where ZeRO shards weights, a parameter that several end sections read belongs to one unit with all of theirs
        joins_ends = plan.zero >= 2 and any(len(read_in) > 1 and not read_in & blocks for read_in in sections_of_each.values())
        for name, layout in layouts.items():
            if name not in sections_of_each:
                continue
            reading, read_in = readers_of[name], sections_of_each[name]
            holders, is_end = holding_stages(network, runs, name), not read_in & blocks
            is_alone = len(read_in) == 1 and not (joins_ends and is_end)
            section = min(read_in) if is_alone or plan.zero < 2 else -1
            at_once = is_end and run[1] == len(network.operators) and section in (-1, len(sections) - 1)
            axes = frozenset(axis for axis in layout.partial if plan.cuts.size((axis,)) > 1)
            if name in frozen:
                if plan.zero >= 2 and shard_axes(axes):
                    groups.setdefault((stage, holders, section, at_once, axes, True), []).append(name)
                continue
            if plan.zero >= 2 and plan.layout.pp == 1 and shard_axes(axes) and axes & TENSOR_AXES and len(reading) == 1:
                summed[name] = axes & TENSOR_AXES
                axes -= TENSOR_AXES
            groups.setdefault((stage, holders, section, at_once, axes, False), []).append(name)
    shapes = {
        name: tuple(ceil(size / plan.cuts.size(cut)) for size, cut in zip(network.tensors[name].shape, layout.cuts, strict=True))
        for name, layout in layouts.items()
    }
    trained_layers = {operator.layer for operator in network.operators if network.tensors[operator.output.tensor].has_gradient}
    return tuple(
        ParameterUnit(
            stage=stage,
            holders=holders,
            section=section,
            is_wanted_at_once=at_once,
            axes=axes,
            ways=plan.cuts.size(shard_axes(axes)),
            parameters=tuple(names),
            shapes=tuple(shapes[name] for name in names),
            operator=network.operators[network.readers()[names[0]][0][0]].name,
            summed={name: summed[name] for name in names if name in summed},
            is_frozen=is_frozen,
            runs_backward=not is_frozen or any(reader.layer in trained_layers for name in names for reader, _ in network.consumers(name)),
        )
        for (stage, holders, section, at_once, axes, is_frozen), names in groups.items()
    )


def holding_stages(network: Graph, runs: Sequence[tuple[int, int]], parameter: str) -> tuple[int, ...]:
    """Return the stages that read the parameter."""
    reading = [index for index, _ in network.readers()[parameter]]
    return tuple(stage for stage, (start, end) in enumerate(runs) if any(start <= index < end for index in reading))


def unit_traffic(unit: ParameterUnit, zero: int, num_microbatches: int, *, keeps: bool) -> Iterator[NetworkTraffic]:
    """Yield the collectives of a unit in a step; none for a unit whose group has one rank.

    A unit without shards yields nothing at stages 2 and 3, which reduce its gradients one by one; else they are reduced together.

    keeps   weights stay gathered for all micro-batches, and gradients accumulate before the reduction: in pipelines, as in torch
    """
    scatters = num_microbatches if zero >= 2 and not keeps else 1
    gathers_again = zero == 3 and not keeps and not unit.is_wanted_at_once and unit.runs_backward
    passes = (Pass.FORWARD, Pass.BACKWARD) if gathers_again else (Pass.FORWARD,)
    row = NetworkTraffic(
        kind=CollectiveKind.REDUCE_SCATTER,
        axes=unit.shard_axes,
        num_elements=float(unit.num_elements),
        phase=Pass.BACKWARD,
        tensor=unit.parameters[0],
        operator=unit.operator,
        what="gradient",
        repeats=scatters,
        itemsize=-1.0,
    )
    if not zero:
        if unit.axes:
            yield replace(row, kind=CollectiveKind.ALL_REDUCE, axes=unit.axes, repeats=1)
        return
    if unit.replica_axes and (zero == 1 or unit.shard_axes) and not unit.is_frozen:
        shard = float(unit.num_elements) / unit.ways
        yield replace(row, kind=CollectiveKind.ALL_REDUCE, axes=unit.replica_axes, num_elements=shard, repeats=1)
    if not unit.shard_axes:
        return
    for name, shape in zip(unit.parameters, unit.shapes, strict=True):
        if name in unit.summed:
            yield replace(
                row,
                kind=CollectiveKind.ALL_REDUCE,
                axes=unit.summed[name],
                num_elements=float(prod(shape)),
                tensor=name,
                what="sum",
                repeats=num_microbatches,
            )
    if not unit.is_frozen:
        yield row
    for phase in passes:
        gathers = num_microbatches if zero == 3 and not keeps else 1
        yield replace(row, kind=CollectiveKind.ALL_GATHER, phase=phase, what="weights", repeats=gathers)


def tied_traffic(unit: ParameterUnit, zero: int) -> NetworkTraffic:
    """Return the all-reduce of a tied parameter's gradient, or of its shard, over the stages that hold the parameter."""
    return NetworkTraffic(
        kind=CollectiveKind.ALL_REDUCE,
        axes=frozenset((STAGES,)),
        num_elements=float(unit.num_elements) / (unit.ways if zero else 1),
        phase=Pass.BACKWARD,
        tensor=unit.parameters[0],
        operator=unit.operator,
        what="gradient",
        itemsize=-1.0,
    )


def step_traffic(network: Graph, plan: Plan, stage: int = 0) -> tuple[NetworkTraffic, ...]:
    """Return the collectives that a stage issues in a step: of every micro-batch, of recomputation, and of parameters."""
    start, end = run = stage_runs(network, plan)[stage]
    again = issued_again(network, plan, run)
    names = {operator.name for operator in network.operators[start:end]}
    producers, readers = network.producers(), network.readers()

    def is_inside(row: NetworkTraffic) -> bool:
        if row.what == "edge" and row.tensor in plan.cuts.held and network.operators[producers[row.tensor]].name == row.operator:
            return start <= readers[row.tensor][0][0] < end  # a stage receives a tensor in its producer's layout and redistributes it
        if row.what == "gradient":
            return any(start <= index < end for index, _ in readers[row.tensor])
        return row.operator in names

    units = [unit for unit in parameter_units(network, plan) if unit.stage == stage]
    alone = {name for unit in units if plan.zero >= 2 and not unit.shard_axes for name in unit.parameters}
    rows = [
        row if row.what == "gradient" else replace(row, repeats=row.repeats * plan.num_microbatches * (1 + again(row)))
        for row in network_traffic(network, plan)
        if is_inside(row) and (row.what != "gradient" or row.tensor in alone)
    ]
    rows.extend(tied_traffic(unit, plan.zero) for unit in units if len(unit.holders) > 1 and not unit.is_frozen)
    for unit in units:
        rows.extend(unit_traffic(unit, plan.zero, plan.num_microbatches, keeps=plan.layout.pp > 1))
    return tuple(rows)
