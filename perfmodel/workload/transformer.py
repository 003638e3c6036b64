"""The operators of a dense decoder-only transformer, forward.

One embedding, one layer, one head. Dims: b sequences, s positions, h hidden, g key-value heads, r query heads for each of
them, c copies of a key-value head, d head dim, f feed-forward, v vocabulary, p positions of the learned table; q and z are
query and key positions inside attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from perfmodel.workload.causal import ALL_BEFORE, CausalMask
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.operator import Dim, Graph, Operand, Operator, OperatorKind, Saved, Tensor, TensorRole

#: What `_Builder.dim` knows.
_DIMS = ("b", "s", "s_res", "q", "z", "h", "g", "r", "g_norm", "r_norm", "g_attn", "r_attn", "c", "d", "f", "v_in", "v_out", "p")

_FP32 = 4.0
_MASK = 1.0


@dataclass(slots=True)
class _Builder:
    """Collects operators and tensors while the layer is written down in order."""

    model: TransformerConfig
    seq_len: int
    activation_bytes: float
    parameter_bytes: float
    operators: list[Operator] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    region: str = "embedding"

    def dim(self, name: str) -> Dim:
        model = self.model
        heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
        match name:
            case "b":
                return Dim(name="b", size=1, logical="batch", per_sample=True)
            case "s":
                return Dim(name="s", size=self.seq_len, logical="s")
            case "s_res":
                return Dim(name="s", size=self.seq_len, logical="s_res")
            case "q":
                return Dim(name="q", size=self.seq_len, logical="s_query")
            case "z":
                return Dim(name="z", size=self.seq_len, logical="s_key")
            case "h":
                return Dim(name="h", size=model.hidden_size, logical="hidden")
            case "g":
                return Dim(name="g", size=kv_heads, logical="kv_heads")
            case "r":
                return Dim(name="r", size=heads // kv_heads, logical="q_per_kv")
            case "g_norm":
                return Dim(name="g", size=kv_heads, logical="norm_kv_heads")
            case "r_norm":
                return Dim(name="r", size=heads // kv_heads, logical="norm_q_per_kv")
            case "g_attn":
                return Dim(name="g", size=kv_heads, logical="attn_kv_heads")
            case "r_attn":
                return Dim(name="r", size=heads // kv_heads, logical="attn_q_per_kv")
            case "c":
                return Dim(name="c", size=1, logical="kv_copies", stretched=True)
            case "d":
                return Dim(name="d", size=model.head_dim, logical="head_dim")
            case "f":
                return Dim(name="f", size=model.intermediate_size, logical="ffn")
            case "v_in":
                return Dim(name="v", size=model.vocab_size, logical="vocab_in", padded=True)
            case "v_out":
                return Dim(name="v", size=model.vocab_size, logical="vocab_out", padded=True)
            case "p":
                return Dim(name="p", size=model.num_position_rows, logical="positions")
        raise AssertionError(name)

    def parameter(self, name: str, num_rows: int) -> str:
        self.tensors[name] = Tensor(name=name, role=TensorRole.PARAMETER, itemsize=self.parameter_bytes, num_rows=num_rows)
        return name

    def op(
        self,
        name: str,
        kind: OperatorKind,
        dims: str,
        inputs: list[tuple[str, str]],
        output: tuple[str, str],
        *,
        kernel_class: str,
        saved: tuple[Saved, ...] = (),
        group: str = "",
        causal: CausalMask = ALL_BEFORE,
        reduced: tuple[str, ...] = (),
        itemsize: float = 0.0,
    ) -> str:
        """`dims` and the operands' dims are names separated by spaces."""
        tensor = output[0]
        self.tensors[tensor] = Tensor(name=tensor, role=TensorRole.ACTIVATION, itemsize=itemsize or self.activation_bytes)
        self.operators.append(
            Operator(
                name=name,
                kind=kind,
                region=self.region,
                dims=tuple(self.dim(d) for d in dims.split()),
                inputs=tuple(Operand(tensor=t, dims=tuple(d.split())) for t, d in inputs),
                output=Operand(tensor=tensor, dims=tuple(output[1].split())),
                kernel_class=kernel_class,
                saved=saved,
                group=group,
                causal=causal,
                reduced_dims=reduced,
            )
        )
        return tensor

    # --- pieces ---------------------------------------------------------------------------------------------

    def linear(self, name: str, x: str, dims: str, x_dims: str, weight_dims: str, num_rows: int, out_dims: str) -> str:
        weight = self.parameter(f"{name}.weight", num_rows)
        return self.op(
            name,
            OperatorKind.EINSUM,
            dims,
            [(x, x_dims), (weight, weight_dims)],
            (f"{name}.out", out_dims),
            kernel_class="matmul",
            saved=(Saved(what="input", index=0),),
        )

    def bias(self, name: str, x: str, dims: str, tensor_dims: str, bias_dims: str) -> str:
        bias = self.parameter(f"{name}.bias", len(bias_dims.split()))
        return self.op(
            f"{name}_bias",
            OperatorKind.STREAM,
            dims,
            [(x, tensor_dims), (bias, bias_dims)],
            (f"{name}_bias.out", tensor_dims),
            kernel_class="bias",
        )

    def stream(
        self, name: str, kernel_class: str, inputs: list[str], dims: str, tensor_dims: str, *, saved: tuple[Saved, ...], group: str = ""
    ) -> str:
        return self.op(
            name,
            OperatorKind.STREAM,
            dims,
            [(x, tensor_dims) for x in inputs],
            (f"{name}.out", tensor_dims),
            kernel_class=kernel_class,
            saved=saved,
            group=group,
        )

    def norm(
        self, name: str, x: str, dims: str = "b s_res h", tensor_dims: str = "b s h", over: str = "h", weight_dims: str = "", rows: int = 1
    ) -> str:
        """`over`: the dims that are normalised; `weight_dims`: those of the weight, where it has more; `rows` of them are its dim 0."""
        layernorm = self.model.norm == "layernorm"
        weight_dims = weight_dims or over
        parameters = [self.parameter(f"{name}.weight", rows)]
        if layernorm and self.model.norm_bias:
            parameters.append(self.parameter(f"{name}.bias", rows))
        rows_of = tuple(d for d in tensor_dims.split() if d not in over.split())
        statistics = [Saved(what="statistics", itemsize=_FP32, dims=rows_of)] * (2 if layernorm else 1)
        return self.op(
            name,
            OperatorKind.STREAM,
            dims,
            [(x, tensor_dims), *((p, weight_dims) for p in parameters)],
            (f"{name}.out", tensor_dims),
            kernel_class=self.model.norm,
            saved=(Saved(what="input", index=0), *statistics),
            reduced=tuple(over.split()),
        )

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

    def dropout(self, name: str, x: str, dims: str, tensor_dims: str, *, group: str = "") -> str:
        return self.stream(name, "dropout", [x], dims, tensor_dims, saved=(Saved(what="mask", itemsize=_MASK),), group=group)

    def add(self, name: str, inputs: list[str]) -> str:
        return self.op(name, OperatorKind.ADD, "b s_res h", [(x, "b s h") for x in inputs], (f"{name}.out", "b s h"), kernel_class="add")

    def identity(self, name: str, x: str) -> str:
        return self.op(name, OperatorKind.IDENTITY, "b s_res h", [(x, "b s h")], (f"{name}.out", "b s h"), kernel_class="identity")


