"""Decode context parallelism: what is kept, what is read, what is sent, and what cannot be."""

from dataclasses import replace

import numpy as np
import pytest

from perfmodel.cost.serving.attention import DCP, PCP, cache_cuts, decode_exchange, pass_time
from perfmodel.cost.serving.boundness import operator_rows
from perfmodel.cost.serving.engine_step import engine_collective_time
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.errors import InputError
from perfmodel.frameworks.engine import load_engine
from perfmodel.frameworks.engine_launch import launch_lines
from perfmodel.frameworks.engine_layouts import cache_copies, why_no_context
from perfmodel.parallel.serving_plan import ServingLayout
from perfmodel.planner.result import ServingLimits
from perfmodel.planner.serving.space import ServingSpace
from perfmodel.workload.models import load_model
from perfmodel.workload.serving import ServingJob, constant
from tests.cost.serving.test_estimate import estimator
from tests.planner.serving.serving_searches import searched, serving_job

#: Model, tp, dcp: eight copies of a latent, four of two; two and four of key-value heads.
SHARED = pytest.mark.parametrize(
    ("model", "tp", "dcp"), [("deepseek-v3", 8, 8), ("deepseek-v3", 8, 2), ("llama-3-70b", 16, 2), ("llama-3-70b", 32, 4)]
)


def plans(tp, *degrees):
    return [ServingLayout(tp=tp, dcp=dcp) for dcp in degrees]


def attended(queries, keys, values):
    """Softmax attention of [heads, d] to [tokens, d], with its log-sum-exp."""
    scores = queries @ keys.T / np.sqrt(queries.shape[1])
    top = scores.max(axis=1, keepdims=True)
    weights = np.exp(scores - top)
    return weights @ values / weights.sum(axis=1, keepdims=True), (top + np.log(weights.sum(axis=1, keepdims=True)))[:, 0]


def shared(queries, keys, values, ranks):
    """Token i on rank i mod ranks: what each attends to, their log-sum-exps, and their outputs weighted by these."""
    parts = [attended(queries, keys[rank::ranks], values[rank::ranks]) for rank in range(ranks)]
    sums = np.stack([rank_sums for _, rank_sums in parts])
    total = np.log(np.exp(sums).sum(axis=0))
    return parts, sums, [out * np.exp(rank_sums - total)[:, None] for out, rank_sums in parts]


def test_ranks_that_share_the_tokens_send_what_is_counted_and_attend_to_all_of_them():
    """Four ranks of two heads each, token i on rank i mod 4: every buffer of theirs has the bytes that `decode_exchange` says."""
    random = np.random.default_rng(0)
    ranks, heads, key_dim, value_dim, tokens = 4, 2, 8, 6, 13
    queries = random.normal(size=(ranks * heads, key_dim))
    keys, values = random.normal(size=(tokens, key_dim)), random.normal(size=(tokens, value_dim))
    parts, sums, outputs = shared(queries, keys, values, ranks)
    np.testing.assert_allclose(sum(outputs), attended(queries, keys, values)[0], rtol=1e-12)
    assert not np.allclose(np.mean([out for out, _ in parts], axis=0), attended(queries, keys, values)[0], rtol=1e-2)  # unweighted

    sent = list(
        decode_exchange(rows=np.ones(1), heads=np.array([float(heads)]), key_dim=key_dim, value_dim=value_dim, dcp=np.array([float(ranks)]))
    )
    among_tp = [(kind, float(num_bytes[0])) for kind, axes, num_bytes in sent if DCP in axes]
    assert among_tp == [
        (CollectiveKind.ALL_GATHER, 2.0 * queries.size),
        (CollectiveKind.ALL_GATHER, 4.0 * sums.size),
        (CollectiveKind.REDUCE_SCATTER, 2.0 * outputs[0].size),
    ]
    assert [kind for kind, axes, _ in sent if DCP not in axes] == [CollectiveKind.ALL_REDUCE]  # of ranks of pcp: none here


def test_ranks_that_share_prompts_and_a_cache_add_up_the_heads_that_all_of_them_have():
    """Four ranks of the same two heads: nothing is gathered but log-sum-exps, and outputs of those heads are added up."""
    random = np.random.default_rng(1)
    ranks, heads, key_dim, value_dim, tokens = 4, 2, 8, 6, 13
    queries = random.normal(size=(heads, key_dim))
    keys, values = random.normal(size=(tokens, key_dim)), random.normal(size=(tokens, value_dim))
    _, sums, outputs = shared(queries, keys, values, ranks)
    np.testing.assert_allclose(sum(outputs), attended(queries, keys, values)[0], rtol=1e-12)
    words = {"rows": np.ones(1), "heads": np.array([float(heads)]), "key_dim": key_dim, "value_dim": value_dim}
    sent = decode_exchange(**words, dcp=np.ones(1), cut=np.array([float(ranks)]))
    among = [(kind, float(num_bytes[0])) for kind, axes, num_bytes in sent if PCP in axes]
    assert among == [(CollectiveKind.ALL_GATHER, 4.0 * sums.size), (CollectiveKind.ALL_REDUCE, 2.0 * outputs[0].size)]


