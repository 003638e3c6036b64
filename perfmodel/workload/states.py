"""States of recurrent layers, which replace the KV cache of a sequence, and the work of one more token.

Engines keep the recurrent state in float32 and the last inputs of the short convolution in the model's dtype. vLLM reads both dtypes from
`mamba_cache_dtype` (the model's) and the state's from `mamba_ssm_cache_dtype`; SGLang has bfloat16 and float32. Checkpoints ask for float32
(`mamba_ssm_dtype` of Qwen3.5, NVIDIA's cards of Nemotron-H). Under vLLM's `auto` a model that does not ask (Qwen3-Next) has a 16-bit state,
which is not modelled.

Sources: vLLM, vllm/model_executor/layers/mamba/mamba_utils.py (shapes and dtypes), read 2026-11 at commit 02d71083; SGLang,
Mamba2CacheParams and SGLANG_MAMBA_CONV_DTYPE; Qwen3.5's config.json.
"""

from __future__ import annotations

from math import prod

from perfmodel.workload.config import TransformerConfig

#: Bytes of an element of a recurrent state, and of an input of the convolution. [byte]
STATE_BYTES, CONVOLVED_BYTES = 4.0, 2.0
#: Kernel class that reads and writes the states of decoding sequences.
UPDATE_KERNELS = {"mamba": "state_update", "delta": "delta_update"}
#: Products with the state per token: write and read (Mamba-2); read of the old value, write and read (delta rule).
UPDATE_PRODUCTS = {"mamba": 2.0, "delta": 3.0}


def state_elements(model: TransformerConfig, mixer: str) -> float:
    """Return the state elements of all heads of one layer: H P N (Mamba-2), or n_v d_k d_v (delta networks); 0 for other mixers."""
    spec = model.recurrence_of(mixer)
    return float(prod(spec.state_shape)) if spec is not None else 0.0


def convolved_elements(model: TransformerConfig, mixer: str) -> float:
    """Return the convolution inputs that the next token needs: taps - 1 per channel of one layer."""
    spec = model.recurrence_of(mixer)
    return float((spec.conv_kernel - 1) * spec.state_shape[0] * spec.group_channels) if spec is not None else 0.0


def state_bytes(model: TransformerConfig, mixer: str) -> float:
    """Return the state bytes of one layer and sequence, over all tp ranks, which share the heads. [byte]"""
    return STATE_BYTES * state_elements(model, mixer) + CONVOLVED_BYTES * convolved_elements(model, mixer)
