"""Steps and plans of serving against sums by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from perfmodel.cost.resolve import choose_calibration
from perfmodel.cost.serving.boundness import operator_rows
from perfmodel.cost.serving.estimate import ServingEstimator
from perfmodel.cost.serving.memory import cache_shape
from perfmodel.cost.serving.program import serving_program
from perfmodel.cost.serving.simulated import simulate_replicas
from perfmodel.cost.serving.step import PARTS
from perfmodel.foundation.dtypes import Dtype
from perfmodel.foundation.errors import InputError
from perfmodel.frameworks.engine import load_engine
from perfmodel.hardware.reader import load_cluster
from perfmodel.parallel.serving_plan import ServingLayout
from perfmodel.workload.models import load_model
from perfmodel.workload.quantization import quantization_named
from perfmodel.workload.serving import ServingJob, constant


def estimator(model: str, *, cluster: str = "dgx-h100", quantization: str = "bf16", cache: Dtype = Dtype.BF16) -> ServingEstimator:
    hardware = load_cluster(cluster, num_chips=8)
    return ServingEstimator(
        model=load_model(model),
        cluster=hardware,
        calibration=choose_calibration(hardware.chip),
        engine=load_engine("vllm"),
        quantization=quantization_named(quantization),
        cache=cache,
    )


def job_of(of: ServingEstimator, **words: object) -> ServingJob:
    given = {"input_len": constant(1024), "output_len": constant(1024), "concurrency": 16} | words
    return ServingJob(model=of.model, quantization=of.quantization, kv_precision=of.cache, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["llama-3-8b", "mixtral-8x7b", "deepseek-v3", "qwen3-next-80b-a3b", "nemotron-h-8b"])
def test_weights_of_a_step_are_those_of_the_model(name: str) -> None:
    model = load_model(name)
    for is_prompt in (False, True):
        program = serving_program(model, is_prompt=is_prompt)
        counts = {region.name: region.count for region in program.regions}
        held = sum(parameter.num_elements * counts[parameter.regions[0]] for parameter in program.derivation.parameters)
        assert held == model.num_parameters


@pytest.mark.parametrize(
    ("name", "kib"),
    [
        ("llama-3-70b", 320),
        ("llama-3.1-405b", 504),
        ("qwen3-32b", 256),
        ("qwen3-30b-a3b", 96),
        ("deepseek-v3", 68.625),
        ("gpt-oss-120b", 72),
    ],
)
def test_cache_of_a_token(name: str, kib: float) -> None:
    model = load_model(name)
    one = cache_shape(model).tokens_bytes(1, tp=1, kv_heads=model.num_key_value_heads, cache_bytes=2.0)
    assert one == kib * 1024


@pytest.mark.parametrize(
    ("name", "state", "convolved"),
    [
        # layers x heads x a head's state, and layers x inputs of channels
        ("qwen3-next-80b-a3b", 36 * 32 * 128 * 128, 36 * 3 * (2 * 16 * 128 + 32 * 128)),
        ("nemotron-h-8b", 24 * 128 * 64 * 128, 24 * 3 * (8192 + 2 * 8 * 128)),
    ],
)
def test_states_of_a_sequence(name: str, state: int, convolved: int) -> None:
    """In float32, and of the convolution its last inputs in 16 bits; heads of a state are cut by tp."""
    model = load_model(name)
    shape = cache_shape(model)
    assert shape.state == 4 * state + 2 * convolved
    full, half = (shape.tokens_bytes(0, tp=tp, kv_heads=model.num_key_value_heads, cache_bytes=2.0) for tp in (1, 2))
    assert (full, half) == (shape.state, shape.state / 2)


def test_states_are_an_operator_of_a_decode_step() -> None:
    """Products with the state: 4 H P N FLOP a token of Mamba-2; all of it is read and written."""
    costs = estimator("nemotron-h-8b").times([ServingLayout()])
    (row,) = (row for row in operator_rows(costs, phase="decode", sequences=16.0, cached=1024.0) if row.name == "mamba states")
    assert row.flops == 16 * 24 * 4 * 128 * 64 * 128
    assert row.bytes == 2 * 16 * cache_shape(costs.decode_program.model).state
    assert (row.calls, row.bound) == (24, "memory")
    parts = costs.parts(16.0, 1024.0)
    attention = next(row for row in operator_rows(costs, phase="decode", sequences=16.0, cached=1024.0) if row.name.endswith("attention"))
    assert row.time + attention.time == pytest.approx(float(parts["attention"][0]))


def test_a_decode_step_reads_weights_and_cache_once() -> None:
    """Llama 3 8B, 64 sequences of 2,048 tokens: no less than its bytes at the memory's rate, no more than half more."""
    of = estimator("llama-3-8b")
    costs = of.times([ServingLayout()])
    device = costs.decode(64.0, 2048.0)[0] - costs.parts(64.0, 2048.0)["host"][0]
    least = (2.0 * 7.5e9 + 64 * 2048 * 131072) / of.cluster.chip.memory.bandwidth
    assert least < device < 1.5 * least


