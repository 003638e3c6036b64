"""Which experts a step's tokens meet: routers prefer some experts to others, and the fullest of the ranks that share them sets the pace."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

POPULARITY_VARIANCE = 2.0
"""v, of how often a router chooses each expert of a layer, over the square of its mean; 0: every one as often. Heard from served runs of
seven models with 128 to 512 experts (docs/accuracy-serving.md) among 1, 1.4, 2, 2.8 and 4: each of them left out, the others say 2 to 2.8;
static batches of Mixtral (8 experts), which were not asked, 1.4 to 2."""

#: Of n numbers that are normally distributed the largest one's expectation, n = 1, 2, 4, ... (Harter 1961). [standard deviations]
_LARGEST = (0.0, 0.564, 1.029, 1.424, 1.766, 2.070, 2.344, 2.594, 2.827, 3.045, 3.251)


def share_met(tokens: Any, num_experts: float, top_k: float) -> NDArray[Any]:
    """m: of the experts of a layer those that `tokens` of k choices each meet, on average. [-]

    m = 1 - (1 + v u)^(-1/v),   u = -T ln(1 - k / E)

    Of choices that are even (v = 0): 1 - (1 - k / E)^T; of popularities that follow a gamma distribution with variance v its mean.
    """
    u = -np.asarray(tokens, dtype=float) * np.log1p(-min(top_k / num_experts, 1.0 - 1e-12))
    return np.asarray(1.0 - (1.0 + POPULARITY_VARIANCE * u) ** (-1.0 / POPULARITY_VARIANCE))


def fullest_rank(met: Any, tokens: Any, num_experts: float, top_k: float, ranks: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    """How many more experts that are met, and rows, the fullest of n ranks has than the mean one. [-]

    1 + z(n) sqrt((1 - m) n / (m E)),   1 + z(n) sqrt((1 / l + v) n / E),   l = T k / E

    z   the largest of n normal numbers; m (`share_met`) is that of each expert by itself, l rows of one on average. One rank: 1, 1.
    """
    n = np.asarray(ranks, dtype=float)
    largest = np.interp(np.log2(n), np.arange(len(_LARGEST)), _LARGEST)
    rows = np.maximum(np.asarray(tokens, dtype=float) * (top_k / num_experts), 1e-9)
    met = np.maximum(met, 1e-9)
    more_met = 1.0 + largest * np.sqrt(np.maximum(1.0 - met, 0.0) / met * (n / num_experts))
    return more_met, 1.0 + largest * np.sqrt((1.0 / rows + POPULARITY_VARIANCE) * (n / num_experts))
