"""Checking and timing of a network plan on each rank. Imports torch; the parent process does not import this module."""

from __future__ import annotations

import gc
import hashlib
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist

from perfmodel.execute.launch.launch import Worker
from perfmodel.execute.launch.rank_results import ROUND_OFF_FLOOR, IssuedTraffic, RankCheck, RankMeasurement
from perfmodel.execute.measure.compare import errors_on_rank, from_first_rank
from perfmodel.execute.measure.instrument import CollectiveCounter, StorageTracker
from perfmodel.execute.measure.measure import count_step, describe_on_rank, timed
from perfmodel.execute.modules.module import UserModule
from perfmodel.execute.per_operator.mesh import Purpose
from perfmodel.execute.per_operator.model import NetworkProgram, one_process
from perfmodel.execute.per_operator.options import NetworkOptions
from perfmodel.execute.per_operator.redistribute import Redistribution, local_part
from perfmodel.parallel.algebra.sharding import Layout
from perfmodel.parallel.plan import Plan
from perfmodel.workload.graph import Graph
from perfmodel.workload.work import Pass


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
    if (given := options.module) is None:
        return None
    worker.beat(f"making {given.name}")
    return worker.latest("user's module", (given, options.seed), lambda: UserModule.named(given.name, given.inputs, seed=options.seed))


def _reference(worker: Worker, network: Graph, plan: Plan, options: NetworkOptions) -> _Reference:
    """Return losses, and first-step gradients and outputs, of one process; cached for later plans of the same network."""

    def run() -> _Reference:
        if (module := _module(worker, options)) is not None:
            worker.beat("reference")
            loss, gradients = module.unsharded_step(options.seed, plan.num_microbatches, getattr(torch, options.dtype or "float32"))
            return _Reference([loss], gradients, {})
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
        return _Reference(losses, gradients, outputs)

    copied = [
        (operator.name, sorted((dim, plan.cuts.size(tuple(axes))) for dim, axes in plan.cuts.shardings[operator.name].items()))
        for operator in network.operators
        if operator.settings.get("synchronised") is False
    ]
    key = hashlib.sha256(pickle.dumps((network, options, plan.num_microbatches, copied))).hexdigest()
    return worker.latest("network reference", key, run)


def _output_errors(
    worker: Worker, program: NetworkProgram, outputs: dict[str, torch.Tensor], reference: dict[str, torch.Tensor], dtype: torch.dtype
) -> dict[str, float]:
    """Return the error of each operator's output. The padding of an activation has no meaning, so padded ones are not compared."""
    left, tensors = program.derivation.left, program.network.tensors
    resolved = {}
    for operator in program.network.operators:
        name = operator.output.tensor
        purpose = Purpose(Pass.FORWARD, name, operator.name, "check")
        resolved[name] = Redistribution(left[name], left[name].resolved(), tensors[name].shape, program.mesh, purpose)(outputs[name])
    resolved = {name: tensor for name, tensor in resolved.items() if program.given.tensors[name].shape == tensors[name].shape}
    layouts = {name: left[name].resolved() for name in resolved}
    return errors_on_rank(worker, resolved, reference, partial(_expected, program, layouts), dtype=dtype)


def _expected(program: NetworkProgram, layouts: Mapping[str, Layout], name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return this rank's part of a tensor of one process; nothing if the rank has no layout of it."""
    return {name: local_part(program.padded(name, tensor), layouts[name], program.mesh)} if name in layouts else {}


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
            with program.mesh.recording(issued := IssuedTraffic()):
                with counter:
                    share = program.forward_backward()
                own_gradients = program.gradients()
                with counter:
                    program.update()
            issued.tally, issued.sent_elements = counter.tally, program.sent_elements
        else:
            share = program.step()
        share = share.detach().double().reshape(1)
        dist.all_reduce(share)
        losses.append(float(share))

    reference = _reference(worker, network, plan, options) if worker.rank == 0 else _Reference([], {}, {})
    loss_errors = {
        f"step {step}": abs(loss - wanted) / max(abs(wanted), 1e-30)
        for step, (loss, wanted) in enumerate(zip(losses, from_first_rank(reference.losses), strict=True))
    }
    dtype = getattr(torch, options.dtype or "float32")
    expected = partial(_expected, program, program.layouts)
    gradient_errors = errors_on_rank(worker, own_gradients, reference.gradients, expected, dtype=dtype, floor=ROUND_OFF_FLOOR)
    output_errors = _output_errors(worker, program, outputs, reference.outputs, dtype) if options.compares_outputs else {}
    return RankCheck(losses, loss_errors, gradient_errors, output_errors, issued)


def measure_on_rank(
    worker: Worker, network: Graph, plans: Sequence[Plan], options: NetworkOptions, warmup: int, rounds: int
) -> tuple[list[RankMeasurement], str, dict[str, str]]:
    """Time steps of all plans in turn, A B C A B C. Then run one counted and one memory-tracked step of each, untimed."""
    programs = [_build(worker, network, plan, options, None) for plan in plans]
    results = [RankMeasurement() for _ in plans]
    for index in range(rounds):
        share = options.steps // rounds + (index < options.steps % rounds)
        for number, (program, result) in enumerate(zip(programs, results, strict=True)):
            for step in range(warmup + share):
                worker.beat(f"plan {number}, round {index}, step {step}")
                duration, loss = timed(worker, program.step)
                if step >= warmup:
                    result.step_times.append(duration)
                if index == 0 and step == 0:
                    result.first_loss_share = float(loss)
            program.release()
    for program, result in zip(programs, results, strict=True):
        worker.beat("counted step")
        dist.barrier()
        with program.mesh.recording(result.issued):
            result.issued.tally = count_step(program.step, program.mesh.label, worker.device)
        result.issued.sent_elements = program.sent_elements
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
        program.release()
    del programs
    gc.collect()
    return results, *describe_on_rank(worker)
