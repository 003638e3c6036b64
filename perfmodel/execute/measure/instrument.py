"""Counters of the collectives and allocations of a step, below DTensor: used in separate steps, never in timed ones."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from perfmodel.execute.launch.rank_results import CollectiveTally
from perfmodel.execute.local import num_bytes, tensors_in

#: Dispatcher names of collectives and their kinds. `c10d` operators carry a process group, functional ones a group name.
_KINDS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast_": "broadcast",
    "send": "send",
    "recv_": "recv",
}
_NAMESPACES = ("c10d", "_c10d_functional")
_WAIT = torch.ops._c10d_functional.wait_tensor

#: (ranks of the group, kind of collective) -> name of the axis.
Label = Callable[[list[int], str], str]


def _group_ranks(arguments: tuple[Any, ...]) -> list[int]:
    for argument in arguments:
        with suppress(Exception):  # other texts and objects than process groups
            if isinstance(argument, str):
                return dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(argument))  # type: ignore[arg-type]
            if isinstance(argument, torch.ScriptObject):
                return dist.get_process_group_ranks(dist.ProcessGroup.unbox(argument))
    return []


class CollectiveCounter(TorchDispatchMode):
    """Counter of the collectives that reach the dispatcher; with `times_them`, waits for each one and times it."""

    def __init__(self, label: Label, *, times_them: bool, synchronize: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.label, self.times_them, self.synchronize = label, times_them, synchronize
        self.tally = CollectiveTally()
        self._labels: dict[tuple[tuple[int, ...], str], str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local tensors are dispatched again
        kwargs = kwargs or {}
        name = func._schema.name.split("::")
        kind = _KINDS.get(name[1]) if name[0] in _NAMESPACES else None
        if kind is None:
            return func(*args, **kwargs)
        ranks = tuple(_group_ranks((*args, *kwargs.values())))
        if (ranks, kind) not in self._labels:
            self._labels[ranks, kind] = self.label(list(ranks), kind)
        axis = self._labels[ranks, kind]
        blocks = self.times_them and kind not in ("send", "recv")
        if blocks:
            self.synchronize()
        start = time.perf_counter()
        result = func(*args, **kwargs)
        if blocks:
            for item in result if isinstance(result, (list, tuple)) else [result]:
                if isinstance(item, torch.Tensor):
                    torch.ops._c10d_functional.wait_tensor(item)
                elif isinstance(item, torch.ScriptObject):
                    item.wait()
            self.synchronize()
            self.tally.add_time(axis, time.perf_counter() - start)
        into = num_bytes(tensors_in(args[0]))
        if kind == "all_gather":
            into = max(into, num_bytes(tensors_in(args[1])) if name[0] == "c10d" else num_bytes(tensors_in(result)))
        elif kind == "reduce_scatter" and name[0] == "c10d":
            into = max(into, num_bytes(tensors_in(args[1])))
        self.tally.add(kind, axis, into)
        return result


@contextmanager
def timed_pipeline_waits(tally: CollectiveTally) -> Iterator[None]:
    """Add the time that torch's pipeline schedules wait for their sends and receives, as axis pp."""
    from torch.distributed.pipelining import schedules

    original = schedules._wait_batch_p2p

    def wait(work: object) -> Any:
        start = time.perf_counter()
        try:
            return original(work)
        finally:
            tally.add_time("pp", time.perf_counter() - start)

    schedules._wait_batch_p2p = wait
    try:
        yield
    finally:
        schedules._wait_batch_p2p = original


class StorageTracker(TorchDispatchMode):
    """Bytes of live tensor storages and their peak, for devices whose allocator keeps no statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self._before: set[int] = set()
        self.current = self.peak = 0
        self._seen: dict[int, weakref.ref[Any]] = {}

    def __enter__(self) -> StorageTracker:
        self._begin()
        super().__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)
        self._end()

    @contextmanager
    def observing(self) -> Iterator[StorageTracker]:
        """Track the operators that another mode reports through `observe`, which saves one dispatch per operator."""
        self._begin()
        try:
            yield self
        finally:
            self._end()

    def _begin(self) -> None:
        gc.collect()
        for candidate in gc.get_objects():
            kind = type(candidate)
            if isinstance(kind, type) and issubclass(kind, torch.Tensor) and not issubclass(kind, DTensor):
                self._track(candidate)
        self._before = set(self.live)
        self._resize = torch.UntypedStorage.resize_
        tracker, resize = self, self._resize

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            tracker._set(storage)
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]

    def _end(self) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        self._seen.clear()

    @property
    def allocated(self) -> int:
        """Bytes of live storages allocated since tracking began."""
        return sum(size for key, size in self.live.items() if key not in self._before)

    def _track(self, tensor: torch.Tensor) -> None:
        if tensor.device.type != "meta" and tensor.layout is torch.strided:
            self._set(tensor.untyped_storage())

    def _set(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        size = storage.nbytes()
        if key not in self.live:
            self._seen[key] = weakref.ref(storage, lambda _, key=key: self._forget(key))  # type: ignore[misc]
        self.current += size - self.live.get(key, 0)
        self.live[key] = size
        self.peak = max(self.peak, self.current)

    def _forget(self, key: int) -> None:
        self.current -= self.live.pop(key, 0)
        self._before.discard(key)
        self._seen.pop(key, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        self.observe(func, args, result)
        return result

    def observe(self, func: Any, args: Any, result: Any) -> None:
        """Track the results of an operator."""
        if func._overloadpacket is _WAIT:
            # under fake tensors the result of a collective has a new storage; a real tensor keeps its own
            key = args[0].untyped_storage()._cdata
            if key in self.live and key != result.untyped_storage()._cdata:
                self.current -= self.live[key]
                self.live[key] = 0
        if isinstance(result, torch.Tensor):
            self._track(result)
        else:
            for tensor in tensors_in(result):
                self._track(tensor)
