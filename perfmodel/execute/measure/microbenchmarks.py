"""Microbenchmarks that all ranks of a group run at once: kernels, collectives, and contention between ranks.

All ranks are busy, so the samples include the sharing of memory bandwidth and caches. Collectives are timed by wall-clock time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist

from perfmodel.execute.launch.launch import Worker
from perfmodel.execute.measure.kernels import Kernel, all_kernels, attention_calls, linear_kernels, streaming_kernels
from perfmodel.execute.measure.scope import Scope
from perfmodel.execute.measure.state_kernels import state_kernels
from perfmodel.execute.measure.stopwatch import MEBIBYTE, Stopwatch
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.hardware.calibration import KernelClass
from perfmodel.hardware.samples import CollectiveSample, ContentionSample, Sample

# ---------------------------------------------------------------------------------------------------------------------------------
# Kernels
# ---------------------------------------------------------------------------------------------------------------------------------


def time_kernels(worker: Worker, kernels: Iterable[Kernel], budget: float) -> list[Sample]:
    """Time the kernels, on all ranks at the same time."""
    watch, samples = Stopwatch(worker.device), []
    for kernel in kernels:
        worker.beat(kernel.label)
        dist.barrier()
        samples.append(kernel.sample(watch.time(kernel.call, budget=budget)))
    return samples


def measure_kernels_on_rank(worker: Worker, scope: Scope) -> list[Sample]:
    """Time every kernel of transformers."""
    watch = Stopwatch(worker.device)
    of_states = (kernel for shape in scope.states for kernel in state_kernels(shape, scope.dtype, worker.device))
    samples = time_kernels(worker, chain(all_kernels(scope, worker.device), of_states), scope.budget)
    for shape in scope.attentions:
        worker.beat(f"attention over {shape[3]} tokens")
        forward, backward, sample = attention_calls(shape, scope.dtype, worker.device)
        dist.barrier()
        times = [watch.time(call, budget=scope.budget) for call in (forward, backward)]
        samples.append(sample(*times))
    return samples


# ---------------------------------------------------------------------------------------------------------------------------------
# Contention
# ---------------------------------------------------------------------------------------------------------------------------------


def measure_contention_on_rank(worker: Worker, scope: Scope) -> list[Sample]:
    """Measure the slowdown of kernels while every rank computes, relative to rank 0 alone, and during a collective."""
    device, watch = worker.device, Stopwatch(worker.device)
    parts: dict[str, list[Callable[[], object]]] = {
        "matmul": [kernel.call for kernel in linear_kernels(scope.matmuls[-2], scope.dtype, device)],
        "streaming": [
            kernel.call
            for name in (KernelClass.ADD, KernelClass.LAYERNORM)
            for kernel in streaming_kernels(name, scope.elements[-2], scope.dtype, device)
        ],
        "attention": list(attention_calls(scope.attentions[len(scope.attentions) // 2], scope.dtype, device)[:2]),
    }
    samples: list[Sample] = []
    for name, calls in parts.items():
        worker.beat(f"contention of {name}")
        together, alone = [], []
        for _ in range(3):
            dist.barrier()
            together.append(sum(watch.time(call, budget=scope.budget) for call in calls))
            dist.barrier()
            if worker.rank == 0:
                alone.append(sum(watch.time(call, budget=scope.budget) for call in calls))
            dist.barrier()
        if worker.rank == 0:
            factor = statistics.median(together) / statistics.median(alone)
            samples.append(ContentionSample(name=name, factor=max(factor, 1.0)))
    if worker.world_size > 1:
        samples.append(ContentionSample(name="compute_under_communication", factor=_under_communication(worker, parts["matmul"][0])))
    return samples


def _under_communication(worker: Worker, call: Callable[[], object]) -> float:
    """Return the compute time during an all-reduce divided by the time without one, by wall-clock time."""
    buffer = torch.randn(2 * MEBIBYTE, device=worker.device)

    def seconds() -> float:
        start = time.perf_counter()
        for _ in range(4):
            call()
        if worker.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    dist.all_reduce(buffer)
    quiet, busy = [], []
    for _ in range(6):
        worker.beat("compute under communication")
        dist.barrier()
        quiet.append(seconds())
        dist.barrier()
        work = [dist.all_reduce(buffer, async_op=True) for _ in range(4)]
        busy.append(seconds())
        for item in work:
            item.wait()
    return max(statistics.median(busy) / statistics.median(quiet), 1.0)


# ---------------------------------------------------------------------------------------------------------------------------------
# Collectives
# ---------------------------------------------------------------------------------------------------------------------------------


def group_sizes(world_size: int) -> tuple[int, ...]:
    """Return the powers of two up to the world size, and the world size."""
    sizes = [1 << exponent for exponent in range(1, world_size.bit_length()) if 1 << exponent <= world_size]
    return tuple(dict.fromkeys([*sizes, world_size])) if world_size > 1 else ()


def _collective(kind: CollectiveKind, num_bytes: int, ranks: int, group: object, device: str) -> Callable[[], object]:
    full = torch.zeros(max(num_bytes // 4 // ranks, 1) * ranks, device=device)
    part = torch.zeros(full.numel() // ranks, device=device)
    match kind:
        case CollectiveKind.ALL_REDUCE:
            return lambda: dist.all_reduce(full, group=group)
        case CollectiveKind.REDUCE_SCATTER:
            return lambda: dist.reduce_scatter_tensor(part, full, group=group)
        case CollectiveKind.ALL_GATHER:
            return lambda: dist.all_gather_into_tensor(full, part, group=group)
        case CollectiveKind.ALL_TO_ALL:
            other = torch.empty_like(full)
            return lambda: dist.all_to_all_single(other, full, group=group)
        case CollectiveKind.SEND_RECV:
            first, second = 0, 1
            if dist.get_rank() == first:
                return lambda: (dist.send(full, second), dist.recv(full, second))
            if dist.get_rank() == second:
                return lambda: (dist.recv(full, first), dist.send(full, first))
            return lambda: None
    raise AssertionError(kind)


#: Most calls of a collective per timing, and the number of timings. Their lower quartile counts, as disturbances only add time.
MOST_CALLS, NUM_TIMINGS = 20, 15
#: Compute between collectives on a CPU, as in a step some ms: a product, how often, then rounds of a timing and timings.
WORK_PRODUCT, WORK_CALLS, WORK_ROUNDS, NUM_WORK_TIMINGS = (128, 384, 1536), 4, 3, 9


def measure_collectives_on_rank(worker: Worker, scope: Scope) -> list[Sample]:
    """Time every collective over message and group sizes: what it adds to the compute of all ranks, on a GPU consecutive calls.

    Between computations a collective on a CPU takes 1 to 3 ms longer than right after another one: its peers arrive at different times, and
    its threads wait for a core.
    """
    samples: list[Sample] = []
    rows, inputs, outputs = WORK_PRODUCT
    x, weight = torch.randn(rows, inputs, device=worker.device), torch.randn(outputs, inputs, device=worker.device)

    def compute() -> None:
        for _ in range(WORK_CALLS):
            torch.nn.functional.linear(x, weight)

    for ranks in group_sizes(worker.world_size):
        group = worker.cached(("microbenchmark group", ranks), partial(dist.new_group, list(range(ranks))))
        kinds = list(CollectiveKind) if ranks == 2 else [kind for kind in CollectiveKind if kind is not CollectiveKind.SEND_RECV]
        for kind in kinds:
            for num_bytes in scope.message_bytes:
                worker.beat(f"{kind} of {num_bytes} bytes on {ranks} ranks")
                dist.barrier()
                if worker.rank >= ranks:
                    continue
                call = _collective(kind, num_bytes, ranks, group, worker.device)
                messages = 2 if kind is CollectiveKind.SEND_RECV else 1
                seconds = _time_collective(call, scope.budget, worker.device, group)
                if worker.device == "cpu":
                    seconds = max(seconds, _time_after(compute, call, group))
                seconds /= messages
                samples.append(CollectiveSample(kind=kind, num_bytes=float(num_bytes), group_size=ranks, time=seconds))
    return samples


def _time_collective(call: Callable[[], object], budget: float, device: str, group: object) -> float:
    def seconds(count: int) -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / count

    seconds(1)
    # every rank must make the same number of calls
    once = torch.tensor([seconds(2)], device=device)
    dist.all_reduce(once, dist.ReduceOp.MAX, group=group)
    count = max(1, min(MOST_CALLS, int(budget / NUM_TIMINGS / max(float(once), 1e-7))))
    return statistics.quantiles((seconds(count) for _ in range(NUM_TIMINGS)), n=4)[0]


def _time_after(compute: Callable[[], object], call: Callable[[], object], group: object) -> float:
    """Return the time that a collective adds to the compute before it, on every rank of the group. [s]"""

    def seconds(*parts: Callable[[], object]) -> float:
        dist.barrier(group=group)
        start = time.perf_counter()
        for _ in range(WORK_ROUNDS):
            for part in parts:
                part()
        return (time.perf_counter() - start) / WORK_ROUNDS

    alone, both = zip(*((seconds(compute), seconds(compute, call)) for _ in range(NUM_WORK_TIMINGS)), strict=True)
    return statistics.median(both) - statistics.median(alone)
