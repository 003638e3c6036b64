"""The shape of a dense decoder-only transformer, and its parameters counted one by one."""

from dataclasses import dataclass, replace
from math import prod
from typing import Literal, NamedTuple, get_args

from perfmodel.foundation.errors import bad_field
from perfmodel.workload.activations import ACTIVATIONS
from perfmodel.workload.layer_specs import DeltaNet, Experts, FeedForward, LatentAttention, LayerSpec, Mamba, Mixer

# Closed choices that are written into plan files as they are, hence literals and not enums.
Norm = Literal["layernorm", "rmsnorm"]
Position = Literal["learned", "rotary", "alibi", "none"]
QkNormScope = Literal["head", "own", "all"]
Region = Literal["embedding", "layer", "head"]

#: A size beyond this is a mistake in the file; below it, every count of parameters fits a float64 and every tensor an int64.
MAX_SIZE = 2**31 - 1
MAX_LAYERS = 4096  # pipelines are searched stage by stage; no published model is a quarter as deep

_COUNTS = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)
_COUNTS_OR_ZERO = ("sliding_window", "full_attention_every", "position_offset", "no_rotary_every", "attention_chunk", "num_mtp_layers")
_FLAGS = (
    "gated_mlp",
    "qkv_bias",
    "attention_output_bias",
    "mlp_bias",
    "norm_bias",
    "lm_head_bias",
    "tie_word_embeddings",
    "parallel_block",
    "shared_norm",
    "qk_norm",
    "pre_norm",
    "sandwich_norm",
    "embedding_layernorm",
    "attention_sinks",
    "attention_gate",
)
_CHOICES: dict[str, frozenset[str]] = {
    "activation": frozenset(ACTIVATIONS),
    "norm": frozenset(get_args(Norm)),
    "position": frozenset(get_args(Position)),
    "qk_norm_scope": frozenset(get_args(QkNormScope)),
}


