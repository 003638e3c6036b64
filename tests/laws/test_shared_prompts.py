"""Ranks that share the tokens of a prompt do its work between them, and no other."""

import numpy as np
import pytest

from perfmodel.cost.serving.attention import CONTEXT_AXIS
from perfmodel.cost.serving.boundness import operator_rows
from perfmodel.cost.serving.program import serving_program
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.frameworks.engine import load_engine
from perfmodel.parallel.algebra.derive import Pass
from perfmodel.parallel.serving_plan import ServingLayout
from perfmodel.workload.models import load_model
from perfmodel.workload.serving import ServingJob, constant
from tests.cost.serving.test_estimate import estimator

#: Any model, combined with any other degree.
EVERYWHERE = load_engine("vllm").having(prefill_context="any", prefill_context_beside=("pp", "attention_dp"))
MODELS = pytest.mark.parametrize("model", ["deepseek-v3", "deepseek-v3.2", "llama-3.1-70b", "gpt-oss-120b", "mixtral-8x7b"])


def estimator_of(model):
    of = estimator(model, cluster="hgx-h200", quantization="fp8")
    of.engine = EVERYWHERE
    return of


def plans(*degrees, **sizes):
    return [ServingLayout(pcp=pcp, **sizes) for pcp in degrees]


@MODELS
def test_one_rank_is_the_plan_without(model):
    of, none = estimator_of(model), estimator_of(model)
    none.engine = EVERYWHERE.having(prefill_context="none")
    together, alone = of.times(plans(1, 2, 4, tp=2)), none.times(plans(1, tp=2))
    for parts in ((16.0, 9000.0), (0.0, 0.0, 5000.0, 3000.0), (16.0, 9000.0, 5000.0, 3000.0)):
        words = dict(zip(("prompt_tokens", "prompt_cached"), parts[2:], strict=False))
        one, other = (costs.parts(*parts[:2], **words) for costs in (together, alone))
        assert {name: float(time[0]) for name, time in one.items()} == {name: float(time[0]) for name, time in other.items()}


@MODELS
@pytest.mark.parametrize("cached", [0.0, 4096.0])
def test_attention_of_all_ranks_is_that_of_the_prompt(model, cached):
    of = estimator_of(model)
    unshared, *shared = (
        [row for row in operator_rows(of.times([plan]), phase="prefill", tokens=8192.0, cached=cached) if "heads" in row.shape]
        for plan in plans(1, 2, 4, 8)
    )
    for pcp, rows in zip((2, 4, 8), shared, strict=True):
        for one, every in zip(rows, unshared, strict=True):
            assert one.flops * pcp == pytest.approx(every.flops, rel=1e-12)
            assert every.time / pcp <= one.time <= 1.3 * every.time / pcp  # keys and values are read whole


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("before", [0, 48])
def test_a_piece_of_either_end_sees_as_many_keys_on_every_rank(ranks, before):
    tokens = 128
    pieces = np.arange(before + 1, before + tokens + 1).reshape(2 * ranks, -1).sum(axis=1)  # keys that the queries of a piece see
    keys_of_ranks = [int(pieces[rank] + pieces[-1 - rank]) for rank in range(ranks)]
    of = estimator_of("llama-3.1-70b")
    costs = of.times(plans(ranks))
    row = next(row for row in operator_rows(costs, phase="prefill", tokens=float(tokens), cached=float(before)) if "heads" in row.shape)
    model = of.model
    assert set(keys_of_ranks) == {keys_of_ranks[0]}
    counted = row.flops / model.num_hidden_layers / (2.0 * model.num_attention_heads * 2.0 * model.head_dim)
    assert counted == pytest.approx(keys_of_ranks[0], rel=1e-12)


@pytest.mark.parametrize(
    ("model", "entries"), [("deepseek-v3", 512 + 64), ("deepseek-v3.2", 512 + 64 + 128), ("llama-3.1-70b", 2 * 8 * 128)]
)
def test_what_is_gathered_is_what_the_cache_keeps(model, entries):
    """Latents, an indexer's keys, keys and values: two bytes an entry, of each layer."""
    program = serving_program(load_model(model), is_prompt=True)
    collectives = [
        traffic
        for traffic in program.derivation.traffic
        if traffic.phase is Pass.FORWARD and CONTEXT_AXIS in traffic.axes and traffic.region == program.regions[-2].name
    ]
    of_cache = [
        collective for collective in collectives if "mlp_norm" not in collective.tensor and collective.kind is CollectiveKind.ALL_GATHER
    ]
    bytes_of_tokens = 2048 * 2.0
    gathered = sum(collective.amount.base for collective in of_cache if "route" not in collective.tensor)
    assert gathered == entries * bytes_of_tokens


@pytest.mark.parametrize(("model", "sizes"), [("deepseek-v3", {}), ("llama-3.1-70b", {"tp": 1})])
def test_long_prompts_are_quicker_the_more_share_them_and_answers_are_not(model, sizes):
    """128k tokens; answers may be quicker by experts that lie over more chips, and by no more than their share of a cache."""
    of = estimator_of(model)
    job = ServingJob(model=of.model, input_len=constant(131072 - 64), output_len=constant(64), concurrency=1)
    ttft = [of.predict(job, plan).ttft.mean for plan in plans(1, 2, 4, 8, **sizes)]
    assert ttft == sorted(ttft, reverse=True)
    for pcp, time in zip((1, 2, 4, 8), ttft, strict=True):
        assert ttft[0] / pcp <= time <= 1.6 * ttft[0] / pcp
    for pcp in (2, 4, 8):
        alone, kept, cut = (
            of.times([ServingLayout(pcp=degree, dcp=dcp, **sizes)]).parts(8.0, 65536.0) for degree, dcp in ((1, 1), (pcp, 1), (pcp, pcp))
        )
        assert kept["attention"] == alone["attention"]
        assert alone["attention"] / pcp <= cut["attention"] < alone["attention"]
        for name in ("products", "passes", "host"):
            assert kept[name] == cut[name] == alone[name]
        assert cut["communication"] > kept["communication"] >= alone["communication"]
        if of.model.parts.experts is None:
            assert sum(kept.values()) >= sum(alone.values())


@MODELS
def test_weights_lie_on_every_rank_but_for_experts_and_a_cache_is_kept_or_cut(model):
    of = estimator_of(model)
    one, two, eight = (of.memory([plan], 8192.0) for plan in plans(1, 2, 8))
    if of.model.parts.experts is None:
        assert one.weights[0] == eight.weights[0]
    else:
        assert float(one.weights[0] - two.weights[0]) == pytest.approx(float(two.weights[0] - eight.weights[0]) / 0.75, rel=1e-9)
    assert one.sequence_bytes[0] == eight.sequence_bytes[0]
    if model in ("deepseek-v3", "llama-3.1-70b"):
        cut = of.memory([ServingLayout(pcp=8, dcp=8)], 8192.0)
        assert cut.sequence_bytes[0] == pytest.approx(one.sequence_bytes[0] / 8, rel=1e-12)
    assert [plan.chips_per_replica for plan in plans(1, 2, 8, tp=4)] == [4, 8, 32]
