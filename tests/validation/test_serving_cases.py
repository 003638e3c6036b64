import pytest

from perfmodel.foundation.dtypes import Dtype
from perfmodel.foundation.errors import InputError
from perfmodel.validation.measured import is_serving, measured_service
from perfmodel.validation.published_models import model_of_case
from perfmodel.validation.serving_cases import engine_of, plan_of_serving
from tests.validation.serving_cases import CASE, DEEPSEEK, LLAMA, changed


def test_job_plan_and_engine_are_what_the_run_states():
    planned = plan_of_serving(CASE)
    job, layout = planned.job, planned.layout
    assert (layout.tp, layout.replicas, planned.engine, planned.hardware.chip, planned.kind) == (2, 1, "vllm", "h100-sxm-80gb", "serving")
    assert (job.input_len.least, job.input_len.most, job.output_len.mean) == (819, 1024, 461.0)
    assert (job.concurrency, job.quantization.name, job.kv_precision, job.is_static) == (8, "fp8", Dtype.BF16, False)
    assert planned.assumed == ("kv_precision",)


def test_experts_and_ranks_of_attention_follow_the_run():
    parallel = {"attention_dp": 8, "moe_tp": 1, "moe_ep": 8}
    planned = plan_of_serving(changed(model=DEEPSEEK, framework="trtllm 1.1.0", chips=8, tp=1, parallel=parallel, precision="nvfp4"))
    assert (planned.layout.attention_dp, planned.layout.ep, planned.layout.expert_tp, planned.layout.num_chips) == (8, 8, 1, 8)
    assert planned.job.kv_precision is Dtype.FP8  # as the checkpoints of that engine state it
    assert planned.job.quantization.name == "nvfp4"
    assert plan_of_serving(changed(model=DEEPSEEK, chips=8, tp=8)).job.quantization.name == "fp8-block"


def test_two_pools_are_workers_of_their_own():
    split = {
        "prefill_workers": 3,
        "chips_per_prefill_worker": 8,
        "decode_workers": 1,
        "chips_per_decode_worker": 48,
        "decode_attention_dp": True,
    }
    case = changed(model=DEEPSEEK, chips=72, tp=None, pp=None, disaggregated=True, disagg=split, chip_id="gb200-nvl72", precision="nvfp4")
    pools = plan_of_serving(case).layout
    assert pools.num_chips == 72
    assert (pools.decode.attention_dp, pools.decode.ep, pools.prefill_workers) == (48, 48, 3)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"chip_id": None, "chip": "Intel PVC"}, "no chip of this name"),
        ({"model": None}, "model: the run does not state it"),
        ({"model": {**LLAMA, "layers": None}}, "model.layers"),
        ({"batch": None}, "batch: the run does not state it"),
        ({"precision": "int3"}, "precision=int3: is not known"),
        ({"chips": 3}, "must be a multiple"),
        ({"tp": 1.5}, "tp=1.5"),
        ({"kind": "chat"}, "kind=chat: is not known"),
        ({"input_len": None, "input_len_mean": None}, "input_len: the run does not state it"),
        ({"disaggregated": True}, "disagg: the run does not state"),
    ],
)
def test_what_cannot_be_predicted_says_why(values, sentence):
    with pytest.raises(InputError, match=sentence):
        plan_of_serving(changed(**values))


def test_sizes_name_the_model_and_any_length_is_the_same_one():
    model = model_of_case(DEEPSEEK, longest=2048)
    assert model.num_parameters == pytest.approx(671.03e9, rel=1e-3)
    assert (model.parts.experts.score, model.num_mtp_layers) == ("sigmoid", 0)  # of the shipped model of these sizes
    assert model == model_of_case(DEEPSEEK, longest=9216)
    odd = model_of_case({**LLAMA, "layers": 31}, longest=2048)
    assert (odd.num_hidden_layers, odd.origin.source) == (31, "sizes of a published run")


@pytest.mark.parametrize(
    ("words", "chip", "engine"),
    [
        ("vllm 0.10.2", "", "vllm"),
        ("vLLM", "h100-sxm-80gb", "vllm-2024"),
        ("vLLM", "mi300x-192gb", "vllm-2024-mi300x"),
        ("vLLM", "mi250-128gb", "vllm-2024-eager"),
        ("vllm nan", "", "vllm"),
        ("trtllm 1.1.0rc2.post2", "", "tensorrt-llm"),
        ("TensorRT-LLM v0.17 (in-flight batching)", "", "tensorrt-llm-2024"),
        ("TensorRT-LLM", "", "tensorrt-llm-2024"),
        ("TensorRT-LLM v0.6.1 (static batch)", "", "tensorrt-llm-2023"),
        ("NeMo/TensorRT-LLM", "", "tensorrt-llm-2023"),
        ("trtllm dynamo-0.5.1-rc0.pre3", "", "tensorrt-llm"),
        ("NIM (TensorRT-LLM)", "", "nim"),
        ("sglang dynamo-0.5.1-rc0.pre1", "", "sglang"),
        ("Deepspeed-MII", "", "deepspeed-mii"),
        ("Deepspeed", "gaudi2-96gb", "optimum-habana"),
        ("gpt-fast (torch.compile)", "", "gpt-fast"),
        ("FasterTransformer", "", "fastertransformer"),
        ("lmdeploy 0.6", "", "generic"),
        (None, "", "generic"),
    ],
)
def test_the_words_of_a_framework_name_an_engine(words, chip, engine):
    assert engine_of(words, chip=chip) == engine


def test_what_was_measured_follows_the_definitions():
    latency = pytest.approx(0.05 + 459.8 * 0.005)
    assert measured_service(CASE) == {"ttft": 0.05, "tpot": 0.005, "request_latency": latency}
    static = measured_service({"kind": "static_batch", "batch": 4, "output_len": 100, "measured": {"tokens_per_s": 200.0}})
    assert static == {"request_latency": pytest.approx(2.0), "tokens_per_second": 200.0}


def test_a_run_of_serving_is_known_by_its_shape():
    assert is_serving(CASE)
    assert is_serving({"id": 1, "measured": {"tpot_ms": 3}})
    assert not is_serving({"id": 1})
    assert not is_serving({"id": 1, "chips": 8, "sequence_length": 4096})


def test_more_layers_than_any_model_has_are_refused_at_once():
    with pytest.raises(InputError, match=r"model\.layers=2147483647: must be 4,096 at most"):
        model_of_case({**LLAMA, "layers": 2**31 - 1}, longest=1024)
    with pytest.raises(InputError, match=r"model\.layers"):
        model_of_case({**DEEPSEEK, "layers": 2**31 - 1}, longest=1024)