@lru_cache(maxsize=256)
def logical_sizes(model: TransformerConfig, seq_len: int) -> Mapping[str, int]:
    """Sizes of the dims that must divide among the ranks that cut them, by the logical name that rule sets know them by."""
    builder = _Builder(model=model, seq_len=seq_len, activation_bytes=0.0, parameter_bytes=0.0)
    dims = (builder.dim(name) for name in _DIMS if model.position == "learned" or name != "p")
    return {dim.logical: dim.size for dim in dims if not (dim.per_sample or dim.stretched or dim.padded)}


def causal_mask(model: TransformerConfig, seq_len: int) -> CausalMask:
    if not 0 < model.sliding_window < seq_len:
        return ALL_BEFORE
    return CausalMask(window_fraction=model.sliding_window / seq_len, windowed_fraction=model.sliding_layer_fraction)


def build_graph(
    model: TransformerConfig,
    *,
    seq_len: int,
    attention: str,
    dropout: bool,
    activation_bytes: float,
    parameter_bytes: float,
    weight_form_kv: bool = True,
) -> Graph:
    """The forward graph of `model`.

    attention       "flash" or "unfused"
    dropout         dropout operators run (where the model has any)
    *_bytes         size of an element of activations and of weights as computed with
    weight_form_kv  where tp exceeds the key-value heads, the weights of k and v are expanded, not k and v (algebra, GQA)
    """
    b = _Builder(model=model, seq_len=seq_len, activation_bytes=activation_bytes, parameter_bytes=parameter_bytes)
    drops = dropout and model.dropout > 0

    b.region = "embedding"
    b.tensors["tokens"] = Tensor(name="tokens", role=TensorRole.INDEX, itemsize=8.0)
    table = b.parameter("embedding.weight", 1)
    x = b.op(
        "token_embedding",
        OperatorKind.EMBEDDING,
        "b s v_in h",
        [("tokens", "b s"), (table, "v h")],
        ("token_embedding.out", "b s h"),
        kernel_class="embedding",
    )
    if model.position == "learned":
        b.tensors["positions"] = Tensor(name="positions", role=TensorRole.INDEX, itemsize=8.0)
        positions = b.parameter("position_embedding.weight", 1)
        place = b.op(
            "position_embedding",
            OperatorKind.EMBEDDING,
            "b s_res p h",
            [("positions", "s"), (positions, "p h")],
            ("position_embedding.out", "b s h"),
            kernel_class="embedding",
        )
        x = b.add("embedding_add", [x, place])
    if model.embedding_layernorm:
        x = b.norm("embedding_norm", x)
    if drops:
        x = b.dropout("embedding_dropout", x, "b s_res h", "b s h")
    b.identity("embedding_output", x)

    b.region = "layer"
    x = b.identity("block_input", "embedding_output.out")
    normed = b.norm("attention_norm", x) if model.pre_norm else x
    attention_out = _attention(b, normed, attention=attention, drops=drops, weight_form_kv=weight_form_kv)
    if model.parallel_block:
        mlp_in = normed if model.shared_norm else b.norm("mlp_norm", x)
        both = b.add("parallel_add", [attention_out, _mlp(b, mlp_in)])
        if model.attention_output_bias:
            both = b.bias("o_proj", both, "b s_res h", "b s h", "h")
        if model.mlp_bias:
            both = b.bias("down_proj", both, "b s_res h", "b s h", "h")
        if drops:
            both = b.dropout("block_dropout", both, "b s_res h", "b s h")
        x = b.add("block_add", [x, both])
    else:
        attention_out = _branch_end(b, "attention", attention_out, bias="o_proj" if model.attention_output_bias else "", drops=drops)
        x = b.add("attention_add", [x, attention_out])
        mlp_out = _mlp(b, b.norm("mlp_norm", x) if model.pre_norm else x)
        mlp_out = _branch_end(b, "mlp", mlp_out, bias="down_proj" if model.mlp_bias else "", drops=drops)
        x = b.add("mlp_add", [x, mlp_out])
    b.identity("block_output", x)

    b.region = "head"
    x = b.norm("final_norm", b.identity("head_input", "block_output.out"))
    head_weight = table if model.tie_word_embeddings else b.parameter("lm_head.weight", 1)
    logits = b.op(
        "lm_head",
        OperatorKind.EINSUM,
        "b s v_out h",
        [(x, "b s h"), (head_weight, "v h")],
        ("logits", "b s v"),
        kernel_class="matmul",
        saved=(Saved(what="input", index=0),),
    )
    if model.lm_head_bias:
        logits = b.bias("lm_head", logits, "b s v_out", "b s v", "v")
    b.tensors["labels"] = Tensor(name="labels", role=TensorRole.INDEX, itemsize=8.0)
    b.op(
        "cross_entropy",
        OperatorKind.CROSS_ENTROPY,
        "b s v_out",
        [(logits, "b s v"), ("labels", "b s")],
        ("loss", "b s"),
        kernel_class="cross_entropy",
        saved=(Saved(what="softmax", itemsize=_FP32),),
        reduced=("v",),
        itemsize=_FP32,
    )
    return Graph(
        name=model.name,
        operators=tuple(b.operators),
        tensors=b.tensors,
        num_layers=model.num_hidden_layers,
        boundary="block_input.out",
        tied=(table,) if model.tie_word_embeddings else (),
    )


