"""Searches of uniform plans that several tests make."""

from perfmodel.planner.result import Objective
from perfmodel.planner.search import search
from perfmodel.planner.uniform.search import UniformPlans
from perfmodel.planner.uniform.space import Space


def search_plans(estimator, space=None, *, top=10, objective=Objective.TIME, **words):
    plans = UniformPlans(estimator=estimator, space=space or Space(), objective=Objective(objective), **words)
    return search(plans, top=top)
