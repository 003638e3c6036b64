"""Routed experts of a serving step: one fused call on each chip, and the communication of tokens with their experts.

Routers prefer some experts to others, and the expert rank with the highest load determines the time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.machine import Machine
from perfmodel.cost.serving.engine_step import Array, EngineStep, engine_collective_time
from perfmodel.cost.serving.kernels import grouped_weight_time
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.hardware.calibration import COLLECTIVE_CODE
from perfmodel.workload.work import RoutedExperts

POPULARITY_VARIANCE = 2.0
"""v, relative variance of how often a router chooses each expert of a layer; 0: all equally often. Fitted among 1, 1.4, 2, 2.8 and 4 to
served runs of seven models with 128 to 512 experts (docs/accuracy-serving.md). With any one of them left out, the fit is 2 to 2.8; held-out
static batches of Mixtral (8 experts) give 1.4 to 2."""

#: Expectation of the largest of n normally distributed numbers, n = 1, 2, 4, ... (Harter 1961). [standard deviations]
_LARGEST = (0.0, 0.564, 1.029, 1.424, 1.766, 2.070, 2.344, 2.594, 2.827, 3.045, 3.251)


def activated_share(tokens: object, num_experts: float, top_k: float) -> NDArray[Any]:
    """Return m, the share of a layer's experts that `tokens` of k choices each activate, on average. [-]

    m = 1 - (1 + v u)^(-1/v),   u = -T ln(1 - k / E)

    For even choices (v = 0): 1 - (1 - k / E)^T; otherwise its mean over popularities with a gamma distribution of variance v.
    """
    u = -np.asarray(tokens, dtype=float) * np.log1p(-min(top_k / num_experts, 1.0 - 1e-12))
    return np.asarray(1.0 - (1.0 + POPULARITY_VARIANCE * u) ** (-1.0 / POPULARITY_VARIANCE))


def fullest_rank(activated: Any, tokens: Any, num_experts: float, top_k: float, ranks: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the ratios of activated experts and of rows of the fullest of n ranks to those of the mean rank. [-]

    1 + z(n) sqrt((1 - m) n / (m E)),   1 + z(n) sqrt((1 / l + v) n / E),   l = T k / E

    z   the largest of n normal numbers; m (`activated_share`) is that of each expert by itself, l mean rows of an expert. One rank: 1, 1.
    """
    n = np.asarray(ranks, dtype=float)
    largest = np.interp(np.log2(n), np.arange(len(_LARGEST)), _LARGEST)
    rows = np.maximum(np.asarray(tokens, dtype=float) * (top_k / num_experts), 1e-9)
    activated = np.maximum(activated, 1e-9)
    more_activated = 1.0 + largest * np.sqrt(np.maximum(1.0 - activated, 0.0) / activated * (n / num_experts))
    return more_activated, 1.0 + largest * np.sqrt((1.0 / rows + POPULARITY_VARIANCE) * (n / num_experts))


def routed_experts_time(work: RoutedExperts, step: EngineStep, machine: Machine) -> Array:
    """Return the time of the experts of one layer. [s]

    T tokens of all attention ranks are routed; the rank with the most activated experts (`activated_share`) determines the time.
    """
    ep, total, k = step.expert_parts, float(work.num_experts), float(work.top_k)
    tokens, computed = (count * _padding(step) for count in (step.tokens, step.tokens + step.copies))
    share = np.full_like(tokens, step.distinct_experts / total) if step.distinct_experts else activated_share(tokens, total, k)
    more_activated, more_rows = fullest_rank(share, tokens, total, k, ep)
    local_experts = np.maximum(np.minimum(total * share * more_activated, total) / ep, np.clip(tokens * k, 1e-9, 1.0))
    time = grouped_weight_time(
        experts=local_experts,
        rows=np.maximum(np.minimum(computed * k * more_rows / ep, computed * k), local_experts),
        tokens=computed,
        hidden_size=float(work.hidden_size),
        intermediate_size=work.width / (step.chips / ep),
        quantization=step.formats.quantization,
        machine=machine,
        up_projections=work.matrices,
    )
    return np.asarray(time)


def _padding(step: EngineStep) -> Array:
    """Return the ratio of rows in captured graphs to those of the step."""
    return step.padded / np.maximum(step.rows, 1e-12)


def routed_experts_work(work: RoutedExperts, step: EngineStep) -> tuple[Array, Array, Array, Array]:
    """Return FLOPs of one layer's experts on a chip of mean load, least memory traffic, activated experts, and their rows."""
    ep, total = step.expert_parts, work.num_experts
    activated = total * activated_share(step.tokens, total, work.top_k) / ep
    entries = (work.matrices + 1.0) * (work.width / (step.chips / ep)) * work.hidden_size
    rows, formats = (step.tokens + step.copies) * work.top_k / ep, step.formats
    moved = activated * entries * formats.quantization.weight_bytes + 2.0 * formats.element_bytes * rows * work.hidden_size
    return 2.0 * rows * entries, moved, activated, rows


def exchange_time(work: RoutedExperts, step: EngineStep, machine: Machine) -> Array:
    """Return the time of dispatch and combine of one layer. [s]

    The faster of two: tokens are all-gathered from the attention ranks and their sums reduce-scattered; or each row is sent to its expert
    and back (all-to-all). Sums are all-reduced over the ranks that share tokens (tp). The times are those of the library. DeepEP's
    low-latency kernels are faster in tables, but published runs are predicted worse with them (20 of TensorRT-LLM's: TPOT error
    9.4 -> 10.2 %; 20 of SGLang's on GB200: 27 -> 30 %).
    """
    hidden = step.formats.element_bytes * work.hidden_size
    everywhere, sent = (step.tokens + step.copies) * _padding(step) * hidden, step.padded * work.top_k * hidden

    def sends(kind: CollectiveKind, num_bytes: Array, group: str) -> Array:
        return engine_collective_time(COLLECTIVE_CODE[kind], num_bytes, step.groups[group], machine, step.kernels)

    gathered = sends(CollectiveKind.ALL_GATHER, everywhere, "tokens") + sends(CollectiveKind.REDUCE_SCATTER, everywhere, "tokens")
    exchanged = 2.0 * sends(CollectiveKind.ALL_TO_ALL, sent, "tokens")
    return sends(CollectiveKind.ALL_REDUCE, step.padded * hidden, "tp") + np.minimum(gathered, exchanged)
