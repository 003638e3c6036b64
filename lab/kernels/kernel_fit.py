"""A kernel model fitted to a table of measured times, and its errors on shapes that the fit did not see.

Whole groups of shapes are left out, never single points of a group: the weight (n, k) of a matrix multiply with all its m; the heads of an
attention with all batch sizes and lengths; a layer of experts with all numbers of chips and tokens; a decade of message sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from perfmodel.calibrate.fits import NUM_FOLDS, Array, Indices, held_out_errors, relative_errors, rounded
from perfmodel.cost.machine import Machine, resolve_machine
from perfmodel.foundation.dtypes import Dtype
from perfmodel.hardware.calibration import Calibration, KernelModels
from perfmodel.hardware.cluster import Cluster

DECODE_ROWS = 128
"""Matrix multiplies with fewer rows are those of decoding."""

FIT_POINTS = 3000
"""Points of a table that a fit uses (drawn at random, seed 0). Errors are over all points."""

EACH_GROUP = 2**31

OUTLIER = 0.1
"""Relative error from which a point counts less than its square (soft L1): tables contain badly selected kernels."""

_Table = TypeVar("_Table", bound=Any)
"""A dataclass of columns, among them the measured time [s]. A column is an array of one length, or one value for all rows."""
_Model = TypeVar("_Model")


def columns_of(table: Any) -> dict[str, NDArray[Any]]:
    """Return the columns of a table by name, all of one length."""
    return {column.name: np.broadcast_to(getattr(table, column.name), table.time.shape) for column in fields(table)}


def chosen_rows(table: _Table, chosen: Any) -> _Table:
    """Return the rows of a table that `chosen` indexes."""
    return replace(table, **{name: column[chosen] for name, column in columns_of(table).items()})


def joined(first: _Table, second: _Table) -> _Table:
    """Return the rows of both tables."""
    others = columns_of(second)
    return replace(first, **{name: np.concatenate([column, others[name]]) for name, column in columns_of(first).items()})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KernelFit(Generic[_Table, _Model]):
    """A kernel, its table and the fit of its model.

    name      as calibrations report it
    groups    label of each point; points of one label are left out together
    fit       the model of a table
    predict   times of a table by a model [s]
    num_folds   of the cross-validation; whole groups go into one fold. `EACH_GROUP`: a fold for each
    parts     suffix of the name -> points that are reported under it; empty: all points under the name
    uses_all  the shipped fit uses every point, not a sample
    """

    name: str
    table: _Table
    groups: NDArray[Any]
    fit: Callable[[_Table], _Model]
    predict: Callable[[_Model, _Table], Array]
    num_folds: int = NUM_FOLDS
    parts: Mapping[str, Any] = field(default_factory=dict)
    uses_all: bool = False

    def model(self) -> _Model:
        """Return the model that ships."""
        return self.fit(self.table if self.uses_all else chosen_rows(self.table, sample(len(self.table.time))))

    def errors(self, model: _Model) -> Array:
        """Return |predicted / measured - 1| of every point by a given model. [-]"""
        return relative_errors(self.predict(model, self.table), self.table.time)

    def held_out_errors(self) -> Array:
        """Return |predicted / measured - 1| of every point by a fit to other groups. [-]"""

        def refit(chosen: Indices) -> Callable[[Indices], Array]:
            model = self.fit(chosen_rows(self.table, chosen[sample(len(chosen))]))
            return lambda held_out: self.predict(model, chosen_rows(self.table, held_out))

        return held_out_errors(self.groups, self.table.time, refit, num_folds=self.num_folds)

    def by_part(self, errors: Array) -> Iterator[tuple[str, Array]]:
        """Yield the name of each part and its errors."""
        for suffix, rows in (self.parts or {"": slice(None)}).items():
            yield self.name + suffix, errors[rows]


@dataclass(slots=True, kw_only=True)
class PartErrors:
    """Number of points and median error of each part of a calibration. label: beginning of the printed lines."""

    label: str
    say: Callable[[str], None] = print
    points: dict[str, int] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)

    def note(self, part: str, errors: Array) -> None:
        median, p90 = np.median(errors), np.quantile(errors, 0.9)
        self.points[part], self.errors[part] = len(errors), round(float(median), 4)
        self.say(f"{self.label}{part}: {len(errors)} points, held-out errors: median {median:.1%}, p90 {p90:.1%}")

    def noted(self, kernel: KernelFit[_Table, _Model]) -> KernelFit[_Table, _Model]:
        """Note the held-out errors of each part of a kernel, and return the kernel."""
        for part, errors in kernel.by_part(kernel.held_out_errors()):
            self.note(part, errors)
        return kernel


def micro(value: float) -> float:
    return value * 1e-6


def mega(value: float) -> float:
    return value * 1e6


def inverse(value: float) -> float:
    return 1.0 / value


class Parameter(NamedTuple):
    """A fitted parameter: start and bounds of the fit. convert: the parameter of a fitted value."""

    start: float
    lower: float
    upper: float
    convert: Callable[[float], float] = float


def fit_parameters(
    make: Callable[..., _Model],
    parameters: Mapping[str, Parameter],
    predict: Callable[[_Model], Array],
    time: Array,
    *,
    weight: Any = 1.0,
) -> _Model:
    """Return the model whose predicted times are nearest to the measured ones, on a logarithmic scale.

    make      model of parameters by name
    predict   times of the points by a model [s]
    weight    of each point [-]
    """

    from scipy.optimize import least_squares

    def model(x: Array) -> _Model:
        return make(**{name: rounded(parameter.convert(value)) for (name, parameter), value in zip(parameters.items(), x, strict=True)})

    start, lower, upper, _ = (np.array(column) for column in zip(*parameters.values(), strict=True))
    logarithm = np.log(time)
    result = least_squares(
        lambda x: (np.log(predict(model(x))) - logarithm) * weight,
        start,
        bounds=(lower, upper),
        x_scale=np.maximum(np.abs(start), 0.05 * (upper - lower)),
        loss="soft_l1",
        f_scale=OUTLIER,
        diff_step=1e-3,
    )
    return model(result.x)


def sample(number: int) -> Indices:
    """Return the indices of the points that a fit to `number` points uses."""
    return np.sort(np.random.default_rng(0).permutation(number)[:FIT_POINTS])


def groups_of(*columns: Array) -> NDArray[Any]:
    """Return an integer for each row, equal wherever all columns are equal."""
    _, group = np.unique(np.stack(columns), axis=1, return_inverse=True)
    return np.asarray(group).ravel()


def octave_weight(*columns: Array) -> Array:
    """Return weights that count each octave of the shapes once, at any density of measurements; mean 1."""
    octaves = np.stack([np.round(np.log2(column)) for column in columns])
    _, inverse, counts = np.unique(octaves, axis=1, return_inverse=True, return_counts=True)
    weight = 1.0 / np.sqrt(counts[inverse.ravel()])
    return np.asarray(weight / weight.mean())


def bare_machine(cluster: Cluster, dtype: Dtype, **parts: Any) -> Machine:
    """Return the machine with only these kernels calibrated: no clock factor and fully exposed floors, as in a benchmark."""
    calibration = Calibration(name="fit", chips=(cluster.chip.name,), software="", source="", date="", kernels=KernelModels(**parts))
    return resolve_machine(cluster, calibration, dtype=dtype)
