"""Toy networks and torch functions for the tests of network runs; the workers import these."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from perfmodel.execute.per_operator.context import OperatorContext
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.parallel.algebra.sharding import Held, Sharding
from perfmodel.parallel.per_operator.mesh import MeshAxis
from perfmodel.parallel.plan import Plan
from perfmodel.workload.graph import Graph, Operand, Operator
from perfmodel.workload.networks.builder import NetworkBuilder
from perfmodel.workload.work import OwnTraffic, Pass, Stream, passes
from tests.network_plans import network_plan


def two_layers(*, batch: int = 4, features: int = 8, hidden: int = 8, classes: int = 10) -> Graph:
    b = NetworkBuilder("two layers", batch=batch, source="a test")
    x = b.input("x", batch, features)
    x = b.pointwise("act", "gelu", (b.linear("up", x, "b d", "n d", "b n", bias=False, new={"n": hidden}), "b n"))
    logits = b.linear("down", x, "b n", "v n", "b v", bias=False, padded="v", new={"v": classes})
    b.cross_entropy(logits, "b v", "v")
    return b.build()


def two_convolutions(*, batch: int = 2, image: int = 8, window: int = 3, stride: int = 1) -> Graph:
    b = NetworkBuilder("two convolutions", batch=batch, source="a test")
    x = b.input("x", batch, 4, image, image)
    x = b.relu("relu1", b.convolution("conv1", x, 4, window, padding=window // 2))
    x = b.convolution("conv2", x, 8, window, stride=stride, padding=window // 2)
    x = b.pooling("pool", x, 3, stride=2 if image // stride % 4 == 0 else 1, padding=1)
    logits = b.linear("head", x, "b c h w", "v c h w", "b v", bias=False, new={"v": 4})
    b.cross_entropy(logits, "b v", "v")
    return b.build()


def plan_of(network: Graph, axes: tuple[MeshAxis, ...], shardings: dict[str, Sharding], held: dict[str, Held] | None = None) -> Plan:
    """Operators that are not named are whole."""
    every = {operator.name: shardings.get(operator.name, {}) for operator in network.operators}
    return network_plan(network, axes, every, held, optimizer="adamw")


def centring() -> Graph:
    """A kind that no table knows: each row less its mean, with a collective of its own in either pass where the row is cut."""
    b = NetworkBuilder("centring", batch=4, source="a test")
    x = b.linear("up", b.input("x", 4, 8), "b d", "n d", "b n", bias=False, new={"n": 8})
    entries = ((4, "b"), (8, "n"))
    operator = Operator(
        name="centre",
        kind="centre",
        dims={"b": 4, "n": 8},
        inputs=(Operand(tensor=x, dims=("b", "n")),),
        output=Operand(tensor="centre.out", dims=("b", "n")),
        forward=(Stream(kernel="default", elements=entries, accesses=passes(entries, entries)),),
        backward=(Stream(kernel="default", elements=entries, accesses=passes(entries, entries)),),
        traffic=tuple(OwnTraffic(kind=CollectiveKind.ALL_REDUCE, over=("n",), extent=((4, "b"),), phase=phase) for phase in Pass),
    )
    x = b.add(operator, 4, 8)
    b.cross_entropy(b.linear("down", x, "b n", "v n", "b v", bias=False, new={"v": 4}), "b v", "v")
    return b.build()


class _Centre(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, context):
        ctx.context = context
        return x - context.all_reduce(x.sum(-1, keepdim=True), ("n",), Pass.FORWARD) / context.sizes["n"]

    @staticmethod
    def backward(ctx, gradient):
        total = ctx.context.all_reduce(gradient.sum(-1, keepdim=True), ("n",), Pass.BACKWARD)
        return gradient - total / ctx.context.sizes["n"], None


def centre(inputs: Sequence[torch.Tensor], context: OperatorContext) -> torch.Tensor:
    return _Centre.apply(inputs[0], context)


def centre_by_share(inputs: Sequence[torch.Tensor], context: OperatorContext) -> torch.Tensor:
    """Wrong where the row is cut: the mean of the share, without a collective."""
    return inputs[0] - inputs[0].mean(-1, keepdim=True)


def centre_without_gradient(inputs: Sequence[torch.Tensor], context: OperatorContext) -> torch.Tensor:
    """Right forward; backward is that of the identity where the row is cut."""
    centred = centre(inputs, context)
    return centred if context.parts("n") == 1 else inputs[0] + (centred - inputs[0]).detach()


def gelu_with_a_reduction_too_many(inputs: Sequence[torch.Tensor], context: OperatorContext) -> torch.Tensor:
    context.all_reduce(torch.ones(3, dtype=inputs[0].dtype), ("n",), Pass.FORWARD)
    return torch.nn.functional.gelu(inputs[0])


def gelu_with_a_hidden_reduction(inputs: Sequence[torch.Tensor], context: OperatorContext) -> torch.Tensor:
    """A collective that is not on record: only torch's dispatcher sees it."""
    group = context.mesh.process_group(context.axes("n"))
    if group is not None:
        torch.distributed.all_reduce(torch.ones(3, dtype=inputs[0].dtype), group=group)
    return torch.nn.functional.gelu(inputs[0])


def gelu_that_fails_on_rank_one(inputs: Sequence[torch.Tensor], context: OperatorContext) -> torch.Tensor:
    if context.mesh.worker.rank == 1:
        raise RuntimeError("no room for the toy")
    return torch.nn.functional.gelu(inputs[0])
