"""The latency that a cluster's file states, beside collectives that were measured on the chip's usual links."""

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
    """By how much a hop of `tier` takes longer than one of the links that the chip usually has there. [s]

    The chip's own file says which those are; 0 where it says nothing. Negative where the cluster's links are quicker.
    """
    is_out = cluster.is_scale_out(tier)
    usual = [default for default in cluster.chip.default_tiers if (default.topology is Topology.FAT_TREE) == is_out]
    inner = [other for other in cluster.tiers if cluster.is_scale_out(other) == is_out]
    if not usual:
        return 0.0
    return tier.link.latency - usual[min(inner.index(tier), len(usual) - 1)].link.latency


def with_latency(
    models: Mapping[CollectiveKind, CollectiveModel], difference: Column, passes: Mapping[CollectiveKind, float]
) -> Mapping[CollectiveKind, CollectiveModel]:
    """The models of links on which each hop takes `difference` longer, or less of what was measured, down to nothing.

    passes  hops of a ring that one of the model's stands for (an all-reduce goes round twice)
    """
    if np.all(difference == 0.0):
        return models
    return {kind: _with_latency(model, difference * _hops(kind, passes), difference) for kind, model in models.items()}


def _hops(kind: CollectiveKind, passes: Mapping[CollectiveKind, float]) -> float:
    return 1.0 if kind in (CollectiveKind.ALL_TO_ALL, CollectiveKind.SEND_RECV) else passes[kind]


def _with_latency(model: CollectiveModel, hop: Any, shot: Any) -> CollectiveModel:
    def longer(time: float, by: Column) -> Any:
        return np.maximum(time + by, 1e-12) if time else 0.0  # 0 says that the library has no such algorithm

    return replace(
        model,
        hop_time=cast(float, np.maximum(model.hop_time + hop, 0.0)),  # or a column of them
        tree_hop_time=longer(model.tree_hop_time, hop),
        one_shot_time=longer(model.one_shot_time, shot),
    )