def test_narrowing_activations_in_kernels_of_its_own_costs_fp8_alone() -> None:
    """Four passes a layer: a part of their floors and their bytes; none in 16 bits."""
    plan = ServingLayout()
    for name, least in (("fp8", 32 * 4 * 2e-6), ("bf16", 0.0)):
        apart = estimator("llama-3-8b", quantization=name)
        fused = replace(apart, engine=apart.engine.having(fuses_casts=True))
        more = apart.times([plan]).decode(16.0, 512.0)[0] - fused.times([plan]).decode(16.0, 512.0)[0]
        assert least <= more <= 5 * least


def test_parts_add_up_and_plans_are_columns() -> None:
    of = estimator("mixtral-8x7b", quantization="fp8")
    plans = [
        ServingLayout(tp=2),
        ServingLayout(tp=4, ep=4),
        ServingLayout(tp=2, attention_dp=2, ep=4),
    ]
    together = of.serve(job_of(of), plans)
    for at, plan in enumerate(plans):
        alone = of.predict(job_of(of), plan)
        assert sum(alone.parts[name] for name in PARTS) == pytest.approx(alone.decode_step, rel=1e-12)
        assert alone.tpot.mean == together.load.tpot[at]
        assert alone.ttft.mean == together.load.ttft[at]
        assert sum(value for name, value in alone.memory.items() if name != "total") == pytest.approx(alone.memory["total"])


@pytest.mark.parametrize("name", ["llama-3-8b", "deepseek-v2-lite", "gemma-3-12b", "gpt-oss-20b", "qwen3-next-80b-a3b"])
def test_no_step_gets_quicker_with_more_to_do(name: str) -> None:
    costs = estimator(name).times([ServingLayout(tp=2)])
    by_batch = costs.decode(np.array([[1.0], [8.0], [64.0], [256.0]]), 2048.0)[:, 0]
    by_cache = costs.decode(32.0, np.array([[128.0], [1024.0], [8192.0]]))[:, 0]
    by_prompt = costs.prefill(np.array([[128.0], [1024.0], [8192.0]]))[:, 0]
    for times in (by_batch, by_cache, by_prompt):
        assert np.all(np.diff(times) >= 0)
    assert costs.mixed(8.0, 1024.0, 512.0)[0] >= costs.decode(8.0, 1024.0)[0]


@pytest.mark.parametrize("name", ["llama-3-8b", "gemma-3-12b", "deepseek-v2-lite", "deepseek-v3", "kimi-k2"])
def test_sequences_that_decode_attend_alike_with_and_without_prompts_in_their_step(name: str) -> None:
    """To latents of the cache, not to the heads that prompts expand them to."""
    of = estimator(name).times([ServingLayout(tp=2)])
    mixed, decode, prefill = (
        of.parts(sequences, 4096.0, prompt_tokens=tokens)["attention"] for sequences, tokens in ((64.0, 512.0), (64.0, 0.0), (0.0, 512.0))
    )
    assert mixed == pytest.approx(decode + prefill, rel=1e-9)


def test_a_plan_that_does_not_fit_is_timed_all_the_same() -> None:
    of = estimator("llama-3-70b")
    prediction = of.predict(job_of(of), ServingLayout())
    assert not prediction.fits
    assert "weights take" in prediction.notes[0]
    assert prediction.tpot.mean > 0
    assert of.predict(job_of(of), ServingLayout(tp=4)).fits


def test_latent_caches_are_whole_on_every_chip_but_for_attention_dp() -> None:
    of = estimator("deepseek-v3", cluster="hgx-h200", quantization="fp8-block")
    by_tp = of.predict(job_of(of), ServingLayout(tp=8, ep=8))
    by_dp = of.predict(job_of(of), ServingLayout(attention_dp=8, ep=8))
    assert by_dp.max_sequences > 4 * by_tp.max_sequences
    assert by_dp.memory["weights"] > by_tp.memory["weights"]


def test_one_prompt_keeps_one_attention_rank_busy() -> None:
    """Experts receive a step's tokens once, not once for each rank; a rank's attention is the same with one prompt or one on each."""
    of = estimator("deepseek-v3", cluster="hgx-h200", quantization="fp8-block")
    costs = of.times([ServingLayout(attention_dp=8, ep=8)])
    one, eight = (costs.parts(0.0, 0.0, prompt_tokens=2048.0, prompts=number) for number in (1.0, 8.0))
    assert one["attention"] == eight["attention"]
    assert eight["experts"][0] > 3 * one["experts"][0]


def test_what_cannot_be_is_refused() -> None:
    of = estimator("mixtral-8x7b")
    for plan, words in ((ServingLayout(tp=3), "tp=3"), (ServingLayout(tp=16, ep=16), "experts")):
        with pytest.raises(InputError, match=words):
            of.predict(job_of(of), plan)
    with pytest.raises(InputError, match="share the 32768 positions"):
        job_of(of, input_len=constant(40_000))
    with pytest.raises(InputError, match="no units"):
        replace(of, quantization=quantization_named("nvfp4"))


