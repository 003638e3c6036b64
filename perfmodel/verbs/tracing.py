"""`trace`: the predicted step of a plan as a timeline, and measured traces next to it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

from perfmodel.cost.mixed import pools_of_pipeline
from perfmodel.cost.trace import Detail, RankTimeline, rank_timelines
from perfmodel.fitting.measured_trace import read_trace
from perfmodel.fitting.memory_snapshot import read_snapshot
from perfmodel.foundation.errors import InputError, bad_field
from perfmodel.foundation.resources import check_can_be_written, write_atomically
from perfmodel.foundation.values import choice_of
from perfmodel.parallel.measured import GROUPS, MemoryComparison, TraceComparison, group_of
from perfmodel.parallel.plan import Plan, place_of, plan_to_dict, rank_at
from perfmodel.report.trace import chrome_trace, trace_bytes
from perfmodel.verbs.setting import Name, load_plan, predict_in, setting_of_plan

#: Up to this number of stages, a trace has a rank of each by default; for a deeper pipeline of the first, the middle and the last stage.
MOST_STAGES = 16
_JSON, _COMPRESSED = (".json", ".json.gz")


def trace_plan(
    plan: Plan | Name, *, out: str | Path | None = None, ranks: Sequence[int] = (), detail: str | None = None
) -> tuple[RankTimeline, ...]:
    """Predict the step of a plan as timelines of ranks: operators, collectives, idle time and memory; the spans of a rank add up to its
    parts.

    out      file to write as a Chrome trace: .json, .json.gz; any other name: a folder with one file for each rank
    ranks    none: one for each pipeline stage, of a mixed cluster on each kind of chips; of more than 16 stages the first, middle and last
    detail   operators, layers or passes; None: the finest with at most 100,000 spans
    """
    loaded = load_plan(plan)
    chosen, estimator = checked_ranks(loaded, ranks), setting_of_plan(loaded).estimator
    if not ranks and estimator.cluster.pools:
        indices = [place_of(loaded, rank) for rank in range(loaded.num_chips)]
        firsts = [rank for rank, index in enumerate(indices) if not (index["pp"] or index["cp"] or index["tp"])]
        replicas = {pools_of_pipeline(estimator, loaded, rank): indices[rank] for rank in reversed(firsts)}
        chosen = [rank_at(loaded, {**replica, "pp": indices[rank]["pp"]}) for replica in reversed(replicas.values()) for rank in chosen]
    paths = [] if out is None else trace_paths(Path(out), chosen)
    is_folder = out is not None and Path(out) not in paths
    for path in [Path(out)] if out is not None and is_folder and not Path(out).exists() else paths:
        check_can_be_written(path, "out")
    level = None if detail is None else choice_of(Detail, detail, "detail")
    timelines = tuple(rank_timelines(estimator, loaded, chosen, level))
    for path, group in zip(paths, [[timeline] for timeline in timelines] if is_folder else [timelines], strict=False):
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, trace_bytes(chrome_trace(group, loaded), compressed=path.suffix == ".gz"))
    return timelines


def compare_trace(
    traces: str | Path | Sequence[str | Path], plan: Plan | Name | None = None, *, out: str | Path | None = None, steps: int | None = None
) -> TraceComparison:
    """Compare measured steps with the prediction of their plan, by group of kernels: the mean over the ranks of the traces.

    traces   files that torch.profiler wrote (`prof.export_chrome_trace`), one a rank
    plan     the plan that ran; without one only the measured times
    out      file for the measured step as a run that `fit_runs` reads: .jsonl
    steps    number of steps of a trace without marks (ProfilerStep#N)
    """
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
        raise bad_field("steps", steps, "must be a positive number of steps", "leave it out for traces that mark their steps")
    files, loaded = _inputs(traces, "traces: are missing; give files that torch.profiler wrote", plan, out)
    measured = tuple(read_trace(file, loaded, steps=steps) for file in files)
    predicted = dict.fromkeys(GROUPS, 0.0)
    if loaded is not None:
        last = max(measured, key=lambda trace: trace.rank)
        if last.rank >= loaded.num_chips:
            rule = f"is of rank {last.rank}, and the plan has {loaded.num_chips} ranks"
            raise bad_field("traces", last.name, rule, "give the plan that ran")
        timelines = rank_timelines(setting_of_plan(loaded).estimator, loaded, [trace.rank for trace in measured], Detail.PASSES)
        for span in chain.from_iterable(timeline.spans for timeline in timelines):
            predicted[group_of(span.part, span.kind)] += 0.0 if span.hidden else span.time / len(measured)
    groups = {name: (predicted[name], sum(trace.groups[name] for trace in measured) / len(measured)) for name in GROUPS}
    comparison = TraceComparison(traces=measured, groups=groups, has_plan=loaded is not None)
    _write_run(out, [Path(trace.name).name for trace in measured], loaded, step_time=comparison.measured)
    return comparison


def compare_memory(
    snapshots: str | Path | Sequence[str | Path], plan: Plan | Name | None = None, *, out: str | Path | None = None
) -> MemoryComparison:
    """Compare measured peaks of memory, and the code that allocated them, with the predicted memory of their plan.

    snapshots   files that torch wrote (`torch.cuda.memory._dump_snapshot`); nothing in them is executed
    plan        the plan that ran; without one only the measured peaks
    out         file for the measured peak as a run that `fit_runs` reads: .jsonl
    """
    missing = "snapshots: are missing; give files that torch.cuda.memory._dump_snapshot wrote"
    files, loaded = _inputs(snapshots, missing, plan, out)
    memories = sorted(chain.from_iterable(map(read_snapshot, files)), key=lambda memory: -memory.allocated)
    predicted = {} if loaded is None else predict_in(setting_of_plan(loaded), loaded).memory
    names = dict.fromkeys(Path(memory.name).name for memory in memories)
    _write_run(out, names, loaded, peak_memory=max(memory.most_reserved for memory in memories))
    return MemoryComparison(memories=tuple(memories), predicted=predicted)


def _inputs(
    given: str | Path | Sequence[str | Path], missing: str, plan: Plan | Name | None, out: str | Path | None
) -> tuple[list[str | Path], Plan | None]:
    """Return the files to read, and the plan that ran. Raise InputError if the run could not be written, before anything is read."""
    if out is not None:
        check_can_be_written(out, "out", endings=".jsonl", rule=".jsonl with what was measured", remedy="write runs.jsonl")
        if plan is None:
            raise bad_field("out", out, "needs the plan that ran", "give it with --plan")
    files = [given] if isinstance(given, (str, Path)) else list(given)
    if not files:
        raise InputError(missing)
    return files, None if plan is None else load_plan(plan)


def _write_run(out: str | Path | None, names: Iterable[str], plan: Plan | None, **measured: float) -> None:
    """Write a line of JSON that `fit_runs` reads, if a file for it is given."""
    if out is not None and plan is not None:
        run = {"id": ", ".join(names), "framework": str(plan.framework), "plan": plan_to_dict(plan), **measured}
        write_atomically(out, json.dumps(run) + "\n")


def checked_ranks(plan: Plan, ranks: Sequence[int]) -> list[int]:
    """Return the ranks to draw, without repeats."""
    last = plan.num_chips - 1
    for rank in ranks:
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank <= last:
            raise bad_field("ranks", rank, f"must be ranks of the plan, 0 to {last}", "leave it out for one rank of each pipeline stage")
    p = plan.layout.pp
    stages = range(p) if p <= MOST_STAGES else (0, p // 2, p - 1)
    return list(dict.fromkeys(ranks)) or [rank_at(plan, {"pp": stage}) if p > 1 else 0 for stage in stages]


def trace_paths(out: Path, ranks: Sequence[int]) -> list[Path]:
    """Return the files of a trace: one, or in a folder one for each rank."""
    if out.name.endswith((_JSON, _COMPRESSED)):
        return [out]
    return [out / f"rank{rank}{_COMPRESSED}" for rank in ranks]
