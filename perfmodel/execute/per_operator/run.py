"""Correctness check of a network plan against one process, and timing of several plans. Imports torch in the workers only.

A run counts only if its loss and every gradient equal those of one process, and if it issues the traffic of each operator that
`step_traffic` predicts. Torch's dispatcher is counted independently, so that the recorded traffic is the issued one.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from perfmodel.execute.launch.launch import WorkerGroup, workers_of
from perfmodel.execute.launch.processor_use import processor_use
from perfmodel.execute.launch.rank_results import TOLERANCE, IssuedTraffic, RankCheck, communication_times, slowest_times, worst_error
from perfmodel.execute.per_operator.options import NetworkOptions
from perfmodel.execute.per_operator.padding import padded_network
from perfmodel.execute.per_operator.refuse import check_runnable
from perfmodel.execute.runner import num_devices, pick_device
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.dtypes import itemsize
from perfmodel.foundation.errors import InputError, RunError
from perfmodel.parallel.per_operator.measurement import NetworkCheck, NetworkMeasurement
from perfmodel.parallel.per_operator.mesh import STAGES
from perfmodel.parallel.per_operator.parameters import step_traffic
from perfmodel.parallel.per_operator.traffic import NetworkTraffic
from perfmodel.parallel.plan import Plan
from perfmodel.parallel.results import interquartile_range
from perfmodel.workload.graph import Graph, TensorRole

#: Largest relative error that counts as round-off, by dtype. Measured errors are a hundred times smaller. In the plan's own precision (""),
#: which may be bf16, errors of 3 % of a gradient were measured.
TOLERANCES = {"float64": 1e-9, "float32": TOLERANCE, "": 0.1}


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementBytes:
    """Bytes per element that a collective moves in a run. `uses_declared_sizes`: element sizes declared by operators apply."""

    activation: float
    weight: float
    gradient: float
    uses_declared_sizes: bool = True

    @classmethod
    def of(cls, plan: Plan, dtype: str = "") -> ElementBytes:
        """Return the sizes in a run in one torch dtype, or in the plan's precision if `dtype` is ""."""
        if dtype:
            size = 8.0 if dtype == "float64" else 4.0
            return cls(activation=size, weight=size, gradient=size, uses_declared_sizes=False)
        policy = plan.job.policy
        return cls(
            activation=float(itemsize(policy.compute)),
            weight=float(itemsize(policy.parameter)),
            gradient=float(itemsize(policy.gradient_reduce)),
        )

    def size(self, row: NetworkTraffic) -> float:
        if row.what in ("gradient", "weights", "sum"):
            return self.gradient if row.what == "gradient" else self.weight
        return row.itemsize if self.uses_declared_sizes and row.itemsize > 0 else self.activation


_CHECK = ("perfmodel.execute.per_operator.worker", "check_on_rank")
_MEASURE = ("perfmodel.execute.per_operator.worker", "measure_on_rank")

#: Default options of checks and of timed runs.
CHECKED = NetworkOptions()
TIMED = NetworkOptions(learning_rate=1e-3)


def check_network_plan(
    network: Graph,
    plan: Plan,
    options: NetworkOptions = CHECKED,
    *,
    device: str = "auto",
    hang_timeout: float = 60.0,
    group: WorkerGroup | None = None,
) -> NetworkCheck:
    """Run the plan and compare loss, gradients and traffic with the expected ones; raise RunError if they differ.

    options   losses of all steps are compared, gradients and traffic of the first
    group     a running WorkerGroup of the right size to use
    """
    dtype = options.dtype
    if dtype not in TOLERANCES:
        raise InputError(f"dtype={dtype}: is not one that a run is compared in; use {' or '.join(filter(None, TOLERANCES))}")
    if options.steps < 1:
        raise InputError(f"steps={options.steps}: must be at least 1; use 1")
    if options.compares_outputs and plan.cuts.stages:
        raise InputError("compares_outputs=yes: is for plans of one stage; leave it out")
    _check(network, plan, group, options)
    device = group.device if group is not None else pick_device(device, plan.num_chips)
    _check_memory(plan.num_chips, device)
    with workers_of(group, plan.num_chips, device=device, hang_timeout=hang_timeout) as workers:
        results = workers.call(_CHECK, network, plan, options)
    return assemble_check(network, plan, results, dtype)


def assemble_check(network: Graph, plan: Plan, results: Sequence[RankCheck], dtype: str) -> NetworkCheck:
    losses = _worst([result.loss_errors for result in results], "the loss of", dtype)
    gradients = _worst([result.gradient_errors for result in results], "the gradient of", dtype)
    outputs = _worst([result.output_errors for result in results], "the output", dtype)
    traffic = compare_traffic(network, plan, [result.issued for result in results], ElementBytes.of(plan, dtype))
    checked = {name for result in results for name in result.gradient_errors}
    trained = [tensor.name for tensor in network.parameters if tensor.has_gradient and tensor.name in network.readers()]
    if lost := [name for name in trained if name not in checked]:
        raise RunError(f"network check: no rank has the gradient of {', '.join(lost)}")
    return NetworkCheck(
        plan=plan,
        loss=results[0].losses[0],
        loss_error=losses,
        gradient_error=gradients,
        output_error=outputs,
        traffic=traffic,
    )