def _branch_end(b: _Builder, name: str, x: str, *, bias: str, drops: bool) -> str:
    """What follows the last projection of a branch: bias, post-norm, dropout; all on the residual stream's layout."""
    if bias:
        x = b.bias(bias, x, "b s_res h", "b s h", "h")
    if b.model.sandwich_norm:
        x = b.norm(f"{name}_post_norm", x)
    if drops:
        x = b.dropout(f"{name}_dropout", x, "b s_res h", "b s h")
    return x


def _attention(b: _Builder, x: str, *, attention: str, drops: bool, weight_form_kv: bool) -> str:
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
        q = b.stream("q_rotary", "rotary", [q], "b s g r d", "b s g r d", saved=())
        k = b.stream("k_rotary", "rotary", [k], f"b s g{copies} d", f"b s g{copies} d", saved=())
    k_dims = "b z g r d" if weight_form_kv else "b z g d"
    core = "attention_core"
    if attention == "flash":
        out = b.op(
            "attention",
            OperatorKind.ATTENTION,
            "b q z g_attn r_attn d",
            [(q, "b q g r d"), (k, k_dims), (v, k_dims)],
            ("attention.out", "b q g r d"),
            kernel_class="flash",
            saved=(
                Saved(what="input", index=0),
                Saved(what="input", index=1),
                Saved(what="input", index=2),
                Saved(what="output"),
                Saved(what="statistics", itemsize=_FP32, dims=("b", "q", "g", "r")),
            ),
            group=core,
            causal=causal_mask(model, b.seq_len),
            reduced=("z",),
        )
    else:
        square, square_dims = "b q z g_attn r_attn", "b g r q z"
        scores = b.op(
            "scores",
            OperatorKind.EINSUM,
            "b q z g_attn r_attn d",
            [(q, "b q g r d"), (k, k_dims)],
            ("scores.out", square_dims),
            kernel_class="matmul",
            saved=(Saved(what="input", index=0), Saved(what="input", index=1)),
            group=core,
        )
        weights = b.op(
            "softmax",
            OperatorKind.STREAM,
            square,
            [(scores, square_dims)],
            ("softmax.out", square_dims),
            kernel_class="softmax",
            saved=(Saved(what="output"),),
            group=core,
            reduced=("z",),
        )
        if drops:
            weights = b.dropout("attention_weights_dropout", weights, square, square_dims, group=core)
        out = b.op(
            "context",
            OperatorKind.EINSUM,
            "b q z g_attn r_attn d",
            [(weights, square_dims), (v, k_dims)],
            ("attention.out", "b q g r d"),
            kernel_class="matmul",
            saved=(Saved(what="input", index=0), Saved(what="input", index=1)),
            group=core,
        )
    return b.linear("o_proj", out, "b s g r d h", "b s g r d", "h g r d", 1, "b s h")


