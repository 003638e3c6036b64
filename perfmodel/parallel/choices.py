"""The closed choices of a plan: stages of ZeRO, recomputation, schedules, kernels, dispatchers, forms of context parallelism, offloads.

Forms of context parallelism, where one is given (`--cp-form`, the setting `cp_form`):

| form | positions of a rank | keys and values |
|---|---|---|
| all-gather | the r-th chunk of 2 n from either end: equal causal work | all-gathered before attention, gradients scattered after it |
| ring | n chunks in order: the last rank does 2 - 1/n of the mean | sent from rank to rank during the products, two blocks at a time |
| zigzag | as all-gather | as ring |
| ulysses | all of them, for 1/n of the heads | an all-to-all before attention and one after it |

Sources: Llama 3 (arXiv 2407.21783, section 3.3.2) and torch's default (`_context_parallel`, allgather); Liu et al. 2023 (Ring Attention,
arXiv 2310.01889); zigzag: ring-flash-attention, Megatron-LM's `--cp-comm-type p2p`; Jacobs et al. 2023 (arXiv 2309.14509).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum, StrEnum
from typing import Any

import numpy as np

from perfmodel.foundation.errors import bad_field, one_line, shown, suggest
from perfmodel.foundation.values import several
from perfmodel.parallel.layout import Placement
from perfmodel.workload.config import TransformerConfig


class ZeroStage(IntEnum):
    """State that ZeRO shards over the data axes: 1 optimizer state, 2 also gradients, 3 also parameters (FSDP)."""

    NONE = 0
    OPTIMIZER = 1
    GRADIENTS = 2
    PARAMETERS = 3


ZERO_STAGES = tuple(map(int, ZeroStage))


class Recompute(StrEnum):
    """Part of a layer's forward pass that backward recomputes: nothing, a set of operators, all."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


#: Trait of a schedule -> its value, unless `_TRAITS` has another.
_USUAL: Mapping[str, Any] = {
    "placement": Placement.LOOP,
    "is_simulated": False,
    "splits_backward": False,
    "groups": "",
    "needs_chunks": False,
    "num_chunks": None,
    "microbatches_per_rank": 0,
}
_V: Mapping[str, Any] = {
    "placement": Placement.V, "is_simulated": True, "splits_backward": True, "needs_chunks": True, "num_chunks": 2
}  # fmt: skip
_TRAITS: Mapping[str, Mapping[str, Any]] = {
    "interleaved": {"groups": "ranks", "needs_chunks": True},
    "zero-bubble": {"groups": "rounds", "splits_backward": True},
    "zbv": _V,
    "dualpipev": {**_V, "microbatches_per_rank": 2},
}


