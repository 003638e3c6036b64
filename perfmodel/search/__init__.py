"""Search kernel (level 4): arrays of costs only, independent of plans."""

from perfmodel.search.budget import Budget, OutOfBudget
from perfmodel.search.constrained import ConstrainedMethod, ConstrainedSolution, eliminate_within
from perfmodel.search.order import EliminationOrder, best_order
from perfmodel.search.solution import SearchMethod, Solution
from perfmodel.search.solve import eliminate
from perfmodel.search.stages import StagePartition, partition_chain

__all__ = [
    "Budget",
    "ConstrainedMethod",
    "ConstrainedSolution",
    "EliminationOrder",
    "OutOfBudget",
    "SearchMethod",
    "Solution",
    "StagePartition",
    "best_order",
    "eliminate",
    "eliminate_within",
    "partition_chain",
]
