"""The shape of a decoder-only transformer and its parameter counts."""

from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields
from dataclasses import field as record_field
from operator import attrgetter
from typing import Any, ClassVar, Literal, Self, get_args

from perfmodel.foundation.errors import bad_field
from perfmodel.foundation.grouped import Grouped, group_of, in_groups
from perfmodel.workload.activations import ACTIVATIONS
from perfmodel.workload.layer_specs import (
    DeltaNet,
    FeedForward,
    LayerSpec,
    Mamba,
    Mixer,
    ParameterShape,
    Parts,
    is_routed,
    kinds_with_layers,
    layer_order,
    norm_shapes,
    shapes_of_layer,
)

# Closed choices: literals, not enums, because plan files contain them unchanged.
Norm = Literal["layernorm", "rmsnorm"]
Position = Literal["learned", "rotary", "alibi", "none"]
QkNormScope = Literal["head", "own", "all", "bare"]

#: A larger size is a mistake in the file; up to it, parameter counts fit a float64 and tensor sizes an int64.
MAX_SIZE = 2**31 - 1
MAX_LAYERS = 4096  # pipelines are searched stage by stage; no published model has a quarter of that depth

MAX_MTP_LAYERS = 16  # published models have one to four

_COUNTS_OR_ZERO = ("sliding_window", "full_attention_every", "position_offset", "no_rotary_every", "attention_chunk", "num_mtp_layers")
_CHOICES: dict[str, frozenset[str]] = {
    "activation": frozenset(ACTIVATIONS),
    "norm": frozenset(get_args(Norm)),
    "position": frozenset(get_args(Position)),
    "qk_norm_scope": frozenset(get_args(QkNormScope)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Positions:
    """Encoding of the positions of tokens.

    position_offset   unused rows at the start of the learned position table (OPT: 2)
    no_rotary_every   every n-th layer has no rotary positions (SmolLM3: 4; its pass over q and k is still counted); 0: all have
    """

    position: Position
    max_position_embeddings: int
    position_offset: int = 0
    no_rotary_every: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Biases:
    """Biases of a model's products and norms."""

    qkv_bias: bool
    attention_output_bias: bool
    mlp_bias: bool
    norm_bias: bool
    lm_head_bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Norms:
    """Norms of a model.

    shared_norm     in a parallel block: one norm for both branches
    qk_norm         norm of queries and keys
    qk_norm_scope   head: over head_dim, one weight for all heads; own: over head_dim, a weight for each head (Cohere); all: over all heads
                    together (OLMo 2); bare: over head_dim, without a weight (Llama 4)
    pre_norm        a norm before attention and before the MLP; without it only norms after them (OLMo 2)
    sandwich_norm   a norm after attention and after the MLP (Gemma 2 and 3, GLM-4 0414, OLMo 2)
    """

    norm: Norm
    shared_norm: bool = False
    qk_norm: bool = False
    qk_norm_scope: QkNormScope = "head"
    pre_norm: bool = True
    sandwich_norm: bool = False
    embedding_layernorm: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionForm:
    """Keys that a query attends to, and variants of attention.

    sliding_window        most keys that a query attends to; 0: all earlier ones
    full_attention_every  every n-th layer ignores the window (Gemma 2: 2, Gemma 3: 6); 0: no layer does
    attention_sinks       each head has a logit without a key (gpt-oss)
    attention_gate        attention's output is scaled by the sigmoid of a projection as wide as the queries (Qwen3-Next)
    attention_chunk       a query attends only to its own chunk of n keys, except in layers of `full_attention_every`; 0: no chunks
    """

    sliding_window: int = 0
    full_attention_every: int = 0
    attention_sinks: bool = False
    attention_gate: bool = False
    attention_chunk: int = 0

    @property
    def window(self) -> int:
        """Most keys that a query attends to, in layers with a sliding window or chunks; 0: there are none."""
        return self.sliding_window or self.attention_chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpForm:
    """Function of the MLP, dense or of an expert.

    gated_mlp    act(gate(x)) * up(x) in place of act(up(x)), in a dense MLP
    activation   act
    """

    gated_mlp: bool
    activation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Family and source of a model's sizes.

    architecture   model family of the config: gpt2, opt, llama, mistral, qwen2, ..., megatron
    left_out       parts in the config that are not counted (a vision tower); "" for none
    source         of the numbers
    """

    architecture: str
    left_out: str = ""
    source: str = ""


_GROUPS: Mapping[str, Any] = {
    "mlp": MlpForm,
    "norms": Norms,
    "positions": Positions,
    "biases": Biases,
    "attention": AttentionForm,
    "parts": Parts,
    "origin": Origin,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerConfig(Grouped):
    """A decoder-only transformer; names of fields, also of those in groups, are Hugging Face's where it has one.

    Files have no groups: `of` and `values` read and write the fields by name. Groups are checked here, in the order of the fields' types:
    the first fault of a file is reported whichever group it is in.

    parallel_block     attention and MLP read the same residual and are added together
    intermediate_size  width of a dense MLP
    num_mtp_layers     multi-token-prediction modules, in addition to the layers
    dropout            on the embedding, the attention weights and each branch, where the software applies it
    layer_kinds        in order; a single one where all layers are equal
    """

    GROUP_OF: ClassVar[Mapping[str, str]] = group_of(_GROUPS)

    name: str
    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    mlp: MlpForm
    norms: Norms
    positions: Positions
    biases: Biases
    tie_word_embeddings: bool
    parallel_block: bool = False
    attention: AttentionForm = AttentionForm()
    parts: Parts = Parts()
    num_mtp_layers: int = 0
    dropout: float = 0.0
    origin: Origin
    layer_kinds: tuple[LayerSpec, ...] = record_field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        values = self.values
        attention, norms, parts, positions = self.attention, self.norms, self.parts, self.positions
        for field in ("name", "architecture", "left_out", "source"):
            if not isinstance(values[field], str):
                raise bad_field(field, printable(values[field]), "must be a text", "write it in quotes")
        for names, least in ((_COUNTS, 1), (_COUNTS_OR_ZERO, 0)):
            for field in names:
                value = values[field]
                if not isinstance(value, int) or isinstance(value, bool):
                    raise bad_field(field, quoted(value), "must be a whole number", "correct it in the config")
                if not least <= value <= MAX_SIZE:
                    raise bad_field(field, printable(value), f"must lie from {least} to {MAX_SIZE}", "correct it in the config")
        if self.num_hidden_layers > MAX_LAYERS:
            raise bad_field("num_hidden_layers", self.num_hidden_layers, f"must be {MAX_LAYERS:,} at most", "correct it in the config")
        if self.num_mtp_layers > MAX_MTP_LAYERS:
            remedy = "correct num_nextn_predict_layers in the config"
            raise bad_field("num_mtp_layers", self.num_mtp_layers, f"must be {MAX_MTP_LAYERS} at most", remedy)
        for field in _FLAGS:
            if not isinstance(values[field], bool):
                raise bad_field(field, quoted(values[field]), "must be true or false", "write one of them")
        for field, choices in _CHOICES.items():
            value = values[field]
            if not isinstance(value, str) or value not in choices:
                raise bad_field(field, printable(value), "is not known here", f"use one of {', '.join(sorted(choices))}")
        if not isinstance(self.dropout, (int, float)) or isinstance(self.dropout, bool) or not 0 <= self.dropout < 1:
            raise bad_field("dropout", printable(self.dropout), "must be a share from 0 to below 1", "0 is none")
        if self.num_attention_heads % self.num_key_value_heads:
            raise bad_field(
                "num_key_value_heads",
                self.num_key_value_heads,
                f"must divide num_attention_heads={self.num_attention_heads}",
                "each key-value head serves the same number of query heads",
            )
        if self.biases.norm_bias and norms.norm == "rmsnorm":
            raise bad_field("norm_bias", True, "norm=rmsnorm has no bias", "use norm=layernorm or norm_bias=false")
        if norms.shared_norm and not self.parallel_block:
            raise bad_field("shared_norm", True, "only a parallel_block shares a norm", "set parallel_block or clear shared_norm")
        if norms.sandwich_norm and self.parallel_block:
            raise bad_field("sandwich_norm", True, "a parallel_block has no norm after each branch", "clear one of the two")
        if not norms.pre_norm and not (norms.sandwich_norm and not self.parallel_block):
            raise bad_field("pre_norm", False, "then the norms after attention and MLP must stand alone", "set sandwich_norm or pre_norm")
        if positions.no_rotary_every and positions.position != "rotary":
            raise bad_field("no_rotary_every", positions.no_rotary_every, "needs position=rotary", "set it to 0")
        if attention.full_attention_every and not attention.window:
            rule = "needs a sliding_window or an attention_chunk"
            raise bad_field("full_attention_every", attention.full_attention_every, rule, "give one or set it to 0")
        if attention.sliding_window and attention.attention_chunk:
            rule = "attention is cut to a sliding_window or to chunks"
            raise bad_field("attention_chunk", attention.attention_chunk, rule, "set one to 0")
        if parts.kinds and sum(kind.count for kind in parts.kinds) != self.num_hidden_layers:
            rule = f"must equal the number of layers of its kinds, {sum(kind.count for kind in parts.kinds)}"
            raise bad_field("num_hidden_layers", self.num_hidden_layers, rule, "correct the config")
        mixer: Mixer = "latent" if parts.latent is not None else "attention"
        feed_forward: FeedForward = "experts" if parts.experts is not None else "dense"
        only = LayerSpec(name="layer", count=self.num_hidden_layers, mixer=mixer, feed_forward=feed_forward)
        object.__setattr__(self, "layer_kinds", parts.kinds or (only,))
        for kind in self.layer_kinds:
            needed = {kind.mixer, kind.feed_forward} & {"experts", "latent", "mamba", "delta"}
            for part in sorted(needed):
                if values[part] is None:
                    raise bad_field("kinds", kind.name, f"has layers with {part}, which are not described", f"give {part}")
        if parts.latent is not None and self.num_key_value_heads != self.num_attention_heads:
            rule = f"must equal num_attention_heads={self.num_attention_heads}: with latent attention every head has its own"
            raise bad_field("num_key_value_heads", self.num_key_value_heads, rule, "correct the config")
        if positions.position_offset and positions.position != "learned":
            raise bad_field("position_offset", positions.position_offset, "needs position=learned", "set it to 0")

    @classmethod
    def of(cls, **values: Any) -> Self:
        """Return the config of fields by name, without groups, as in files."""
        ungrouped, groups = in_groups(values, cls.GROUP_OF)
        for group, make in _GROUPS.items():
            ungrouped[group] = make(**groups.get(group, {}))
        return cls(**ungrouped)

    @property
    def values(self) -> dict[str, Any]:
        """Every field by name, without groups, in the order of files."""
        return dict(zip(FIELDS, _VALUES(self), strict=True))

    @property
    def is_plain(self) -> bool:
        """Whether all layers have dense attention and a dense MLP: their FLOPs follow from the parameters alone."""
        first, *others = self.layer_kinds
        is_dense = (first.name, first.mixer, first.feed_forward, first.turn) == ("layer", "attention", "dense", "")
        return is_dense and not others and not self.attention.attention_chunk

    def recurrence_of(self, mixer: str) -> Mamba | DeltaNet | None:
        """Return the spec of a mixer with a recurrent state; None for other mixers."""
        return {"mamba": self.parts.mamba, "delta": self.parts.delta}.get(mixer)

    def prefix_of(self, kind: LayerSpec) -> str:
        """Return the name prefix of operators and parameters of a layer kind; empty where there is one kind."""
        return f"{kind.name}." if len(self.layer_kinds) > 1 else ""

    @property
    def num_position_rows(self) -> int:
        """Rows of the learned position table; 0 where positions are not learned."""
        positions = self.positions
        return positions.max_position_embeddings + positions.position_offset if positions.position == "learned" else 0

    @property
    def rotary_head_dim(self) -> int:
        """Entries of a query or key head that rotary positions may rotate."""
        latent = self.parts.latent
        return latent.rope_head_dim if latent is not None else self.head_dim

    @property
    def sliding_layer_fraction(self) -> float:
        """Share of layers whose attention has a sliding window or chunks."""
        attention = self.attention
        if not attention.window:
            return 0.0
        if not attention.full_attention_every:
            return 1.0
        return 1.0 - (self.num_hidden_layers // attention.full_attention_every) / self.num_hidden_layers

    @property
    def main_kind(self) -> LayerSpec:
        """The most frequent layer kind; at equal counts the one with experts."""
        return max(self.layer_kinds, key=lambda kind: (kind.count, kind.feed_forward == "experts"))

    @property
    def num_layer_parameters(self) -> int:
        """Parameters of one layer of the main kind."""
        return sum(shape.num_elements for shape in self.layer_shapes())

    @property
    def num_parameters(self) -> int:
        """All trainable parameters, a tied matrix once, without multi-token-prediction modules. Equals the count that Hugging Face's model
        of the same config reports."""
        size = attrgetter("num_elements")
        total = sum(map(size, (*self.embedding_shapes(), *self.head_shapes())))
        for kind in self.layer_kinds:
            total += kind.count * sum(map(size, shapes_of_layer(self, kind)))
        return total

    @property
    def num_active_parameters(self) -> int:
        """Parameters that a token uses: of the routed experts only its top k."""
        return self.num_parameters - sum(kind.count * self._num_passed_over(kind) for kind in self.layer_kinds)

    @property
    def num_active_parameters_without_embedding(self) -> int:
        """Active parameters without the token table, unless it is also the output matrix."""
        return self.num_active_parameters - (0 if self.tie_word_embeddings else self.vocab_size * self.hidden_size)

    @property
    def num_mtp_parameters(self) -> int:
        """Parameters of all multi-token-prediction modules; they share the token table and the output matrix."""
        return self.num_mtp_layers * sum(shape.num_elements for shape in self.mtp_shapes())

    @property
    def num_active_mtp_parameters(self) -> int:
        return self.num_mtp_parameters - self.num_mtp_layers * self._num_passed_over(self.mtp_kind)

    @property
    def num_routed_parameters(self) -> int:
        """Parameters of the routed experts."""
        return sum(kind.count * self._num_routed(kind) for kind in self.layer_kinds)

    def _num_routed(self, kind: LayerSpec) -> int:
        return sum(shape.num_elements for shape in self.layer_shapes(kind) if is_routed(shape))

    def _num_passed_over(self, kind: LayerSpec) -> int:
        """Return the parameters of the experts that a token does not choose, per layer."""
        experts = self.parts.experts
        if experts is None or kind.feed_forward != "experts":
            return 0
        return self._num_routed(kind) // experts.num_experts * (experts.num_experts - experts.top_k)

    @property
    def num_parameters_non_embedding(self) -> int:
        """Parameters without the vocabulary and position tables at input and output. The N of Kaplan et al., arXiv 2001.08361, section 2.1.
        (Hugging Face's `exclude_embeddings` counts an untied output matrix.)"""
        tables = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_parameters - tables - self.num_position_rows * self.hidden_size

    def with_layers(self, num_hidden_layers: int) -> "TransformerConfig":
        """Return the same model with another depth; the name shows it. With several kinds, leading layers keep their count, and alternating
        ones their proportions."""
        if num_hidden_layers == self.num_hidden_layers:
            return self
        kinds = self.parts.kinds
        if kinds and num_hidden_layers > 0:
            kinds = kinds_with_layers(kinds, num_hidden_layers)
        return self.having(num_hidden_layers=num_hidden_layers, kinds=kinds, name=f"{self.name}-{num_hidden_layers}-layers")

    def embedding_shapes(self) -> tuple[ParameterShape, ...]:
        """Return the shapes before the first layer: token table, learned positions, norm."""
        h = self.hidden_size
        shapes = [ParameterShape("embedding.weight", (self.vocab_size, h), "embedding")]
        if self.positions.position == "learned":
            shapes.append(ParameterShape("position_embedding.weight", (self.num_position_rows, h), "embedding"))
        if self.norms.embedding_layernorm:
            shapes += norm_shapes(self, "embedding_norm", h, "embedding")
        return tuple(shapes)

    def layer_shapes(self, kind: LayerSpec | None = None) -> tuple[ParameterShape, ...]:
        """Return the shapes of one layer of a kind (default: the main one), in the order of use."""
        return shapes_of_layer(self, kind or self.main_kind)

    @property
    def mtp_kind(self) -> LayerSpec:
        """Layer kind of multi-token-prediction modules: that of the last layer."""
        return self.layer_kinds[-1]

    def mtp_shapes(self) -> tuple[ParameterShape, ...]:
        """Return the shapes of one multi-token-prediction module (DeepSeek-V3, arXiv 2412.19437, section 2.2). Norms of the hidden state
        and of the next token's embedding, their concatenation projected, one layer, a norm."""
        h = self.hidden_size
        return (
            *norm_shapes(self, "hidden_norm", h),
            *norm_shapes(self, "embedding_norm", h),
            ParameterShape("joint_proj.weight", (h, 2 * h), "layer"),
            *self.layer_shapes(self.mtp_kind),
            *norm_shapes(self, "final_norm", h),
        )

    def head_shapes(self) -> tuple[ParameterShape, ...]:
        """Return the shapes after the last layer: norm and, unless tied to the token table, the output matrix."""
        shapes = norm_shapes(self, "final_norm", self.hidden_size, "head")
        if not self.tie_word_embeddings:
            shapes.append(ParameterShape("lm_head.weight", (self.vocab_size, self.hidden_size), "head"))
        if self.biases.lm_head_bias:
            shapes.append(ParameterShape("lm_head.bias", (self.vocab_size,), "head"))
        return tuple(shapes)

    def parameter_shapes(self) -> tuple[ParameterShape, ...]:
        """Return every parameter of the model; those of layer 3 are named `layers.3....`. A tied output matrix is listed once."""
        of_kind = {kind.name: self.layer_shapes(kind) for kind in self.layer_kinds}
        order = enumerate(layer_order(self.layer_kinds))
        layers = (shape._replace(name=f"layers.{i}.{shape.name}") for i, name in order for shape in of_kind[name])
        return (*self.embedding_shapes(), *layers, *self.head_shapes())


_ORDER = (
    "name", "architecture", "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "vocab_size", "max_position_embeddings", "gated_mlp", "activation", "norm", "position", "qkv_bias",
    "attention_output_bias", "mlp_bias", "norm_bias", "lm_head_bias", "tie_word_embeddings", "parallel_block", "shared_norm", "qk_norm",
    "qk_norm_scope", "pre_norm", "sandwich_norm", "sliding_window", "full_attention_every", "no_rotary_every", "position_offset",
    "embedding_layernorm", "attention_sinks", "attention_gate", "attention_chunk", "experts", "latent", "mamba", "delta", "kinds",
    "num_mtp_layers", "dropout", "left_out", "source",
)  # fmt: skip
_BY_NAME = {field.name: field for record in (TransformerConfig, *_GROUPS.values()) for field in fields(record)}
#: Fields of a config and of its groups by name, in the order of files.
FIELDS: Mapping[str, Field[Any]] = {name: _BY_NAME[name] for name in _ORDER}
_VALUES = attrgetter(*(f"{TransformerConfig.GROUP_OF[name]}.{name}" if name in TransformerConfig.GROUP_OF else name for name in FIELDS))
_COUNTS = tuple(name for name, field in FIELDS.items() if field.type is int and field.default is MISSING)
_FLAGS = tuple(name for name, field in FIELDS.items() if field.type is bool)


def printable(value: object) -> object:
    """Return the value in a printable form: Python refuses to print integers of over 4300 digits."""
    if isinstance(value, int):
        return value if abs(value) < 10**20 else "a number of over 20 digits"
    if isinstance(value, (list, tuple, dict)):
        return f"{type(value).__name__} of {len(value)}"
    return value


def quoted(value: object) -> object:
    """Likewise, with strings in quotes: shows "4096" where 4096 is needed."""
    return f'"{value}"' if isinstance(value, str) else printable(value)
