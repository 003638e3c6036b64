"""Schedules of this package as files in torch's CSV format."""

from perfmodel.cost.schedules import schedule_of
from perfmodel.parallel.layout import stages_of_ranks
from perfmodel.parallel.pass_orders import PAIRED_BACKWARD


def text_of(schedule, num_ranks, num_microbatches, num_chunks):
    """The orders of a schedule as torch's CSV file; pairs of passes as one action."""
    lines = []
    for rank, stages in enumerate(stages_of_ranks(num_ranks, num_ranks * num_chunks, schedule.placement)):
        order = schedule_of(schedule).order(rank, num_ranks, num_microbatches, num_chunks)
        cells = [f"{stages[chunk]}{'B' if kind == PAIRED_BACKWARD else kind}{index}" for kind, chunk, index in order]
        for at in reversed([at for at, (kind, _, _) in enumerate(order) if kind == PAIRED_BACKWARD]):
            cells[at - 1 : at + 1] = [f"({cells[at - 1]};{cells[at]})OVERLAP_F_B"]
        lines.append(",".join(cells))
    return "\n".join(lines) + "\n"
