"""Space of serving plans: layouts of a replica, number of replicas, and limits of a step.

A plan is (tp, pcp, pp, attention dp, ep, dcp, replicas, tokens of a step, sequences at once). Degrees are divisors of the number of chips
or powers of two. A replica has tp * pcp * pp * attention dp chips and does not span nodes if it fits into one. The number of replicas
is the largest that fits; remaining chips stay idle but are paid for. Dense models have no ep and no attention dp (which would be replicas).
Where tp replicates the cache and the engine can shard the copies, dcp is each divisor of their number; elsewhere 1. pcp is 1 unless it is
given, or the engine's version has it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from perfmodel.foundation.dtypes import Dtype
from perfmodel.foundation.errors import InputError, bad_field, suggest
from perfmodel.frameworks.engine import Engine
from perfmodel.frameworks.engine_layouts import cache_copies, layout_faults, why_no_context, why_not_shared
from perfmodel.hardware.cluster import Cluster
from perfmodel.parallel.layout import divisors
from perfmodel.parallel.serving_plan import COLUMNS, ServingColumns
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.quantization import Quantization

#: Knobs that define a layout.
_DEGREES = ("tp", "pcp", "pp", "attention_dp", "ep", "dcp")

#: Sequences of an attention rank that are tried, if the load is searched or a plan may hold fewer than arrive.
BATCHES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
#: Tokens of a step that are tried in addition to the engine's default, if it chunks prompts.
STEP_TOKENS = (1024, 2048, 4096, 8192, 16384)

Format = tuple[Quantization, Dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingSpace:
    """Part of the space that is searched.

    fixed       knob -> its only value
    formats     of weights and cache; empty: those of the job
    batches     sequences of an attention rank at once
    max_tokens  tokens of a step, in addition to the engine's default
    """

    fixed: Mapping[str, int] = field(default_factory=dict)
    formats: tuple[Format, ...] = ()
    batches: tuple[int, ...] = BATCHES
    max_tokens: tuple[int, ...] = STEP_TOKENS

    def __post_init__(self) -> None:
        for knob, value in self.fixed.items():
            if knob not in COLUMNS:
                raise InputError(f"knob={knob}: not in the space of serving plans{suggest(knob, COLUMNS)}; use {', '.join(COLUMNS)}")
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise bad_field(knob, value, "must be a whole number of at least 1", "leave it out where it is searched")
        for name in ("batches", "max_tokens"):
            if any(value < 1 for value in getattr(self, name)):
                raise bad_field(name, getattr(self, name), "must be whole numbers of at least 1", "leave it out for the usual ones")

    def admits(self, knob: str, value: int) -> bool:
        return self.fixed.get(knob, value) == value

    def without(self, knob: str) -> ServingSpace:
        """Return the same space with this knob free."""
        return replace(self, fixed={name: value for name, value in self.fixed.items() if name != knob})

    def tokens_of_a_step(self, engine: Engine) -> tuple[int, ...]:
        """Return the tokens of a step that are tried; 0 is the engine's default."""
        if "max_tokens" in self.fixed:
            return (self.fixed["max_tokens"],)
        others = [tokens for tokens in self.max_tokens if tokens != engine.scheduling.max_tokens] if engine.scheduling.has_chunks else []
        return (0, *others)

    def batches_up_to(self, most: int) -> tuple[int, ...]:
        """Return the sequences of an attention rank that are tried."""
        return tuple(sorted({batch for batch in self.batches if batch < most} | {most}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Layouts:
    """Possible layouts of replicas. left_out: reason -> layouts that are impossible, or that the engine does not run."""

    columns: ServingColumns
    left_out: Mapping[str, int]


def degrees(chips: int) -> tuple[int, ...]:
    """Return the sizes that an axis may have: divisors of the number of chips, and powers of two."""
    powers = [2**power for power in range(chips.bit_length()) if 2**power <= chips]
    return tuple(sorted({*divisors(chips), *powers}))


def replicas_that_fit(size: int, cluster: Cluster) -> int:
    """Return the number of replicas of this size: each within a node if it fits into one, else on whole nodes."""
    chips, node = cluster.num_chips, scale_up_size(cluster)
    if size > node:
        return chips // (-(-size // node) * node)
    nodes, rest = divmod(chips, node)
    return nodes * (node // size) + rest // size


def scale_up_size(cluster: Cluster) -> int:
    """Return the number of chips of a scale-up domain."""
    return min(cluster.tiers[0].size, cluster.num_chips) if cluster.tiers else 1


def layouts(model: TransformerConfig, cluster: Cluster, engine: Engine, space: ServingSpace) -> Layouts:
    """Return every layout that the model, the engine and the given knobs allow."""
    rows: list[tuple[int, ...]] = []
    left_out: Counter[str] = Counter()
    for sizes in _all_degrees(model, engine, space, cluster.num_chips):
        knobs = dict(zip(_DEGREES, sizes, strict=True))
        if not all(space.admits(knob, value) for knob, value in knobs.items()):
            left_out["excluded by a given knob"] += 1
            continue
        fault = next(layout_faults(model, engine, **knobs), None)
        tp, pcp, pp, dp, _, _ = sizes
        replicas = replicas_that_fit(tp * pcp * pp * dp, cluster)
        replicas = min(space.fixed.get("replicas", replicas), replicas)
        if fault is not None:
            left_out[fault.reason] += 1
        elif replicas < 1 or not space.admits("replicas", replicas):
            left_out["its replicas do not fit on the chips"] += 1
        else:
            rows.append((*sizes, replicas))
    table = np.array(rows, dtype=np.int64).reshape(-1, len(_DEGREES) + 1)
    nothing = np.zeros(len(table), dtype=np.int64)
    columns: dict[str, Any] = {name: table[:, at] for at, name in enumerate((*_DEGREES, "replicas"))}
    return Layouts(columns=ServingColumns(max_batch=nothing, max_tokens=nothing, **columns), left_out=dict(left_out))


def _all_degrees(model: TransformerConfig, engine: Engine, space: ServingSpace, chips: int) -> Iterator[tuple[int, ...]]:
    """Yield `_DEGREES` of all layouts with at most `chips` chips."""
    sizes, has_experts = degrees(chips), model.parts.experts is not None

    def of_prompts(pp: int, attention_dp: int) -> Sequence[int]:
        """Return the degrees of prefill context parallelism: the given one, or all if the engine's version has it."""
        if "pcp" in space.fixed:
            return (space.fixed["pcp"],)
        is_searched = not engine.runs.prefill_context_since and not why_not_shared(model, engine, pp=pp, attention_dp=attention_dp)
        return sizes if is_searched else (1,)

    def of_cache(tp: int, pcp: int) -> Sequence[int]:
        """Return the degrees of decode context parallelism: the given one, or the divisors of the copies of the cache.

        With pcp: none, all its ranks, or those of tp as well.
        """
        if "dcp" in space.fixed:
            return (space.fixed["dcp"],)
        if not engine.runs.has_decode_context or why_no_context(model):
            return (1,)
        copies = int(cache_copies(model, tp))
        return divisors(copies) if pcp == 1 else tuple(sorted({1, pcp, pcp * tp if copies == tp else pcp}))

    prompts = {axes: of_prompts(*axes) for axes in ((1, 1), (2, 1), (1, 2), (2, 2))}
    shared = {(tp, pcp): of_cache(tp, pcp) for tp in sizes for pcp in prompts[1, 1]}
    for tp in sizes:
        for pp in sizes:
            for dp in sizes if has_experts else (1,):
                for pcp in prompts[min(pp, 2), min(dp, 2)]:
                    if tp * pcp * pp * dp <= chips:
                        for ep in divisors(tp * pcp * dp) if has_experts else (1,):
                            for dcp in shared[tp, pcp]:
                                yield tp, pcp, pp, dp, ep, dcp


def cross(columns: ServingColumns, max_tokens: Sequence[int], batches: Sequence[int]) -> ServingColumns:
    """Return each layout with each number of tokens and of sequences: layouts outermost, sequences innermost."""
    tokens, sequences = (np.array(values, dtype=np.int64) for values in (max_tokens, batches))
    rows = columns.take(np.repeat(np.arange(len(columns)), len(tokens) * len(sequences)))
    return replace(
        rows,
        max_batch=np.tile(sequences, len(columns) * len(tokens)),
        max_tokens=np.tile(np.repeat(tokens, len(sequences)), len(columns)),
    )


NODE = "tp over a node"
SMALLEST = "smallest tp that fits"
DEFAULT = "engine's default"
EXPERTS = "attention dp with ep"

BASELINES = {
    NODE: "tp over all chips of a node, replicas on all nodes",
    SMALLEST: "the smallest tp that the model fits into, replicas on all chips",
    DEFAULT: "as the engine starts by itself: one chip a replica",
    EXPERTS: "the vendors' recipe: attention dp and ep over all chips of a node, tp 1",
}


def baseline_layouts(
    model: TransformerConfig, cluster: Cluster, engine: Engine, fits: Callable[[ServingColumns], bool]
) -> Iterator[tuple[str, ServingColumns | None, str]]:
    """Yield the name of each usual layout, its one layout with the engine's own limits or None, and why there is none.

    fits   whether a layout fits into memory
    """

    def layout(**sizes: int) -> ServingColumns:
        degree_of: dict[str, int] = dict.fromkeys(COLUMNS, 1) | {"max_batch": 0, "max_tokens": 0} | sizes
        degree_of["replicas"] = replicas_that_fit(degree_of["tp"] * degree_of["attention_dp"], cluster)
        columns: dict[str, Any] = {name: np.array([degree], dtype=np.int64) for name, degree in degree_of.items()}
        return ServingColumns(**columns)

    sizes = degrees(scale_up_size(cluster))
    admitted = [tp for tp in sizes if not any(layout_faults(model, engine, tp=tp, pp=1, attention_dp=1, ep=1))]
    yield (NODE, layout(tp=admitted[-1]), "") if admitted else (NODE, None, "no tp divides the model")
    fitting = [tp for tp in admitted if fits(layout(tp=tp))]
    yield (SMALLEST, layout(tp=fitting[0]), "") if fitting else (SMALLEST, None, "no tp of a node fits")
    yield (DEFAULT, layout(tp=1), "") if fitting and fitting[0] == 1 else (DEFAULT, None, "does not fit on one chip")
    if model.parts.experts is None:
        return
    for size in reversed(sizes):
        if size > 1 and not any(layout_faults(model, engine, tp=1, pp=1, attention_dp=size, ep=size)):
            experts = layout(attention_dp=size, ep=size)
            yield (EXPERTS, experts, "") if fits(experts) else (EXPERTS, None, "does not fit")
            return
    yield EXPERTS, None, f"{engine.name} does not run it"
