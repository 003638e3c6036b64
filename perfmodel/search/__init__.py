"""Floor 4, the search kernel: sees arrays of costs only, and knows nothing of plans."""

from perfmodel.search.order import EliminationOrder, best_order
from perfmodel.search.solve import SearchMethod, Solution, eliminate

__all__ = ["EliminationOrder", "SearchMethod", "Solution", "best_order", "eliminate"]
