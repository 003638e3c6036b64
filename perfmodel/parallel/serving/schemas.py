"""Schema of the file of a serving plan."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, create_model

from perfmodel.foundation.schema import OMITTED, ReadBy
from perfmodel.foundation.words import words_of
from perfmodel.parallel.model_fields import read_model
from perfmodel.parallel.schemas import PlanName, PlanRecord
from perfmodel.parallel.serving.plan import DEGREES, SERVING_KIND
from perfmodel.parallel.serving.request import ServingRequest

_WORDS = words_of(ServingRequest)
_LOAD = ("concurrency", "rate", "prefix_hit", "quantization", "kv_precision", "draft_tokens", "acceptance")


def _word(name: str, *, is_required: bool = False) -> tuple[Any, Any]:
    """Return the type and the description of a word of the request."""
    word = _WORDS[name]
    about = f"{word.help}{f'; {word.otherwise}' if word.otherwise else ''}"
    kind = Annotated[Any, ReadBy(word.value, {"type": ["integer"] if word.kind is int else ["string", "number"]})]
    return kind, Field(description=about) if is_required else Field(OMITTED, description=about)


def _model(about: str, **default: Any) -> tuple[Any, Any]:
    return Annotated[Any, ReadBy(read_model, {"type": ["string", "object"]})], Field(**default, description=about)


_JOB: dict[str, Any] = {
    "model": _model("name of a model, or all fields of a model"),
    **{name: _word(name, is_required=True) for name in ("input_len", "output_len")},
    **{name: _word(name) for name in _LOAD},
    "draft_model": _model(f"{_WORDS['draft_model'].help}: a name, or all fields", default=OMITTED),
}
_LAYOUT: dict[str, Any] = {name: _word(name) for name in (*DEGREES, "replicas")}
ServingJobFile = create_model("ServingJobFile", __base__=PlanRecord, __doc__="Model, load and formats of a service.", **_JOB)
ServingLayoutFile = create_model("ServingLayoutFile", __base__=PlanRecord, __doc__="Parallel degrees and replicas.", **_LAYOUT)


class _ServingPlan(PlanRecord):
    schema_version: int = Field(description="version of this form")
    kind: str = Field(SERVING_KIND, description=f"always {SERVING_KIND}")
    job: ServingJobFile = Field(description="what is served")  # type: ignore[valid-type]
    cluster: PlanName = Field(description="name or path of a cluster, or a chip with its surroundings")
    num_chips: Annotated[Any, ReadBy(_WORDS["chips"].value, {"type": "integer"})] = Field(description="chips of the service")
    layout: ServingLayoutFile = Field(OMITTED, description="equal replicas; default: the smallest tp")  # type: ignore[valid-type]
    calibration: PlanName = Field("", description="calibration; default: the best known of the chip")


_MORE: dict[str, Any] = {name: _word(name) for name in ("engine", "workers", "max_batch", "max_tokens")}
ServingPlanFile = create_model(
    "ServingPlanFile", __base__=_ServingPlan, __doc__="The complete decision how a model is served on a cluster.", **_MORE
)
