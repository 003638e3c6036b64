"""The regions of a graph are its layers, whatever they are: blocks of two kinds in turn are priced as the same blocks written out one by
one, and a network without blocks goes the same road."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from perfmodel.cost.assemble import exposed_each_microbatch, parameter_time
from perfmodel.cost.assigned import assigned_grid
from perfmodel.cost.evaluate import microbatch_cost
from perfmodel.cost.machine import resolve_machine
from perfmodel.cost.memory.moments import ActivationTerms, MemoryTerms, activation_terms, rank_moments
from perfmodel.cost.parameters import compile_parameters, parameter_cost
from perfmodel.cost.program import compile_program
from perfmodel.cost.resolve import choose_calibration
from perfmodel.cost.stages import Stages, region_sum, slowest_stage, stages_of
from perfmodel.cost.step import region_times
from perfmodel.cost.update import Bytes, ParameterTerms, element_bytes, held_elements, parameter_terms
from perfmodel.foundation.dtypes import Dtype
from perfmodel.frameworks.profile import ExecutionProfile
from perfmodel.hardware.reader import load_cluster
from perfmodel.parallel.algebra.derive import derive
from perfmodel.parallel.algebra.rules import apply_rules, rule_set_of
from perfmodel.parallel.choices import PipelineSchedule, Recompute
from perfmodel.parallel.grid import make_grid
from perfmodel.parallel.layout import DEFAULT_ORDER
from perfmodel.parallel.per_operator.mesh import mesh_axes
from perfmodel.planner.per_operator.space import network_space
from perfmodel.workload.graph import Graph, Operator, Repeat
from perfmodel.workload.job import PRECISION_POLICIES, Optimizer, Precision
from perfmodel.workload.networks import load_network
from perfmodel.workload.transformer import build_graph, decoder_regions
from tests.cost.jobs import estimator_of, make_job, make_model, profile_of

NUM_TURNS = 3
ALONE = {"schedule": PipelineSchedule.ONE_F_ONE_B, "num_ranks": 1.0}


def decoder(**changes: object) -> Graph:
    model = make_model(tie_word_embeddings=False, **changes)
    return build_graph(model, seq_len=256, attention="unfused", dropout=True, activation_bytes=2.0, parameter_bytes=2.0)


KINDS = {"plain": decoder(), "gated": decoder(gated_mlp=True, intermediate_size=512)}


def stacked(blocks: Sequence[tuple[str, str, int]], *, turn: str) -> Graph:
    """A decoder of these blocks: (name, kind, how often)."""
    base = KINDS["plain"]
    operators = [op for op in base.operators if op.layer == "embedding"]
    tensors = dict(base.tensors)
    x = operators[-1].output.tensor

    def renamed(op: Operator, names: Mapping[str, str]) -> Operator:
        inputs = tuple(replace(operand, tensor=names.get(operand.tensor, operand.tensor)) for operand in op.inputs)
        output = replace(op.output, tensor=names.get(op.output.tensor, op.output.tensor))
        return replace(op, inputs=inputs, output=output)

    for name, kind, _ in blocks:
        graph = KINDS[kind]
        members = [op for op in graph.operators if op.layer == "layer"]
        names = {operand.tensor: f"{name}.{operand.tensor}" for op in members for operand in op.operands} | {members[0].inputs[0].tensor: x}
        for old, new in names.items():
            bias_of = graph.tensors[old].bias_of
            tensors.setdefault(new, replace(graph.tensors[old], name=new, bias_of=bias_of and f"{name}.{bias_of}"))
        operators += [replace(renamed(op, names), name=f"{name}.{op.name}", layer=name) for op in members]
        x = operators[-1].output.tensor
    operators += [renamed(op, {"block_output.out": x}) for op in base.operators if op.layer == "head"]
    read = {operand.tensor for op in operators for operand in op.operands}
    return replace(
        base,
        operators=tuple(operators),
        tensors={name: tensor for name, tensor in tensors.items() if name in read},
        repeats=tuple(Repeat(layer=name, count=count, carried=f"{name}.block_input.out", turn=turn) for name, _, count in blocks),
    )


FOLDED = stacked([("plain", "plain", NUM_TURNS), ("gated", "gated", NUM_TURNS)], turn="both")
WRITTEN_OUT = stacked([(f"{kind}{i}", kind, 1) for i in range(NUM_TURNS) for kind in ("plain", "gated")], turn="")


class Priced:
    """A graph on four nodes of four chips, tensor-parallel within a node."""

    def __init__(self, graph: Graph, profile_name: str, recompute: Recompute, zero: int) -> None:
        estimator = estimator_of(make_job(make_model()), profile=profile_name)
        self.profile, self.sizes = estimator.profile, estimator.programs.sizes
        derivation = derive(graph, apply_rules(graph, rule_set_of("megatron-sp")))
        self.program = compile_program(derivation, self.profile, recompute_operators=("attention_core",), attention_kernel="unfused")
        degrees = {"tp": 4, "dp_replicate" if zero == 0 else "dp_shard": 4}
        grid = make_grid(
            {axis: [degrees.get(axis, 1)] for axis in DEFAULT_ORDER},
            [DEFAULT_ORDER],
            tier_sizes=estimator.machine.tier_sizes,
            num_key_value_heads=8,
        )
        tp = grid.degree["tp"]
        micro = microbatch_cost(self.program, estimator.machine, grid, np.array([2.0]), 1.0)
        self.times = region_times(micro, self.profile, recompute, tp)
        self.kept = activation_terms(micro, recompute, self.profile, tp)
        compiled = compile_parameters(
            self.program.parameters,
            self.program.regions,
            self.profile,
            zero=zero,
            pipelined=False,
            parameter_bytes=self.sizes.gathered,
            gradient_bytes=self.sizes.gradient.reduced,
        )
        self.parameters = parameter_terms(compiled, parameter_cost(compiled, self.profile, estimator.machine, grid))
        self.stages = stages_of(self.program.regions, (2 * NUM_TURNS,), 1)

    def totals(self) -> dict[str, float]:
        """Return the sums over all regions."""
        p, times, stages = self.parameters, self.times, self.stages
        by_region = {"forward": times.forward, "backward": times.backward, "kept": self.kept.kept, "publish": p.publish}
        for name, events in (("gather", p.gather_forward), ("gather again", p.gather_backward), ("reduce", p.reduce), ("sum", p.tp_sum)):
            by_region |= {f"{name} {period}": values for period, values in events.items()}
        sums = {name: region_sum(values, stages.total_sum) for name, values in by_region.items()}
        sums["elements"] = held_elements(p, stages, sharded=False)[0]
        sums["shards"] = held_elements(p, stages, sharded=True)[0]
        return {name: float(np.asarray(value).reshape(-1)[0]) for name, value in sums.items()}

    def exposed(self) -> list[float]:
        waits = exposed_each_microbatch(self.parameters, self.times, self.stages, **ALONE, profile=self.profile)
        shown = parameter_time(self.parameters, self.times, self.stages, waits, num_microbatches=4.0, profile=self.profile)
        return [float(np.asarray(value).reshape(-1)[0]) for value in shown]

    def most(self) -> float:
        """Bytes of its largest moment."""
        of = memory_terms(self.kept, self.parameters, self.stages, self.sizes, self.profile, num_microbatches=4.0, activation_bytes=2.0)
        moments = rank_moments(of, self.stages.num_ranks - 1)
        return float(slowest_stage([moment.total for moment in moments])[0])


def memory_terms(
    activations: ActivationTerms, terms: ParameterTerms, stages: Stages, sizes: Bytes, profile: ExecutionProfile, **more: float
) -> MemoryTerms:
    """Return the terms of a rank alone, without static memory and tensor parallelism."""
    alone = {"static": [], "num_replicas": 1.0, "tp": 1.0, "is_scattered": False, "factor": 1.0, "outside": 0.0}
    return MemoryTerms(activations=activations, terms=terms, stages=stages, sizes=sizes, profile=profile, **alone, **more)


def test_the_regions_of_a_decoder_are_known_without_its_graph() -> None:
    assert KINDS["plain"].regions == decoder_regions(make_model())


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("recompute", Recompute)
@pytest.mark.parametrize("profile", ["megatron", "torch-fsdp2"])
@pytest.mark.slow
def test_two_kinds_of_blocks_in_turn_are_the_same_blocks_written_out(profile: str, recompute: Recompute, zero: int) -> None:
    folded, written_out = (Priced(graph, profile, recompute, zero) for graph in (FOLDED, WRITTEN_OUT))
    assert [region.name for region in folded.program.regions] == ["embedding", "plain", "gated", "head"]
    assert len(written_out.program.regions) == 2 + 2 * NUM_TURNS
    wanted = written_out.totals()
    assert folded.totals() == pytest.approx(wanted, rel=1e-12)
    assert wanted["kept"] > 0.0
    assert folded.exposed() == pytest.approx(written_out.exposed(), rel=1e-12)
    assert folded.most() == pytest.approx(written_out.most(), rel=1e-12)


def test_a_network_with_shardings_of_its_own_takes_the_same_path() -> None:
    """AlexNet: eight layers that run once, on a mesh of its own; no blocks, no boundary, a batch that is known."""
    cluster = load_cluster("pase-1080ti").with_chips(16)
    machine = resolve_machine(cluster, choose_calibration(cluster.chip), dtype=Dtype.FP32)
    profile, policy = profile_of("megatron"), PRECISION_POLICIES[Precision.FP32]
    network = load_network("alexnet", batch=32)
    axes = mesh_axes(16, machine.tier_sizes)
    space = network_space(network, axes, most_dims=2)
    rng = random.Random(3)
    plan = space.assignment([rng.randrange(count) for count in space.num_configurations])
    graph = replace(network, tensors={name: replace(tensor, itemsize=4.0) for name, tensor in network.tensors.items()})
    derivation = derive(graph, plan.shardings, held=plan.held, axes=[axis.name for axis in axes])
    program = compile_program(derivation, profile, recompute_operators=(), attention_kernel="flash")
    assert [region.name for region in program.regions] == ["conv1", "conv2", "conv3", "conv4", "conv5", "fc6", "fc7", "fc8"]
    grid, one = assigned_grid(plan, 1, machine.tier_sizes), np.ones(1)
    micro = microbatch_cost(program, machine, grid, one, 1.0)
    assert micro.boundary.tolist() == [0.0]
    times, kept = region_times(micro, profile, Recompute.NONE, one), activation_terms(micro, Recompute.NONE, profile, one)
    assert all(float(time[0]) > 0.0 for time in (*times.forward, *times.backward))
    stages = stages_of(program.regions, (0,), 1)
    compiled = compile_parameters(
        program.parameters, program.regions, profile, zero=0, pipelined=False, parameter_bytes=4.0, gradient_bytes=4.0
    )
    terms = parameter_terms(compiled, parameter_cost(compiled, profile, machine, grid))
    elements = sum(parameter.elements.on(plan.size) for parameter in program.parameters)
    assert float(held_elements(terms, stages, sharded=False)[0][0]) == elements
    sizes = element_bytes(policy, Optimizer.MOMENTUM, profile)
    moments = rank_moments(memory_terms(kept, terms, stages, sizes, profile, num_microbatches=1.0, activation_bytes=4.0), 0)
    assert [moment.name for moment in moments] == [f"backward of the {region.name}" for region in reversed(program.regions[:-1])]
    # when a layer runs backward, what those after it kept has gone
    gone = np.cumsum([float(kept_bytes[0]) for kept_bytes in reversed(kept.kept[1:])])
    assert [-float(moment.freed[0]) for moment in moments] == pytest.approx(gone.tolist(), rel=1e-12)
