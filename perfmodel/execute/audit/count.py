"""Torch's own counts of one step of a fake program: FLOPs by its formulas, dispatched collectives, and allocated bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from perfmodel.cost.counts import ATTENTION, RankCounts, Shape, product_shape
from perfmodel.execute.audit.program import FakeProgram, fake_program
from perfmodel.execute.layers import attention, indexer, scans  # noqa: F401 - attention registers its operators
from perfmodel.execute.local import local_tensor, num_bytes
from perfmodel.execute.measure.instrument import CollectiveCounter, StorageTracker
from perfmodel.execute.uniform.data_parallel import FlatData
from perfmodel.parallel.plan import Plan
from perfmodel.workload.routing import RoutingCounts

aten = torch.ops.aten


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def _attention_backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape)


#: The CPU's fused attention has no formula in torch's registry. These are torch's formulas for the GPU kernels: no causal discount.
_CPU_ATTENTION: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    torch.ops.perfmodel.uneven_attention: _attention,
    torch.ops.perfmodel.sink_attention: _attention,
    torch.ops.perfmodel.sink_attention_backward: _attention_backward,
    torch.ops.perfmodel.uneven_attention_backward: _attention_backward,
}
#: Kernels that compute several matrix products: their kind in the graph, and their FLOPs.
_PRODUCTS_OF_KERNELS = {**scans.PRODUCTS, **indexer.PRODUCTS}
#: Matrix products, and the index of the argument that is the left factor.
_PRODUCTS = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.baddbmm: 1}


class StepCounter(CollectiveCounter):
    """Counter of FLOPs and collectives below DTensor, at the local shapes of this rank; passes each operator to a storage tracker."""

    def __init__(self, label: Any, tracker: StorageTracker) -> None:
        super().__init__(label, times_them=False)
        self.counts, self.tracker = RankCounts(), tracker

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.tracker.observe(func, args, result)
        packet = func._overloadpacket
        if packet in _CPU_ATTENTION:
            is_backward = _CPU_ATTENTION[packet] is _attention_backward
            self.counts.add_flops(ATTENTION[is_backward], float(_CPU_ATTENTION[packet](*args, **(kwargs or {}))))
        elif packet in _PRODUCTS_OF_KERNELS:
            kind, flops_of = _PRODUCTS_OF_KERNELS[packet]
            self.counts.add_flops((kind,), float(flops_of(*args, **(kwargs or {}))))
        elif packet in flop_registry:
            flops = float(flop_registry[packet](*args, **(kwargs or {}), out_val=result))
            shape: Shape = (packet.__name__,)
            if packet in _PRODUCTS:
                left, right = args[_PRODUCTS[packet]], args[_PRODUCTS[packet] + 1]
                batch = left.shape[0] if left.ndim == 3 else 1
                shape = product_shape(batch, left.shape[-2], right.shape[-1], left.shape[-1])
            self.counts.add_flops(shape, flops)
        return result


@contextmanager
def _before_first_backward(call: Callable[[], None]) -> Iterator[None]:
    """Call `call` when the first backward pass begins, for any micro-batch and stage: a whole one, or one of inputs alone."""
    first = [call]

    def after_call(original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(*args: Any, **kwargs: Any) -> Any:
            while first:
                first.pop()()
            return original(*args, **kwargs)

        return backward

    originals = {name: getattr(torch.autograd, name) for name in ("backward", "grad")}
    for name, original in originals.items():
        setattr(torch.autograd, name, after_call(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(torch.autograd, name, original)


def torch_counts(
    plan: Plan, rank: int, numbers: Sequence[int], dropout: bool = False, routing: RoutingCounts | None = None
) -> dict[int, RankCounts]:
    """Count one step of the rank's program for each number of micro-batches, with FLOPs by torch operator."""
    with fake_program(plan, rank, dropout=dropout, routing=routing) as program:
        return {number: _counts_of_step(program, number) for number in numbers}


def _counts_of_step(program: FakeProgram, num_microbatches: int) -> RankCounts:
    program.take(num_microbatches)
    data, state = program.data, 0.0
    tracker, saved = StorageTracker(), list[int]()
    counter = StepCounter(program.mesh.axis_of, tracker)
    with program.mode, tracker.observing(), counter, _before_first_backward(lambda: saved.append(tracker.allocated)):
        program.forward_backward()
        if isinstance(data, FlatData):
            weights, gradients = num_bytes(unit.flat.weights for unit in data.units), num_bytes(unit.flat.gradients for unit in data.units)
            state = num_bytes(unit.flat.master for unit in data.units if data.dtypes.has_master_copy)
        else:
            weights = num_bytes(local_tensor(parameter) for _, parameter in data.parameters())
            gradients = num_bytes(local_tensor(parameter.grad) for _, parameter in data.parameters() if parameter.grad is not None)
        assert data.optimizer is not None
        # without torch's step counters, one scalar per parameter
        for entries in data.optimizer.state.values():
            state += num_bytes(entry for name, entry in entries.items() if name != "step" and torch.is_tensor(entry))
        data.optimizer_step()  # frees the gradients
    counts = replace(
        counter.counts, parameters=weights, gradients=gradients, optimizer=state, saved=float(saved[0]), peak=float(tracker.peak)
    )
    for (kind, axis), number in counter.tally.counts.items():
        counts.add_collective(kind, axis, number, counter.tally.num_bytes[kind, axis])
    return counts
