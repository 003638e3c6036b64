"""Rules of model families that `families.json` names: windows, positions, groups of experts; mixer and feed-forward of each layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from perfmodel.foundation.errors import bad_field
from perfmodel.workload.config import MAX_LAYERS, printable
from perfmodel.workload.config_fields import ConfigFields, Values, every_of, no_rotary_every_of, window_of
from perfmodel.workload.layer_specs import Experts, FeedForward, Mixer

Layers = list[tuple[Mixer, FeedForward]]


# --- windows and positions ------------------------------------------------------------------------------------------


def window(fields: ConfigFields, condition: str, *, every: int) -> Values:
    """Return the sliding window: `always`, where its key is `given`, or where it is `given or of the class`."""
    is_used = condition == "always" or fields.has("sliding_window") or (condition != "given" and bool(fields.defaults))
    return window_of(fields, used=is_used, every=every)


def qwen_window(fields: ConfigFields, known: Values) -> Values:
    """Return the window: Qwen's layers from `max_window_layers` on have it, if `use_sliding_window` is set."""
    used = fields.flag("use_sliding_window", default=False)
    if used and not fields.has("layer_types") and fields.has("sliding_window"):
        first, layers = fields.count("max_window_layers", default=28), fields.count("num_hidden_layers")
        if 0 < first < layers:
            rule = f"layers 0 to {printable(first - 1)} ignore the window and the others do not, which is not modelled"
            raise bad_field("max_window_layers", printable(first), rule, "set use_sliding_window=false")
        used = first <= 0
    return window_of(fields, used=used, every=0)


def exaone_window(fields: ConfigFields, known: Values) -> Values:
    """Return the window, and the positions of the layers that have it; a pattern may be a text with a letter for each layer."""
    pattern = fields.data.get("sliding_window_pattern")
    every = len(pattern) if isinstance(pattern, str) else fields.count("sliding_window_pattern", default=4)
    values = window_of(fields, used=fields.has("sliding_window"), every=every)
    return values | (_rotary(values["full_attention_every"]) if values["sliding_window"] else {})


def rotary_with_window(fields: ConfigFields, known: Values) -> Values:
    return _rotary(known["full_attention_every"]) if known["sliding_window"] else {"position": "none"}


def no_rotary_layers(fields: ConfigFields, known: Values) -> Values:
    return _rotary(no_rotary_every_of(fields))


def _rotary(no_rotary_every: int) -> Values:
    return {"position": "none"} if no_rotary_every == 1 else {"position": "rotary", "no_rotary_every": no_rotary_every}


def dense_width_and_chunks(fields: ConfigFields, known: Values) -> Values:
    """Return the width of Llama 4's dense layers, if there are any, its chunks, and the positions of the layers without them."""
    width = {"intermediate_size": fields.count("intermediate_size_mlp")} if ("attention", "dense") in known["_layers"] else {}
    interval = fields.count("no_rope_layer_interval", default=4)
    no_rotary = no_rotary_every_of(fields) if fields.data.get("no_rope_layers") else interval
    words = fields.of_each_layer("layer_types", ("chunked_attention", "full_attention"), fields.num_layers())
    full = [word == "full_attention" for word in words]
    every = every_of(fields, "layer_types", full) if words else no_rotary
    chunk = 0 if "attention_chunk_size" in fields.data and not fields.has("attention_chunk_size") else fields.count("attention_chunk_size")
    cut = chunk > 0 and not all(full or [False])
    return {**width, **_rotary(no_rotary), "attention_chunk": chunk if cut else 0, "full_attention_every": every if cut else 0}


# --- blocks and parts -----------------------------------------------------------------------------------------------


def falcon_block(fields: ConfigFields, known: Values) -> Values:
    """Return heads, positions and norms; models of 40B and later have grouped heads, and two norms unless num_ln_in_parallel_attn is 1."""
    heads, position = known["num_attention_heads"], "alibi" if fields.flag("alibi", default=False) else "rotary"
    new_block = fields.flag("new_decoder_architecture", default=False)
    parallel = new_block or fields.flag("parallel_attn", default=True)
    if new_block:
        kv_heads = fields.count("num_kv_heads", "n_head_kv", default=heads)
        shared_norm = fields.count("num_ln_in_parallel_attn", default=2) == 1
    else:
        kv_heads = 1 if fields.flag("multi_query", default=True) else heads
        shared_norm = parallel
    return {"num_key_value_heads": kv_heads, "position": position, "parallel_block": parallel, "shared_norm": shared_norm}


