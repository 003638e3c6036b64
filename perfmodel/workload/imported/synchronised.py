"""Batch norms of an imported module as a run computes them: with the statistics of the whole batch, as the module itself has them."""

from __future__ import annotations

from dataclasses import replace

from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.workload.graph import Operator, OwnTraffic, Pass
from perfmodel.workload.imported.network import ImportedNetwork


def synchronised(imported: ImportedNetwork) -> ImportedNetwork:
    """The network with all-reduces of the sums of each batch norm, which are then those of one process.

    Data-parallel frameworks take the statistics of each share of the batch, and so does a search; gradients are not the module's then.
    """

    def with_sums(operator: Operator) -> Operator:
        """Two numbers a channel in forward (sums of x and x^2) and two in backward, as `kinds/batch_norm.py` has it."""
        statistics = operator.saved[-1].extent if operator.saved else ((2, ""),)
        channels = {dim for _, dim in statistics if dim}
        over = tuple(dim for dim in operator.output.dims if dim and dim not in channels)
        reduce = OwnTraffic(kind=CollectiveKind.ALL_REDUCE, over=over, extent=statistics, phase=Pass.FORWARD, itemsize=4.0)
        traffic = (reduce, replace(reduce, phase=Pass.BACKWARD)) if over else ()
        return replace(operator, traffic=traffic, settings={**operator.settings, "synchronised": True})

    operators = tuple(with_sums(each) if each.kind == "batch_norm" else each for each in imported.network.operators)
    return replace(imported, network=replace(imported.network, operators=operators))
