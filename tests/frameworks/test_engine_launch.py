"""The commands that start a plan: every degree and limit is in them once, as the engine counts it."""

import shlex

import pytest

from perfmodel.foundation.dtypes import Dtype
from perfmodel.foundation.errors import InputError
from perfmodel.frameworks.engine import list_engines, load_engine
from perfmodel.frameworks.engine_launch import launch_lines
from perfmodel.parallel.serving_plan import Pools, ServingLayout, ServingPlan
from perfmodel.workload.models import load_model
from perfmodel.workload.serving import Speculation
from tests.planner.serving.serving_searches import serving_job

WIDE = {"tp": 2, "attention_dp": 4, "ep": 8, "max_batch": 16, "max_tokens": 4096}


def _plan(job, engine, layout):
    return ServingPlan(job=job, cluster="dgx-h100", engine=engine, layout=layout)


def words_of(engine, job=None, **sizes):
    (line,) = launch_lines(_plan(job or serving_job("deepseek-v3", "fp8-block"), engine, ServingLayout(**sizes)), load_engine(engine))
    words = shlex.split(line.command)
    return line, dict(zip(words, [*words[1:], ""], strict=True))


def test_vllm_counts_by_data_parallel_rank():
    line, words = words_of("vllm", **WIDE)
    assert line.command.startswith("vllm serve MODEL ")
    assert (words["--tensor-parallel-size"], words["--data-parallel-size"], words["--max-num-seqs"]) == ("2", "4", "16")
    assert words["--max-num-batched-tokens"] == "4096"
    assert "--enable-expert-parallel" in words
    assert line.version == load_engine("vllm").version


def test_sglang_counts_all_ranks():
    line, words = words_of("sglang", **WIDE)
    assert (words["--tp-size"], words["--dp-size"], words["--ep-size"]) == ("8", "4", "8")
    assert "--enable-dp-attention" in words
    assert (words["--max-running-requests"], words["--chunked-prefill-size"]) == ("64", "16384")
    assert any("needs a checkpoint in fp8-block" in note for note in line.notes)


def test_tensorrt_llm_reads_a_second_file():
    line, words = words_of("tensorrt-llm", attention_dp=8, ep=8, max_batch=16)
    assert (words["--tp_size"], words["--ep_size"], words["--max_batch_size"]) == ("8", "8", "16")
    assert words["--extra_llm_api_options"] == line.config_name
    assert "enable_attention_dp: true" in line.config
    assert "enable_balance: true" in line.config


def test_formats_copies_and_nodes_are_written():
    job = serving_job("llama-3-70b", "fp8", kv_precision=Dtype.FP8)
    line, words = words_of("vllm", job, tp=8, pp=2, replicas=3)
    assert (words["--quantization"], words["--kv-cache-dtype"], words["--distributed-executor-backend"]) == ("fp8", "fp8", "ray")
    assert line.copies == 3
    assert any("spans 2 nodes" in note for note in line.notes)
    assert words_of("sglang", job, tp=16)[1]["--nnodes"] == "2"


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm"])
def test_drafts_and_pools_have_their_flags(engine):
    job = serving_job("deepseek-v3", "fp8-block", speculation=Speculation(draft_tokens=2, acceptance=0.8))
    line, _ = words_of(engine, job, tp=8, ep=8)
    assert "speculative" in line.command + line.config
    one = ServingLayout(tp=8, ep=8)
    layout = Pools(prefill=one, decode=one, prefill_workers=2, decode_workers=3)
    prefill, decode = launch_lines(_plan(job, engine, layout), load_engine(engine))
    assert (prefill.copies, decode.copies) == (2, 3)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm"])
def test_a_draft_model_is_named_as_the_engine_loads_it(engine):
    drafts = Speculation(draft_tokens=4, acceptance=0.7, draft=load_model("llama-3.2-1b"))
    line, _ = words_of(engine, serving_job("llama-3.3-70b", speculation=drafts), tp=4)
    assert "meta-llama/Llama-3.2-1B" in line.command + line.config


def test_engines_without_a_command_are_refused():
    for engine in list_engines():
        if engine.startswith(("vllm", "sglang")) or engine == "tensorrt-llm":
            words_of(engine, serving_job(), tp=2)
        else:
            with pytest.raises(InputError, match="started in ways"):
                words_of(engine, serving_job(), tp=2)
