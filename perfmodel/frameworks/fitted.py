"""Which parameters of a profile were fitted to the user's runs, and how well they are known."""

from __future__ import annotations

from dataclasses import dataclass

from perfmodel.foundation.errors import InputError, bad_field


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedConstant:
    """A constant of the profile that runs could move.

    fields         that it is, in the profile; the first one is its value
    prior          its value without the runs
    prior_spread   one standard deviation of that: of the logarithm, or where `is_ratio` is false of the value
    is_ratio       its logarithm has the spread
    share_known    1 - (standard deviation with the runs / without)^2
    """

    fields: tuple[str, ...]
    prior: float
    prior_spread: float
    is_ratio: bool
    share_known: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedTo:
    """Runs that a profile was fitted to; none of a profile that ships.

    base            the profile that the fit started from
    date            of the fit
    num_runs        runs with a step time
    noise           |log(measured / predicted)| of a further run with the best of constants
    left_out_error  mean of |predicted / measured - 1| of each run by the others
    models, chips   of the runs: shapes (`residuals.shape_of`) and names
    features        of the runs that few published ones have, `8-bit products` among them (`residuals.RunFeatures.named`)
    constants       that the runs moved
    covariance      of the constants, in spreads of their priors
    num_memory_runs, memory_known   runs with a measured peak of memory, and the share of the prior's variance that they removed of what
                    the allocator holds over tensors
    """

    base: str = ""
    date: str = ""
    num_runs: int = 0
    noise: float = 0.0
    left_out_error: float = 0.0
    models: tuple[str, ...] = ()
    chips: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    constants: tuple[FittedConstant, ...] = ()
    covariance: tuple[tuple[float, ...], ...] = ()
    num_memory_runs: int = 0
    memory_known: float = 0.0

    def __post_init__(self) -> None:
        n = len(self.constants)
        if len(self.covariance) != n or any(len(row) != n for row in self.covariance):
            raise InputError(f"covariance: must have {n} rows of {n} numbers, one for each of the constants; fit again")
        if not (0 <= self.noise < 20 and self.num_runs >= 0):
            raise bad_field("noise", self.noise, "must be from 0 to 20, of a fit to no fewer than no runs", "fit again")


NOTHING = FittedTo()