def expert_groups(fields: ConfigFields, known: Values) -> Values:
    """Return the groups of DeepSeek's experts, which greedy selection ignores."""
    in_groups = fields.data.get("topk_method") != "greedy"
    keys = {"_num_groups": "n_group", "_top_groups": "topk_group"}
    return {name: fields.count(key, default=1) if in_groups else 1 for name, key in keys.items()}


def one_key_of_each_head(fields: ConfigFields, known: Values) -> Values:
    heads = fields.count("num_attention_heads")
    kv_heads = fields.count("num_key_value_heads", default=heads)
    if kv_heads != heads:
        rule = f"contradicts kv_lora_rank: latent attention makes keys and values for each of the num_attention_heads={printable(heads)}"
        fields.faults.append(str(bad_field("num_key_value_heads", printable(kv_heads), rule, "correct one of the two")))
    return {}


def one_indexer_of_each_layer(fields: ConfigFields, known: Values) -> Values:
    if any(kind != "full" for kind in fields.entries("indexer_types")):
        fields.refuse("indexer_types", "layers that share an indexer are not modelled yet", "only layers with one each are")
    return {}


def softmax_attention_only(fields: ConfigFields, known: Values) -> Values:
    if any(kind != 1 for kind in fields.entries("attn_type_list")):
        fields.refuse("attn_type_list", "lightning attention is not modelled yet", "only layers of type 1 are")
    return {}


def mtp_modules(fields: ConfigFields, known: Values) -> Values:
    return {"num_mtp_layers": fields.count("num_mtp_modules", default=0) if fields.flag("use_mtp", default=False) else 0}


def nemotron_experts(fields: ConfigFields, known: Values) -> Values:
    """Return the experts and the number of layers, which the blocks of the layers determine."""
    layers: Layers = known["_layers"]
    values: Values = {"num_hidden_layers": len(layers)}
    if ("none", "experts") in layers:
        fields.must_be("num_nextn_predict_layers", 0, "modules of several layers that predict further tokens are")
        values["experts"] = fields.record(
            Experts,
            num_experts=fields.count("n_routed_experts"),
            top_k=fields.count("num_experts_per_tok"),
            width=fields.count("moe_intermediate_size"),
            gated=False,
            bias=known["_mlp_bias"],
            shared_width=fields.count("moe_shared_expert_intermediate_size"),
            score="sigmoid",
            num_groups=fields.count("n_group", default=1),
            top_groups=fields.count("topk_group", default=1),
        )
    return values


#: Rules by the names that `families.json` uses.
RULES: Mapping[str, Callable[[ConfigFields, Values], Values]] = {
    rule.__name__: rule
    for rule in (
        qwen_window, exaone_window, rotary_with_window, no_rotary_layers, dense_width_and_chunks, falcon_block, expert_groups,
        one_key_of_each_head, one_indexer_of_each_layer, softmax_attention_only, mtp_modules, nemotron_experts,
    )
}  # fmt: skip


# --- layers ---------------------------------------------------------------------------------------------------------


def every_sparse_step(fields: ConfigFields) -> Layers:
    """Return layers of which every `decoder_sparse_step`-th has experts, except those in `mlp_only_layers`."""
    num_layers = fields.num_layers()
    step, dense = max(1, fields.count("decoder_sparse_step", default=1)), fields.indices("mlp_only_layers", num_layers)
    return [("attention", "experts" if i not in dense and (i + 1) % step == 0 else "dense") for i in range(num_layers)]


