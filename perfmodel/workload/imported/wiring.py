"""Connections of the operators in an imported graph: products before and after each, and the weights of each product."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass, replace
from math import prod
from typing import Any

from perfmodel.foundation.errors import InputError
from perfmodel.workload.imported.graph import ImportedGraph, ImportedKind, ImportedOperand, ImportedVertex

#: Operators that pass parameters on: casts and activations, parts and rows.
_HANDS_ON = (ImportedKind.ELEMENTWISE, ImportedKind.SPLIT, ImportedKind.REARRANGE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrices:
    """Weights of a product: `number` matrices of `in_features` x `out_features`, of which each input entry is multiplied by one.

    parameter  the parameter that they are, or are parts of
    lead       size of its first position, and the role of that: "number", "in_features" or "out_features"; 0 for a plain matrix
    """

    parameter: str
    number: int
    in_features: int
    out_features: int
    has_bias: bool
    lead: int = 0
    lead_is: str = ""

    def for_experts(self, number: int) -> Matrices:
        """Return the matrices with the first position as experts, where no other tensor of the product has it: [t, h] * [e, h, f] -> [t, e,
        f].
        """
        if self.number > 1 or self.lead != number or self.lead_is not in ("in_features", "out_features"):
            return self
        shared = {self.lead_is: getattr(self, self.lead_is) // number}
        return replace(self, number=number, lead_is="number", **shared)  # type: ignore[arg-type]

    @property
    def text(self) -> str:
        return f"{self.in_features} x {self.out_features}"


@dataclass(slots=True)
class Wiring:
    """Connections of a graph.

    into      producer of each input of a vertex, by its number; out_of: readers of a vertex
    products  products of activations with weights or with each other; not those of positions, which depend on no parameter, and those that
              combine selected values
    """

    graph: ImportedGraph
    into: list[dict[int, int]] = field(init=False)
    out_of: list[list[int]] = field(init=False)
    products: set[int] = field(init=False, default_factory=set)
    _matrices: dict[int, Matrices | None] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.into, self.out_of = [], [[] for _ in self.graph.vertices]
        for at, vertex in enumerate(self.graph.vertices):
            self.into.append({number: operand.producer[0] for number, operand in enumerate(vertex.inputs) if operand.producer})
            for producer in self.into[at].values():
                self.out_of[producer].append(at)
        trained: list[bool] = []
        for at, vertex in enumerate(self.graph.vertices):
            producers = self.into[at].values()
            trained.append(any(trained[producer] for producer in producers) or any(operand.parameter for operand in vertex.inputs))
            if vertex.kind is ImportedKind.MATMUL and trained[at] and (self.matrices(at) is not None or not self._follows_choice(at)):
                self.products.add(at)

    def vertex(self, at: int) -> ImportedVertex:
        return self.graph.vertices[at]

    def refused(self, at: int, rule: str) -> InputError:
        vertex = self.vertex(at)
        module = f" of {vertex.module}" if vertex.module else ""
        return InputError(f"model={self.graph.name}: operator {vertex.name}{module} {rule}")

    # --- paths ------------------------------------------------------------------------------------------------------------------------

    def between(self, at: int, *, first: int = 0) -> set[int]:
        """Return a vertex and its predecessors, back to products (included) or to those before `first`."""
        reached, seen = [at], {at}
        while reached:
            current = reached.pop()
            if current in self.products:
                continue
            for producer in self.into[current].values():
                if producer not in seen and producer >= first:
                    seen.add(producer)
                    reached.append(producer)
        return seen

    def products_before(self, at: int, *, first: int = 0) -> set[int]:
        """Return the last products on all paths to a vertex, which may be one itself."""
        return self.between(at, first=first) & self.products

    def products_into(self, product: int, *, first: int = 0) -> set[int]:
        """Return the last products on all paths to the activations that a product multiplies with its weights."""
        given = self.given(product)
        return {before for at in given for before in self.products_before(at, first=first)} if given else set()

    def _follows_choice(self, at: int) -> bool:
        """Return whether entries are selected between the last products and a vertex."""
        return any(is_choice(self.vertex(index)) for producer in self.into[at].values() for index in self.between(producer))

    def product_after(self, at: int) -> int | None:
        """Return the first product on any path from a vertex."""
        reached, seen, products = [at], {at}, set()
        while reached:
            for consumer in self.out_of[reached.pop()]:
                if consumer in self.products:
                    products.add(consumer)
                elif consumer not in seen:
                    seen.add(consumer)
                    reached.append(consumer)
        return min(products, default=None)

    def given(self, product: int) -> list[int]:
        """Return the producers of the activations that a product multiplies with its weights."""
        inputs = self.vertex(product).inputs
        producers = self.into[product].items()
        return [at for number, at in producers if not inputs[number].is_index and self._stored(product, number) is None]

    def source(self, product: int) -> int:
        """Return the producer of a product's input; the module's first input if that is a constant."""
        return next(iter(self.given(product)), 0)

    # --- weights ----------------------------------------------------------------------------------------------------------------------

    def matrices(self, product: int) -> Matrices | None:
        """Return the weights of a product; None for a product of two activations."""
        if product not in self._matrices:
            self._matrices[product] = self._read(product)
        return self._matrices[product]

    def weights(self, product: int) -> Matrices:
        """Return the weights of a product that has some."""
        matrices = self.matrices(product)
        assert matrices is not None
        return matrices

    def _read(self, product: int) -> Matrices | None:
        vertex = self.vertex(product)
        stored = {number: operand for number in range(len(vertex.inputs)) if (operand := self._stored(product, number)) is not None}
        number = next((number for number, operand in stored.items() if len(operand.shape) > 1), None)
        if number is None:
            return None
        parameter, read = stored[number], vertex.inputs[number]
        given = {dim for index, operand in enumerate(vertex.inputs) if index not in stored for dim in operand.dims if dim}
        out = set(vertex.outputs[0].dims) - {""}
        sizes = {"in_features": 1, "out_features": 1, "number": 1}
        roles = []
        for dim, size in zip(read.dims, read.shape, strict=True):
            role = "number" if not dim or (dim in given and dim in out) else "out_features" if dim in out else "in_features"
            sizes[role] *= size
            roles.append(role)
        entries = prod(parameter.shape)
        if parameter is not read and entries != prod(read.shape):  # rows of the parameter, selected by index
            rows, width = parameter.shape[0], sizes["in_features"]
            sizes = {"number": rows, "in_features": width, "out_features": max(1, entries // (rows * width))}
            roles = ["number"]
        lead = parameter.shape[0] if len(parameter.shape) > 2 else 0
        return Matrices(
            parameter=parameter.parameter,
            number=sizes["number"],
            in_features=sizes["in_features"],
            out_features=sizes["out_features"],
            has_bias=self._has_bias(product, sizes["number"] * sizes["out_features"]),
            lead=lead,
            lead_is=roles[0] if lead else "",
        )

    def _stored(self, at: int, number: int) -> ImportedOperand | None:
        """Return the parameter that an input is, or that it is computed from without other trained tensors."""
        operand = self.vertex(at).inputs[number]
        if operand.parameter:
            return operand
        producer = self.into[at].get(number)
        if producer is None or self.vertex(producer).kind not in _HANDS_ON:
            return None
        inputs = [index for index, other in enumerate(self.vertex(producer).inputs) if not other.is_index]
        return self._stored(producer, inputs[0]) if len(inputs) == 1 else None

    def _has_bias(self, product: int, entries: int) -> bool:
        """Return whether the product has a bias: a vector that it adds, or for several matrices a parameter added to all outputs."""
        vertex = self.vertex(product)
        if any(operand.parameter and len(operand.shape) == 1 for operand in vertex.inputs):
            return True
        added = [
            stored
            for consumer in self.out_of[product]
            if self.vertex(consumer).kind is ImportedKind.ELEMENTWISE
            for number in range(len(self.vertex(consumer).inputs))
            if (stored := self._stored(consumer, number)) is not None
        ]
        return any(len(operand.shape) > 1 and prod(operand.shape) == entries for operand in added)


def is_choice(vertex: ImportedVertex) -> bool:
    """Return whether an operator selects the largest entries and returns their indices."""
    return vertex.function in ("topk", "argmax", "max") and any(output.is_index for output in vertex.outputs)


def difference(one: Any, other: Any) -> list[str]:
    """Return the differences of two records and of their nested records: "width 128, not 96"."""
    differences: list[str] = []
    for field_of in fields(one):
        name, old, new = field_of.name, getattr(one, field_of.name), getattr(other, field_of.name)
        if is_dataclass(old) and is_dataclass(new):
            differences += difference(old, new)
        elif old != new:
            differences.append(f"{name} {new}, not {old}" if not (is_dataclass(old) or is_dataclass(new)) else f"{name} in one of them")
    return differences


__all__ = ["Matrices", "Wiring", "difference", "is_choice"]
