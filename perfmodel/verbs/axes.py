"""Axes of an exploration: fields of chip, network, technology, model, job and plan that take several values.

A `System` holds the objects that one prediction needs; an axis names one field of it: `chip.memory.bandwidth`, `technology.logic`,
`job.seq_len`, `plan.tp`. Every field is read and changed by its name alone, for training and for serving.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from operator import attrgetter
from typing import Any

from perfmodel.foundation.dtypes import Dtype
from perfmodel.foundation.errors import InputError, bad_field, suggest
from perfmodel.foundation.units import QuantityKind, parse_quantity, quantity_of
from perfmodel.foundation.values import doubled, read_integer, several
from perfmodel.foundation.words import words_of
from perfmodel.hardware.chip import Chip
from perfmodel.hardware.cluster import Cluster, make_cluster
from perfmodel.hardware.cluster_text import check_equal_chips, is_mixed
from perfmodel.hardware.fabric import NetworkTier
from perfmodel.hardware.technology import ChipSpec, MemorySpec
from perfmodel.parallel.knobs import Knobs, ServingKnobs
from perfmodel.parallel.request import Request, ServingRequest
from perfmodel.planner.exploration import Axis
from perfmodel.workload.config import TransformerConfig

DEFAULT_POINTS = 8
"""Default number of points of a range."""

#: Fields that are no axis: they name the system, or a criterion of its judgement.
_NO_AXIS = {"model", "cluster", "nodes", "settings", "workers", "memory_headroom", "risk", "chip", "assume"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class System:
    """One point of an exploration.

    asked   job and assumptions, of training or of a service; its cluster and model are replaced by the fields below
    knobs   of the plan
    spec    of a chip that is constructed from technology; None: of any other
    """

    asked: Request | ServingRequest
    knobs: Knobs | ServingKnobs
    cluster: Cluster
    model: TransformerConfig
    spec: ChipSpec | None = None

    @property
    def is_service(self) -> bool:
        return isinstance(self.asked, ServingRequest)


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisField:
    """Getter and setter of an axis. kind: of quantity; empty: an integer, a number or a name."""

    get: Callable[[System], Any]
    put: Callable[[System, Any], System]
    kind: str = ""


def axes_of(system: System) -> dict[str, AxisField]:
    """Return every axis of a system by name: complete parts first, because setting the others changes their result."""
    axes = {
        "chip": AxisField(get=attrgetter("cluster.chip.name"), put=_with_chip_named),
        "model": AxisField(get=attrgetter("model.name"), put=_with_model),
    }
    for path, value in () if system.spec is None else _leaves(system.spec, ()):
        # the name of a record means its first field: `technology.memory` is its generation
        short = path[:-1] if path[-1] in ("generation", "link") else path
        kind = quantity_of(path[-1]) if isinstance(value, float) else ""
        axes["technology." + ".".join(short)] = AxisField(get=attrgetter(".".join(("spec", *path))), put=_put_spec(path), kind=kind)
    axes |= hardware_axes(system)
    axes |= {f"model.{name}": _model_axis(name) for name, value in system.model.values.items() if isinstance(value, (int, float, str))}
    for group, record in (("job", "asked"), ("plan", "knobs")):
        for name in words_of(type(getattr(system, record))):
            if name not in _NO_AXIS:
                put = _with_chips if name == "chips" else _word_writer(name) if record == "asked" else _writer(record, name)
                axes[f"{group}.{name}"] = AxisField(get=attrgetter(f"{record}.{name}"), put=put)
    return axes


def hardware_axes(system: System) -> dict[str, AxisField]:
    """Return every number of the chip and its network that a prediction depends on; of each kind of chips in a mixed cluster. [SI]"""
    if system.cluster.pools:
        return {
            axis.replace(".", f".{kind}.", 1): _in_pools(field, members)
            for kind, members in _kinds(system.cluster).items()
            for axis, field in hardware_axes(replace(system, cluster=system.cluster.pools[members[0]])).items()
        }
    axes = {name: AxisField(get=get, put=_put_chip(put), kind=kind) for name, (kind, get, put) in _CHIP.items()}
    axes |= {f"chip.peak_flop_rate.{dtype}": _rate_axis(dtype) for dtype in system.cluster.chip.peak_flop_rate}
    for group, is_out in (("scale_up", False), ("scale_out", True)):
        if any(system.cluster.is_scale_out(tier) is is_out for tier in system.cluster.tiers):
            names = [name for name in _TIER if name != "oversubscription" or is_out]
            axes |= {f"network.{group}.{name}": _tier_axis(is_out, *_TIER[name]) for name in names}
    return axes


def changed(system: System, values: Mapping[str, Any], known: Mapping[str, AxisField] | None = None) -> System:
    """Return the system with these fields changed. known: its axes; None: they are looked up. Raises InputError."""
    known = axes_of(system) if known is None else known
    for name in sorted(values, key=list(known).index):
        system = known[name].put(system, values[name])
    return system


def read_axis(text: str, system: System, *, points: int | None = None) -> Axis:
    """Parse an axis: `NAME=a,b,c`, `NAME=1..8TB/s` or `NAME=x0.5..x4`, factors of the current value. Raises InputError.

    A range is spaced evenly in its logarithm; integers double unless `points` sets their number.
    """
    name, separator, values = str(text).partition("=")
    name, known = name.strip(), axes_of(system)
    if system.cluster.pools and name not in known and "." in name:
        group, *kind_and_rest = name.split(".", 2)  # the kind may be a longer or the full name of the chip
        chips = {kind: system.cluster.pools[members[0]].chip.name for kind, members in _kinds(system.cluster).items()}
        kinds = [kind for kind, chip in chips.items() if _begins(chip, kind_and_rest[0])]
        name = ".".join([group, kinds[0], *kind_and_rest[1:]]) if len(kinds) == 1 else name
    if name not in known:
        if name.startswith("technology.") and system.spec is None:
            rule = "the chip is not made from technology; give --chip with a specification, such as a100-spec (perfmodel chip --from)"
            raise InputError(f"{name}: {rule}")
        group, _, rest = name.partition(".")
        of_kinds = [axis for axis in known if axis.startswith(f"{group}.") and axis.endswith(f".{rest}")]
        if system.cluster.pools and of_kinds:
            raise InputError(f"{name}: {system.cluster.name} has several kinds of chips; name one: {' or '.join(of_kinds)}")
        near = suggest(name, [axis for axis in known if axis.partition(".")[0] == group] or known)
        raise InputError(f"{name or text}: is no axis{near}")
    if not separator or not values.strip():
        raise InputError(f"{name}: has no values; write {name}=a,b,c or {name}=a..b")
    field = known[name]
    present = field.get(system)
    ends = values.split("..")
    if len(ends) == 2:
        first, last = (_value(end, field, present, name) for end in _with_units([end.strip() for end in ends]))
        if not all(isinstance(end, (int, float)) and end > 0 for end in (first, last)) or first > last:
            raise bad_field(name, "..".join(ends), "must be two positive numbers, the smaller first", f"write {name}=a,b,c for names")
        axis_values = _range(first, last, points=points)
    elif len(ends) == 1:
        axis_values = [_value(part, field, present, name) for part in _with_units(several(values))]
    else:
        raise bad_field(name, values, "must be a list or one range", f"write {name}=a,b,c or {name}=a..b")
    return Axis(name=name, values=tuple(dict.fromkeys(axis_values)), kind=field.kind)


def _with_units(texts: list[Any]) -> list[str]:
    """Return the texts with the unit of the last value on bare numbers: `1,2,4TB/s`."""
    unit = re.fullmatch(r"[\d.]+\s*([^\d.\s].*)", str(texts[-1]))
    return [f"{text}{unit[1]}" if unit and re.fullmatch(r"[\d.]+", str(text)) else str(text) for text in texts]


def _range(first: Any, last: Any, *, points: int | None) -> list[Any]:
    if points is None and isinstance(first, int):
        return doubled(first, last)
    number = DEFAULT_POINTS if points is None else points
    spaced = [first * (last / first) ** (step / max(number - 1, 1)) for step in range(number)]
    spaced[-1] = last if number > 1 else first
    return [round(point) for point in spaced] if isinstance(first, int) else spaced


def _value(text: str, field: AxisField, present: object, name: str) -> Any:
    """Return a value in the type of the current one."""
    factor = re.fullmatch(r"x(\d*\.?\d+)", text)
    if factor and isinstance(present, (int, float)) and not isinstance(present, bool):
        scaled = present * float(factor[1])
        return max(round(scaled), 1) if isinstance(present, int) else scaled
    if field.kind:
        return parse_quantity(text, field.kind, field=name)
    if re.fullmatch(r"\d[\d_]*(\.\d+)?[kKmMgG]?", text) and "." not in text:
        return read_integer(text, name, least=0)
    if re.fullmatch(r"\d*\.\d+", text):
        return float(text)
    return {"true": True, "false": False}.get(text.lower(), text)


# ---------------------------------------------------------------------------------------------------------------------------------
# Complete parts, technology, model, job and plan
# ---------------------------------------------------------------------------------------------------------------------------------


def _writer(*path: str) -> Callable[[Any, Any], Any]:
    """Return the setter of a field of a record, or of records in it."""
    return lambda record, value: _replaced(record, path, value)


def _word_writer(name: str) -> Callable[[System, Any], System]:
    """Return the setter of a word of the request."""
    return lambda at, value: replace(at, asked=at.asked.having(**{name: value}))


def _model_axis(name: str) -> AxisField:
    return AxisField(get=lambda at: at.model.values[name], put=lambda at, value: replace(at, model=at.model.having(**{name: value})))


def _with_model(at: System, name: object) -> System:
    from perfmodel.workload.models import load_model

    return replace(at, model=load_model(str(name)))


def _with_chip_named(at: System, name: object) -> System:
    from perfmodel.verbs.setting import find_cluster

    return replace(at, cluster=find_cluster(str(name), at.cluster.num_chips)[1], spec=spec_of(str(name)))


def spec_of(cluster: object) -> ChipSpec | None:
    """Return the specification that a cluster is named after; None for any other cluster."""
    from perfmodel.foundation.files import read_yaml
    from perfmodel.foundation.values import is_path
    from perfmodel.hardware.cluster_text import chip_cluster
    from perfmodel.hardware.technology import is_chip_spec, list_chip_specs, load_chip_spec

    if is_mixed(str(cluster)):
        return None
    stated = chip_cluster(str(cluster))
    name = stated.chip if stated else str(cluster)
    is_spec = name in list_chip_specs() or (is_path(name) and is_chip_spec(read_yaml(name)))
    return load_chip_spec(name) if is_spec else None


def _leaves(record: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for record_field in fields(record):
        value = getattr(record, record_field.name)
        if is_dataclass(value):
            yield from _leaves(value, (*path, record_field.name))
        elif isinstance(value, (int, float, str)) and record_field.name not in ("name", "vendor", "source", "technology"):
            yield (*path, record_field.name), value


def _put_spec(path: tuple[str, ...]) -> Callable[[System, Any], System]:
    def put(at: System, value: object) -> System:
        from perfmodel.hardware.construct import construct_chip
        from perfmodel.hardware.technology import technology_of

        spec = _replaced(at.spec, path, value)
        chip = construct_chip(spec, technology_of(spec)).chip
        old = at.cluster
        cluster = make_cluster(chip, num_chips=old.num_chips, chips_per_node=old.chips_per_node, name=old.name)
        return replace(at, spec=spec, cluster=cluster)

    return put


def _replaced(record: Any, path: tuple[str, ...], value: Any) -> Any:
    first, *rest = path
    if rest:
        value = _replaced(getattr(record, first), tuple(rest), value)
    elif isinstance(record, MemorySpec) and first == "generation":
        return MemorySpec(generation=value, stacks=record.stacks)  # pins and capacity follow from the generation
    return replace(record, **{first: value})


def _with_chips(at: System, chips: object) -> System:
    return replace(at, asked=replace(at.asked, chips=chips), cluster=at.cluster.with_chips(read_integer(chips, "chips")))


# ---------------------------------------------------------------------------------------------------------------------------------
# Chip and network
# ---------------------------------------------------------------------------------------------------------------------------------


def _kinds(cluster: Cluster) -> dict[str, list[int]]:
    """Return the pools of each kind of chips, by the shortest beginning of the chip's name that no other kind has.

    Kinds whose chips have one name, with another speed or network, are called by their first pool: `pool2`.
    """
    chips = [(pool.chip, pool.tiers) for pool in cluster.pools]
    alike = {chips.index(chip): [i for i, other in enumerate(chips) if other == chip] for chip in chips}
    names, kinds = [cluster.pools[first].chip.name for first in alike], {}
    for name, (first, members) in zip(names, alike.items(), strict=True):
        parts = name.split("-")
        beginnings = ["-".join(parts[:length]) for length in range(1, len(parts) + 1)]
        unique = (start for start in beginnings if sum(_begins(other, start) for other in names) == 1)
        kinds[next(unique, f"pool{first + 1}")] = members
    return kinds


def _begins(name: str, start: str) -> bool:
    return f"{name}-".startswith(f"{start}-")


def _in_pools(field: AxisField, members: Sequence[int]) -> AxisField:
    """Return the axis of some pools of a mixed cluster. field: the same axis of a cluster of equal chips"""

    def put(at: System, value: Any) -> System:
        if not at.cluster.pools:
            raise bad_field("chip", at.cluster.chip.name, "replaces the chips whose numbers are varied", "vary one of the two")
        pools = tuple(
            field.put(replace(at, cluster=pool), value).cluster if i in members else pool for i, pool in enumerate(at.cluster.pools)
        )
        return replace(at, cluster=replace(at.cluster, chip=pools[0].chip, tiers=pools[0].tiers, pools=pools))

    return AxisField(get=lambda at: field.get(replace(at, cluster=at.cluster.pools[members[0]])), put=put, kind=field.kind)


def _put_chip(put: Callable[[Chip, Any], Chip]) -> Callable[[System, Any], System]:
    def change(at: System, value: Any) -> System:
        check_equal_chips(at.cluster)
        return replace(at, cluster=replace(at.cluster, chip=put(at.cluster.chip, value)))

    return change


def wide_rate(chip: Chip) -> float:
    """Return the peak rate in 16 bits, or the highest rate of a chip without 16-bit formats. [FLOP/s]"""
    rates = chip.peak_flop_rate
    return rates.get(Dtype.BF16) or rates.get(Dtype.FP16) or max(rates.values())


def _with_wide_rate(chip: Chip, rate: float) -> Chip:
    factor = rate / wide_rate(chip)
    return replace(chip, peak_flop_rate={dtype: flop_rate * factor for dtype, flop_rate in chip.peak_flop_rate.items()})


def _rate_axis(dtype: Dtype) -> AxisField:
    def put(chip: Chip, rate: float) -> Chip:
        return replace(chip, peak_flop_rate={**chip.peak_flop_rate, dtype: rate})

    return AxisField(get=lambda at: at.cluster.chip.flop_rate(dtype), put=_put_chip(put), kind=QuantityKind.FLOP_RATE)


def _with_capacity(chip: Chip, capacity: float) -> Chip:
    share = chip.memory.usable_fraction
    return replace(chip, memory=replace(chip.memory, capacity=capacity, usable=capacity * share))


_ChipField = tuple[str, Callable[[System], Any], Callable[[Chip, Any], Chip]]
#: Axis -> (kind, getter, setter on the chip). `chip.peak_flop_rate` is the rate in 16 bits and scales all rates.
_CHIP: Mapping[str, _ChipField] = {
    "chip.peak_flop_rate": (QuantityKind.FLOP_RATE, lambda at: wide_rate(at.cluster.chip), _with_wide_rate),
    "chip.memory.bandwidth": (QuantityKind.BANDWIDTH, attrgetter("cluster.chip.memory.bandwidth"), _writer("memory", "bandwidth")),
    "chip.memory.capacity": (QuantityKind.BYTES, attrgetter("cluster.chip.memory.capacity"), _with_capacity),
    "chip.on_chip.compute_units": ("", attrgetter("cluster.chip.units.compute_units"), _writer("units", "compute_units")),
    "chip.host_link": (QuantityKind.BANDWIDTH, attrgetter("cluster.chip.host_bandwidth"), _writer("host_bandwidth")),
}


def _with_link_bandwidth(tier: NetworkTier, bandwidth: float) -> NetworkTier:
    pair = tier.link.pair_bandwidth / tier.link.bandwidth
    return replace(tier, link=replace(tier.link, bandwidth=bandwidth, pair_bandwidth=bandwidth * pair))


_TierField = tuple[str, Callable[[NetworkTier], Any], Callable[[NetworkTier, Any], NetworkTier]]
_TIER: Mapping[str, _TierField] = {
    "bandwidth": (QuantityKind.BANDWIDTH, attrgetter("link.bandwidth"), _with_link_bandwidth),
    "latency": (QuantityKind.TIME, attrgetter("link.latency"), _writer("link", "latency")),
    "size": ("", attrgetter("size"), _writer("size")),
    "oversubscription": ("", attrgetter("oversubscription"), lambda tier, value: replace(tier, oversubscription=float(value))),
}


def _tier_axis(is_out: bool, kind: str, get: Callable[[NetworkTier], Any], put: Callable[[NetworkTier, Any], NetworkTier]) -> AxisField:
    """Return an axis of the outermost tier of scale-out or scale-up."""

    def last(cluster: Cluster) -> NetworkTier:
        return [tier for tier in cluster.tiers if cluster.is_scale_out(tier) is is_out][-1]

    def change(at: System, value: object) -> System:
        check_equal_chips(at.cluster)
        changed_tier = last(at.cluster)
        tiers = tuple(put(tier, value) if tier is changed_tier else tier for tier in at.cluster.tiers)
        return replace(at, cluster=replace(at.cluster, tiers=tiers))

    return AxisField(get=lambda at: get(last(at.cluster)), put=change, kind=kind)
