"""Figure 6 of the PaSE paper, predicted: step times of data parallelism, of the expert's strategy and of PaSE's, on its two clusters.

The programs of the paper ran on Mesh-TensorFlow, whose collectives are chains of copies and additions between neighbours, issued operator
by operator. One TensorFlow process drives all GPUs of a node, so an operator costs its host time once for each of them, and so does a hop.
There is no reduce-scatter: partial sums are reduced whole and sliced. Two reductions of gradients run side by side.

Four constants are fitted to the 80 points of figure 6 together (`FITTED`); all else is the cost model's, with the data sheets of the chips.

Sources: Elango, PaSE, IPDPS 2021; its programs (github.com/baidu-research/PaSE, benchmarks/: batches, `grpc+verbs`, plain SGD);
Mesh-TensorFlow, mesh_tensorflow/placement_mesh_impl.py (allreduce_ring, allconcat_ring) and ops.py (gather by one-hot product).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lab.pase.strategies import (
    Strategy,
    expert_strategy,
    fixed_strategies,
    is_recurrent,
    pase_strategies,
    with_one_hot_embeddings,
)
from perfmodel.cost.link_rates import DEFAULT_LINK_FRACTION
from perfmodel.cost.machine import Machine, resolve_machine
from perfmodel.cost.per_operator.operators import MeshPrices, StepSetting
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.dtypes import Dtype
from perfmodel.foundation.errors import bad_field
from perfmodel.frameworks.profile import load_profile
from perfmodel.hardware.calibration import SCALE_OUT, SCALE_UP, SPEC_SHEET, CollectiveModel, Provenance
from perfmodel.hardware.cluster import Cluster
from perfmodel.hardware.reader import load_cluster
from perfmodel.parallel.per_operator.mesh import mesh_axes
from perfmodel.planner.pase.graph import load_pase_graph
from perfmodel.planner.pase.search import run_pase
from perfmodel.planner.per_operator.search import Filter, NetworkPlanner
from perfmodel.planner.per_operator.space import Configurations, NetworkSpace, network_space
from perfmodel.planner.per_operator.strategies import data_parallel
from perfmodel.planner.per_operator.tables import TableMaker
from perfmodel.workload.graph import Graph
from perfmodel.workload.job import PRECISION_POLICIES, Optimizer, Precision
from perfmodel.workload.networks import load_network

FIGURE_NETWORKS = ("alexnet", "inception3", "rnnlm", "transformer")
FIGURE_CLUSTERS = ("pase-1080ti", "pase-2080ti")
FIGURE_DEVICES = (4, 8, 16, 32, 64)

#: Reductions of gradients that run at the same time: those of different tensors do not wait for each other.
REDUCTIONS_AT_ONCE = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureConstants:
    """Constants in neither the paper nor a data sheet, equal for every network, cluster, strategy and number of devices.

    operator_time         host time of one operator on one GPU                            [s]
    message_time          from one node to the next, for each hop of a chain              [s]
    staged_bandwidth      of a GPU whose copies go through host memory (2080 Ti)          [byte/s]
    infiniband_bandwidth  of a node; the paper does not state the rate                    [byte/s]
    """

    operator_time: float
    message_time: float
    staged_bandwidth: float
    infiniband_bandwidth: float


#: Fitted to figure 6's 80 points (mean error of the logarithm, right signs), then rounded. Fitted to three networks with their
#: placements held and tested on the fourth, in turn: median errors 8 % (expert) and 18 % (PaSE), 25 of 26 signs. 13 us is an
#: operator's way through TensorFlow's executor, 2.2 ms a message through its remote calls behind those of the node's other GPUs; 4
#: GB/s are what 40 or 56 Gbit/s leave, 2 GB/s an eighth of PCIe 3.0 x16.
FITTED = FigureConstants(operator_time=13e-6, message_time=2.2e-3, staged_bandwidth=2e9, infiniband_bandwidth=4e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class FigurePoint:
    """Step times of one network on `num_devices` devices of a cluster. [s]"""

    network: str
    cluster: str
    num_devices: int
    data_parallel: float
    expert: float
    pase: float

    @property
    def expert_speedup(self) -> float:
        return self.data_parallel / self.expert

    @property
    def pase_speedup(self) -> float:
        return self.data_parallel / self.pase


def figure_points(
    *,
    networks: Sequence[str] = FIGURE_NETWORKS,
    clusters: Sequence[str] = FIGURE_CLUSTERS,
    devices: Sequence[int] = FIGURE_DEVICES,
    constants: FigureConstants = FITTED,
) -> Iterator[FigurePoint]:
    """Yield each predicted point: networks outermost, clusters innermost."""
    _check(networks, clusters, devices)
    for name in networks:
        network = with_one_hot_embeddings(load_network(name))
        graph = load_pase_graph(name)
        for count in devices:
            run = run_pase(graph, count)
            space = network_space(network, mesh_axes(count, tuple(tier.size for tier in load_cluster(clusters[0]).tiers)))
            axes = space.axes
            for cluster in clusters:
                bench = _Bench(network, space, load_cluster(cluster).with_chips(count), constants)
                yield FigurePoint(
                    network=name,
                    cluster=cluster,
                    num_devices=count,
                    data_parallel=bench.step_time(Strategy(allowed=data_parallel(network))),
                    expert=bench.step_time(expert_strategy(network, axes)),
                    pase=min(bench.step_time(strategy) for strategy in pase_strategies(network, run, axes)),
                )


def predicted_time(
    network: Graph,
    *,
    cluster: str,
    num_devices: int,
    parts: Mapping[str, Mapping[str, int]],
    apart: int = 1,
    constants: FigureConstants = FITTED,
) -> float:
    """Return the step time for given parts of each dim by operator name, under the conditions of figure 6. [s]

    apart   LSTM layers that run at once, each on its own share of the devices
    """
    clustered = load_cluster(cluster).with_chips(num_devices)
    axes = mesh_axes(num_devices, tuple(tier.size for tier in clustered.tiers))
    network = with_one_hot_embeddings(network)
    bench = _Bench(network, network_space(network, axes), clustered, constants)
    return min(bench.step_time(strategy) for strategy in fixed_strategies(parts, axes, apart=apart))


def num_points(networks: Sequence[str], devices: Sequence[int]) -> int:
    """Return the number of points that `figure_points` yields on both clusters."""
    return len(networks) * len(devices) * len(FIGURE_CLUSTERS)


def _check(networks: Sequence[str], clusters: Sequence[str], devices: Sequence[int]) -> None:
    of_field = (("graph", networks, FIGURE_NETWORKS), ("cluster", clusters, FIGURE_CLUSTERS), ("devices", devices, FIGURE_DEVICES))
    for field, given, known in of_field:
        if not given:
            raise bad_field(field, "", "must name at least one", "leave it out for all of them")
        for value in given:
            if value not in known:
                raise bad_field(field, value, "is not in figure 6", f"use {', '.join(map(str, known))}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Priced:
    """A choice priced by the tables, without memory: the paper's runs have no memory limit."""

    choice: tuple[int, ...]
    step_time: float

    @property
    def memory(self) -> Mapping[str, float]:
        return {"total": 0.0}


