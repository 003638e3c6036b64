"""Maximum a posteriori fit of a few constants to published steps.

This module is independent of frameworks: a fit takes a function from constants to log(predicted / measured) of its runs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from perfmodel.uncertainty.priors import Constant

Array = NDArray[np.float64]

NOISE = 0.05
"""|log(predicted / measured)| of a run at the best constants. Larger errors count less than their squares (soft L1)."""

_STEP = 0.1
"""Step of the finite differences, in spreads of the constant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedConstants:
    """Fitted constants, by name.

    mean_error  of |predicted / measured - 1| over the runs that were fitted (nan where there were none)
    spreads     posterior standard deviation of each value
    """

    values: Mapping[str, float]
    num_runs: int
    mean_error: float
    spreads: Mapping[str, float]


def fit_constants(
    log_errors: Callable[[Mapping[str, float]], Array], constants: Sequence[Constant], *, num_runs: int, max_rounds: int = 10
) -> FittedConstants:
    """Return the maximum a posteriori constants; without runs, the priors.

    Minimises  sum_i 2 (sqrt(1 + (e_i / s)^2) - 1) + sum_j z_j^2  by Gauss-Newton steps within the bounds:
    e_i  log(predicted / measured) of run i;  s  NOISE;  z_j  spreads of constant j from its prior.
    """
    from scipy.optimize import least_squares

    def values(z: Array) -> dict[str, float]:
        return {constant.name: constant.value(float(x)) for constant, x in zip(constants, z, strict=True)}

    @cache
    def errors_at(z: tuple[float, ...]) -> Array:
        """Return the errors of the runs, cached by point: a Jacobian starts at the end of the previous step."""
        return np.asarray(log_errors(values(np.array(z))))

    def residuals(z: Array) -> Array:
        """Return pseudo-Huber losses as squares, so that the priors stay quadratic."""
        errors = errors_at(tuple(z)) / NOISE
        return np.concatenate([np.sign(errors) * np.sqrt(2.0 * (np.sqrt(1.0 + errors * errors) - 1.0)), z])

    def jacobian(z: Array) -> Array:
        base = residuals(z)
        columns = []
        for index in range(len(z)):
            step = _STEP if z[index] + _STEP <= highest[index] else -_STEP
            moved = z.copy()
            moved[index] += step
            columns.append((residuals(moved) - base) / step)
        return np.stack(columns, axis=1)

    z, open_ = np.zeros(len(constants)), np.ones(len(constants))
    if num_runs and len(constants):
        lowest = np.array([constant.spreads(constant.lower) for constant in constants])
        highest = np.array([constant.spreads(constant.upper) for constant in constants])
        # a start on a bound is not allowed
        start = np.clip(z, lowest + 1e-3, highest - 1e-3)
        best = least_squares(residuals, start, jac=jacobian, bounds=(lowest, highest), max_nfev=max_rounds, xtol=1e-3, ftol=1e-3)
        z, open_ = best.x, np.sqrt(np.diag(np.linalg.inv(best.jac.T @ best.jac)))
    fitted = values(z)
    errors = np.abs(np.expm1(errors_at(tuple(z)))) if num_runs else np.array([np.nan])
    spreads = {constant.name: constant.spread_of(fitted[constant.name]) * float(open_[i]) for i, constant in enumerate(constants)}
    return FittedConstants(values=fitted, num_runs=num_runs, mean_error=float(errors.mean()), spreads=spreads)
