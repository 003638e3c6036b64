"""Counter of a serving step's weight bytes, cache bytes, FLOPs and collectives, as torch dispatches them."""

from __future__ import annotations

from typing import Any

import torch

from perfmodel.execute.audit.count import StepCounter
from perfmodel.execute.local import local_tensor
from perfmodel.execute.measure.instrument import StorageTracker
from perfmodel.execute.serving.decoder import Decoder
from perfmodel.execute.serving.step import ServedStep
from perfmodel.parallel.results import CollectiveCount
from perfmodel.parallel.serving.measurement import StepCounts

aten = torch.ops.aten
#: Operators that read the bytes that they return from their first tensor, not all of it.
_LOOKUPS = (aten.embedding, aten.gather, aten.index, aten.index_select)


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _flat(values: Any) -> list[torch.Tensor]:
    return [item for value in values for item in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(item, torch.Tensor)]


class ReadCounter(StepCounter):
    """Step counter that also counts the bytes that operators read of weights and of the cache."""

    def __init__(self, decoder: Decoder, tracker: StorageTracker) -> None:
        super().__init__(lambda ranks, kind: "tp", tracker)
        self._weights = set(_weights(decoder))
        self._pools = {pool.untyped_storage()._cdata for pool in decoder.cache.all_pools}
        self.read = {"weights": 0, "cache": 0}
        self.written = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        is_view = any(value.alias_info is not None and not value.alias_info.is_write for value in func._schema.returns)
        if result is NotImplemented or is_view or not _flat((result,)):
            return result  # without a tensor result: a query of a shape or a device
        if func._overloadpacket is aten.index_copy_ and args[0].untyped_storage()._cdata in self._pools:
            self.written += _num_bytes(args[3])
            return result
        for position, tensor in enumerate(_flat(args)):
            storage = tensor.untyped_storage()._cdata
            what = "weights" if storage in self._weights else "cache" if storage in self._pools else ""
            if what:
                looks_up = position == 0 and func._overloadpacket in _LOOKUPS
                self.read[what] += _num_bytes(result if looks_up else tensor)
        given = zip(args, func._schema.arguments, strict=False)
        for tensor in _flat(value for value, argument in given if argument.alias_info is not None and argument.alias_info.is_write):
            if tensor.untyped_storage()._cdata in self._pools:
                self.written += _num_bytes(tensor)
        return result


def count_step(decoder: Decoder, step: ServedStep) -> StepCounts:
    """Count one step of the decoder."""
    tracker = StorageTracker()
    counter = ReadCounter(decoder, tracker)
    with tracker.observing(), counter:
        decoder.run(step)
    tally = counter.tally
    return StepCounts(
        flops=sum(counter.counts.flops.values()),
        parameter_bytes=float(counter.read["weights"]),
        cache_bytes=float(counter.read["cache"]),
        written_bytes=float(counter.written),
        collectives=tuple(
            CollectiveCount(kind=kind, axis=axis, count=number, num_bytes=tally.num_bytes[kind, axis])
            for (kind, axis), number in tally.counts.items()
        ),
        held_bytes=float(sum(map(_num_bytes, _weights(decoder).values()))),
        held_cache_bytes=float(decoder.cache.num_bytes),
        peak_memory=float(tracker.peak),
    )


def _weights(decoder: Decoder) -> dict[int, torch.Tensor]:
    """Return the weights by their storage, so that tied weights count once."""
    return {tensor.untyped_storage()._cdata: tensor for tensor in map(local_tensor, decoder.parameters())}