def _worst(errors: Sequence[Mapping[str, float]], what: str, dtype: str) -> float:
    """Return the largest error on any rank; nan if there is none. Raise RunError if it exceeds the tolerance."""

    def sentence(name: str, error: float, others: int) -> str:
        more = f", and {others} more" if others else ""
        allowed = f"{TOLERANCES[dtype]:.0e}"
        return f"network check: {what} {name} differs from one process by {error:.1e} of its size (allowed {allowed}){more}"

    return worst_error(errors, TOLERANCES[dtype], sentence)


def _expected(network: Graph, plan: Plan, stage: int) -> Counter[NetworkTraffic]:
    """Return the collectives that a rank of a pipeline must issue: `step_traffic` of its stages, evenly sharded, without axes of size 1."""
    sizes = {axis.name: axis.size for axis in plan.cuts.axes} | {STAGES: plan.layout.pp}
    expected: Counter[NetworkTraffic] = Counter()
    padded = padded_network(network, plan)
    for row in (row for number in range(stage, plan.cuts.num_stages, plan.layout.pp) for row in step_traffic(padded, plan, number)):
        axes = frozenset(axis for axis in row.axes if sizes[axis] > 1)
        if axes and row.num_elements and row.repeats:
            expected[replace(row, axes=axes, repeats=1)] += row.repeats
    return expected


def compare_traffic(network: Graph, plan: Plan, ranks: Sequence[IssuedTraffic], sizes: ElementBytes) -> tuple[NetworkTraffic, ...]:
    """Return the traffic that the ranks of each stage issued, with element sizes. Raise RunError unless it equals the plan's traffic
    and the counts of torch's dispatcher."""
    issued: Counter[NetworkTraffic] = Counter()
    for stage in range(plan.layout.pp):
        first = stage * plan.cuts.num_chips
        issued += _compare_stage(network, plan, stage, dict(enumerate(ranks[first : first + plan.cuts.num_chips], first)), sizes)
    return tuple(replace(row, repeats=count) for row, count in issued.items())


def _compare_stage(
    network: Graph, plan: Plan, stage: int, ranks: Mapping[int, IssuedTraffic], sizes: ElementBytes
) -> Counter[NetworkTraffic]:
    # indices computed by operators are not part of a plan's traffic; additional outputs are moved with the first output of their operator
    outside_plan = {operator.inputs[0].tensor for operator in network.operators if operator.kind == "part"}
    outside_plan |= {name for name in network.producers() if network.tensors[name].role is TensorRole.INDEX}
    issued_outside = {row: count for row, count in next(iter(ranks.values())).record.items() if row.tensor in outside_plan}
    rows = {row: count for row, count in _expected(network, plan, stage).items() if row.tensor not in outside_plan}
    priced: Counter[NetworkTraffic] = Counter()
    expected: Counter[NetworkTraffic] = Counter()  # in elements
    for row, count in (*rows.items(), *issued_outside.items()):
        priced[replace(row, itemsize=sizes.size(row))] += count
        expected[replace(row, itemsize=0.0)] += count
    for number, rank in ranks.items():
        missing, extra = expected - rank.record, rank.record - expected
        if missing or extra:
            raise RunError(
                f"network check: rank {number} issued other collectives than the plan's traffic: "
                f"missing {_describe(missing)}; too many {_describe(extra)}"
            )
    order = [*(axis.name for axis in plan.cuts.axes), STAGES]
    noted: dict[tuple[str, str], tuple[int, float]] = {}
    for row, count in priced.items():
        key = (str(row.kind), "+".join(sorted(row.axes, key=order.index)))
        old = noted.get(key, (0, 0.0))
        noted[key] = (old[0] + count, old[1] + count * row.num_elements * row.itemsize)
    due = sent = 0.0
    for number, rank in ranks.items():
        tally = rank.tally
        padding: Counter[tuple[str, str]] = Counter()
        for (kind, over, what), more in rank.padding.items():
            size = {"gradient": sizes.gradient, "weights": sizes.weight}.get(what, sizes.activation)
            padding[kind, "+".join(sorted(over, key=order.index))] += more * size  # type: ignore[assignment]
        sent_to_next = tally.num_bytes.get(("send", STAGES), 0.0) / sizes.activation
        if sent_to_next != rank.sent_elements:
            raise RunError(
                f"network check: stage {stage + 1}: on rank {number} torch sent {sent_to_next:.0f} elements to its neighbours, due were "
                f"{rank.sent_elements}"
            )
        sent += sum(value for (kind, axes), value in tally.num_bytes.items() if kind == "send" and axes != STAGES)
        counts = {key: value for key, value in tally.counts.items() if key[0] not in ("send", "recv")}
        for key in dict.fromkeys([*noted, *counts]):
            count, num_bytes = noted.get(key, (0, 0.0))
            num_bytes += padding[key]
            if key[0] == CollectiveKind.SEND_RECV:
                # the ends of a line of n ranks send in one direction only: on average (n - 1) / n of what an inner rank sends
                ways = plan.cuts.size(frozenset(key[1].split("+")))
                due += num_bytes * (ways - 1) / ways
                continue
            issued = tally.num_bytes.get(key, 0.0)
            if counts.get(key, 0) != count or abs(issued - num_bytes) > 0.5:
                raise RunError(
                    f"network check: {key[0]} over {key[1]}: on rank {number} torch issued {counts.get(key, 0)} of {issued:.0f} bytes, "
                    f"noted were {count} of {num_bytes:.0f}"
                )
    if abs(sent - due) > 0.5:
        raise RunError(f"network check: halos: torch sent {sent:.0f} bytes, noted were {due:.0f}")
    return priced


