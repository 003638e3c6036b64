"""Memory that engines hold back."""

import numpy as np
import pytest

import perfmodel
from perfmodel.cost.serving.memory import engine_reserve, expert_workspace
from perfmodel.frameworks.engine import load_engine
from perfmodel.workload.models import load_model

GIB = 2**30


@pytest.mark.parametrize(
    ("capacity", "chips", "dp", "chunk", "fraction"),
    [(80 * GIB, 1, 1, 8192, 0.836), (80 * GIB, 8, 1, 8192, 0.825), (80 * GIB, 8, 8, 8192, 0.750), (80 * GIB, 1, 1, 2048, 0.875)],
)
def test_sglang_leaves_what_its_own_rule_leaves(capacity, chips, dp, chunk, fraction):
    """mem_fraction_static of server_args.py by hand, of 80 GiB with 256 captured sequences: 80 * 1024 MiB less 512 + 1.5 chunk + 128 chips
    + 2 * 256 + 3 * 256 dp, and less no less than 10,240."""
    reserve = engine_reserve(load_engine("sglang"), chips=np.float64(chips), attention_dp=np.float64(dp), max_tokens=np.float64(chunk))
    assert 1 - float(reserve) / capacity == pytest.approx(fraction, abs=5e-4)
    assert float(reserve) >= 10 * GIB


def test_other_engines_hold_back_what_their_files_say():
    for name, held in (("vllm", 0.0), ("tensorrt-llm", 0.0), ("deepspeed-mii", 1e9)):
        assert float(engine_reserve(load_engine(name), chips=8.0, attention_dp=8.0, max_tokens=8192.0)) == held


def test_buffers_of_experts_hold_what_goes_in_and_comes_out():
    """Qwen3-30B-A3B: 8 experts of width 768, hidden size 2,048; tp 2 halves the experts. 8,192 tokens in 16 bits by hand."""
    model, rows = load_model("qwen3-30b-a3b"), 8192 * 8
    assert float(expert_workspace(model, 8192.0, expert_tp=1.0)) == 2 * rows * (2048 + 2048)
    assert float(expert_workspace(model, 8192.0, expert_tp=0.25)) == 2 * rows * (3072 + 6144)
    assert expert_workspace(load_model("llama-3-8b"), 8192.0, expert_tp=1.0) == 0.0


@pytest.mark.parametrize("engine", ["tensorrt-llm", "vllm", "sglang"])
@pytest.mark.parametrize("model", ["llama-3-8b", "llama-3-70b"])
def test_what_fits_is_no_more_than_what_is_usable(engine, model):
    prediction = perfmodel.serve(model=model, cluster="dgx-h100", chips=1, input_len=1024, output_len=256, engine=engine, tp=1)
    assert prediction.fits == (model == "llama-3-8b")
    assert (prediction.memory["total"] <= prediction.memory_usable * (1 + 1e-12)) == prediction.fits
    assert prediction.memory_usable <= 85.0e9
