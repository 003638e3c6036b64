"""`audit_plan`: torch's own counts of a plan's program beside the predicted ones, at full size, on any machine.

Nothing here imports torch: a process of its own does.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from typing import Any

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

    every_microbatch    count the step whole; else two shorter ones, where that is less work (`audit_repeat.py`)
    """
    reason = not_executable_reason(plan)
    if reason:
        raise InputError(reason)
    numbers = (plan.num_microbatches,) if every_microbatch else counted_microbatches(plan)
    audited: list[RankAudit] = []
    version, results = count_with_torch([(with_microbatches(plan, number), rank) for rank in ranks for number in numbers])
    for rank in ranks:
        counted: dict[int, RankCounts] = {}
        elapsed = memory = 0.0
        for number in numbers:
            if progress is not None:
                progress((len(audited) + len(counted) / len(numbers)) / len(ranks), f"rank {rank}")
            result = next(results)
            if isinstance(result, RunError):
                results.close()
                raise result
            counted[number] = result[0]
            elapsed += result[1]
            memory = max(memory, result[2])
        place = place_of(plan, rank)
        rows = audit_rows(predicted_counts(estimator, plan, place), extrapolate(counted, plan.num_microbatches))
        audited.append(RankAudit(rank=rank, place=place, rows=rows, elapsed=elapsed, memory=memory))
    results.close()
    return Audit(plan=plan, profile=estimator.profile.name, torch=version, counted_microbatches=numbers, ranks=tuple(audited))


def count_with_torch(jobs: Sequence[tuple[Plan, int]]) -> tuple[str, Generator[Any]]:
    """Torch's version, and for each (plan, rank) what came of it.

    (counts, the seconds that they took, bytes of this machine's memory), or the error where torch cannot build or run the program.
    """
    results = _count(jobs)
    return next(results), results


def _count(jobs: Sequence[tuple[Plan, int]]) -> Generator[Any]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    code = "from perfmodel.execute.audit_worker import main; main()"
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            send(process.stdin, list(jobs))
            yield receive(process.stdout)[1]
            for _, rank in jobs:
                kind, *content = receive(process.stdout)
                failed = f"audit: rank {rank}: torch cannot build or run this program: {content[0]}"
                yield RunError(failed) if kind == "error" else tuple(content)
        except (EOFError, BrokenPipeError):
            log.seek(0)
            lines = log.read().decode(errors="replace").strip().splitlines()
            raise RunError(f"audit: its process ended early: {lines[-1] if lines else 'no output'}") from None
        finally:
            process.kill()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            process.stdout.close()
            process.wait()
