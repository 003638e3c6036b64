"""Non-negative linear fits of relative errors to a handful of microbenchmarks, and their errors on held-out points."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Indices = NDArray[np.integer]

NUM_FOLDS = 5

NEGLIGIBLE = 1e-12
"""Value below which a parameter (s, fraction) is set to 0: the fit ended at its bound."""


def rounded(value: float, digits: int = 4) -> float:
    """Round a parameter to the digits that a fit supports."""
    return float(f"{value:.{digits}g}") if abs(value) > NEGLIGIBLE else 0.0


def fit_linear(columns: Array, time: Array, explained: Array | float = 0.0) -> Array:
    """Return the non-negative coefficients of the columns that minimise the squared relative errors of their sum and the explained time."""
    from scipy.optimize import nnls

    scaled = columns / time[:, None]
    norms = np.maximum(np.linalg.norm(scaled, axis=0), 1e-300)
    coefficients, _ = nnls(scaled / norms, (time - explained) / time)
    return np.asarray(coefficients / norms)


def relative_errors(predicted: Array, time: Array) -> Array:
    """Return |predicted / measured - 1|. [-]"""
    return np.abs(predicted / time - 1.0)


def held_out_errors(
    group: NDArray[Any], time: Array, refit: Callable[[Indices], Callable[[Indices], Array]], *, num_folds: int = NUM_FOLDS
) -> Array:
    """Return the relative errors if each group of shapes is predicted by a fit to the others (cross-validation). [-]

    group  an integer for each point; complete groups are assigned to one of `num_folds` folds, at random (seed 0)
    refit  (indices to fit) -> (indices to predict -> predicted times)
    """
    names = np.unique(group)
    fold_of = {name: index % num_folds for index, name in enumerate(np.random.default_rng(0).permutation(names))}
    fold = np.array([fold_of[name] for name in group])
    errors = np.empty(len(time))
    for held_out in range(min(num_folds, len(names))):
        inside, outside = np.flatnonzero(fold == held_out), np.flatnonzero(fold != held_out)
        if len(inside) and len(outside):
            errors[inside] = relative_errors(refit(outside)(inside), time[inside])
    return errors