def after_dense_layers(fields: ConfigFields, mixer: Mixer = "attention") -> Layers:
    """Return layers whose first ones are dense: `first_k_dense_replace` of them, or by `mlp_layer_types`."""
    num_layers = fields.num_layers()
    fields.must_be("moe_layer_freq", 1, "experts in every n-th layer are")
    words: Sequence[str] = fields.of_each_layer("mlp_layer_types", ("dense", "sparse"), num_layers)
    if not words:
        dense = fields.count("first_k_dense_replace")
        words = ["dense" if i < dense else "sparse" for i in range(num_layers)]
    return [(mixer, "dense" if word == "dense" else "experts") for word in words]


def every_moe_step(fields: ConfigFields) -> Layers:
    num_layers = fields.num_layers()
    step = max(1, fields.count("interleave_moe_layer_step", default=1))
    sparse = set(fields.indices("moe_layers", num_layers) if fields.has("moe_layers") else range(step - 1, num_layers, step))
    return [("attention", "experts" if i in sparse else "dense") for i in range(num_layers)]


def every_n_th_of_a_range(fields: ConfigFields) -> Layers:
    num_layers = fields.num_layers()
    first, last = fields.count("moe_layer_start_index"), fields.count("moe_layer_end_index", default=-1)
    every = max(1, fields.count("moe_layer_interval", default=1))
    sparse = range(first, num_layers if last == -1 else last + 1)
    return [("attention", "experts" if i in sparse and (i + 1) % every == 0 else "dense") for i in range(num_layers)]


def _with_delta(fields: ConfigFields, layers: Layers) -> Layers:
    """Return layers with attention in every fourth one, a gated delta network in the others, unless `layer_types` lists them."""
    words: Sequence[str] = fields.of_each_layer("layer_types", ("linear_attention", "full_attention"), len(layers))
    if not words:
        every = max(1, fields.count("full_attention_interval", default=4))
        words = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(len(layers))]
    return [("delta" if word == "linear_attention" else "attention", feed) for word, (_, feed) in zip(words, layers, strict=True)]


_BLOCKS: Mapping[str, tuple[Mixer, FeedForward]] = {
    "M": ("mamba", "none"),
    "*": ("attention", "none"),
    "-": ("none", "dense"),
    "E": ("none", "experts"),
}
_BLOCK_OF_WORD = {"mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*", "mlp": "-", "moe": "E"}


def blocks_by_letter(fields: ConfigFields) -> Layers:
    """Return the kind of each layer: one letter each, or one word of `layers_block_type` (newer files, without a number of layers)."""
    pattern = fields.data.get("hybrid_override_pattern")
    if pattern is None:
        listed = fields.entries("layers_block_type")
        words = fields.of_each_layer("layers_block_type", tuple(_BLOCK_OF_WORD), len(listed))
        pattern = "".join(_BLOCK_OF_WORD[word] for word in words)
    if not isinstance(pattern, str) or not pattern or set(pattern) - set(_BLOCKS):
        rule = f"must have a letter for each layer: {' '.join(_BLOCKS)}"
        fields.refuse("hybrid_override_pattern", rule, "M is Mamba-2, * attention, - an MLP, E experts")
        return [("attention", "dense")]
    if fields.has("num_hidden_layers") and fields.count("num_hidden_layers") != len(pattern):
        fields.refuse("num_hidden_layers", f"contradicts the {len(pattern)} letters of hybrid_override_pattern", "correct one of the two")
    return [_BLOCKS[letter] for letter in pattern[:MAX_LAYERS]]


#: Mixer and feed-forward of every layer, by the names that `families.json` uses.
LAYERS: Mapping[str, Callable[[ConfigFields], Layers]] = {
    **{
        layers.__name__: layers
        for layers in (every_sparse_step, after_dense_layers, every_moe_step, every_n_th_of_a_range, blocks_by_letter)
    },
    "latent_after_dense_layers": lambda fields: after_dense_layers(fields, "latent"),
    "delta_with_sparse_steps": lambda fields: _with_delta(fields, every_sparse_step(fields)),
    "delta_with_dense": lambda fields: _with_delta(fields, [("attention", "dense")] * fields.num_layers()),
    "delta_with_experts": lambda fields: _with_delta(fields, [("attention", "experts")] * fields.num_layers()),
}
