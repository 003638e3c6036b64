"""Serving plans: job, cluster, engine, and the layout of replicas or of prefill and decode workers; layouts as text and as columns."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.foundation.errors import bad_field
from perfmodel.foundation.values import read_integer
from perfmodel.workload.serving import ServingJob

_SIZE = re.compile(r"(\d{1,6})\s*x\s*(\d{1,6})\s*(?:@\s*(.+?)\s*)?", re.ASCII)
_REMEDY = "write 3x4:1x8 for three prefill workers of 4 chips and one decode worker of 8; degrees follow, as in 1x8,tp=2,pp=4:1x8,tp=8"
SERVING_KIND = "serving"
"""Value of `kind` in the file of a serving plan."""
DEGREES = ("tp", "pp", "attention_dp", "ep", "dcp", "pcp")
COLUMNS = (*DEGREES, "replicas", "max_batch", "max_tokens")
"""Fields of a layout, in files, spaces and tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedWorkers:
    """Stated workers of one pool.

    count    number of workers
    chips    chips of each worker
    cluster  cluster of their chips, if stated
    degrees  stated degrees by name
    """

    count: int
    chips: int
    cluster: str = ""
    degrees: Mapping[str, int] = field(default_factory=dict)


def parse_workers(value: object, name: str = "workers") -> tuple[StatedWorkers, StatedWorkers]:
    """Return the prefill and the decode workers of a text. Raises InputError."""
    parts, form = str(value).split(":"), "must be prefill workers x chips of each : decode workers x chips of each"
    if len(parts) != 2:
        raise bad_field(name, value, form, _REMEDY)
    groups = []
    for part in parts:
        size, *given = part.split(",")
        match = _SIZE.fullmatch(size.strip())
        if match is None:
            raise bad_field(name, value, form, _REMEDY)
        degrees: dict[str, int] = {}
        for entry in given:
            degree, _, number = entry.partition("=")
            degree = degree.strip().replace("-", "_")
            if degree not in DEGREES:
                raise bad_field(name, value, f"{degree or entry} is no degree of a worker", f"use {', '.join(DEGREES).replace('_', '-')}")
            if degree in degrees:
                raise bad_field(name, value, f"{degree} is given twice for one kind of worker", "keep one")
            degrees[degree] = read_integer(number, f"{name}: {degree}")
        count, chips = read_integer(match[1], name), read_integer(match[2], name)
        groups.append(StatedWorkers(count=count, chips=chips, cluster=match[3] or "", degrees=degrees))
    prefill, decode = groups
    for group, degree, rule in ((prefill, "dcp", "is of decode workers"), (decode, "pcp", "is of prefill workers")):
        if group.degrees.get(degree, 1) > 1:
            raise bad_field(name, value, f"{degree} {rule}", f"leave {degree} out on that side of the colon")
    if bool(prefill.cluster) != bool(decode.cluster):
        raise bad_field(name, value, "names the chips of one kind of worker only", "write 3x4@h20:1x8@h200, or leave both to --cluster")
    return prefill, decode


