"""The collectives that a step issues are those that the sharding algebra derives."""

import pytest

from perfmodel.workload.routing import RoutingCounts
from tests.execute.jobs import count_collectives_on_rank, tiny, tiny_plan

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LAYERS, HIDDEN, SEQ, BATCH = 4, 64, 32, 8
FP32 = 4
UNITS = LAYERS + 2  # each layer, the embedding, and the final norm with the head


def traffic(group, plan, rank=0):
    tally = group.call(count_collectives_on_rank, plan)[rank]
    return {key: (tally.counts[key], tally.num_bytes[key]) for key in tally.counts}


@pytest.mark.parametrize("recompute, extra", [("none", 0), ("full", 1)])
def test_tensor_parallelism_reduces_twice_forward_and_twice_backward_a_layer(recompute, extra, groups):
    """And once for the embedding, once for the head's input, and three numbers a token for the loss. Recomputing a layer
    repeats its first reduction; torch stops before the second."""
    plan = tiny_plan(2, tp=2, sequence_parallel=False, micro_batch=BATCH, recompute=recompute)
    sent = traffic(groups(2), plan)
    activations = LAYERS * (4 + extra) + 2
    assert sent == {
        ("all_reduce", "tp"): (activations + 3, activations * BATCH * SEQ * HIDDEN * FP32 + 3 * BATCH * SEQ * FP32),
    }


@pytest.mark.parametrize("recompute, scatters, gathers", [("none", 0, 0), ("full", 1, 2)])
def test_sequence_parallelism_moves_the_same_bytes_as_scatters_and_gathers(recompute, scatters, gathers, groups):
    plan = tiny_plan(2, tp=2, micro_batch=BATCH, recompute=recompute)
    sent = traffic(groups(2), plan)
    message = BATCH * SEQ * HIDDEN * FP32
    norms = (2 * LAYERS + 1) * HIDDEN * FP32
    assert sent == {
        ("reduce_scatter", "tp"): (LAYERS * (4 + scatters) + 2, (LAYERS * (4 + scatters) + 2) * message),
        ("all_gather", "tp"): (LAYERS * (4 + gathers) + 2, (LAYERS * (4 + gathers) + 2) * message),
        # the loss, and every norm weight's gradient once, together
        ("all_reduce", "tp"): (3 + 1, 3 * BATCH * SEQ * FP32 + norms),
    }


@pytest.mark.parametrize("variant, forward, backward", [("falcon", 1, 1), ("neox", 1, 2)])
def test_parallel_branches_are_added_before_they_are_reduced(variant, forward, backward, groups):
    sent = traffic(groups(2), tiny_plan(2, model=tiny(variant), tp=2, sequence_parallel=False, micro_batch=BATCH))
    assert sent["all_reduce", "tp"][0] == LAYERS * (forward + backward) + 2 + 3


@pytest.mark.parametrize("micro_batch", [1, 4])
def test_data_parallelism_reduces_each_unit_once_a_step(micro_batch, groups):
    plan = tiny_plan(2, micro_batch=micro_batch)
    assert traffic(groups(2), plan) == {("all_reduce", "dp_replicate"): (UNITS, plan.job.model.num_parameters * FP32)}


