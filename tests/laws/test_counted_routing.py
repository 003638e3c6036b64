"""Plans whose tokens go to experts by counts: they agree with a skew and with the audit of their ranks, and ignore the order of ranks."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import numpy as np
import pytest

import perfmodel
from perfmodel.cli import app as cli
from perfmodel.cost.counts import EXECUTOR_PROFILE, executor_profile, predicted_counts
from perfmodel.cost.estimate import memory_on_rank
from perfmodel.cost.programs import Compiled
from perfmodel.foundation.errors import InputError
from perfmodel.parallel.folded_mesh import expert_rank
from perfmodel.parallel.plan import place_of
from perfmodel.parallel.plan_file import read_plan, write_plan
from perfmodel.verbs.setting import setting_of_plan
from perfmodel.workload.routing import BALANCED, EVEN, RoutingCounts, routing_counts, routing_of
from tests.execute.jobs import tiny, tiny_plan

#: Eight ranks of ep, one expert each, of 4,096 tokens that choose two.
PLAN = {"model": "mixtral-8x7b", "cluster": "dgx-h100", "chips": 64, "global_batch": 64, "seq_len": 4096, "profile": "megatron"}
PLAN |= {"ep": 8, "zero": 1, "pp": 4}
RANKS, SENT = 8, 4096 * 2


def predicted(**more):
    return perfmodel.predict(**PLAN | more)


def same(a, b):
    return (a.step_time, a.parts, a.memory) == (b.step_time, b.parts, b.memory)


def row_with(first: int) -> list[int]:
    """`first` rows to the first expert, the rest as evenly as they go."""
    share, left = divmod(SENT - first, RANKS - 1)
    return [first, *(share + (i < left) for i in range(RANKS - 1))]


def uneven(seed: int = 1) -> RoutingCounts:
    """Return counts in which each rank chooses otherwise, and no two ranks' experts receive the same number."""
    draw, rows = random.Random(seed), []
    for _ in range(RANKS):
        weights = [draw.random() + 0.2 for _ in range(RANKS)]
        row = [int(SENT * weight / sum(weights)) for weight in weights]
        row[-1] += SENT - sum(row)
        rows.append(row)
    return routing_counts(rows)


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather", "flex"])
def test_counts_that_are_all_alike_are_balanced_routing(dispatcher):
    assert same(predicted(routing=[[SENT // RANKS] * RANKS] * RANKS, dispatcher=dispatcher), predicted(dispatcher=dispatcher))


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather", "flex"])
@pytest.mark.parametrize("precision", ["bf16-mixed", "fp8-block"])
def test_counts_of_ranks_that_send_alike_are_the_skew_of_the_fullest(dispatcher, precision):
    more = {"dispatcher": dispatcher, "precision": precision}
    counted = predicted(routing=[row_with(1280)] * RANKS, **more)
    assert counted.plan.job.routing.skew == 1.25
    assert same(counted, predicted(routing="skew:1.25", **more))
    assert counted.step_time > predicted(**more).step_time


@pytest.mark.parametrize("seed", range(5))
def test_ranks_in_another_order_are_predicted_alike(seed):
    counts, draw = uneven(seed), random.Random(seed)
    order = draw.sample(range(RANKS), RANKS)
    moved = [[counts.rows[source][rank] for rank in order] for source in order]
    assert moved != [list(row) for row in counts.rows]
    assert same(predicted(routing=counts), predicted(routing=moved))


def test_experts_of_a_rank_in_another_order_are_predicted_alike():
    counts = np.array(uneven().rows).repeat(2, axis=1)[:4]  # of four ranks, with four experts each
    counts[:, -1] -= counts.sum(axis=1) - 4 * counts.sum(axis=1).min() // 4
    swapped = counts.reshape(4, 4, 4)[:, :, ::-1].reshape(4, 16)
    assert not np.array_equal(counts, swapped)
    assert routing_of(counts).rows == routing_of(swapped).rows


def test_an_exchange_is_over_when_the_rank_that_sends_or_receives_most_is_done():
    """Three ranks, by hand: rows for the rank itself are not sent; the rank that sends most need not receive most."""
    sends = routing_counts([[0, 6, 6], [0, 12, 0], [0, 0, 12]])
    assert sends.skew == 1.5  # the second receives 18 of 36
    assert sends.busiest == 12 / 8  # the first sends 12, where each would send 8
    assert routing_counts([[12, 0, 0], [0, 12, 0], [0, 0, 12]]).busiest == 0.0
    receives = routing_counts([[4, 8, 0], [0, 12, 0], [0, 8, 4]])
    assert receives.busiest == 16 / 8
    assert receives.skew == 28 / 12


def test_rows_that_stay_are_not_exchanged():
    local = predicted(routing=[[SENT // 2 * (rank in (expert, expert ^ 1)) for expert in range(RANKS)] for rank in range(RANKS)])
    even = predicted()
    assert local.parts["expert_parallel_communication"] < 0.8 * even.parts["expert_parallel_communication"]
    assert local.memory == even.memory


FORMS = {
    "ep, ZeRO-3": ("mixtral", dict(num_chips=4, ep=4, zero=3)),
    "ep over tp, cp and data": ("shared experts", dict(num_chips=16, ep=8, cp=2, tp=2, etp=1, zero=1)),
    "pp, recomputed": ("deepseek", dict(num_chips=8, ep=4, pp=2, recompute="full")),
    "shared by etp": ("mixtral", dict(num_chips=8, ep=2, tp=2, etp=2)),
    "gathered": ("shared experts", dict(num_chips=8, ep=4, cp=2, dispatcher="allgather")),
}


def skewed(plan) -> RoutingCounts:
    """Every rank sends the same: all its tokens to the second expert, none to the last, in turn to the others."""
    experts, layout = plan.job.transformer.parts.experts, plan.layout
    tokens = plan.micro_batch * plan.job.seq_len // (layout.cp * layout.tp)
    others = [0, *range(2, experts.num_experts - 1)]
    row = [tokens if expert == 1 else 0 for expert in range(experts.num_experts)]
    for i in range(tokens * (experts.top_k - 1)):
        row[others[i % len(others)]] += 1
    return routing_counts([row] * plan.ep)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.slow
def test_a_prediction_is_what_an_audit_predicts_of_the_fullest_rank(name):
    variant, knobs = FORMS[name]
    even = tiny_plan(model=tiny(variant), **knobs)
    counts = skewed(even)
    plan = replace(even, job=replace(even.job, routing=routing_of(counts)), profile=EXECUTOR_PROFILE)
    estimator = setting_of_plan(plan, cluster="dgx-h100", profile=executor_profile(plan.job.policy)).estimator
    of_one = replace(estimator, job=even.job, programs=replace(estimator.programs, job=even.job, compiled=Compiled()))
    stage = plan.layout.pp - 1
    places = [coordinates for rank in range(plan.num_chips) if (coordinates := place_of(plan, rank))["pp"] == stage]
    received = [sum(counts.received(expert_rank(plan, at))) for at in places]
    coordinates = places[received.index(max(received))]
    fullest, *others = [predicted_counts(of_one, even, at, counts) for at in (coordinates, *places)]
    saved, moment, by_class = memory_on_rank(estimator, plan, stage)
    assert (fullest.saved, fullest.peak_moment, fullest.peak_by_class) == (saved, moment, by_class)
    assert fullest.peak == max(rank_counts.peak for rank_counts in others)
    # its products, as the program of the prediction has them
    of_program = predicted_counts(
        replace(of_one, programs=replace(of_one.programs, rank_rows=plan.job.routing.rows, compiled=Compiled())), even, coordinates
    )
    assert sum(of_program.flops.values()) == pytest.approx(sum(fullest.flops.values()), rel=1e-12)
    assert sum(fullest.flops.values()) > 1.05 * min(sum(rank_counts.flops.values()) for rank_counts in others)
    assert plan.job.routing.rows != EVEN


def test_a_plan_file_holds_the_counts(tmp_path):
    counts = uneven()
    prediction = predicted(routing=counts)
    write_plan(prediction.plan, tmp_path / "plan.yaml")
    assert read_plan(tmp_path / "plan.yaml").job.routing.counts == counts
    assert same(perfmodel.predict(tmp_path / "plan.yaml"), prediction)
    assert same(perfmodel.predict(tmp_path / "plan.yaml", routing="balanced"), predicted())
    assert same(perfmodel.predict(tmp_path / "plan.yaml", routing=[row_with(1280)] * RANKS), predicted(routing="skew:1.25"))


WORDS = [word for name, value in PLAN.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def test_the_command_line_reads_the_file_that_audit_reads(tmp_path, capfd):
    counts = uneven()
    path = tmp_path / "a,b.csv"
    path.write_text("\n".join(",".join(map(str, row)) for row in counts.rows))
    assert cli.run(["predict", *WORDS, "--routing", str(path), "--json"]) == 0
    printed = json.loads(capfd.readouterr().out)
    assert printed["step_time"] == predicted(routing=str(path)).step_time == predicted(routing=counts.rows).step_time
    assert printed["plan"]["job"]["routing"] == [list(row) for row in counts.rows]
    assert cli.run(["predict", *WORDS, "--routing", str(path)]) == 0
    assert f", routing counts of 8 ranks, the fullest with {counts.skew:.4g} times the mean, on 64 chips" in " ".join(
        capfd.readouterr().out.split()
    )
    several = perfmodel.predict(**PLAN | {"routing": ["balanced", path, "skew:1.25"]})
    assert [prediction.step_time for prediction in several.predictions] == [
        predicted(routing=routing).step_time for routing in ("balanced", counts.rows, "skew:1.25")
    ]


@pytest.mark.parametrize(
    "more, sentence",
    [
        ({"routing": [[SENT // 4] * 8] * 4}, "routing=4 rows: must have one for each of the ep=8 ranks"),
        ({"routing": [[SENT // 16] * 16] * 8}, r"routing\[0\]=16 counts: must have one for each of the 8 experts"),
        ({"routing": [[-1, *row_with(0)[1:]]] * 8}, "routing=-1: must be a whole number of tokens, 0 or more"),
        ({"routing": [[SENT // 8] * 8] * 8, "micro_batch": 2}, r"routing\[0\]=8192: must add up to 16384, for a rank has 8192 tokens"),
        ({"routing": [[5000, 3192, *[0] * 6]] * 8}, r"routing\[0\]=5000: no expert may get more than the 4096 tokens"),
        ({"routing": [[1]], "model": "llama-3-8b", "ep": 1}, "llama-3-8b has no experts; leave it out"),
        (
            {"routing": [[SENT // 8] * 8] * 8, "tp": 2, "etp": 1, "sequence_parallel": False},
            "each of its ranks must have its own tokens",
        ),
        ({"routing": [[]]}, "routing=.*must be a matrix of counts"),
        ({"routing": [[1, 2], "balanced"]}, "routing=.*must be a matrix of counts"),
        ({"routing": "nowhere.csv"}, "nowhere.csv: cannot be read"),
        ({"routing": [[0] * 8] * 8}, r"routing\[0\]=0: must add up to 8192"),
    ],
)
def test_counts_that_are_not_of_the_plan_are_refused(more, sentence):
    with pytest.raises(InputError, match=sentence) as caught:
        predicted(**more)
    assert "\n" not in str(caught.value)


def test_a_search_refuses_counts_and_names_their_skew():
    job = {name: value for name, value in PLAN.items() if name not in ("ep", "zero", "pp")}
    sentence = "counts are of one ep and one micro-batch, of which a search tries others; .*search with skew:1.25"
    with pytest.raises(InputError, match=sentence):
        perfmodel.find_plans(**job, routing=[row_with(1280)] * RANKS, top=1)


@pytest.mark.parametrize("text", ["1,2\n3", "", "a,b", "{}"])
def test_a_file_that_holds_no_counts_is_one_sentence(text, tmp_path, capfd):
    (tmp_path / "counts.csv").write_text(text)
    assert cli.run(["predict", *WORDS, "--routing", str(tmp_path / "counts.csv")]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("perfmodel: routing")
    assert err.count("\n") == 1


def test_a_table_says_which_routing_is_which(capfd):
    assert cli.run(["predict", *WORDS, "--routing", "balanced,skew:1.5", "--capacity-factor", "none"]) == 0
    out = capfd.readouterr().out
    assert "balanced" in out
    assert "skew:1.5" in out


def test_balanced_says_nothing():
    assert BALANCED.rows == EVEN
