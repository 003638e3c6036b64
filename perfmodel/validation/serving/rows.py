"""Prediction and measurement of one published serving run, the labels that errors are grouped by, and its line in a table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from perfmodel.validation.fields import UNKNOWN
from perfmodel.validation.run_labels import RunLabels
from perfmodel.validation.serving.cases import PlannedServing
from perfmodel.validation.serving.measured import KUNDU, Served


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRow:
    """Prediction and measurement of one serving run.

    predicted     metric -> seconds (tokens_per_second: output tokens of all chips); empty without a prediction, with the reason
    intervals     metric -> its 80 % interval
    labels        labels that errors are grouped by
    max_sequences   predicted, of a replica
    """

    id: str
    group: str
    tier: str
    kind: str = ""
    labels: RunLabels = field(default_factory=lambda: RunLabels(source=UNKNOWN))
    served: Served = field(default_factory=Served)
    predicted: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=lambda: MappingProxyType({}))
    predicted_fits: bool | None = None
    max_sequences: float = math.nan
    planned: PlannedServing | None = None
    reason: str = ""

    @property
    def is_predicted(self) -> bool:
        return bool(self.predicted)

    @property
    def is_second_hand(self) -> bool:
        return self.group == KUNDU

    @property
    def is_scored(self) -> bool:
        """The run is primary, not suspect, and predicted."""
        return self.is_predicted and self.tier == "primary" and not self.served.suspect

    def measured(self, metric: str) -> float:
        return float(getattr(self.served, metric))

    def error(self, metric: str) -> float:
        """Return predicted / measured - 1; nan where one is missing."""
        return self.predicted.get(metric, math.nan) / self.measured(metric) - 1.0

    def counts(self, metric: str) -> bool:
        """Return whether the error of a metric counts: it does not include queueing or start-up that the source mentions."""
        return not math.isnan(self.error(metric)) and not (metric == "ttft" and self.served.ttft_note)
