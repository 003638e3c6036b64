"""Schemas of plan files and rule sets."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field, create_model

from perfmodel.foundation.errors import bad_field, shown
from perfmodel.foundation.schema import OMITTED, FileModel, OneOf, ReadBy
from perfmodel.foundation.words import Word, words_of
from perfmodel.parallel.algebra.names import LOGICAL_NAMES, check_rule_name
from perfmodel.parallel.algebra.sharding import AXIS_PARTS
from perfmodel.parallel.framework_ref import read_settings
from perfmodel.parallel.knobs import Knobs, plan_keys
from perfmodel.parallel.layout import DEFAULT_ORDER
from perfmodel.parallel.model_fields import read_model
from perfmodel.parallel.request import Service
from perfmodel.parallel.schedule_table import FILE
from perfmodel.parallel.serving_plan import DEGREES, SERVING_KIND
from perfmodel.workload.config import MAX_SIZE
from perfmodel.workload.job import Optimizer, Precision
from perfmodel.workload.routing import routing_of
from perfmodel.workload.training import training_of


def _read_text(value: object, field: str) -> None:
    """Accept a text or a number: `2024` may be the name of a file too."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise bad_field(field, shown(value), "must be a text", "give one")


def _read_settings(value: object, field: str) -> None:
    if not isinstance(value, dict):
        raise bad_field(field, shown(value), "must be a mapping of names to values", "write {compile: true}")
    read_settings(value, field)


def _read_rules(value: object, field: str) -> None:
    if not isinstance(value, str | dict):
        raise bad_field(field, shown(value), "must be a name of a rule set, its file or its fields", "write rules: megatron")


_Whole = Annotated[int, Field(ge=-MAX_SIZE, le=MAX_SIZE)]
_Count = Annotated[int, Field(ge=1, le=MAX_SIZE)]
PlanName = Annotated[Any, ReadBy(_read_text, {"type": ["string", "number"]})]


class PlanRecord(FileModel):
    """A mapping of a plan file."""

    ADD: ClassVar[str] = "add it; see strategies/plans/ for examples"


class RuleSetFile(FileModel):
    """The mesh axes that shard each dim of the operators, outermost first."""

    name: Annotated[Any, ReadBy(check_rule_name, {"type": "string"})] = Field(OMITTED, description="name; default: that of the file")
    source: str = Field(OMITTED, description="who wrote it, and from what")
    rules: dict[Annotated[str, OneOf(LOGICAL_NAMES)], list[Annotated[str, OneOf(AXIS_PARTS)]]] = Field(
        description="axes of each dim, by its logical name; a dim that is not named is not sharded"
    )
    operators: dict[str, dict[Annotated[str, OneOf(LOGICAL_NAMES)], list[Annotated[str, OneOf(AXIS_PARTS)]]]] = Field(
        OMITTED, description="axes of dims of single operators, in place of `rules`"
    )


class _Saved(FileModel):
    ADD: ClassVar[str] = "write it with `perfmodel shard ... --save`"


class MeshAxisFile(_Saved):
    """One axis of the mesh of a stage."""

    name: str = Field(description="name that the shardings use")
    size: _Count = Field(description="ranks along the axis")
    tier: Annotated[int, Field(ge=0, le=MAX_SIZE)] = Field(description="tier of the cluster's network; 0 is the innermost")


class HeldFile(_Saved):
    """The layout of a tensor that several operators read."""

    cuts: list[list[str]] = Field(description="axes that shard each dim of the tensor")
    partial: list[str] = Field([], description="axes over which it holds partial sums")


class AssignmentFile(_Saved):
    """A sharding for every operator."""

    axes: list[MeshAxisFile] = Field(description="axes of the chips of one stage, outermost first")
    shardings: dict[str, dict[str, list[str]]] = Field(description="axes of each dim, by operator")
    held: dict[str, HeldFile] = Field({}, description="layouts of tensors that several operators read")
    stages: list[str] = Field([], description="first operator of each pipeline stage; empty: one stage")


class JobFile(PlanRecord):
    """The job of a plan."""

    model: Annotated[Any, ReadBy(lambda value, field: read_model(value, field), {"type": ["string", "object"]})] = Field(
        description="name of a model, path of a config.json, all fields of a model, or `network`, `sizes` and `inputs`"
    )
    global_batch: _Whole = Field(description="sequences of a step over all ranks; samples of a network")
    seq_len: _Whole = Field(description="tokens of a sequence")
    precision: Annotated[str, OneOf(Precision)] = Field(str(Precision.BF16_MIXED), description="number formats of the step")
    optimizer: Annotated[str, OneOf(Optimizer)] = Field(str(Optimizer.ADAMW), description="the optimizer")
    train: Annotated[Any, ReadBy(training_of, {"type": "string", "examples": ["lora:16"]})] = Field(
        "full", description="full, or the adapters that are trained"
    )
    routing: Annotated[Any, ReadBy(lambda value, field: routing_of(value), {"type": ["string", "array"]})] = Field(
        "balanced", description="how tokens spread over experts: balanced, skew:X, or counts by rank and expert"
    )
    capacity_factor: Any = Field(0.0, description="capacity of an expert over the mean; 0: no limit", json_schema_extra={"type": "number"})


class ScheduleFile(PlanRecord):
    """A pipeline schedule from a CSV file."""

    name: str = Field(description="name of the schedule")
    orders: list[str] = Field(description="passes of each rank in torch's notation, separated by commas")


