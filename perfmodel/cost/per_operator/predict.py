"""The whole prediction of a plan whose operators have shardings of their own: step time by parts, memory by class.

It prices the list of collectives that the executor issues (`parallel/per_operator/traffic.py`) and the same work as the search's tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from perfmodel.cost.machine import Machine
from perfmodel.cost.per_operator.operators import (
    MeshPrices,
    ParameterColumns,
    StepSetting,
    compile_operators,
    mesh_grid,
    operator_cost,
    parameter_bytes,
    parameter_times,
    parameter_unit,
    saved_inputs,
    saves_output,
)
from perfmodel.cost.per_operator.overlap import exposed_time
from perfmodel.foundation.memory_room import DEFAULT_HEADROOM, Verdict, verdict
from perfmodel.parallel.algebra.sharding import Layout, gradient_layout, input_layout, output_layout
from perfmodel.parallel.per_operator.plan import NetworkPlan, check_plan
from perfmodel.parallel.per_operator.traffic import elements_of, network_traffic
from perfmodel.workload.graph import Graph, TensorRole


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkPrediction:
    """parts add up to `step_time` [s]; memory [byte] adds up to `total`; rests_on: part -> what its numbers come from."""

    plan: NetworkPlan
    step_time: float
    parts: Mapping[str, float]
    memory: Mapping[str, float]
    memory_capacity: float
    memory_usable: float
    memory_headroom: float
    sent_bytes: float
    rests_on: Mapping[str, str]

    @property
    def verdict(self) -> Verdict:
        return verdict(self.memory["total"], self.memory_usable, self.memory_headroom)

    @property
    def fits(self) -> bool:
        return self.verdict is Verdict.FITS

    @property
    def memory_spare(self) -> float:
        """Usable bytes that stay free, headroom included; negative where the plan does not fit."""
        return self.memory_usable - self.memory["total"]


def predict_network(
    network: Graph, plan: NetworkPlan, setting: StepSetting, machine: Machine, *, memory_headroom: float = DEFAULT_HEADROOM
) -> NetworkPrediction:
    """Time and memory of one training step.

    step = m (forward + backward + own collectives + redistributions) + what shows of parameter collectives + optimizer + constant
    """
    check_plan(plan, network)
    prices = MeshPrices(axes=plan.axes, machine=machine)
    times = setting.num_microbatches
    own_data = ((op, plan.shardings[op.name], [data for data in op.saved if data.of is None]) for op in network.operators)
    cost = operator_cost(compile_operators(network, own_data, setting), mesh_grid(plan.axes, len(machine.tier_sizes)), machine)
    forward, backward, own, extras = (float(c[0]) for c in (cost.forward, cost.backward, cost.own, cost.saved_bytes))
    moved = sent = 0.0
    for row in network_traffic(network, plan):
        item = setting.gradient_bytes if row.itemsize < 0 else row.itemsize or setting.activation_bytes
        sent += row.repeats * row.num_elements * item
        if row.what == "edge":
            group = np.array([prices.mask(row.axes)])
            moved += row.repeats * float(prices.time(row.kind, group, np.array([row.num_elements * item]))[0])
    reductions = gathers = optimizer = state = 0.0
    for column in _parameters(network, plan, setting, prices):
        own_times = parameter_times(column, setting, prices)
        reductions += float(own_times.reductions[0])
        gathers += float(own_times.gathers[0])
        optimizer += float(own_times.optimizer[0])
        state += float(parameter_bytes(column, setting, prices)[0])
    shown = float(exposed_time(reductions=reductions, gathers=gathers, forward=forward, backward=backward, setting=setting))
    parts_of_step = {
        "forward": times * forward,
        "backward": times * backward,
        "operator_collectives": times * own,
        "redistributions": times * moved,
        "parameter_collectives": times * shown,
        "optimizer": times * optimizer,
        "step_constant": setting.profile.step_time_constant,
    }
    memory = {
        "parameters_and_state": state,
        "saved_activations": shared_saved_bytes(network, plan, setting) + extras,
        "context": machine.context_bytes,
    }
    memory["total"] = sum(memory.values())
    return NetworkPrediction(
        plan=plan,
        step_time=sum(parts_of_step.values()),
        parts=parts_of_step,
        memory=memory,
        memory_capacity=machine.memory_capacity,
        memory_usable=machine.memory_usable,
        memory_headroom=memory_headroom,
        sent_bytes=times * sent,
        rests_on=machine.rests_on,
    )


def _parameters(network: Graph, plan: NetworkPlan, setting: StepSetting, prices: MeshPrices) -> list[ParameterColumns]:
    """Every parameter as its first reader holds it, its gradient partial where any reader leaves it so."""
    found = []
    layers = network.layer_parameters
    for tensor, reading in network.readers().items():
        if network.tensors[tensor].role is not TensorRole.PARAMETER:
            continue
        layouts, partial = [], frozenset[str]()
        for index, position in reading:
            operator = network.operators[index]
            sharding = plan.shardings[operator.name]
            layouts.append(input_layout(sharding, operator.inputs[position]))
            partial |= gradient_layout(sharding, operator.inputs[position]).partial
        found.append(
            ParameterColumns(
                elements=np.array([elements_of(network.tensors[tensor].shape, layouts[0], plan)]),
                groups=np.array([prices.mask(partial)]),
                unit=parameter_unit(network, network.operators[reading[0][0]], tensor, setting, layers),
            )
        )
    return found


def shared_saved_bytes(network: Graph, plan: NetworkPlan, setting: StepSetting) -> float:
    """Of tensors, what one microbatch keeps for backward on one rank. [byte]

    A tensor that its producer keeps, or that is held and that a reader keeps, is kept there; a reader that needs it in another layout keeps
    a copy of its own.
    """
    kept: dict[tuple[str, Layout], float] = {}
    copies = 0.0
    for operator in network.operators:
        sharding = plan.shardings[operator.name]
        for position in saved_inputs(operator):
            operand = operator.inputs[position]
            shape = network.tensors[operand.tensor].shape
            needed = input_layout(sharding, operand)
            at_hand = plan.held[operand.tensor].layout if operand.tensor in plan.held else needed
            kept[operand.tensor, at_hand] = elements_of(shape, at_hand, plan)
            if needed != at_hand:
                copies += elements_of(shape, needed, plan)
        if saves_output(operator):
            shape = network.tensors[operator.output.tensor].shape
            kept[operator.output.tensor, output_layout(operator, sharding)] = elements_of(shape, output_layout(operator, sharding), plan)
    return (sum(kept.values()) + copies) * setting.activation_bytes
