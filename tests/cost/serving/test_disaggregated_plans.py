"""Plans whose prompts and answers lie on workers of their own, as an estimator predicts them."""

from dataclasses import replace

import numpy as np
import pytest

from perfmodel.cost.serving.disaggregated import handover, predict_layout, serve_pools
from perfmodel.foundation.errors import InputError
from perfmodel.parallel.serving_plan import Pools, ServingLayout
from perfmodel.workload.serving import ServingJob, constant
from tests.cost.serving.test_estimate import estimator

WORKER = ServingLayout(tp=4)
PLAN = Pools(prefill=WORKER, decode=WORKER, prefill_workers=1, decode_workers=1)


@pytest.fixture(scope="module")
def of():
    return estimator("llama-3-70b")


def job(of, concurrency=32, prompt=4096, output=256):
    return ServingJob(model=of.model, input_len=constant(prompt), output_len=constant(output), concurrency=concurrency)


def test_what_is_handed_over_is_one_copy_of_the_cache(of):
    sent = handover(of, [PLAN], 8192.0)
    assert 8192 * sent.token_bytes == pytest.approx(2.68e9, rel=0.01)
    assert sent.bandwidth == pytest.approx(4 * 0.8 * of.cluster.tiers[0].link.bandwidth)


def test_no_prompt_stalls_an_answer_but_chips_are_shared(of):
    apart = predict_layout(of, job(of), PLAN)
    together = predict_layout(of, job(of), replace(WORKER, replicas=2))
    assert apart.plan.num_chips == together.plan.num_chips == 8
    assert apart.tpot.mean < together.tpot.mean
    assert apart.tpot.mean == pytest.approx(apart.decode_step, rel=0.05)
    assert apart.requests_per_second * apart.request_latency.mean == pytest.approx(32, rel=1e-3)
    assert apart.requests_per_second * 256 / 8 == pytest.approx(apart.tokens_per_second_per_chip)
    assert any("prefill workers do" in note for note in apart.notes)


def test_a_worker_of_prompts_too_small_for_the_weights_does_not_fit(of):
    small = replace(PLAN, prefill=replace(WORKER, tp=1))
    prediction = predict_layout(of, job(of), small)
    assert not prediction.fits
    assert "prefill worker" in prediction.notes[-1]


def test_columns_of_pools_are_the_pools_by_themselves(of):
    several = [
        replace(PLAN, prefill_workers=x, decode_workers=y, decode=replace(WORKER, tp=t)) for x, y, t in ((1, 1, 4), (3, 2, 8), (2, 5, 2))
    ]
    rows = serve_pools(of, job(of), several)[0]
    for row, one in enumerate(several):
        alone = serve_pools(of, job(of), [one])[0]
        np.testing.assert_allclose(alone.load.tpot[0], rows.load.tpot[row], rtol=1e-6)
        np.testing.assert_allclose(alone.load.tokens_per_second[0], rows.load.tokens_per_second[row], rtol=1e-6)


def test_workers_are_checked_as_plans_are(of):
    with pytest.raises(InputError, match="heads"):
        predict_layout(of, job(of), replace(PLAN, decode=replace(WORKER, tp=7)))
