"""`audit_plan`: torch's own counts of a plan's program beside the predicted ones, at full size, on any machine.

Nothing here imports torch: a process of its own does.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from perfmodel.cost.counts import Audit, RankAudit, RankCounts, audit_rows, predicted_counts
from perfmodel.cost.estimate import Estimator
from perfmodel.errors import InputError, RunError
from perfmodel.execute.audit_repeat import counted_microbatches, extrapolate, with_microbatches
from perfmodel.execute.audit_worker import receive, send
from perfmodel.parallel.executable import not_executable_reason
from perfmodel.parallel.plan import Plan, place_of, rank_at


def ranks_to_audit(plan: Plan, *, rank: int | None = None, every_stage: bool = True) -> tuple[int, ...]:
    """One rank of each pipeline stage, or of the first and the last.

    Of the ranks of a stage the one with the last chunk of the sequence, which computes the most under context parallelism.
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
    every_microbatch: bool = False,
    progress: Callable[[float, str], None] | None = None,
) -> Audit:
    """Build the plan's program under fake tensors as each of `ranks`, run a counted step, and compare with `estimator`.

    The model's dropout runs if the estimator's profile says so.

    every_microbatch    count the step whole; else two shorter ones, where that is less work (`audit_repeat.py`)
    """
    reason = not_executable_reason(plan)
    if reason:
        raise InputError(reason)
    numbers = (plan.num_microbatches,) if every_microbatch else counted_microbatches(plan)
    audited: list[RankAudit] = []
    with CountingProcess() as process:
        for rank in ranks:
            counted: dict[int, Counted] = {}
            for number in numbers:
                if progress is not None:
                    progress((len(audited) + len(counted) / len(numbers)) / len(ranks), f"rank {rank}")
                counted[number] = process.count(with_microbatches(plan, number), rank, dropout=estimator.profile.dropout)
            counts = extrapolate({number: each.counts for number, each in counted.items()}, plan.num_microbatches)
            place = place_of(plan, rank)
            predicted = predicted_counts(estimator, plan, place)
            audited.append(
                RankAudit(
                    rank=rank,
                    place=place,
                    rows=audit_rows(predicted, counts),
                    peak_moment=predicted.peak_moment,
                    peak_by_class={name: size for name, size in predicted.peak_by_class.items() if size},
                    elapsed=sum(each.elapsed for each in counted.values()),
                    memory=max(each.memory for each in counted.values()),
                )
            )
    return Audit(plan=plan, profile=estimator.profile.name, torch=process.torch_version, counted_microbatches=numbers, ranks=tuple(audited))


class Counted(NamedTuple):
    """Torch's counts of one rank, and the seconds and the bytes of this machine's memory that they took."""

    counts: RankCounts
    elapsed: float
    memory: float


class CountingProcess:
    """A process that imports torch once and counts plans for this one, each rank in a fork of its own."""

    def __enter__(self) -> CountingProcess:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        code = "from perfmodel.execute.audit_worker import main; main()"
        self._log = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=environment
        )
        try:
            self.torch_version: str = self._receive()[1]
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *details: object) -> None:
        process = self._process
        process.kill()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()  # type: ignore[union-attr]
        process.stdout.close()  # type: ignore[union-attr]
        process.wait()
        self._log.close()

    def count(self, plan: Plan, rank: int, *, dropout: bool = False) -> Counted:
        """That rank's step, counted; RunError where torch cannot build or run its program."""
        try:
            send(self._process.stdin, (plan, rank, dropout))  # type: ignore[arg-type]
        except BrokenPipeError:
            raise self._ended() from None
        kind, *content = self._receive()
        if kind == "error":
            raise RunError(f"audit: rank {rank}: torch cannot build or run this program: {content[0]}")
        return Counted(*content)

    def _receive(self) -> tuple[Any, ...]:
        try:
            return receive(self._process.stdout)  # type: ignore[arg-type, no-any-return]
        except EOFError:
            raise self._ended() from None

    def _ended(self) -> RunError:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return RunError(f"audit: its process ended early: {lines[-1] if lines else 'no output'}")
