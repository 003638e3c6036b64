"""Several clusters, numbers of chips, degrees and loads of `serve` at once: every combination is one request and one row."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any, TypeVar

from perfmodel.foundation.errors import InputError, bad_field
from perfmodel.foundation.values import several
from perfmodel.foundation.words import Words, takes
from perfmodel.parallel.serving.prediction import ServingPrediction
from perfmodel.parallel.serving.request import ServingRequest
from perfmodel.verbs.serving import serve_asked

if TYPE_CHECKING:
    from perfmodel.planner.serving.result import ServingSearchResult

Answer = TypeVar("Answer")

LISTED = ("cluster", "chips", "tp", "concurrency", "rate")
"""Words of which several values may be given, the last varying fastest."""
MOST_REQUESTS = 1000
_THOUSANDS = re.compile(r"[1-9]\d{0,2},0\d\d", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredRequest:
    """One request of several.

    asked       its words that were given several values
    prediction  None where it cannot be predicted; reason says why
    """

    asked: Mapping[str, Any]
    prediction: ServingPrediction | None
    reason: str = ""


@takes(asked=Words(ServingRequest, needed="model cluster chips input_len output_len"))
def serve_several(*, asked: ServingRequest) -> list[AnsweredRequest]:
    """`serve` for every combination of several clusters, chips, tp, and concurrencies or rates (lists, or texts such as `16,64`)."""
    return served_several(serving_requests(asked))


def serving_requests(asked: ServingRequest) -> list[ServingRequest]:
    """Every combination of the values. Raises InputError."""
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
    return [replace(asked, **dict(zip(values, each, strict=True))) for each in combinations]


def served_several(requests: list[ServingRequest]) -> list[AnsweredRequest]:
    """Each predicted; those that cannot be have a reason. Raises the first reason where none can be predicted."""
    answers = _answered(requests, lambda each: serve_asked(each)[1])
    return [AnsweredRequest(asked=asked, prediction=prediction, reason=reason) for asked, prediction, reason in answers]


def searched_several(
    requests: list[ServingRequest], search: Callable[[ServingRequest], ServingSearchResult]
) -> list[tuple[dict[str, Any], ServingSearchResult | None, str]]:
    """(words that differ, what was found or None, why not) of each. Raises the first reason where nothing is found for any."""
    return _answered(requests, search)


def _answered(
    requests: list[ServingRequest], answer: Callable[[ServingRequest], Answer]
) -> list[tuple[dict[str, Any], Answer | None, str]]:
    varied = [name for name in LISTED if len({str(getattr(each, name)) for each in requests}) > 1]
    found: list[tuple[dict[str, Any], Answer | None, str]] = []
    errors: list[InputError] = []
    for each in requests:
        asked = {name: getattr(each, name) for name in varied}
        try:
            found.append((asked, answer(each), ""))
        except InputError as error:
            errors.append(error)
            found.append((asked, None, str(error)))
    if len(errors) == len(found):
        raise errors[0]
    return found
