"""Serving steps on a real GPU: right logits, and what a decode step must take of the memory that it reads."""

import statistics

import pytest

from lab.gpu_checks import ServingCase, run_serving_cases
from perfmodel.execute.launch.launch import WorkerGroup
from perfmodel.execute.serving.run import LOGIT_TOLERANCE, run_serving
from perfmodel.parallel.results import StepShape
from tests.execute.jobs import tiny

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def gpu():
    with WorkerGroup(1, device="cuda", hang_timeout=60.0) as group:
        yield group


@pytest.mark.parametrize("variant", ["llama", "gpt2", "gemma2", "bloom", "mixtral", "deepseek"])
def test_logits_on_the_gpu(variant, gpu):
    measured = run_serving(tiny(variant), [StepShape(sequences=4, cached=40, new=1)], group=gpu, rounds=1, repeats=1)
    assert measured.device == "cuda"
    assert measured.logit_error < LOGIT_TOLERANCE


def test_a_decode_step_reads_its_weights_and_its_cache():
    """No faster than 10 TB/s, and where there is much to read no slower than a tenth of an old chip's 1.5 TB/s."""
    shapes = tuple(StepShape(sequences=number, cached=2047, new=1) for number in (1, 64))
    (record,) = run_serving_cases((ServingCase(model="llama-3-8b", layers=8, shapes=shapes),), rounds=2, time_limit=300.0)
    one, many = record["measurement"]["steps"]
    for step in (one, many):
        read = step["parameter_bytes"] + step["cache_bytes"]
        assert 1.5e11 < read / statistics.median(step["times"]) < 1e13
    assert many["parameter_bytes"] == pytest.approx(one["parameter_bytes"], rel=1e-3)
    assert many["cache_bytes"] == 64 * one["cache_bytes"]
