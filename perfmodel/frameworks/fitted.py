"""Parameters of a profile that were fitted to the user's runs, and their uncertainty."""

from __future__ import annotations

from dataclasses import dataclass

from perfmodel.foundation.errors import InputError, bad_field


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedConstant:
    """A constant of the profile that was fitted to runs.

    fields         fields of the profile with this constant; the first one has its value
    prior          value before the fit
    prior_spread   standard deviation of the prior: of the logarithm, or of the value if `is_ratio` is false
    is_ratio       whether the prior is normal in the logarithm
    share_known    1 - (posterior / prior standard deviation)^2
    """

    fields: tuple[str, ...]
    prior: float
    prior_spread: float
    is_ratio: bool
    share_known: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedTo:
    """Runs to which a profile was fitted; none for a shipped profile.

    base            profile from which the fit started
    date            date of the fit
    num_runs        runs with a step time
    noise           expected |log(measured / predicted)| of a further run with the best constants
    left_out_error  mean |predicted / measured - 1| of leave-one-out cross-validation
    models, chips   of the runs: shapes (`residuals.shape_of`) and names
    features        rare features of the runs, such as `8-bit products` (`residuals.RunFeatures.named`)
    constants       fitted constants
    covariance      posterior covariance of the constants, in units of their prior spreads
    num_memory_runs, memory_known   runs with a measured peak of memory, and the share of the prior variance of reserved over allocated
                    memory that they removed
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