def test_ranks_that_come_apart_and_caches_read_by_each_query_head_cost_what_they_say() -> None:
    base = estimator("llama-3-8b")
    job, plan = job_of(base), ServingLayout(tp=2)

    def step(**changed: object) -> dict[str, float]:
        of = replace(base, engine=base.engine.having(rank_skew_time=0.0, **changed))  # type: ignore[arg-type]
        return dict(of.predict(job, plan).parts)

    plain, skewed, unshared = step(), replace(base, engine=base.engine.having(rank_skew_time=1e-5)), step(shares_key_values=False)
    moved = skewed.predict(job, plan).parts["communication"] - plain["communication"]
    assert moved == pytest.approx((2 * 32 + 1) * 1e-5, rel=0.02)  # two all-reduces a layer, one after the embedding
    assert 2 < unshared["attention"] / plain["attention"] < 4.5  # four query heads share a key-value head
    assert step(decode_attention_fraction=0.5)["attention"] == pytest.approx(2 * plain["attention"])


def test_a_library_without_kernels_for_few_rows_multiplies_them_one_after_the_other() -> None:
    """From the row on at which computing at its rate takes longer than reading the weights; prompts have rows enough."""
    base = estimator("llama-3-8b")

    def products(share: float, sequences: int, *, is_prompt: bool = False) -> float:
        costs = replace(base, engine=base.engine.having(few_rows_fraction=share)).times([ServingLayout()])
        parts = costs.parts(float(sequences), 1024.0, prompt_tokens=2048.0 if is_prompt else 0.0)
        return float(parts["products"][0])

    assert products(0.05, 1) == pytest.approx(products(1.0, 1), rel=0.1)
    assert products(0.05, 128) == pytest.approx(2 * products(0.05, 64), rel=0.1)
    assert products(0.05, 128) > 3 * products(1.0, 128)
    assert products(0.05, 1, is_prompt=True) == products(1.0, 1, is_prompt=True)


def test_choosing_what_to_attend_to_takes_the_engines_time_of_each_layer() -> None:
    base = estimator("deepseek-v3.2", cluster="hgx-h200", quantization="fp8-block")

    def attention(seconds: float) -> float:
        of = replace(base, engine=base.engine.having(sparse_attention_time=seconds))
        return float(of.times([ServingLayout(tp=8)]).parts(4.0, 4096.0)["attention"][0])

    assert attention(1e-4) - attention(0.0) == pytest.approx(base.model.num_hidden_layers * 1e-4)


def test_tokens_of_a_prompt_longer_than_what_is_chosen_read_latents_of_their_own() -> None:
    """Twice the number of tokens reads twice the latents; shorter prompts share what they read."""
    of = estimator("deepseek-v3.2", cluster="hgx-h200", quantization="fp8-block")
    costs = of.times([ServingLayout(tp=8)])
    top = of.model.parts.latent.index_top if of.model.parts.latent is not None else 0
    short, long, longer = (float(costs.parts(0.0, 0.0, prompt_tokens=float(tokens))["attention"][0]) for tokens in (top, 8192, 16384))
    assert 1.9 < longer / long < 2.6
    assert long > 6 * short


def test_a_sampler_of_many_sequences_takes_memory_from_the_cache() -> None:
    """1,024 sequences over a vocabulary of 128,256 at 38 bytes are 4.99 GB, more than a pass of 8,192 tokens; 8 are nothing."""
    of = estimator("llama-3-8b")
    of.engine = of.engine.having(sampler_bytes=38.0)
    many, few = (of.predict(job_of(of), ServingLayout(max_batch=batch)).memory["activations"] for batch in (1024, 8))
    assert many == 1024 * 128256 * 38
    assert few < 2e9


@pytest.mark.parametrize(("prompt", "answer"), [(1024, 1024), (4096, 512), (1024, 8192), (8192, 1024)])
def test_as_many_run_at_once_as_a_simulated_engine_runs(prompt: int, answer: int) -> None:
    """On average over time, with four times the clients that fit. An engine that reserves answers runs what its cache holds in full."""
    of = estimator("llama-3.3-70b", quantization="fp8")
    plan = ServingLayout(tp=2)
    held = of.predict(job_of(of, input_len=constant(prompt), output_len=constant(answer)), plan).max_sequences
    job = job_of(of, input_len=constant(prompt), output_len=constant(answer), concurrency=int(4 * held))
    for reserves in (True, False):
        of.engine = of.engine.having(reserves_answers=reserves)
        prediction = of.predict(job, plan)
        seen = simulate_replicas(of, prediction, plan)
        assert prediction.load.running == pytest.approx(seen.running, rel=0.08)
        assert (prediction.load.running == pytest.approx(held)) is reserves
