"""Parts of layers: specs of those other than dense attention and a dense MLP, and the parameters of one layer in the order of use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from math import prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from perfmodel.foundation.errors import bad_field

if TYPE_CHECKING:
    from perfmodel.workload.config import TransformerConfig

Mixer = Literal["attention", "latent", "mamba", "delta", "none"]
FeedForward = Literal["dense", "experts", "none"]
Score = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts in place of the MLP: each token is routed to `top_k` of `num_experts`.

    width          feed-forward width of one expert
    gated          an expert is act(gate(x)) * up(x), else act(up(x))
    bias           every product of an expert has a bias
    shared_width   total width of the shared experts, which every token runs; 0: none
    shared_gate    the shared output is scaled by the sigmoid of a projection to one column (Qwen2-MoE)
    router_bias    the router's product has a bias; DeepSeek's load-balancing bias is a buffer, no parameter
    score          function of the router's logits
    num_groups, top_groups   expert groups, and the most groups that a token may choose from; 1 and 1: all experts
    """

    num_experts: int
    top_k: int
    width: int
    gated: bool = True
    bias: bool = False
    shared_width: int = 0
    shared_gate: bool = False
    router_bias: bool = False
    score: Score = "softmax"
    num_groups: int = 1
    top_groups: int = 1

    def __post_init__(self) -> None:
        _check(self, at_least_1=("num_experts", "top_k", "width", "num_groups", "top_groups"), at_least_0=("shared_width",))
        if self.score not in get_args(Score):
            raise bad_field("score", self.score, "is not known here", f"use one of {', '.join(get_args(Score))}")
        if self.top_k > self.num_experts:
            raise bad_field(
                "num_experts_per_tok", self.top_k, f"must be at most the number of experts, {self.num_experts}", "correct the config"
            )
        if self.num_experts % self.num_groups or self.top_groups > self.num_groups:
            rule = f"must divide the {self.num_experts} experts, and topk_group={self.top_groups} must not exceed it"
            raise bad_field("n_group", self.num_groups, rule, "correct the config")
        if self.top_k > self.num_experts // self.num_groups * self.top_groups:
            raise bad_field("num_experts_per_tok", self.top_k, "must be at most the experts of topk_group groups", "correct the config")


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention: keys and values computed from one latent per token (DeepSeek, arXiv 2405.04434, section 2.1).

    query_rank       width of the queries' latent; 0: queries are computed from the hidden state
    key_value_rank   width of the latent of keys and values
    nope_head_dim, rope_head_dim   entries of a query or key head without and with rotary positions; heads share the latter of a key
    value_head_dim   entries of a value head
    index_heads, index_head_dim, index_top   of a sparse indexer (DeepSeek V3.2, GLM-5): each query attends to the best `index_top`
                     keys; 0: no indexer
    """

    query_rank: int
    key_value_rank: int
    nope_head_dim: int
    rope_head_dim: int
    value_head_dim: int
    index_heads: int = 0
    index_head_dim: int = 0
    index_top: int = 0

    def __post_init__(self) -> None:
        sizes = ("key_value_rank", "nope_head_dim", "rope_head_dim", "value_head_dim")
        _check(self, at_least_1=sizes, at_least_0=("query_rank", "index_heads", "index_head_dim", "index_top"))

    @property
    def score_head_dim(self) -> int:
        """Width of queries and keys in attention."""
        return self.nope_head_dim + self.rope_head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba:
    """A Mamba-2 mixer (Dao and Gu 2024, arXiv 2405.21060): heads of `head_dim` with a state of `state_size` for each entry."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    conv_kernel: int
    chunk_size: int
    conv_bias: bool = True
    bias: bool = False

    def __post_init__(self) -> None:
        _check(self, at_least_1=("num_heads", "head_dim", "num_groups", "state_size", "conv_kernel", "chunk_size"))
        if self.num_heads % self.num_groups:
            raise bad_field("n_groups", self.num_groups, f"must divide mamba_num_heads={self.num_heads}", "correct the config")

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        """State shape of a sequence: groups, heads per group, entries per head, states per entry."""
        return self.num_groups, self.num_heads // self.num_groups, self.head_dim, self.state_size

    @property
    def group_channels(self) -> int:
        """Convolved channels per group: the input of its heads, B and C."""
        return self.inner_size // self.num_groups + 2 * self.state_size


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNet:
    """A gated delta network (Yang et al. 2024, arXiv 2412.06464), as in Qwen3-Next."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int
    chunk_size: int = 64

    def __post_init__(self) -> None:
        _check(self, at_least_1=("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel", "chunk_size"))
        if self.num_value_heads % self.num_key_heads:
            rule = f"must divide linear_num_value_heads={self.num_value_heads}"
            raise bad_field("linear_num_key_heads", self.num_key_heads, rule, "correct the config")

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        """State shape of a sequence: key heads, value heads per key head, key and value entries per value head."""
        return self.num_key_heads, self.num_value_heads // self.num_key_heads, self.key_head_dim, self.value_head_dim

    @property
    def group_channels(self) -> int:
        """Convolved channels per key head: query, key and the values of its heads."""
        return 2 * self.key_head_dim + self.num_value_heads // self.num_key_heads * self.value_head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """Layers of one kind.

    name          of such a layer in the graph
    count         number of such layers
    mixer         part that mixes tokens
    feed_forward  part that each token runs after it
    turn          kinds with the same name alternate, in proportion to their counts; "": one kind after the other
    """

    name: str
    count: int
    mixer: Mixer = "attention"
    feed_forward: FeedForward = "dense"
    turn: str = ""

    def __post_init__(self) -> None:
        _check(self, at_least_1=("count",))
        for field in ("name", "turn"):
            if not isinstance(getattr(self, field), str):
                raise bad_field(field, getattr(self, field), "must be a text", "write it in quotes")
        for field, choices in (("mixer", Mixer), ("feed_forward", FeedForward)):
            value = getattr(self, field)
            if not isinstance(value, str) or value not in get_args(choices):
                raise bad_field(field, value, "is not known here", f"use one of {', '.join(get_args(choices))}")
        if self.mixer == "none" and self.feed_forward == "none":
            raise bad_field("feed_forward", "none", "a layer must have a mixer or a feed-forward", "correct the config")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Parts of a model's layers other than dense attention and a dense MLP.

    experts, latent, mamba, delta   specs of those parts; None: no layer has it
    kinds                           layer kinds, where there are several; (): all layers are equal
    """

    experts: Experts | None = None
    latent: LatentAttention | None = None
    mamba: Mamba | None = None
    delta: DeltaNet | None = None
    kinds: tuple[LayerSpec, ...] = ()


