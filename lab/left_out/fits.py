"""Constants of each framework that are fitted to published runs, their priors, and predictions by fits without the model of a run.

Step times determine rates, host times and overlap. Reported memories determine what an allocator holds in addition to tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lab.accuracy_lines import is_narrow
from lab.cases import PublishedRun, published_runs
from lab.fit_profiles import FittedConstants, fit_constants
from lab.splits import leave_one_out
from perfmodel.cost.assemble import PlanColumns, plan_columns
from perfmodel.uncertainty.priors import Constant
from perfmodel.validation.cases import Case
from perfmodel.validation.step_times import StepTimes
from perfmodel.validation.validate import CasePredictor, memory_figure

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """A constant, and the fit of a relative whose value is its prior; none: the constant's own prior holds."""

    constant: Constant
    relative: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileFit:
    """Constants of one framework, fitted to the step times or to the memory of all runs of its profiles from any source.

    sees_narrow   the fit uses runs in fp8 or narrower too; otherwise they are predicted with the constants of those in bf16
    lent          constants that its runs do not determine -> fits that lend them; of several the geometric mean
    lends_to      profiles without runs of their own that have these numbers too
    """

    profiles: tuple[str, ...]
    constants: tuple[Expected, ...]
    sees_narrow: bool = False
    lent: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    lends_to: tuple[str, ...] = ()


def _factor(name: str, prior: float, spread: float, lower: float, upper: float, relative: str = "") -> Expected:
    return Expected(constant=Constant(name=name, prior=prior, spread=spread, lower=lower, upper=upper), relative=relative)


def _rate(relative: str = "") -> Expected:
    """Return the matmul rate: 0.9 of the calibrated rate, within a tenth, for layouts, libraries and concurrent kernels."""
    return _factor("matmul_rate_fraction", 0.9, 0.1, 0.4, 1.0, relative)


def _time(name: str, prior: float, relative: str = "") -> Expected:
    """Return a host time; these scatter by half between frameworks."""
    return _factor(name, prior, 0.4, prior / 20, prior * 10, relative)


def _share(name: str, prior: float, spread: float) -> Expected:
    return Expected(constant=Constant(name=name, prior=prior, spread=spread, lower=0.0, upper=1.0, is_ratio=False))


#: Loops in eager torch share one matmul rate and one host time a step.
_EAGER = {"matmul_rate_fraction": ("composer-fsdp",), "step_time_constant": ("composer-fsdp",)}

#: A fit that lends constants or gives a prior is listed before the fits that use it. Numbers that took less than .3 points off the mean
#: error of the affected runs are left out (docs/accuracy.md, what each number is worth).
FITS: Mapping[str, ProfileFit] = MappingProxyType(
    {
        "composer-fsdp": ProfileFit(profiles=("composer-fsdp",), constants=(_rate(), _time("step_time_constant", 20e-3))),
        "nanotron": ProfileFit(
            profiles=("nanotron",),
            constants=(
                _time("host_launch_time", 30e-6),
                _time("host_layer_time_per_tp_across_nodes", 1e-3),
                # a foreach AdamW in float32 moves 80 bytes a parameter, clipping 12, copy and zeroing 8: 3 times the 30 of one kernel
                _factor("optimizer_bytes_factor", 3.0, 0.3, 1.0, 12.0),
                _share("uneven_stage_weight", 0.85, 0.1),
            ),
            lent=_EAGER,
        ),
        "nemo": ProfileFit(profiles=("nemo",), constants=(), sees_narrow=True),
        "deepspeed": ProfileFit(
            profiles=("deepspeed",),
            constants=(
                _time("host_launch_time", 30e-6, "nanotron"),
                _time("step_time_constant", 20e-3),
            ),
        ),
        "megatron": ProfileFit(
            profiles=("megatron",),
            constants=(_time("host_launch_time", 30e-6, "nanotron"),),
            lent={"step_time_constant": ("composer-fsdp",)},
            lends_to=("llama-3",),
        ),
        "megatron-2020": ProfileFit(profiles=("megatron-2020",), constants=(_share("exposed_gradient_fraction", 0.5, 0.3),)),
        "torch-fsdp": ProfileFit(
            profiles=("torch-fsdp2", "torchtitan"),
            constants=(
                _rate("composer-fsdp"),
                _share("compute_slowdown_under_communication", 0.2, 0.2),
                _factor("context_attention_rate_fraction", 0.65, 0.1, 0.2, 1.0),
            ),
            sees_narrow=True,
            # it has no short runs: the constant of one loop would be most of a step of 20 ms
            lent={"step_time_constant": ("composer-fsdp", "deepspeed")},
        ),
        "llm-c": ProfileFit(profiles=("llm-c",), constants=()),
    }
)

