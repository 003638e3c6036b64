"""Builder of a decoder's operators, in order, with the logical names of their dims in rule sets.

Dims: b sequences, s positions, h hidden, g key-value heads, r query heads for each of them, c copies of a key-value head, d head dim, f
feed-forward, v vocabulary, p positions of the learned table; q and z are query and key positions inside attention. A word such as `g_norm`
is dim g with another logical name.

Latent attention: qa the queries' latent, kva the latent of keys and values with the shared rotary key, lat and rope these two, kvb a head's
key without positions and its value, nope and val these two, qk a query or key head. Multi-token-prediction modules: hn the next token's
embedding, hh its concatenation with h. Mixers with a state: m groups of heads, mh heads of a group; for each group mi the projection, mc
the convolution, mo the output, mb strengths and decays; mv a value head, mt taps of the convolution.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import starmap
from operator import attrgetter
from types import MappingProxyType
from typing import cast

from perfmodel.foundation.copies import Copies
from perfmodel.foundation.session import session_cache
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.graph import INDEX_BYTES, DimRoles, Operand, Operator, Tensor, TensorRole
from perfmodel.workload.kinds.attention import rotary
from perfmodel.workload.kinds.dense import dropout, einsum, elementwise, identity, layer_norm, rms_norm
from perfmodel.workload.kinds.pieces import piece
from perfmodel.workload.kinds.vocabulary import embedding
from perfmodel.workload.layer_specs import Experts
from perfmodel.workload.quantization import WeightPart
from perfmodel.workload.routing import EVEN, RankRows

#: Word -> logical name of the dim in rule sets; the dim is the part of the word before `_`.
LOGICAL = {
    "b": "batch", "s": "s", "s_res": "s_res", "q": "s_query", "z": "s_key", "h": "hidden", "g": "kv_heads", "r": "q_per_kv",
    "g_norm": "norm_kv_heads", "r_norm": "norm_q_per_kv", "g_attn": "attn_kv_heads", "r_attn": "attn_q_per_kv", "c": "kv_copies",
    "d": "head_dim", "f": "ffn", "v_in": "vocab_in", "v_out": "vocab_out", "p": "positions",
    "b_x": "expert_batch", "s_x": "expert_s", "t": "expert_s", "t_res": "expert_s_res", "e": "experts", "x": "experts_route",
    "k": "choices", "n": "choices", "y": "halves", "w": "expert_ffn", "e_all": "all_experts",
    "w_all": "all_expert_ffn", "u": "shared_ffn", "o": "column",
    "qa": "query_latent", "kva": "latent_and_rope", "lat": "latent", "rope": "rope", "kvb": "nope_and_value", "nope": "nope",
    "val": "value_dim", "qk": "score_dim", "hh": "joint_hidden", "hn": "next_hidden",
    "s_scan": "s_scan", "m": "state_groups", "m_scan": "scan_groups", "mi": "group_projected", "mc": "group_convolved",
    "mo": "group_output", "mh": "heads_of_group", "mb": "strengths_and_decays", "mv": "state_value_dim", "mt": "taps",
    "ih": "index_heads", "id": "index_dim", "it": "index_top",
}  # fmt: skip
PER_SAMPLE, STRETCHED, PADDED = "b", "c", "v"
#: Dims that count tokens: positions, queries, keys, rows of an expert.
PER_TOKEN = frozenset(("s", "q", "z", "t"))
#: Dims that no axis may shard, in any operator.
UNSPLIT = frozenset(
    ("d", "qa", "kva", "lat", "rope", "kvb", "nope", "val", "qk", "hh", "hn", "mi", "mc", "mo", "mh", "mb", "mv", "mt", "ih", "id", "it")
)

NO_PARTS: Mapping[str, float] = MappingProxyType({})


def sizes_of(model: TransformerConfig, seq_len: int, rank_rows: RankRows = EVEN) -> dict[str, int]:
    """Return the size of each dim; the batch is a quantity of the plan.

    seq_len     0: a quantity of the plan too; dims that count tokens then have sizes relative to it
    rank_rows   rows per expert and per token, over the mean
    """
    kv_heads, length = model.num_key_value_heads, seq_len or 1
    sizes = {
        "b": 1, "s": length, "q": length, "z": length, "h": model.hidden_size, "g": kv_heads, "r": model.num_attention_heads // kv_heads,
        "c": 1, "d": model.head_dim, "f": model.intermediate_size, "v": model.vocab_size,
    }  # fmt: skip
    if "dense" not in map(attrgetter("feed_forward"), model.layer_kinds):
        del sizes["f"]
    if model.positions.position == "learned":
        sizes["p"] = model.num_position_rows
    if (experts := model.parts.experts) is not None:
        # Mean rows of one expert, and of one token: sizes that need not be integers.
        rows = rows_of_expert(seq_len, experts, rank_rows)
        sizes |= {
            "t": rows,
            "e": experts.num_experts,
            "x": experts.num_experts,
            "k": size_of(experts.top_k * rank_rows.held),
            "y": 2,
            "w": experts.width,
        } | ({"n": size_of(experts.top_k * rank_rows.once.sent)} if rank_rows.once else {})
        sizes |= {"u": experts.shared_width, "o": 1} if experts.shared_width else {}
    if (latent := model.parts.latent) is not None:
        sizes |= {
            "kva": latent.key_value_rank + latent.rope_head_dim, "lat": latent.key_value_rank, "rope": latent.rope_head_dim,
            "kvb": latent.nope_head_dim + latent.value_head_dim, "nope": latent.nope_head_dim, "val": latent.value_head_dim,
            "qk": latent.score_head_dim,
        } | ({"qa": latent.query_rank} if latent.query_rank else {})  # fmt: skip
    if latent is not None and latent.index_heads:
        sizes |= {"ih": latent.index_heads, "id": latent.index_head_dim, "it": min(latent.index_top, seq_len or latent.index_top)}
    if model.num_mtp_layers:
        sizes |= {"hn": model.hidden_size, "hh": 2 * model.hidden_size}
    if (mamba := model.parts.mamba) is not None:
        groups, heads, width, _ = mamba.state_shape
        inner, mixed = heads * width, mamba.group_channels
        sizes |= {"m": groups, "mh": heads, "mo": inner, "mc": mixed, "mi": inner + mixed + heads, "mt": mamba.conv_kernel}
    if (delta := model.parts.delta) is not None:
        groups, heads, _, width = delta.state_shape
        inner, mixed = heads * width, delta.group_channels
        sizes |= {"m": groups, "mh": heads, "mo": inner, "mc": mixed, "mi": mixed + inner, "mb": 2 * heads}
        sizes |= {"mv": width, "mt": delta.conv_kernel}
    return sizes


@session_cache(maxsize=1024)
def dims_of(words: str) -> tuple[str, ...]:
    """Return the dim of each word: g of `g_norm`."""
    return tuple(word.partition("_")[0] for word in words.split())


@session_cache(maxsize=1024)
def roles_of(words: str, names: tuple[str, ...], *, sums: tuple[str, ...], unsplit: tuple[str, ...], counts_tokens: bool) -> DimRoles:
    """Return the roles of an operator's dims `names`. counts_tokens: the sequence length is a quantity of the plan."""
    return DimRoles(
        sums=sums,
        unsplit=tuple(name for name in names if name in UNSPLIT or name in unsplit),
        padded=tuple(name for name in names if name == PADDED),
        logical=dict(zip(dims_of(words), map(LOGICAL.__getitem__, words.split()), strict=True)),
        per_sample=tuple(name for name in names if name == PER_SAMPLE),
        per_token=tuple(name for name in names if name in PER_TOKEN) if counts_tokens else (),
        stretched=tuple(name for name in names if name == STRETCHED),
    )


