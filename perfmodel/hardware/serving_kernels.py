"""Parameters of the kernels that serving runs and training does not: small all-reduces of the engines.

A part of a calibration (`Calibration.serving`), fractions of the chip's and its links' own rates as everything there. The formulas that
they belong to are in `perfmodel.cost.serving.kernels`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from perfmodel.foundation.errors import bad_field

ONE_SHOT, TWO_SHOT = "one_shot", "two_shot"
"""Every rank reads the whole buffer of every peer; or a share of it, adds it up, and reads the others' sums."""

ALL_REDUCE_KERNELS = (ONE_SHOT, TWO_SHOT)


def _require(holds: bool, name: str, value: object, rule: str) -> None:
    if not holds:
        raise bad_field(name, value, rule, "correct the calibration")


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallAllReduceModel:
    """Parameters of one of the kernels of `small_all_reduce_time`.

    base_time           a  [s] once: start, and the barriers
    peer_time           c  [s] more for each peer
    bandwidth_fraction  of the link's bandwidth (of one chip, one direction) at which peers' buffers are read
    """

    base_time: float
    peer_time: float = 0.0
    bandwidth_fraction: float = 0.6

    def __post_init__(self) -> None:
        _require(min(self.base_time, self.peer_time) >= 0, "base_time", self.base_time, "must not be negative, nor peer_time")
        _require(0 < self.bandwidth_fraction <= 1.25, "bandwidth_fraction", self.bandwidth_fraction, "must lie in 0..1.25")


_MAPPINGS = ("small_all_reduce", "points", "errors")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingKernels:
    """What was measured of serving's kernels on a chip; what is missing is taken from `TYPICAL`.

    small_all_reduce   by algorithm (`ALL_REDUCE_KERNELS`)
    points, errors     number of measurements and held-out median errors, by part
    """

    small_all_reduce: Mapping[str, SmallAllReduceModel] = field(default_factory=dict)
    points: Mapping[str, int] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in _MAPPINGS:
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))
        for kernel in self.small_all_reduce:
            _require(kernel in ALL_REDUCE_KERNELS, "small_all_reduce", kernel, f"must be one of {', '.join(ALL_REDUCE_KERNELS)}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Mapping proxies cannot be pickled: rebuild from plain dicts."""
        return _rebuild, ({name: dict(getattr(self, name)) for name in _MAPPINGS},)


def _rebuild(values: dict[str, Any]) -> ServingKernels:
    return ServingKernels(**values)


TYPICAL = ServingKernels(
    small_all_reduce={
        ONE_SHOT: SmallAllReduceModel(base_time=3.7e-6, peer_time=0.1e-6, bandwidth_fraction=0.58),
        TWO_SHOT: SmallAllReduceModel(base_time=17e-6, peer_time=0.1e-6, bandwidth_fraction=0.47),
    },
)
"""Of a chip that nobody measured: the means of A100, H100 and B200 (geometric; their shipped calibrations)."""