def cluster_text(groups: tuple[StatedWorkers, StatedWorkers]) -> str:
    """Return the cluster of workers that name their chips (`hardware/cluster_text.py`); "" if they do not."""
    return "+".join(f"{group.count * group.chips}@{group.cluster}" for group in groups) if groups[0].cluster else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingLayout:
    """Degrees of a replica, number of replicas and limits of a step.

    tp, pp         tensor- and pipeline-parallel degrees
    attention_dp   data-parallel attention ranks of a replica; experts are sharded over tp * pcp * attention_dp chips
    ep             expert-parallel ranks; the rest of those chips shards each expert (moe_tp)
    dcp            decode context parallelism: number of tp and pcp ranks that split the tokens of a cache instead of replicating it
    pcp            prefill context parallelism: chips in addition to tp that split the tokens of a prompt; all of them decode all sequences
    replicas       independent copies
    max_batch      concurrent sequences of a replica; 0: the engine's
    max_tokens     tokens of a step; 0: the engine's
    """

    tp: int = 1
    pp: int = 1
    attention_dp: int = 1
    ep: int = 1
    dcp: int = 1
    pcp: int = 1
    replicas: int = 1
    max_batch: int = 0
    max_tokens: int = 0

    def __post_init__(self) -> None:
        for name in (*DEGREES, "replicas"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise bad_field(name, value, "must be a whole number of at least 1", "use 1 to leave it out")
        for name in ("max_batch", "max_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise bad_field(name, value, "must be a whole number", "use 0 for the engine's own")
        if self.chips_of_stage % self.ep:
            chips = f"tp * {'pcp * ' if self.pcp > 1 else ''}attention_dp = {self.chips_of_stage}"
            raise bad_field("ep", self.ep, f"must divide {chips}, over which the experts of a replica lie", "use a divisor")
        if self.pcp == 1 and self.tp % self.dcp:
            raise bad_field("dcp", self.dcp, f"must divide tp={self.tp}, whose ranks share the tokens of a cache", "use a divisor")
        shared = sorted({1, self.pcp, self.tp * self.pcp})
        if self.pcp > 1 and self.dcp not in shared:
            rule = f"must be 1, pcp or tp * pcp with pcp={self.pcp}: all of its ranks share the tokens of a cache, or none"
            raise bad_field("dcp", self.dcp, rule, f"use {', '.join(str(degree) for degree in shared)}")

    @property
    def chips_of_stage(self) -> int:
        """Chips of one pipeline stage, over which its experts are sharded."""
        return self.tp * self.pcp * self.attention_dp

    @property
    def chips_per_replica(self) -> int:
        return self.chips_of_stage * self.pp

    @property
    def num_chips(self) -> int:
        return self.chips_per_replica * self.replicas

    @property
    def expert_tp(self) -> int:
        """Ranks that share an expert (moe_tp)."""
        return self.chips_of_stage // self.ep

    @property
    def degrees(self) -> dict[str, int]:
        """Degrees of a replica, by name."""
        return {name: getattr(self, name) for name in DEGREES}

    def degrees_text(self) -> str:
        """Return the degrees above 1, and tp, as text: ,tp=2,ep=8."""
        return "".join(f",{name.replace('_', '-')}={degree}" for name, degree in self.degrees.items() if degree > 1 or name == "tp")

    def label(self) -> str:
        """Return the layout as a label: tp 8, ep 8, 2 replicas."""
        parts = [f"tp {self.tp}"]
        words = {"pcp": self.pcp, "pp": self.pp, "attention dp": self.attention_dp, "ep": self.ep, "dcp": self.dcp}
        parts += [f"{word} {value}" for word, value in words.items() if value > 1]
        if self.replicas > 1:
            parts.append(f"{self.replicas} replicas")
        return ", ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        return {**{name: getattr(self, name) for name in COLUMNS}, "num_chips": self.num_chips}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """Prefill and decode workers of disaggregated serving.

    prefill, decode              layout of one worker of each pool
    prefill_workers, decode_workers   number of workers
    """

    prefill: ServingLayout
    decode: ServingLayout
    prefill_workers: int
    decode_workers: int

    @property
    def replicas(self) -> int:
        """Independent copies of the service: one."""
        return 1

    @property
    def num_chips(self) -> int:
        return self.prefill_workers * self.prefill.chips_per_replica + self.decode_workers * self.decode.chips_per_replica

    @property
    def text(self) -> str:
        """Text that `parse_workers` reads back: 1x8,tp=2,ep=8:1x8,tp=8."""
        groups = ((self.prefill_workers, self.prefill), (self.decode_workers, self.decode))
        return ":".join(f"{count}x{layout.chips_per_replica}{layout.degrees_text()}" for count, layout in groups)

    def label(self) -> str:
        """Return the pools as a label: prefill 3 x (tp 4), decode 1 x (tp 8)."""
        return f"prefill {self.prefill_workers} x ({self.prefill.label()}), decode {self.decode_workers} x ({self.decode.label()})"

    def to_dict(self) -> dict[str, Any]:
        pools = {
            "prefill": self.prefill.to_dict(), "prefill_workers": self.prefill_workers,
            "decode": self.decode.to_dict(), "decode_workers": self.decode_workers,
        }  # fmt: skip
        return {**dict.fromkeys(COLUMNS), "num_chips": self.num_chips, "workers": self.text, "pools": pools}


#: Equal replicas, or the two pools of disaggregated serving.
ServiceLayout = ServingLayout | Pools


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPlan:
    """The complete decision how a model is served on a cluster."""

    job: ServingJob
    cluster: str
    engine: str
    layout: ServiceLayout
    calibration: str = ""

    @property
    def num_chips(self) -> int:
        return self.layout.num_chips

    @property
    def pools(self) -> Pools | None:
        """Prefill and decode workers; None for equal replicas."""
        return self.layout if isinstance(self.layout, Pools) else None

    def label(self) -> str:
        """Return the layout as a label."""
        return self.layout.label()

    def to_dict(self) -> dict[str, Any]:
        """Return engine and layout as plain values."""
        return {"engine": self.engine, **self.layout.to_dict()}


Whole = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServingColumns:
    """Fields of `ServingLayout` as columns of equal length."""

    tp: Whole
    pp: Whole
    attention_dp: Whole
    ep: Whole
    dcp: Whole
    pcp: Whole
    replicas: Whole
    max_batch: Whole
    max_tokens: Whole

    @classmethod
    def of(cls, layouts: Sequence[ServingLayout]) -> ServingColumns:
        columns: dict[str, Any] = {name: np.array([getattr(layout, name) for layout in layouts], dtype=np.int64) for name in COLUMNS}
        return cls(**columns)

    def __len__(self) -> int:
        return len(self.tp)

    @property
    def chips_of_stage(self) -> Whole:
        """Chips of one pipeline stage, over which its experts are sharded."""
        return self.tp * self.pcp * self.attention_dp

    @property
    def chips_per_replica(self) -> Whole:
        return self.chips_of_stage * self.pp

    @property
    def num_chips(self) -> Whole:
        return self.chips_per_replica * self.replicas

    def layout(self, at: int) -> ServingLayout:
        return ServingLayout(**{name: int(getattr(self, name)[at]) for name in COLUMNS})

    def take(self, which: NDArray[Any]) -> ServingColumns:
        """Return the columns at some indices, or where a mask is true."""
        return ServingColumns(**{name: getattr(self, name)[which] for name in COLUMNS})
