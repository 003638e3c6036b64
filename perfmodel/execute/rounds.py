"""Plans measured in turn, A B C A B C, with an anchor between the rounds that tells when the machine was disturbed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from perfmodel.execute.launch import Worker, WorkerGroup
from perfmodel.execute.runner import merge, run_plan
from perfmodel.parallel.plan import Plan
from perfmodel.results import Measurement
from perfmodel.workload.job import TrainingJob

Progress = Callable[[float, str], None]
"""Told the share that is done (0 to 1) and what is being measured."""

#: Steps of a plan in one round, before and while it is timed, and how many rounds: A B C A B C, so that what else the machine does
#: disturbs all plans alike.
WARMUP, STEPS, ROUNDS = 2, 6, 3
#: A round in which a fixed piece of work took this much longer or less long at its end than at its start is measured again.
MOST_DRIFT = 0.05
MOST_ROUNDS = 5


def anchor_on_rank(worker: Worker, job: TrainingJob) -> float:
    """Time of a fixed piece of work, forward and backward of a model on every rank by itself. [s]"""
    import torch.distributed as dist

    from perfmodel.execute.model import Transformer
    from perfmodel.execute.weights import fill, make_tokens

    model = Transformer(job.model, device=worker.device)  # built anew: what stayed would count in the memory of the plans
    for name, parameter in model.named_parameters():
        fill(job.model, name, parameter)
    tokens = make_tokens(job)[:2, :-1].to(worker.device)
    times = []
    for _ in range(6):
        worker.beat("anchor")
        dist.barrier()
        start = time.perf_counter()
        model(tokens).square().mean().backward()
        times.append(time.perf_counter() - start)
        model.zero_grad(set_to_none=True)
    return statistics.median(times[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measurements of the plans over the rounds that count; the anchor's median in them."""

    measurements: tuple[Measurement, ...]
    anchor: float
    rounds: int
    discarded: int


def measure_rounds(
    group: WorkerGroup, job: TrainingJob, plans: Sequence[tuple[str, Plan]], *, rounds: int = ROUNDS, deadline: float, progress: Progress
) -> Measured:
    """Rounds through all the plans, which have names, until enough were quiet or the time is up; where none was, the steadiest counts.

    job        of the anchor
    deadline   no round is begun that would end later, on the clock of `time.monotonic` [s]
    """
    found: list[tuple[float, float, list[Measurement]]] = []
    longest = 0.0
    before = max(group.call(anchor_on_rank, job))
    for index in range(max(MOST_ROUNDS, rounds)):
        start = time.monotonic()
        if sum(drift <= MOST_DRIFT for drift, _, _ in found) >= rounds or (found and start + longest > deadline):
            break
        row = []
        for number, (name, plan) in enumerate(plans):
            done = (min(index, rounds - 1) + number / len(plans)) / rounds
            progress(done, f"round {index + 1}: {name}")
            inspects = index == 0
            row.append(run_plan(plan, steps=STEPS, warmup=WARMUP, check_gradients=inspects, inspects=inspects, group=group))
        after = max(group.call(anchor_on_rank, job))
        found.append((abs(after / before - 1.0), (before + after) / 2, row))
        before = after
        longest = max(longest, (time.monotonic() - start) if index else 0.0)
    quiet = [entry for entry in found if entry[0] <= MOST_DRIFT] or [min(found, key=lambda entry: entry[0])]
    first = found[0][2]
    measurements = []
    for number, inspected in enumerate(first):
        merged = merge([entry[2][number] for entry in quiet])
        # what only the first round looked at holds whether its times count or not
        measurements.append(
            replace(
                merged,
                peak_memory=inspected.peak_memory,
                memory_by_rank=inspected.memory_by_rank,
                collectives=inspected.collectives,
                gradient_error=inspected.gradient_error,
            )
        )
    return Measured(
        measurements=tuple(measurements),
        anchor=statistics.median(anchor for _, anchor, _ in quiet),
        rounds=len(quiet),
        discarded=len(found) - len(quiet),
    )