def layer_order(kinds: Sequence[LayerSpec]) -> list[str]:
    """Return the kind name of each layer in order."""
    return [kinds[index].name for index, _ in interleaved([(kind.turn, kind.count) for kind in kinds])]


def interleaved(kinds: Sequence[tuple[str, int]]) -> list[tuple[int, int]]:
    """Return the (index of its kind, number within the kind) of each layer in order, for kinds with a turn and a number of layers.

    Kinds of one turn alternate in proportion to their numbers; a kind without a turn is by itself.
    """
    begins: dict[str, int] = {}
    order = []
    for index, (turn, count) in enumerate(kinds):
        begin = begins.setdefault(turn, index) if turn else index
        order += [(begin, (number + 1) / count, index, number) for number in range(count)]
    return [(index, number) for *_, index, number in sorted(order)]


def kinds_of_layers(layers: Sequence[tuple[Mixer, FeedForward]]) -> tuple[LayerSpec, ...]:
    """Return the layer kinds of a model from the parts of each layer; the most frequent kind is named "layer". A leading run that never
    recurs is a separate kind. The other kinds alternate in proportion: their exact order is not kept."""
    counts = Counter(layers)
    types = list(counts)  # in the order of their first layers
    runs = [layer_type for i, layer_type in enumerate(layers) if i == 0 or layers[i - 1] != layer_type]
    num_leading = 0  # leading kinds that never recur
    while num_leading < len(types) and runs.count(runs[num_leading]) == 1:
        num_leading += 1
    turn = "layers" if len(types) - num_leading > 1 else ""
    main = max(types, key=lambda layer_type: (counts[layer_type], layer_type[1] == "experts"))
    kinds = []
    for index, (mixer, feed_forward) in enumerate(types):
        words: list[str] = []
        if (mixer, feed_forward) != main:  # a name of the parts that not all kinds have
            words += [mixer] if mixer != "none" and any(other != mixer for other, _ in types) else []
            words += [feed_forward] if feed_forward != "none" and any(other != feed_forward for _, other in types) else []
        kind = LayerSpec(
            name="_".join((*words, "layer")),
            count=counts[mixer, feed_forward],
            mixer=mixer,
            feed_forward=feed_forward,
            turn=turn if index >= num_leading else "",
        )
        kinds.append(kind)
    return tuple(kinds)