def _mlp(b: _Builder, x: str) -> str:
    model = b.model
    hidden, wide = "b s f h", "b s f"
    # relu's gradient reads its output
    keep = (Saved(what="output"),) if model.activation == "relu" else (Saved(what="input", index=0),)
    if model.gated_mlp:
        gate = b.linear("gate_proj", x, hidden, "b s h", "f h", 1, wide)
        up = b.linear("up_proj", x, hidden, "b s h", "f h", 1, wide)
        if model.mlp_bias:
            gate = b.bias("gate_proj", gate, wide, wide, "f")
            up = b.bias("up_proj", up, wide, wide, "f")
        act = b.stream("activation", _activation_class(model.activation), [gate], wide, wide, saved=keep)
        y = b.stream("gate_product", "mul", [act, up], wide, wide, saved=(Saved(what="input", index=0), Saved(what="input", index=1)))
    else:
        up = b.linear("up_proj", x, hidden, "b s h", "f h", 1, wide)
        if model.mlp_bias:
            up = b.bias("up_proj", up, wide, wide, "f")
        y = b.stream("activation", _activation_class(model.activation), [up], wide, wide, saved=keep)
    return b.linear("down_proj", y, "b s f h", wide, "h f", 1, "b s h")


def _activation_class(activation: str) -> str:
    """Each activation is a kernel class of its own; the two forms of gelu differ fourfold on a CPU."""
    return "gelu_tanh" if activation == "gelu_tanh" else "gelu" if activation.startswith("gelu") else activation
