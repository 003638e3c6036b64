"""Head of a decoder: norm, output matrix, loss, and multi-token-prediction modules (DeepSeek-V3, arXiv 2412.19437).

A module has its own norms, projection and layer, and shares the model's token table and output matrix. All belong to the head region, on
the last pipeline stage, without recomputation; each rank projects its own tokens.
"""

from __future__ import annotations

from perfmodel.workload.decoder.builder import DecoderBuilder, operand
from perfmodel.workload.decoder.layer import write_layer
from perfmodel.workload.kinds.cross_entropy import cross_entropy
from perfmodel.workload.kinds.pieces import side_by_side

_FP32 = 4.0


def write_loss(b: DecoderBuilder, x: str, head_weight: str) -> None:
    """Write the operators from the last hidden state to the loss."""
    x = b.norm("final_norm", x)
    logits = b.product("lm_head", "b s v_out h", (x, "b s h"), (head_weight, "v h"), ("logits", "b s v"))
    if b.model.biases.lm_head_bias:
        logits = b.bias("lm_head", logits, "b s v_out", "b s v", "v")
    dims = "b s v_out"
    labels, loss = operand(b.index("labels", "b s"), "b s"), operand("loss", "b s")
    b.add(cross_entropy("cross_entropy", operand(logits, "b s v"), labels, loss, b.of(dims)), dims, itemsize=_FP32)


def write_further_tokens(b: DecoderBuilder, x: str, *, table: str, head_weight: str) -> None:
    """Write the modules in sequence, each from the previous hidden state and the embedding of the token one position further."""
    for depth in range(b.model.num_mtp_layers):
        b.prefix = f"mtp{depth}."
        token = b.embedding("token_embedding", "tokens", "b s", table, "b s v_in h", "v h")
        hidden, token = b.norm("hidden_norm", x), b.norm("embedding_norm", token)
        dims = "b s_res h hn hh"
        both = operand(hidden, "b s h"), operand(token, "b s hn"), operand("joint.out", "b s hh")
        joint = b.add(side_by_side("joint", *both, b.of(dims)), dims)
        projected = b.linear("joint_proj", joint, "b s_res h hh", "b s hh", "h hh", 1, "b s h", part="other")
        x = write_layer(b, b.model.mtp_kind, projected)
        write_loss(b, x, head_weight)
    b.prefix = ""