@pytest.mark.parametrize(
    ("tp", "dcp", "pcp", "cuts"),
    [(8, 1, 4, (1, 1)), (8, 4, 4, (1, 4)), (8, 32, 4, (8, 4)), (8, 8, 1, (8, 1)), (2, 4, 2, (2, 2))],
)
def test_ranks_that_share_prompts_share_a_cache_first(tp, dcp, pcp, cuts):
    latent, grouped = load_model("deepseek-v3"), load_model("llama-3-70b")
    assert tuple(int(degree) for degree in cache_cuts(latent, tp=tp, dcp=dcp, pcp=pcp)) == cuts
    assert tuple(int(degree) for degree in cache_cuts(grouped, tp=tp, dcp=dcp, pcp=pcp)) == (1, cuts[1])  # eight key-value heads: no copies


@SHARED
def test_a_chip_keeps_its_share_of_the_tokens(model, tp, dcp):
    of = estimator(model)
    alone, shared = (of.memory([plan], 8192.0) for plan in plans(tp, 1, dcp))
    assert shared.sequence_bytes[0] == pytest.approx(alone.sequence_bytes[0] / dcp, rel=1e-12)
    assert shared.sequences[0] == pytest.approx(dcp * alone.sequences[0], rel=1e-12)
    assert cache_copies(of.model, tp) % dcp == 0
    np.testing.assert_array_equal(shared.weights, alone.weights)


def test_blocks_are_whole_on_every_chip():
    of = estimator("deepseek-v3")
    one, other = (float(of.memory(plans(8, 8), tokens).sequence_bytes[0]) for tokens in (1.0, 128.0))
    assert one == other  # a block of 16 on each of eight chips


@SHARED
def test_a_step_computes_as_much_and_reads_less(model, tp, dcp):
    of = estimator(model)
    rows = []
    for plan in plans(tp, 1, dcp):
        operators = operator_rows(of.times([plan]), phase="decode", sequences=64.0, cached=16384.0)
        rows.append(next(row for row in operators if "heads" in row.shape))
    assert rows[1].flops == pytest.approx(rows[0].flops, rel=1e-9)
    assert rows[1].bytes < 1.35 * rows[0].bytes / dcp
    assert rows[1].time < rows[0].time


@SHARED
def test_what_is_sent_is_added_to_what_is_sent_anyway(model, tp, dcp):
    of = estimator(model)
    before, after = (of.times([plan]).parts(64.0, 16384.0) for plan in plans(tp, 1, dcp))
    costs, layers = of.times(plans(tp, dcp)), of.model.num_hidden_layers
    latent = of.model.parts.latent
    key, value = (of.model.head_dim,) * 2 if latent is None else (latent.key_value_rank + latent.rope_head_dim, latent.key_value_rank)
    group = np.array([float(dcp)]), [np.array([float(min(dcp, size))]) for size in (8, dcp)][: len(costs.grid.inside)]
    heads = np.array([of.model.num_attention_heads / tp])
    by_hand = sum(
        float(engine_collective_time(_code(kind), num_bytes, group, costs.machine, costs.engine.kernels)[0])
        for kind, axes, num_bytes in decode_exchange(
            rows=np.array([64.0]), heads=heads, key_dim=key, value_dim=value, dcp=np.array([float(dcp)])
        )
        if DCP in axes
    )
    by_hand += float(pass_time(np.array([4.0 * 64 * heads[0] * dcp * value]), costs.machine)[0])
    assert float(after["communication"][0] - before["communication"][0]) == pytest.approx(layers * by_hand, rel=1e-9)
    for part in ("products", "experts", "logits", "passes"):
        assert after[part] == before[part]


def _code(kind):
    from perfmodel.hardware.calibration import COLLECTIVE_CODE

    return COLLECTIVE_CODE[kind]


def test_prompts_send_only_for_what_lies_in_the_cache():
    for model, tp, dcp in (("deepseek-v3", 8, 8), ("llama-3-70b", 16, 2)):
        of = estimator(model)
        alone, shared = (of.times([plan]) for plan in plans(tp, 1, dcp))
        for cached, sends in ((0.0, False), (4096.0, True)):
            before, after = (costs.parts(0.0, 0.0, prompt_tokens=1024.0, prompt_cached=cached) for costs in (alone, shared))
            assert (float(after["communication"][0]) > float(before["communication"][0])) == sends
            assert after["attention"] == before["attention"]


