"""A pipeline schedule from a file: the order of the passes of every rank, in the CSV format of torch's pipeline runtime.

A line is a rank, a cell an action: virtual stage, kind, micro-batch. Kinds: F (forward), B (backward), I and W (gradients of inputs and
of weights). `(0F4;7B1)OVERLAP_F_B` is a pair of a forward and a backward pass; an empty cell is idle time, which is simulated instead.

Source: torch 2.13, `torch.distributed.pipelining.schedules`: `_Action.from_str`, `_PipelineScheduleRuntime._load_csv` with compute_only.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

from perfmodel.foundation.errors import InputError, bad_field, one_line, shown
from perfmodel.parallel.choices import PipelineSchedule
from perfmodel.parallel.layout import Placement, stages_of_ranks
from perfmodel.parallel.pass_orders import BACKWARD, FORWARD, INPUT_GRADIENT, PAIRED_BACKWARD, WEIGHT_GRADIENT, Pass, steps_of

#: One action of a rank: kind of pass, virtual stage in model order, micro-batch.
Action = tuple[str, int, int]

#: Name of schedules from a file in plan files and in the lists of what a framework runs.
FILE = "file"

_ACTION = re.compile(r"(\d{1,6})([FBIW])(\d{1,6})")
_PAIR = re.compile(r"\(\s*(\d{1,6})F(\d{1,6})\s*;\s*(\d{1,6})B(\d{1,6})\s*\)OVERLAP_F_B")
_HOW = "write 0F0 (forward of micro-batch 0 on stage 0), 0B0 (backward), 0I0 and 0W0 (its parts) or (0F1;3B0)OVERLAP_F_B"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleTable:
    """A pipeline schedule from a file, for one number of ranks and of micro-batches. It has the fields of `PipelineSchedule`.

    name    name for output: that of the file
    lines   actions of each rank in torch's notation, separated by commas
    """

    listed_as: ClassVar[str] = FILE
    is_simulated: ClassVar[bool] = True
    groups: ClassVar[str] = ""
    microbatches_per_rank: ClassVar[int] = 0

    name: str
    lines: tuple[str, ...]
    orders: tuple[tuple[Pass, ...], ...]
    placement: Placement
    num_chunks: int
    num_microbatches: int
    splits_backward: bool

    def __str__(self) -> str:
        return self.name

    @property
    def num_ranks(self) -> int:
        return len(self.orders)

    @property
    def takes_chunks(self) -> bool:
        """A rank may, and must, hold several virtual stages."""
        return self.num_chunks > 1

    needs_chunks = takes_chunks

    def admits(self, num_microbatches: Any, num_ranks: int, num_chunks: int = 1) -> Any:
        """Return whether the schedule is for these numbers of micro-batches, a number or a column, and of ranks."""
        return (num_microbatches == self.num_microbatches) & (num_ranks == self.num_ranks) & (num_chunks == self.num_chunks)

    def to_dict(self) -> dict[str, Any]:
        """Return the table as plain values of a plan file."""
        return {"name": self.name, "orders": list(self.lines)}


#: A schedule by name, or from a file.
AnySchedule = PipelineSchedule | ScheduleTable


def read_schedule(value: object, name: str) -> str | ScheduleTable:
    """Return the schedule of a name or a file; a name that is no schedule is refused by what uses it."""
    if isinstance(value, ScheduleTable):
        return value
    if isinstance(value, Path) or (isinstance(value, str) and value.endswith(".csv")):
        return read_table(value)
    if not isinstance(value, str):
        rule = "must be its name or its file"
        raise bad_field(name, shown(value), rule, f"use {', '.join(PipelineSchedule)}, or the path of a CSV file")
    return value


def read_table(path: str | Path) -> ScheduleTable:
    """Return the schedule of a CSV file. Raises InputError."""
    from perfmodel.foundation.files import read_text

    return table_in(Path(path).stem, read_text(path, "schedule"), where=str(path))


def table_in(name: str, text: str, *, where: str) -> ScheduleTable:
    """Return the schedule in the text of a CSV file. Raises InputError."""
    return table_of(name, [line for line in text.splitlines() if line.strip(", \t")], where=where)


def table_of(name: str, lines: Sequence[str], *, where: str) -> ScheduleTable:
    """Return the schedule of lines in torch's notation, one a rank. Raises InputError with the first fault."""
    actions = [list(_actions(line, f"{where}: line {rank + 1}")) for rank, line in enumerate(lines)]
    if len(actions) < 2:
        raise InputError(f"{where}: has {len(actions)} lines: a schedule has one for each of at least two ranks; write the others")
    placement, num_chunks = _placement(actions, where)
    num_ranks = len(actions)
    num_microbatches = 1 + max(microbatch for of_rank in actions for *_, microbatch in of_rank)
    if num_microbatches * num_ranks * num_chunks > _MOST_ACTIONS:
        raise InputError(f"{where}: has {num_microbatches} micro-batches; at most {_MOST_ACTIONS} passes are simulated, use fewer")
    for rank, stages in enumerate(stages_of_ranks(num_ranks, num_ranks * num_chunks, placement)):
        _check_rank(actions[rank], rank, stages, num_microbatches, where)
    orders = tuple(tuple((kind, stage // num_ranks, microbatch) for kind, stage, microbatch in of_rank) for of_rank in actions)
    kinds = {kind for of_rank in orders for kind, *_ in of_rank}
    try:
        steps_of(orders, num_ranks * num_chunks, placement)
    except ValueError as error:
        raise InputError(f"{where}: the ranks wait for each other: {error}; change the order of one of them") from None
    return ScheduleTable(
        name=name,
        lines=tuple(",".join(cell.strip() for cell in line.split(",") if cell.strip()) for line in lines),
        orders=orders,
        placement=placement,
        num_chunks=num_chunks,
        num_microbatches=num_microbatches,
        splits_backward=WEIGHT_GRADIENT in kinds,
    )


_MOST_ACTIONS = 1_000_000
"""Largest number of passes of a kind in a file."""


def _actions(line: str, where: str) -> Iterator[Action]:
    """Yield the actions of a line; those of a pair one after the other."""
    for number, cell in enumerate(line.split(","), start=1):
        text = cell.strip().strip('"')
        if not text:
            continue
        if one := _ACTION.fullmatch(text):
            yield one[2], int(one[1]), int(one[3])
        elif pair := _PAIR.fullmatch(text):
            yield FORWARD, int(pair[1]), int(pair[2])
            yield PAIRED_BACKWARD, int(pair[3]), int(pair[4])
        else:
            raise InputError(f"{where}, action {number}: {one_line(text, 40)!r} is no pass; {_HOW}")


def _placement(actions: Sequence[Sequence[Action]], where: str) -> tuple[Placement, int]:
    """Return the placement of the virtual stages on the ranks, and the number of stages of a rank."""
    held = [sorted({stage for _, stage, _ in of_rank}) for of_rank in actions]
    ranks: dict[int, int] = {}
    for rank, stages in enumerate(held):
        for stage in stages:
            if stage in ranks:
                raise InputError(f"{where}: stage {stage} is on the ranks {ranks[stage]} and {rank}; run all its passes on one of them")
            ranks[stage] = rank
    num_stages = 1 + max(ranks, default=-1)
    missing = next((stage for stage in range(num_stages) if stage not in ranks), None)
    if missing is not None:
        raise InputError(f"{where}: no rank runs stage {missing} of {num_stages}; number the stages from 0 without gaps")
    for placement in Placement:
        if num_stages % len(actions) == 0 and held == list(map(list, stages_of_ranks(len(actions), num_stages, placement))):
            return placement, num_stages // len(actions)
    rank = next((rank for rank, stages in enumerate(held) if rank not in stages), 0)
    raise InputError(
        f"{where}: rank {rank} has the stages {', '.join(map(str, held[rank])) or 'none'} of {num_stages}: stages must go over the "
        f"{len(actions)} ranks in turn (k % p) or in a V; place them so"
    )


def _check_rank(actions: Sequence[Action], rank: int, stages: Sequence[int], num_microbatches: int, where: str) -> None:
    """Check that every micro-batch runs forward and backward once on every stage of a rank, in this order."""
    counts = Counter(actions)
    unsplit = {(stage, index) for kind, stage, index in actions if kind in (BACKWARD, PAIRED_BACKWARD)}
    at = {action: position for position, action in enumerate(actions)}
    for stage in stages:
        for index in range(num_microbatches):
            backward = [kind for kind in (BACKWARD, PAIRED_BACKWARD) if (kind, stage, index) in counts]
            split = [kind for kind in (INPUT_GRADIENT, WEIGHT_GRADIENT) if (kind, stage, index) in counts]
            needed = [FORWARD, *(backward[:1] if (stage, index) in unsplit else [INPUT_GRADIENT, WEIGHT_GRADIENT])]
            for kind in needed:
                if counts[kind, stage, index] != 1:
                    times = "is missing" if not counts[kind, stage, index] else "occurs more than once"
                    also = f", or {stage}B{index} in place of both parts" if kind in (INPUT_GRADIENT, WEIGHT_GRADIENT) else ""
                    raise InputError(f"{where}: {stage}{_text(kind)}{index} {times} on rank {rank}; run it once{also}")
            if len(backward) > 1 or (backward and split):
                raise InputError(f"{where}: the backward pass {stage}B{index} runs twice on rank {rank}; keep it whole or in parts")
            for before, after in pairwise(needed):
                if at[before, stage, index] > at[after, stage, index]:
                    late, early = f"{stage}{_text(before)}{index}", f"{stage}{_text(after)}{index}"
                    raise InputError(f"{where}: {early} comes before {late} on rank {rank}; change their order")


def _text(kind: str) -> str:
    return BACKWARD if kind == PAIRED_BACKWARD else kind