class ParameterShape(NamedTuple):
    """One parameter tensor. A matrix is stored as torch.nn.Linear stores it: rows are outputs, columns are inputs."""

    name: str
    shape: tuple[int, ...]
    region: Region

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerConfig:
    """A dense decoder-only transformer; field names are Hugging Face's where it has one.

    architecture          family that the fields were read as: gpt2, opt, llama, mistral, qwen2, ..., megatron
    gated_mlp             act(gate(x)) * up(x) in place of act(up(x))
    parallel_block        attention and MLP read the same residual and are added together
    shared_norm           of a parallel block: one norm serves both branches
    qk_norm               a norm of queries and keys
    qk_norm_scope         head: over head_dim, one weight for all heads; own: over head_dim, a weight for each head (Cohere); all: over
                          all heads together (OLMo 2)
    pre_norm              a norm before attention and before the MLP; without it they have one after them alone (OLMo 2)
    sandwich_norm         a norm after attention and after the MLP (Gemma 2 and 3, GLM-4 0414, OLMo 2)
    sliding_window        keys that a query sees at most; 0: all before it
    full_attention_every  every so many layers one ignores the window (Gemma 2: 2, Gemma 3: 6); 0: none does
    no_rotary_every       every so many layers one has no rotary positions (SmolLM3: 4; its pass over q and k is counted there too); 0: none
    position_offset       unused rows at the head of the learned position table (OPT: 2)
    dropout               on the embedding, the attention weights and each branch, where the software applies it
    attention_sinks       each head has a logit that no key has (gpt-oss)
    attention_gate        attention's output is scaled by the sigmoid of a product as wide as the queries (Qwen3-Next)
    attention_chunk       a query sees the keys of its own chunk of so many alone, but in layers of `full_attention_every`; 0: none
    experts, latent, mamba, delta   what layers of that kind are made of; intermediate_size is that of a dense MLP
    kinds                 the kinds of layers, where there are several; (): all are alike
    num_mtp_layers        modules that predict further tokens, beside the layers (multi-token prediction)
    left_out              what else the file describes and is not counted (a vision tower); "" for nothing
    source                where the numbers are from
    """

    name: str
    architecture: str
    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    gated_mlp: bool
    activation: str
    norm: Norm
    position: Position
    qkv_bias: bool
    attention_output_bias: bool
    mlp_bias: bool
    norm_bias: bool
    lm_head_bias: bool = False
    tie_word_embeddings: bool
    parallel_block: bool = False
    shared_norm: bool = False
    qk_norm: bool = False
    qk_norm_scope: QkNormScope = "head"
    pre_norm: bool = True
    sandwich_norm: bool = False
    sliding_window: int = 0
    full_attention_every: int = 0
    no_rotary_every: int = 0
    position_offset: int = 0
    embedding_layernorm: bool = False
    attention_sinks: bool = False
    attention_gate: bool = False
    attention_chunk: int = 0
    experts: Experts | None = None
    latent: LatentAttention | None = None
    mamba: Mamba | None = None
    delta: DeltaNet | None = None
    kinds: tuple[LayerSpec, ...] = ()
    num_mtp_layers: int = 0
    dropout: float = 0.0
    left_out: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        for field in ("name", "architecture", "left_out", "source"):
            if not isinstance(getattr(self, field), str):
                raise bad_field(field, printable(getattr(self, field)), "must be a text", "write it in quotes")
        for field in _COUNTS:
            _check_count(field, getattr(self, field), 1)
        if self.num_hidden_layers > MAX_LAYERS:
            raise bad_field("num_hidden_layers", self.num_hidden_layers, f"must be {MAX_LAYERS:,} at most", "correct it in the config")
        for field in _COUNTS_OR_ZERO:
            _check_count(field, getattr(self, field), 0)
        for field in _FLAGS:
            if not isinstance(getattr(self, field), bool):
                raise bad_field(field, quoted(getattr(self, field)), "must be true or false", "write one of them")
        for field, choices in _CHOICES.items():
            value = getattr(self, field)
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
        if self.norm_bias and self.norm == "rmsnorm":
            raise bad_field("norm_bias", True, "norm=rmsnorm has no bias", "use norm=layernorm or norm_bias=false")
        if self.shared_norm and not self.parallel_block:
            raise bad_field("shared_norm", True, "only a parallel_block shares a norm", "set parallel_block or clear shared_norm")
        if self.sandwich_norm and self.parallel_block:
            raise bad_field("sandwich_norm", True, "a parallel_block has no norm after each branch", "clear one of the two")
        if not self.pre_norm and not (self.sandwich_norm and not self.parallel_block):
            raise bad_field("pre_norm", False, "then the norms after attention and MLP must stand alone", "set sandwich_norm or pre_norm")
        if self.no_rotary_every and self.position != "rotary":
            raise bad_field("no_rotary_every", self.no_rotary_every, "needs position=rotary", "set it to 0")
        if self.full_attention_every and not self.sliding_window:
            raise bad_field("full_attention_every", self.full_attention_every, "needs a sliding_window", "give the window or set it to 0")
        if self.kinds and sum(kind.count for kind in self.kinds) != self.num_hidden_layers:
            rule = f"must be as many as the layers of its kinds, {sum(kind.count for kind in self.kinds)}"
            raise bad_field("num_hidden_layers", self.num_hidden_layers, rule, "correct the config")
        for kind in self.layer_kinds:
            needed = {kind.mixer, kind.feed_forward} & {"experts", "latent", "mamba", "delta"}
            for part in sorted(needed):
                if getattr(self, part) is None:
                    raise bad_field("kinds", kind.name, f"has layers with {part}, of which nothing is said", f"give {part}")
        if self.position_offset and self.position != "learned":
            raise bad_field("position_offset", self.position_offset, "needs position=learned", "set it to 0")

    @property
    def layer_kinds(self) -> tuple[LayerSpec, ...]:
        """The kinds of layers, in order; one where all are alike."""
        if self.kinds:
            return self.kinds
        mixer: Mixer = "latent" if self.latent is not None else "attention"
        feed_forward: FeedForward = "experts" if self.experts is not None else "dense"
        return (LayerSpec(name="layer", count=self.num_hidden_layers, mixer=mixer, feed_forward=feed_forward),)

    def prefix_of(self, kind: LayerSpec) -> str:
        """Before the names of operators and parameters of a kind of layers; none where all layers are of that kind."""
        return f"{kind.name}." if len(self.layer_kinds) > 1 else ""

    @property
    def num_position_rows(self) -> int:
        """Rows of the learned position table; 0 where positions are not learned."""
        return self.max_position_embeddings + self.position_offset if self.position == "learned" else 0

    @property
    def sliding_layer_fraction(self) -> float:
        """Share of the layers whose attention is cut to `sliding_window`."""
        if not self.sliding_window:
            return 0.0
        if not self.full_attention_every:
            return 1.0
        return 1.0 - (self.num_hidden_layers // self.full_attention_every) / self.num_hidden_layers

    @property
    def num_layer_parameters(self) -> int:
        """Parameters of one layer."""
        return sum(shape.num_elements for shape in self.layer_shapes())

    @property
    def num_parameters(self) -> int:
        """All trainable parameters, a tied matrix once; equals what Hugging Face's model of the same config reports."""
        outside = sum(shape.num_elements for shape in (*self.embedding_shapes(), *self.head_shapes()))
        return self.num_hidden_layers * self.num_layer_parameters + outside

    @property
    def num_parameters_non_embedding(self) -> int:
        """Parameters without the vocabulary and position tables, neither at the input nor at the output: the N of Kaplan et al.,
        arXiv 2001.08361, section 2.1. (Hugging Face's `exclude_embeddings` leaves an untied output matrix in.)"""
        tables = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_parameters - tables - self.num_position_rows * self.hidden_size

    def with_layers(self, num_hidden_layers: int) -> "TransformerConfig":
        """The same model, deeper or shallower; the name tells."""
        if num_hidden_layers == self.num_hidden_layers:
            return self
        return replace(self, num_hidden_layers=num_hidden_layers, name=f"{self.name}-{num_hidden_layers}-layers")

    def embedding_shapes(self) -> tuple[ParameterShape, ...]:
        """Before the first layer: token table, learned positions, norm."""
        h = self.hidden_size
        shapes = [ParameterShape("embedding.weight", (self.vocab_size, h), "embedding")]
        if self.position == "learned":
            shapes.append(ParameterShape("position_embedding.weight", (self.num_position_rows, h), "embedding"))
        if self.embedding_layernorm:
            shapes += self._norm("embedding_norm", h, "embedding")
        return tuple(shapes)

    def layer_shapes(self) -> tuple[ParameterShape, ...]:
        """One layer, in the order of use."""
        h, f, d = self.hidden_size, self.intermediate_size, self.head_dim
        queries, keys = self.num_attention_heads * d, self.num_key_value_heads * d
        shapes = self._norm("attention_norm", h, "layer") if self.pre_norm else []
        for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            shapes += _linear(name, rows, h, bias=self.qkv_bias)
        if self.qk_norm:
            for name, heads in (("q_norm", self.num_attention_heads), ("k_norm", self.num_key_value_heads)):
                shapes += self._norm(name, {"head": (d,), "own": (heads, d), "all": (heads * d,)}[self.qk_norm_scope], "layer")
        shapes += _linear("o_proj", h, queries, bias=self.attention_output_bias)
        if self.sandwich_norm:
            shapes += self._norm("attention_post_norm", h, "layer")
        if self.pre_norm and not self.shared_norm:
            shapes += self._norm("mlp_norm", h, "layer")
        if self.gated_mlp:
            shapes += _linear("gate_proj", f, h, bias=self.mlp_bias)
        shapes += _linear("up_proj", f, h, bias=self.mlp_bias)
        shapes += _linear("down_proj", h, f, bias=self.mlp_bias)
        if self.sandwich_norm:
            shapes += self._norm("mlp_post_norm", h, "layer")
        return tuple(shapes)

    def head_shapes(self) -> tuple[ParameterShape, ...]:
        """After the last layer: norm and, unless tied to the token table, the output matrix."""
        shapes = self._norm("final_norm", self.hidden_size, "head")
        if not self.tie_word_embeddings:
            shapes.append(ParameterShape("lm_head.weight", (self.vocab_size, self.hidden_size), "head"))
        if self.lm_head_bias:
            shapes.append(ParameterShape("lm_head.bias", (self.vocab_size,), "head"))
        return tuple(shapes)

    def parameter_shapes(self) -> tuple[ParameterShape, ...]:
        """Every parameter of the model; those of layer 3 are named `layers.3....`. A tied output matrix is not listed twice."""
        one = self.layer_shapes()
        layers = (shape._replace(name=f"layers.{i}.{shape.name}") for i in range(self.num_hidden_layers) for shape in one)
        return (*self.embedding_shapes(), *layers, *self.head_shapes())

    def _norm(self, name: str, size: int | tuple[int, ...], region: Region) -> list[ParameterShape]:
        shape = (size,) if isinstance(size, int) else size
        weight = ParameterShape(f"{name}.weight", shape, region)
        return [weight, ParameterShape(f"{name}.bias", shape, region)] if self.norm_bias else [weight]


def _linear(name: str, rows: int, columns: int, *, bias: bool) -> list[ParameterShape]:
    weight = ParameterShape(f"{name}.weight", (rows, columns), "layer")
    return [weight, ParameterShape(f"{name}.bias", (rows,), "layer")] if bias else [weight]


def _check_count(field: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise bad_field(field, quoted(value), "must be a whole number", "correct it in the config")
    if not least <= value <= MAX_SIZE:
        raise bad_field(field, printable(value), f"must lie from {least} to {MAX_SIZE}", "correct it in the config")


def printable(value: object) -> object:
    """What a message can show of any value: Python refuses to turn an integer of over 4300 digits into text."""
    if isinstance(value, int):
        return value if abs(value) < 10**20 else "a number of over 20 digits"
    if isinstance(value, (list, tuple, dict)):
        return f"{type(value).__name__} of {len(value)}"
    return value


def quoted(value: object) -> object:
    """Likewise, but a text in quotes: where "4096" stands and 4096 must."""
    return f'"{value}"' if isinstance(value, str) else printable(value)
