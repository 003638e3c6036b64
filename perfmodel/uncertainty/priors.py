"""The habits that a few runs of one's own may move, and how far frameworks differ in each: the widths of the priors.

Each is a constant of an execution profile. Its prior is the value of the profile that the fit starts from; its spread is what is known
of others' habits, one standard deviation.
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
"""Standard deviation of a further run about a fit to few runs: intervals made from it hold four fifths of the other runs of published
frameworks whose names were hidden (`lab/few_runs.py`)."""

ELEMENTWISE = "rms_norm_traffic"
"""The parameter that compiled programs read: all others are read when a step is put together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """One number to fit.

    prior         what is expected without a run
    spread        one standard deviation of that: of its logarithm, or where `is_ratio` is false of itself
    lower, upper  what is possible
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
        """The constant that many spreads from its prior."""
        moved = self.prior * np.exp(spreads * self.spread) if self.is_ratio else self.prior + spreads * self.spread
        return float(min(max(moved, self.lower), self.upper))

    def spread_of(self, value: float) -> float:
        """One standard deviation there, in the constant's unit."""
        return self.spread * abs(value) if self.is_ratio else self.spread

    def spreads(self, value: float) -> float:
        """How many spreads `value` is from the prior."""
        return float(np.log(value / self.prior) / self.spread) if self.is_ratio else (value - self.prior) / self.spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """fields    of the profile; the others keep their ratio to the first
    spread    one standard deviation between frameworks: of the logarithm, or where `is_ratio` is false of the value itself
    unmeasured  the same where the machine's rates are a data sheet's; 0: no wider
    says      what it is, in words; unit: "s", or nothing for a share or a factor
    touches   whether a run can tell anything of it
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
        """The constant that a fit moves. A base value outside the bounds widens them; a ratio of zero starts from the lower bound."""
        prior = float(base.option(self.name)) or (self.lower if self.is_ratio else 0.0)
        lower, upper = min(self.lower, prior), max(self.upper, prior)
        return Constant(name=self.name, prior=prior, spread=self.spread, lower=lower, upper=upper, is_ratio=self.is_ratio)

    def moved(self, base: ExecutionProfile, value: float) -> dict[str, float]:
        """The fields of the profile at this value of the habit."""
        own = float(base.option(self.name))
        return {self.name: value} | {name: float(base.option(name)) * value / own for name in self.fields[1:]}


#: How far the known frameworks differ: rates of products .83-1 on A100, .93-1.01 since, 1.29 in NVIDIA's recipes; of attention .36-1 of the
#: calibrated kernel's; norms fused, or in float32 and eager code at 12.8 times the least traffic; tensor-parallel
#: communication hidden in backward 0-.8; host 15-60 us a kernel with Python, a factor of two about their mean, and 0-2.1 ms more a layer
#: and tp rank over several nodes; the slowest stage sets a pipeline's pace, or .7 of it does where layers are placed by cost; step constant
#: 5-22 ms; optimizer traffic 1-5.3 times the least; of a gradient reduction that could hide, all or next to nothing does; what ZeRO
#: scatters leaves under backward in four families of five and after it in the fifth (nanotron): 0, 0, 0, 0 and 1 scatter by .4;
#: its gathers of what the step updated, tensor by tensor, take 4.3 times as long: 1, 1, 1, 1 and 4.3 scatter by .6 of a logarithm.
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

#: Not among them: it moves memory and no time. Known allocators hold 1 to 1.23 times what comes and goes (torchtitan 1.23, nanotron 1.13).
RESERVE = Behaviour(
    fields=("reserve_factor",), spread=0.15, lower=1.0, upper=3.0, says="memory held by the allocator, over that of tensors"
)


def behaviours_of(*, measured: bool) -> tuple[Behaviour, ...]:
    """measured: something is known of the kernels of the runs' machine."""
    return (
        tuple(BEHAVIOURS)
        if measured
        else tuple(replace(behaviour, spread=max(behaviour.spread, behaviour.unmeasured)) for behaviour in BEHAVIOURS)
    )


def moved_fields(behaviours: Sequence[Behaviour], base: ExecutionProfile, values: Mapping[str, float]) -> dict[str, float]:
    """The fields of the profile at these values of the habits."""
    return {
        name: value
        for behaviour in behaviours
        if behaviour.name in values
        for name, value in behaviour.moved(base, values[behaviour.name]).items()
    }


def noise_of(num_runs: int) -> float:
    """Standard deviation of each run's error: runs share a part of it, which only many runs average out."""
    return math.sqrt((_SHARED**2 + max(num_runs - 1, 0) * _OWN**2) / max(num_runs, 1))
