"""Timelines of ranks as Chrome traces; measured traces and memory next to the prediction as text.

Perfetto and chrome://tracing open the traces; Holistic Trace Analysis reads them. A rank is a process with one thread per stream. A second
process is its host, with the profiled step, the passes and the kernel launches. Times are rounded to nanoseconds at the boundary of two
spans, so that spans of a stream never overlap.

Formats: Chrome's Trace Event Format; Kineto's fields as Holistic Trace Analysis 0.5 reads them (`distributedInfo`, `ProfilerStep#`,
`stream` and `correlation` of kernels, names of collectives that begin with nccl).
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from perfmodel.cost.trace import RankTimeline, Span
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.errors import one_line
from perfmodel.foundation.plain import picked
from perfmodel.foundation.text import percent
from perfmodel.foundation.units import format_bytes, format_step
from perfmodel.parallel.measured import NO_DIFFERENCE, OUTSIDE_TENSORS, TRACE_NAMES, MemoryComparison, TraceComparison
from perfmodel.parallel.plan import Plan
from perfmodel.report.document import Block, Facts, Notes
from perfmodel.report.predictions import job_line, plan_line
from perfmodel.report.table import bytes_like, table_of, times_like, words

_IDLE_THREAD = 1
_HOST = 1_000_000  # added to the id of a rank for the process of its host
_LAUNCH = 1_000  # longest kernel launch [ns]
_MOST_SITES = 10  # lines of code in a table
_STRAGGLING = 0.05  # least waiting time for a straggler that is noted, as a share of the step


def chrome_trace(timelines: Sequence[RankTimeline], plan: Plan) -> dict[str, Any]:
    """Return a trace of one or several ranks as one JSON object."""
    first = timelines[0]
    events = [event for timeline in timelines for event in trace_events(timeline)]
    events.sort(key=lambda event: (event["ph"] != "M", event["ts"], -event.get("dur", 0.0)))
    return {
        "schemaVersion": 1,
        "distributedInfo": {"backend": "nccl", "rank": first.rank, "world_size": plan.num_chips},
        "displayTimeUnit": "ms",
        "predicted": {
            "step_time": first.step_time,
            "ranks": {str(timeline.rank): {"stage": timeline.stage, "parts": dict(timeline.parts)} for timeline in timelines},
        },
        "traceEvents": events,
    }


def trace_bytes(content: Mapping[str, Any], *, compressed: bool) -> bytes:
    # Holistic Trace Analysis searches for the rank with a pattern that has a space after the colon.
    text = json.dumps(content, separators=(",", ": ")).encode()
    return gzip.compress(text, mtime=0) if compressed else text


def trace_events(timeline: RankTimeline) -> Iterator[dict[str, Any]]:
    """Yield the events of a rank: names of processes and threads, slices, and the memory counter."""
    gpu, host = timeline.rank, _HOST + timeline.rank
    threads = {(gpu, _IDLE_THREAD): "idle", (host, host): "step, passes and launches"}
    for span in timeline.spans:
        if span.stream != "idle":
            if span.hidden:
                threads[host, host + 1] = "launches under compute"
            threads[gpu, _thread(span)] = f"stream {_thread(span)}: {span.stream}{' under compute' if span.hidden else ''}"
    processes = ((gpu, f"GPU {gpu}", f"rank {gpu}, stage {timeline.stage}"), (host, "CPU", f"host of rank {gpu}"))
    for pid, label, name in processes:
        yield _meta("process_name", pid, 0, name=name)
        yield _meta("process_labels", pid, 0, labels=label)
        yield _meta("process_sort_index", pid, 0, sort_index=2 * gpu + (pid == host))
    for (pid, tid), name in threads.items():
        yield _meta("thread_name", pid, tid, name=name)
        yield _meta("thread_sort_index", pid, tid, sort_index=tid)
    yield _slice("user_annotation", "ProfilerStep#0", host, host, 0, _ns(timeline.step_time))
    for pass_ in timeline.passes:
        yield _slice("user_annotation", pass_.name, host, host, _ns(pass_.start), _ns(pass_.start + pass_.time))
    for number, span in enumerate(timeline.spans, 1):
        start, end = _ns(span.start), _ns(span.start + span.time)
        if end <= start:
            continue
        if span.stream == "idle":
            yield _slice("gpu_user_annotation", span.name, gpu, _IDLE_THREAD, start, end, part=span.part)
            continue
        kernel = "multi_tensor_apply" if span.part == "optimizer" else TRACE_NAMES["kernel_names"].get(span.kind, "")
        known: dict[str, Any] = {"stream": _thread(span), "correlation": number, "part": span.part}
        if span.kind in set(CollectiveKind):
            name = kernel
            known |= {"Collective name": span.kind, "Process Group Description": f"mesh_{span.stream}", "tensor": span.name}
        else:
            name = f"{kernel}: {span.name}" if kernel and span.name != span.kind else kernel or span.name
        if span.hidden:
            known["hidden"] = True
        yield _slice("kernel", name, gpu, _thread(span), start, end, **known)
        # Launches of overlapped communication have a separate thread: two concurrent launches do not nest.
        yield _slice("cuda_runtime", "cudaLaunchKernel", host, host + span.hidden, start, min(end, start + _LAUNCH), correlation=number)
    for time, classes in timeline.memory:
        sizes = {words(name): size for name, size in classes.items() if size}
        yield {"ph": "C", "name": "memory", "pid": gpu, "tid": 0, "ts": _ns(time) / 1e3, "args": sizes}


def _thread(span: Span) -> int:
    """Return the thread of a span: its stream, or a second one for overlapped communication."""
    return int(TRACE_NAMES["stream_ids"][span.stream]) + span.hidden


def _ns(time: float) -> int:
    return round(time * 1e9)


def _slice(category: str, name: str, pid: int, tid: int, start: int, end: int, **known: Any) -> dict[str, Any]:
    """Return a slice.

    start, end   [ns]
    """
    return {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": start / 1e3, "dur": (end - start) / 1e3, "args": known}


def _meta(what: str, pid: int, tid: int, **known: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": known}


# --- text -------------------------------------------------------------------------------------------------------


def plan_facts(plan: Plan | None) -> list[tuple[str, str]]:
    """Return the facts of the plan that ran, if it is known."""
    return [] if plan is None else [("job", job_line(plan)), ("plan", plan_line(plan))]


def timelines_object(timelines: Sequence[RankTimeline], files: Iterable[str]) -> dict[str, Any]:
    ranks = []
    for timeline in timelines:
        peak = {"peak_memory": peak_memory(timeline), "peak_moment": timeline.memory_moment}
        ranks.append({**picked(timeline, "rank stage parts num_spans"), **peak})
    return {**picked(timelines[0], "step_time detail"), "files": list(files), "ranks": ranks}


def timelines_blocks(timelines: Sequence[RankTimeline], plan: Plan, files: Sequence[str], read: Sequence[str]) -> Iterator[Block]:
    first = timelines[0]
    text = times_like(first.step_time)
    facts = [*plan_facts(plan), ("detail", TRACE_NAMES["details"][first.detail]), ("written", ", ".join(files))]
    yield Facts(f"predicted step of {format_step(first.step_time)}", facts)
    rows, waits = [], any("replica_wait" in timeline.parts for timeline in timelines)
    for timeline in timelines:
        busy = {part: time for part, time in timeline.parts.items() if part not in ("pipeline_bubble", "replica_wait")}
        largest = max(busy, key=lambda part: busy[part])
        sent = sum(time for part, time in busy.items() if "communication" in part or part in ("parameter_gather", "gradient_reduction"))
        share = f"{words(largest)} {percent(busy[largest] / timeline.step_time)}"
        bubble = text(timeline.parts.get("pipeline_bubble", 0.0))
        places = (str(timeline.rank), str(timeline.stage), f"{timeline.num_spans:,}")
        wait = (text(timeline.parts.get("replica_wait", 0.0)),) if waits else ()
        rows.append((*places, share, text(sent), bubble, *wait, format_bytes(peak_memory(timeline))))
    wait_column = " | >wait" if waits else ""
    columns = f">rank | >stage | >spans | largest part | >exposed communication | >bubble{wait_column} | >peak memory"
    yield table_of("Ranks", columns, rows)
    off = max(abs(timeline.stretch - 1.0) for timeline in timelines)
    notes = ["the parts of the rank with the most compute are those of `perfmodel predict`; the other ranks of a stage do the same"]
    if waits:
        notes.append("wait: for the slowest replicas, before the gradient reduction")
    if off > 0.05:
        stretched = f"idle time between passes is stretched by up to {percent(off)}"
        notes.append(f"{stretched}: the simulated schedule is that much shorter or longer")
    yield Notes([*notes, "open it in ui.perfetto.dev; a folder as --out has one file for each rank, for Holistic Trace Analysis", *read])


def peak_memory(timeline: RankTimeline) -> float:
    """Return the largest memory of a rank over the step. [byte]"""
    return max(sum(classes.values()) for _, classes in timeline.memory)


def comparison_object(comparison: TraceComparison) -> dict[str, Any]:
    def times(predicted: float, measured: float) -> dict[str, float]:
        return {**({"predicted": predicted} if comparison.has_plan else {}), "measured": measured}

    return {
        "step_time": times(comparison.predicted, comparison.measured),
        "parts": [{"part": name, **times(*both)} for name, both in comparison.groups.items()],
        "idle": comparison.idle,
        **({"straggler": dict(zip(("rank", "waiting"), comparison.straggler, strict=True))} if len(comparison.traces) > 1 else {}),
        "traces": list(comparison.traces),
        **({"summary": difference_sentence(comparison)} if comparison.has_plan else {}),
    }


def comparison_blocks(comparison: TraceComparison, plan: Plan | None, read: Sequence[str]) -> Iterator[Block]:
    first = comparison.traces[0]
    text = times_like(max(comparison.measured, comparison.predicted))
    ranks = ", ".join(str(trace.rank) for trace in comparison.traces)
    facts = [
        *plan_facts(plan),
        ("traces", f"{', '.join(trace.name for trace in comparison.traces)}"),
        ("steps", f"{first.num_steps} step{'s' * (first.num_steps > 1)} of rank {ranks}, {first.device}"),
    ]
    overlapped = sum(trace.overlapped for trace in comparison.traces) / len(comparison.traces)
    if overlapped:
        facts.append(("overlapped", f"{text(overlapped)} of communication under compute"))
    yield Facts(difference_sentence(comparison) if comparison.has_plan else f"measured step of {format_step(comparison.measured)}", facts)

    def row(name: str, predicted: float, measured: float) -> tuple[str, ...]:
        if not comparison.has_plan:
            return name, text(measured), percent(measured / comparison.measured)
        more = text(abs(measured - predicted))
        difference = "-" if more.startswith("<") or measured == predicted else f"{'+' if measured > predicted else '-'}{more}"
        return name, text(predicted), text(measured), difference

    rows = []
    for name, times in sorted(comparison.groups.items(), key=lambda group: -max(group[1])):
        if any(times):
            rows.append(row(words(name), *times))
        for cause, time in sorted(comparison.idle.items(), key=lambda item: -item[1]) if name == "idle" and any(times) else ():
            if time >= NO_DIFFERENCE * comparison.measured:
                label = f"  {words(cause)}"
                rows.append((label, "", text(time), "") if comparison.has_plan else row(label, 0.0, time))
    rows.append(row("step", comparison.predicted, comparison.measured))
    columns = "part | >predicted | >measured | >difference" if comparison.has_plan else "part | >measured | >share"
    yield table_of("Where the step goes (exposed time)", columns, rows)
    unknown = dict.fromkeys(name for trace in comparison.traces for name in trace.unknown)
    notes = [f"other kernels: {one_line(', '.join(unknown), 160)}"] if unknown else []
    rank, waiting = comparison.straggler
    if waiting > _STRAGGLING * comparison.measured and (plan is None or plan.layout.pp == 1):
        notes.append(f"rank {rank} communicates least: the others wait for it, {text(waiting)} on average")
    notes += dict.fromkeys(trace.note for trace in comparison.traces if trace.note)
    yield Notes([*notes, "idle is the host, and with a pipeline the bubble; a profiler slows steps that wait for the host", *read])


def difference_sentence(comparison: TraceComparison) -> str:
    """Return one sentence with the step times and the part of the largest difference."""
    name = comparison.largest_difference
    predicted, measured = comparison.groups[name]
    text = times_like(max(comparison.measured, comparison.predicted))
    error = round(comparison.predicted / comparison.measured - 1.0, 2) + 0.0
    step = f"step {text(comparison.measured)}, predicted {text(comparison.predicted)} ({error:+.0%})"
    if abs(measured - predicted) < NO_DIFFERENCE * comparison.measured:
        return f"{step}; no part differs by more than {percent(NO_DIFFERENCE)} of the step"
    cause, time = max(comparison.idle.items(), key=lambda item: item[1])
    is_caused = name == "idle" and time > 0.5 * measured > 0.5 * predicted
    during = f", {text(time)} of it {TRACE_NAMES['host_activities'][cause]}" if is_caused else ""
    unknown = next((kernel for trace in comparison.traces for kernel in trace.unknown), "")
    which = f" ({one_line(unknown, 40)})" if name == "other_kernels" and unknown else ""
    kind = "largest unexplained part" if measured > predicted else "largest difference"
    return f"{step}; the {kind} is {words(name)}{which}: measured {text(measured)}, predicted {text(predicted)}{during}"


def memory_object(comparison: MemoryComparison) -> dict[str, Any]:
    fullest, content = comparison.memories[0], dict[str, Any]()
    content["measured"] = picked(fullest, "allocated reserved fragmentation most_reserved")
    if comparison.predicted:
        content["predicted"] = {"allocated": comparison.predicted_allocated, **comparison.predicted}
        content["summary"] = memory_sentence(comparison)
    return {**content, "snapshots": list(comparison.memories)}


def memory_sentence(comparison: MemoryComparison) -> str:
    """Return one sentence with the measured and the predicted peak memory."""
    measured = comparison.memories[0].allocated
    text = bytes_like(max(measured, comparison.predicted_allocated))
    if not comparison.predicted:
        return f"measured peak of {text(measured)} in tensors"
    ratio = comparison.predicted_allocated / measured - 1.0
    return f"peak in tensors {text(measured)}, predicted {text(comparison.predicted_allocated)} ({round(ratio, 2) + 0.0:+.0%})"


def memory_blocks(comparison: MemoryComparison, plan: Plan | None, read: Sequence[str]) -> Iterator[Block]:
    fullest = comparison.memories[0]
    text = bytes_like(max(fullest.most_reserved, comparison.predicted.get("total", 0.0)))
    fragmentation = percent(fullest.fragmentation / max(fullest.reserved, 1))
    facts = [
        *plan_facts(plan),
        ("snapshot", f"{fullest.name}, device {fullest.device}"),
        ("history", f"{fullest.num_events:,} events" if fullest.num_events else "none: the state at the snapshot"),
        ("fragmentation", f"{text(fullest.fragmentation)}, {fragmentation} of what is reserved"),
        ("largest reserve", text(fullest.most_reserved)),
    ]
    if fullest.refused:
        facts.append(("out of memory", f"an allocation of {text(fullest.refused)} failed"))
    if len(comparison.memories) > 1:
        others = ", ".join(f"{text(memory.allocated)} ({memory.name}, device {memory.device})" for memory in comparison.memories[1:])
        facts.append(("other devices", others))
    yield Facts(memory_sentence(comparison), facts)
    if comparison.predicted:
        classes = ((name, size) for name, size in comparison.predicted.items() if size and name not in (*OUTSIDE_TENSORS, "total"))
        rows = [(words(name), text(size), "", "", "") for name, size in classes]
        beyond = comparison.predicted["allocator"]
        pairs = (
            ("in tensors", comparison.predicted_allocated, fullest.allocated),
            ("held by the allocator", beyond, fullest.fragmentation),
            ("reserved", comparison.predicted_allocated + beyond, fullest.reserved),
        )
        for name, predicted, measured in pairs:
            more = measured - predicted
            difference = f"{'+' if more > 0 else '-'}{text(abs(more))}"
            rows.append((name, text(predicted), text(measured), difference, f"{more / predicted:+.1%}" if predicted else "-"))
        rows.append(("outside the allocator", text(comparison.predicted["framework"]), "", "", ""))
        columns = "memory at the peak | >predicted | >measured | >difference | >of the prediction"
        yield table_of("Memory of the fullest device", columns, rows)
    sites = [(one_line(site.where, 70), site.num_blocks, site.num_bytes) for site in fullest.sites[:_MOST_SITES]]
    rest = fullest.sites[_MOST_SITES:]
    if rest:
        name = f"{len(rest)} more line{'s' * (len(rest) > 1)}"
        sites.append((name, sum(site.num_blocks for site in rest), sum(site.num_bytes for site in rest)))
    cells = ((name, f"{blocks:,}", text(size), percent(size / fullest.allocated)) for name, blocks, size in sites)
    yield table_of("Live allocations at the peak", "allocated by | >blocks | >size | >share", cells)
    notes = [] if fullest.num_events else ["for the peak of a step, call torch.cuda.memory._record_memory_history() before it"]
    yield Notes([*notes, "a snapshot has what torch's allocator holds; the CUDA context and NCCL's buffers lie outside it", *read])
