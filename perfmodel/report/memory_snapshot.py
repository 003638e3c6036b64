"""Measured and predicted peak memory as text and as an object."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from perfmodel.foundation.errors import one_line
from perfmodel.parallel.measured import OUTSIDE_TENSORS, MemoryComparison
from perfmodel.parallel.plan import Plan
from perfmodel.report.document import Block, Facts, Notes
from perfmodel.report.table import Table, bytes_like, percent, words
from perfmodel.report.trace import plan_facts

_MOST_SITES = 10


def memory_object(comparison: MemoryComparison) -> dict[str, Any]:
    fullest, content = comparison.memories[0], dict[str, Any]()
    content["measured"] = {name: getattr(fullest, name) for name in ("allocated", "reserved", "fragmentation", "most_reserved")}
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
        headers = ("memory at the peak", "predicted", "measured", "difference", "of the prediction")
        yield Table(title="Memory of the fullest device", headers=headers, rows=tuple(rows), right=headers[1:])
    sites = [(one_line(site.where, 70), site.num_blocks, site.num_bytes) for site in fullest.sites[:_MOST_SITES]]
    rest = fullest.sites[_MOST_SITES:]
    if rest:
        name = f"{len(rest)} more line{'s' * (len(rest) > 1)}"
        sites.append((name, sum(site.num_blocks for site in rest), sum(site.num_bytes for site in rest)))
    cells = tuple((name, f"{blocks:,}", text(size), percent(size / fullest.allocated)) for name, blocks, size in sites)
    lines = ("allocated by", "blocks", "size", "share")
    yield Table(title="Live allocations at the peak", headers=lines, rows=cells, right=lines[1:])
    notes = [] if fullest.num_events else ["for the peak of a step, call torch.cuda.memory._record_memory_history() before it"]
    yield Notes([*notes, "a snapshot has what torch's allocator holds; the CUDA context and NCCL's buffers lie outside it", *read])
