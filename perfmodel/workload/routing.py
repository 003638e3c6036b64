"""Distribution of tokens over experts: balanced, skewed, limited to a capacity, or by counts."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.foundation.errors import bad_field, shown
from perfmodel.foundation.files import read_text
from perfmodel.foundation.session import session_cache
from perfmodel.foundation.values import is_path, several

_TEXT = re.compile(r"balanced|skew:(\d{1,4}(?:\.\d{1,6})?)", re.ASCII)
_MOST = 4096.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Once:
    """Counted tokens that are sent once to each rank with chosen experts, over the mean rows of a rank.

    sent, received   tokens that the rank sends and receives
    weights          entries that arrive in the all-to-all of all choices' weights (or their gradients), over their mean
    """

    sent: float
    received: float
    weights: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRows:
    """Rows of a rank over the mean: tokens of a microbatch on a rank times the experts per token.

    computed    rows that its experts compute
    held        rows made of its own tokens: more than their choices where each expert's share is padded to a capacity
    exchanged   most rows that a rank sends or receives, over those of an even distribution; None: the held and the computed rows
    is_counted  tokens must be counted before the exchange: not where buffers have a fixed size
    once        of tokens that are sent once to each rank, where these are known; None: not known
    """

    computed: float = 1.0
    held: float = 1.0
    exchanged: float | None = None
    is_counted: bool = True
    once: Once | None = None


EVEN = RankRows()


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Load of the fullest rank, which determines a layer's time and memory.

    skew              rows of the fullest rank over the mean, without dropped tokens (dropless)
    capacity_factor   rows per expert over the mean: buffers have this size and are padded to it, tokens beyond it are dropped;
                      0: no capacity
    counts            row counts, from which `skew` follows; None: not known
    load              rows of the fullest rank over the mean
    rows              rows that determine the time and the memory of a layer

    Each rank has the same number of own tokens. `rows.computed` is that of the rank with the most expert rows: it computes the longest,
    with equal loads of its experts, and has the largest buffers. `rows.exchanged` is that of the rank that sends or receives the most,
    because it ends the all-to-all. Where all send the same, it is the fullest rank, with the same multiple of the mean. Padded to a
    capacity, all sizes are equal on all ranks.
    """

    skew: float = 1.0
    capacity_factor: float = 0.0
    counts: RoutingCounts | None = None
    load: float = field(init=False, repr=False, compare=False)
    rows: RankRows = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.counts is not None and self.skew != self.counts.skew:
            raise bad_field("skew", f"{self.skew:g}", f"must be that of the counts, {self.counts.skew:g}", "routing_of makes both")
        rows = EVEN
        if self.capacity_factor:
            rows = RankRows(computed=self.capacity_factor, held=self.capacity_factor, is_counted=False)
        elif self.counts is not None or self.skew != 1.0:
            rows = RankRows(computed=self.skew, exchanged=self.skew if self.counts is None else self.counts.busiest)
        object.__setattr__(self, "load", self.capacity_factor or self.skew)
        object.__setattr__(self, "rows", rows)

    @property
    def plain(self) -> str | list[list[int]]:
        """Form in a file: the counts themselves if given."""
        return str(self) if self.counts is None else [list(row) for row in self.counts.rows]

    def __str__(self) -> str:
        if self.counts is not None:
            return f"counts of {len(self.counts.rows)} ranks, the fullest with {self.skew:.4g} times the mean"
        return "balanced" if self.skew == 1.0 else f"skew:{self.skew:g}"

    def with_capacity(self, value: object, name: str = "capacity_factor") -> Routing:
        """Return the routing with a capacity factor; 0 or "none": no capacity."""
        if isinstance(value, str):
            try:
                value = 0.0 if value == "none" else float(value)
            except ValueError:
                raise bad_field(name, shown(value), "must be a number", "write 1.25, or none") from None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not (value == 0 or 0 < value <= _MOST):
            raise bad_field(name, shown(value), f"must be a positive number of {_MOST:g} at most", "write 1.25, or none")
        return replace(self, capacity_factor=float(value))


