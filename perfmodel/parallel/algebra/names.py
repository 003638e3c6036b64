"""Names that a rule set may use: its own name and the logical names of dims."""

import re

from perfmodel.foundation.errors import bad_field, shown

#: Logical names of dims that rule sets may shard (R16). Operators of convolutions define their own.
LOGICAL_NAMES = (
    "batch", "s", "s_res", "s_query", "s_key", "hidden", "kv_heads", "q_per_kv", "kv_copies", "attn_kv_heads", "attn_q_per_kv",
    "head_dim", "ffn", "vocab_in", "vocab_out", "positions",
    "experts", "expert_ffn", "expert_batch", "expert_s", "expert_s_res", "experts_route", "shared_ffn",
    "s_scan", "state_groups", "scan_groups",
)  # fmt: skip

_NAME = re.compile(r"[A-Za-z0-9][\w.+-]{0,39}", re.ASCII)


def check_rule_name(name: object, field: str) -> None:
    """Refuse a value that cannot be the name of a rule set."""
    if not isinstance(name, str) or (name and not _NAME.fullmatch(name)):
        raise bad_field(field, shown(name), "must be letters, digits and . _ + - alone, 40 at most", "give it a short name")
