"""Execution profiles: the behaviour of a framework as data for the cost model."""

from __future__ import annotations

import math
import os
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

from perfmodel.foundation.errors import InputError, bad_field, one_line, shown, suggest
from perfmodel.foundation.files import listed
from perfmodel.foundation.grouped import Grouped, in_groups
from perfmodel.foundation.memory_headroom import MemoryUncertainty
from perfmodel.foundation.records import record_from_data, record_to_data
from perfmodel.foundation.resources import resource_dir, write_atomically
from perfmodel.foundation.session import session_cache
from perfmodel.foundation.units import parse_quantity
from perfmodel.foundation.values import check_path
from perfmodel.frameworks.fitted import NOTHING, FittedTo
from perfmodel.frameworks.options import (
    GROUP_OF,
    GROUPS,
    KIND_OF,
    OPTIONAL,
    SIZES,
    ActivationOptions,
    AllocatorOptions,
    CommunicationOptions,
    ExchangeOptions,
    KernelOptions,
    RateOptions,
    StageOptions,
    StateOptions,
    TimingOptions,
)
from perfmodel.frameworks.runnable import ANYTHING, Runs
from perfmodel.frameworks.settings import with_stated
from perfmodel.frameworks.shipped import flattened, framework_names, shipped_fields, unit_of
from perfmodel.parallel.algebra.derive import ParameterLayout
from perfmodel.parallel.algebra.parameters import ParameterEvent, parameter_events
from perfmodel.parallel.choices import ZERO_STAGES, Dispatcher, Recompute, ZeroStage
from perfmodel.parallel.framework_ref import SEPARATOR, FrameworkRef

GENERIC = "generic"
"""Default profile, for an unknown framework."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionProfile(Grouped):
    """Options of a training framework in groups. Nothing in the cost model depends on the name.

    release   release of the framework, whose recipes set further options for models with experts; "": not stated
    family    family of frameworks that share code and count as one (`frameworks/generic.py`); "": none
    unknown   numbers that follow neither from its code nor from its runs, so they do not count for other frameworks
    runs      plans that it can run; default: all (`frameworks/runnable.py`)
    fitted    the user's runs to which `perfmodel fit` fitted it; none for a shipped profile
    """

    GROUP_OF: ClassVar[Mapping[str, str]] = GROUP_OF

    name: str
    source: str
    kernels: KernelOptions
    activations: ActivationOptions
    state: StateOptions
    allocator: AllocatorOptions
    communication: CommunicationOptions
    exchanges: ExchangeOptions
    stages: StageOptions
    rates: RateOptions
    timing: TimingOptions
    release: str = ""
    runs: Runs = ANYTHING
    fitted: FittedTo = NOTHING
    family: str = ""
    unknown: tuple[str, ...] = ()

    @property
    def compiled(self) -> tuple[Any, ...]:
        """Cache key of compiled programs: profiles with the same key share their programs."""
        return self.kernels, self.activations, self.state, self.allocator, self.communication, self.exchanges, self.stages, self.release

    def pads_rows(self, dispatcher: Dispatcher) -> bool:
        """Return whether a separate pass pads the rows of experts for low-precision products."""
        is_exchanged = self.exchanges.permutes_in_exchange and dispatcher is Dispatcher.FLEX
        return self.kernels.pads_expert_rows and not is_exchanged and not self.kernels.fuses_experts

    def exposed_share(self, zero: int) -> float:
        """Return the exposed share of a gradient reduction that runs once a step: an all-reduce at ZeRO stage 0, else a reduce-scatter.

        Gradients of stage 3 are reduced with their parameter unit during backward.
        """
        return 0.0 if zero == ZeroStage.PARAMETERS else min(self.timing.exposed_gradient_fraction + self.late_share(zero), 1.0)

    def offloads_saved(self, recompute: Recompute) -> bool:
        """Return whether saved activations of layers are offloaded to host memory.

        Transfers overlap with compute (pinned buffers, a separate stream): a layer's pass takes at least as long as its transfers.
        Source: Rajbhandari et al. 2021 (ZeRO-Infinity, arXiv 2104.07857), section 4.
        """
        return self.activations.offloads_activations or (self.activations.offloads_checkpoints and recompute is Recompute.FULL)

    def late_share(self, zero: int) -> float:
        """Return the share of scattered gradients whose reduction waits for the end of backward."""
        return self.timing.exposed_scatter_fraction if zero in (ZeroStage.OPTIMIZER, ZeroStage.GRADIENTS) else 0.0

    @property
    def known_as(self) -> str:
        """Framework whose published runs give the prediction error: the profile's own name, or that of the profile before a fit."""
        return FrameworkRef.parse(self.fitted.base or self.name).name


