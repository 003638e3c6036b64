"""The operators of a dense decoder-only transformer, forward: kinds of `workload/kinds/` put in order.

One embedding, one layer, one head. Dims: b sequences, s positions, h hidden, g key-value heads, r query heads for each of
them, c copies of a key-value head, d head dim, f feed-forward, v vocabulary, p positions of the learned table; q and z are
query and key positions inside attention. A word such as `g_norm` is dim g under another of the names that rule sets know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from perfmodel.workload.causal import CausalMask, windowed_mask
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.graph import INDEX_BYTES, Graph, Operand, Operator, Region, Repeat, Tensor, TensorRole, regions_of
from perfmodel.workload.kinds.attention import Causal, rotary
from perfmodel.workload.kinds.attention import attention as fused_attention
from perfmodel.workload.kinds.cross_entropy import cross_entropy
from perfmodel.workload.kinds.dropout import dropout
from perfmodel.workload.kinds.einsum import einsum
from perfmodel.workload.kinds.elementwise import elementwise
from perfmodel.workload.kinds.embedding import embedding
from perfmodel.workload.kinds.identity import identity
from perfmodel.workload.kinds.norm import layer_norm, rms_norm
from perfmodel.workload.kinds.softmax import softmax

#: Word -> the name that rule sets know the dim by; the dim is the word up to `_`.
_LOGICAL = {
    "b": "batch", "s": "s", "s_res": "s_res", "q": "s_query", "z": "s_key", "h": "hidden", "g": "kv_heads", "r": "q_per_kv",
    "g_norm": "norm_kv_heads", "r_norm": "norm_q_per_kv", "g_attn": "attn_kv_heads", "r_attn": "attn_q_per_kv", "c": "kv_copies",
    "d": "head_dim", "f": "ffn", "v_in": "vocab_in", "v_out": "vocab_out", "p": "positions",
}  # fmt: skip
_PER_SAMPLE, _STRETCHED, _PADDED, _WHOLE = "b", "c", "v", "d"

_FP32 = 4.0


def _sizes(model: TransformerConfig, seq_len: int) -> dict[str, int]:
    """Size of each dim; the batch is a quantity of the plan."""
    kv_heads = model.num_key_value_heads
    return {
        "b": 1, "s": seq_len, "q": seq_len, "z": seq_len, "h": model.hidden_size, "g": kv_heads, "r": model.num_attention_heads // kv_heads,
        "c": 1, "d": model.head_dim, "f": model.intermediate_size, "v": model.vocab_size,
    } | ({"p": model.num_position_rows} if model.position == "learned" else {})  # fmt: skip


@dataclass(slots=True)
class _Builder:
    """Collects operators and tensors while the layer is written down in order; each method returns the tensor that it makes.

    Dims are words separated by spaces; those of an operator may say under which name (`g_norm`), those of tensors are bare.
    """

    model: TransformerConfig
    seq_len: int
    activation_bytes: float
    parameter_bytes: float
    sizes: Mapping[str, int]
    operators: list[Operator] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    region: str = "embedding"

    def parameter(self, name: str, dims: str, num_rows: int, *, bias_of: str = "") -> str:
        shape, role = tuple(self.of(dims).values()), TensorRole.PARAMETER
        self.tensors[name] = Tensor(name=name, shape=shape, role=role, itemsize=self.parameter_bytes, num_rows=num_rows, bias_of=bias_of)
        return name

    def index(self, name: str, dims: str) -> str:
        self.tensors[name] = Tensor(name=name, shape=tuple(self.of(dims).values()), role=TensorRole.INDEX, itemsize=INDEX_BYTES)
        return name

    def of(self, dims: str) -> dict[str, int]:
        """Sizes of an operator's dims."""
        return {name: self.sizes[name] for name in (word[0] for word in dims.split())}

    def add(self, operator: Operator, dims: str, *, whole: str = "", group: str = "", itemsize: float = 0.0) -> str:
        """The operator with its dims as rule sets see them."""
        tensor = operator.output.tensor
        shape = tuple(self.sizes[dim] for dim in operator.output.dims)
        self.tensors[tensor] = Tensor(name=tensor, shape=shape, itemsize=itemsize or self.activation_bytes)
        names = tuple(operator.dims)
        self.operators.append(
            replace(
                operator,
                layer=self.region,
                group=group,
                logical={word[0]: _LOGICAL[word] for word in dims.split()},
                whole=tuple(name for name in names if name in (_WHOLE, *operator.whole, *whole)),
                padded=tuple(name for name in names if name == _PADDED),
                per_sample=tuple(name for name in names if name == _PER_SAMPLE),
                stretched=tuple(name for name in names if name == _STRETCHED),
            )
        )
        return tensor

    # --- pieces ---------------------------------------------------------------------------------------------

    def product(self, name: str, dims: str, x: tuple[str, str], y: tuple[str, str], output: tuple[str, str], *, group: str = "") -> str:
        is_weight = self.tensors[y[0]].role is TensorRole.PARAMETER
        operator = einsum(name, _operand(*x), _operand(*y), _operand(*output), self.of(dims), second_is_parameter=is_weight)
        return self.add(operator, dims, group=group)

    def linear(self, name: str, x: str, dims: str, x_dims: str, weight_dims: str, num_rows: int, out_dims: str) -> str:
        weight = self.parameter(f"{name}.weight", weight_dims, num_rows)
        return self.product(name, dims, (x, x_dims), (weight, weight_dims), (f"{name}.out", out_dims))

    def pointwise(self, name: str, function: str, inputs: list[tuple[str, str]], dims: str) -> str:
        operands = tuple(_operand(*each) for each in inputs)
        operator = elementwise(name, function, operands, _operand(f"{name}.out", inputs[0][1]), self.of(dims))
        return self.add(operator, dims)

    def bias(self, name: str, x: str, dims: str, tensor_dims: str, bias_dims: str) -> str:
        vector = self.parameter(f"{name}.bias", bias_dims, len(bias_dims.split()), bias_of=name)
        return self.pointwise(f"{name}_bias", "bias", [(x, tensor_dims), (vector, bias_dims)], dims)

    def activation(self, x: str, dims: str) -> str:
        return self.pointwise("activation", self.model.activation, [(x, dims)], dims)

    def norm(
        self, name: str, x: str, dims: str = "b s_res h", tensor_dims: str = "b s h", over: str = "h", weight_dims: str = "", rows: int = 1
    ) -> str:
        """`over`: the dims that are normalised; `weight_dims`: those of the weight, where it has more; `rows` of them are its dim 0."""
        layernorm = self.model.norm == "layernorm"
        weight_dims = weight_dims or over
        x_operand, output = _operand(x, tensor_dims), _operand(f"{name}.out", tensor_dims)
        weight = _operand(self.parameter(f"{name}.weight", weight_dims, rows), weight_dims)
        normalised = tuple(over.split())
        if layernorm:
            shift = _operand(self.parameter(f"{name}.bias", weight_dims, rows), weight_dims) if self.model.norm_bias else None
            return self.add(layer_norm(name, x_operand, weight, shift, output, self.of(dims), over=normalised), dims)
        return self.add(rms_norm(name, x_operand, weight, output, self.of(dims), over=normalised), dims)

    def qk_norm(self, name: str, x: str, dims: str, heads: str) -> str:
        """Of queries or keys. One over all heads together needs them whole, whatever rule set cuts them."""
        match self.model.qk_norm_scope:
            case "head":
                return self.norm(name, x, dims, dims, "d")
            case "own":
                return self.norm(name, x, dims, dims, "d", f"{heads} d", len(heads.split()))
            case "all":
                whole = " ".join(f"{d}_norm" if d in heads.split() else d for d in dims.split())
                return self.norm(name, x, whole, dims, f"{heads} d", rows=len(heads.split()) + 1)

    def rotary(self, name: str, x: str, dims: str) -> str:
        operator = rotary(name, _operand(x, dims), _operand(f"{name}.out", dims), self.of(dims), head_dim=self.model.head_dim)
        return self.add(operator, dims)

    def dropout(self, name: str, x: str, dims: str = "b s_res h", tensor_dims: str = "b s h", *, group: str = "") -> str:
        operator = dropout(name, _operand(x, tensor_dims), _operand(f"{name}.out", tensor_dims), self.of(dims))
        return self.add(operator, dims, group=group)

    def sum(self, name: str, inputs: list[str]) -> str:
        return self.pointwise(name, "add", [(x, "b s h") for x in inputs], "b s_res h")

    def identity(self, name: str, x: str) -> str:
        dims = "b s_res h"
        return self.add(identity(name, _operand(x, "b s h"), _operand(f"{name}.out", "b s h"), self.of(dims)), dims)

    def embedding(self, name: str, ids: str, ids_dims: str, table_name: str, dims: str, table_dims: str) -> str:
        table = _operand(self.parameter(table_name, table_dims, 1), table_dims)
        return self.add(embedding(name, _operand(ids, ids_dims), table, _operand(f"{name}.out", "b s h"), self.of(dims)), dims)


