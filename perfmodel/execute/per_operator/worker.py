"""Checking and timing of a network plan on each rank. Imports torch; the parent process does not import this module."""

from __future__ import annotations

import gc
import hashlib
import pickle
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from perfmodel.execute.launch.launch import Worker
from perfmodel.execute.launch.rank_results import CollectiveTally, RankCheck, RankTimes
from perfmodel.execute.measure.instrument import CollectiveCounter, StorageTracker
from perfmodel.execute.measure.measure import count_step, describe_on_rank, synchronize
from perfmodel.execute.modules.module import UserModule
from perfmodel.execute.per_operator.mesh import Purpose
from perfmodel.execute.per_operator.model import NetworkProgram, one_process
from perfmodel.execute.per_operator.options import NetworkOptions
from perfmodel.execute.per_operator.redistribute import Redistribution, local_part
from perfmodel.execute.tolerance import ROUND_OFF_FLOOR
from perfmodel.parallel.plan import Plan
from perfmodel.workload.graph import Graph, Pass


@dataclass(slots=True)
class _Reference:
    losses: list[float]
    gradients: dict[str, torch.Tensor]
    outputs: dict[str, torch.Tensor]


def _build(worker: Worker, network: Graph, plan: Plan, options: NetworkOptions, imitate: Plan | None) -> NetworkProgram:
    return NetworkProgram(
        worker,
        network,
        plan,
        seed=options.seed,
        dtype=getattr(torch, options.dtype) if options.dtype else None,
        optimizer=options.optimizer,
        learning_rate=options.learning_rate,
        functions=options.functions,
        imitate=imitate,
        module=_module(worker, options),
    )


def _module(worker: Worker, options: NetworkOptions) -> UserModule | None:
    """Return the user's module, built once."""
    if options.module is None:
        return None
    kept: dict[object, UserModule] = worker.cache.setdefault("user's module", {})
    key = (options.module, options.seed)
    if key not in kept:
        kept.clear()
        worker.beat(f"making {options.module.name}")
        kept[key] = UserModule.named(options.module.name, options.module.inputs, seed=options.seed)
    return kept[key]


def _reference(worker: Worker, network: Graph, plan: Plan, options: NetworkOptions) -> _Reference:
    """Return losses, and first-step gradients and outputs, of one process; cached for later plans of the same network."""
    copied = [
        (operator.name, sorted((dim, plan.cuts.size(tuple(axes))) for dim, axes in plan.cuts.shardings[operator.name].items()))
        for operator in network.operators
        if operator.settings.get("synchronised") is False
    ]
    key = hashlib.sha256(pickle.dumps((network, options, plan.num_microbatches, copied))).hexdigest()
    kept: dict[str, _Reference] = worker.cache.setdefault("network reference", {})
    if key not in kept and (module := _module(worker, options)) is not None:
        kept.clear()
        worker.beat("reference")
        loss, gradients = module.unsharded_step(options.seed, plan.num_microbatches, getattr(torch, options.dtype or "float32"))
        kept[key] = _Reference([loss], gradients, {})
    if key not in kept:
        kept.clear()
        program = _build(worker, network, one_process(network, plan), options, plan)
        outputs: dict[str, torch.Tensor] = {}
        if options.compares_outputs:
            with torch.no_grad():
                program.forward({}, keep=outputs)
        losses, gradients = [], {}
        for step in range(options.steps):
            worker.beat(f"reference step {step}")
            losses.append(float(program.forward_backward()))
            if step == 0:
                gradients = program.gradients()
            program.update()
        kept[key] = _Reference(losses, gradients, outputs)
    return kept[key]


