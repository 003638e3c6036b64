"""Synchronised batch norms of an imported module: statistics of the full batch, as in the module itself."""

from __future__ import annotations

from dataclasses import replace

from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.workload.graph import Operator
from perfmodel.workload.imported.network import ImportedNetwork
from perfmodel.workload.work import OwnTraffic, Pass


def synchronised(imported: ImportedNetwork) -> ImportedNetwork:
    """Return the network with all-reduces of the sums of each batch norm, so that its statistics equal those of one process.

    Data-parallel frameworks, and the search, use the statistics of each shard of the batch; gradients then differ from the module's.
    """

    def with_sums(operator: Operator) -> Operator:
        """Add all-reduces of two numbers a channel in forward (sums of x and x^2) and two in backward, as in `kinds/batch_norm.py`."""
        statistics = operator.saved[-1].extent if operator.saved else ((2, ""),)
        channels = {dim for _, dim in statistics if dim}
        over = tuple(dim for dim in operator.output.dims if dim and dim not in channels)
        reduce = OwnTraffic(kind=CollectiveKind.ALL_REDUCE, over=over, extent=statistics, phase=Pass.FORWARD, itemsize=4.0)
        traffic = (reduce, replace(reduce, phase=Pass.BACKWARD)) if over else ()
        return replace(operator, traffic=traffic, settings={**operator.settings, "synchronised": True})

    operators = tuple(with_sums(operator) if operator.kind == "batch_norm" else operator for operator in imported.network.operators)
    return replace(imported, network=replace(imported.network, operators=operators))
