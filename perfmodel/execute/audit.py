"""`audit_plan`: torch's own counts of a plan's program beside the predicted ones, at full size, on any machine.

Nothing here imports torch: a process of its own does.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence

from perfmodel.cost.counts import Audit, RankAudit, audit_rows, predicted_counts
from perfmodel.cost.estimate import Estimator
from perfmodel.errors import InputError, RunError
from perfmodel.execute.audit_worker import receive, send
from perfmodel.execute.refuse import form_reason
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


def audit_plan(estimator: Estimator, plan: Plan, ranks: Sequence[int], *, progress: Callable[[float, str], None] | None = None) -> Audit:
    """Build the plan's program under fake tensors as each of `ranks`, run a counted step, and compare with `estimator`."""
    reason = form_reason(plan)
    if reason:
        raise InputError(reason)
    audited = []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile() as log:
        code = "from perfmodel.execute.audit_worker import main; main()"
        process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            send(process.stdin, (plan, tuple(ranks)))
            _, version = receive(process.stdout)
            for i, rank in enumerate(ranks):
                if progress is not None:
                    progress(i / len(ranks), f"rank {rank}")
                kind, _, *content = receive(process.stdout)
                if kind == "error":
                    raise RunError(f"audit: rank {rank}: torch cannot build or run this program: {content[0]}")
                place = place_of(plan, rank)
                rows = audit_rows(predicted_counts(estimator, plan, place), content[0])
                audited.append(RankAudit(rank=rank, place=place, rows=rows, elapsed=content[1], memory=content[2]))
        except (EOFError, BrokenPipeError):
            log.seek(0)
            lines = log.read().decode(errors="replace").strip().splitlines()
            raise RunError(f"audit: its process ended early: {lines[-1] if lines else 'no output'}") from None
        finally:
            process.kill()
            process.stdin.close()
            process.stdout.close()
            process.wait()
    return Audit(plan=plan, profile=estimator.profile.name, torch=version, ranks=tuple(audited))
