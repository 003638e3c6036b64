"""Fewest chips of a service on which some plan holds a load under limits."""

from __future__ import annotations

from perfmodel.foundation.errors import InputError, bad_field
from perfmodel.frameworks.engine import Engine
from perfmodel.hardware.calibration import Calibration
from perfmodel.hardware.cluster import Cluster
from perfmodel.planner.serving.result import ServingLimits, ServingObjective, ServingSearchResult
from perfmodel.planner.serving.search import find_serving_plans
from perfmodel.planner.serving.space import ServingSpace
from perfmodel.workload.serving import ServingJob


def find_fewest_chips(
    job: ServingJob,
    cluster: Cluster,
    calibration: Calibration,
    engine: Engine,
    *,
    most_chips: int = 0,
    space: ServingSpace | None = None,
    limits: ServingLimits | None = None,
    objective: ServingObjective = ServingObjective.THROUGHPUT,
    top: int = 10,
    price_per_hour: float | None = None,
) -> ServingSearchResult:
    """Search, without baselines, on the fewest chips of the cluster that hold the job's load: parts of a node, then whole nodes.

    Parts are powers of two. More chips never hold less (added replicas take requests from the others), so the numbers are bisected.
    Raises InputError if the job has no load, or if not even `most_chips` (0: all that are possible on the cluster) hold it.
    """
    if job.concurrency is None and job.rate is None:
        raise bad_field("concurrency", None, "the number of chips follows from the load", "give a concurrency or a rate")
    counts = _counts(cluster, most_chips or cluster.max_chips)

    def on(chips: int, shown: int = 1) -> ServingSearchResult:
        return find_serving_plans(
            job,
            cluster.with_chips(chips),
            calibration,
            engine,
            space=space,
            limits=limits,
            objective=objective,
            top=shown,
            price_per_hour=price_per_hour,
            names_pools=False,
            with_baselines=False,
        )

    low, high, step = 0, 0, 1
    result: ServingSearchResult | None = None
    while result is None:  # in growing steps, as most services are small
        try:
            result = on(counts[high])
        except InputError:
            if high == len(counts) - 1:
                raise
            low, high, step = high + 1, min(high + step, len(counts) - 1), 2 * step
    while low < high:
        middle = (low + high) // 2
        try:
            result, high = on(counts[middle]), middle
        except InputError:
            low = middle + 1
    return result if top == 1 else on(counts[high], top)


def _counts(cluster: Cluster, most: int) -> list[int]:
    """Return the numbers of chips that are tried, in increasing order."""
    node = cluster.chips_per_node
    parts = [2**power for power in range(node.bit_length()) if 2**power < node]
    return [count for count in (*parts, *range(node, most + 1, node)) if count <= most] or [1]
