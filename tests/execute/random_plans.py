"""Random small plans: models of every shape, on every axis, that torch can execute."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from perfmodel.foundation.errors import InputError
from perfmodel.parallel.executable import not_modules_reason
from perfmodel.parallel.plan import Plan, make_plan
from perfmodel.planner.uniform.space import SEARCHED_ORDERS
from perfmodel.workload.activations import ACTIVATIONS
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.job import Optimizer, Precision, TrainingJob

#: The most ranks of a plan.
MOST_RANKS = 64
POSITIONS = 64


@st.composite
def models(draw: st.DrawFn) -> TransformerConfig:
    """GPT-2, Llama, Gemma 2, Falcon, GPT-J, GPT-NeoX, Qwen 3, BLOOM, OPT and what lies between them."""
    kv_heads = draw(st.sampled_from([1, 2, 4, 8]))
    norm = draw(st.sampled_from(["rmsnorm", "layernorm"]))
    position = draw(st.sampled_from(["rotary", "learned", "alibi", "none"]))
    block = draw(st.sampled_from(["sequential", "sandwich", "parallel", "parallel, shared norm"]))
    window = draw(st.sampled_from([0, 0, 8, 48]))
    flag = st.booleans()
    return TransformerConfig.of(
        name="random",
        architecture="llama",
        num_hidden_layers=draw(st.integers(2, 4)),
        hidden_size=draw(st.sampled_from([16, 24, 40])),
        num_attention_heads=kv_heads * draw(st.sampled_from([1, 2, 3])),
        num_key_value_heads=kv_heads,
        head_dim=draw(st.sampled_from([2, 4, 8])),
        intermediate_size=draw(st.sampled_from([8, 24, 56])),
        vocab_size=draw(st.sampled_from([5, 64, 131])),
        max_position_embeddings=POSITIONS,
        gated_mlp=draw(flag),
        activation=draw(st.sampled_from(sorted(ACTIVATIONS))),
        norm=norm,
        position=position,
        qkv_bias=draw(flag),
        attention_output_bias=draw(flag),
        mlp_bias=draw(flag),
        norm_bias=norm == "layernorm" and draw(flag),
        lm_head_bias=draw(flag),
        tie_word_embeddings=draw(flag),
        parallel_block=block.startswith("parallel"),
        shared_norm=block.endswith("shared norm"),
        qk_norm=draw(flag),
        sandwich_norm=block == "sandwich",
        sliding_window=window,
        full_attention_every=draw(st.sampled_from([0, 2])) if window else 0,
        position_offset=draw(st.sampled_from([0, 2])) if position == "learned" else 0,
        embedding_layernorm=draw(flag),
    )


def degrees(largest: int) -> st.SearchStrategy[int]:
    return st.sampled_from([degree for degree in (1, 2, 4, 8) if degree <= largest])


@st.composite
def pipelines(draw: st.DrawFn, num_layers: int) -> dict[str, Any]:
    """Stages, schedule and layers of each stage; the first and the last stage may have none."""
    pp = draw(st.sampled_from([degree for degree in (1, 2, 4) if degree <= num_layers]))
    if pp == 1:
        return {}
    schedule = draw(st.sampled_from(["1f1b", "gpipe", "interleaved"] if num_layers >= 2 * pp else ["1f1b", "gpipe"]))
    virtual = 2 if schedule == "interleaved" else 1
    knobs: dict[str, Any] = dict(pp=pp, schedule=schedule, virtual_stages=virtual)
    if pp == 2 and virtual == 1 and draw(st.booleans()):
        first = draw(st.integers(0, num_layers))
        knobs["stage_layers"] = (first, num_layers - first)
    if virtual > 1 and draw(st.booleans()):
        layers = [0, *[1] * (pp * virtual - 2), 0]
        for _ in range(num_layers - sum(layers)):
            layers[draw(st.integers(0, len(layers) - 1))] += 1
        knobs["stage_layers"] = tuple(layers)
    return knobs


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """A plan of up to `MOST_RANKS` ranks that torch can execute."""
    model = draw(models())
    pipeline = draw(pipelines(model.num_hidden_layers))
    left = MOST_RANKS // pipeline.get("pp", 1)
    tp = draw(degrees(min(left, model.num_key_value_heads)))
    cp = draw(degrees(min(left // tp, 4)))
    replicate = draw(degrees(min(left // (tp * cp), 4)))
    shard = draw(degrees(left // (tp * cp * replicate)))
    zero = draw(st.sampled_from([1, 2, 3] if shard > 1 else [0, 1, 2, 3]))
    micro_batch = draw(st.integers(1, 2))
    groups = draw(st.integers(1, 3))
    microbatches = groups * pipeline["pp"] if pipeline else groups
    job = TrainingJob(
        model=model,
        global_batch=replicate * shard * micro_batch * microbatches,
        seq_len=draw(st.sampled_from([32, 64])),
        precision=draw(st.sampled_from([Precision.BF16_MIXED, Precision.FP32, Precision.BF16])),
        optimizer=draw(st.sampled_from([optimizer for optimizer in Optimizer if optimizer.is_plain])),
    )
    try:
        plan = make_plan(
            job,
            cluster="localhost",
            num_chips=pipeline.get("pp", 1) * tp * cp * replicate * shard,
            tp=tp,
            cp=cp,
            dp_replicate=replicate,
            dp_shard=shard,
            zero=zero,
            order=draw(st.sampled_from(SEARCHED_ORDERS)),
            sequence_parallel=tp > 1 and draw(st.booleans()),
            micro_batch=micro_batch,
            recompute=draw(st.sampled_from(["none", "selective", "full"])),
            attention=draw(st.sampled_from(["flash", "unfused"])),
            **pipeline,
        )
    except InputError:
        assume(False)
        raise
    assume(not not_modules_reason(plan))
    return plan


def grown(plan: Plan) -> Plan:
    """The same plan on tensors of a size at which bytes of activations are what matters: fake tensors cost no more for it."""
    model = plan.job.model
    wide = model.having(
        hidden_size=16 * model.hidden_size,
        head_dim=16 * model.head_dim,
        intermediate_size=16 * model.intermediate_size,
        vocab_size=61 * model.vocab_size,
        max_position_embeddings=16 * model.positions.max_position_embeddings,
        sliding_window=16 * model.attention.sliding_window,
    )
    return replace(plan, job=replace(plan.job, model=wide, seq_len=16 * plan.job.seq_len))