def _knob(name: str, knob: Word) -> tuple[Any, Any]:
    """Return the type and the description of a knob in a file."""
    about = f"{knob.help.rstrip('.')}{f'; {knob.otherwise}' if knob.otherwise else ''}"
    if name == "rules":
        return Annotated[Any, ReadBy(_read_rules, {"type": ["string", "object"]})], Field(OMITTED, description=about)
    if isinstance(knob.in_files, tuple):
        return list[str], Field(list(knob.in_files), description=about)
    kind: Any = {int: _Whole, bool: bool}.get(knob.kind, PlanName)
    if knob.choices is not None:
        kind = Annotated[str, OneOf([*knob.choices, *([FILE] if name == "schedule" else [])])]
    return kind, Field(False if knob.kind is bool else knob.in_files, description=about)


_KNOBS = words_of(Knobs)
_DEGREES: dict[str, Any] = {name: _knob(name, _KNOBS[name]) for name in DEFAULT_ORDER}
LayoutFile = create_model("LayoutFile", __base__=PlanRecord, __doc__="Parallel degrees.", **_DEGREES)
_PLAN_KNOBS: dict[str, Any] = {"layout": (LayoutFile, Field(description="parallel degrees"))}
_PLAN_KNOBS |= {name: _knob(name, _KNOBS[name]) for name in plan_keys() if name not in DEFAULT_ORDER}


class _Plan(PlanRecord):
    schema_version: int = Field(description="version of this form")
    kind: str = Field("plan", description="always plan")
    source: Any = Field(OMITTED, description="where the plan is from", json_schema_extra={"type": "string"})
    notes: Any = Field(OMITTED, description="free text", json_schema_extra={"type": "string"})
    job: JobFile = Field(description="what is trained")
    cluster: PlanName = Field(description="name or path of a cluster, or a chip with its surroundings")
    num_chips: _Whole = Field(description="chips of the plan")
    rule_set: Annotated[Any, ReadBy(_read_rules, {"type": "string"})] = Field(OMITTED, description="name of the rule set (old files)")
    recompute_operators: list[str] = Field(OMITTED, description="operators that run again in backward with recompute=selective")
    schedule_table: ScheduleFile = Field(OMITTED, description="orders of the passes, with schedule=file")
    stage_layers: list[_Whole] | None = Field(OMITTED, description="layers of each pipeline stage; default: even stages")
    profile: PlanName = Field("megatron", description="framework or profile that runs it")
    settings: Annotated[Any, ReadBy(_read_settings, {"type": "object"})] = Field(OMITTED, description="configuration of the framework")
    calibration: PlanName = Field("", description="calibration; default: the best known of the chip")
    assignment: AssignmentFile = Field(OMITTED, description="a sharding for every operator, in place of rules")


PlanFile = create_model("PlanFile", __base__=_Plan, __doc__="The complete decision how a job runs on a cluster.", **_PLAN_KNOBS)


# --- plans of services -------------------------------------------------------------------------------------------------

_SERVING_WORDS = words_of(Service)
_LOAD = ("concurrency", "rate", "prefix_hit", "quantization", "kv_precision", "draft_tokens", "acceptance")


def _word(name: str, *, is_required: bool = False) -> tuple[Any, Any]:
    """Return the type and the description of a word of the request."""
    word = _SERVING_WORDS[name]
    about = f"{word.help}{f'; {word.otherwise}' if word.otherwise else ''}"
    kind = Annotated[Any, ReadBy(word.value, {"type": ["integer"] if word.kind is int else ["string", "number"]})]
    return kind, Field(description=about) if is_required else Field(OMITTED, description=about)


def _model(about: str, **default: Any) -> tuple[Any, Any]:
    return Annotated[Any, ReadBy(read_model, {"type": ["string", "object"]})], Field(**default, description=about)


_SERVING_JOB: dict[str, Any] = {
    "model": _model("name of a model, or all fields of a model"),
    **{name: _word(name, is_required=True) for name in ("input_len", "output_len")},
    **{name: _word(name) for name in _LOAD},
    "draft_model": _model(f"{_SERVING_WORDS['draft_model'].help}: a name, or all fields", default=OMITTED),
}
_SERVING_LAYOUT: dict[str, Any] = {name: _word(name) for name in (*DEGREES, "replicas")}
ServingJobFile = create_model("ServingJobFile", __base__=PlanRecord, __doc__="Model, load and formats of a service.", **_SERVING_JOB)
ServingLayoutFile = create_model("ServingLayoutFile", __base__=PlanRecord, __doc__="Parallel degrees and replicas.", **_SERVING_LAYOUT)


class _ServingPlan(PlanRecord):
    schema_version: int = Field(description="version of this form")
    kind: str = Field(SERVING_KIND, description=f"always {SERVING_KIND}")
    job: ServingJobFile = Field(description="what is served")  # type: ignore[valid-type]
    cluster: PlanName = Field(description="name or path of a cluster, or a chip with its surroundings")
    num_chips: Annotated[Any, ReadBy(_SERVING_WORDS["chips"].value, {"type": "integer"})] = Field(description="chips of the service")
    layout: ServingLayoutFile = Field(OMITTED, description="equal replicas; default: the smallest tp")  # type: ignore[valid-type]
    calibration: PlanName = Field("", description="calibration; default: the best known of the chip")


_SERVING_MORE: dict[str, Any] = {name: _word(name) for name in ("engine", "workers", "max_batch", "max_tokens")}
ServingPlanFile = create_model(
    "ServingPlanFile", __base__=_ServingPlan, __doc__="The complete decision how a model is served on a cluster.", **_SERVING_MORE
)
