"""Sources of uncertainty of a step time, as tables and lines."""

from __future__ import annotations

from typing import Any

from perfmodel.foundation.plain import picked
from perfmodel.foundation.text import percent
from perfmodel.foundation.units import format_step
from perfmodel.parallel.interval import COVERAGE, NORMAL
from perfmodel.report.predictions import grade_object
from perfmodel.report.table import Table, table_of
from perfmodel.uncertainty.sources import Remedy, TrustAccount


def trust_object(account: TrustAccount, step_time: float) -> dict[str, Any]:
    """Return the `--json` object; shares are of the variance of log(step time), times in seconds."""
    cheapest = account.cheapest

    def remedied(remedy: Remedy) -> dict[str, Any]:
        return {
            "what": remedy.says,
            "how": remedy.how,
            "interval": [step_time * remedy.low, step_time * remedy.high],
            **picked(remedy, "share_left halves"),
        }

    return {
        **grade_object(account.interval.trust),
        "coverage": COVERAGE,
        "interval": [step_time * account.interval.low, step_time * account.interval.high],
        "rests_on": account.interval.rests_on,
        "doubts": [{"what": source.name, **picked(source, "share spread rests_on")} for source in account.uncertainties],
        "remedies": [remedied(remedy) for remedy in account.remedies],
        "cheapest": remedied(cheapest) if cheapest else None,
    }


def trust_lines(account: TrustAccount, step_time: float) -> list[tuple[str, str]]:
    interval = account.interval
    lines = [
        ("trust", interval.trust),
        (f"{COVERAGE:.0%} interval", f"{_range(interval.low, interval.high, step_time)}, from {interval.rests_on}"),
    ]
    best = account.cheapest
    if best is not None:
        name = "to halve it" if best.halves else "most informative"
        lines.append((name, f"{best.says} ({best.how}): then {_range(best.low, best.high, step_time)}"))
    return lines


def _range(low: float, high: float, step_time: float) -> str:
    return f"{format_step(step_time * low)} to {format_step(step_time * high)} ({low - 1:+.0%}, {high - 1:+.0%})"


def uncertainty_table(account: TrustAccount) -> Table:
    """Return the variance share of each source; by itself: the interval if all other sources were known exactly."""
    rows = (
        (source.name, percent(source.share), f"+-{percent(NORMAL * source.spread)}", source.rests_on) for source in account.uncertainties
    )
    return table_of("Sources of uncertainty of the step time", "~source | >share | >by itself | ~basis", rows)


def remedies_table(account: TrustAccount, step_time: float) -> Table:
    rows = (
        (remedy.says, remedy.how, percent(remedy.share_left), _range(remedy.low, remedy.high, step_time)) for remedy in account.remedies
    )
    title = "Measurements that reduce the uncertainty, the cheapest first"
    return table_of(title, "~what | ~how | >variance left | ~interval then", rows)