class PipelineSchedule(StrEnum):
    """Pipeline schedule: the order in which a rank runs the passes of its micro-batches (`cost/schedules.py`)."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    ZERO_BUBBLE = "zero-bubble"
    ZBV = "zbv"
    DUALPIPEV = "dualpipev"

    #: Name in plan files and in the lists of frameworks.
    listed_as: str
    #: Rank of each virtual stage.
    placement: Placement
    #: The time of a step is that of its simulated orders; others have a closed form.
    is_simulated: bool
    #: Gradients of weights are a pass of their own, which fills bubbles.
    splits_backward: bool
    #: Micro-batches run through the virtual stages of a rank in groups: of `ranks`, or in `rounds` (`num_rounds`). Empty: one by one.
    groups: str
    #: A rank may, and must, hold several virtual stages.
    takes_chunks: bool
    needs_chunks: bool
    #: Virtual stages of a rank, if the schedule exists for one number only.
    num_chunks: int | None
    #: Least micro-batches of a step for each rank, if a step needs more than one.
    microbatches_per_rank: int

    def __init__(self, word: str) -> None:
        self.listed_as = word
        for name, value in {**_USUAL, **_TRAITS.get(word, {})}.items():
            setattr(self, name, value)
        self.takes_chunks = bool(self.groups) or self.needs_chunks

    def admits(self, num_microbatches: Any, num_ranks: int, num_chunks: int = 1) -> Any:
        """Return whether the schedule exists for these numbers of micro-batches, a number or a column, ranks and chunks of a rank."""
        if self.groups == "ranks":
            return num_microbatches % num_ranks == 0
        if self.groups and num_chunks > 1:
            return num_microbatches % num_rounds(num_microbatches, num_ranks) == 0
        return num_microbatches >= max(1, self.microbatches_per_rank * num_ranks)


def num_rounds(num_microbatches: Any, num_ranks: Any) -> Any:
    """Return the number of groups in which torch runs micro-batches, a number or a column, through the virtual stages of each rank."""
    return np.maximum(num_microbatches // num_ranks, 1)


def rounds_rule(num_microbatches: int, num_ranks: int) -> str:
    """Return the number of rounds as text, with its rule."""
    return f"the number of rounds, max(1, {num_microbatches} // pp={num_ranks}) = {num_rounds(num_microbatches, num_ranks)}"


class AttentionKernel(StrEnum):
    """Implementation of attention.

    flash     one fused operator that saves q, k, v, the output and the log-sum-exp
    unfused   separate operators for scores, softmax, dropout and context, on the full square
    """

    FLASH = "flash"
    UNFUSED = "unfused"


class Dispatcher(StrEnum):
    """Dispatch of tokens to experts.

    alltoall    an all-to-all sends each token to the ranks of its experts
    allgather   an all-gather sends all tokens to all ranks, which select theirs
    flex        each token is sent once to each node and rank of its experts; kernels copy and sum on the way (DeepEP, HybridEP)

    """

    ALL_TO_ALL = "alltoall"
    ALL_GATHER = "allgather"
    FLEX = "flex"


#: Dispatchers of every framework; flex needs a library.
USUAL_DISPATCHERS = (Dispatcher.ALL_TO_ALL, Dispatcher.ALL_GATHER)


# --- forms of context parallelism -------------------------------------------------------------------------------------

CONTEXT_FORMS = ALL_GATHER, RING, ZIGZAG, ULYSSES = ("all-gather", "ring", "zigzag", "ulysses")

ULYSSES_RULES = ("ulysses", "megatron-ulysses")
"""Rule sets of that form, without and with tensor parallelism."""

#: Forms that send keys from rank to rank.
RINGS = (RING, ZIGZAG)


def read_context_form(value: object, name: str = "cp_form") -> str:
    """Return one of `CONTEXT_FORMS`. Raises InputError for other names, and for USP, which is not predicted."""
    text = value.strip().lower().replace("_", "-") if isinstance(value, str) else ""
    if text == "usp":
        rule = "Ulysses within a node and a ring between nodes is not predicted"
        raise bad_field(name, "usp", rule, "use ulysses up to the number of key-value heads, else zigzag, which sends more")
    if text not in CONTEXT_FORMS:
        raise bad_field(name, one_line(value), "is not known", f"use one of {', '.join(CONTEXT_FORMS)}")
    return text


def rules_of_form(form: str, *, cp: int, tp: int) -> str | None:
    """Return the rule set of a form; None: the default one."""
    return ULYSSES_RULES[tp > 1] if form == ULYSSES and cp > 1 else None


# --- forms of a loss --------------------------------------------------------------------------------------------------

#: Forms of a loss by the storage of its logits (`frameworks/tiles.py` has their effects).
LOSS_FORMS = WHOLE_LOSS, CHUNKED_LOSS, FUSED_LOSS, UPCAST_LOSS = ("whole", "chunked", "fused", "upcast")

UPCAST_SHARE = 1.0 / 8.0
"""Share of the logits in float32 at a time, of a loss that keeps all logits in 16 bits (torchtune 0.5, `CEWithChunkedOutputLoss`)."""


# --- modules that can be recomputed -----------------------------------------------------------------------------------

_EXPERTS = ("permute", "sort", "experts_up", "experts_activation", "experts_down", "unsort", "unpermute")

#: Module of Megatron-LM's --recompute-modules -> operators that backward recomputes. Their outputs are not saved; the inputs of the first
#: one are.
MODULES: Mapping[str, tuple[str, ...]] = {
    "core_attn": ("attention_core",),
    "layernorm": ("attention_norm", "mlp_norm", "q_a_norm", "kv_a_norm"),
    "mla_up_proj": ("q_b_proj", "q_rotary", "kv_b_proj", "nope_key", "keys", "value", "values"),
    "mlp": ("gate_proj", "up_proj", "activation", "gate_product"),
    "moe_act": ("experts_activation",),
    "moe": ("router", "route", *_EXPERTS),
}


def read_modules(value: object, name: str) -> tuple[str, ...]:
    """Return the named modules, from a list or a text with commas."""
    names = several(value) if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or not names or not all(isinstance(module, str) for module in names):
        raise bad_field(name, shown(value), "must name modules", f"use some of {', '.join(MODULES)}")
    for module in names:
        if module not in MODULES:
            rule = f"is no module that can be recomputed{suggest(module, MODULES)}"
            raise bad_field(name, shown(module), rule, f"use some of {', '.join(MODULES)}")
    return tuple(module for module in MODULES if module in names)


def missing_module(operators: Sequence[str], model: TransformerConfig) -> str:
    """Return a requested module that no layer of the model has; "" if there is none."""
    has = {
        "mla_up_proj": model.parts.latent is not None,
        "mlp": any(kind.feed_forward == "dense" for kind in model.layer_kinds),
        **dict.fromkeys(("moe_act", "moe"), model.parts.experts is not None),
    }
    return next((name for name, is_present in has.items() if not is_present and set(MODULES[name]) <= set(operators)), "")


def useful_modules(model: TransformerConfig) -> tuple[tuple[str, ...], ...]:
    """Return the modules that a search tries, of models with experts or latents: cheap to recompute and large to save."""
    if model.parts.experts is None and model.parts.latent is None:
        return ()
    names = ["layernorm"] + ["mla_up_proj"] * (model.parts.latent is not None) + ["moe_act"] * (model.parts.experts is not None)
    return (tuple(names),)


def recompute_words(recompute: str, operators: Sequence[str]) -> str:
    """Return recomputation as text: the modules by name, unless it is the core of attention alone."""
    names = [name for name, parts in MODULES.items() if set(parts) <= set(operators)]
    return "+".join(names) if recompute == "selective" and names != ["core_attn"] and names else recompute


def module_operators(modules: Sequence[str]) -> tuple[str, ...]:
    """Return the operators of these modules."""
    return tuple(operator for module in modules for operator in MODULES[module])


# --- offloads to host memory ------------------------------------------------------------------------------------------

#: State that `--offload checkpoints,optimizer` moves to host memory -> its setting.
OFFLOADS = {
    "checkpoints": "checkpoint_offload",
    "activations": "activation_offload",
    "optimizer": "optimizer_offload",
    "parameters": "parameter_offload",
}


def read_offloads(value: object, name: str = "offload") -> tuple[str, ...]:
    """Return the names of offloaded state, from a list or a text with commas; `none` is nothing."""
    texts = value.split(",") if isinstance(value, str) else value
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise bad_field(name, one_line(value), "must be a list of names", f"use {', '.join(OFFLOADS)} or none")
    names = [text.strip().lower() for text in texts]
    if names == ["none"]:
        return ()
    if "none" in names:
        raise bad_field(name, one_line(value), "names none next to others", "write none alone, or ask once with each")
    for text in names:
        if text not in OFFLOADS:
            raise bad_field(name, one_line(text), f"is not known{suggest(text, OFFLOADS)}", f"use {', '.join(OFFLOADS)} or none")
    return tuple(dict.fromkeys(names))
