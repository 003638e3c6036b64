"""Correction of measured collectives for a latency that the cluster's file states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import numpy as np

from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.columns import Column
from perfmodel.hardware.calibration import CollectiveModel
from perfmodel.hardware.cluster import Cluster
from perfmodel.hardware.fabric import NetworkTier, Topology


def stated_latency_difference(cluster: Cluster, tier: NetworkTier) -> Column:
    """Return the extra latency of a hop of `tier` over a hop of the chip's default links there. [s]

    The chip's file lists the default links; without them the result is 0. It is negative if the cluster's links are faster.
    """
    is_out = cluster.is_scale_out(tier)
    usual = [default for default in cluster.chip.node.default_tiers if (default.topology is Topology.FAT_TREE) == is_out]
    inner = [other for other in cluster.tiers if cluster.is_scale_out(other) == is_out]
    if not usual:
        return 0.0
    return tier.link.latency - usual[min(inner.index(tier), len(usual) - 1)].link.latency


def with_latency(
    models: Mapping[CollectiveKind, CollectiveModel], difference: Column, passes: Mapping[CollectiveKind, float]
) -> Mapping[CollectiveKind, CollectiveModel]:
    """Return the models for links on which each hop takes `difference` longer; if negative, shorter than measured, down to 0.

    passes  ring hops for each hop of the model (an all-reduce has two ring passes)
    """
    if np.all(difference == 0.0):
        return models

    def longer(time: float, by: Column) -> Any:
        return np.maximum(time + by, 1e-12) if time else 0.0  # 0: the library has no such algorithm

    changed = {}
    for kind, model in models.items():
        hop: Any = difference * (1.0 if kind in (CollectiveKind.ALL_TO_ALL, CollectiveKind.SEND_RECV) else passes[kind])
        changed[kind] = replace(
            model,
            hop_time=cast(float, np.maximum(model.hop_time + hop, 0.0)),  # or a column
            tree_hop_time=longer(model.tree_hop_time, hop),
            one_shot_time=longer(model.one_shot_time, difference),
        )
    return changed
