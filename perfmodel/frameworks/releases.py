"""Recipes of framework releases for mixture-of-experts models: `strategies/releases/FRAMEWORK.yaml`.

Releases turn features on and off (dispatcher, CUDA graphs, overlap, fused kernels), so runs of one plan differ by a factor of up to 1.6.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from perfmodel.foundation.errors import bad_field, one_line
from perfmodel.foundation.records import record_from_data
from perfmodel.foundation.resources import resource_dir
from perfmodel.frameworks.profile import ExecutionProfile, load_profile
from perfmodel.parallel.choices import Recompute, module_operators, read_modules
from perfmodel.parallel.framework_ref import framework_named
from perfmodel.parallel.plan import Plan
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.job import TrainingJob

ANY_MODEL = "*"
FULL_ITERATION = "full_iteration"
"""Scope of a CUDA graph of a whole step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseRecipe:
    """Settings of one model on some chips, from one release on.

    release        first release    chips   prefixes of their names    precisions   as stated by runs
    global_batch   of the recipe, if a release has several for one model; 0: it has one
    dispatcher     dispatch of tokens to experts
    etp            tensor parallelism inside an expert; 0: not set
    permutes_in_exchange   of `flex`: the library is HybridEP, whose kernels sort rows (else DeepEP)
    graphs         parts of a layer launched as CUDA graphs (Megatron-LM's --cuda-graph-scope), or `full_iteration`
    moe_overlap    exchanges of tokens overlap with another micro-batch
    recompute      recomputed modules
    fused_experts  products of experts, activation and casts are one kernel
    fp8_attention  attention multiplies in 8 bits
    layout         layers of each virtual stage (Megatron-LM's --pipeline-model-parallel-layout); "": even
    """

    release: str
    model: str
    chips: tuple[str, ...]
    precisions: tuple[str, ...]
    dispatcher: str
    etp: int = 0
    global_batch: int = 0
    permutes_in_exchange: bool = False
    graphs: tuple[str, ...] = ()
    moe_overlap: bool = False
    recompute: tuple[str, ...] = ()
    fused_experts: bool = False
    fp8_attention: bool = False
    layout: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Releases:
    """Recipes of one framework. launches_as: profile with the host time of a launch without CUDA graphs."""

    framework: str
    source: str
    launches_as: str
    releases: Mapping[str, str]
    recipes: tuple[ReleaseRecipe, ...]


def releases_dir() -> Path:
    return resource_dir("strategies") / "releases"


@lru_cache(maxsize=16)
def load_releases(framework: str) -> Releases | None:
    """Return the recipes of that framework; None if none are known."""
    from perfmodel.foundation.files import read_yaml

    path = releases_dir() / f"{framework}.yaml"
    if (not framework.isidentifier() and not re.fullmatch(r"[a-z0-9-]+", framework)) or not os.path.exists(path):
        return None
    data = read_yaml(path)
    recipes = tuple(record_from_data(ReleaseRecipe, entry, where=f"{path.name} recipes[{i}]") for i, entry in enumerate(data["recipes"]))
    return Releases(
        framework=data["framework"], source=data["source"], launches_as=data["launches_as"], releases=data["releases"], recipes=recipes
    )


def release_key(release: str) -> tuple[int, ...]:
    """Return the sort key of a release such as `26.02.01`."""
    return tuple(int(part) for part in release.split("."))


def recipe_of(releases: Releases, release: str, *, model: str, chip: str, precision: str, global_batch: int = 0) -> ReleaseRecipe | None:
    """Return the recipe in that release: of the model, else of any model; None before the first release or on other chips.

    A recipe is valid until a later one of the same model, chip and precision.
    """
    asked = release_key(release)
    kind = re.split(r"[-_]", chip)[0]
    for name in (model, ANY_MODEL):
        candidates = [
            recipe
            for recipe in releases.recipes
            if recipe.model == name and kind in recipe.chips and precision in recipe.precisions and release_key(recipe.release) <= asked
        ]
        if candidates:
            latest = max(release_key(recipe.release) for recipe in candidates)
            variants = [recipe for recipe in candidates if release_key(recipe.release) == latest]
            return min(variants, key=lambda recipe: abs(recipe.global_batch - global_batch))
    return None


