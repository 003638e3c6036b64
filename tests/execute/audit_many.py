"""Audits of many random plans, any rank of each: `python -m tests.execute.audit_many --plans 300 --seed 1`.

Prints each plan of which a count differs, or whose memory differs by more than the test of random plans admits, then a summary.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from perfmodel.cost.audit import AuditRow, audit_rows
from perfmodel.execute.audit.audit import CountingProcess
from perfmodel.parallel.plan import Plan, place_of
from tests.execute.audit.test_audit import predicted
from tests.execute.random_plans import grown, plans

#: Largest shares by which memory may differ.
ALLOWED = {"saved activations": 0.01, "peak": 0.06}


def rows_of(process: CountingProcess, plan: Plan, rank: int) -> tuple[AuditRow, ...]:
    return audit_rows(predicted(plan, rank), process.count(plan, rank).counts)


def shown(plan: Plan, rank: int) -> str:
    layout, model = plan.layout, plan.job.model
    degrees = " ".join(f"{axis} {layout.degree(axis)}" for axis in plan.order if layout.degree(axis) > 1)
    uneven = f" layers {list(plan.stage_layers)}" if layout.pp > 1 else ""
    return (
        f"{degrees} ZeRO-{int(plan.zero)} {plan.schedule}{uneven} {plan.num_microbatches} microbatches {plan.attention} recompute "
        f"{plan.recompute} {plan.job.precision} {plan.job.optimizer} {model.positions.position} rank {rank} {place_of(plan, rank)}"
    )


def audit_many(num_plans: int, number: int, seconds: float) -> dict[str, list[float]]:
    """Return the shares by which each kind of memory differs, for the number of plans that the seconds allow."""
    shares: dict[str, list[float]] = {name: [] for name in ALLOWED}
    ends = time.monotonic() + seconds
    with CountingProcess() as process:

        @seed(number)
        @settings(max_examples=num_plans, phases=[Phase.generate], database=None, deadline=None, suppress_health_check=list(HealthCheck))
        @given(plan=plans(), drawn=st.integers(0, 1 << 20))
        def audit(plan: Plan, drawn: int) -> None:
            if time.monotonic() > ends:
                return
            rank = drawn % plan.num_chips
            wrong = [row for row in rows_of(process, plan, rank) if row.difference and not row.tolerance]
            for row in rows_of(process, grown(plan), rank):
                if row.tolerance:
                    shares[row.name].append(row.difference / row.counted if row.counted else float(row.predicted != 0))
                    if abs(shares[row.name][-1]) > ALLOWED[row.name]:
                        wrong.append(row)
            if wrong:
                print(
                    shown(plan, rank), *(f"  {row.name}: predicted {row.predicted:g}, counted {row.counted:g}" for row in wrong), sep="\n"
                )

        audit()
    return shares


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Audit random plans.")
    parser.add_argument("--plans", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3600.0, help="no further plan after so long")
    given_ = parser.parse_args(arguments)
    for name, shares in audit_many(given_.plans, given_.seed, given_.seconds).items():
        sizes = sorted(abs(share) for share in shares)
        over = sum(size > ALLOWED[name] for size in sizes)
        if sizes:
            middle, most = sizes[len(sizes) // 2], sizes[-1]
            print(f"{name}: {len(sizes)} plans, median {middle:.2%}, largest {most:.2%}, {over} beyond {ALLOWED[name]:.0%}")


if __name__ == "__main__":
    main()
