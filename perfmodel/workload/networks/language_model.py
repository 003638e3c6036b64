"""Decoder-only transformers (GPT, Llama and their kin) from a `TransformerConfig`, layer by layer.

Dims: b sequences, s positions, h hidden, g key-value heads, r query heads for each of them, d head dim, f feed-forward, v vocabulary,
p rows of the learned positions; q and z are query and key positions inside attention. Dropout and biases by position (ALiBi) are left out.
"""

from __future__ import annotations

from dataclasses import replace

from perfmodel.foundation.errors import bad_field
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.graph import Graph, Operand, TensorRole
from perfmodel.workload.kinds.attention import rotary
from perfmodel.workload.models import load_model
from perfmodel.workload.networks.blocks import KEY, QUERY, add, attend, learned_positions
from perfmodel.workload.networks.builder import NetworkBuilder

_DEFAULT_BATCH = 8
#: Models that take longer sequences are trained at this length for most of their training.
_LONGEST_DEFAULT = 8192


def language_model(
    name: str,
    *,
    batch: int = _DEFAULT_BATCH,
    seq_len: int = 0,
    layers: int = 0,
    hidden: int = 0,
    heads: int = 0,
    kv_heads: int = 0,
    head_dim: int = 0,
    intermediate: int = 0,
    vocabulary: int = 0,
    fused_attention: bool = True,
) -> Graph:
    """A shipped model, any size of it replaced. seq_len 0: the longest it takes, up to 8192. hidden alone leaves the heads as they are."""
    config = load_model(name)
    changes = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads or (heads if config.num_key_value_heads == config.num_attention_heads else 0),
        "head_dim": head_dim or (hidden // (heads or config.num_attention_heads) if hidden else 0),
        "intermediate_size": intermediate,
        "vocab_size": vocabulary,
    }
    config = replace(config, **{field: value for field, value in changes.items() if value})  # type: ignore[arg-type]
    length = seq_len or min(config.max_position_embeddings, _LONGEST_DEFAULT)
    return transformer_network(config, batch=batch, seq_len=length, fused_attention=fused_attention)


def transformer_network(config: TransformerConfig, *, batch: int, seq_len: int, fused_attention: bool = True) -> Graph:
    """One training step on `batch` sequences. Operators of layer 3 are `layer3.q_proj` and so on."""
    if config.position == "learned" and seq_len > config.max_position_embeddings:
        raise bad_field(
            "seq_len", seq_len, f"{config.name} has learned positions for {config.max_position_embeddings}", "use a shorter one"
        )
    if config.qk_norm and config.qk_norm_scope == "own":
        raise bad_field("qk_norm_scope", "own", f"{config.name} has norms with a weight for each head, which no network has", "use another")
    b = NetworkBuilder(config.name, batch=batch, source=config.source)
    net = _Decoder(b, config, fused_attention)
    b.layer = "embedding"
    tokens = b.input("tokens", batch, seq_len, role=TensorRole.INDEX)
    x = b.embedding("embedding", tokens, "b s", config.vocab_size, config.hidden_size, feature_dim="h")
    if config.position == "learned":
        x = learned_positions(b, "position_embedding", x, config.num_position_rows)
    if config.embedding_layernorm:
        x = net.norm("embedding_norm", x)
    for i in range(config.num_hidden_layers):
        b.layer = f"layer{i}"
        every = config.full_attention_every
        is_rotary = config.position == "rotary" and not (config.no_rotary_every and (i + 1) % config.no_rotary_every == 0)
        x = net.layer(f"layer{i}.", x, 0 if every and (i + 1) % every == 0 else config.sliding_window, is_rotary)
    b.layer = "head"
    x = net.norm("final_norm", x)
    tied = "embedding.weight" if config.tie_word_embeddings else ""
    logits = b.linear(
        "lm_head", x, "b s h", "v h", "b s v", bias=config.lm_head_bias, weight=tied, padded="v", new={"v": config.vocab_size}
    )
    b.cross_entropy(logits, "b s v", "v")
    return b.build()


