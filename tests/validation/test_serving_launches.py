"""Settings in scripts of benchmarks that tables do not have."""

import pytest

from perfmodel.foundation.dtypes import Dtype
from perfmodel.validation.serving_cases import plan_of_serving
from tests.validation.serving_cases import LLAMA, changed

BIG = {**LLAMA, "name": "Llama-3-70B", "layers": 80, "hidden": 8192, "heads": 64, "ffn": 28672}


@pytest.mark.parametrize(
    ("framework", "chip", "max_batch", "max_tokens", "cache"),
    [
        ("vllm 0.10.2", "h100-sxm-80gb", 64, 0, Dtype.BF16),  # its file of arguments is not read
        ("vllm 0.10.2", "h200-sxm-141gb", 64, 0, Dtype.FP8),
        ("vllm 0.11.2", "h100-sxm-80gb", 64, 0, Dtype.FP8),
        ("trtllm 1.1.0rc2.post2", "h200-sxm-141gb", 0, 16384, Dtype.FP8),
    ],
)
def test_a_run_starts_as_its_scripts_say(framework, chip, max_batch, max_tokens, cache):
    planned = plan_of_serving(changed(model=BIG, framework=framework, chip_id=chip, kv_precision="fp8", batch=64))
    assert (planned.layout.max_batch, planned.layout.max_tokens, planned.job.kv_precision) == (max_batch, max_tokens, cache)


def test_other_benchmarks_start_as_engines_do():
    for values in ({"input_len_mean": None}, {"model": LLAMA}, {"framework": "sglang 0.5.8"}):
        planned = plan_of_serving(changed(**{"model": BIG, "kv_precision": "fp8", **values}))
        assert (planned.layout.max_batch, planned.layout.max_tokens, planned.job.kv_precision) == (0, 0, Dtype.FP8)
