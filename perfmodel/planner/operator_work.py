"""The work of an operator on one chip under each of its shardings: rows as `cost/program.py` makes them, timed together.

Rows of many shardings are one array, so that a space of thousands is timed in a few calls. `tests/laws/test_operator_search.py` holds
that they add up to what the program of a whole plan costs, for any choice of shardings.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.compute import attention_backward_time, attention_time, matmul_time, streaming_time
from perfmodel.cost.context import attention_habits, attention_share
from perfmodel.cost.program import _KERNEL, _einsum_roles
from perfmodel.hardware.calibration import KERNEL_CODE, KernelClass
from perfmodel.parallel.derive import Amount, amount_of
from perfmodel.parallel.parameters import TENSOR_AXES
from perfmodel.parallel.sharding import Sharding
from perfmodel.planner.operator_mesh import Prices
from perfmodel.workload.operator import Graph, Operator, OperatorKind, TensorRole

Array = NDArray[np.float64]


@dataclass(slots=True, kw_only=True, eq=False)
class WorkRows:
    """Rows of (slot, sizes); a slot is whatever the caller adds times up by."""

    graph: Graph
    prices: Prices
    matmul: list[tuple[float, ...]] = field(default_factory=list)
    attention: list[tuple[float, ...]] = field(default_factory=list)
    streaming: list[tuple[float, ...]] = field(default_factory=list)

    def add(self, slot: int, op: Operator, sharding: Sharding, *, internal: Set[str], is_epilogue: bool) -> None:
        """Forward and backward of one operator.

        internal: tensors that a fused kernel never writes; is_epilogue: a bias that the product before it adds itself
        """
        graph, profile = self.graph, self.prices.profile

        def local(dims: tuple[str, ...], scale: float = 1.0) -> Amount:
            return amount_of(op, sharding, dims, scale=scale)

        def number(dims: tuple[str, ...], scale: float = 1.0) -> float:
            return self.prices.value(local(dims, scale))

        def stream(kernel: str, elements: float, accesses: list[float], *, backward: float) -> None:
            if accesses:
                code = KERNEL_CODE[_KERNEL.get(kernel, KernelClass.DEFAULT)]
                self.streaming.append((slot, code, elements, sum(accesses), self._mesh_size(op, sharding), backward))

        size = {operand.tensor: graph.tensors[operand.tensor].itemsize for operand in (*op.inputs, op.output)}
        output = number(op.output.dims)
        if op.kind is OperatorKind.EINSUM:
            batch, m, n, k = (number(dims) for dims in _einsum_roles(op))
            mesh = self._mesh_size(op, sharding)
            self.matmul.append((slot, batch, m, n, k, mesh))
            for i, shape in ((0, (m, k, n)), (1, (k, n, m))):
                if graph.tensors[op.inputs[i].tensor].role is not TensorRole.INDEX:
                    self.matmul.append((slot, batch, *shape, mesh))
        elif op.kind is OperatorKind.ATTENTION:
            sizes = [number(dims) for dims in (("b",), ("g", "r"), ("g",), ("q",), ("z",))]
            chunks = np.array([float(self.prices.mesh.size(sharding.get("q", ())))])
            causal = attention_share(attention_habits(op.causal, profile), chunks)
            self.attention.append((slot, *sizes, float(causal[0])))
        elif op.kind is OperatorKind.EMBEDDING:
            table = op.inputs[1]
            row_bytes = number(op.output.dims, size[op.output.tensor])
            stream("embedding", output, [row_bytes, row_bytes], backward=0.0)
            stream("embedding", output, [row_bytes, row_bytes, number(table.dims, size[table.tensor])], backward=1.0)
        elif op.kind is OperatorKind.CROSS_ENTROPY:
            logits = number(op.inputs[0].dims)
            for backward in (0.0, 1.0):
                stream("cross_entropy", logits, [logits * (profile.logit_bytes / 2)], backward=backward)
        elif op.kind in (OperatorKind.STREAM, OperatorKind.ADD):
            factor = profile.elementwise_traffic
            activations = [o for o in op.inputs if graph.tensors[o.tensor].role is TensorRole.ACTIVATION]
            reads = [number(o.dims, size[o.tensor] * factor) for o in activations if o.tensor not in internal]
            writes = [] if op.output.tensor in internal else [output * (size[op.output.tensor] * factor)]
            masks = [output * (saved.itemsize * factor) for saved in op.saved if saved.what == "mask"]
            if not is_epilogue:
                stream(op.kernel_class, output, reads + writes + masks, backward=0.0)
            if op.kind is OperatorKind.STREAM:
                kept = [
                    number(op.inputs[s.index].dims, size[op.inputs[s.index].tensor] * factor) for s in op.saved if s.what == "input"
                ] + [output * (size[op.output.tensor] * factor) for s in op.saved if s.what == "output"]
                into = [] if op.kernel_class == "bias" else reads
                stream(op.kernel_class, output, writes + kept + masks + into, backward=1.0)
        for i, operand in enumerate(op.inputs):
            if graph.tensors[operand.tensor].role is TensorRole.ACTIVATION:
                first, position = graph.consumers(operand.tensor)[0]
                if (first.name, position) != (op.name, i):
                    # gradients of several readers are added: two reads and a write for each after the first
                    gradient = number(operand.dims, size[operand.tensor])
                    stream("add", gradient / size[operand.tensor], [gradient] * 3, backward=1.0)

    def _mesh_size(self, op: Operator, sharding: Sharding) -> float:
        """Ranks of the tensor axes that cut an operator with parameters: its tensors may be distributed objects."""
        if not any(self.graph.tensors[o.tensor].role is TensorRole.PARAMETER for o in op.inputs):
            return 1.0
        return float(self.prices.mesh.size({axis for axes in sharding.values() for axis in axes} & TENSOR_AXES))

    def times(self, num_slots: int, *, itemsize: float, attention_kernel: str) -> Array:
        """Seconds of each slot."""
        machine = self.prices.machine
        total = np.zeros(num_slots)

        def gather(rows: list[tuple[float, ...]]) -> tuple[NDArray[np.int64], list[Array]]:
            columns = np.array(rows, dtype=np.float64).T
            return columns[0].astype(np.int64), list(columns[1:])

        def host(mesh: Array) -> Array:
            distributed = machine.host_times.get("dtensor_op", 0.0)
            return np.asarray(machine.launch_time + distributed * np.minimum(mesh - 1.0, 1.0))

        if self.matmul:
            slot, (batch, m, n, k, mesh) = gather(self.matmul)
            time = matmul_time(batch=batch, m=m, n=n, k=k, itemsize=itemsize, machine=machine)
            total += np.bincount(slot, time + host(mesh), num_slots)
        if self.attention:
            slot, (batch, heads, kv_heads, queries, keys, causal) = gather(self.attention)
            heads_dim = self._head_dim()
            for evaluate in (attention_time, attention_backward_time):
                time = evaluate(
                    batch=batch,
                    heads=heads,
                    kv_heads=kv_heads,
                    query_length=queries,
                    key_length=keys,
                    head_dim=heads_dim,
                    causal_fraction=causal,
                    itemsize=itemsize,
                    machine=machine,
                    kernel=attention_kernel,
                )
                total += np.bincount(slot, time + machine.launch_time, num_slots)
        if self.streaming:
            slot, (kernel, elements, num_bytes, mesh, backward) = gather(self.streaming)
            time = streaming_time(
                num_bytes=num_bytes,
                num_elements=elements,
                kernel_class=kernel.astype(np.int64),
                machine=machine,
                backward=backward.astype(np.int64),
            )
            total += np.bincount(slot, time + host(mesh), num_slots)
        return total

    def _head_dim(self) -> int:
        return next(op.dim("d").size for op in self.graph.operators if op.kind is OperatorKind.ATTENTION)