class _Decoder:
    def __init__(self, b: NetworkBuilder, config: TransformerConfig, fused_attention: bool) -> None:
        self.b = b
        self.config = config
        self.fused_attention = fused_attention

    def norm(self, name: str, x: str, dims: str = "b s h", over: str = "h") -> str:
        whole = "d" if "d" in over.split() else ""
        if self.config.norm == "rmsnorm":
            return self.b.rms_norm(name, x, dims, over, whole=whole)
        return self.b.layer_norm(name, x, dims, over, bias=self.config.norm_bias, whole=whole)

    def layer(self, prefix: str, x: str, window: int, is_rotary: bool) -> str:
        config = self.config
        normed = self.norm(f"{prefix}attention_norm", x) if config.pre_norm else x
        y = self.attention(prefix, normed, window, is_rotary)
        if config.parallel_block:
            # both branches are sums to be reduced: added first, their biases after
            z = self.mlp(prefix, normed if config.shared_norm else self.norm(f"{prefix}mlp_norm", x))
            both = add(self.b, f"{prefix}parallel_add", y, z)
            for name, has_bias in (("o_proj", config.attention_output_bias), ("down_proj", config.mlp_bias)):
                both = self.b.bias(f"{prefix}{name}", both, "b s h", "h") if has_bias else both
            return add(self.b, f"{prefix}block_add", x, both)
        x = add(self.b, f"{prefix}attention_add", x, self.close(f"{prefix}attention", f"{prefix}o_proj", y, config.attention_output_bias))
        y = self.mlp(prefix, self.norm(f"{prefix}mlp_norm", x) if config.pre_norm else x)
        return add(self.b, f"{prefix}mlp_add", x, self.close(f"{prefix}mlp", f"{prefix}down_proj", y, config.mlp_bias))

    def close(self, branch: str, projection: str, x: str, has_bias: bool) -> str:
        """What follows the last projection of a branch: bias, norm."""
        x = self.b.bias(projection, x, "b s h", "h") if has_bias else x
        return self.norm(f"{branch}_post_norm", x) if self.config.sandwich_norm else x

    def attention(self, prefix: str, x: str, window: int, is_rotary: bool) -> str:
        config = self.config
        groups, depth = config.num_key_value_heads, config.head_dim
        shared = config.num_attention_heads // groups
        made = []
        for name, dims in (("q", QUERY), ("k", KEY), ("v", KEY)):
            sizes = {"g": groups, "r": shared, "d": depth} if name == "q" else {"g": groups, "d": depth}
            weight = f"{dims.removeprefix('b s ')} h"
            y = self.b.linear(f"{prefix}{name}_proj", x, "b s h", weight, dims, bias=config.qkv_bias, whole="d", new=sizes)
            if config.qk_norm and name != "v":
                y = self.norm(f"{prefix}{name}_norm", y, dims, dims.removeprefix("b s ") if config.qk_norm_scope == "all" else "d")
            if is_rotary and name != "v":
                y = self.rotate(f"{prefix}{name}_rotary", y, dims)
            made.append(y)
        y = attend(self.b, prefix, *made, causal=True, fused=self.fused_attention, window=window)
        return self.b.linear(f"{prefix}o_proj", y, QUERY, "h g r d", "b s h", bias=False, whole="d", new={"h": config.hidden_size})

    def rotate(self, name: str, x: str, dims: str) -> str:
        cut = (*dims.split()[:-1], "")  # the head dim is rotated in pairs: whole
        sizes = {dim: size for dim, size in zip(cut, self.b.shape(x), strict=True) if dim}
        operands = Operand(tensor=x, dims=cut), Operand(tensor=f"{name}.out", dims=cut)
        return self.b.add(rotary(name, *operands, sizes, head_dim=self.b.shape(x)[-1], layer=self.b.layer), *self.b.shape(x))

    def mlp(self, prefix: str, x: str) -> str:
        config, b = self.config, self.b
        sizes = {"f": config.intermediate_size}
        if config.gated_mlp:
            gate = b.linear(f"{prefix}gate_proj", x, "b s h", "f h", "b s f", bias=config.mlp_bias, new=sizes)
            up = b.linear(f"{prefix}up_proj", x, "b s h", "f h", "b s f", bias=config.mlp_bias, new=sizes)
            active = b.pointwise(f"{prefix}activation", config.activation, (gate, "b s f"))
            y = b.pointwise(f"{prefix}gate_product", "mul", (active, "b s f"), (up, "b s f"))
        else:
            up = b.linear(f"{prefix}up_proj", x, "b s h", "f h", "b s f", bias=config.mlp_bias, new=sizes)
            y = b.pointwise(f"{prefix}activation", config.activation, (up, "b s f"))
        return b.linear(f"{prefix}down_proj", y, "b s f", "h f", "b s h", bias=False, new={"h": config.hidden_size})
