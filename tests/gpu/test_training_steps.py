"""Training steps on a real GPU: right gradients, sane memory, and the effects that recomputation must have."""

import pytest

from lab.gpu_checks import GpuCase, run_cases
from perfmodel.execute.launch.launch import WorkerGroup
from perfmodel.execute.run import run_plan
from perfmodel.workload.job import Precision
from tests.execute.jobs import VARIANTS, tiny, tiny_plan

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def gpu():
    with WorkerGroup(1, device="cuda", hang_timeout=60.0) as group:
        yield group


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_on_the_gpu(variant, gpu):
    measured = run_plan(tiny_plan(1, model=tiny(variant), micro_batch=2), steps=2, warmup=1, group=gpu)
    assert measured.device == "cuda"
    assert measured.gradient_error < 1e-4


def test_memory_covers_the_states_and_recomputation_saves():
    gpt2 = dict(model="gpt2", seq_len=1024, micro_batch=8)
    plain, full = run_cases((GpuCase(**gpt2), GpuCase(**gpt2, recompute="full")), steps=5, time_limit=240.0)
    states = 18 * 124_439_808  # bf16 weights, fp32 gradients, master weights and two moments
    assert states < full["measurement"]["peak_memory"] < plain["measurement"]["peak_memory"]
    assert full["measurement"]["step_time"] > plain["measurement"]["step_time"]


def test_bf16_is_faster_than_fp32():
    slow, fast = run_cases(
        (GpuCase(model="gpt2", seq_len=1024, micro_batch=4, precision=Precision.FP32), GpuCase(model="gpt2", seq_len=1024, micro_batch=4)),
        steps=5,
        time_limit=240.0,
    )
    assert fast["measurement"]["step_time"] < slow["measurement"]["step_time"]