def _operand(tensor: str, dims: str) -> Operand:
    return Operand(tensor=tensor, dims=tuple(dims.split()))


@lru_cache(maxsize=256)
def logical_sizes(model: TransformerConfig, seq_len: int) -> Mapping[str, int]:
    """Sizes of the dims that must divide among the ranks that cut them, by the logical name that rule sets know them by."""
    sizes = _sizes(model, seq_len)
    return {
        logical: sizes[word[0]]
        for word, logical in _LOGICAL.items()
        if word[0] in sizes and word[0] not in (_PER_SAMPLE, _STRETCHED, _PADDED)
    }


def causal_mask(model: TransformerConfig, seq_len: int) -> CausalMask:
    return windowed_mask(seq_len, model.sliding_window, model.sliding_layer_fraction)


def build_graph(
    model: TransformerConfig,
    *,
    seq_len: int,
    attention: str,
    dropout: bool,
    activation_bytes: float,
    parameter_bytes: float,
    weight_form_kv: bool = True,
    shares_queries: bool = True,
) -> Graph:
    """The forward graph of `model`.

    attention       "flash" or "unfused"
    dropout         dropout operators run (where the model has any)
    *_bytes         size of an element of activations and of weights as computed with
    weight_form_kv  where tp exceeds the key-value heads, the weights of k and v are expanded, not k and v (algebra, GQA)
    shares_queries  ranks may share the queries of causal attention (`kinds.attention`)
    """
    b = _Builder(
        model=model,
        seq_len=seq_len,
        activation_bytes=activation_bytes,
        parameter_bytes=parameter_bytes,
        sizes=_sizes(model, seq_len),
    )
    drops = dropout and model.dropout > 0

    b.region = "embedding"
    table = "embedding.weight"
    x = b.embedding("token_embedding", b.index("tokens", "b s"), "b s", table, "b s v_in h", "v h")
    if model.position == "learned":
        place = b.embedding("position_embedding", b.index("positions", "s"), "s", "position_embedding.weight", "b s_res p h", "p h")
        x = b.sum("embedding_add", [x, place])
    if model.embedding_layernorm:
        x = b.norm("embedding_norm", x)
    if drops:
        x = b.dropout("embedding_dropout", x)
    b.identity("embedding_output", x)

    b.region = "layer"
    x = b.identity("block_input", "embedding_output.out")
    normed = b.norm("attention_norm", x) if model.pre_norm else x
    mlp_in = b.norm("mlp_norm", x) if model.parallel_block and not model.shared_norm else normed
    attention_out = _attention(b, normed, attention=attention, drops=drops, weight_form_kv=weight_form_kv, shares_queries=shares_queries)
    if model.parallel_block:
        both = b.sum("parallel_add", [attention_out, _mlp(b, mlp_in)])
        if model.attention_output_bias:
            both = b.bias("o_proj", both, "b s_res h", "b s h", "h")
        if model.mlp_bias:
            both = b.bias("down_proj", both, "b s_res h", "b s h", "h")
        if drops:
            both = b.dropout("block_dropout", both)
        x = b.sum("block_add", [x, both])
    else:
        attention_out = _branch_end(b, "attention", attention_out, bias="o_proj" if model.attention_output_bias else "", drops=drops)
        x = b.sum("attention_add", [x, attention_out])
        mlp_out = _mlp(b, b.norm("mlp_norm", x) if model.pre_norm else x)
        mlp_out = _branch_end(b, "mlp", mlp_out, bias="down_proj" if model.mlp_bias else "", drops=drops)
        x = b.sum("mlp_add", [x, mlp_out])
    b.identity("block_output", x)

    b.region = "head"
    x = b.norm("final_norm", b.identity("head_input", "block_output.out"))
    head_weight = table if model.tie_word_embeddings else b.parameter("lm_head.weight", "v h", 1)
    logits = b.product("lm_head", "b s v_out h", (x, "b s h"), (head_weight, "v h"), ("logits", "b s v"))
    if model.lm_head_bias:
        logits = b.bias("lm_head", logits, "b s v_out", "b s v", "v")
    dims = "b s v_out"
    labels, loss = _operand(b.index("labels", "b s"), "b s"), _operand("loss", "b s")
    b.add(cross_entropy("cross_entropy", _operand(logits, "b s v"), labels, loss, b.of(dims)), dims, itemsize=_FP32)
    return Graph(
        name=model.name,
        operators=tuple(b.operators),
        tensors=b.tensors,
        repeats=_repeats(model),
        loss="cross_entropy",
        tied=(table,) if model.tie_word_embeddings else (),
    )