def padded_parameters(model, ways):
    """fully_shard pads the rows of each tensor to its ranks."""
    total = 0
    for shape in model.parameter_shapes():
        rows, rest = shape.shape[0], shape.num_elements // shape.shape[0]
        total += -(-rows // ways) * ways * rest
    return total


def padded_head(model, ways):
    return -(-model.vocab_size // ways) * ways * model.hidden_size + -(-model.hidden_size // ways) * ways


@pytest.mark.parametrize("zero, gathers", [(2, 1), (3, 2)])
@pytest.mark.parametrize("micro_batch", [1, 4])
def test_fully_sharded_weights_are_gathered_for_each_pass_of_each_microbatch(zero, gathers, micro_batch, groups):
    plan = tiny_plan(2, zero=zero, micro_batch=micro_batch)
    microbatches = BATCH // 2 // micro_batch
    model = plan.job.model
    size = padded_parameters(model, 2) * FP32
    # the head is wanted again at once and stays
    again = (gathers - 1) * (UNITS - 1), (gathers - 1) * (size - padded_head(model, 2) * FP32)
    assert traffic(groups(2), plan) == {
        ("all_gather", "dp_shard"): (microbatches * (UNITS + again[0]), microbatches * (size + again[1])),
        ("reduce_scatter", "dp_shard"): (microbatches * UNITS, microbatches * size),
    }


def test_zero_1_scatters_gradients_and_gathers_weights_once_a_step(groups):
    plan = tiny_plan(2, zero=1)
    size = plan.job.model.num_parameters * FP32
    assert traffic(groups(2), plan) == {("reduce_scatter", "dp_shard"): (UNITS, size), ("all_gather", "dp_shard"): (UNITS, size)}


def test_hybrid_sharding_reduces_a_shard_over_replicas(groups):
    plan = tiny_plan(4, dp_replicate=2, dp_shard=2, zero=3)
    sent = traffic(groups(4), plan)
    size = padded_parameters(plan.job.model, 2) * FP32
    assert sent["reduce_scatter", "dp_shard"] == (2 * UNITS, 2 * size)  # two microbatches
    assert sent["all_reduce", "dp_replicate"] == (UNITS, size / 2)


def test_context_parallelism_gathers_keys_and_values(groups):
    plan = tiny_plan(2, cp=2, micro_batch=BATCH)
    model = plan.job.model
    keys = BATCH * SEQ * model.num_key_value_heads * model.head_dim * FP32
    assert traffic(groups(2), plan) == {
        ("all_gather", "cp"): (2 * LAYERS, 2 * LAYERS * keys),
        ("reduce_scatter", "cp"): (2 * LAYERS, 2 * LAYERS * keys),
        ("all_reduce", "cp"): (UNITS, model.num_parameters * FP32),
    }


def test_pipeline_sends_each_microbatch_once_each_way(groups):
    plan = tiny_plan(2, pp=2, micro_batch=2)
    sent = (4, 4 * 2 * SEQ * HIDDEN * FP32)
    for rank in (0, 1):
        assert traffic(groups(2), plan, rank) == {("send", "pp"): sent, ("recv", "pp"): sent}


def test_tied_embeddings_on_two_stages_are_reduced_between_them(groups):
    model = tiny("gpt2")
    sent = traffic(groups(2), tiny_plan(2, model=model, pp=2, micro_batch=2))
    assert sent["all_reduce", "pp"] == (1, model.vocab_size * model.hidden_size * FP32)


@pytest.mark.parametrize("zero", [2, 3])
def test_a_pipelined_fully_sharded_model_gathers_and_reduces_once_a_step(zero, groups):
    """Weights stay gathered and gradients unreduced from the first microbatch to the last."""
    sent = traffic(groups(4), tiny_plan(4, pp=2, dp_shard=2, zero=zero))
    units = LAYERS // 2 + 1
    assert sent["reduce_scatter", "dp_shard"][0] == units
    assert sent["all_gather", "dp_shard"][0] == units


def test_tokens_travel_to_experts_as_counts_say(groups):
    """8 x 32 tokens, each for two experts: each rank sends all of one choice to expert 0, so that rank 0 gets 3/2 of the mean."""
    tokens, layers = BATCH * SEQ // 2, 2
    plan = tiny_plan(2, model=tiny("mixtral", num_hidden_layers=layers), ep=2, micro_batch=BATCH // 2)
    counts = RoutingCounts(((tokens, 0, 0, tokens // 2, 0, 0, 0, tokens // 2),) * 2)
    tallies = groups(2).call(count_collectives_on_rank, plan, counts)
    for tally, received in zip(tallies, (3 * tokens, tokens), strict=True):
        assert tally.counts["all_to_all", "ep"] == 4 * layers
        assert tally.num_bytes["all_to_all", "ep"] == 2 * layers * (received + 2 * tokens) * HIDDEN * FP32


@pytest.mark.parametrize("recompute, forward", [("none", 1), ("full", 2)])
def test_tokens_travel_once_to_each_rank_of_their_choice(recompute, forward, groups):
    """Each rank sends half of the same tokens to one rank alone, for both of their choices. Tokens travel with the weights of all choices;
    a run sends the number of tokens and the token of each row in addition."""
    tokens, layers, ranks = BATCH * SEQ // 2, 2, 2
    knobs = dict(ep=2, micro_batch=BATCH // 2, dispatcher="flex", recompute=recompute)
    plan = tiny_plan(2, model=tiny("mixtral", num_hidden_layers=layers), **knobs)
    counts = RoutingCounts(((tokens, 0, 0, tokens // 2, 0, 0, 0, tokens // 2),) * 2)
    assert counts.tokens_to_ranks(2).tolist() == [[tokens, tokens // 2]] * 2
    sent, index = tokens * 3 // 2, 8
    tallies = groups(2).call(count_collectives_on_rank, plan, counts)
    for tally, received, rows in zip(tallies, (2 * tokens, tokens), (3 * tokens, tokens), strict=True):
        weights = (forward * rows + 2 * tokens) * FP32
        index_bytes = forward * (ranks + rows) * index
        moved = (forward + 1) * (sent + received) * HIDDEN * FP32  # what is recomputed stops before the last of its operators is needed
        counted = tally.counts["all_to_all", "ep"], tally.num_bytes["all_to_all", "ep"]
        assert counted == (layers * (3 * (forward + 1) + 2 * forward), layers * (moved + weights + index_bytes))
