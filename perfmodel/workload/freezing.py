"""A graph with trained and frozen parameters, and its reduced backward pass."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from perfmodel.workload.graph import Graph, Operator, TensorRole
from perfmodel.workload.work import Pass, Product, Stream, Work


def with_frozen(graph: Graph, trained: Collection[str]) -> Graph:
    """Return `graph` with only these parameters trained.

    A tensor has a gradient if it is trained or depends on a trained one. Work without a gradient leaves the backward pass: products for
    frozen weights, and everything before the first operator with a trained parameter. Tensors that only this work would read are not saved.
    """
    has = {tensor.name: tensor.name in trained for tensor in graph.parameters}
    # A repeated layer stands for runs that follow another run.
    carried = {repeat.carried for index, repeat in enumerate(graph.repeats) if index or repeat.count > 1}
    for operator in graph.operators:
        has[operator.output.tensor] = operator.output.tensor in carried or any(
            has.get(operand.tensor, False) for operand in operator.inputs
        )
    is_index = {name for name, tensor in graph.tensors.items() if tensor.role is TensorRole.INDEX}
    tensors = {
        name: tensor if name in is_index or has.get(name, False) else replace(tensor, has_gradient=False)
        for name, tensor in graph.tensors.items()
    }
    return replace(graph, operators=tuple(_without_gradients(operator, has, trained) for operator in graph.operators), tensors=tensors)


def _without_gradients(operator: Operator, has: Mapping[str, bool], trained: Collection[str]) -> Operator:
    """Return the operator with only the gradients that its inputs have."""
    if not has[operator.output.tensor]:
        traffic = tuple(collective for collective in operator.traffic if collective.phase is Pass.FORWARD)
        return replace(operator, backward=(), saved=(), scratch=(), traffic=traffic)
    without = {position for position, operand in enumerate(operator.inputs) if not has.get(operand.tensor, False)}
    if not without:
        return operator
    if operator.passes_gradient:
        # Its backward work is for parameters, which do not get the gradient passed on.
        return operator if any(operand.tensor in trained for operand in operator.inputs) else replace(operator, backward=())
    backward: list[Work] = []
    for work in operator.backward:
        if isinstance(work, Product) and work.gradient_of in without:
            continue
        if isinstance(work, Stream):
            gradients = [data for data in work.accesses if data.is_gradient and data.of is not None and data.of < len(operator.inputs)]
            needless = [data for data in gradients if data.of in without]
            if needless and len(needless) == len(gradients):
                continue
            if needless:
                work = replace(work, accesses=tuple(data for data in work.accesses if data not in needless))
        backward.append(work)
    saved = operator.saved
    products = [work for work in operator.backward if isinstance(work, Product) and work.gradient_of is not None]
    if products and len(products) == len(operator.backward):
        # Each remaining product computes the gradient of one input from the others, and reads only these.
        left = {work.gradient_of for work in backward if isinstance(work, Product)}
        saved = tuple(data for data in saved if data.of is None or left - {data.of})
    return replace(operator, backward=tuple(backward), saved=saved)


__all__ = ["with_frozen"]
