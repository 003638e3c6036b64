"""An audit: predicted counts of a step next to torch's own (`execute/audit/`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from perfmodel.cost.counts import RankCounts
from perfmodel.parallel.plan import Plan

#: Shares by which saved activations (a loss is a number, a token has an index) and the peak may differ from torch's.
SAVED_TOLERANCE, PEAK_TOLERANCE = 0.01, 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRow:
    """One quantity, predicted and counted. `unit`: FLOP, byte, or "" for a number of collectives.

    tolerance  a difference up to this share of the larger one passes: 0 for counts, more for the moment of the peak, which the memory model
               picks from a few
    """

    group: str
    name: str
    unit: str
    predicted: float
    counted: float
    tolerance: float = 0.0

    @property
    def difference(self) -> float:
        return self.counted - self.predicted

    def passes(self, tolerance: float = 0.0) -> bool:
        allowed = max(self.tolerance, tolerance)
        return abs(self.difference) <= allowed * max(abs(self.predicted), abs(self.counted))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAudit:
    """Audit of one rank: its coordinates, predicted and counted quantities. elapsed [s] and memory [byte] of the audit itself.

    peak_moment, peak_by_class   moment and composition of the predicted peak   [byte]
    """

    rank: int
    coordinates: Mapping[str, int]
    rows: tuple[AuditRow, ...]
    peak_moment: str
    peak_by_class: Mapping[str, float]
    elapsed: float
    memory: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """Audit of a plan: one entry for each audited rank.

    counted_microbatches    of the counted steps: the number of the plan, or two from which it follows; late stages of a pipeline need fewer
    skew                    rows of the fullest rank's experts over the mean; 0: all are equal
    """

    plan: Plan
    profile: str
    torch: str
    counted_microbatches: tuple[int, ...]
    ranks: tuple[RankAudit, ...]
    skew: float = 0.0

    def differences(self, tolerance: float = 0.0) -> list[tuple[int, AuditRow]]:
        """Return (rank, row) where torch's count differs by more than `tolerance` of the larger one."""
        return [(audited.rank, row) for audited in self.ranks for row in audited.rows if not row.passes(tolerance)]


def audit_rows(predicted: RankCounts, counted: RankCounts) -> tuple[AuditRow, ...]:
    """Return predicted and counted quantities, paired."""
    rows = []

    def add(group: str, name: str, unit: str, left: float, right: float) -> None:
        rows.append(AuditRow(group=group, name=name, unit=unit, predicted=float(left), counted=float(right)))

    for shape in dict.fromkeys((*predicted.flops, *counted.flops)):
        dims = " " + "x".join(str(dim) for dim in shape if dim != 1)
        if shape in predicted.operators and len(shape) == 1:
            dims = " backward" if str(shape[0]).endswith(".grad") else ""
        name = ", ".join(predicted.operators.get(shape, ("?",))) + dims
        add("FLOPs", name, "FLOP", predicted.flops.get(shape, 0.0), counted.flops.get(shape, 0.0))
    for kind, axes in sorted({*predicted.collectives, *counted.collectives}):
        left, right = (counts.collectives.get((kind, axes), (0, 0.0)) for counts in (predicted, counted))
        add("collectives", f"{kind} {axes}", "", left[0], right[0])
        add("collectives", f"{kind} {axes}", "byte", left[1], right[1])
    for name in ("parameters", "gradients", "optimizer"):
        add("memory", name, "byte", getattr(predicted, name), getattr(counted, name))
    for name, key, allowed in (("saved activations", "saved", SAVED_TOLERANCE), ("peak", "peak", PEAK_TOLERANCE)):
        left, right = getattr(predicted, key), getattr(counted, key)
        rows.append(AuditRow(group="memory", name=name, unit="byte", predicted=left, counted=right, tolerance=allowed))
    return tuple(rows)