#: A caching allocator reserves 1 to 1.5 times the transient memory; some tens of collectives wait on a launch queue of 1,024 kernels.
#: These are wide ranges: where a profile has hundreds of runs, the runs determine the value.
MEMORY_FITS: Mapping[str, ProfileFit] = MappingProxyType(
    {
        "nanotron": ProfileFit(
            profiles=("nanotron",),
            constants=(
                _factor("reserve_factor", 1.15, 0.1, 1.0, 2.0),
                _factor("delayed_collectives", 50.0, 1.0, 1.0, 1024.0),
                _share("waiting_gradient_fraction", 0.5, 0.3),
            ),
            sees_narrow=True,
        ),
        "torchtitan": ProfileFit(profiles=("torchtitan",), constants=(_factor("reserve_factor", 1.15, 0.1, 1.0, 2.0),), sees_narrow=True),
        "megatron": ProfileFit(
            profiles=("megatron",),
            constants=(_factor("workspace_bytes", 64e6, 0.5, 1e6, 1e9),),
            sees_narrow=True,
            lends_to=("llama-3", "megatron-rocm", "nemo"),
        ),
    }
)


class Predictor(Protocol):
    """Predicts the chosen runs with profile fields replaced: step times [s] or memories [byte]."""

    def predict(self, chosen: Sequence[int], values: Mapping[str, float]) -> Array: ...


@dataclass(slots=True, kw_only=True)
class Memories:
    """Predictor of the memory that the framework of a run would report.

    known   constants fitted to step times, by profile, in place of the shipped ones: the host's run-ahead affects memory too
    """

    runs: Sequence[PublishedRun]
    known: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    predictor: CasePredictor = field(default_factory=lambda: CasePredictor(has_intervals=False))
    _columns: dict[int, PlanColumns] = field(default_factory=dict)

    def predict(self, chosen: Sequence[int], values: Mapping[str, float]) -> Array:
        """Return the memory of each chosen run. [byte] The columns of a plan are cached: the fitted constants do not change them."""
        figures = []
        for index in chosen:
            run = self.runs[index]
            estimator = self.predictor.estimator(run.planned)
            moved: dict[str, Any] = {**self.known.get(run.profile, {}), **values}
            estimator = replace(estimator, profile=estimator.profile.having(**moved))
            if index not in self._columns:
                self._columns[index] = plan_columns(estimator, [run.planned.plan])
            figures.append(memory_figure(estimator, run.planned, self._columns[index].of(estimator)))
        return np.array(figures)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedRun:
    """Prediction of one run. fold: the runs that its fit used."""

    run: PublishedRun
    predicted: float
    fold: str

    @property
    def error(self) -> float:
        return self.predicted / self.run.measured - 1.0