BALANCED = Routing()


def routing_of(value: object, name: str = "routing") -> Routing:
    """Return a routing from `balanced`, `skew:1.3` (the fullest rank has 1.3 times the mean), a matrix of counts, or its file."""
    if isinstance(value, Routing):
        return value
    if not isinstance(value, str) or _is_file(value):
        counts = routing_counts(value, name)
        return Routing(skew=counts.skew, counts=counts)
    match = _TEXT.fullmatch(value)
    skew = float(match[1]) if match and match[1] else 1.0
    if match is None or not 1.0 <= skew <= _MOST:
        rule = "must be balanced, or skew: and how many times the mean the fullest rank has, or a file of counts"
        raise bad_field(name, shown(value), rule, "write skew:1.3, or counts.csv")
    return Routing(skew=skew)


def routings_in(value: object, name: str = "routing") -> list[Any]:
    """Return the routings of a value: texts and files separated by commas, or a list; a matrix is one routing."""
    if isinstance(value, str) and "," in value and _is_file(value) and Path(value).is_file():
        return [value]
    if not isinstance(value, (list, tuple)):
        return several(value)
    if value and all(isinstance(row, (list, tuple)) and not any(_is_row(entry) for entry in row) for row in value):
        return [value]
    return [routing for item in value for routing in routings_in(item, name)]


def _is_file(text: str) -> bool:
    """Return whether a text is the path of a file of counts."""
    return is_path(text) or text.endswith((".csv", ".txt"))


@dataclass(frozen=True, slots=True)
class RoutingCounts:
    """Tokens that each rank of an exchange group sends to each expert, in every layer and microbatch: [rank][expert]."""

    rows: tuple[tuple[int, ...], ...]

    @property
    def experts_each(self) -> int:
        """Experts per rank."""
        return len(self.rows[0]) // len(self.rows)

    def sent(self, source: int, rank: int) -> tuple[int, ...]:
        """Return the tokens that rank `source` sends to each expert of `rank`."""
        return self.rows[source][rank * self.experts_each : (rank + 1) * self.experts_each]

    def received(self, rank: int) -> tuple[int, ...]:
        """Return the tokens that arrive at each expert of a rank."""
        return tuple(map(sum, zip(*(self.sent(source, rank) for source in range(len(self.rows))), strict=True)))

    def choices(self, source: int, top_k: int) -> NDArray[np.int64]:
        """Return the experts of each token of a rank, [tokens, top_k], consistent with the counts and without repeats in a token. Experts
        are assigned in `expert_order`, each to consecutive tokens in turn."""
        order = expert_order(len(self.rows[source]))
        return np.repeat(order, np.asarray(self.rows[source])[order]).reshape(top_k, -1).T

    def tokens_to_ranks(self, top_k: int) -> NDArray[np.int64]:
        """Return the tokens that have at least one choice on a rank, [source, rank], with the choices of `choices`."""
        return _tokens_to_ranks(self, top_k)

    @property
    def skew(self) -> float:
        """Tokens received by the fullest rank over the mean."""
        loads = [sum(self.received(rank)) for rank in range(len(self.rows))]
        return max(loads) * len(loads) / sum(loads) if any(loads) else 1.0

    @property
    def busiest(self) -> float:
        """Most rows that a rank sends to others or receives from them, over those with equal counts for all experts.

        max over r of max(S_r - d_r, R_r - d_r) / (S (n - 1) / n)     n ranks; S_r sent and R_r received by r, d_r to itself; S the mean
        """
        ranks = range(len(self.rows))
        if len(ranks) == 1 or not any(map(any, self.rows)):
            return 1.0
        kept = [sum(self.sent(rank, rank)) for rank in ranks]
        most = max(max(sum(self.rows[rank]), sum(self.received(rank))) - kept[rank] for rank in ranks)
        return most * len(ranks) * len(ranks) / (sum(map(sum, self.rows)) * (len(ranks) - 1))

    def check(self, *, ranks: int, num_experts: int, tokens: int, top_k: int) -> None:
        """Raise InputError if these are not the counts of `ranks` ranks with `tokens` tokens each and `top_k` experts per token."""
        if len(self.rows) != ranks:
            raise bad_field("routing", f"{len(self.rows)} rows", f"must have one for each of the ep={ranks} ranks", "correct the counts")
        for rank, row in enumerate(self.rows):
            where = f"routing[{rank}]"
            if len(row) != num_experts:
                raise bad_field(where, f"{len(row)} counts", f"must have one for each of the {num_experts} experts", "correct the counts")
            if max(row) > tokens:
                rule = f"no expert may get more than the {tokens} tokens that a rank has in a microbatch"
                raise bad_field(where, max(row), rule, "correct the counts")
            if sum(row) != tokens * top_k:
                rule = f"must add up to {tokens * top_k}, for a rank has {tokens} tokens in a microbatch, each for {top_k} experts"
                raise bad_field(where, sum(row), rule, "correct the counts")


