"""Random legal plans of a network, and tiny versions of the built-in ones."""

from __future__ import annotations

import random
from math import prod

from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.parallel.algebra.sharding import Held, Sharding, gradient_layout, input_layout
from perfmodel.parallel.per_operator.assignment import check_assignment, divides
from perfmodel.parallel.per_operator.mesh import MeshAxis
from perfmodel.parallel.plan import Plan
from perfmodel.workload.graph import Graph, Operator, TensorRole
from perfmodel.workload.networks import load_network
from tests.network_plans import network_plan

TWO = (MeshAxis(name="p", size=2, tier=0),)
FOUR = (MeshAxis(name="a", size=2, tier=1), MeshAxis(name="b", size=2, tier=0))

#: Name -> sizes; a name may have a version after a colon.
TINY = {
    "alexnet": dict(batch=4, image=67, filters=(4, 8, 8, 8, 4), hidden=8, classes=8),
    "resnet50": dict(batch=4, image=32, blocks=(1, 1, 1, 1), width=4, classes=8, synchronised=True),
    "resnet50:shares": dict(batch=8, image=32, blocks=(1, 1), width=4, classes=8),
    "densenet121": dict(batch=4, image=32, blocks=(2, 2), growth=4, classes=8, synchronised=True),
    "inception3": dict(batch=4, image=75, width_divisor=16, classes=8, synchronised=True),
    "rnnlm": dict(batch=4, seq_len=3, embedding=8, hidden=8, layers=2, vocabulary=10),
    "transformer": dict(batch=4, seq_len=4, layers=1, hidden=8, heads=4, head_dim=4, intermediate=16, vocabulary=10),
    "bert-large": dict(batch=4, seq_len=4, layers=1, hidden=8, heads=4, intermediate=16, vocabulary=10, positions=4),
    "vit-large": dict(batch=4, image=8, patch=2, layers=1, hidden=8, heads=4, intermediate=16, classes=8),
    "dlrm": dict(batch=8, dense=4, rows=(10, 7), bags=(3, 1), features=8, bottom=(16,), top=(16, 8)),
    "gpt2": dict(batch=4, seq_len=4, layers=1, hidden=16, heads=4, kv_heads=4, head_dim=4, intermediate=16, vocabulary=10),
    "gpt2:unfused": dict(
        batch=4, seq_len=4, layers=1, hidden=16, heads=4, kv_heads=4, head_dim=4, intermediate=16, vocabulary=10, fused_attention=False
    ),
    "llama-3-8b": dict(batch=4, seq_len=4, layers=1, hidden=16, heads=8, kv_heads=4, head_dim=4, intermediate=16, vocabulary=10),
    "gemma-2-9b": dict(batch=4, seq_len=4, layers=2, hidden=16, heads=4, kv_heads=2, head_dim=4, intermediate=16, vocabulary=10),
    "falcon-7b": dict(batch=4, seq_len=4, layers=1, hidden=16, heads=4, kv_heads=1, head_dim=4, intermediate=16, vocabulary=10),
}


def tiny_network(name: str, **changes: object) -> Graph:
    return load_network(name.partition(":")[0], **{**TINY[name], **changes})  # type: ignore[arg-type]


def reaches_too_far(operator: Operator, network: Graph, dim: str, parts: int) -> bool:
    """Whether a share would be smaller than the halo that it sends."""
    for collective in operator.traffic:
        if collective.kind is CollectiveKind.SEND_RECV and collective.over == (dim,):
            operand = operator.inputs[0]
            size = network.tensors[operand.tensor].shape[operand.dims.index(dim)]
            if size // parts < collective.extent[0][0]:
                return True
    return False


def random_plan(network: Graph, axes: tuple[MeshAxis, ...], seed: int, *, use: float = 0.85) -> Plan:
    """Each axis on a random dim that it may cut, or on none; shared tensors in the layout of one of their readers."""
    generator = random.Random(seed)
    sizes = {axis.name: axis.size for axis in axes}
    layouts: dict[str, tuple[tuple[str, ...], ...]] = {}
    shardings: dict[str, Sharding] = {}
    for operator in network.operators:
        chosen: dict[str, list[str]] = {}
        fixed: set[str] = set()
        for operand in operator.inputs:
            if operand.tensor in layouts:  # a parameter that is read already
                for dim, cuts in zip(operand.dims, layouts[operand.tensor], strict=True):
                    if dim:
                        chosen[dim] = list(cuts)
                        fixed.add(dim)
        taken = {axis for names in chosen.values() for axis in names}
        for axis in axes:
            if axis.name in taken or generator.random() > use:
                continue
            legal = [
                dim
                for dim in operator.dims
                if dim not in fixed
                and divides(operator, network, dim, parts := axis.size * prod(sizes[name] for name in chosen.get(dim, [])))
                and not reaches_too_far(operator, network, dim, parts)
            ]
            if legal:
                chosen.setdefault(generator.choice(legal), []).append(axis.name)
        shardings[operator.name] = {dim: tuple(names) for dim, names in chosen.items() if names}
        for operand in operator.inputs:
            if network.tensors[operand.tensor].role is TensorRole.PARAMETER:
                layouts.setdefault(operand.tensor, input_layout(shardings[operator.name], operand).cuts)
    held = {}
    for tensor, reading in network.readers().items():
        if len(reading) > 1 and tensor in network.producers():
            wanted = [(network.operators[index], position) for index, position in reading]
            cuts = input_layout(shardings[(one := generator.choice(wanted))[0].name], one[0].inputs[one[1]]).cuts
            inside = {axis for names in cuts for axis in names}
            partial = {
                axis
                for operator, position in wanted
                for axis in gradient_layout(shardings[operator.name], operator.inputs[position]).partial - inside
                if generator.random() < 0.8
            }
            held[tensor] = Held(cuts=cuts, partial=frozenset(partial))
    plan = network_plan(network, axes, shardings, held, optimizer="adamw")
    check_assignment(plan.cuts, network, needs_held=True)
    return plan