def as_recipe_runs(profile: ExecutionProfile, recipe: ReleaseRecipe, *, launch_time: float) -> ExecutionProfile:
    """Return the profile with this recipe. launch_time: of a kernel without CUDA graphs. [s]"""
    is_full = recipe.graphs == (FULL_ITERATION,)
    return profile.having(
        host_launch_time=min(profile.timing.host_launch_time, launch_time) if is_full else launch_time,
        graph_scope=() if is_full else recipe.graphs,
        hides_exchanges=recipe.moe_overlap,
        delays_weight_gradients=recipe.moe_overlap,
        permutes_in_exchange=recipe.permutes_in_exchange,
        fuses_experts=recipe.fused_experts,
    )


#: Precision of a job -> precision in recipes.
_PRECISIONS = {"bf16-mixed": "bf16", "bf16": "bf16", "fp8-delayed": "fp8", "fp8-current": "fp8"}


def at_release(profile: ExecutionProfile, job: TrainingJob, chip: str) -> ExecutionProfile:
    """Return the profile with the recipe of its release for the job and the chip.

    It is unchanged if it states no release or the model has no experts. Raises InputError if no recipe is known for the framework, the
    release or the chips.
    """
    stated = _stated_recipe(profile, job, chip)
    if stated is None:
        return profile
    releases, recipe = stated
    return as_recipe_runs(profile, recipe, launch_time=load_profile(releases.launches_as).timing.host_launch_time)


def unlike_recipe(profile: ExecutionProfile, plan: Plan, chip: str) -> str:
    """Return the differences between the plan and the recipe of its profile's release; "" if there are none."""
    stated = _stated_recipe(profile, plan.job, chip)
    if stated is None:
        return ""
    recipe = stated[1]
    operators = set(module_operators(read_modules(recipe.recompute, "recompute"))) if recipe.recompute else set()
    differences = []
    if str(plan.dispatcher) != recipe.dispatcher:
        differences.append(f"the dispatcher {recipe.dispatcher}")
    if operators and plan.recompute is not Recompute.FULL and not operators <= set(plan.recompute_operators):
        differences.append(f"recomputes {', '.join(recipe.recompute)}")
    named = f"the recipe of release {profile.release}" + ("" if recipe.model == ANY_MODEL else f" for {recipe.model}")
    return f"{named} has {' and '.join(differences)}: the plan does not" if differences else ""


def _stated_recipe(profile: ExecutionProfile, job: TrainingJob, chip: str) -> tuple[Releases, ReleaseRecipe] | None:
    model = job.model
    if not profile.release or not isinstance(model, TransformerConfig) or model.parts.experts is None:
        return None
    framework = framework_named(profile.name)
    releases = load_releases(framework)
    if releases is None:
        known = ", ".join(sorted(path.stem for path in releases_dir().glob("*.yaml")))
        raise bad_field("setting release", profile.release, f"no recipes of {one_line(framework, 60)} are known", f"use it with {known}")
    precision = _PRECISIONS.get(str(job.precision), str(job.precision))
    recipe = recipe_of(
        releases, profile.release, model=without_depth(model.name), chip=chip, precision=precision, global_batch=job.global_batch
    )
    if recipe is None:
        rule = f"no recipe of {framework} until then is for {chip} and {job.precision}"
        raise bad_field("setting release", profile.release, rule, f"use one of {', '.join(releases.releases)}, or leave it out")
    return releases, recipe


def without_depth(name: str) -> str:
    """Return the name of a model without the suffix of a truncated one."""

    return re.sub(r"-\d+-layers$", "", name)
