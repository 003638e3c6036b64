"""Plans of real models in every form, on 8 to 4,096 ranks: what an audit must find right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from perfmodel.parallel.plan import Plan, make_plan
from perfmodel.verbs.setting import make_job

#: name -> (model, sequences in a step, tokens of one), the plan's knobs
PLANS: dict[str, tuple[tuple[str, int, int], dict[str, Any]]] = {
    "GPT-2, data parallel": (("gpt2", 32, 1024), dict(num_chips=8)),
    "GPT-2 XL, ZeRO-1, float32": (("gpt2-xl", 16, 1024), dict(num_chips=8, zero=1, precision="fp32")),
    "GPT-2 XL, ZeRO-2": (("gpt2-xl", 16, 1024), dict(num_chips=8, zero=2, micro_batch=2)),
    "Llama 3.2 1B, ZeRO-3": (("llama-3.2-1b", 32, 4096), dict(num_chips=16, zero=3)),
    "Falcon 7B, ZeRO-3, full recomputation": (("falcon-7b", 32, 2048), dict(num_chips=32, zero=3, recompute="full")),
    "Llama 3 8B, HSDP": (("llama-3-8b", 64, 8192), dict(num_chips=64, zero=3, dp_shard=8)),
    "OPT 6.7B, tensor parallel": (("opt-6.7b", 8, 2048), dict(num_chips=8, tp=8, sequence_parallel=False)),
    "Llama 3 8B, FSDP and TP": (("llama-3-8b", 8, 8192), dict(num_chips=64, tp=8, zero=3)),
    "Gemma 2 9B, FSDP and TP, unfused, selective recomputation": (
        ("gemma-2-9b", 16, 4096),
        dict(num_chips=64, tp=4, zero=3, attention="unfused", recompute="selective"),
    ),
    "Llama 3.1 8B, context parallel": (("llama-3.1-8b", 8, 65536), dict(num_chips=64, cp=8, zero=3)),
    "Mistral 7B, context and tensor, ZeRO-1": (("mistral-7b", 8, 32768), dict(num_chips=64, cp=4, tp=2, zero=1)),
    "Phi-2, HSDP and TP": (("phi-2", 64, 2048), dict(num_chips=64, tp=2, zero=3, dp_shard=8)),
    "OPT 13B, GPipe, TP, ZeRO-1": (("opt-13b", 64, 2048), dict(num_chips=128, tp=4, pp=4, zero=1, schedule="gpipe")),
    "GPT-NeoX 20B, 1F1B, TP, data parallel": (("gpt-neox-20b", 128, 2048), dict(num_chips=256, tp=8, pp=4)),
    "Qwen3 8B, pipeline, context, TP, ZeRO-3": (("qwen3-8b", 32, 32768), dict(num_chips=64, pp=2, cp=2, tp=4, zero=3)),
    "Qwen2.5 72B, pipeline, context, TP, ZeRO-2": (("qwen2.5-72b", 32, 16384), dict(num_chips=512, pp=4, cp=2, tp=8, zero=2)),
    "Llama 2 70B, interleaved, TP, ZeRO-1": (
        ("llama-2-70b", 128, 4096),
        dict(num_chips=512, tp=8, pp=4, schedule="interleaved", virtual_stages=2, zero=1),
    ),
    "Llama 3 70B, 1F1B, TP, ZeRO-1": (("llama-3-70b", 512, 8192), dict(num_chips=512, tp=8, pp=4, zero=1)),
    "GPT-3 175B, 1F1B, TP, HSDP": (
        ("gpt3-175b", 256, 2048),
        dict(num_chips=1024, tp=8, pp=8, zero=3, dp_shard=8, recompute="selective"),
    ),
    "Llama 3.1 405B, 1F1B, TP, ZeRO-3, full recomputation": (
        ("llama-3.1-405b", 2048, 8192),
        dict(num_chips=4096, tp=8, pp=16, zero=3, recompute="full"),
    ),
    "Mixtral 8x7B, 1F1B, experts over data, ZeRO-1": (("mixtral-8x7b", 64, 4096), dict(num_chips=64, pp=4, ep=8, zero=1)),
    "DeepSeek-V2, 1F1B, experts over data, ZeRO-1": (
        ("deepseek-v2", 1024, 5120),
        dict(num_chips=768, pp=12, ep=32, zero=1),
    ),
    "DeepSeek-V3, 1F1B, experts over data, further tokens, ZeRO-1": (
        ("deepseek-v3", 15360, 4096),
        dict(num_chips=2048, pp=16, ep=64, zero=1),
    ),
    "GLM-4.5, 1F1B, experts in turn over TP and data, ZeRO-1": (("glm-4.5", 2048, 4096), dict(num_chips=512, tp=2, pp=16, ep=32, zero=1)),
    "Qwen3 30B, 1F1B, experts gathered, ZeRO-1": (
        ("qwen3-30b-a3b", 128, 4096),
        dict(num_chips=64, pp=8, ep=8, zero=1, dispatcher="allgather"),
    ),
    "GLM-5, 1F1B, sparse indexer, experts over data and TP, ZeRO-1": (
        ("glm-5", 256, 4096),
        dict(num_chips=256, tp=2, pp=4, ep=32, etp=1, zero=1),
    ),
    "Qwen3-Next 80B, experts over data, ZeRO-1": (("qwen3-next-80b-a3b", 128, 4096), dict(num_chips=64, ep=8, zero=1)),
    "Nemotron 3 Nano, experts over data and TP, ZeRO-1": (
        ("nemotron-3-nano-30b-a3b", 64, 4096),
        dict(num_chips=64, tp=2, ep=8, etp=1, zero=1),
    ),
    "gpt-oss 20B, pipeline, experts over data, ZeRO-3": (("gpt-oss-20b", 64, 4096), dict(num_chips=32, pp=4, ep=8, zero=3)),
    "Llama 3.1 405B, 131,072 tokens: pipeline, context, TP, ZeRO-2": (
        ("llama-3.1-405b", 32, 131072),
        dict(num_chips=4096, tp=8, pp=16, cp=16, zero=2),
    ),
}


SHALLOW = 2
"""Layers of a virtual stage of a shallow plan, where its stages have as many each."""


def real_plan(name: str) -> Plan:
    (model, batch, seq_len), knobs = PLANS[name]
    knobs = dict(knobs)
    job = make_job(model, global_batch=batch, seq_len=seq_len, precision=knobs.pop("precision", "bf16-mixed"))
    return make_plan(job, cluster="dgx-h100", **knobs)


def shallow_plan(name: str) -> Plan:
    """Return the plan at full width with the fewest layers that show every kind of layer and leave no stage empty."""
    plan = real_plan(name)
    model, knobs = plan.job.transformer, {name: value for name, value in PLANS[name][1].items() if name != "precision"}
    chunks = plan.layout.pp * plan.virtual_stages
    for depth in range(max(SHALLOW * chunks, 2 * len(model.layer_kinds)), model.num_hidden_layers):
        few = model.with_layers(depth)
        shallow = make_plan(replace(plan.job, model=few), cluster="dgx-h100", **knobs)
        if len(few.layer_kinds) == len(model.layer_kinds) and min(shallow.stage_layers) > 0:
            return shallow
    return plan
