"""Plans measured in turn, A B C A B C, watching what other processes take of the machine.

An anchor, a fixed piece of work between the rounds, tells how the machine's own speed moved.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from perfmodel.execute.launch.launch import Worker, WorkerGroup
from perfmodel.execute.run import run_plan
from perfmodel.execute.runner import merge
from perfmodel.hardware.calibration import MOST_BUSY
from perfmodel.parallel.plan import Plan
from perfmodel.parallel.results import Measurement
from perfmodel.workload.job import TrainingJob

Progress = Callable[[float, str], None]
"""Called with the finished share (0 to 1) and what is being measured."""

#: Steps of a plan in one round, before and while it is timed, and how many rounds: A B C A B C, so that what else the machine does
#: disturbs all plans alike.
WARMUP, STEPS, ROUNDS = 2, 6, 3
#: Turns of a plan in which other processes took more than `MOST_BUSY` of the processors are measured again.
MOST_ROUNDS = 8


def anchor_on_rank(worker: Worker, job: TrainingJob) -> float:
    """Time of a fixed piece of work, forward and backward of a model on every rank by itself. [s]"""
    import torch.distributed as dist

    from perfmodel.execute.uniform.model import Transformer
    from perfmodel.execute.uniform.weights import fill, make_tokens

    model = Transformer(job.transformer, device=worker.device)  # built anew: what stayed would count in the memory of the plans
    for name, parameter in model.named_parameters():
        fill(job.transformer, name, parameter)
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
class Turn:
    """One plan's steps in one round, and the share of the processors that others took meanwhile."""

    measurement: Measurement
    others: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measurements of the plans over the turns that count.

    anchor      median of the anchor's times before, between and after the rounds [s]
    others      largest share of the processors that others took in a turn that counts
    turns, discarded   turns that count, and those in which the machine was too busy
    """

    measurements: tuple[Measurement, ...]
    anchor: float
    others: float
    turns: int
    discarded: int


def measure_rounds(
    group: WorkerGroup, job: TrainingJob, plans: Sequence[tuple[str, Plan]], *, rounds: int = ROUNDS, deadline: float, progress: Progress
) -> Measured:
    """Rounds through the plans, which have names, until each has had enough quiet turns or the time is up.

    Where a plan had no quiet turn, the quietest counts. job: of the anchor. deadline: no round is begun that would end later, on the
    clock of `time.monotonic` [s].
    """
    found: list[list[Turn]] = [[] for _ in plans]
    anchors = [max(group.call(anchor_on_rank, job))]
    slowest_turn = 0.0
    for index in range(max(MOST_ROUNDS, rounds)):
        due = [number for number, turns in enumerate(found) if len(quiet(turns)) < rounds]
        if not due or (index and time.monotonic() + len(due) * slowest_turn > deadline):
            break
        for place, number in enumerate(due):
            name, plan = plans[number]
            progress(min(index + place / len(due), rounds - 0.1) / rounds, f"round {index + 1}: {name}")
            start, inspects = time.monotonic(), index == 0
            measurement = run_plan(plan, steps=STEPS, warmup=WARMUP, check_gradients=inspects, inspects=inspects, group=group)
            found[number].append(Turn(measurement=measurement, others=measurement.busy_fraction))
            slowest_turn = max(slowest_turn, 0.0 if inspects else time.monotonic() - start)
        anchors.append(max(group.call(anchor_on_rank, job)))
    counting = [quiet(turns) or [min(turns, key=lambda turn: turn.others)] for turns in found]
    return Measured(
        measurements=tuple(joined(turns[0].measurement, chosen) for turns, chosen in zip(found, counting, strict=True)),
        anchor=statistics.median(anchors),
        others=max(turn.others for chosen in counting for turn in chosen),
        turns=sum(map(len, counting)),
        discarded=sum(map(len, found)) - sum(map(len, counting)),
    )


def quiet(turns: Sequence[Turn]) -> list[Turn]:
    return [turn for turn in turns if turn.others <= MOST_BUSY]


def joined(inspected: Measurement, turns: Sequence[Turn]) -> Measurement:
    """The turns' steps as one measurement; what only the first turn looked at holds whether its times count or not."""
    return replace(
        merge([turn.measurement for turn in turns]),
        peak_memory=inspected.peak_memory,
        memory_by_rank=inspected.memory_by_rank,
        collectives=inspected.collectives,
        gradient_error=inspected.gradient_error,
    )
