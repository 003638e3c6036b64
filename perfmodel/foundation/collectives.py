"""Kinds of collectives, shared by all packages."""

from __future__ import annotations

from enum import StrEnum


class CollectiveKind(StrEnum):
    """Kinds of collectives; the order defines their integer codes (`hardware.calibration.COLLECTIVE_CODE`)."""

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    ALL_TO_ALL = "all_to_all"
    SEND_RECV = "send_recv"
