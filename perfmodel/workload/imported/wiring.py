"""How the operators of an imported graph hang together: which products come before and after each, and which weights each product reads."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass, replace
from math import prod
from typing import Any

from perfmodel.foundation.errors import InputError
from perfmodel.workload.imported.graph import ImportedGraph, ImportedKind, ImportedOperand, ImportedVertex

#: Operators that hand parameters on: casts and activations of them are none, parts and rows of them are.
_HANDS_ON = (ImportedKind.ELEMENTWISE, ImportedKind.SPLIT, ImportedKind.REARRANGE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrices:
    """Weights of a product: `number` matrices of `taken` rows and `made` columns, of which each entry meets one.

    parameter  the parameter that they are, or are parts of
    lead       entries of its first position, and what these are: "number", "taken" or "made"; 0 of a plain matrix
    """

    parameter: str
    number: int
    taken: int
    made: int
    has_bias: bool
    lead: int = 0
    lead_is: str = ""

    def for_experts(self, number: int) -> Matrices:
        """Where the first position counts experts, although no other tensor of the product has it: [t, h] * [e, h, f] -> [t, e, f]."""
        if self.number > 1 or self.lead != number or self.lead_is not in ("taken", "made"):
            return self
        shared = {self.lead_is: getattr(self, self.lead_is) // number}
        return replace(self, number=number, lead_is="number", **shared)  # type: ignore[arg-type]

    @property
    def text(self) -> str:
        return f"{self.taken} x {self.made}"


@dataclass(slots=True)
class Wiring:
    """`products`: those of activations with weights or with each other. Products of positions, which no parameter reaches, are none, and
    none are those by which choices are put together."""

    graph: ImportedGraph
    into: dict[int, dict[int, int]] = field(init=False)
    out_of: dict[int, list[int]] = field(init=False)
    products: set[int] = field(init=False, default_factory=set)
    _matrices: dict[int, Matrices | None] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.into, self.out_of = {}, {}
        for edge in self.graph.edges:
            self.into.setdefault(edge.consumer, {})[edge.input] = edge.producer
            self.out_of.setdefault(edge.producer, []).append(edge.consumer)
        trained: list[bool] = []
        for at, vertex in enumerate(self.graph.vertices):
            producers = self.into.get(at, {}).values()
            trained.append(any(trained[producer] for producer in producers) or any(each.parameter for each in vertex.inputs))
            if vertex.kind is ImportedKind.MATMUL and trained[at] and not self._combines(at):
                self.products.add(at)

    def _combines(self, at: int) -> bool:
        """Whether a product of activations puts together by weights what was chosen."""
        before = {each for producer in self.into.get(at, {}).values() for each in self.between(producer)}
        return self.matrices(at) is None and any(is_choice(self.vertex(each)) for each in before)

    def vertex(self, at: int) -> ImportedVertex:
        return self.graph.vertices[at]

    def refused(self, at: int, rule: str) -> InputError:
        vertex = self.vertex(at)
        place = f" of {vertex.module}" if vertex.module else ""
        return InputError(f"model={self.graph.name}: operator {vertex.name}{place} {rule}")

    # --- ways -------------------------------------------------------------------------------------------------------------------------

    def between(self, at: int, *, first: int = 0) -> set[int]:
        """A vertex and those before it, back to products (included) or to those before `first`."""
        reached, seen = [at], {at}
        while reached:
            here = reached.pop()
            if here in self.products:
                continue
            for producer in self.into.get(here, {}).values():
                if producer not in seen and producer >= first:
                    seen.add(producer)
                    reached.append(producer)
        return seen

    def products_before(self, at: int, *, first: int = 0) -> set[int]:
        """The last products on all ways to a vertex, which may be one itself."""
        return self.between(at, first=first) & self.products

    def products_into(self, product: int, *, first: int = 0) -> set[int]:
        """The last products on all ways to what a product multiplies with its weights."""
        given = self.given(product)
        return {each for at in given for each in self.products_before(at, first=first)} if given else set()

    def product_after(self, at: int) -> int | None:
        """The first product on any way from a vertex."""
        reached, seen, found = [at], {at}, set()
        while reached:
            for consumer in self.out_of.get(reached.pop(), ()):
                if consumer in self.products:
                    found.add(consumer)
                elif consumer not in seen:
                    seen.add(consumer)
                    reached.append(consumer)
        return min(found, default=None)

    def given(self, product: int) -> list[int]:
        """Producers of the tensors that a product multiplies with its weights."""
        inputs = self.vertex(product).inputs
        found = self.into.get(product, {}).items()
        return [at for number, at in found if not inputs[number].is_index and self._stored(product, number) is None]

    def source(self, product: int) -> int:
        """The one that makes its input; the caller's first input where that is a constant."""
        return next(iter(self.given(product)), 0)

    # --- weights ----------------------------------------------------------------------------------------------------------------------

    def matrices(self, product: int) -> Matrices | None:
        """None: of a product of two activations."""
        if product not in self._matrices:
            self._matrices[product] = self._read(product)
        return self._matrices[product]

    def weights(self, product: int) -> Matrices:
        """Weights of a product that has some."""
        found = self.matrices(product)
        assert found is not None
        return found

    def _read(self, product: int) -> Matrices | None:
        vertex = self.vertex(product)
        stored = {number: each for number in range(len(vertex.inputs)) if (each := self._stored(product, number)) is not None}
        number = next((number for number, each in stored.items() if len(each.shape) > 1), None)
        if number is None:
            return None
        own, read = stored[number], vertex.inputs[number]
        given = {dim for each, operand in enumerate(vertex.inputs) if each not in stored for dim in operand.dims if dim}
        out = set(vertex.outputs[0].dims) - {""}
        sizes = {"taken": 1, "made": 1, "number": 1}
        roles = []
        for dim, size in zip(read.dims, read.shape, strict=True):
            role = "number" if not dim or (dim in given and dim in out) else "made" if dim in out else "taken"
            sizes[role] *= size
            roles.append(role)
        entries = prod(own.shape)
        if own is not read and entries != prod(read.shape):  # rows of the parameter, taken by their numbers
            sizes = {"number": own.shape[0], "taken": sizes["taken"], "made": max(1, entries // (own.shape[0] * sizes["taken"]))}
            roles = ["number"]
        lead = own.shape[0] if len(own.shape) > 2 else 0
        return Matrices(
            parameter=own.parameter,
            number=sizes["number"],
            taken=sizes["taken"],
            made=sizes["made"],
            has_bias=self._has_bias(product, sizes["number"] * sizes["made"]),
            lead=lead,
            lead_is=roles[0] if lead else "",
        )

    def _stored(self, at: int, number: int) -> ImportedOperand | None:
        """The parameter that an input is, or is made of and of nothing else that is trained."""
        operand = self.vertex(at).inputs[number]
        if operand.parameter:
            return operand
        producer = self.into.get(at, {}).get(number)
        if producer is None or self.vertex(producer).kind not in _HANDS_ON:
            return None
        inputs = [each for each, other in enumerate(self.vertex(producer).inputs) if not other.is_index]
        found = [self._stored(producer, each) for each in inputs]
        return found[0] if len(found) == 1 else None

    def _has_bias(self, product: int, entries: int) -> bool:
        """A vector that the product adds itself; of several matrices also what is added to all that they make."""
        vertex = self.vertex(product)
        if any(each.parameter and len(each.shape) == 1 for each in vertex.inputs):
            return True
        added = [
            stored
            for consumer in self.out_of.get(product, ())
            if self.vertex(consumer).kind is ImportedKind.ELEMENTWISE
            for number in range(len(self.vertex(consumer).inputs))
            if (stored := self._stored(consumer, number)) is not None
        ]
        return any(len(each.shape) > 1 and prod(each.shape) == entries for each in added)


def is_choice(vertex: ImportedVertex) -> bool:
    """Whether it picks the largest entries and tells their numbers."""
    return vertex.function in ("topk", "argmax", "max") and any(each.is_index for each in vertex.outputs)


def difference(one: Any, other: Any) -> list[str]:
    """Differences of two records and of the records in them: "width 128, not 96"."""
    told: list[str] = []
    for each in fields(one):
        name, old, new = each.name, getattr(one, each.name), getattr(other, each.name)
        if is_dataclass(old) and is_dataclass(new):
            told += difference(old, new)
        elif old != new:
            told.append(f"{name} {new}, not {old}" if not (is_dataclass(old) or is_dataclass(new)) else f"{name} in one of them")
    return told


__all__ = ["Matrices", "Wiring", "difference", "is_choice"]
