"""A graph of which some parameters are trained and the others frozen: the backward pass that is left."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from perfmodel.workload.graph import Data, Graph, Operator, Pass, Product, Stream, TensorRole, Work


def with_frozen(graph: Graph, trained: Collection[str]) -> Graph:
    """`graph` where of its parameters these alone are trained.

    A tensor has a gradient if it is one of them or depends on one. What makes no gradient is not in the backward pass: no product for a
    frozen weight, nothing at all before the first operator that reads a trained parameter; and what only that would read is not kept.
    """
    has = {tensor.name: tensor.name in trained for tensor in graph.parameters}
    # a repeated layer stands for runs that follow another one
    carried = {repeat.carried for place, repeat in enumerate(graph.repeats) if place or repeat.count > 1}
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
    """The operator with the gradients alone that its inputs have."""
    if not has[operator.output.tensor]:
        traffic = tuple(own for own in operator.traffic if own.phase is Pass.FORWARD)
        return replace(operator, backward=(), saved=(), scratch=(), traffic=traffic)
    without = {place for place, operand in enumerate(operator.inputs) if not has.get(operand.tensor, False)}
    if not without:
        return operator
    if operator.passes_gradient:
        # what it does in backward is for what it does not hand the gradient on to: parameters
        return operator if any(operand.tensor in trained for operand in operator.inputs) else replace(operator, backward=())
    backward = tuple(work for each in operator.backward if (work := _work(each, len(operator.inputs), without)) is not None)
    return replace(operator, backward=backward, saved=_saved(operator, backward))


def _work(work: Work, num_inputs: int, without: Collection[int]) -> Work | None:
    """Work that is left; None if it only made unneeded gradients."""
    match work:
        case Product():
            return None if work.gradient_of in without else work
        case Stream():
            made = [data for data in work.accesses if data.is_gradient and data.of is not None and data.of < num_inputs]
            needless = [data for data in made if data.of in without]
            if needless and len(needless) == len(made):
                return None
            return replace(work, accesses=tuple(data for data in work.accesses if data not in needless)) if needless else work
    return work


def _saved(operator: Operator, backward: tuple[Work, ...]) -> tuple[Data, ...]:
    """Each of several products makes the gradient of one input from the others."""
    made = [work.gradient_of for work in operator.backward if isinstance(work, Product) and work.gradient_of is not None]
    if not made or len(made) < len(operator.backward):
        return operator.saved
    left = {work.gradient_of for work in backward if isinstance(work, Product)}
    return tuple(data for data in operator.saved if data.of is None or left - {data.of})


__all__ = ["with_frozen"]
