"""Plans of published runs under another framework than the one that they name: a given profile, or an unknown framework."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from perfmodel.frameworks.profile import ExecutionProfile
from perfmodel.frameworks.settings import with_settings
from perfmodel.validation.case_plan import PlannedCase, plan_of_case
from perfmodel.validation.case_settings import settings_of_case
from perfmodel.validation.cases import Case
from perfmodel.validation.hidden_framework import HiddenFrameworks

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


def plan_hidden() -> PlanCase:
    """Return a function that plans cases as runs of an unseen framework: with `generic` made from all others."""
    frameworks = HiddenFrameworks()
    return lambda case: frameworks.planned(case)[1]
