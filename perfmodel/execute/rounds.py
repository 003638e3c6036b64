"""Plans measured in turn, A B C A B C, with an anchor between the rounds that tells when the machine was disturbed."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

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
#: So is one in which other processes took more than this share of the processors.
MOST_OTHERS = 0.1
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
class ProcessorUse:
    """Processor seconds so far: of everything on this machine (idle time too), of what was busy, and of our own processes."""

    total: float
    busy: float
    own: float

    def others_since(self, earlier: ProcessorUse) -> float:
        """Share of the machine's processors that other processes took since then; 0 where the system does not say."""
        total = self.total - earlier.total
        return max((self.busy - earlier.busy) - (self.own - earlier.own), 0.0) / total if total > 0 else 0.0


def processor_use(pids: Sequence[int], *, proc: Path = Path("/proc")) -> ProcessorUse:
    """As Linux tells it; all 0 elsewhere. `pids`: our processes beside this one."""
    try:
        tick = 1.0 / os.sysconf("SC_CLK_TCK")
        user, nice, system, idle, waiting, _, _, stolen = (int(word) for word in (proc / "stat").read_text().split()[1:9])
        times = os.times()
        own = times.user + times.system
        for pid in pids:
            fields = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
            own += (int(fields[11]) + int(fields[12])) * tick  # utime and stime, the 14th and 15th field of proc(5)
    except (OSError, ValueError, IndexError):
        return ProcessorUse(total=0.0, busy=0.0, own=0.0)
    busy = user + nice + system + stolen
    return ProcessorUse(total=(busy + idle + waiting) * tick, busy=busy * tick, own=own)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Every plan once: how much the anchor moved meanwhile, its time, what share of the processors others took."""

    drift: float
    anchor: float
    others: float
    measurements: tuple[Measurement, ...]

    @property
    def disturbance(self) -> float:
        """Up to 1 the round counts."""
        return max(self.drift / MOST_DRIFT, self.others / MOST_OTHERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measurements of the plans over the rounds that count; the anchor's median in them, and the processors' share that others took."""

    measurements: tuple[Measurement, ...]
    anchor: float
    others: float
    rounds: int
    discarded: int


def measure_rounds(
    group: WorkerGroup, job: TrainingJob, plans: Sequence[tuple[str, Plan]], *, rounds: int = ROUNDS, deadline: float, progress: Progress
) -> Measured:
    """Rounds through all the plans, which have names, until enough were quiet or the time is up; where none was, the steadiest counts.

    job        of the anchor
    deadline   no round is begun that would end later, on the clock of `time.monotonic` [s]
    """
    found: list[Round] = []
    longest = 0.0
    before = max(group.call(anchor_on_rank, job))
    for index in range(max(MOST_ROUNDS, rounds)):
        start = time.monotonic()
        if sum(entry.disturbance <= 1.0 for entry in found) >= rounds or (found and start + longest > deadline):
            break
        use, row = processor_use(group.pids), []
        for number, (name, plan) in enumerate(plans):
            done = (min(index, rounds - 1) + number / len(plans)) / rounds
            progress(done, f"round {index + 1}: {name}")
            inspects = index == 0
            row.append(run_plan(plan, steps=STEPS, warmup=WARMUP, check_gradients=inspects, inspects=inspects, group=group))
        others = processor_use(group.pids).others_since(use)
        after = max(group.call(anchor_on_rank, job))
        found.append(Round(drift=abs(after / before - 1.0), anchor=(before + after) / 2, others=others, measurements=tuple(row)))
        before = after
        longest = max(longest, (time.monotonic() - start) if index else 0.0)
    counting = [entry for entry in found if entry.disturbance <= 1.0] or [min(found, key=lambda entry: entry.disturbance)]
    measurements = []
    for number, inspected in enumerate(found[0].measurements):
        merged = merge([entry.measurements[number] for entry in counting])
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
        anchor=statistics.median(entry.anchor for entry in counting),
        others=statistics.fmean(entry.others for entry in counting),
        rounds=len(counting),
        discarded=len(found) - len(counting),
    )
