"""Framework parameters that a fit to a few runs of the user moves, and their spread between frameworks: the widths of the priors.

Each is a constant of an execution profile. The mean of its prior is the value of the profile that the fit starts from. Its spread is one
standard deviation between the known frameworks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from perfmodel.foundation.dtypes import Dtype
from perfmodel.foundation.errors import InputError
from perfmodel.frameworks.profile import ExecutionProfile
from perfmodel.parallel.plan import Plan

_SHARED, _OWN = 0.12, 0.05
"""|log(predicted / measured)| with the best parameters: the error that runs of one loop share, and the error of each run alone."""

SCATTER = 0.08
"""Standard deviation of a further run about a fit to few runs. Intervals made from it hold four fifths of the other runs of published
frameworks in leave-one-framework-out (`lab/few_runs.py`).
"""

ELEMENTWISE = "rms_norm_traffic"
"""The parameter that compiled programs depend on; all others enter when a step is assembled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """One number to fit.

    prior         expected value without a run
    spread        standard deviation of its logarithm, or of the value itself if `is_ratio` is false
    lower, upper  bounds
    """

    name: str
    prior: float
    spread: float
    lower: float
    upper: float
    is_ratio: bool = True

    def __post_init__(self) -> None:
        if not self.lower <= self.prior <= self.upper:
            raise InputError(f"{self.name}: prior={self.prior}: must lie in {self.lower}..{self.upper}; widen the bounds or correct it")
        if self.spread <= 0:
            raise InputError(f"{self.name}: spread={self.spread}: must be positive; leave out a constant that is known")
        if self.is_ratio and self.lower <= 0:
            raise InputError(f"{self.name}: lower={self.lower}: must be positive where spread is of the logarithm; set is_ratio=False")

    def value(self, spreads: float) -> float:
        """Return the constant at a distance from its prior in standard deviations."""
        moved = self.prior * np.exp(spreads * self.spread) if self.is_ratio else self.prior + spreads * self.spread
        return float(min(max(moved, self.lower), self.upper))

    def spread_of(self, value: float) -> float:
        """Return one standard deviation at this value, in the constant's unit."""
        return self.spread * abs(value) if self.is_ratio else self.spread

    def spreads(self, value: float) -> float:
        """Return the distance of `value` from the prior in standard deviations."""
        return float(np.log(value / self.prior) / self.spread) if self.is_ratio else (value - self.prior) / self.spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """Framework parameter with a prior.

    fields      fields of the profile; the others keep their ratio to the first
    spread      one standard deviation between frameworks: of the logarithm, or of the value itself if `is_ratio` is false
    unmeasured  the same where the machine's rates come from a data sheet; 0: no wider
    says        description; unit: "s", or empty for a share or a factor
    touches     whether the step time of a run depends on it
    """

    fields: tuple[str, ...]
    spread: float
    lower: float
    upper: float
    says: str
    is_ratio: bool = True
    unit: str = ""
    unmeasured: float = 0.0
    touches: Callable[[Plan, Dtype], bool] = lambda plan, matmul_dtype: True

    @property
    def name(self) -> str:
        return self.fields[0]

    def constant(self, base: ExecutionProfile) -> Constant:
        """Return the constant of a fit. A base value outside the bounds widens them; a ratio of zero starts from the lower bound."""
        prior = float(base.option(self.name)) or (self.lower if self.is_ratio else 0.0)
        lower, upper = min(self.lower, prior), max(self.upper, prior)
        return Constant(name=self.name, prior=prior, spread=self.spread, lower=lower, upper=upper, is_ratio=self.is_ratio)

    def moved(self, base: ExecutionProfile, value: float) -> dict[str, float]:
        """Return the fields of the profile at this value of the parameter."""
        base_value = float(base.option(self.name))
        return {self.name: value} | {name: float(base.option(name)) * value / base_value for name in self.fields[1:]}