def _describe(rows: Counter[NetworkTraffic]) -> str:
    if not rows:
        return "none"
    row, count = next(iter(rows.items()))
    more = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
    return (
        f"{count} {row.kind} over {'*'.join(sorted(row.axes))} of {row.num_elements:.0f} elements "
        f"({row.what} {row.tensor} at {row.operator}, {row.phase}){more}"
    )


def measure_network_plans(
    network: Graph,
    plans: Sequence[Plan],
    options: NetworkOptions = TIMED,
    *,
    steps: int = 10,
    rounds: int = 2,
    warmup: int = 1,
    check_gradients: bool = True,
    device: str = "auto",
    hang_timeout: float = 120.0,
    group: WorkerGroup | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> tuple[NetworkMeasurement, ...]:
    """Time plans of one network in turn, A B C A B C, each in its own precision, so that disturbances affect all plans equally.

    steps, rounds    timed steps of each plan, spread over up to `rounds` rounds; `warmup` steps before each
    check_gradients  first compare gradients and traffic with one process, as `check_network_plan` does, in float32
    """
    if not plans:
        raise InputError("plans=(): must be at least one; give a plan")
    if steps < 1 or warmup < 0:
        raise InputError(f"steps={steps}, warmup={warmup}: steps must be at least 1 and warmup not negative; use --steps 10")
    if rounds < 1:
        raise InputError(f"rounds={rounds}: must be at least 1; use 2")
    rounds = min(rounds, steps)
    sizes = {plan.num_chips for plan in plans}
    if len(sizes) > 1:
        raise InputError(f"plans: are for {sorted(sizes)} chips: plans of one run must have the same number; measure them apart")
    timing = replace(options, dtype="", steps=steps, optimizer="")
    checking = replace(timing, dtype="float32", steps=1, optimizer=options.optimizer, learning_rate=0.0)  # no update
    errors = [float("nan")] * len(plans)
    device = group.device if group is not None else pick_device(device, plans[0].num_chips)
    _check_memory(plans[0].num_chips, device)
    for plan in plans:
        _check(network, plan, group, options)
    with workers_of(group, plans[0].num_chips, device=device, hang_timeout=hang_timeout, on_progress=on_progress) as workers:
        use = processor_use(workers.pids)
        for index, plan in enumerate(plans):
            if check_gradients:
                results = workers.call(_CHECK, network, plan, checking)
                errors[index] = assemble_check(network, plan, results, "float32").gradient_error
        ranks = workers.call(_MEASURE, network, tuple(plans), timing, warmup, rounds)
        busy_fraction = processor_use(workers.pids).others_since(use)
    measurements = []
    for index, plan in enumerate(plans):
        measured = [rank[0][index] for rank in ranks]
        times = slowest_times(measured)
        measurements.append(
            NetworkMeasurement(
                plan=plan,
                step_time=statistics.median(times),
                step_time_spread=interquartile_range(times),
                step_times=times,
                warmup=warmup,
                loss=sum(rank.first_loss_share for rank in measured),
                gradient_error=errors[index],
                traffic=compare_traffic(network, plan, [rank.issued for rank in measured], ElementBytes.of(plan)),
                device=device,
                chip=ranks[0][1],
                parts=communication_times(measured),
                memory_by_rank=tuple(rank.peak_memory for rank in measured),
                software=ranks[0][2],
                busy_fraction=busy_fraction,
            )
        )
    return tuple(measurements)


def _check_memory(num_ranks: int, device: str) -> None:
    most = num_devices(device)
    if num_ranks > most:
        raise InputError(f"chips={num_ranks}: this machine runs up to {most} ranks on {device}; use a plan for fewer")


def _check(network: Graph, plan: Plan, group: WorkerGroup | None, options: NetworkOptions) -> None:
    check_runnable(network, plan, options.functions if options.module is None else {operator.kind for operator in network.operators})
    if group is not None and group.num_ranks != plan.num_chips:
        raise InputError(f"chips={plan.num_chips}: the worker group has {group.num_ranks} ranks; use one of {plan.num_chips}")
