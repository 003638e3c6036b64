"""`audit_plan`: torch's own counts of a plan's program compared with the predicted ones, at full size, on any machine.

This module does not import torch: a separate process does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

from perfmodel.cost.audit import Audit, RankAudit, audit_rows
from perfmodel.cost.counts import RankCounts, predicted_counts
from perfmodel.cost.estimate import Estimator
from perfmodel.cost.programs import Compiled
from perfmodel.execute.audit.repeat import counted_microbatches, extrapolate
from perfmodel.execute.launch.processes import (
    STOPPED_TIMEOUT,
    RunningClock,
    exit_reason,
    is_stopped,
    last_log_line,
    private_folder,
    start_python,
)
from perfmodel.foundation.errors import InputError, RunError
from perfmodel.parallel.executable import counted_routing, not_modules_reason
from perfmodel.parallel.plan import Plan, place_of, rank_at
from perfmodel.workload.routing import BALANCED, RoutingCounts


def ranks_to_audit(plan: Plan, *, rank: int | None = None, every_stage: bool = True) -> tuple[int, ...]:
    """Return one rank of each pipeline stage, or of the first and the last stage.

    Within a stage, the rank with the last chunk of the sequence is taken: it computes the most under context parallelism.
    """
    if rank is not None:
        if not 0 <= rank < plan.num_chips:
            raise InputError(f"rank={rank}: must be from 0 to {plan.num_chips - 1}; the plan has {plan.num_chips} chips")
        return (rank,)
    stages = range(plan.layout.pp) if every_stage else sorted({0, plan.layout.pp - 1})
    return tuple(rank_at(plan, {"pp": stage, "cp": plan.layout.cp - 1}) for stage in stages)


def audit_plan(
    estimator: Estimator,
    plan: Plan,
    ranks: Sequence[int],
    *,
    routing: RoutingCounts | None = None,
    every_microbatch: bool = False,
    progress: Callable[[float, str], None] | None = None,
) -> Audit:
    """Build the plan's program under fake tensors as each of `ranks`, run a counted step, and compare with `estimator`.

    Dropout is active if the estimator's profile models it.

    routing             tokens that each rank sends to each expert; None: the routing of the plan, balanced by default
    every_microbatch    count the full step; otherwise count two shorter steps if that is less work (`repeat.py`)
    """
    routing = counted_routing(plan, routing)
    if plan.job.routing.counts is not None:
        # counts are given per rank, so BALANCED replaces the slowest-rank statistics of the plan
        plan = replace(plan, job=replace(plan.job, routing=BALANCED))
        estimator = replace(estimator, job=plan.job, programs=replace(estimator.programs, job=plan.job, compiled=Compiled()))
    reason = not_modules_reason(plan)
    if reason:
        raise InputError(reason)
    every = (plan.num_microbatches,)
    largest: tuple[int, ...] = ()
    audited: list[RankAudit] = []
    with CountingProcess() as process:
        for rank in ranks:
            coordinates = place_of(plan, rank)
            numbers = every if every_microbatch else counted_microbatches(plan, coordinates["pp"])
            largest = max(largest, numbers)
            if progress is not None:
                progress(len(audited) / len(ranks), f"rank {rank}")
            counted = process.count(plan, rank, numbers, dropout=estimator.profile.kernels.dropout, routing=routing)
            predicted = predicted_counts(estimator, plan, coordinates, routing)
            audited.append(
                RankAudit(
                    rank=rank,
                    coordinates=coordinates,
                    rows=audit_rows(predicted, counted.counts),
                    peak_moment=predicted.peak_moment,
                    peak_by_class={name: size for name, size in predicted.peak_by_class.items() if size},
                    elapsed=counted.elapsed,
                    memory=counted.memory,
                )
            )
    return Audit(
        plan=plan,
        profile=estimator.profile.name,
        torch=process.torch_version,
        counted_microbatches=largest,
        ranks=tuple(audited),
        skew=routing.skew if routing is not None else 0.0,
    )


#: Function that counts a training plan: module and name.
_TRAINING = ("perfmodel.execute.audit.count", "torch_counts")


class Counted(NamedTuple):
    """Torch's counts of one rank, with the time [s] and the host memory [byte] that counting took."""

    counts: RankCounts
    elapsed: float
    memory: float