@session_cache(maxsize=64)
def expert_order(num_experts: int) -> NDArray[np.int64]:
    """Return the experts in a fixed random order: the experts of one token are then spread over ranks like those of a free choice."""
    order = np.random.default_rng(num_experts).permutation(num_experts)
    order.flags.writeable = False
    return order


@session_cache(maxsize=16)
def _tokens_to_ranks(counts: RoutingCounts, top_k: int) -> NDArray[np.int64]:
    ranks = len(counts.rows)
    tokens = np.zeros((ranks, ranks), dtype=np.int64)
    for source in range(ranks):
        chosen = counts.choices(source, top_k) // counts.experts_each
        goes = np.zeros((len(chosen), ranks), dtype=bool)
        np.put_along_axis(goes, chosen, True, axis=1)
        tokens[source] = goes.sum(axis=0)
    tokens.flags.writeable = False
    return tokens


def counts_in_turn(*, ranks: int, num_experts: int, tokens: int, top_k: int) -> RoutingCounts:
    """Return counts with experts chosen round-robin, each rank continuing after the previous one."""
    sent, rows = tokens * top_k, []
    for rank in range(ranks):
        quotient, left = divmod(sent, num_experts)
        row = [quotient] * num_experts
        for i in range(left):
            row[(rank * sent + i) % num_experts] += 1
        rows.append(tuple(row))
    return RoutingCounts(tuple(rows))


def routing_counts(value: Any, name: str = "routing") -> RoutingCounts:
    """Return counts from a matrix or its file: .json with a list of rows, else lines of comma-separated numbers."""
    if isinstance(value, RoutingCounts):
        return value
    remedy = "give a row of whole numbers for each rank, one for each expert"
    if isinstance(value, (str, Path)):
        text = read_text(value, "file of counts")
        if str(value).endswith(".json"):
            try:
                value = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise bad_field(name, "the file", f"is no JSON ({error})", "give a list of rows of numbers") from None
        else:
            value = [line.split(",") for line in text.splitlines() if line.strip()]
    if hasattr(value, "tolist"):
        value = value.tolist()  # an array
    if not _is_row(value) or not all(_is_row(row) for row in value):
        raise bad_field(name, shown(value), "must be a matrix of counts", remedy)
    if len({len(row) for row in value}) > 1 or len(value[0]) % len(value):
        rule = "each row must have the same number of counts, a multiple of the number of rows"
        raise bad_field(name, f"rows of {', '.join(str(n) for n in sorted({len(row) for row in value}))} counts", rule, remedy)
    return RoutingCounts(tuple(tuple(_count(entry, name, remedy) for entry in row) for row in value))


def _is_row(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes)) and len(value) > 0


def _count(value: object, name: str, remedy: str) -> int:
    number = value.strip() if isinstance(value, str) else value
    if isinstance(number, str) and number.isascii() and number.isdigit() and len(number) < 16:
        number = int(number)
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 2**48:
        raise bad_field(name, shown(value), "must be a whole number of tokens, 0 or more", remedy)
    return number
