"""`fit_runs`: fit of an execution profile to the user's measured runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfmodel.foundation.errors import bad_field, shown
from perfmodel.foundation.resources import check_can_be_written
from perfmodel.foundation.values import check_name, check_path
from perfmodel.foundation.words import Words, takes
from perfmodel.parallel.framework_ref import SEPARATOR, read_settings
from perfmodel.parallel.knobs import Knobs
from perfmodel.parallel.request import Request
from perfmodel.verbs.setting import Name, load_plan

if TYPE_CHECKING:
    from perfmodel.fitting.result import FittedProfile
    from perfmodel.parallel.plan import Plan

#: Fields that apply to all runs whose rows lack them.
ASKED = Words(
    Request,
    only="model cluster chips nodes global_batch seq_len precision optimizer profile settings calibration",
    helps={"profile": "The framework that the fit starts from; the one that the runs name if left out, else one between all."},
)
KNOBS = Words(Knobs, only="dp fsdp tp pp cp dp_replicate dp_shard zero micro_batch virtual_stages recompute sequence_parallel attention")


@takes(asked=ASKED, knobs=KNOBS)
def fit_runs(
    runs: Name | Mapping[str, Any] | Sequence[Name | Mapping[str, Any]],
    *,
    plan: Plan | Name | Sequence[Plan | Name] | None = None,
    save: Name | None = None,
    asked: Request,
    knobs: Knobs,
) -> FittedProfile:
    """Fit an execution profile to your runs: from one to a hundred measured runs of one training loop, with the errors of the fit.

    runs      files (CSV, JSON lines, logs of training frameworks, torch profiler traces, memory snapshots), or mappings with the
              fields of a row
    plan      of logs, traces and snapshots, which give measurements only: one for all of them, or one for each
    profile   starting point of the fit; None: that of the framework that the runs name, else the mean of the known ones
    save      where to write the profile; every verb takes it as `profile=`

    Job, cluster and knobs apply to all runs that lack them.
    """
    from perfmodel.fitting.account import fit_rows
    from perfmodel.fitting.read import read_rows, rows_of
    from perfmodel.frameworks.profile import ExecutionProfile, load_profile, save_profile

    if save is not None:
        check_profile_path(save)
    given = [runs] if isinstance(runs, (str, Path, Mapping)) else runs
    if not isinstance(given, (list, tuple)) or not given:
        raise bad_field("runs", shown(runs), "must be files of measured runs", "see docs/fitting.md")
    fields = {name: getattr(asked, name) for name in ASKED.words() if name not in ("profile", "settings", "calibration")}
    defaults = {name: str(value) if isinstance(value, Path) else value for name, value in fields.items() if value is not None}
    defaults |= {f"settings.{name}": value for name, value in read_settings(asked.settings).items()}
    defaults |= {name: value if isinstance(value, (bool, int)) else str(value) for name, value in knobs.searched().items()}
    wanted: Sequence[Any] = plan if isinstance(plan, (list, tuple)) else [] if plan is None else [plan]
    plans = [load_plan(file) for file in wanted]
    files = [rows_of(file, f"run {number}") if isinstance(file, Mapping) else read_rows(file) for number, file in enumerate(given, 1)]
    profile = asked.profile
    if profile is not None and not isinstance(profile, ExecutionProfile):
        check_name(profile, "profile", ExecutionProfile, "see `perfmodel profiles`")
        profile = load_profile(profile)
    fitted = fit_rows(
        files,
        defaults,
        plans=plans,
        profile=profile,
        calibration=str(asked.calibration or ""),
        name=Path(save).stem.replace(SEPARATOR, "-") if save is not None else "own",
    )
    if save is not None:
        save_profile(fitted.profile, save)
    return fitted


def check_profile_path(save: Name) -> None:
    """Raise InputError if the profile could not be saved, before anything is fitted."""
    check_path(save, "save")
    check_can_be_written(Path(save), "save", endings=".yaml .yml", rule=".yaml", remedy="write mine.yaml")
