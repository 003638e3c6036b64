"""Measured peaks of memory as text and as an object, next to their prediction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from perfmodel.foundation.errors import one_line
from perfmodel.parallel.measured_memory import BEYOND, MemoryComparison
from perfmodel.parallel.plan import Plan
from perfmodel.report.document import Block, Facts, Notes
from perfmodel.report.predictions import job_line, plan_line
from perfmodel.report.table import Table, bytes_like, percent, words

_MOST_SITES = 10


def memory_object(of: MemoryComparison) -> dict[str, Any]:
    fullest = of.memories[0]
    measured = {"allocated": fullest.allocated, "reserved": fullest.reserved, "fragmentation": fullest.fragmentation}
    return {
        "measured": {**measured, "most_reserved": fullest.most_reserved},
        **({"predicted": {"allocated": of.predicted_allocated, **of.predicted}, "summary": memory_sentence(of)} if of.predicted else {}),
        "snapshots": list(of.memories),
    }


def memory_sentence(of: MemoryComparison) -> str:
    """Measured and predicted peak in a sentence."""
    measured = of.memories[0].allocated
    text = bytes_like(max(measured, of.predicted_allocated))
    if not of.predicted:
        return f"measured peak of {text(measured)} in tensors"
    ratio = of.predicted_allocated / measured - 1.0
    return f"peak in tensors {text(measured)}, predicted {text(of.predicted_allocated)} ({round(ratio, 2) + 0.0:+.0%})"


def memory_blocks(of: MemoryComparison, plan: Plan | None, read: Sequence[str]) -> Iterator[Block]:
    fullest = of.memories[0]
    text = bytes_like(max(fullest.most_reserved, of.predicted.get("total", 0.0)))
    held = percent(fullest.fragmentation / max(fullest.reserved, 1))
    facts = [("job", job_line(plan)), ("plan", plan_line(plan))] if plan is not None else []
    facts += [
        ("snapshot", f"{fullest.name}, device {fullest.device}"),
        ("history", f"{fullest.num_events:,} events" if fullest.num_events else "none: the state at the snapshot"),
        (
            "fragmentation",
            f"{text(fullest.fragmentation)}, {held} of what is reserved",
        ),
        ("largest reserve", text(fullest.most_reserved)),
    ]
    if fullest.refused:
        facts.append(("out of memory", f"an allocation of {text(fullest.refused)} failed"))
    if len(of.memories) > 1:
        others = ", ".join(f"{text(each.allocated)} ({each.name}, device {each.device})" for each in of.memories[1:])
        facts.append(("other devices", others))
    yield Facts(memory_sentence(of), facts)
    if of.predicted:
        rows: list[tuple[str, ...]] = [
            (words(name), text(size), "", "", "") for name, size in of.predicted.items() if size and name not in (*BEYOND, "total")
        ]
        beyond = of.predicted["allocator"]
        pairs = (
            ("in tensors", of.predicted_allocated, fullest.allocated),
            ("held by the allocator", beyond, fullest.fragmentation),
            ("reserved", of.predicted_allocated + beyond, fullest.reserved),
        )
        for name, predicted, measured in pairs:
            more = measured - predicted
            difference = f"{'+' if more > 0 else '-'}{text(abs(more))}"
            rows.append((name, text(predicted), text(measured), difference, f"{more / predicted:+.1%}" if predicted else "-"))
        rows.append(("outside the allocator", text(of.predicted["framework"]), "", "", ""))
        headers = ("memory at the peak", "predicted", "measured", "difference", "of the prediction")
        yield Table(title="Memory of the fullest device", headers=headers, rows=tuple(rows), right=headers[1:])
    sites = [
        (one_line(each.where, 70), f"{each.num_blocks:,}", text(each.num_bytes), percent(each.num_bytes / fullest.allocated))
        for each in fullest.sites[:_MOST_SITES]
    ]
    rest = fullest.sites[_MOST_SITES:]
    if rest:
        size = sum(each.num_bytes for each in rest)
        name = f"{len(rest)} more line{'s' * (len(rest) > 1)}"
        sites.append((name, f"{sum(each.num_blocks for each in rest):,}", text(size), percent(size / fullest.allocated)))
    lines = ("allocated by", "blocks", "size", "share")
    yield Table(title="Live allocations at the peak", headers=lines, rows=tuple(sites), right=lines[1:])
    notes = [] if fullest.num_events else ["for the peak of a step, call torch.cuda.memory._record_memory_history() before it"]
    yield Notes([*notes, "a snapshot has what torch's allocator holds; the CUDA context and NCCL's buffers lie outside it", *read])
