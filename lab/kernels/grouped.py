"""Tables of grouped matrix multiplies (the experts of a mixture-of-experts layer).

aiconfigurator measured fused layers (Apache-2.0); only parameters fitted to them are shipped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lab.kernels.kernel_fit import chosen_rows, groups_of
from lab.kernels.tables import read_perf
from perfmodel.calibrate.fits import Array, Indices

GATED_KERNELS = ("moe_torch_flow_cutlass", "moe_torch_flow")
"""TensorRT-LLM's kernel of gated experts; the second name is that of the version measured on the A100."""

BALANCED, POWER_LAWS = "balanced", ("power_law_1.01", "power_law_1.2")
"""Routings that were measured; the A100 has power laws only."""

DRAWS = 16
"""Number of routings over which the load of a power law is averaged; the tables do not record which ones were drawn."""

FALLBACK = 1.05
"""A series (a layer on so many chips, over numbers of tokens) whose median time is that much above a series with no less work on the chip
ran a kernel that the library did not choose for it (its tuning failed): one in eight, three to five times too slow."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupedTable:
    """Measured layers of experts on one chip: columns of one length; time [s].

    pairs, experts   (token, expert) pairs of the chip, and its experts that have any
    intermediate_size, whole_intermediate_size   the chip's share of an expert's, and the whole
    num_experts, top_k    of the layer, and of a token
    is_fallback    the library ran a kernel that it did not choose for the shape
    """

    tokens: Array
    pairs: Array
    experts: Array
    hidden_size: Array
    intermediate_size: Array
    whole_intermediate_size: Array
    num_experts: Array
    top_k: Array
    is_fallback: NDArray[np.bool_]
    time: Array

    @property
    def layer(self) -> NDArray[Any]:
        """Return an integer for each layer, equal over all numbers of chips and tokens."""
        return groups_of(self.hidden_size, self.whole_intermediate_size, self.num_experts, self.top_k)

    @property
    def shapes(self) -> dict[str, Any]:
        """Return the shapes as arguments of `grouped_matmul_time`."""
        names = ("experts", "tokens", "hidden_size", "intermediate_size")
        return {"rows": self.pairs, **{name: getattr(self, name) for name in names}}


def read_grouped(folder: Path, chip: str, version: str, dtype: str, kernels: Sequence[str] = GATED_KERNELS) -> GroupedTable:
    """Return aiconfigurator's gated layers, with balanced routing where that was measured, otherwise with power laws.

    `dtype` is named as in the table (bfloat16, fp8). Repeats become their median. Of several `kernels` the fastest counts. Chips that no
    token reaches are left out.
    """
    frame = read_perf(folder, chip, "moe", version, "moe_perf")
    frame = frame[(frame.moe_dtype == dtype) & frame.kernel_source.isin(kernels)]
    routings = (BALANCED,) if (frame.distribution == BALANCED).any() else POWER_LAWS
    frame = frame[frame.distribution.isin(routings)]
    keys = ["distribution", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size", "num_tokens"]
    frame = frame.groupby([*keys, "kernel_source"]).latency.median().groupby(keys).min().reset_index()
    routing = list(zip(frame.num_tokens, frame.num_experts, frame.topk, frame.moe_ep_size, frame.distribution, strict=True))
    known = {key: load_of(*key) for key in dict.fromkeys(routing)}
    pairs, experts = np.array([known[key] for key in routing], dtype=float).reshape(-1, 2).T
    columns = {name: np.asarray(frame[name], dtype=float) for name in keys if name != "distribution"}
    law = np.asarray(frame.distribution.map({name: index for index, name in enumerate(routings)}), dtype=float)
    time = np.asarray(frame.latency, dtype=float) * 1e-3
    series = groups_of(law, columns["hidden_size"], columns["inter_size"], columns["topk"], columns["num_experts"])
    table = GroupedTable(
        tokens=columns["num_tokens"],
        pairs=pairs,
        experts=experts,
        hidden_size=columns["hidden_size"],
        intermediate_size=columns["inter_size"] / columns["moe_tp_size"],
        whole_intermediate_size=columns["inter_size"],
        num_experts=columns["num_experts"],
        top_k=columns["topk"],
        is_fallback=fallback_runs(series, columns["num_tokens"], columns["moe_tp_size"], columns["moe_ep_size"], time),
        time=time,
    )
    return chosen_rows(table, pairs > 0)


def load_of(tokens: int, experts: int, top_k: int, ranks: int, routing: str) -> tuple[float, float]:
    """Return the (token, expert) pairs of the measured rank, and the number of its experts with at least one.

    balanced       token j takes experts j + a stride, so that all are used alike; the first rank is measured
    power_law_A    loads drawn with density x^-A, the fullest rank is measured: the mean over draws (seed 0)

    Source: aiconfigurator's collector (balanced_logits, power_law_logits_v3).
    """
    if routing == BALANCED:
        stride = math.ceil(experts / top_k)
        first = np.arange(tokens) if tokens >= stride else np.arange(tokens) * stride / tokens
        chosen = (np.floor(first[:, None] + np.arange(top_k) * stride) % experts).astype(int)
        flat = np.unique(chosen + experts * np.arange(tokens)[:, None])  # an expert takes a token once
        load = np.bincount(flat % experts, minlength=experts)[: experts // ranks]
        return float(load.sum()), float((load > 0).sum())
    loads = _drawn_loads(tokens, experts, top_k, float(routing.rpartition("_")[2])).reshape(DRAWS, ranks, experts // ranks)
    fullest = loads[np.arange(DRAWS), loads.sum(axis=2).argmax(axis=1)]
    return float(fullest.sum(axis=1).mean()), float((fullest > 0).sum(axis=1).mean())


def _drawn_loads(tokens: int, experts: int, top_k: int, exponent: float) -> Array:
    """Return the rows of each expert in each draw; no expert takes a token twice. [-]"""
    pairs = tokens * top_k
    least, most = (1.0, 0.8 * tokens) if pairs > experts else (0.01, 2.0)
    power = 1.0 - exponent
    draws = np.random.default_rng(0).random((DRAWS, experts))
    shares = ((most**power - least**power) * draws + least**power) ** (1.0 / power)
    loads: Array = np.round(shares / shares.sum(axis=1, keepdims=True) * pairs)
    for load in loads:  # what rounding gained or lost is evened out, from the fullest or the emptiest expert on
        order = np.argsort(-load, kind="stable")
        missing = int(pairs - load.sum())
        np.add.at(load, order[np.arange(max(missing, 0)) % experts], 1.0)
        for index in range(max(-missing, 0)):
            taken = order[-1 - index % experts]
            load[taken if load[taken] > 0 else np.argmax(load)] -= 1.0
    return np.minimum(loads, tokens)


def fallback_runs(layer: NDArray[Any], tokens: Array, tp: Array, ep: Array, time: Array) -> NDArray[np.bool_]:
    """Return which runs belong to a series that is slower than the same layer with no less work on each chip (`FALLBACK`)."""
    excess = np.ones_like(time)
    for group in _members(groups_of(layer, tokens)):
        has_no_less = (tp[group] <= tp[group][:, None]) & (ep[group] <= ep[group][:, None])
        excess[group] = time[group] / np.where(has_no_less, time[group], np.inf).min(axis=1)
    is_fallback = np.zeros(len(time), dtype=bool)
    for series in _members(groups_of(layer, tp, ep)):
        is_fallback[series] = np.median(excess[series]) > FALLBACK
    return is_fallback


def _members(group: NDArray[Any]) -> list[Indices]:
    """Return the indices of each group."""
    order = np.argsort(group, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(group[order])) + 1)


def tuned_grouped(folder: Path, chip: str, version: str, dtype: str, kernels: Sequence[str] = GATED_KERNELS) -> GroupedTable:
    """Return the fitted rows: runs of kernels that the library chose."""
    table = read_grouped(folder, chip, version, dtype, kernels)
    return chosen_rows(table, ~table.is_fallback)