def list_profiles() -> list[str]:
    return framework_names()


#: `nemo@26.06`: a framework and its release.
_RELEASED = re.compile(r"^([\w.-]+)@([\d.]+)(?=$|\+)", re.ASCII)


def load_profile(name: str | Path) -> ExecutionProfile:
    """Return the profile with that name or in that file.

    `NAME+compile+fused_rmsnorm=false` has these settings (docs/settings.md), `NAME@26.06` has that release. A trainer without a profile has
    that of the framework that it is built on.
    """
    from perfmodel.foundation.files import read_yaml

    check_path(name, "profile")
    name = _RELEASED.sub(rf"\1{SEPARATOR}release=\2", str(name))
    ref = FrameworkRef.parse(str(name))
    settings, framework = ref.settings, ref.name
    if settings:
        return with_stated(load_profile(framework), settings)
    is_file = Path(framework).suffix in (".yaml", ".yml")
    based_on: dict[str, str] = {}
    if not is_file:
        if (shipped := _shipped_profile(framework)) is not None:
            return shipped
        based_on = read_yaml(resource_dir("strategies") / "profile_names.yaml")
        if framework.lower() in based_on:
            return load_profile(based_on[framework.lower()])
    if not is_file or not os.path.exists(framework):  # pathlib raises for a name too long or a folder that may not be entered
        known = f"{suggest(one_line(framework), [*list_profiles(), *based_on])} (`perfmodel profiles` lists them; a path works too)"
        raise InputError(f"profile={one_line(framework, 200)}: not known{known}")
    path = Path(framework)
    return _profile_of(pickle.dumps(_with_base(flattened(read_yaml(path), where=framework), path)), framework)


@lru_cache(maxsize=64)
def _shipped_profile(name: str) -> ExecutionProfile | None:
    return None if (data := shipped_fields(name)) is None else _profile_from(data, name)


@session_cache(maxsize=64)
def _profile_of(fields_pickled: bytes, where: str) -> ExecutionProfile:
    """Return the profile of the fields, cached by their content."""
    return profile_from_dict(pickle.loads(fields_pickled), where=where)


