"""Common parts of the forward and backward walks: saved tensors, and moments as sums of amounts."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from perfmodel.parallel.algebra.derive import Amount, ShardedGraph, amount_of, extent_amount
from perfmodel.parallel.algebra.sharding import input_layout
from perfmodel.workload.graph import Operand, Operator
from perfmodel.workload.work import Pass

#: Number in `Terms` of an amount in bytes. It counts if one of its axes has more than one rank, or if it has no axes.
Term = int
#: A sum of terms with factors.
LiveBytes = dict[Term, float]

NO_AXES = frozenset[str]()

BLOCKS = 2.0
"""Blocks of keys, and of values, that a rank of a ring holds in addition to its own: the one in use and the one being received."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """A tensor that autograd saves in forward for backward, in one layout.

    holders         operators whose backward reads it
    is_dropped      recomputed by selective recomputation, from within the recomputed set
    is_made_twice   saved, and computed a second time by selective recomputation
    """

    tensor: str
    region: str
    amount: Amount
    holders: tuple[str, ...]
    is_dropped: bool
    is_made_twice: bool


@dataclass(frozen=True, slots=True)
class Terms:
    """Numbered terms of a sharded graph: walks add and compare the numbers instead of formulas.

    amounts   (amount, axes) of each term
    units     for each term, the term of the same form with base 1, and its own base   [byte]
    """

    sharded: ShardedGraph
    amounts: list[tuple[Amount, frozenset[str]]] = field(default_factory=list)
    units: list[tuple[Term, float]] = field(default_factory=list)
    _numbers: dict[tuple[Amount, frozenset[str]], Term] = field(default_factory=dict)
    _operands: dict[tuple[str, Operand, bool], Amount] = field(default_factory=dict)

    def number(self, amount: Amount, axes: frozenset[str] = NO_AXES) -> Term:
        term = self._numbers.get((amount, axes))
        if term is None:
            term = self._numbers[amount, axes] = len(self.amounts)
            self.amounts.append((amount, axes))
            self.units.append((term, 1.0))
            if amount.base != 1.0 or amount.parts != 1:
                self.units[term] = self.number(replace(amount, base=1.0, parts=1), axes), amount.base / amount.parts
        return term

    def size(self, op: Operator, operand: Operand, *, is_expanded: bool = True) -> Amount:
        """Return `ShardedGraph.operand_bytes`, computed once for all walks."""
        key = op.name, operand, is_expanded
        if key not in self._operands:
            self._operands[key] = self.sharded.operand_bytes(op, operand, is_expanded=is_expanded)
        return self._operands[key]

    def streamed(self, op: Operator) -> list[Term]:
        """Return the blocks of other ranks that an operator holds while it runs."""
        terms = []
        for index in op.streamed:
            operand = op.inputs[index]
            axes = self.sharded.axes_of(operand.tensor, Pass.FORWARD)
            if axes:
                terms.append(self.number(self.size(op, operand).scaled(BLOCKS), axes))
        return terms

    def undominated(self, moments: Iterable[LiveBytes]) -> list[LiveBytes]:
        """Return the moments that no other moment covers term by term. Of equal moments the first is returned.

        Amounts that differ in their base only are one term, whose factor is in bytes.
        """
        summed: list[LiveBytes] = []
        columns: dict[Term, int] = {}
        for live in moments:
            total: LiveBytes = {}
            for term, factor in live.items():
                unit, base = self.units[term]
                total[unit] = total.get(unit, 0.0) + factor * base
            moment: LiveBytes = {}
            for term, factor in total.items():
                if factor:
                    moment[term] = factor
                    columns.setdefault(term, len(columns))
            summed.append(moment)
        factors = np.zeros((len(summed), len(columns)))
        for row, moment in enumerate(summed):
            for term, factor in moment.items():
                factors[row, columns[term]] = factor
        covers = (factors[:, None] >= factors).all(axis=-1)
        is_covered = (covers & ~covers.T | np.triu(covers & covers.T, k=1)).any(axis=0)
        return [summed[row] for row in np.flatnonzero(~is_covered)]


# --- saved tensors ----------------------------------------------------------------------------------------------------


def kept_tensors(sharded: ShardedGraph, regathers: Set[tuple[str, str]], core: Set[str], *, alone: Set[str]) -> list[SavedTensor]:
    """Return the saved tensors, each once in each layout.

    A recomputed group is a function under a checkpoint: its outputs are saved, because they are read outside. Operators that are recomputed
    one by one (`alone`, by name: torch's selective checkpointing) run again for every consumer of their outputs.
    """
    graph, shardings = sharded.graph, sharded.shardings
    saved_tensors: dict[tuple[str, object], SavedTensor] = {}
    for op in graph.operators:
        for number, saved in enumerate(op.saved):
            in_core, itemsize = op.name in core, graph.itemsize(op, saved)
            new = partial(SavedTensor, region=op.layer, holders=(op.name,))
            if saved.of is None:
                amount = extent_amount(op, shardings[op.name], saved.extent, scale=itemsize)
                saved_tensors[op.name, number] = new(tensor=op.name, amount=amount, is_dropped=in_core, is_made_twice=False)
                continue
            operand = op.operands[saved.of]
            tensor, maker = operand.tensor, graph.producer(operand.tensor)
            itemsize *= op.parts.get(tensor, 1.0)
            if maker is not None and (tensor, op.name) in regathers:
                amount = amount_of(maker, shardings[maker.name], maker.output.dims, scale=itemsize)
                layout = sharded.left[tensor].cuts
            else:
                amount = sharded.operand_bytes(op, operand, itemsize=itemsize, is_expanded=tensor not in op.parts)
                layout = input_layout(shardings[op.name], operand).cuts
            made_in_core = maker is not None and maker.name in core
            is_dropped = made_in_core and (in_core or (maker is not None and maker.name in alone))
            before = saved_tensors.get((tensor, layout))
            if before is not None:
                is_dropped = before.is_dropped and is_dropped
                is_made_twice = made_in_core and not is_dropped and (in_core or not core.isdisjoint(before.holders))
                holders, is_made_twice = (*before.holders, op.name), before.is_made_twice or is_made_twice
                saved_tensors[tensor, layout] = replace(before, holders=holders, is_dropped=is_dropped, is_made_twice=is_made_twice)
                continue
            is_made_twice = made_in_core and in_core and not is_dropped
            if in_core and not made_in_core and op.is_product:
                # the copy for each query head is recomputed from the one for each key-value head, which stays saved
                single = sharded.operand_bytes(op, operand, itemsize=itemsize, is_expanded=False)
                if single.base < amount.base:
                    more = amount.scaled((amount.base - single.base) / amount.base)
                    saved_tensors[tensor, layout] = new(tensor=tensor, amount=single, is_dropped=is_dropped, is_made_twice=True)
                    saved_tensors[op.name, number] = new(tensor=tensor, amount=more, is_dropped=True, is_made_twice=False)
                    continue
            saved_tensors[tensor, layout] = new(tensor=tensor, amount=amount, is_dropped=is_dropped, is_made_twice=is_made_twice)
    return list(saved_tensors.values())
