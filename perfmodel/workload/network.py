"""Any network as a training step: operators that describe themselves (`workload/graph.py`) and tensors of known shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from perfmodel.foundation.errors import InputError
from perfmodel.workload.graph import Operator, TensorRole

#: The public name of a network's operators.
NetworkOperator = Operator


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkTensor:
    """Shape at full size. Indices have 8 bytes an element and no gradient; the itemsize of the others is the job's."""

    name: str
    shape: tuple[int, ...]
    role: TensorRole = TensorRole.ACTIVATION

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Operators in an order of execution; the tensors by name. A tensor that no operator writes is an input or a parameter."""

    name: str
    operators: tuple[Operator, ...]
    tensors: Mapping[str, NetworkTensor]
    batch: int
    source: str = ""

    def __post_init__(self) -> None:
        made: set[str] = set()
        names: set[str] = set()
        produced = {operator.output.tensor for operator in self.operators}
        for operator in self.operators:
            if operator.name in names:
                raise InputError(f"operator {operator.name}: occurs twice; rename one")
            names.add(operator.name)
            for operand in (*operator.inputs, operator.output):
                tensor = self.tensors.get(operand.tensor)
                if tensor is None:
                    raise InputError(f"operator {operator.name}: tensor {operand.tensor!r} is not in the network; declare it")
                if len(tensor.shape) != len(operand.dims):
                    raise InputError(
                        f"operator {operator.name}: operand {operand.tensor} has dims={operand.dims}: must be one for each position of "
                        f"shape {tensor.shape}"
                    )
            if operator.output.tensor in made:
                raise InputError(f"operator {operator.name}: output {operator.output.tensor!r} is made twice; rename one")
            early = [operand.tensor for operand in operator.inputs if operand.tensor in produced and operand.tensor not in made]
            if early:
                raise InputError(f"operator {operator.name}: input {early[0]!r} is made after it; put its producer first")
            made.add(operator.output.tensor)

    def producers(self) -> dict[str, int]:
        """Tensor -> index of the operator that writes it."""
        return {operator.output.tensor: index for index, operator in enumerate(self.operators)}

    def readers(self) -> dict[str, list[tuple[int, int]]]:
        """Tensor -> (operator, input) of each reader, in order."""
        found: dict[str, list[tuple[int, int]]] = {}
        for index, operator in enumerate(self.operators):
            for position, operand in enumerate(operator.inputs):
                found.setdefault(operand.tensor, []).append((index, position))
        return found

    @property
    def layer_parameters(self) -> dict[str, int]:
        """Elements of the parameters that each layer is the first to read."""
        found: dict[str, int] = {}
        seen: set[str] = set()
        for operator in self.operators:
            for operand in operator.inputs:
                tensor = self.tensors[operand.tensor]
                if tensor.role is TensorRole.PARAMETER and tensor.name not in seen:
                    seen.add(tensor.name)
                    found[operator.layer] = found.get(operator.layer, 0) + tensor.num_elements
        return found

    @property
    def parameters(self) -> tuple[NetworkTensor, ...]:
        return tuple(tensor for tensor in self.tensors.values() if tensor.role is TensorRole.PARAMETER)

    @property
    def num_parameters(self) -> int:
        return sum(tensor.num_elements for tensor in self.parameters)

    @property
    def flops(self) -> float:
        """Of one forward pass. [FLOP]"""
        return sum(operator.flops for operator in self.operators)