def _with_base(data: dict[str, Any], path: Path, below: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the contents of a file merged over those of its `base`: a shipped profile, or a file in the same folder."""
    from perfmodel.foundation.files import read_yaml

    if "base" not in data:
        return data
    base = data["base"]
    if not isinstance(base, str) or base in below:
        raise bad_field("base", shown(base), "must be the name or the path of another profile", f"correct {path}")
    base_path = path.parent / base
    is_file = base_path.suffix in (".yaml", ".yml")
    under = None if is_file else shipped_fields(base)
    if is_file and os.path.exists(base_path):
        under = _with_base(flattened(read_yaml(base_path), where=str(base_path)), base_path, (*below, base))
    if under is None:
        raise InputError(f"{path}: base={one_line(base, 200)}: not known{suggest(one_line(base), list_profiles())}")
    return {key: value for key, value in under.items() if key not in _OWN} | {key: value for key, value in data.items() if key != "base"}


def profile_from_dict(data: Any, *, where: str = "profile") -> ExecutionProfile:
    """Return the profile of a file's contents. Raises InputError that names every fault."""
    from perfmodel.foundation.schema import check
    from perfmodel.frameworks.schemas import profile_model

    check(profile_model(ExecutionProfile), data, where=where)
    missing = [key for key in [*_OWN_KINDS, *KIND_OF] if key not in data and key not in _OPTIONAL]
    if missing:
        rule = "is missing; give it, or a `base:` to take it from (`perfmodel fit` and docs/files.md show one)"
        raise InputError(f"{where}: {listed([f'{key}: {rule}' for key in missing])}")
    if SEPARATOR in data["name"]:
        raise InputError(f"{where}: name={one_line(data['name'])}: holds a {SEPARATOR}, which stands before a setting; take another name")
    return _profile_from(data, where)


def _profile_from(data: Mapping[str, Any], where: str) -> ExecutionProfile:
    """Return the profile of valid contents."""
    values: dict[str, Any] = {}
    for key, value in data.items():
        if key == "runs":
            value = record_from_data(Runs, value, where=key)
        elif key == "fitted":
            value = record_from_data(FittedTo, value, where=key)
        elif key == "overlaps_gradients" and isinstance(value, bool):
            value = ZERO_STAGES if value else ()
        elif isinstance(value, list):
            value = tuple(value)
        elif KIND_OF.get(key) == "float":
            value = parse_quantity(value, unit_of(key), field=key) if isinstance(value, str) else float(value)
        values[key] = value
    fields_of_profile, groups = in_groups(values, GROUP_OF)
    try:
        return ExecutionProfile(**fields_of_profile, **{group: group_type(**groups.get(group, {})) for group, group_type in GROUPS.items()})
    except InputError as error:
        raise InputError(f"{where}: {error} {fields_of_profile['name']}") from None


def profile_fields(profile: ExecutionProfile) -> dict[str, Any]:
    """Return every field by name, options without groups, as in files and in `profiles --json`."""
    ungrouped = {name: getattr(profile, name) for name in _OWN_KINDS}
    ungrouped["runs"] = profile.runs.features
    return {"name": ungrouped.pop("name"), **profile.options, **ungrouped}


def save_profile(profile: ExecutionProfile, path: str | Path) -> None:
    """Write a profile's file atomically; `load_profile` returns an equal profile."""
    write_atomically(path, profile_text(profile))


def profile_text(profile: ExecutionProfile) -> str:
    from perfmodel.foundation.files import dump_yaml

    data = record_to_data(profile)
    options = {name: value for group in GROUPS for name, value in data.pop(group).items()}
    for name, value in options.items():
        number = profile.option(name)
        # bytes per parameter or per logit are written as plain numbers, as in the shipped files
        if (name.endswith("_bytes") and name not in SIZES) or (number == 0.0 and isinstance(value, str)):
            options[name] = number
    data = {"name": data.pop("name")} | options | data
    groups = {name: value for name, value in data.items() if isinstance(value, (dict, list))}
    flat = dump_yaml({name: value for name, value in data.items() if name not in groups})
    return flat + (dump_yaml(groups, inline_leaves=True) if groups else "")


_OWN_KINDS = {field.name: str(field.type) for field in fields(ExecutionProfile) if field.name not in GROUPS}
_OPTIONAL = OPTIONAL | {"runs", "family", "unknown", "fitted", "release"}
#: Fields that a profile does not inherit from its base.
_OWN = frozenset({"name", "source", "unknown", "fitted", "release"})


def profile_events(
    parameter: ParameterLayout, profile: ExecutionProfile, *, zero: int, pipelined: bool, joins_ends: bool
) -> tuple[ParameterEvent, ...]:
    """Return `parameter_events` for the options of `profile`. joins_ends: `is_one_end_unit` of all parameters."""
    keeps = pipelined and profile.stages.pipeline_keeps_parameters
    return parameter_events(
        parameter,
        zero=zero,
        stores_shards_zero2=profile.state.zero2_stores_shards,
        # stages 0 and 1 accumulate locally; a pipeline that keeps parameters gathered reduces once as well
        reduces_each_microbatch=(profile.communication.reduces_each_microbatch and zero >= 2 and not keeps)
        or (profile.communication.pipeline_reduces_each_microbatch and zero == 0 and pipelined),
        keeps_gathered=keeps,
        reduces_tp_first=profile.communication.reduces_tp_gradients_first,
        is_wanted_at_once=parameter.is_end and (joins_ends or parameter.is_last),
    )


# --- memory uncertainty -------------------------------------------------------------------------------------------------

KNOWN, UNKNOWN = "known", "unknown"
"""Kinds of frameworks in `strategies/memory_uncertainty.yaml`, which `python -m lab.residuals` writes."""


def uncertainty_of_memory(profile: ExecutionProfile) -> MemoryUncertainty:
    """Return the memory uncertainty of a framework.

    A fitted profile has that of the profile from which it started. Measured peaks reduce that of an unknown framework towards that of a
    known one, as far as they determine the allocator's reserved memory (`memory_known`).
    """
    known, unknown = map(shipped_memory_uncertainties().__getitem__, (KNOWN, UNKNOWN))
    if profile.known_as != GENERIC:
        return known
    share = profile.fitted.memory_known
    if not share:
        return unknown
    return MemoryUncertainty(
        centre=unknown.centre + (known.centre - unknown.centre) * share,
        scale=math.sqrt(unknown.scale**2 + (known.scale**2 - unknown.scale**2) * share),
        of_unseen=share < 0.5,
        rests_on=f"{profile.fitted.num_memory_runs} measured peaks of your own; {unknown.rests_on}",
    )


@lru_cache(maxsize=1)
def shipped_memory_uncertainties() -> Mapping[str, MemoryUncertainty]:
    """Return the shipped memory uncertainties by kind."""
    return read_memory_uncertainties(resource_dir("strategies") / "memory_uncertainty.yaml")


def read_memory_uncertainties(path: Path) -> Mapping[str, MemoryUncertainty]:
    """Return the memory uncertainties by kind in a file that `python -m lab.residuals` wrote."""
    from perfmodel.foundation.files import read_yaml

    data = read_yaml(path)
    return {kind: MemoryUncertainty(**data[kind], of_unseen=kind == UNKNOWN) for kind in (KNOWN, UNKNOWN)}