@dataclass(slots=True, kw_only=True)
class LeftOut:
    """Cached fits of every framework. what: what the runs measured."""

    runs: Sequence[PublishedRun]
    fits: Mapping[str, ProfileFit]
    predictor: Predictor
    what: str = "step time"
    _cached: dict[tuple[str, str], FittedConstants] = field(default_factory=dict)

    @classmethod
    def of_times(cls, runs: Sequence[PublishedRun]) -> LeftOut:
        return cls(runs=runs, fits=FITS, predictor=StepTimes(runs=runs))

    @classmethod
    def of_memories(cls, cases: Iterable[Case], known: Mapping[str, Mapping[str, float]] | None = None) -> LeftOut:
        """Return the fits to the runs that report their memory. known: as in `Memories`."""
        every = published_runs(cases, lambda case: not (case.reason or case.has_experts or math.isnan(case.measured("memory"))), "memory")
        runs = [run for run in every if not run.planned.framework.borrows and "recompute" not in run.planned.assumed]
        return cls(runs=runs, fits=MEMORY_FITS, predictor=Memories(runs=runs, known=known or {}), what="memory")

    def measured(self, rows: Sequence[int]) -> Array:
        return np.array([self.runs[index].measured for index in rows])

    def predicted(self, name: str) -> list[int]:
        """Return the runs that the fit of that name predicts."""
        return [index for index, run in enumerate(self.runs) if run.profile in self.fits[name].profiles]

    def rows_of(self, name: str, *, without: str = "") -> list[int]:
        """Return the runs that the fit of that name may use."""
        runs = [(index, self.runs[index]) for index in self.predicted(name) if self.runs[index].model != without]
        return [index for index, run in runs if self.fits[name].sees_narrow or not is_narrow(run.choice.labels)]

    def constants(self, name: str, *, without: str = "") -> tuple[Constant, ...]:
        """Return the constants with the priors of relatives, which are fitted without that model too."""
        expected = []
        for item in self.fits[name].constants:
            constant = item.constant
            if item.relative:
                value = self.fitted(item.relative, without=without).values[constant.name]
                constant = with_prior(constant, value)
            expected.append(constant)
        return tuple(expected)

    def fitted(self, name: str, *, without: str = "") -> FittedConstants:
        """Return the constants fitted to all runs except those of one model."""
        without = without if self._sees(name, without) else ""
        if (name, without) not in self._cached:
            rows = self.rows_of(name, without=without)
            lent = {
                constant: float(
                    np.exp(np.mean([np.log(self.fitted(relative, without=without).values[constant]) for relative in relatives]))
                )
                for constant, relatives in self.fits[name].lent.items()
            }
            fit = fit_constants(
                lambda values: np.log(self.predictor.predict(rows, lent | dict(values)) / self.measured(rows)),
                self.constants(name, without=without),
                num_runs=len(rows),
            )
            self._cached[name, without] = replace(fit, values={**lent, **fit.values})
        return self._cached[name, without]

    def _sees(self, name: str, model: str) -> bool:
        """Return whether the fit, or one that gives it a prior, uses runs of that model."""
        fit = self.fits[name]
        has_runs = any(self.runs[index].model == model for index in self.predicted(name))
        relatives = {item.relative for item in fit.constants if item.relative} | set(chain.from_iterable(fit.lent.values()))
        return has_runs or any(self._sees(relative, model) for relative in relatives)

    def predictions(self) -> list[PredictedRun]:
        """Return the prediction of each run by the fit of its framework without its model, or by its relatives' where there is no other."""
        predictions: dict[int, PredictedRun] = {}
        for name in self.fits:
            rows = self.predicted(name)
            for split in leave_one_out([self.runs[index].model for index in rows]):
                held_out = [rows[index] for index in split.held_out]
                fitted = self.fitted(name, without=split.label)
                seen = f"fit to {fitted.num_runs} runs of {name}" if fitted.num_runs else f"no run of {name}: constants of its relatives"
                fold = f"without {split.label}: {seen}"
                for index, time in zip(held_out, self.predictor.predict(held_out, fitted.values).tolist(), strict=True):
                    predictions[index] = PredictedRun(run=self.runs[index], predicted=time, fold=fold)
        return [predictions[index] for index in sorted(predictions)]


def with_prior(constant: Constant, value: float) -> Constant:
    """Return the constant with a relative's value as prior, clipped to its bounds."""
    return replace(constant, prior=min(max(value, constant.lower), constant.upper))
