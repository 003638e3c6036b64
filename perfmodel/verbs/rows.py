"""Predictions as flat rows, for data frames."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perfmodel.parallel.prediction import Prediction, Predictions


def prediction_rows(predictions: Predictions | Iterable[Prediction]) -> list[dict[str, Any]]:
    """Return one flat row for each prediction, with the columns of `predict --csv`, in SI units.

    `pandas.DataFrame(perfmodel.prediction_rows(predictions))` is the table. A combination that cannot be predicted has a row with its
    `reason`. `pandas.DataFrame(predictions)` has a column for each field instead, of which some are records.
    """
    from perfmodel.parallel.prediction import Predictions
    from perfmodel.parallel.rows import table_rows

    failures = predictions.not_predicted if isinstance(predictions, Predictions) else ()
    return table_rows(list(predictions), failures)
