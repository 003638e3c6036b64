"""Measurement of plans in rounds, A B C A B C, while monitoring the processor use of other processes.

An anchor, a fixed workload between the rounds, measures drift of the machine's own speed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from perfmodel.execute.launch.launch import Worker, WorkerGroup
from perfmodel.execute.run import run_plan
from perfmodel.hardware.calibration import MOST_BUSY
from perfmodel.parallel.plan import Plan
from perfmodel.parallel.results import Measurement, interquartile_range
from perfmodel.workload.job import TrainingJob

Progress = Callable[[float, str], None]
"""Called with the finished share (0 to 1) and a description of the current measurement."""

#: Warm-up steps and most and fewest timed steps of a plan per round, and the number of rounds: A B C A B C, so that disturbances by other
#: processes and drift affect all plans equally. A slow machine times fewer steps a round rather than fewer rounds.
WARMUP, STEPS, FEWEST_STEPS, ROUNDS = 2, 6, 2, 3
#: Time of a turn before its first step: process groups, model, optimizer. Empirical, on two cores. [s]
TURN_SETUP_TIME = 1.5
#: A plan's turn is repeated if other processes took more than `MOST_BUSY` of the processors.
MOST_ROUNDS = 8


def anchor_on_rank(worker: Worker, job: TrainingJob) -> float:
    """Return the time of a fixed workload: forward and backward of a model on every rank, without communication. [s]"""
    import torch.distributed as dist

    from perfmodel.execute.uniform.weights import make_tokens, one_process_model

    model = one_process_model(job.transformer, worker.device)  # rebuilt every time: a kept model would count as memory of the plans
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
    """Measurements of the plans over the accepted turns.

    anchor      median of the anchor's times before, between and after the rounds [s]
    others      largest processor share of other processes in an accepted turn
    turns, discarded   number of accepted turns, and of turns on a too busy machine
    """

    measurements: tuple[Measurement, ...]
    anchor: float
    others: float
    turns: int
    discarded: int


def measure_rounds(
    group: WorkerGroup,
    job: TrainingJob,
    plans: Sequence[tuple[str, Plan]],
    *,
    expected_time: float,
    rounds: int = ROUNDS,
    deadline: float,
    progress: Progress,
) -> Measured:
    """Measure the named plans in rounds until each has enough quiet turns or the deadline is near.

    A plan without a quiet turn uses its quietest turn.

    job             job of the anchor
    expected_time   sum of the plans' predicted step times; sets the timed steps of a turn so that all rounds end in time [s]
    deadline        no round starts that would end later, on the clock of `time.monotonic` [s]
    """
    steps = steps_of_a_turn((deadline - time.monotonic()) / rounds, len(plans), expected_time)
    turns_by_plan: list[list[Measurement]] = [[] for _ in plans]
    anchors = [max(group.call(anchor_on_rank, job))]
    slowest_turn = 0.0
    for index in range(max(MOST_ROUNDS, rounds)):
        due = [number for number, turns in enumerate(turns_by_plan) if len(quiet(turns)) < rounds]
        if not due or (index and time.monotonic() + len(due) * slowest_turn > deadline):
            break
        for position, number in enumerate(due):
            name, plan = plans[number]
            progress(min(index + position / len(due), rounds - 0.1) / rounds, f"round {index + 1}: {name}")
            start, inspects = time.monotonic(), index == 0
            measurement = run_plan(plan, steps=steps, warmup=WARMUP, check_gradients=inspects, inspects=inspects, group=group)
            turns_by_plan[number].append(measurement)
            slowest_turn = max(slowest_turn, 0.0 if inspects else time.monotonic() - start)
        anchors.append(max(group.call(anchor_on_rank, job)))
    counting = [quiet(turns) or [min(turns, key=lambda turn: turn.busy_fraction)] for turns in turns_by_plan]
    return Measured(
        measurements=tuple(joined(turns[0], chosen) for turns, chosen in zip(turns_by_plan, counting, strict=True)),
        anchor=statistics.median(anchors),
        others=max(turn.busy_fraction for chosen in counting for turn in chosen),
        turns=sum(map(len, counting)),
        discarded=sum(map(len, turns_by_plan)) - sum(map(len, counting)),
    )


def steps_of_a_turn(round_time: float, num_plans: int, expected_time: float) -> int:
    """Return the timed steps of each plan with which a round takes `round_time`. expected_time: sum of the plans' predicted step times."""
    affordable = int((round_time - num_plans * TURN_SETUP_TIME) / expected_time) - WARMUP
    return min(max(affordable, FEWEST_STEPS), STEPS)


def quiet(turns: Sequence[Measurement]) -> list[Measurement]:
    return [turn for turn in turns if turn.busy_fraction <= MOST_BUSY]


def joined(inspected: Measurement, turns: Sequence[Measurement]) -> Measurement:
    """Merge the steps of the turns into one measurement. Memory, collectives and gradient error come from the inspected first turn."""
    first = turns[0]
    times = tuple(time for turn in turns for time in turn.step_times)
    # phases of every turn; communication of the inspected one
    parts = {name: statistics.median(turn.parts[name] for turn in turns if name in turn.parts) for name in first.parts}
    return replace(
        first,
        steps=len(times),
        step_times=times,
        step_time=statistics.median(times),
        step_time_spread=interquartile_range(times),
        parts=parts,
        peak_memory=inspected.peak_memory,
        memory_by_rank=inspected.memory_by_rank,
        collectives=inspected.collectives,
        gradient_error=inspected.gradient_error,
        busy_fraction=max(turn.busy_fraction for turn in turns),
    )
