"""Orders of passes: those of torch's schedules."""

import pytest

from perfmodel.cost.schedules import SCHEDULES
from perfmodel.parallel.choices import PipelineSchedule
from perfmodel.parallel.layout import Placement, rank_of_stage, stages_of_ranks
from perfmodel.parallel.pass_orders import FORWARD, PAIRED_BACKWARD, gathered_chunks, gathers_of

schedules = pytest.importorskip("torch.distributed.pipelining.schedules")

TORCH = {
    PipelineSchedule.INTERLEAVED: schedules.ScheduleInterleaved1F1B,
    PipelineSchedule.ZERO_BUBBLE: schedules.ScheduleInterleavedZeroBubble,
    PipelineSchedule.ZBV: schedules.ScheduleZBVZeroBubble,
    PipelineSchedule.DUALPIPEV: schedules.ScheduleDualPipeV,
}


KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


def torch_order(schedule, rank, num_ranks, num_microbatches, num_chunks):
    """The order that torch computes for a rank, without groups of processes."""
    one = object.__new__(TORCH[schedule])
    one.pp_group_size, one._n_microbatches, one.n_local_stages, one.rank = num_ranks, num_microbatches, num_chunks, rank
    one.num_stages = num_ranks * num_chunks
    one.number_of_rounds = max(1, num_microbatches // num_ranks)
    one.microbatches_per_round = num_microbatches // one.number_of_rounds
    actions = filter(None, one._calculate_single_rank_operations(rank))
    return [
        (PAIRED_BACKWARD if i else KINDS[action.computation_type.name], action.stage_index // num_ranks, action.microbatch_index)
        for pair in actions
        for i, action in enumerate(pair.sub_actions or (pair,))
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


@pytest.mark.parametrize("num_chunks", [1, 2, 3])
@pytest.mark.parametrize("num_ranks, num_microbatches", [(4, 1), (4, 3), (4, 7), (4, 10), (8, 27)])
def test_rounds_are_those_of_torch(num_ranks, num_microbatches, num_chunks):
    for rank in range(num_ranks):
        order = SCHEDULES[PipelineSchedule.ZERO_BUBBLE].order(rank, num_ranks, num_microbatches, num_chunks)
        assert order == torch_order(PipelineSchedule.ZERO_BUBBLE, rank, num_ranks, num_microbatches, num_chunks)


@pytest.mark.parametrize("schedule", [PipelineSchedule.INTERLEAVED, PipelineSchedule.ZERO_BUBBLE])
@pytest.mark.parametrize("num_chunks", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("num_ranks, num_microbatches", [(2, 4), (2, 12), (4, 4), (4, 16)])
def test_weights_are_gathered_and_freed_as_in_torchs_pipelines(schedule, num_ranks, num_microbatches, num_chunks):
    kinds = {letter: getattr(schedules, name) for name, letter in KINDS.items()}
    for rank in range(num_ranks):
        order = SCHEDULES[schedule].order(rank, num_ranks, num_microbatches, num_chunks)
        lowered = schedules._add_unshard_reshard([schedules._Action(chunk, kinds[kind], index) for kind, chunk, index in order])
        number, held, issued, gathered, gathers = 0, set(), {}, [], []
        for action in lowered:
            match action.computation_type:
                case schedules.UNSHARD:
                    held.add(action.stage_index)
                    issued[action.stage_index] = number
                case schedules.RESHARD:
                    held.remove(action.stage_index)
                case _:
                    if action.stage_index in issued:
                        gathers.append((action.stage_index, issued.pop(action.stage_index), number))
                    gathered.append(set(held))
                    number += 1
        assert list(map(set, gathered_chunks(order))) == gathered
        assert [(it.chunk, it.issued.total(), it.needed.total()) for it in gathers_of(order)] == gathers
        if num_chunks <= 3:
            assert len(gathers) == num_chunks


@pytest.mark.parametrize("schedule, num_ranks, num_microbatches", [
    *((PipelineSchedule.ZBV, p, m) for p in (2, 3, 4, 8) for m in (1, p, 2 * p - 1, 2 * p, 5 * p + 1)),
    *((PipelineSchedule.DUALPIPEV, p, m) for p in (2, 3, 4, 8) for m in (2 * p, 2 * p + 1, 5 * p)),
])  # fmt: skip
def test_the_order_of_a_v_is_that_of_torch(schedule, num_ranks, num_microbatches):
    for rank in range(num_ranks):
        order = SCHEDULES[schedule].order(rank, num_ranks, num_microbatches, 2)
        assert order == torch_order(schedule, rank, num_ranks, num_microbatches, 2)


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_the_placement_is_that_of_torch(num_ranks):
    utils = pytest.importorskip("torch.distributed.pipelining._utils")
    for placement, style, chunks in ((Placement.LOOP, "loop", 3), (Placement.V, "v", 2)):
        by_rank = utils.generate_rank_to_stage_mapping(num_ranks, num_ranks * chunks, style=style)
        assert stages_of_ranks(num_ranks, num_ranks * chunks, placement) == [tuple(by_rank[rank]) for rank in range(num_ranks)]
        by_stage = utils.generate_stage_to_rank_mapping(num_ranks, num_ranks * chunks, style=style)
        assert {stage: rank_of_stage(stage, num_ranks, placement) for stage in by_stage} == by_stage
