"""Tokens that spread unevenly over experts, or are cut to a capacity."""

import numpy as np
import pytest

import perfmodel
from perfmodel.cost.program import FORWARD
from perfmodel.foundation.copies import Copies
from perfmodel.foundation.errors import InputError
from perfmodel.frameworks.profile import load_profile
from perfmodel.parallel.executable import not_modules_reason
from perfmodel.parallel.plan_file import write_plan
from perfmodel.workload.models import load_model
from perfmodel.workload.routing import RoutingCounts, counts_in_turn, routing_counts, routing_of

JOB = {"model": "mixtral-8x7b", "cluster": "dgx-h100", "chips": 64, "global_batch": 64, "seq_len": 4096, "profile": "megatron"}
PLAN = JOB | {"ep": 8, "zero": 1, "pp": 4}


def predicted(**more):
    return perfmodel.predict(**PLAN | more)


def test_the_fullest_rank_sets_time_and_memory():
    even, uneven = predicted(), predicted(routing="skew:1.5")
    assert uneven.step_time > 1.2 * even.step_time
    assert uneven.memory["activations"] > 1.2 * even.memory["activations"]
    assert uneven.memory["weights"] == even.memory["weights"]
    traffic = [prediction.parts["expert_parallel_communication"] for prediction in (even, uneven)]
    assert traffic[1] == pytest.approx(1.5 * traffic[0], rel=0.1)


def test_useful_work_is_what_it_was():
    """The model's FLOP are of rows that tokens chose: the fullest rank's more are not of the model."""
    even, uneven = predicted(), predicted(routing="skew:1.5")
    assert uneven.mfu_palm * uneven.step_time == pytest.approx(even.mfu_palm * even.step_time)


def test_the_chip_waits_for_counts_once_a_forward_pass_of_a_layer():
    """One launch of a forward pass each time that tokens are sent whose numbers only chips know; none where buffers are of one size."""
    waits = load_model("mixtral-8x7b").num_hidden_layers * FORWARD * load_profile("megatron").timing.host_launch_time
    counted, free = (predicted(pp=1, **words) for words in ({}, {"capacity_factor": 1}))
    assert counted.parts["host"] - free.parts["host"] == pytest.approx(waits)
    assert counted.step_time - free.step_time == pytest.approx(waits)
    counted, free = (predicted(pp=1, recompute="full", **words) for words in ({}, {"capacity_factor": 1}))
    assert counted.step_time - free.step_time == pytest.approx(2 * waits)
    assert predicted(pp=1, ep=1).step_time == predicted(pp=1, ep=1, capacity_factor=1).step_time


def test_a_capacity_is_what_every_expert_computes():
    """It takes the time of the fullest rank of a skew. A skew leaves the number of a rank's own tokens; padding raises it."""
    padded, skewed, even = predicted(capacity_factor=1.5), predicted(routing="skew:1.5"), predicted()
    exchanges = [prediction.parts["expert_parallel_communication"] for prediction in (padded, skewed)]
    assert exchanges[0] == exchanges[1]
    assert skewed.step_time - skewed.parts["host"] < padded.step_time - padded.parts["host"] < 1.01 * skewed.step_time
    assert even.memory["activations"] < skewed.memory["activations"] < padded.memory["activations"]
    assert predicted(capacity_factor=1.5, routing="skew:3").step_time == predicted(capacity_factor="1.5").step_time
    assert predicted(capacity_factor=1).memory == predicted().memory


def test_a_plan_file_says_it_and_predicts_to_the_bit(tmp_path):
    prediction = predicted(routing="skew:1.25", capacity_factor=1.5)
    write_plan(prediction.plan, tmp_path / "plan.yaml")
    text = (tmp_path / "plan.yaml").read_text()
    assert "routing: skew:1.25" in text
    assert "capacity_factor: 1.5" in text
    assert perfmodel.predict(tmp_path / "plan.yaml").step_time == prediction.step_time
    assert perfmodel.predict(tmp_path / "plan.yaml", capacity_factor="none").step_time == predicted(routing="skew:1.25").step_time
    write_plan(predicted().plan, tmp_path / "even.yaml")
    assert "routing" not in (tmp_path / "even.yaml").read_text()


def test_a_search_takes_it():
    search = perfmodel.find_plans(**JOB, routing="skew:1.5", pp=4, tp=1, cp=1, ep=8, zero=1, top=1)
    best = search.plans[0]
    assert best.plan.job.routing == routing_of("skew:1.5")
    assert perfmodel.predict(best.plan).step_time == best.step_time


