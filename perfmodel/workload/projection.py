"""Low-rank projection of gradients (GaLore): optimizer state and work, as means over the parameters of a model.

    R = G B,  B[n, r]        states of R[m, r] in place of G[m, n], n <= m; the update is R' B^T

B holds the first right singular vectors of G (the left ones where G is wide) and is recomputed every `SUBSPACE_STEPS` steps.
Sources: Zhao et al., arXiv 2403.03507, algorithm 2 and table 1 (m n weights, m r projection, 2 n r states of Adam); galore_torch,
galore_projector.py (`proj_type=std`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.training import Training, linear_shapes

SUBSPACE_STEPS = 200.0
"""[-] Steps between two decompositions (transformers 5.23, trainer_optimizer.py, and the paper's pre-training)."""
_LLAMA_7B = 32 * (4 * 4096**3 + 3 * 11008 * 4096**2)
SUBSPACE_TIME = 600.0 / _LLAMA_7B
"""[s] Time of a decomposition per m n^2: about ten minutes for LLaMA-7B (Zhang et al., Q-GaLore, arXiv 2407.08296, section 1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """Means over all parameters.

    state        entries of each optimizer state, 1 without projection              [-]
    matrix       entries of the projection matrices                                 [-]
    flops        of the projections in a step                                       [FLOP]
    time         of the decompositions, per step                                    [s]
    """

    state: float = 1.0
    matrix: float = 0.0
    flops: float = 0.0
    time: float = 0.0


NO_PROJECTION = Projection()


def projection_of(model: TransformerConfig, training: Training) -> Projection:
    """Return the means over a model's parameters where a job projects gradients (GaLore)."""
    low = matrix = flops = cube = projected = 0.0
    for count, shape in linear_shapes(model, training):
        *experts, rows, columns = shape.shape
        number, (n, m) = count * math.prod(experts), sorted((rows, columns))
        rank = min(training.rank, n)
        projected += number * m * n
        low += number * m * rank
        matrix += number * n * rank
        flops += number * 4.0 * m * n * rank
        cube += number * float(m) * n * n
    total = model.num_parameters
    return Projection(
        state=(total - projected + low) / total,
        matrix=matrix / total,
        flops=flops / total,
        time=SUBSPACE_TIME * cube / SUBSPACE_STEPS / total,
    )


__all__ = ["NO_PROJECTION", "SUBSPACE_STEPS", "SUBSPACE_TIME", "Projection", "projection_of"]
