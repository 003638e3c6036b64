"""Conversion of a decoder's plan by rules to a plan with a sharding per operator, over the mesh of its layout.

The executor of decoders shards operators as torch's modules can (`parallel/executable.py`). The interpreter of graphs shards them by any
rules; `interpreter_reason` returns the parts of a plan that it does not support.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd

from perfmodel.foundation.errors import InputError
from perfmodel.foundation.session import session_cache
from perfmodel.parallel.algebra.sharding import AXIS_PARTS, Held, Sharding, gradient_layout, input_layout, output_layout
from perfmodel.parallel.choices import AttentionKernel, Recompute
from perfmodel.parallel.layout import DEFAULT_ORDER
from perfmodel.parallel.per_operator.assignment import Assignment, check_assignment
from perfmodel.parallel.per_operator.mesh import MeshAxis
from perfmodel.parallel.plan import DEFAULT_RECOMPUTE_OPERATORS, Plan, assigned_plan
from perfmodel.workload.adapters import with_training
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.graph import Graph
from perfmodel.workload.job import Precision
from perfmodel.workload.network_model import NetworkModel
from perfmodel.workload.networks.language_model import transformer_network
from perfmodel.workload.training import FULL_TRAINING, Training


def interpreter_reason(plan: Plan) -> str:
    """Return why the interpreter cannot run a plan of a decoder, as the condition under which it can and a remedy; "" if it can."""
    layout, model = plan.layout, plan.job.transformer
    for is_so, only, remedy in (
        (plan.job.precision is Precision.FP16_MIXED, "without the loss scaling that fp16-mixed needs", "precision=bf16-mixed"),
        (
            plan.recompute is Recompute.SELECTIVE and plan.recompute_operators != DEFAULT_RECOMPUTE_OPERATORS,
            f"with {','.join(DEFAULT_RECOMPUTE_OPERATORS)} recomputed or whole layers",
            "recompute=full",
        ),
        (layout.pp > 1 and plan.order[-1] != "pp", "with stages one after another", f"order={'-'.join(DEFAULT_ORDER)}"),
        (plan.schedule.splits_backward, "with backward passes as a whole", "schedule=1f1b"),
        (plan.schedule.is_simulated, "with schedules by name", "schedule=1f1b"),
        (0 in plan.stage_layers[1:-1], "with a layer on every inner stage", "even stages"),
    ):
        if is_so:
            return f"{only}; use {remedy}"
    stages = layout.pp * plan.virtual_stages
    one = plan
    if len(model.layer_kinds) == 1:
        one = replace(plan, job=replace(plan.job, model=model.with_layers(stages)), stage_layers=(1,) * stages)
    try:
        graph = graph_of(one)
        check_assignment(plan_by_rules(one, graph).cuts, graph, needs_held=True)
    except InputError as error:
        return f"where they divide: {error}"
    return ""


def graph_of(plan: Plan) -> Graph:
    """Return every operator of every layer, for one micro-batch of all data-parallel ranks together."""
    batch = plan.micro_batch * plan.layout.data_parallel
    return _graph(plan.job.transformer, batch, plan.job.seq_len, plan.job.train, fused_attention=plan.attention is AttentionKernel.FLASH)


@session_cache(maxsize=8)
def _graph(model: TransformerConfig, batch: int, seq_len: int, train: Training, *, fused_attention: bool) -> Graph:
    network = transformer_network(model, batch=batch, seq_len=seq_len, fused_attention=fused_attention, shares_queries=True)
    return with_training(network, train)


def plan_by_rules(plan: Plan, graph: Graph) -> Plan:
    """Return the plan with its rules as a sharding per operator.

    A tensor with several readers is held in the layout that all of them need, or in that of its producer if they differ.
    """
    layout = plan.layout
    tp_kv = gcd(layout.tp, plan.job.transformer.num_key_value_heads)
    sizes = {"dp_replicate": layout.dp_replicate, "dp_shard": layout.dp_shard, "cp": layout.cp, "tp_kv": tp_kv, "tp_q": layout.tp // tp_kv}
    inside = [part for axis in reversed(plan.order) if axis != "pp" for part in AXIS_PARTS.get(axis, (axis,))]
    axes = tuple(MeshAxis(name=name, size=sizes[name], tier=0) for name in inside if sizes[name] > 1)
    names = {axis.name for axis in axes}
    shardings: dict[str, Sharding] = {}
    for operator in graph.operators:
        cuts = {dim: plan.rules.cut(operator.name_in_layer, operator.logical_name(dim)) for dim in operator.dims}
        present = {dim: tuple(axis for axis in cut if axis in names) for dim, cut in cuts.items()}
        shardings[operator.name] = {dim: cut for dim, cut in present.items() if cut}
    held = {}
    for tensor in graph.shared():
        producer, readers = graph.operators[graph.producers()[tensor]], graph.consumers(tensor)
        wanted = {input_layout(shardings[operator.name], operator.inputs[index]).cuts for operator, index in readers}
        common = wanted.pop() if len(wanted) == 1 else output_layout(producer, shardings[producer.name]).cuts
        gradients = (gradient_layout(shardings[operator.name], operator.inputs[index]) for operator, index in readers)
        partial = frozenset(axis for gradient in gradients for axis in gradient.partial) - {axis for cut in common for axis in cut}
        held[tensor] = Held(cuts=common, partial=partial)
    assignment = Assignment(axes=axes, shardings=shardings, held=held, stages=_stages(plan, graph))
    model = NetworkModel(name=graph.name)
    return assigned_plan(
        replace(plan.job, model=model, global_batch=graph.batch * plan.num_microbatches, seq_len=1, train=FULL_TRAINING),
        cluster=plan.cluster,
        assignment=assignment,
        micro_batch=graph.batch,
        zero=int(plan.zero),
        recompute=plan.recompute,
        recompute_operators=plan.recompute_operators,
        schedule=plan.schedule,
        virtual_stages=plan.virtual_stages,
        profile=plan.profile,
    )


def _stages(plan: Plan, graph: Graph) -> tuple[str, ...]:
    """Return the first operator of each stage."""
    if plan.layout.pp == 1:
        return ()
    first: dict[str, str] = {}
    for operator in graph.operators:
        first.setdefault(operator.layer, operator.name)
    layers = [name for layer, name in first.items() if layer in graph.blocks]
    head = first[graph.operators[-1].layer]
    starts = [sum(plan.stage_layers[:stage]) for stage in range(1, len(plan.stage_layers))]
    return (graph.operators[0].name, *(layers[start] if start < len(layers) else head for start in starts))