@pytest.mark.parametrize(
    "more, sentence",
    [
        ({"routing": "skewed"}, "routing='skewed': must be balanced, or skew:"),
        ({"routing": "skew:0.5"}, "must be balanced, or skew:"),
        ({"capacity_factor": -1}, "capacity_factor=-1: must be a positive number"),
        ({"capacity_factor": "much"}, "capacity_factor='much': must be a number"),
        ({"capacity_factor": 1e-4}, "capacity_factor=0.0001: leaves an expert room for 0.1 rows of a sequence, which is below one"),
        ({"routing": "skew:2", "model": "llama-3-8b", "ep": 1}, "llama-3-8b has no experts"),
    ],
)
def test_what_cannot_be_is_refused(more, sentence):
    with pytest.raises(InputError, match=sentence):
        predicted(**more)


def test_who_cannot_run_it_says_so():
    assert "routing=skew:1.5: the executor" in not_modules_reason(predicted(routing="skew:1.5", pp=1).plan)


def test_counts_say_what_comes_to_each_expert(tmp_path):
    counts = RoutingCounts(((4, 0, 3, 1), (4, 2, 2, 0)))
    assert [counts.received(rank) for rank in (0, 1)] == [(8, 2), (5, 1)]
    assert counts.sent(1, 0) == (4, 2)
    assert counts.skew == 10 / 8
    counts.check(ranks=2, num_experts=4, tokens=4, top_k=2)
    assert routing_counts(np.array(counts.rows)) == counts
    for name, text in (("counts.csv", "4,0,3,1\n4, 2, 2, 0\n"), ("counts.json", "[[4, 0, 3, 1], [4, 2, 2, 0]]")):
        (tmp_path / name).write_text(text)
        assert routing_counts(tmp_path / name) == routing_counts(str(tmp_path / name)) == counts


@pytest.mark.parametrize("ranks, num_experts, top_k", [(8, 128, 8), (16, 256, 8), (4, 64, 6), (8, 8, 2)])
def test_tokens_of_even_counts_go_to_about_as_many_ranks_as_those_that_choose_freely(ranks, num_experts, top_k):
    """Tokens go neither to a rank per chosen expert nor to one rank: an audit of flex counts about the number predicted without counts."""
    tokens = 32 * num_experts
    travel = counts_in_turn(ranks=ranks, num_experts=num_experts, tokens=tokens, top_k=top_k).tokens_to_ranks(top_k)
    free = Copies(slots=num_experts, chosen=top_k).distinct(ranks)
    assert travel.sum(axis=1) / tokens == pytest.approx(free, rel=0.1)
    assert travel.max() <= tokens


def test_counts_in_turn_are_as_even_as_they_go():
    counts = counts_in_turn(ranks=4, num_experts=8, tokens=5, top_k=3)
    counts.check(ranks=4, num_experts=8, tokens=5, top_k=3)
    assert {sum(column) for column in zip(*counts.rows, strict=True)} == {7, 8}


@pytest.mark.parametrize(
    "value, message",
    [
        ([], "must be a matrix of counts"),
        (["12"], "must be a matrix of counts"),
        (np.array([3, 4]), "must be a matrix of counts"),
        ([[1, 2], [3]], "rows of 1, 2 counts: each row must have the same number of counts"),
        ([[1, 2, 3], [1, 2, 3]], "a multiple of the number of rows"),
        ([["1", "x"]], "'x': must be a whole number of tokens"),
        ([[1, -1]], "-1: must be a whole number of tokens"),
        ([[1.5, 2]], "1.5: must be a whole number"),
        ("nowhere.csv", "nowhere.csv: cannot be read"),
    ],
)
def test_what_is_no_matrix_of_counts_is_refused(value, message):
    with pytest.raises(InputError, match=message):
        routing_counts(value)


@pytest.mark.parametrize(
    "rows, message",
    [
        ([[5, 3, 0, 0], [4, 4, 0, 0]], r"routing\[0\]=5: no expert may get more than the 4 tokens"),
        ([[4, 3, 0, 0], [4, 4, 0, 0]], r"routing\[0\]=7: must add up to 8"),
        ([[4, 4], [4, 4]], r"routing\[0\]=2 counts: must have one for each of the 4 experts"),
    ],
)
def test_counts_of_another_plan_are_refused(rows, message):
    with pytest.raises(InputError, match=message):
        routing_counts(rows).check(ranks=2, num_experts=4, tokens=4, top_k=2)