_MOST_PARTS = 10_000
"""Largest denominator of a given skew or capacity, so that integer row counts are exact."""


def rows_of_expert(seq_len: int, experts: Experts, rank_rows: RankRows) -> int:
    """Return the mean rows of an expert for a sequence, or for one token where the sequence length is a quantity."""
    if seq_len:
        return size_of(seq_len * experts.top_k * rank_rows.computed / experts.num_experts)
    computed = Fraction(rank_rows.computed).limit_denominator(_MOST_PARTS)
    if float(computed) != rank_rows.computed:  # from counted rows: a mean that is not an integer anyway
        return size_of(experts.top_k * rank_rows.computed / experts.num_experts)
    return cast("int", computed * Fraction(experts.top_k, experts.num_experts))


def size_of(value: float) -> int:
    return int(value) if value == int(value) else cast("int", value)


@dataclass(slots=True)
class DecoderBuilder:
    """Collector of a layer's operators and tensors; each method adds one operator and returns its output tensor.

    Dims are words separated by spaces; those of an operator may select a logical name (`g_norm`), those of tensors are bare.

    region, prefix   to which the following operators belong, and of the names of operators and tensors in it
    other fields are arguments of `build_graph`
    """

    model: TransformerConfig
    seq_len: int
    activation_bytes: float
    parameter_bytes: float
    sizes: Mapping[str, int]
    operators: list[Operator] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    attention: str = "flash"
    drops: bool = False
    weight_form_kv: bool = True
    shares_queries: bool = True
    dispatcher: str = "alltoall"
    rank_rows: RankRows = EVEN
    weights_in_experts: bool = False
    absorbs: bool = False
    region: str = "embedding"
    prefix: str = ""

    def parameter(self, name: str, dims: str, num_rows: int, *, bias_of: str = "", part: WeightPart = "other") -> str:
        shape, role, name = tuple(self.of(dims).values()), TensorRole.PARAMETER, self.prefix + name
        bias_of = bias_of and self.prefix + bias_of
        self.tensors[name] = Tensor(
            name=name, shape=shape, role=role, itemsize=self.parameter_bytes, num_rows=num_rows, bias_of=bias_of, part=part
        )
        return name

    def index(self, name: str, dims: str) -> str:
        self.tensors[name] = Tensor(name=name, shape=tuple(self.of(dims).values()), role=TensorRole.INDEX, itemsize=INDEX_BYTES)
        return name

    def of(self, dims: str) -> dict[str, int]:
        """Return the sizes of an operator's dims."""
        names = dims_of(dims)
        return dict(zip(names, map(self.sizes.__getitem__, names), strict=True))

    def part_of_token(self, tokens: int) -> int:
        """Return 1/tokens, the share of one token, where the sequence length is a quantity of the plan; else 0."""
        return 0 if self.seq_len else cast("int", Fraction(1, tokens))

    def add(
        self,
        operator: Operator,
        dims: str,
        *,
        unsplit: str = "",
        group: str = "",
        itemsize: float = 0.0,
        is_set: bool = False,
        copies: Copies | None = None,
        exchanged: float = 1.0,
        is_counted: bool = False,
        parts: Mapping[str, float] = NO_PARTS,
    ) -> str:
        """Add an operator with the logical names of its dims; return its output tensor."""
        tensor = self.prefix + operator.output.tensor
        shape = tuple(map(operator.dims.__getitem__, operator.output.dims))
        bytes_each = itemsize or self.activation_bytes
        self.tensors[tensor] = Tensor(
            name=tensor, shape=shape, itemsize=bytes_each, is_set=is_set, copies=copies, exchanged=exchanged, is_counted=is_counted
        )
        unsplit_dims, sums = (*operator.roles.unsplit, *unsplit), operator.roles.sums
        roles = roles_of(dims, tuple(operator.dims), sums=sums, unsplit=unsplit_dims, counts_tokens=not self.seq_len)
        self.operators.append(
            replace(
                operator,
                name=self.prefix + operator.name,
                output=Operand(tensor=tensor, dims=operator.output.dims),
                layer=self.region,
                group=group,
                parts=parts or operator.parts,
                roles=roles,
            )
        )
        return tensor

    def set_role(self, tensor: str, role: TensorRole) -> None:
        self.tensors[tensor] = replace(self.tensors[tensor], role=role)

    # --- pieces ---------------------------------------------------------------------------------------------

    def product(
        self,
        name: str,
        dims: str,
        x: tuple[str, str],
        y: tuple[str, str],
        output: tuple[str, str],
        *,
        group: str = "",
        grouped: bool = False,
        itemsize: float = 0.0,
    ) -> str:
        parameter = self.tensors[y[0]].role is TensorRole.PARAMETER
        operands = operand(*x), operand(*y), operand(*output)
        operator = einsum(name, *operands, self.of(dims), second_is_parameter=parameter, grouped=grouped)
        return self.add(operator, dims, group=group, itemsize=itemsize)

    def linear(
        self,
        name: str,
        x: str,
        dims: str,
        x_dims: str,
        weight_dims: str,
        num_rows: int,
        out_dims: str,
        *,
        grouped: bool = False,
        itemsize: float = 0.0,
        part: WeightPart = "attention",
    ) -> str:
        weight = self.parameter(f"{name}.weight", weight_dims, num_rows, part=part)
        return self.product(name, dims, (x, x_dims), (weight, weight_dims), (f"{name}.out", out_dims), grouped=grouped, itemsize=itemsize)

    def pointwise(self, name: str, function: str, inputs: list[tuple[str, str]], dims: str) -> str:
        operands = tuple(starmap(operand, inputs))
        return self.add(elementwise(name, function, operands, operand(f"{name}.out", inputs[0][1]), self.of(dims)), dims)

    def bias(self, name: str, x: str, dims: str, tensor_dims: str, bias_dims: str) -> str:
        vector = self.parameter(f"{name}.bias", bias_dims, len(bias_dims.split()), bias_of=name)
        return self.pointwise(f"{name}_bias", "bias", [(x, tensor_dims), (vector, bias_dims)], dims)

    def norm(
        self, name: str, x: str, dims: str = "b s_res h", tensor_dims: str = "b s h", over: str = "h", weight_dims: str = "", rows: int = 1
    ) -> str:
        """Add a norm over the dims `over`; `weight_dims`: dims of the weight, where it has more; `rows` of them are its dim 0."""
        layernorm = self.model.norms.norm == "layernorm"
        weight_dims = weight_dims or over
        x_operand, output = operand(x, tensor_dims), operand(f"{name}.out", tensor_dims)
        weight = operand(self.parameter(f"{name}.weight", weight_dims, rows), weight_dims)
        normalised = tuple(over.split())
        if layernorm:
            shift = operand(self.parameter(f"{name}.bias", weight_dims, rows), weight_dims) if self.model.biases.norm_bias else None
            return self.add(layer_norm(name, x_operand, weight, shift, output, self.of(dims), over=normalised), dims)
        return self.add(rms_norm(name, x_operand, weight, output, self.of(dims), over=normalised), dims)

    def qk_norm(self, name: str, x: str, dims: str, heads: str) -> str:
        """Add the norm of queries or keys. A norm over all heads together needs them unsharded in every rule set."""
        match self.model.norms.qk_norm_scope:
            case "head":
                return self.norm(name, x, dims, dims, "d")
            case "own":
                return self.norm(name, x, dims, dims, "d", f"{heads} d", len(heads.split()))
            case "bare":
                operator = rms_norm(name, operand(x, dims), None, operand(f"{name}.out", dims), self.of(dims), over=("d",))
                return self.add(operator, dims)
            case "all":
                shared_dims = " ".join(f"{d}_norm" if d in heads.split() else d for d in dims.split())
                return self.norm(name, x, shared_dims, dims, f"{heads} d", rows=len(heads.split()) + 1)

    def rotary(self, name: str, x: str, dims: str, *, tensor_dims: str = "", head_dim: int = 0, start: int | None = None) -> str:
        """Add a rotary embedding of the full head, or of `head_dim` entries from `start`."""
        tensor_dims = tensor_dims or dims
        x_operand, output = operand(x, tensor_dims), operand(f"{name}.out", tensor_dims)
        return self.add(rotary(name, x_operand, output, self.of(dims), head_dim=head_dim or self.model.head_dim, start=start), dims)

    def piece(self, name: str, x: str, x_dims: str, dims: str, output_dims: str, *, start: int) -> str:
        """Add a view of entries of the last position of `x` from `start` on."""
        return self.add(piece(name, operand(x, x_dims), operand(f"{name}.out", output_dims), self.of(dims), start=start), dims)

    def dropout(self, name: str, x: str, dims: str = "b s_res h", tensor_dims: str = "b s h", *, group: str = "") -> str:
        operator = dropout(name, operand(x, tensor_dims), operand(f"{name}.out", tensor_dims), self.of(dims))
        return self.add(operator, dims, group=group)

    def sum(self, name: str, x: str, y: str) -> str:
        return self.pointwise(name, "add", [(x, "b s h"), (y, "b s h")], "b s_res h")

    def identity(self, name: str, x: str) -> str:
        dims = "b s_res h"
        return self.add(identity(name, operand(x, "b s h"), operand(f"{name}.out", "b s h"), self.of(dims)), dims)

    def embedding(self, name: str, ids: str, ids_dims: str, table_name: str, dims: str, table_dims: str) -> str:
        """Add a lookup of the indices `ids`; a table that exists already is read again."""
        ids_operand = operand(self.index(ids, ids_dims), ids_dims)
        known = table_name if table_name in self.tensors else self.parameter(table_name, table_dims, 1)
        table = operand(known, table_dims)
        return self.add(embedding(name, ids_operand, table, operand(f"{name}.out", "b s h"), self.of(dims)), dims)


def operand(tensor: str, dims: str) -> Operand:
    return Operand(tensor=tensor, dims=tuple(dims.split()))