def _repeats(model: TransformerConfig) -> tuple[Repeat, ...]:
    return (Repeat(layer="layer", count=model.num_hidden_layers, carried="block_input.out"),)


def decoder_regions(model: TransformerConfig) -> tuple[Region, ...]:
    """`Graph.regions` of `model`, whose graph need not be built for them."""
    return regions_of(("embedding", "layer", "head"), _repeats(model))


def _branch_end(b: _Builder, name: str, x: str, *, bias: str, drops: bool) -> str:
    """What follows the last projection of a branch: bias, post-norm, dropout; all on the residual stream's layout."""
    if bias:
        x = b.bias(bias, x, "b s_res h", "b s h", "h")
    if b.model.sandwich_norm:
        x = b.norm(f"{name}_post_norm", x)
    if drops:
        x = b.dropout(f"{name}_dropout", x)
    return x


def _attention(b: _Builder, x: str, *, attention: str, drops: bool, weight_form_kv: bool, shares_queries: bool) -> str:
    model = b.model
    copies = " c" if weight_form_kv else ""
    q = b.linear("q_proj", x, "b s g r d h", "b s h", "g r d h", 3, "b s g r d")
    k = b.linear("k_proj", x, f"b s g{copies} d h", "b s h", "g d h", 2, f"b s g{copies} d")
    v = b.linear("v_proj", x, f"b s g{copies} d h", "b s h", "g d h", 2, f"b s g{copies} d")
    if model.qkv_bias:
        q = b.bias("q_proj", q, "b s g r d", "b s g r d", "g r d")
        k = b.bias("k_proj", k, f"b s g{copies} d", f"b s g{copies} d", "g d")
        v = b.bias("v_proj", v, f"b s g{copies} d", f"b s g{copies} d", "g d")
    if model.qk_norm:
        q = b.qk_norm("q_norm", q, "b s g r d", "g r")
        k = b.qk_norm("k_norm", k, f"b s g{copies} d", "g")
    if model.position == "rotary":
        q = b.rotary("q_rotary", q, "b s g r d")
        k = b.rotary("k_rotary", k, f"b s g{copies} d")
    k_dims = "b z g r d" if weight_form_kv else "b z g d"
    core = "attention_core"
    if attention == "flash":
        dims = "b q z g_attn r_attn d"
        operator = fused_attention(
            "attention",
            _operand(q, "b q g r d"),
            _operand(k, k_dims),
            _operand(v, k_dims),
            _operand("attention.out", "b q g r d"),
            b.of(dims),
            head_dim=model.head_dim,
            causal=Causal(window=model.sliding_window, windowed=model.sliding_layer_fraction, shares_queries=shares_queries),
        )
        out = b.add(operator, dims, group=core)
    else:
        square, square_dims = "b q z g_attn r_attn", "b g r q z"
        scores = b.product("scores", f"{square} d", (q, "b q g r d"), (k, k_dims), ("scores.out", square_dims), group=core)
        operator = softmax(
            "softmax",
            _operand(scores, square_dims),
            _operand("softmax.out", square_dims),
            b.of(square),
            over="z",
            scale=model.head_dim**-0.5,
            causal_queries="q",
        )
        weights = b.add(operator, square, whole="z", group=core)
        if drops:
            weights = b.dropout("attention_weights_dropout", weights, square, square_dims, group=core)
        out = b.product("context", f"{square} d", (weights, square_dims), (v, k_dims), ("attention.out", "b q g r d"), group=core)
    return b.linear("o_proj", out, "b s g r d h", "b s g r d", "h g r d", 1, "b s h")


def _mlp(b: _Builder, x: str) -> str:
    model = b.model
    hidden, wide = "b s f h", "b s f"
    if model.gated_mlp:
        gate = b.linear("gate_proj", x, hidden, "b s h", "f h", 1, wide)
        up = b.linear("up_proj", x, hidden, "b s h", "f h", 1, wide)
        if model.mlp_bias:
            gate = b.bias("gate_proj", gate, wide, wide, "f")
            up = b.bias("up_proj", up, wide, wide, "f")
        y = b.pointwise("gate_product", "mul", [(b.activation(gate, wide), wide), (up, wide)], wide)
    else:
        up = b.linear("up_proj", x, hidden, "b s h", "f h", 1, wide)
        if model.mlp_bias:
            up = b.bias("up_proj", up, wide, wide, "f")
        y = b.activation(up, wide)
    return b.linear("down_proj", y, "b s f h", wide, "h f", 1, "b s h")
