"""A rank's work in a serving run: check the cache against the uncached forward pass, then time and count steps.

`serving_counts` counts the same steps under fake tensors, at any size and on any number of ranks, in one process.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from perfmodel.execute.audit.count import StepCounter
from perfmodel.execute.audit.program import fake_group
from perfmodel.execute.launch.launch import Worker
from perfmodel.execute.local import local_tensor, num_bytes, tensors_in
from perfmodel.execute.measure.instrument import StorageTracker
from perfmodel.execute.measure.kernels import Kernel, weight_kernels
from perfmodel.execute.measure.measure import synchronize
from perfmodel.execute.measure.stopwatch import Stopwatch
from perfmodel.execute.serving.cache import BLOCK_TOKENS, PagedCache
from perfmodel.execute.serving.decoder import Decoder, build_decoder
from perfmodel.execute.serving.step import Chunk, ServedStep, make_step
from perfmodel.execute.uniform.sharding import ExpertSharding
from perfmodel.execute.uniform.weights import SEED, one_process_model
from perfmodel.execute.zero import TORCH_DTYPES
from perfmodel.foundation.dtypes import Dtype
from perfmodel.parallel.results import ANCHOR_ROWS, ANCHOR_WEIGHT, CollectiveCount, StepCounts, StepShape
from perfmodel.workload.config import TransformerConfig

aten = torch.ops.aten
#: Operators that read the bytes that they return from their first tensor, not all of it.
_LOOKUPS = (aten.embedding, aten.gather, aten.index, aten.index_select)
#: Time for each reference product in a round. [s]
ANCHOR_BUDGET = 0.05
#: Lengths of the two checked sequences, and the ends of their prompt chunks: the first prompt is one chunk, the second two.
_CHECKED, _PROMPTS = (24, 37), ((19,), (16, 33))


class ReadCounter(StepCounter):
    """Step counter that also counts the bytes that operators read of weights and of the cache."""

    def __init__(self, decoder: Decoder, tracker: StorageTracker) -> None:
        super().__init__(lambda ranks, kind: "tp", tracker)
        self._weights = set(_weights(decoder))
        self._pools = {pool.untyped_storage()._cdata for pool in decoder.cache.all_pools}
        self.read = {"weights": 0.0, "cache": 0.0}
        self.written = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        is_view = any(value.alias_info is not None and not value.alias_info.is_write for value in func._schema.returns)
        if result is NotImplemented or is_view or not any(True for _ in tensors_in(result)):
            return result  # without a tensor result: a query of a shape or a device
        if func._overloadpacket is aten.index_copy_ and args[0].untyped_storage()._cdata in self._pools:
            self.written += num_bytes((args[3],))
            return result
        for position, tensor in enumerate(tensors_in(args)):
            storage = tensor.untyped_storage()._cdata
            what = "weights" if storage in self._weights else "cache" if storage in self._pools else ""
            if what:
                looks_up = position == 0 and func._overloadpacket in _LOOKUPS
                self.read[what] += num_bytes((result if looks_up else tensor,))
        given = zip(args, func._schema.arguments, strict=False)
        for tensor in tensors_in([value for value, argument in given if argument.alias_info is not None and argument.alias_info.is_write]):
            if tensor.untyped_storage()._cdata in self._pools:
                self.written += num_bytes((tensor,))
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
        parameter_bytes=counter.read["weights"],
        cache_bytes=counter.read["cache"],
        written_bytes=counter.written,
        collectives=tuple(
            CollectiveCount(kind=kind, axis=axis, count=number, num_bytes=tally.num_bytes[kind, axis])
            for (kind, axis), number in tally.counts.items()
        ),
        held_bytes=num_bytes(_weights(decoder).values()),
        held_cache_bytes=float(decoder.cache.num_bytes),
        peak_memory=float(tracker.peak),
    )


def _weights(decoder: Decoder) -> dict[int, torch.Tensor]:
    """Return the weights by their storage, so that tied weights count once."""
    return {tensor.untyped_storage()._cdata: tensor for tensor in map(local_tensor, decoder.parameters())}


def mesh_of(worker: Worker) -> DeviceMesh | None:
    """Return the mesh of all ranks as one axis, tp; None for one rank."""
    if worker.world_size == 1:
        return None
    return worker.cached("serving mesh", lambda: init_device_mesh(worker.device, (worker.world_size,), mesh_dim_names=("tp",)))


def check_on_rank(worker: Worker, config: TransformerConfig) -> float:
    """Return the largest error of logits against the unsharded training model without a cache, relative to the largest logit (fp32).

    Covers full prompts, chunked prompts, single tokens, and sequences of different lengths in one step.
    """
    config = replace(config, num_mtp_layers=0)
    generator = torch.Generator().manual_seed(SEED)
    tokens = [torch.randint(config.vocab_size, (length,), generator=generator).tolist() for length in _CHECKED]
    decoder = build_decoder(config, num_blocks=6, device=worker.device, mesh=mesh_of(worker))
    decoder.beat = worker.beat
    cache = decoder.cache
    for sequence, length in enumerate(_CHECKED):
        cache.reserve(sequence, length)
    logit_rows: list[tuple[int, int, torch.Tensor]] = []
    done = [0, 0]
    while done[0] < _CHECKED[0] or done[1] < _CHECKED[1]:
        chunks = []
        for sequence, length in enumerate(_CHECKED):
            if done[sequence] < length:
                stop = next((end for end in _PROMPTS[sequence] if end > done[sequence]), done[sequence] + 1)
                chunks.append(Chunk(sequence, done[sequence], tuple(tokens[sequence][done[sequence] : stop])))
                done[sequence] = stop
        step = make_step(chunks, cache)
        logit_rows += [(chunk.sequence, chunk.stop - 1, row) for chunk, row in zip(step.chunks, decoder.run(step), strict=True)]
    del decoder
    model = one_process_model(config, worker.device, beat=worker.beat)
    with torch.no_grad():
        expected = [model(torch.tensor([row], device=worker.device))[0] for row in tokens]
    largest = max(float(logits.abs().max()) for logits in expected)
    return max(float((row - expected[sequence][at]).abs().max()) for sequence, at, row in logit_rows) / largest


def reserve_sequences(cache: PagedCache, shape: StepShape) -> None:
    """Reserve an empty cache for the sequences of a step of that shape; the cached tokens before the new ones are zeros."""
    for sequence in range(shape.sequences):
        cache.reserve(sequence, shape.cached + shape.new)


def prepared_step(decoder: Decoder, shape: StepShape) -> ServedStep:
    """Return a step of that shape, of sequences that are reserved already."""
    tokens = tuple(number % decoder.config.vocab_size for number in range(shape.new))
    return make_step([Chunk(sequence, shape.cached, tokens) for sequence in range(shape.sequences)], decoder.cache)


def cache_for(config: TransformerConfig, shapes: Sequence[StepShape], *, tp: int, dtype: torch.dtype, device: str = "cpu") -> PagedCache:
    """Return a cache with capacity for each of the shapes separately."""
    blocks = max(shape.sequences * -(-(shape.cached + shape.new) // BLOCK_TOKENS) for shape in shapes)
    return PagedCache(config, blocks, num_sequences=max(shape.sequences for shape in shapes), tp=tp, dtype=dtype, device=device)


def measure_on_rank(
    worker: Worker, config: TransformerConfig, shapes: Sequence[StepShape], dtype: Dtype, rounds: int, repeats: int
) -> tuple[list[tuple[list[float], list[float], StepCounts]], dict[str, float]]:
    """Return times, processor times and counts of steps of each shape, timed in turn, A B C A B C, `repeats` in a row after a warm-up step;
    and the times of the reference products, measured between the rounds on a CPU."""
    torch_dtype = TORCH_DTYPES[dtype]
    decoder = build_decoder(config, num_blocks=1, device=worker.device, dtype=torch_dtype, mesh=mesh_of(worker))
    decoder.beat = worker.beat
    cache = cache_for(config, shapes, tp=worker.world_size, dtype=torch_dtype, device=worker.device)
    decoder.sharding.cache = cache
    times: list[list[float]] = [[] for _ in shapes]
    processor: list[list[float]] = [[] for _ in shapes]
    counts: list[StepCounts] = []
    watch, anchors = Stopwatch(worker.device), list[dict[str, float]]()
    references: dict[str, Kernel] = {}
    if worker.device == "cpu" and worker.world_size == 1:
        kernels = weight_kernels(ANCHOR_WEIGHT, dtype, "cpu", tuple(ANCHOR_ROWS.values()))
        references = dict(zip(ANCHOR_ROWS, kernels, strict=True))
    for index in range(rounds):
        anchors.append({name: watch.time(reference.call, budget=ANCHOR_BUDGET) for name, reference in references.items()})
        for position, shape in enumerate(shapes):
            for repeat in range(repeats + 1):
                worker.beat(f"step {index} of {shape}")
                reserve_sequences(cache, shape)
                if worker.world_size > 1:
                    dist.barrier()
                synchronize(worker.device)
                start, busy = time.perf_counter(), time.thread_time()
                decoder.run(prepared_step(decoder, shape)).argmax(dim=-1).tolist()
                busy, duration = time.thread_time() - busy, time.perf_counter() - start
                if repeat:
                    times[position].append(duration)
                    processor[position].append(busy)
                cache.release_all()
    references.clear()  # their weights must not count as memory of the model
    for shape in shapes:
        worker.beat(f"counting {shape}")
        reserve_sequences(cache, shape)
        counts.append(count_step(decoder, prepared_step(decoder, shape)))
        cache.release_all()
    return list(zip(times, processor, counts, strict=True)), {name: statistics.median(of[name] for of in anchors) for name in anchors[0]}


def serving_counts(config: TransformerConfig, shapes: Sequence[StepShape], tp: int, ep: int, dtype: Dtype) -> list[StepCounts]:
    """Count one step of each shape on the first of `tp` ranks. Experts are distributed over `ep` ranks, and sharded over the rest."""
    torch.set_num_threads(1)
    torch_dtype = TORCH_DTYPES[dtype]
    with fake_group(0, tp) as worker:
        mesh = init_device_mesh(worker.device, (tp,), mesh_dim_names=("tp",)) if tp > 1 else None
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        experts = ExpertSharding(ep=ep, etp=tp // ep)
        decoder = build_decoder(config, num_blocks=1, dtype=torch_dtype, mesh=mesh, experts=experts, fake=mode)
        counts = []
        for shape in shapes:
            with mode:
                decoder.sharding.cache = cache_for(config, [shape], tp=tp, dtype=torch_dtype)
                reserve_sequences(decoder.cache, shape)
                step = prepared_step(decoder, shape)
                if tp > 1:
                    decoder.run(step)  # DTensor propagates each shape once on extra tensors
                counts.append(count_step(decoder, step))
        return counts