def test_columns_of_several_degrees_are_the_plans_alone():
    of = estimator("deepseek-v3")
    job = ServingJob(model=of.model, input_len=constant(8192), output_len=constant(512), concurrency=48)
    together = of.serve(job, plans(8, 1, 2, 8))
    for at, plan in enumerate(plans(8, 1, 2, 8)):
        alone = of.predict(job, plan)
        assert float(together.load.tpot[at]) == alone.tpot.mean
        assert float(together.load.ttft[at]) == alone.ttft.mean
    held = [float(sequences) for sequences in together.memory.sequences]
    assert held == sorted(held)


@pytest.mark.parametrize(
    ("model", "engine", "tp", "dcp", "reason"),
    [
        ("deepseek-v3", "sglang", 8, 8, "sglang .* has no decode context parallelism"),
        ("llama-3-70b", "vllm", 8, 2, "tp 8 keeps 1 copy of the cache of llama-3-70b"),
        ("llama-3-70b", "vllm", 16, 4, "keeps 2 copies .* use 1, 2, or more tp"),
        ("gpt-oss-120b", "vllm", 16, 2, "a window of their tokens"),
        ("qwen3-next-80b-a3b", "vllm", 4, 2, "recurrent layers"),
        ("deepseek-v3.2", "vllm", 8, 8, "tokens that it chooses"),
    ],
)
def test_what_cannot_be_is_refused_by_name(model, engine, tp, dcp, reason):
    of = replace_engine(estimator(model), engine)
    job = ServingJob(model=of.model, input_len=constant(512), output_len=constant(64), concurrency=4)
    with pytest.raises(InputError, match=rf"dcp={dcp}: .*{reason}"):
        of.predict(job, ServingLayout(tp=tp, dcp=dcp))


@pytest.mark.parametrize(
    ("model", "engine", "sizes", "reason"),
    [
        ("deepseek-v3", "sglang", {}, "sglang .* has no prefill context parallelism; use pcp=1 or engine vllm"),
        ("llama-3-70b", "vllm", {}, "shares prompts of models with latent attention only, which llama-3-70b has not"),
        ("deepseek-v3", "vllm", {"pp": 2}, "does not share prompts together with pp"),
        ("deepseek-v3", "vllm", {"attention_dp": 2}, "does not share prompts together with attention_dp"),
    ],
)
def test_prompts_that_cannot_be_shared_are_refused_by_name(model, engine, sizes, reason):
    of = replace_engine(estimator(model), engine)
    job = ServingJob(model=of.model, input_len=constant(512), output_len=constant(64), concurrency=4)
    with pytest.raises(InputError, match=rf"pcp=2: .*{reason}"):
        of.predict(job, ServingLayout(tp=2, pcp=2, **sizes))


def test_states_are_not_shared():
    of = estimator("qwen3-next-80b-a3b")
    of.engine = of.engine.having(prefill_context="any")
    job = ServingJob(model=of.model, input_len=constant(512), output_len=constant(64), concurrency=4)
    with pytest.raises(InputError, match="recurrent layers, whose tokens follow one another"):
        of.predict(job, ServingLayout(pcp=2))


def replace_engine(of, name):
    of.engine = load_engine(name)
    return of


def test_a_degree_that_does_not_divide_tp_is_no_plan():
    with pytest.raises(InputError, match="dcp=3: must divide tp=8"):
        ServingLayout(tp=8, dcp=3)
    assert ServingLayout(tp=8, dcp=4).label() == "tp 8, dcp 4"
    with pytest.raises(InputError, match=r"dcp=2: must be 1, pcp or tp \* pcp with pcp=4: .* use 1, 4, 32"):
        ServingLayout(tp=8, dcp=2, pcp=4)
    with pytest.raises(InputError, match=r"ep=3: must divide tp \* pcp \* attention_dp = 32"):
        ServingLayout(tp=8, ep=3, pcp=4)
    assert ServingLayout(tp=8, dcp=32, pcp=4, ep=32).label() == "tp 8, pcp 4, ep 32, dcp 32"
    assert not why_no_context(load_model("deepseek-v3"))


def test_a_search_holds_it_and_the_command_says_it():
    job = serving_job("llama-3-70b", "fp8", concurrency=8)
    search = searched(job, chips=16, space=ServingSpace(fixed={"dcp": 2}), limits=ServingLimits())
    assert {plan.plan.layout.dcp for plan in search.plans} == {2}
    assert {plan.plan.layout.tp for plan in search.plans} == {16}
    assert search.left_out["dcp does not divide the copies of the cache"] > 0
    (line,) = launch_lines(search.best.plan, load_engine("vllm"))
    assert "--decode-context-parallel-size 2" in line.command
    shared = replace(search.best.plan, layout=replace(search.best.plan.layout, pcp=2, dcp=1))
    (line,) = launch_lines(shared, load_engine("vllm"))
    assert "--prefill-context-parallel-size 2" in line.command
    assert any("needs vllm 0.26 or later" in note for note in line.notes)
    plain = replace(search.best.plan, layout=replace(search.best.plan.layout, dcp=1))
    assert "decode-context" not in launch_lines(plain, load_engine("vllm"))[0].command