def kinds_with_layers(kinds: Sequence[LayerSpec], num_layers: int) -> tuple[LayerSpec, ...]:
    """Return the kinds of a model with `num_layers` layers. Kinds before the last keep their counts as far as possible; alternating kinds
    at the end share the rest in proportion."""
    last = [kind for kind in kinds if kind.turn and kind.turn == kinds[-1].turn] or [kinds[-1]]
    left, counts = num_layers, {}
    for kind in kinds:
        if kind not in last:
            counts[kind.name] = min(kind.count, left)
            left -= counts[kind.name]
    # Remainders go to the largest fractions first, at equality to those with none.
    total = sum(kind.count for kind in last)
    counts |= {kind.name: left * kind.count // total for kind in last}
    short = sorted(last, key=lambda kind: (-(left * kind.count % total), counts[kind.name] > 0))
    for kind in short[: left - sum(counts[kind.name] for kind in last)]:
        counts[kind.name] += 1
    return tuple(replace(kind, count=counts[kind.name]) for kind in kinds if counts[kind.name])


#: Field of `Parts` -> type of its record.
PARTS: Mapping[str, type[Experts] | type[LatentAttention] | type[Mamba] | type[DeltaNet]] = {
    "experts": Experts,
    "latent": LatentAttention,
    "mamba": Mamba,
    "delta": DeltaNet,
}


def part_to_plain(value: Any) -> Any:
    """Return a record, or a tuple of records, in the form of a file."""
    return [asdict(record) for record in value] if isinstance(value, tuple) else asdict(value)


def part_from_plain(field: str, value: object) -> Any:
    """Return the record, or the tuple of kinds, of a model's field. Raises InputError."""
    if field == "kinds":
        if not isinstance(value, list):
            raise bad_field(field, type(value).__name__, "must be a list of kinds of layers", "write one mapping for each")
        return tuple(_record(f"kinds[{i}]", LayerSpec, entry) for i, entry in enumerate(value))
    return _record(field, PARTS[field], value)


def _record(where: str, make: Any, value: Any) -> Any:
    known = {field.name: field for field in fields(make)}
    if not isinstance(value, Mapping):
        raise bad_field(where, type(value).__name__, "must be a mapping", f"give {', '.join(known)}")
    unknown = [str(name) for name in value if name not in known]
    missing = [name for name, field in known.items() if field.default is MISSING and name not in value]
    if unknown or missing:
        named = unknown[0] if unknown else missing[0]
        raise bad_field(where, named, "is not known here" if unknown else "is missing", f"give {', '.join(known)}")
    return make(**value)


def _check(record: Any, *, at_least_1: tuple[str, ...], at_least_0: tuple[str, ...] = ()) -> None:
    for names, least in ((at_least_1, 1), (at_least_0, 0)):
        for name in names:
            value = getattr(record, name)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**31:
                raise bad_field(name, value, f"must be a whole number of at least {least}", "correct it in the config")
    for field in fields(record):
        if field.type == "bool" and not isinstance(getattr(record, field.name), bool):
            raise bad_field(field.name, getattr(record, field.name), "must be true or false", "write one of them")


# --- parameter shapes ----------------------------------------------------------------------------------------------------

Region = Literal["embedding", "layer", "head"]


class ParameterShape(NamedTuple):
    """A parameter tensor. A matrix is stored like torch.nn.Linear: rows are outputs, columns are inputs. Expert matrices have a leading
    expert dim."""

    name: str
    shape: tuple[int, ...]
    region: Region

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


def shapes_of_layer(model: TransformerConfig, kind: LayerSpec) -> tuple[ParameterShape, ...]:
    """Return the parameter shapes of one layer of a kind."""
    h = model.hidden_size
    shapes: list[ParameterShape] = []
    if kind.mixer != "none":
        if model.norms.pre_norm:
            shapes += norm_shapes(model, "attention_norm", h)
        shapes += _MIXERS[kind.mixer](model)
        if model.norms.sandwich_norm:
            shapes += norm_shapes(model, "attention_post_norm", h)
    if kind.feed_forward != "none":
        if model.norms.pre_norm and not (model.norms.shared_norm and kind.mixer != "none"):
            shapes += norm_shapes(model, "mlp_norm", h)
        if kind.feed_forward == "experts":
            shapes += _experts(model)
        else:
            shapes += _mlp("", h, model.intermediate_size, gated=model.mlp.gated_mlp, bias=model.biases.mlp_bias)
        if model.norms.sandwich_norm:
            shapes += norm_shapes(model, "mlp_post_norm", h)
    return tuple(shapes)


def norm_shapes(model: TransformerConfig, name: str, size: int | tuple[int, ...], region: Region = "layer") -> list[ParameterShape]:
    shape = (size,) if isinstance(size, int) else size
    weight = ParameterShape(f"{name}.weight", shape, region)
    return [weight, ParameterShape(f"{name}.bias", shape, region)] if model.biases.norm_bias else [weight]


def is_routed(shape: ParameterShape) -> bool:
    """Return whether a parameter belongs to routed experts: dim 0 is the expert."""
    return shape.name.startswith("experts_")


# --- mixers -------------------------------------------------------------------------------------------------------


def _attention(model: TransformerConfig) -> list[ParameterShape]:
    h, d = model.hidden_size, model.head_dim
    queries, keys = model.num_attention_heads * d, model.num_key_value_heads * d
    shapes: list[ParameterShape] = []
    for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
        shapes += _linear(name, rows, h, bias=model.biases.qkv_bias)
    if model.attention.attention_gate:
        shapes += _linear("q_gate_proj", queries, h, bias=model.biases.qkv_bias)
    if model.norms.qk_norm and model.norms.qk_norm_scope != "bare":
        for name, heads in (("q_norm", model.num_attention_heads), ("k_norm", model.num_key_value_heads)):
            shapes += norm_shapes(model, name, {"head": (d,), "own": (heads, d), "all": (heads * d,)}[model.norms.qk_norm_scope])
    if model.attention.attention_sinks:
        shapes.append(ParameterShape("sinks", (model.num_attention_heads,), "layer"))
    return shapes + _linear("o_proj", h, queries, bias=model.biases.attention_output_bias)


def _latent(model: TransformerConfig) -> list[ParameterShape]:
    """Return the shapes of latent attention: its norms are RMSNorms in every family, the indexer's key norm is a LayerNorm."""
    latent = model.parts.latent
    assert latent is not None
    h, n = model.hidden_size, model.num_attention_heads
    queries = n * latent.score_head_dim
    if latent.query_rank:
        shapes = _linear("q_a_proj", latent.query_rank, h, bias=model.biases.qkv_bias)
        shapes.append(ParameterShape("q_a_norm.weight", (latent.query_rank,), "layer"))
        shapes += _linear("q_b_proj", queries, latent.query_rank)
    else:
        shapes = _linear("q_proj", queries, h)
    shapes += _linear("kv_a_proj", latent.key_value_rank + latent.rope_head_dim, h, bias=model.biases.qkv_bias)
    shapes.append(ParameterShape("kv_a_norm.weight", (latent.key_value_rank,), "layer"))
    shapes += _linear("kv_b_proj", n * (latent.nope_head_dim + latent.value_head_dim), latent.key_value_rank)
    if latent.index_heads:
        shapes += _linear("index_q_proj", latent.index_heads * latent.index_head_dim, latent.query_rank or h)
        shapes += _linear("index_k_proj", latent.index_head_dim, h)
        shapes += [ParameterShape(f"index_k_norm.{part}", (latent.index_head_dim,), "layer") for part in ("weight", "bias")]
        shapes += _linear("index_weights_proj", latent.index_heads, h)
    return shapes + _linear("o_proj", h, n * latent.value_head_dim, bias=model.biases.attention_output_bias)


def _mamba(model: TransformerConfig) -> list[ParameterShape]:
    """Return the shapes of Mamba-2; rows of in_proj: gate, input, B and C of each group, the step of each head."""
    mamba = model.parts.mamba
    assert mamba is not None
    h, inner = model.hidden_size, mamba.inner_size
    mixed = inner + 2 * mamba.num_groups * mamba.state_size
    shapes = _linear("in_proj", inner + mixed + mamba.num_heads, h, bias=mamba.bias)
    shapes.append(ParameterShape("conv.weight", (mixed, mamba.conv_kernel), "layer"))
    if mamba.conv_bias:
        shapes.append(ParameterShape("conv.bias", (mixed,), "layer"))
    shapes += [ParameterShape(name, (mamba.num_heads,), "layer") for name in ("dt_bias", "A_log", "D")]
    shapes.append(ParameterShape("mamba_norm.weight", (inner,), "layer"))
    return shapes + _linear("out_proj", h, inner, bias=mamba.bias)


def _delta(model: TransformerConfig) -> list[ParameterShape]:
    """Return the shapes of a gated delta network. Rows of in_proj_qkvz: queries, keys, values, gate; of in_proj_ba: writing strength and
    decay of each value head."""
    delta = model.parts.delta
    assert delta is not None
    h = model.hidden_size
    keys, values = delta.num_key_heads * delta.key_head_dim, delta.num_value_heads * delta.value_head_dim
    return [
        *_linear("in_proj_qkvz", 2 * keys + 2 * values, h),
        *_linear("in_proj_ba", 2 * delta.num_value_heads, h),
        ParameterShape("conv.weight", (2 * keys + values, delta.conv_kernel), "layer"),
        ParameterShape("dt_bias", (delta.num_value_heads,), "layer"),
        ParameterShape("A_log", (delta.num_value_heads,), "layer"),
        ParameterShape("delta_norm.weight", (delta.value_head_dim,), "layer"),
        *_linear("out_proj", h, values),
    ]


_MIXERS = {"attention": _attention, "latent": _latent, "mamba": _mamba, "delta": _delta}


# --- feed-forwards ------------------------------------------------------------------------------------------------


def _experts(model: TransformerConfig) -> list[ParameterShape]:
    """Return the shapes of experts; gate and up of routed ones are one tensor with two halves, the operand of grouped GEMMs."""
    experts = model.parts.experts
    assert experts is not None
    h, e, f = model.hidden_size, experts.num_experts, experts.width
    up = (e, 2, f) if experts.gated else (e, f)
    shapes = _linear("router", e, h, bias=experts.router_bias)
    for name, rows, columns in (("experts_up", up, h), ("experts_down", (e, h), f)):
        shapes.append(ParameterShape(f"{name}.weight", (*rows, columns), "layer"))
        if experts.bias:
            shapes.append(ParameterShape(f"{name}.bias", rows, "layer"))
    if experts.shared_width:
        shapes += _mlp("shared_", h, experts.shared_width, gated=experts.gated, bias=experts.bias)
        if experts.shared_gate:
            shapes += _linear("shared_gate", 1, h)
    return shapes


def _mlp(prefix: str, hidden: int, width: int, *, gated: bool, bias: bool) -> list[ParameterShape]:
    shapes = _linear(f"{prefix}gate_proj", width, hidden, bias=bias) if gated else []
    shapes += _linear(f"{prefix}up_proj", width, hidden, bias=bias)
    return shapes + _linear(f"{prefix}down_proj", hidden, width, bias=bias)


def _linear(name: str, rows: int, columns: int, *, bias: bool = False) -> list[ParameterShape]:
    weight = ParameterShape(f"{name}.weight", (rows, columns), "layer")
    return [weight, ParameterShape(f"{name}.bias", (rows,), "layer")] if bias else [weight]
