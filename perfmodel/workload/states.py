"""States of recurrent layers, which a sequence keeps in place of keys, and the work of one more token.

Engines keep the recurrent state in float32 and the last inputs of the short convolution in the model's dtype: vLLM takes both dtypes from
`mamba_cache_dtype` (the model's) and the first from `mamba_ssm_cache_dtype`, SGLang has bfloat16 and float32; checkpoints ask for
float32 (`mamba_ssm_dtype` of Qwen3.5, NVIDIA's cards of Nemotron-H). A model that does not ask (Qwen3-Next) has its state in 16 bits under
vLLM's `auto`, which is not modelled.

Sources: vLLM, vllm/model_executor/layers/mamba/mamba_utils.py (shapes and dtypes), read 2026-11 at commit 02d71083; SGLang,
Mamba2CacheParams and SGLANG_MAMBA_CONV_DTYPE; Qwen3.5's config.json.
"""

from __future__ import annotations

from math import prod

from perfmodel.workload.config import TransformerConfig

#: [byte] Of an element of a recurrent state, and of an input of the convolution.
STATE_BYTES, CONVOLVED_BYTES = 4.0, 2.0
#: The kernel class that reads and writes the state of sequences which decode.
UPDATE_KERNELS = {"mamba": "state_update", "delta": "delta_update"}
#: Products with the state for a token: written and read (Mamba-2); what is known is read, written and read (delta rule).
UPDATE_PRODUCTS = {"mamba": 2.0, "delta": 3.0}


def state_elements(model: TransformerConfig, mixer: str) -> float:
    """Elements of the states of all heads of one layer: H P N (Mamba-2), or n_v d_k d_v (delta networks); 0 for other mixers."""
    spec = model.recurrence_of(mixer)
    return float(prod(spec.state_shape)) if spec is not None else 0.0


def convolved_elements(model: TransformerConfig, mixer: str) -> float:
    """Inputs of the convolution that the next token needs: taps - 1 of each channel of one layer."""
    spec = model.recurrence_of(mixer)
    return float((spec.conv_kernel - 1) * spec.state_shape[0] * spec.group_channels) if spec is not None else 0.0


def state_bytes(model: TransformerConfig, mixer: str) -> float:
    """[byte] Of one layer and sequence, over all ranks of tp, which share the heads."""
    return STATE_BYTES * state_elements(model, mixer) + CONVOLVED_BYTES * convolved_elements(model, mixer)
