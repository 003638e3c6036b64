"""Checks of a plan of a user's module before any process starts."""

from __future__ import annotations

from perfmodel.execute.modules.module import UserModule
from perfmodel.execute.per_operator.options import ModuleReference
from perfmodel.foundation.errors import bad_field
from perfmodel.parallel.per_operator.assignment import check_assignment
from perfmodel.parallel.plan import Plan


def readable_module(reference: ModuleReference, plan: Plan) -> UserModule:
    """The module of a plan, read without its weights; InputError where its graph is not the plan's, or where torch or this executor lacks
    what the plan needs."""
    module = UserModule.read(reference.name, reference.inputs)
    check_module_plan(module, plan)
    return module


def check_module_plan(module: UserModule, plan: Plan) -> None:
    """The plan is for this graph, and every operator can be computed as it says."""
    if plan.cuts.stages:
        raise bad_field("stages", len(plan.cuts.stages), "a module runs as one stage", "search without --stages")
    check_assignment(plan.cuts, module.network, needs_held=True)
    module.functions(module.network)
