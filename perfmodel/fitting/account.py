"""The steps of `perfmodel fit`: read and check rows, fit the profile, and report the result."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from perfmodel.cost.resolve import CPU_PROFILE
from perfmodel.fitting.columns import Row
from perfmodel.fitting.fit import Array, UserRun, fit_memory, fit_own
from perfmodel.fitting.next_run import next_run
from perfmodel.fitting.plan import has_memory, has_time, run_of_row
from perfmodel.fitting.read import RunFile
from perfmodel.fitting.result import FittedProfile, result_of, with_memory
from perfmodel.foundation.errors import InputError
from perfmodel.foundation.units import format_step
from perfmodel.frameworks.profile import GENERIC, ExecutionProfile, load_profile
from perfmodel.parallel.framework_ref import passed_over, passed_over_line
from perfmodel.parallel.plan import Plan
from perfmodel.validation.run_machine import cluster_of_run

_MANY = 300
"""Number of runs from which a fit takes seconds; a hundred determine the parameters almost as well."""

_NEAR = 2.5
"""Tolerance factor between the measured time and the predicted one in another unit, within which that unit is the cause."""

_FAR = 8.0
"""Factor from which a run does not match its plan, for any framework: the slowest known one has a third of the speed of the fastest."""

#: measured / predicted -> (description of the unit, remedy)
_UNITS = (
    (1e3, "in milliseconds", "name the column step_time_ms, or write 4200 ms"),
    (1e-3, "in units of 1,000 seconds, or of 1,000 steps", "write seconds"),
    (1e6, "in microseconds", "write seconds, or 4200000 us"),
    (60.0, "of 60 steps, or in units of a sixtieth of a second", "write seconds of one step"),
    (1 / 60.0, "in minutes", "write seconds"),
    (1 / 3600.0, "in hours", "write seconds"),
)


def fit_rows(
    files: Sequence[RunFile],
    defaults: Mapping[str, Any],
    *,
    plans: Sequence[Plan] = (),
    profile: ExecutionProfile | None = None,
    calibration: str = "",
    name: str = "own",
) -> FittedProfile:
    """Fit a profile to the rows, and call it `name`.

    defaults   values for rows that lack them
    plans      plans of the files that give times only, in order, or one for all of them
    profile    starting point of the fit; None: the profile of the framework that the runs name
    """
    files = _with_plans(files, plans)
    unplanned = [row.location for file in files for row in file.rows if file.needs_plan and "plan" not in row.values]
    if unplanned and not defaults.keys() & {"model", "chips", "cluster"}:
        remedy = "say what it ran: --plan PLAN.yaml (`perfmodel predict ... --save` writes one), or --model, --cluster and the rest"
        raise InputError(f"{unplanned[0]}: gives measurements only; {remedy}")
    rows = [row if row.values.get("plan") else row.over(defaults) for file in files for row in file.rows]
    measured_rows = [row for row in rows if has_time(row) or has_memory(row)]
    if not measured_rows:
        names = "step_time, tokens_per_s, tokens_per_s_per_chip, samples_per_s or peak_memory"
        raise InputError(f"runs: none has a step time or a peak of memory; give {names}")
    wanted = profile.name if profile is not None else ""
    unique: dict[Any, UserRun] = {}  # a duplicate adds no information, and leave-one-out would predict each from the other
    for row in measured_rows:
        run = run_of_row(row, profile=wanted, calibration=calibration)
        settings = tuple(sorted(map(str, run.settings.items())))
        unique.setdefault((run.planned.plan, run.profile, settings, str(run.measured), str(run.memory)), run)
    runs = list(unique.values())
    check_one_framework(runs)
    base = base_of(runs, profile)
    timed = [run for run in runs if not math.isnan(run.measured)]
    filled = [run for run in runs if not math.isnan(run.memory)]
    fit, memory = fit_own(timed, base, check=check_times), fit_memory(filled, base)
    notes = tuple(_notes(files, rows, measured_rows, runs))
    fitted = result_of(fit, timed, name=name, next_runs=next_run(fit, timed), notes=notes)
    return fitted if memory is None else with_memory(fitted, memory, filled)


def _with_plans(files: Sequence[RunFile], plans: Sequence[Plan]) -> Sequence[RunFile]:
    """Return the files, with its plan added to each that gives times only."""
    unplanned = [file for file in files if file.needs_plan]
    if plans and not unplanned:
        raise InputError("plan: is for logs and traces, which give times only; the runs state their plans: leave it out")
    if len(plans) > 1 and len(plans) != len(unplanned):
        raise InputError(
            f"plan: {len(plans)} plans for {len(unplanned)} logs and traces; give one for all of them, or one for each in order"
        )
    if not plans:
        return files
    plan_of_file = dict(zip(map(id, unplanned), plans if len(plans) > 1 else [plans[0]] * len(unplanned), strict=True))
    return [file.planned(plan_of_file[id(file)]) if id(file) in plan_of_file else file for file in files]


def _notes(files: Sequence[RunFile], rows: Sequence[Row], measured_rows: Sequence[Row], runs: Sequence[UserRun]) -> Iterator[str]:
    """Yield notes on how the runs were read."""
    copies = len(measured_rows) - len(runs)
    if copies:
        are = "is a copy" if copies == 1 else "are copies"
        yield f"{copies} row{'s' * (copies > 1)} {are} of another run (same plan, same figures); each run counts once"
    unread = list(dict.fromkeys(column for file in files for column in file.unread))
    if unread:
        yield f"not read, for they mean nothing here: {', '.join(unread[:12])}{' ...' if len(unread) > 12 else ''}"
    unknown = list(dict.fromkeys(name for run in runs for name in passed_over(run.settings)))
    if unknown:
        yield passed_over_line(unknown)
    if len(measured_rows) < len(rows):
        yield f"{len(rows) - len(measured_rows)} of {len(rows)} rows have neither a step time nor a peak of memory and are left out"
    for file in files:
        yield from file.notes
    assumed = Counter(name for run in runs for name in run.assumed)
    if assumed:
        yield "not given, so assumed: " + ", ".join(f"{name} (of {count} run{'s' * (count > 1)})" for name, count in assumed.items())
    if len(runs) > _MANY:
        yield f"{len(runs)} runs: a hundred at different plans tell next to as much, and are quicker"


def base_of(runs: Sequence[UserRun], requested: ExecutionProfile | None) -> ExecutionProfile:
    """Return the requested profile, else that of the one known framework that the runs name, else the profile of CPUs or `generic`."""
    if requested is not None:
        return requested
    named = {run.profile for run in runs if not run.planned.framework.borrows}
    if len(named) == 1:
        return load_profile(named.pop())
    if all(cluster_of_run(run.planned.hardware).chip.units.unit_kind == "core" for run in runs):
        return load_profile(CPU_PROFILE)
    return load_profile(GENERIC)


# --- implausible runs -------------------------------------------------------------------------------------------------


def check_one_framework(runs: Sequence[UserRun]) -> None:
    """Raise InputError for runs of two frameworks: a profile describes one."""
    named: dict[str, str] = {}
    for run in runs:
        if not run.planned.framework.borrows:
            named.setdefault(run.profile, run.id)
    if len(named) > 1:
        (one, first), (other, second) = list(named.items())[:2]
        raise InputError(f"framework: {first} is of {one}, {second} of {other}; a profile is of one framework: fit each by itself")


def check_times(runs: Sequence[UserRun], log_errors: Array) -> None:
    """Raise InputError for times that are off by a factor that no framework explains. log_errors: log(predicted / measured)."""
    for run, error in zip(runs, log_errors, strict=True):
        if abs(error) < math.log(_FAR):
            continue
        predicted, ratio = format_step(run.measured * math.exp(error)), math.exp(-error)
        times = f"{ratio:,.0f} times" if ratio >= 1 else f"1/{1 / ratio:,.0f} of"
        message = f"{run.id}: step_time={run.measured:.6g} s: is {times} the predicted {predicted}"
        chips = float(run.planned.plan.num_chips)
        rates = (  # tokens of all chips read as those of one, and the reverse
            (chips, "from tokens a second of one chip taken for those of all", "name the column tokens_per_s_per_chip"),
            (1 / chips, "from tokens a second of all chips taken for those of one", "name the column tokens_per_s"),
        )
        causes = (*_UNITS, *(rates if chips >= _FAR else ()))
        factor, meaning, remedy = min(causes, key=lambda cause: abs(error + math.log(cause[0])))
        if abs(error + math.log(factor)) < math.log(_NEAR):
            raise InputError(f"{message}; it looks like a time {meaning} ({remedy}), unless its plan is another run's")
        raise InputError(
            f"{message}, more than frameworks differ; correct its plan, if that is another run's (model, batch, sequence, chips)"
        )
