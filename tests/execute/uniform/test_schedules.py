"""Orders of passes: those of torch's schedules."""

import pytest

from perfmodel.cost.schedules import FORWARD, SCHEDULES
from perfmodel.parallel.choices import PipelineSchedule

schedules = pytest.importorskip("torch.distributed.pipelining.schedules")

TORCH = {
    PipelineSchedule.INTERLEAVED: schedules.ScheduleInterleaved1F1B,
    PipelineSchedule.ZERO_BUBBLE: schedules.ScheduleInterleavedZeroBubble,
}


KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


def torch_order(schedule, rank, num_ranks, num_microbatches, num_chunks):
    """The order that torch computes for a rank, without groups of processes."""
    one = object.__new__(TORCH[schedule])
    one.pp_group_size, one._n_microbatches, one.n_local_stages, one.rank = num_ranks, num_microbatches, num_chunks, rank
    one.number_of_rounds = max(1, num_microbatches // num_ranks)
    one.microbatches_per_round = num_microbatches // one.number_of_rounds
    return [
        (KINDS[action.computation_type.name], action.stage_index // num_ranks, action.microbatch_index)
        for action in one._calculate_single_rank_operations(rank)
        if action is not None
    ]


@pytest.mark.parametrize(
    "schedule, chunks",
    [(PipelineSchedule.INTERLEAVED, 2), (PipelineSchedule.INTERLEAVED, 3)]
    + [(PipelineSchedule.ZERO_BUBBLE, chunks) for chunks in (1, 2, 3)],
)
@pytest.mark.parametrize("num_ranks, num_microbatches", [(2, 2), (2, 6), (4, 4), (4, 16)])
def test_the_order_is_that_of_torch(schedule, chunks, num_ranks, num_microbatches):
    for rank in range(num_ranks):
        order = SCHEDULES[schedule].order(rank, num_ranks, num_microbatches, chunks)
        assert order == torch_order(schedule, rank, num_ranks, num_microbatches, chunks)
        assert order[0] == (FORWARD, 0, 0)
