"""Plans of published runs under another framework than the one that they name: a given profile, or an unknown framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from perfmodel.frameworks.ensemble import known_families
from perfmodel.frameworks.generic import generic_profile
from perfmodel.frameworks.profile import ExecutionProfile
from perfmodel.frameworks.settings import with_settings
from perfmodel.validation.case_plan import PlannedCase, plan_of_case
from perfmodel.validation.case_settings import settings_of_case
from perfmodel.validation.cases import Case
from perfmodel.validation.framework_patterns import framework_of
from perfmodel.validation.step_times import PlannedRun

#: Function from a case to its plan. Raises InputError for a case that cannot be predicted.
PlanCase = Callable[[Case], PlannedCase]


def plan_as_stated(case: Case) -> PlannedCase:
    """Return the case under the framework that it names."""
    return plan_of_case(case.inputs)


def plan_under(profile: ExecutionProfile) -> PlanCase:
    """Return a planner of cases with this profile; missing inputs still follow the defaults of the framework that the run names."""

    def plan(case: Case) -> PlannedCase:
        planned = plan_of_case(case.inputs)
        assumed = with_settings(profile, settings_of_case(case.inputs.get("settings")))
        is_own = planned.framework.profile == profile.name
        framework = replace(planned.framework, profile=profile.name, borrows=planned.framework.borrows or not is_own)
        return replace(planned, profile=assumed, framework=framework, plan=replace(planned.plan, profile=assumed.name))

    return plan


#: Sets of profiles of one framework, which are left out together.
_ALIKE = (frozenset({"torch-fsdp2", "torchtitan"}),)


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenRun:
    """A run planned without its framework. profile: that of the framework."""

    profile: str
    planned: PlannedCase
    settings: Mapping[str, Any]


def hidden(case: Case) -> HiddenRun:
    """Plan the case without its framework. Raises InputError if it cannot be predicted."""
    settings = case.inputs.get("settings")
    return HiddenRun(
        profile=framework_of(case.inputs.get("framework")).profile,
        planned=plan_of_case({**case.inputs, "framework": None}),
        settings=settings if isinstance(settings, Mapping) else {},
    )


@dataclass(slots=True, kw_only=True)
class HiddenFrameworks:
    """Planner of runs of unseen frameworks: each with the `generic` profile made from all other frameworks.

    leaves_family   leave out every profile of its family
    """

    leaves_family: bool = False
    _profiles: dict[str, ExecutionProfile] = field(default_factory=dict)

    def profile_without(self, name: str) -> ExecutionProfile:
        """Return `generic`, made from all frameworks but this one."""
        if name not in self._profiles:
            self._profiles[name] = generic_profile(self.families_without(name))
        return self._profiles[name]

    def families_without(self, name: str) -> dict[str, list[ExecutionProfile]]:
        known = known_families()
        alike = {name}.union(*(names for names in _ALIKE if name in names))
        for profiles in known.values() if self.leaves_family else ():
            names = {profile.name for profile in profiles}
            alike |= names if name in names else set()
        return known_families(without=alike)

    def planned(self, run: PlannedRun) -> PlannedCase:
        """Return the run planned with the profile of an unseen framework. Raises InputError."""
        return replace(run.planned, profile=with_settings(self.profile_without(run.profile), run.settings))


def plan_hidden() -> PlanCase:
    """Return a function that plans cases as runs of an unseen framework: with `generic` made from all others."""
    frameworks = HiddenFrameworks()
    return lambda case: frameworks.planned(hidden(case))
