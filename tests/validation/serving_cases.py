"""Cases of serving for tests, and a predictor that needs no machine."""

from __future__ import annotations

from perfmodel.parallel.serving_plan import ServingPlan
from perfmodel.parallel.serving_prediction import PredictedLoad, ServingPrediction, Spread
from perfmodel.validation.serving_cases import PlannedServing

LLAMA = {
    "name": "Llama-3-8B", "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "ffn": 14336, "vocab": 128256,
    "gated_mlp": True, "moe": None, "attention": "gqa",
}  # fmt: skip
DEEPSEEK = {
    "name": "DeepSeek-V3/R1-671B", "layers": 61, "hidden": 7168, "heads": 128, "kv_heads": 128, "head_dim": None, "ffn": 18432,
    "vocab": 129280, "gated_mlp": True, "attention": "mla", "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128,
    "moe": {"experts": 256, "top_k": 8, "expert_ffn": 2048, "shared": 1, "shared_ffn": 2048, "first_dense_layers": 3},
}  # fmt: skip
CASE = {
    "id": "aic_llama3_c8", "source": "a benchmark", "framework": "vllm 0.12.0", "model": LLAMA, "chip": "H100", "chip_id": "h100-sxm-80gb",
    "chips": 2, "tp": 2, "pp": 1, "parallel": None, "disaggregated": False, "precision": "fp8", "kv_precision": None, "kind": "serving",
    "batch": 8, "input_len": 1024, "output_len": 512, "input_len_mean": 921.6, "output_len_mean": 460.8, "speculative": False,
    "measured": {"ttft_ms": 50.0, "tpot_ms": 5.0, "e2e_ms": None, "tokens_per_s": None}, "tier": "primary", "suspect": None,
}  # fmt: skip


def changed(**values):
    return {**CASE, **values}


def stand_in(planned: PlannedServing) -> ServingPrediction:
    """A step reads the weights once from a memory of 2 TB/s; a prompt is computed at 300 TFLOP/s."""
    job, layout = planned.job, planned.layout
    size = job.model.num_parameters * job.quantization.weight_bytes / layout.num_chips
    step, prefill = size / 2e12, 2 * job.model.num_active_parameters * job.input_len.mean / layout.num_chips / 3e14
    latency = prefill + (job.output_len.mean - 1) * step
    plan = ServingPlan(job=job, cluster=planned.hardware.chip, engine=planned.engine, layout=layout)
    return ServingPrediction(
        plan=plan, ttft=Spread(mean=prefill), tpot=Spread(mean=step), inter_token=Spread(mean=step),
        request_latency=Spread(mean=latency), prefill_time=prefill,
        load=PredictedLoad(running=float(job.concurrency or 1), queued=0.0, fits=True),
        max_sequences=100.0, tokens_per_second_per_chip=(job.concurrency or 1) * job.output_len.mean / latency / layout.num_chips,
        requests_per_second=(job.concurrency or 1) / latency, memory={"weights": size}, memory_usable=8e10, parts={"weights": step},
        rests_on={}, fits=size < 8e10, intervals={"tpot": (0.5 * step, 2.0 * step)},
    )  # fmt: skip
