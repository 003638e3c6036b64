"""Knobs of a plan, defined once: options, arguments, keys of plan files and names in a search come from this record.

A new knob is a field of `Knobs`, and the formula that uses it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfmodel.foundation.errors import InputError, bad_field, shown
from perfmodel.foundation.words import given_words, reader, size, word, words_of
from perfmodel.parallel.choices import AttentionKernel, Dispatcher, PipelineSchedule, Recompute
from perfmodel.parallel.layout import DEFAULT_ORDER, check_order

if TYPE_CHECKING:
    from perfmodel.parallel.algebra.rules import RuleSet
    from perfmodel.parallel.schedule_table import ScheduleTable


def read_rules(value: object, name: str) -> tuple[RuleSet, ...] | None:
    """Return the rule sets of one or several rule sets, names or files; None if the list is empty."""
    from perfmodel.foundation.values import several
    from perfmodel.parallel.algebra.rules import rule_set_of

    rule_sets: list[RuleSet] = []
    for entry in value if isinstance(value, (list, tuple)) else (value,):
        for one in several(entry) if isinstance(entry, str) and not Path(entry).exists() else (entry,):
            rules = rule_set_of(one)
            if rules not in rule_sets:
                rule_sets.append(rules)
    return tuple(rule_sets) or None


def read_order(value: object, name: str) -> tuple[str, ...]:
    """Return the order of axes from `tp-cp-dp_shard-dp_replicate-pp`, also with commas or spelled as flags, or a sequence of names."""
    if isinstance(value, str):
        plain = value.replace("dp-shard", "dp_shard").replace("dp-replicate", "dp_replicate").replace(",", "-")
        value = [axis.strip() for axis in plain.split("-")]
    return check_order(value)


def _zero(value: object, name: str) -> int:
    from perfmodel.foundation.values import read_integer

    try:
        stage = read_integer(value, name, least=0, most=3)
    except InputError:
        raise bad_field(name, shown(value) if not isinstance(value, str) else value, "must be 0, 1, 2 or 3", "use 3 for FSDP") from None
    return stage


_count = partial(word, kind=int)
_searched = partial(_count, is_searched=True)
_choice = partial(word, metavar="NAME")


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """Knobs of a plan; None leaves a knob to its default, or to the search.

    rules  rule sets, their names or files: one for a plan, several for a search
    dp     ranks with different sequences: dp_replicate * dp_shard
    fsdp   dp_shard with ZeRO stage 3
    """

    pp: int | None = _searched("Pipeline-parallel degree", in_files=1)
    dp_replicate: int | None = _searched("Data-parallel replicas", in_files=1)
    dp_shard: int | None = _searched("Data-parallel ranks that shard (FSDP; see --zero)", in_files=1)
    cp: int | None = _searched("Context-parallel degree", in_files=1)
    tp: int | None = _searched("Tensor-parallel degree", in_files=1)
    ep: int | None = _searched("Expert-parallel degree: ranks that split the experts", in_files=1)
    etp: int | None = _searched("Tensor-parallel degree inside an expert", otherwise="1 with --ep, else tp")
    dispatcher: str | None = _choice(
        "How tokens reach experts: alltoall, allgather or flex (once to each node and rank: DeepEP, HybridEP)",
        choices=Dispatcher, is_searched=True, in_files="alltoall",
    )  # fmt: skip
    zero: int | None = _searched("ZeRO stage; 3 is FSDP", metavar="0-3", least=0, in_files=0, read=_zero)
    rules: Sequence[RuleSet] | None = word(
        "How operators are cut by the axes (docs/rules.md)", otherwise="megatron, or megatron-sp with tp, if left out",
        metavar="NAME|FILE", takes="Name | RuleSet", read=read_rules, several=True,
        several_help="Rule sets to try (docs/rules.md), several again and again; megatron and megatron-sp if left out, and for long "
        "sequences the Ulysses of the framework.",
    )  # fmt: skip
    sequence_parallel: bool | None = word("Shard the residual stream over tp", kind=bool, is_searched=True)
    micro_batch: int | None = _searched("Sequences of a rank in one pass", aliases=("--mbs",), in_files=1)
    schedule: str | ScheduleTable | None = word(
        "gpipe, 1f1b, interleaved, zero-bubble, zbv, dualpipev or the CSV file of a schedule (docs/files.md)", metavar="NAME|FILE",
        takes="Name", read=reader("parallel.schedule_table", "read_schedule"), choices=PipelineSchedule, is_searched=True,
        in_files="1f1b",
    )  # fmt: skip
    virtual_stages: int | None = _searched("Model chunks of a pipeline rank (interleaved)", in_files=1)
    recompute: str | None = _choice("none, selective or full", choices=Recompute, is_searched=True, in_files="none")
    recompute_modules: Sequence[str] | None = word(
        "Parts of a layer that run again in backward: core_attn, layernorm, mla_up_proj, mlp, moe_act, moe",
        otherwise="selective recomputation is of core_attn", metavar="NAMES", takes="Sequence[str] | str", is_shorthand=True,
        read=reader("parallel.choices", "read_modules"),
    )  # fmt: skip
    attention: str | None = _choice("flash or unfused", otherwise="the profile's if left out", choices=AttentionKernel, in_files="flash")
    order: Sequence[str] | None = word(
        f"Axes on the network, innermost first: {'-'.join(DEFAULT_ORDER)}",
        metavar="AXES", takes="Sequence[str] | str", read=read_order, in_files=DEFAULT_ORDER,
    )  # fmt: skip
    dp: int | None = _count("The whole data-parallel degree: dp-shard under ZeRO 1 to 3, else dp-replicate", is_shorthand=True)
    fsdp: int | None = _count("--dp-shard N --zero 3", is_shorthand=True)

    def __post_init__(self) -> None:
        for name, knob in words_of(type(self)).items():
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, knob.value(value, name))

    def given(self) -> dict[str, Any]:
        """Return the knobs that are not left out."""
        return given_words(self)

    def searched(self) -> dict[str, Any]:
        """Return the knobs as a search fixes them: `fsdp` becomes dp_shard and zero, `dp` stays a product."""
        given = given_words(self)
        fsdp = given.pop("fsdp", None)
        if fsdp is not None:
            if given.get("dp_shard", fsdp) != fsdp or given.get("zero", 3) != 3:
                raise InputError(f"fsdp={fsdp}: is dp_shard={fsdp} with zero=3; leave out dp_shard and zero, or say it with them alone")
            given |= {"dp_shard": fsdp, "zero": 3}
        if "recompute_modules" in given:
            if given.get("recompute", "selective") != "selective":
                rule = "recompute_modules say which parts run again, which is recompute=selective; leave out one of them"
                raise InputError(f"recompute={given['recompute']}: {rule}")
            given["recompute"] = "selective"
        shard, replicate = given.get("dp_shard", 1), given.get("dp_replicate", 1)
        if "dp" in given and given["dp"] % (shard * replicate):
            raise InputError(f"dp={given['dp']}: is dp_replicate*dp_shard, of which {shard * replicate} is given; use a multiple of it")
        return given

    def planned(self) -> dict[str, Any]:
        """Return the knobs as a plan has them: the open factor of `dp` goes to dp_shard under ZeRO, else to dp_replicate."""
        given = self.searched()
        if "recompute_modules" in given:
            from perfmodel.parallel.choices import module_operators

            given["recompute_operators"] = module_operators(given.pop("recompute_modules"))
        if "rules" in given:
            if len(given["rules"]) > 1:
                names = ",".join(rules.name for rules in given["rules"])
                raise InputError(f"rules={names}: a plan has one rule set; give one of them (a search takes several)")
            given["rules"] = given["rules"][0]
        dp = given.pop("dp", None)
        if dp is not None:
            to_shard = "dp_shard" not in given and (given.get("zero") or 0) > 0
            kept = given.get("dp_replicate" if to_shard else "dp_shard", 1)
            given |= {"dp_shard": dp // kept, "dp_replicate": kept} if to_shard else {"dp_replicate": dp // kept, "dp_shard": kept}
        return given


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class ServingKnobs:
    """Knobs of the layout of a service; None leaves a knob to its default, or to the search."""

    tp: Any = size("Tensor-parallel degree", otherwise="the smallest that leaves room for the requests if left out")
    pp: int | None = _count("Pipeline-parallel degree")
    ep: int | None = _count("Expert-parallel degree: chips of a replica that split the experts")
    attention_dp: int | None = _count("Attention ranks of a replica that have sequences of their own (data-parallel attention)")
    dcp: int | None = _count("Decode-context-parallel degree: ranks of tp that share the tokens of a cache which each would keep whole")
    pcp: int | None = _count("Prefill-context-parallel degree: chips in addition to tp that share the tokens of a prompt, zig-zag")
    replicas: int | None = _count("Independent copies", otherwise="all chips if left out")
    workers: Any = word(
        "Disaggregated serving: prefill and decode workers x chips of each, such as 3x4:1x8 or 1x8,tp=2,ep=8:1x8,tp=8; "
        "3x4@h20:1x8@h200 on chips of two kinds, in place of --cluster and --chips",
        metavar="XxN:YxN", read=reader("parallel.serving_plan", "parse_workers"),
        takes="str",
    )  # fmt: skip
    max_batch: Any = size("Sequences that run at once, of an attention rank", otherwise="the engine's if left out")
    max_tokens: Any = size("Tokens of a step: chunk size of prompts", otherwise="the engine's if left out")


#: Knobs that only models with experts have.
EXPERT_KNOBS = ("ep", "etp", "dispatcher")


def searched_knobs(record: type = Knobs) -> tuple[str, ...]:
    """Return the names of the knobs that a search fixes, bounds and varies."""
    return tuple(name for name, knob in words_of(record).items() if knob.is_searched)


def bounded_knobs(record: type = Knobs) -> tuple[str, ...]:
    """Return the names of the knobs that take an upper bound in a search."""
    return tuple(name for name, knob in words_of(record).items() if knob.is_searched and knob.kind is int)


def plan_keys(record: type = Knobs) -> tuple[str, ...]:
    """Return the names of the knobs that a plan and its file have."""
    return tuple(name for name, knob in words_of(record).items() if not knob.is_shorthand)


def choices_of(record: type = Knobs) -> Mapping[str, type[StrEnum]]:
    """Return the enumeration of each knob whose values are a closed choice."""
    return {name: knob.choices for name, knob in words_of(record).items() if knob.choices is not None}