#: Spread between the known frameworks:
#: - rates of matrix multiplies .83-1 on A100, .93-1.01 since, 1.29 in NVIDIA's recipes; of attention .36-1 of the calibrated kernel's
#: - norms fused, or in float32 and eager code at 12.8 times the least traffic
#: - tensor-parallel communication overlapped in backward 0-.8
#: - host 15-60 us a kernel with Python, a factor of two about their mean, and 0-2.1 ms more a layer and tp rank over several nodes
#: - pace of a pipeline: set by the slowest stage, or by .7 of it where layers are placed by cost
#: - step constant 5-22 ms; optimizer traffic 1-5.3 times the least
#: - gradient reduction that could be overlapped: all of it is, or almost none
#: - ZeRO's reduce-scatter overlapped with backward in four families of five, exposed after it in the fifth (nanotron): 0, 0, 0, 0 and 1
#:   scatter by .4
#: - all-gathers of the updated parameters, tensor by tensor, take 4.3 times as long: 1, 1, 1, 1 and 4.3 scatter by .6 of a logarithm
BEHAVIOURS: Sequence[Behaviour] = (
    Behaviour(
        fields=("matmul_rate_fraction",),
        spread=0.12,
        lower=0.3,
        upper=1.6,
        unmeasured=0.4,
        says="matrix-multiply rate, relative to calibration",
    ),
    Behaviour(
        fields=("attention_rate_fraction",),
        spread=0.35,
        lower=0.1,
        upper=3.0,
        unmeasured=0.6,
        says="fused-attention rate, relative to calibration",
    ),
    Behaviour(
        fields=(ELEMENTWISE, "rotary_traffic"),
        spread=0.8,
        lower=1.0,
        upper=16.0,
        says="memory traffic of norms and rotary embeddings",
    ),
    Behaviour(
        fields=("tp_backward_overlap_fraction",),
        spread=0.3,
        lower=0.0,
        upper=1.0,
        is_ratio=False,
        says="overlapped share of TP communication in backward",
        touches=lambda plan, matmul_dtype: plan.layout.tp > 1,
    ),
    Behaviour(
        fields=("exposed_gradient_fraction",),
        spread=0.4,
        lower=0.0,
        upper=1.0,
        is_ratio=False,
        says="exposed share of gradient reduction",
    ),
    Behaviour(
        fields=("exposed_scatter_fraction",),
        spread=0.4,
        lower=0.0,
        upper=1.0,
        is_ratio=False,
        says="exposed share of ZeRO's reduce-scatter",
        touches=lambda plan, matmul_dtype: int(plan.zero) in (1, 2),
    ),
    Behaviour(
        fields=("publish_factor",),
        spread=0.6,
        lower=0.3,
        upper=20.0,
        says="all-gather time of updated parameters (ZeRO 1)",
        touches=lambda plan, matmul_dtype: int(plan.zero) in (1, 2),
    ),
    Behaviour(
        fields=("host_launch_time",),
        spread=0.7,
        lower=1e-7,
        upper=1e-3,
        unit="s",
        unmeasured=1.6,
        says="host time per kernel launch",
    ),
    Behaviour(
        fields=("host_layer_time_per_tp_across_nodes",),
        spread=1.0e-3,
        lower=0.0,
        upper=20e-3,
        is_ratio=False,
        unit="s",
        says="host time per layer and tp rank across nodes",
        touches=lambda plan, matmul_dtype: plan.layout.pp > 1,
    ),
    Behaviour(
        fields=("uneven_stage_weight",),
        spread=0.15,
        lower=0.0,
        upper=1.0,
        is_ratio=False,
        says="weight of the slowest pipeline stage",
        touches=lambda plan, matmul_dtype: plan.layout.pp > 1,
    ),
    Behaviour(fields=("step_time_constant",), spread=10e-3, lower=0.0, upper=10.0, is_ratio=False, unit="s", says="host time per step"),
    Behaviour(fields=("optimizer_bytes_factor",), spread=0.5, lower=1.0, upper=20.0, says="memory traffic of the optimizer"),
    Behaviour(
        fields=("fp8_matmul_rate_fraction",),
        spread=0.15,
        lower=0.3,
        upper=2.5,
        says="fp8 matrix-multiply rate, relative to calibration",
        touches=lambda plan, matmul_dtype: matmul_dtype is Dtype.FP8,
    ),
)

#: Not in `BEHAVIOURS`: it changes memory and no time.
#:
#: Known allocators hold 1 to 1.23 times the working set (torchtitan 1.23, nanotron 1.13).
RESERVE = Behaviour(
    fields=("reserve_factor",), spread=0.15, lower=1.0, upper=3.0, says="memory held by the allocator, over that of tensors"
)


def behaviours_of(*, measured: bool) -> tuple[Behaviour, ...]:
    """Return the parameters of a fit, with wider priors for an uncalibrated machine.

    measured   the kernel rates of the runs' machine are calibrated
    """
    if measured:
        return tuple(BEHAVIOURS)
    return tuple(replace(behaviour, spread=max(behaviour.spread, behaviour.unmeasured)) for behaviour in BEHAVIOURS)


def moved_fields(behaviours: Sequence[Behaviour], base: ExecutionProfile, values: Mapping[str, float]) -> dict[str, float]:
    """Return the fields of the profile at these values of the parameters."""
    return {
        name: value
        for behaviour in behaviours
        if behaviour.name in values
        for name, value in behaviour.moved(base, values[behaviour.name]).items()
    }


def noise_of(num_runs: int) -> float:
    """Return the standard deviation of each run's error. Runs share a part of it, which only many runs average out."""
    return math.sqrt((_SHARED**2 + max(num_runs - 1, 0) * _OWN**2) / max(num_runs, 1))
