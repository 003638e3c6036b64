"""Published training runs as the commands of this folder read them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

from perfmodel.foundation.errors import InputError
from perfmodel.validation.case_plan import PlannedCase, plan_of_case
from perfmodel.validation.cases import Case
from perfmodel.validation.plan_choice import BROKEN_NVLINK
from perfmodel.validation.rows import NO_TIMES


def is_primary(case: Case) -> bool:
    """Whether every important input of a run is known, and its time is meaningful."""
    counts = case.tier == "primary" and not (case.reason or case.is_apart or case.group in NO_TIMES)
    return counts and not (math.isnan(case.measured("step_time")) or case.noted_all_reduce < BROKEN_NVLINK)


def planned_cases(cases: Iterable[Case], keep: Callable[[Case], bool]) -> Iterator[tuple[Case, PlannedCase]]:
    """Yield the kept cases that can be planned, with their plans."""
    for case in filter(keep, cases):
        try:
            planned = plan_of_case(case.inputs)
        except InputError:
            continue
        yield case, planned
