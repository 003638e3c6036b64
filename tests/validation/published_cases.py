"""A published run as a case, to be changed one field at a time."""

import json

MODEL = {
    "name": "Llama-3-8B",
    "kind": "decoder",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "gated_mlp": True,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "num_experts": None,
    "num_experts_per_tok": None,
}
CASE = {
    "id": "some-run",
    "source": "a paper",
    "framework": "nanotron v0.5",
    "model": MODEL,
    "sequence_length": 4096,
    "chip": "h100-sxm-80gb",
    "chips_per_node": 8,
    "num_chips": 64,
    "precision": "bf16",
    "global_batch": 128,
    "micro_batch": 1,
    "dp": 8,
    "tp": 4,
    "pp": 2,
    "sequence_parallel": True,
    "zero_stage": 1,
    "recompute": "none",
    "flash_attention": True,
    "settings": {"fp32_gradient_accumulation": True},
    "measured": {"step_time_s": 2.5, "peak_memory_gib": 50.0},
    "notes": "",
    "tier": "primary",
}


def changed(**values):
    return {**CASE, **values}


def write(path, cases):
    path.write_text("".join(json.dumps(case) + "\n" for case in cases), encoding="utf-8")
    return path


def sweep(prefix="nanotron", times=(2.0, 2.5, 3.0, 4.0, 5.0)):
    """Runs that differ in their plan only."""
    plans = [(1, 1, 64), (2, 1, 32), (4, 1, 16), (8, 1, 8), (4, 2, 8)]
    return [
        changed(id=f"{prefix}-{i}", tp=tp, pp=pp, dp=dp, sequence_parallel=tp > 1, measured={"step_time_s": time})
        for i, ((tp, pp, dp), time) in enumerate(zip(plans, times, strict=True))
    ]
