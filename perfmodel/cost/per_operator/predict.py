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
    StepSetting,
    compile_operators,
    mesh_grid,
    operator_cost,
    parameter_share,
    saved_inputs,
    saves_output,
    sized,
)
from perfmodel.cost.per_operator.overlap import exposed_time
from perfmodel.cost.per_operator.parameters import parameter_times
from perfmodel.foundation.memory_room import DEFAULT_HEADROOM, Verdict, verdict
from perfmodel.parallel.algebra.derive import Derivation, tensor_amount
from perfmodel.parallel.algebra.sharding import Layout
from perfmodel.parallel.habits import with_habits
from perfmodel.parallel.per_operator.plan import NetworkPlan, check_plan
from perfmodel.parallel.per_operator.traffic import derive_network, traffic_on
from perfmodel.workload.graph import Graph, Operand, Operator


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

    Work is that of the framework's kernels; what is kept that of each operator by itself, as moments of memory are not told apart.

    step = m (forward + backward + own collectives + redistributions) + what shows of parameter collectives + optimizer + constant
    """
    check_plan(plan, network)
    prices = MeshPrices(axes=plan.axes, machine=machine)
    times = setting.num_microbatches
    derivation = derive_network(sized(network, setting), plan)
    run = with_habits(derivation, setting.profile)
    own_data = (
        (as_run, plan.shardings[op.name], [data for data in op.saved if data.of is None])
        for op, as_run in zip(network.operators, run.graph.operators, strict=True)
    )
    grid = mesh_grid(plan.axes, len(machine.tier_sizes))
    cost = operator_cost(compile_operators(run.graph, own_data, setting), grid, machine)
    forward, backward, own, extras = (float(c[0]) for c in (cost.forward, cost.backward, cost.own, cost.saved_bytes))
    moved = sent = 0.0
    for row in traffic_on(plan, derivation):
        item = setting.sizes.reduced if row.itemsize < 0 else row.itemsize or setting.activation_bytes
        sent += row.repeats * row.num_elements * item
        if row.what == "edge":
            group = np.array([prices.mask(row.axes)])
            moved += row.repeats * float(prices.time(row.kind, group, np.array([row.num_elements * item]))[0])
    held = parameter_times(derivation.parameters, _shares(network, derivation, setting), setting, machine, grid)
    reductions, gathers, published, optimizer, state = (
        float(column[0]) for column in (held.reductions, held.gathers, held.published, held.optimizer, held.held_bytes)
    )
    shown = float(exposed_time(reductions=reductions, gathers=gathers, forward=forward, backward=backward, setting=setting))
    parts_of_step = {
        "forward": times * forward,
        "backward": times * backward,
        "operator_collectives": times * own,
        "redistributions": times * moved,
        "parameter_collectives": times * (shown + published),
        "optimizer": times * optimizer,
        "step_constant": setting.profile.step_time_constant,
    }
    memory = {
        "parameters_and_state": state,
        "saved_activations": shared_saved_bytes(derivation, plan, setting) + extras,
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


def _shares(network: Graph, derivation: Derivation, setting: StepSetting) -> list[float]:
    """Of each parameter, of its unit."""
    layers, readers = network.layer_parameters, network.readers()
    first = [network.operators[readers[parameter.name][0][0]] for parameter in derivation.parameters]
    return [parameter_share(network, op, each.name, setting, layers) for op, each in zip(first, derivation.parameters, strict=True)]


def shared_saved_bytes(derivation: Derivation, plan: NetworkPlan, setting: StepSetting) -> float:
    """Of tensors, what one microbatch keeps for backward on one rank. [byte]

    A tensor that its producer keeps, or that is held and that a reader keeps, is kept there; a reader that needs it in another layout keeps
    a copy of its own.
    """
    network = derivation.graph
    kept: dict[tuple[str, Layout], float] = {}
    copies = 0.0

    def elements(operator: Operator, operand: Operand, layout: Layout) -> float:
        return tensor_amount(operator, operand, network.tensors[operand.tensor], layout.cuts).on(plan.size)

    for operator in network.operators:
        for position in saved_inputs(operator):
            operand = operator.inputs[position]
            needed, held = derivation.needed[operator.name, position], plan.held.get(operand.tensor)
            own = elements(operator, operand, needed)
            if held is None or held.layout == needed:
                kept[operand.tensor, needed] = own
            else:
                maker = network.operators[network.producers()[operand.tensor]]
                kept[operand.tensor, held.layout] = elements(maker, maker.output, held.layout)
                copies += own
        if saves_output(operator):
            left = derivation.left[operator.output.tensor]
            kept[operator.output.tensor, left] = elements(operator, operator.output, left)
    return (sum(kept.values()) + copies) * setting.activation_bytes