class CountingProcess:
    """A process that imports torch once and counts plans, one forked child per rank.

    Requests and replies are numbered. An interruption (Ctrl-C, a time limit) ends the process, so that a later request cannot
    receive a stale reply. The next request starts a new process.
    """

    def __init__(self) -> None:
        self._scope = ExitStack()
        self._process: subprocess.Popen[bytes] | None = None
        self._number = 0
        self.torch_version = ""

    def __enter__(self) -> CountingProcess:
        self._start()
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def _start(self) -> None:
        try:
            self._folder = self._scope.enter_context(private_folder())
            self._process, self._connection = start_python(
                ("perfmodel.execute.audit.worker", "main"),
                os.getpid(),
                folder=self._folder,
                log=self._folder / "log",
                settings={"OMP_NUM_THREADS": "1"},
            )
            self._scope.enter_context(self._connection)
            self._number = 0
            (self.torch_version,) = self._receive()[1:]
        except OSError as error:
            self.close()
            reason = error.strerror or str(error)
            raise RunError(f"audit: its process could not be started ({reason}); free some memory or disk space and audit again") from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()  # the forked child dies with it
            self._process.wait()
            self._process = None
        self._scope.close()

    def count(
        self, plan: Plan, rank: int, numbers: Sequence[int] = (), *, dropout: bool = False, routing: RoutingCounts | None = None
    ) -> Counted:
        """Count one step of the rank. Raise RunError if torch cannot build or run its program.

        numbers     micro-batch counts to run; the plan's count is extrapolated from them. Default: the plan's own count
        """
        counts, elapsed, memory = self.ask(
            _TRAINING,
            plan,
            rank,
            tuple(numbers) or (plan.num_microbatches,),
            dropout,
            routing,
            about=f"rank {rank}",
            program="this program",
        )
        return Counted(extrapolate(counts, plan.num_microbatches), elapsed, memory)

    def ask(self, function: tuple[str, str], *arguments: Any, about: str, program: str) -> tuple[Any, float, float]:
        """Return the result of a function (module, name) run in a forked child, its time [s] and its memory [byte].

        about, program   names used in error messages: the requester, and what could not be built
        """
        if self._process is None:
            self._start()
        self._number += 1
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # _receive reports the end of the process
                self._connection.send((self._number, function, arguments))
            kind, *content = self._receive()
        except BaseException:
            self.close()
            raise
        if kind == "error":
            raise RunError(f"audit: {about}: torch cannot build or run {program}: {content[0]}")
        if kind == "lost":
            raise RunError(f"audit: {about}: {content[0]}")
        result, elapsed, memory = content
        return result, elapsed, memory

    def _receive(self) -> tuple[Any, ...]:
        """Return the reply to the last request, without its number. Raise RunError if the process ends or is stopped."""
        assert self._process is not None
        clock, stopped = RunningClock(), 0.0
        try:
            while not self._connection.poll(0.2):
                stopped = stopped + clock.passed() if is_stopped(self._process.pid) else 0.0
                if stopped > STOPPED_TIMEOUT:
                    raise RunError("audit: its process was stopped from outside (SIGSTOP); audit again")
            number, *answer = self._connection.recv()
        except (EOFError, ConnectionResetError):
            code = self._process.wait()
            words = last_log_line(self._folder / "log", code)
            remedy = "free some memory and audit again" if code == -signal.SIGKILL else "audit again"
            raise RunError(f"audit: its process died ({exit_reason(code)}){words}; {remedy}") from None
        if number != self._number:
            raise RunError(f"audit: its process answered question {number} where {self._number} was asked; audit again")
        return tuple(answer)