class _Bench:
    """One network on one cluster."""

    def __init__(self, network: Graph, space: NetworkSpace, cluster: Cluster, constants: FigureConstants) -> None:
        self.network, self.space, self.cluster = network, space, cluster
        self.constants = constants
        self.machine = mesh_tensorflow_machine(cluster, constants)
        self.setting = StepSetting(
            policy=PRECISION_POLICIES[Precision.FP32], optimizer=Optimizer.SGD, profile=load_profile("mesh-tensorflow")
        )
        self.prices = MeshPrices(axes=space.axes, machine=self.machine)
        side_by_side = mesh_tensorflow_machine(cluster, constants, reductions_at_once=REDUCTIONS_AT_ONCE)
        self.gradient_prices = MeshPrices(axes=space.axes, machine=side_by_side)

    def step_time(self, strategy: Strategy) -> float:
        """Return the step time of the best placement of a strategy. [s]"""
        space = _restricted(self.space, strategy.allowed)
        maker = TableMaker(space, self.setting, self.prices, has_units=False)
        one_by_one = maker.build(self.setting)
        at_once = maker.reductions_at(self.gradient_prices)
        vertices = tuple(replace(v, reductions=concurrent) for v, concurrent in zip(one_by_one.vertices, at_once, strict=True))
        tables = replace(one_by_one, vertices=vertices)
        planner = NetworkPlanner(
            network=self.network,
            price=lambda choice: _Priced(choice=tuple(choice), step_time=one_by_one.step_time(choice, self.setting)),
            context_bytes=self.machine.memory.context_bytes,
            least_time=0.0,
            setting=self.setting,
            space=space,
            tables=tables,
            table_time=0.0,
        )
        best = planner.search().best
        choice = best.choice
        saved = sum(float(v.reductions[c] - concurrent[c]) for v, concurrent, c in zip(one_by_one.vertices, at_once, choice, strict=True))
        return best.step_time - saved - (self._layers_at_once(planner, best, strategy) if strategy.apart > 1 else 0.0)

    def _layers_at_once(self, planner: NetworkPlanner[_Priced], best: _Priced, strategy: Strategy) -> float:
        """Return the time that LSTM layers on separate devices save over a plan that repeats each layer on all shares of the devices. [s]

        A pipeline over time steps: l layers take (s + l - 1) / l instead of s steps each, less what they send each other every step.
        Each share of the devices reduces the gradients of its own layer.
        """
        choice = best.choice
        layers = [index for index, operator in enumerate(self.network.operators) if is_recurrent(operator)]
        columns = [(planner.tables.vertices[index], choice[index]) for index in layers]
        recurrences = [self.network.operators[index] for index in layers if self.network.operators[index].kind == "lstm"]
        steps = recurrences[0].dims["s"]
        share = (steps + strategy.apart - 1) / (strategy.apart * steps)
        running = sum(float(v.forward[c] + v.backward[c] + v.collectives[c]) for v, c in columns)
        updating = sum(float(v.reductions[c] + v.optimizer[c]) for v, c in columns)
        devices = self.cluster.num_chips / strategy.apart
        state = recurrences[0].dims["b"] * recurrences[0].dims["e"] * self.setting.activation_bytes / devices
        group = np.array([self.prices.mask((strategy.unused,))])
        send = float(self.prices.time(CollectiveKind.SEND_RECV, group, np.array([state]))[0])
        sends = 2.0 * steps * (strategy.apart - 1) * send
        return running * (1.0 - share) + updating * (1.0 - 1.0 / strategy.apart) - sends


