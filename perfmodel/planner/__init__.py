"""Planner (level 4): the space of plans, its enumeration, ranking, baselines and reasons."""
