"""`fit_runs`: measured runs of one's own to an execution profile of one's own."""

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
    from perfmodel.frameworks.profile import ExecutionProfile
    from perfmodel.parallel.plan import Plan

#: What may be said of all runs at once, where their rows do not say it.
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
    """An execution profile of one's own, from one to a hundred measured runs of one training loop, and the account of it.

    runs      files (CSV, JSON lines, logs of training frameworks, torch profiler traces, memory snapshots), or mappings of
              what a row says
    plan      of logs, traces and snapshots, which give measurements only: one for all of them, or one for each
    profile   the one that the fit starts from; None: that of the framework that the runs name, else one between all that are known
    save      where to write the profile; every verb takes it as `profile=`

    Job, place and knobs are those of all runs that do not say them themselves.
    """
    from perfmodel.fitting.account import fit_rows
    from perfmodel.fitting.read import read_rows, rows_of
    from perfmodel.frameworks.profile import save_profile

    if save is not None:
        check_profile_path(save)
    given = [runs] if isinstance(runs, (str, Path, Mapping)) else runs
    if not isinstance(given, (list, tuple)) or not given:
        raise bad_field("runs", shown(runs), "must be files of measured runs", "see docs/fitting.md")
    defaults = _defaults(asked, knobs)
    wanted: Sequence[Any] = plan if isinstance(plan, (list, tuple)) else [] if plan is None else [plan]
    plans = [load_plan(each) for each in wanted]
    files = [rows_of(each, f"run {number}") if isinstance(each, Mapping) else read_rows(each) for number, each in enumerate(given, 1)]
    found = fit_rows(
        files,
        defaults,
        plans=plans,
        profile=_profile(asked.profile),
        calibration=str(asked.calibration or ""),
        name=Path(save).stem.replace(SEPARATOR, "-") if save is not None else "own",
    )
    if save is not None:
        save_profile(found.profile, save)
    return found


def check_profile_path(save: Name) -> None:
    """Nothing is fitted before it is known that it can be saved."""
    check_path(save, "save")
    if Path(save).suffix.lower() not in (".yaml", ".yml"):
        raise bad_field("save", save, "must end in .yaml", "write mine.yaml")
    check_can_be_written(Path(save), "save")


def _profile(asked: Any) -> ExecutionProfile | None:
    from perfmodel.frameworks.profile import ExecutionProfile, load_profile

    if asked is None or isinstance(asked, ExecutionProfile):
        return asked
    check_name(asked, "profile", ExecutionProfile, "see `perfmodel profiles`")
    return load_profile(asked)


def _defaults(asked: Request, knobs: Knobs) -> dict[str, Any]:
    """Values that apply to all runs, under the names of columns."""
    said = {name: getattr(asked, name) for name in ASKED.words() if name not in ("profile", "settings", "calibration")}
    found = {name: str(value) if isinstance(value, Path) else value for name, value in said.items() if value is not None}
    found |= {f"settings.{name}": value for name, value in read_settings(asked.settings).items()}
    return {**found, **{name: value if isinstance(value, (bool, int)) else str(value) for name, value in knobs.searched().items()}}
