"""Published runs planned under another framework than their own: a profile that is given, or none that is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from perfmodel.frameworks.profile import ExecutionProfile
from perfmodel.frameworks.settings import with_settings
from perfmodel.validation.case_plan import PlannedCase, plan_of_case
from perfmodel.validation.case_settings import settings_of_case
from perfmodel.validation.cases import Case
from perfmodel.validation.hidden_framework import HiddenFrameworks

#: A case as it is planned. Raises InputError where it cannot be predicted.
PlanCase = Callable[[Case], PlannedCase]


def plan_as_stated(case: Case) -> PlannedCase:
    """Return the case under the framework that it names."""
    return plan_of_case(case.inputs)


def plan_under(profile: ExecutionProfile) -> PlanCase:
    """Return a function that plans cases with this profile; what a run leaves out is still as its own framework has it."""

    def plan(case: Case) -> PlannedCase:
        planned = plan_of_case(case.inputs)
        assumed = with_settings(profile, settings_of_case(case.inputs.get("settings")))
        is_own = planned.framework.profile == profile.name
        framework = replace(planned.framework, profile=profile.name, borrows=planned.framework.borrows or not is_own)
        return replace(planned, profile=assumed, framework=framework, plan=replace(planned.plan, profile=assumed.name))

    return plan


def plan_hidden() -> PlanCase:
    """Return a function that plans cases without the name of their framework, with `generic` as it is made from all others."""
    frameworks = HiddenFrameworks()
    return lambda case: frameworks.planned(case)[1]