def _restricted(space: NetworkSpace, allowed: Filter) -> NetworkSpace:
    """Return the space restricted to the configurations that a strategy allows, so that tables cover these only."""
    known: dict[object, Configurations] = {}
    operators = []
    for operator, rows in zip(space.network.operators, space.operators, strict=True):
        keep = allowed(operator, rows)
        if not keep.any():
            raise bad_field(f"strategy[{operator.name}]", "none", "no configuration is left", "the mesh may not divide its dims")
        key = id(rows), keep.tobytes()
        if key not in known:
            known[key] = Configurations(dims=rows.dims, masks=rows.masks[keep], parts=rows.parts[keep])
        operators.append(known[key])
    return replace(space, operators=tuple(operators))


def mesh_tensorflow_machine(cluster: Cluster, constants: FigureConstants = FITTED, *, reductions_at_once: float = 1.0) -> Machine:
    """Return a cluster of the paper under Mesh-TensorFlow: chains of hops, each issued by the host on every GPU of its node.

    reductions_at_once   all-reduces that wait for their messages together; their bytes still queue
    """
    gpus = min(cluster.num_chips, cluster.chips_per_node)
    inner, outer = cluster.tiers
    if inner.peer_to_peer:
        inner_fraction = DEFAULT_LINK_FRACTION
    else:
        inner_fraction = constants.staged_bandwidth / inner.link.bandwidth
    outer_fraction = constants.infiniband_bandwidth / cluster.chips_per_node * outer.oversubscription / outer.link.bandwidth
    tiers = {SCALE_UP: (gpus * constants.operator_time, inner_fraction), SCALE_OUT: (constants.message_time, outer_fraction)}
    collectives = {tier: _chains(hop, fraction, reductions_at_once) for tier, (hop, fraction) in tiers.items()}
    calibration = replace(
        SPEC_SHEET,
        name="mesh-tensorflow",
        chips=(cluster.chip.name,),
        provenance=Provenance.PRIOR,
        kernels=replace(SPEC_SHEET.kernels, collectives=collectives),
    )
    machine = resolve_machine(cluster, calibration, dtype=Dtype.FP32)
    return replace(machine, host=replace(machine.host, launch_time=gpus * constants.operator_time))


def _chains(hop_time: float, fraction: float, reductions_at_once: float) -> dict[CollectiveKind, CollectiveModel]:
    once = CollectiveModel(hop_time=hop_time, bandwidth_fraction=fraction)
    return {
        CollectiveKind.ALL_REDUCE: CollectiveModel(hop_time=2.0 * hop_time / reductions_at_once, bandwidth_fraction=fraction),
        # an all-reduce and a slice: the two passes of an all-reduce
        CollectiveKind.REDUCE_SCATTER: CollectiveModel(hop_time=2.0 * hop_time, bandwidth_fraction=fraction / 2.0),
        CollectiveKind.ALL_GATHER: once,
        CollectiveKind.ALL_TO_ALL: once,
        CollectiveKind.SEND_RECV: once,
    }
