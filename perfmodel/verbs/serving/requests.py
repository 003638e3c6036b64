"""Several clusters, numbers of chips, degrees and loads of `serve`: every combination is one request and one row."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, TypeVar

from perfmodel.foundation.errors import InputError, bad_field
from perfmodel.foundation.values import several
from perfmodel.foundation.words import Words, takes
from perfmodel.parallel.serving.prediction import ServingPrediction
from perfmodel.parallel.serving.request import ServingRequest
from perfmodel.verbs.serving.predict import serve_asked

Answer = TypeVar("Answer")

LISTED = ("cluster", "chips", "tp", "concurrency", "rate")
"""Fields that accept several values, the last varying fastest."""
MOST_REQUESTS = 1000
_THOUSANDS = re.compile(r"[1-9]\d{0,2},0\d\d", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredRequest:
    """One request of several.

    asked       fields with several values
    prediction  None if it cannot be predicted; reason: why not
    """

    asked: Mapping[str, Any]
    prediction: ServingPrediction | None
    reason: str = ""


@takes(asked=Words(ServingRequest, needed="model cluster chips input_len output_len"))
def serve_several(*, asked: ServingRequest) -> list[AnsweredRequest]:
    """`serve` for every combination of several clusters, chips, tp, and concurrencies or rates (lists, or texts such as `16,64`)."""
    return served_several(serving_requests(asked))


def serving_requests(asked: ServingRequest) -> list[ServingRequest]:
    """Return every combination of the values. Raises InputError."""
    values: dict[str, list[Any]] = {}
    for name in LISTED:
        given = getattr(asked, name)
        if isinstance(given, str) and name != "cluster" and _THOUSANDS.search(given):
            raise bad_field(name, given, "is a list of two numbers", f"write {given.replace(',', '')} for one number")
        values[name] = list(dict.fromkeys(several(given))) or [None]
    combinations = list(product(*values.values()))
    if len(combinations) > MOST_REQUESTS:
        rule = f"make {len(combinations):,} combinations, and {MOST_REQUESTS:,} is the most"
        raise InputError(f"{', '.join(name for name in LISTED if len(values[name]) > 1)}: {rule}; give fewer values")
    return [replace(asked, **dict(zip(values, combination, strict=True))) for combination in combinations]


def served_several(requests: list[ServingRequest]) -> list[AnsweredRequest]:
    """Predict each request; those that cannot be predicted have a reason. Raises the first reason if none can be predicted."""
    answers = answered_each(requests, lambda request: serve_asked(request)[1])
    return [AnsweredRequest(asked=asked, prediction=prediction, reason=reason) for asked, prediction, reason in answers]


def answered_each(
    requests: list[ServingRequest], answer: Callable[[ServingRequest], Answer]
) -> list[tuple[dict[str, Any], Answer | None, str]]:
    """Return (varied fields, answer or None, reason of the failure) of each request. Raises the first reason if all fail."""
    varied = [name for name in LISTED if len({str(getattr(request, name)) for request in requests}) > 1]
    answers: list[tuple[dict[str, Any], Answer | None, str]] = []
    errors: list[InputError] = []
    for request in requests:
        asked = {name: getattr(request, name) for name in varied}
        try:
            answers.append((asked, answer(request), ""))
        except InputError as error:
            errors.append(error)
            answers.append((asked, None, str(error)))
    if len(errors) == len(answers):
        raise errors[0]
    return answers
