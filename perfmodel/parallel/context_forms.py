"""Forms of context parallelism, where one is stated: `--cp-form`, the setting `cp_form`.

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

from perfmodel.foundation.errors import bad_field, one_line

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