def _broadcast(worker: Worker, tensors: dict[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> None:
    """Broadcast `tensors` of rank 0 to all ranks, in few messages."""
    limit, batch = 1 << 24, []
    names = list(shapes)
    for position, name in enumerate(names):
        batch.append(name)
        sizes = [int(torch.Size(shapes[entry]).numel()) for entry in batch]
        if sum(sizes) < limit and position + 1 < len(names):
            continue
        worker.beat(f"comparing {name}")
        if worker.rank == 0:
            flat = torch.cat([tensors[entry].to(dtype).reshape(-1) for entry in batch])
        else:
            flat = torch.empty(sum(sizes), dtype=dtype, device=worker.device)
        dist.broadcast(flat, 0)
        for entry, piece in zip(batch, flat.split(sizes), strict=True):
            tensors[entry] = piece.view(shapes[entry])
        batch = []


def _relative(actual: torch.Tensor, expected: torch.Tensor, floor: float) -> float:
    if actual.shape != expected.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    size = max(float(expected.abs().max()), floor)
    return float((actual - expected).abs().max()) / size if size else float(actual.abs().max())


def check_on_rank(worker: Worker, network: Graph, plan: Plan, options: NetworkOptions) -> RankCheck:
    """Run the plan, count one step, and compare with a single process, which rank 0 runs."""
    program = _build(worker, network, plan, options, None)
    outputs: dict[str, torch.Tensor] = {}
    if options.compares_outputs:
        with torch.no_grad():
            program.forward({}, keep=outputs)
        program.release()
    if program.pipeline is not None:
        program.forward_backward()  # includes the one-time messages of torch's schedules
    losses, counter = [], CollectiveCounter(program.mesh.label, times_them=False)
    for step in range(options.steps):
        worker.beat(f"step {step}")
        if step == 0:
            program.mesh.record, program.mesh.padding = Counter(), Counter()
            with counter:
                share = program.forward_backward()
            own_gradients = program.gradients()
            with counter:
                program.update()
            record, program.mesh.record = program.mesh.record, None
        else:
            share = program.step()
        share = share.detach().double().reshape(1)
        dist.all_reduce(share)
        losses.append(float(share))

    reference = _reference(worker, network, plan, options) if worker.rank == 0 else _Reference([], {}, {})
    header: list[Any] = [
        reference.losses,
        {name: tuple(g.shape) for name, g in reference.gradients.items()},
        {n: tuple(o.shape) for n, o in reference.outputs.items()},
    ]
    dist.broadcast_object_list(header)
    expected_losses, gradient_shapes, output_shapes = header
    dtype = getattr(torch, options.dtype or "float32")
    gradients, expected_outputs = dict(reference.gradients), dict(reference.outputs)
    _broadcast(worker, gradients, gradient_shapes, dtype)
    _broadcast(worker, expected_outputs, output_shapes, dtype)

    loss_errors = {
        f"step {step}": abs(loss - expected) / max(abs(expected), 1e-30)
        for step, (loss, expected) in enumerate(zip(losses, expected_losses, strict=True))
    }
    largest = max((float(gradient.abs().max()) for gradient in gradients.values()), default=0.0)
    gradient_errors = {}
    for name, gradient in own_gradients.items():
        expected = local_part(program.padded(name, gradients[name]), program.layouts[name], program.mesh)
        gradient_errors[name] = _relative(gradient, expected, ROUND_OFF_FLOOR * largest)
    output_errors = {}
    if options.compares_outputs:
        for operator in program.network.operators:
            name = operator.output.tensor
            left = program.derivation.left[name]
            purpose = Purpose(Pass.FORWARD, name, operator.name, "check")
            resolved = Redistribution(left, left.resolved(), program.network.tensors[name].shape, program.mesh, purpose)(outputs[name])
            given = network.tensors[name].shape
            if given == program.network.tensors[name].shape:  # the padding of an activation has no meaning
                expected = local_part(program.padded(name, expected_outputs[name]), left.resolved(), program.mesh)
                output_errors[name] = _relative(resolved, expected, 0.0)
    sent = program.pipeline.sent_elements if program.pipeline is not None else 0
    return RankCheck(losses, loss_errors, gradient_errors, output_errors, record, program.mesh.padding, counter.tally, sent)


def measure_on_rank(
    worker: Worker, network: Graph, plans: Sequence[Plan], options: NetworkOptions, warmup: int, rounds: int
) -> tuple[list[RankTimes], str, dict[str, str]]:
    """Time steps of all plans in turn, A B C A B C. Then run one counted and one memory-tracked step of each, untimed."""
    programs = [_build(worker, network, plan, options, None) for plan in plans]
    results = [RankTimes([], float("nan"), Counter(), Counter(), CollectiveTally(), 0.0) for _ in plans]
    for index in range(rounds):
        share = options.steps // rounds + (index < options.steps % rounds)
        for number, (program, result) in enumerate(zip(programs, results, strict=True)):
            for step in range(warmup + share):
                worker.beat(f"plan {number}, round {index}, step {step}")
                dist.barrier()
                synchronize(worker.device)
                start = time.perf_counter()
                loss = program.step()
                synchronize(worker.device)
                if step >= warmup:
                    result.times.append(time.perf_counter() - start)
                if index == 0 and step == 0:
                    result.share = float(loss)
            program.release()
    for program, result in zip(programs, results, strict=True):
        worker.beat("counted step")
        dist.barrier()
        program.mesh.record, program.mesh.padding = Counter(), Counter()
        result.tally = count_step(program.step, program.mesh.label, worker.device)
        result.record, result.padding = program.mesh.record, program.mesh.padding
        program.mesh.record = None
        worker.beat("tracked step")
        dist.barrier()
        # the peak of live tensors, without those of other programs
        storages = (tensor.untyped_storage() for tensor in chain(program.parameters.stored(), program.inputs.values()))
        persistent = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
        program.release()
        with StorageTracker() as tracker:
            before = tracker.current
            program.step()
        result.peak_memory = float(tracker.peak - before + persistent)
        result.sent_elements = program.pipeline.sent_elements if program.pipeline is not None else 0
        program.release()
    del programs
    gc.collect()
    return results, *describe_on_rank(worker)
