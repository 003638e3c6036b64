"""What the walks forward and backward through a layer share: tensors that are kept, and moments as sums of amounts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from perfmodel.parallel.algebra.derive import Amount, Derivation, amount_of
from perfmodel.workload.graph import Graph, Operand, Operator, Pass, Region, TensorRole

#: (amount in bytes, axes): counted only where one of the axes has more than one rank; no axes: always.
Term = tuple[Amount, frozenset[str]]
#: A sum of amounts with factors.
LiveBytes = dict[Term, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A tensor that autograd keeps from forward to backward, in one layout.

    holders         operators whose backward reads it
    is_dropped      made again by selective recomputation, from within the recomputed set
    is_made_twice   kept, and made a second time by selective recomputation
    """

    tensor: str
    region: str
    amount: Amount
    holders: tuple[str, ...]
    is_dropped: bool
    is_made_twice: bool


def operand_bytes(
    derivation: Derivation, op: Operator, operand: Operand, *, itemsize: float | None = None, is_expanded: bool = True
) -> Amount:
    """Bytes of an operand in the layout in which the operator holds it, with the tensor's itemsize unless another is given.

    Where the producer made copies of a dim that the operator reads as a whole one (key-value heads), a rank holds one of them; but a
    batched product reads one for each query head (`is_expanded`).
    """
    maker = derivation.graph.producer(operand.tensor)
    dims = operand.dims
    if maker is not None and is_streamed(op, operand):
        scale = derivation.graph.tensors[operand.tensor].itemsize if itemsize is None else itemsize
        return amount_of(maker, derivation.shardings[maker.name], maker.output.dims, scale=scale)
    if maker is not None and maker is not op and not (is_expanded and op.is_product):
        dims = tuple(name for name, made in zip(operand.dims, maker.output.dims, strict=True) if made not in maker.stretched)
    scale = derivation.graph.tensors[operand.tensor].itemsize if itemsize is None else itemsize
    return amount_of(op, derivation.shardings[op.name], dims, scale=scale)


BLOCKS = 2.0
"""Of keys, and of values, that a rank of a ring has in addition to its own: the one at work and the one that arrives."""


def is_streamed(op: Operator, operand: Operand) -> bool:
    """Whether the parts of other ranks pass by: the operator holds its own rank's."""
    return any(op.inputs[place] == operand for place in op.streamed)


def streamed_terms(derivation: Derivation, op: Operator) -> list[Term]:
    """Blocks of other ranks that an operator holds while it runs."""
    found = []
    for place in op.streamed:
        tensor = op.inputs[place].tensor
        axes = frozenset(axis for traffic in derivation.traffic_of(tensor, Pass.FORWARD) for axis in traffic.axes)
        if axes:
            found.append((operand_bytes(derivation, op, op.inputs[place]).scaled(BLOCKS), axes))
    return found


def entering(graph: Graph, region: Region) -> frozenset[str]:
    """What a block is given, and all that full recomputation keeps of it, by the name of what hands it on as it is if something does."""
    if region.is_repeated:
        return frozenset((region.carried,))
    found: set[str] = set()
    for op in graph.operators_of(region.name):
        is_place = op.passes_gradient and len(op.inputs) == 1 and not op.forward
        for operand in op.inputs:
            maker = graph.producer(operand.tensor)
            if maker is not None and maker.layer != region.name and graph.tensors[operand.tensor].role is TensorRole.ACTIVATION:
                found.add(op.output.tensor if is_place else operand.tensor)
    return frozenset(found)


def always(amounts: Iterable[Amount]) -> list[Term]:
    return [(amount, frozenset()) for amount in amounts]


def undominated(moments: list[LiveBytes]) -> list[LiveBytes]:
    """Return the moments that no other one exceeds in every term.

    Amounts that differ in their base only are one term, whose factor is in bytes.
    """
    units: dict[Term, int] = {}
    unit_of: dict[Term, int] = {}  # of each term: hashing and making its unit once costs less than in every moment
    rows: list[dict[int, float]] = []
    for moment in moments:
        row: dict[int, float] = {}
        for term, factor in moment.items():
            unit = unit_of.get(term)
            if unit is None:
                amount, axes = term
                unit = unit_of[term] = units.setdefault((amount.of_base(1.0), axes), len(units))
            row[unit] = row.get(unit, 0.0) + factor * term[0].base
        rows.append({unit: factor for unit, factor in row.items() if factor})
    factors = np.zeros((len(rows), len(units)))
    for place, row in enumerate(rows):
        factors[place, list(row)] = list(row.values())
    covers = [(factors[place] >= factors).all(axis=1).tolist() for place in range(len(rows))]

    found: list[int] = []
    for place in range(len(rows)):
        if any(covers[other][place] for other in found):
            continue
        found = [other for other in found if not covers[place][other]] + [place]
    terms = list(units)
    return [{terms[unit]: factor for unit, factor in rows[place].items()} for place in found]


def leading_to_exchanges(graph: Graph, operators: list[Operator]) -> set[str]:
    """What leads to a set of rows, or to what is read with one, and what makes one."""
    found: set[str] = set()
    wanted = {each.tensor for op in operators if any(graph.tensors[i.tensor].is_set for i in op.inputs) for each in op.inputs}
    for op in reversed(operators):
        if graph.tensors[op.output.tensor].is_set or op.output.tensor in wanted:
            found.add(op.name)
            wanted.update(each.tensor for each in op.inputs)
    return found


def coming_of_exchanges(graph: Graph, operators: list[Operator]) -> set[str]:
    """What comes of a set of rows."""
    found: set[str] = set()
    made: set[str] = set()
    for op in operators:
        if any(graph.tensors[each.tensor].is_set or each.tensor in made for each in op.inputs):
            found.add(op.name)
            made.add(op.output.tensor)
    return found


def before_dispatch(graph: Graph, operators: list[Operator]) -> set[str]:
    """What of a block makes the rows that go to experts, and does not come of them; nothing in a block without."""
    return leading_to_exchanges(graph, operators) - coming_of_exchanges(graph, operators)
