"""The sparse indexer of latent attention (DeepSeek-V3.2, GLM-5): a few small heads select the keys that each query attends to.

Its keys are computed in the layout of the residual stream and gathered like latents. Every tensor-parallel rank has all of its heads: their
selection is one list for all attention heads.
"""

from __future__ import annotations

from perfmodel.workload.decoder.builder import DecoderBuilder, operand
from perfmodel.workload.graph import TensorRole
from perfmodel.workload.kinds.dense import layer_norm
from perfmodel.workload.kinds.index_scores import index_scores


def write_indexer(b: DecoderBuilder, x: str, compressed: str, latent_dim: str) -> str:
    """Write the selection of keys for each query. compressed: the source of the queries, hidden state or its latent; latent_dim: its last
    dim"""
    latent = b.model.parts.latent
    assert latent is not None
    q = b.linear("index_q_proj", compressed, f"b s ih id {latent_dim}", f"b s {latent_dim}", f"ih id {latent_dim}", 2, "b s ih id")
    q = b.rotary("index_q_rotary", q, "b s ih id", head_dim=latent.rope_head_dim, start=0)
    k = b.linear("index_k_proj", x, "b s_res id h", "b s h", "id h", 1, "b s id")
    scale, shift = (operand(b.parameter(f"index_k_norm.{part}", "id", 1), "id") for part in ("weight", "bias"))
    normed = layer_norm("index_k_norm", operand(k, "b s id"), scale, shift, operand("index_k_norm.out", "b s id"), b.of("b s id"))
    k = b.add(normed, "b s_res id")
    k = b.rotary("index_k_rotary", k, "b s_res id", tensor_dims="b s id", head_dim=latent.rope_head_dim, start=0)
    weights = b.linear("index_weights_proj", x, "b s_res ih h", "b s h", "ih h", 1, "b s ih", part="other")
    dims = "b q z ih id it"
    operands = operand(q, "b q ih id"), operand(k, "b z id"), operand(weights, "b q ih"), operand("index.out", "b q it")
    half = b.part_of_token(2)
    operator = index_scores("index", *operands, b.of(dims), heads="ih", width="id", half_keys=((half, "z"),) if half else ())
    indices = b.add(operator, dims, itemsize=4.0)
    b.set_role(indices, TensorRole.INDEX)
    return indices
