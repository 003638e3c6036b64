"""Reader of hardware files as `Chip`, `Cluster` and `Calibration`: by shipped name or by path, one file at a time.

Shipped: `hardware_specs/chips/*.yaml`, `clusters/*.yaml`, `calibrations/*.yaml` and `prices.tsv`. A bad file or name is an `InputError`.
"""

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfmodel.foundation.dtypes import Dtype
from perfmodel.foundation.errors import InputError, bad_field, one_line, suggest
from perfmodel.foundation.files import parse_yaml, read_bytes, read_text, read_yaml
from perfmodel.foundation.records import record_from_data
from perfmodel.foundation.resources import resource_dir
from perfmodel.foundation.session import session_cache
from perfmodel.foundation.units import parse_quantity
from perfmodel.foundation.values import check_name, check_path, is_path
from perfmodel.hardware.chip import (
    HOST_BANDWIDTH,
    PROVENANCES,
    USABLE_FRACTION_ELSE,
    USABLE_FRACTIONS,
    Chip,
    ComputeUnits,
    MemoryTier,
    UsualNode,
)
from perfmodel.hardware.cluster import Cluster, make_cluster
from perfmodel.hardware.cluster_text import (
    ChipCluster,
    PoolText,
    chip_cluster,
    cluster_of_pools,
    is_mixed,
    make_pool,
    mixed_cluster,
    read_speed,
    state_chip_cluster,
)
from perfmodel.hardware.fabric import Link, NetworkTier, Topology
from perfmodel.hardware.power import power_limited_fraction
from perfmodel.hardware.technology import chip_spec, is_chip_spec, technology_of

if TYPE_CHECKING:
    from perfmodel.hardware.calibration import Calibration

LOCALHOST = "localhost"
"""Name of this machine as a cluster, detected at run time."""


def list_chips() -> tuple[str, ...]:
    """Return the names of the shipped chips, sorted."""
    return _names("chips")


def list_clusters() -> tuple[str, ...]:
    """Return the names of the shipped clusters, sorted, `localhost` included."""
    return tuple(sorted({*_names("clusters"), LOCALHOST}))


def list_calibrations(folders: Sequence[Path] = ()) -> tuple[str, ...]:
    """Return the names of the shipped calibrations and of those in `folders`, sorted."""
    return tuple(sorted({path.stem for path in _calibration_paths((*folders, _shipped_calibrations()))}))


def load_chip(name_or_path: str | Path) -> Chip:
    """Load a shipped chip by its name or a prefix of it (`h20` for `h20-96gb`), or any chip file by its path.

    A chip specification (technology and budgets) is constructed into a chip.
    """
    check_path(name_or_path, "chip")
    name = chip_called(str(name_or_path)) or name_or_path
    path = _find(name, "chip_specs" if _is_shipped(str(name), "chip_specs") else "chips", "chip", list_chips)
    return _chip_of(read_text(path, "YAML file"), str(path), is_shipped(path))


def chip_called(text: str) -> str:
    """Return the shipped chip with this name, prefix or alias; empty if there is none.

    Case, spaces and underscores are ignored: `RTX 5090` is `rtx5090-32gb`. An ambiguous prefix is an error.
    """
    if _is_shipped(text, "chips") or _is_shipped(text, "chip_specs"):
        return text
    wanted = _plain_name(text)
    if not wanted or is_path(text):
        return ""
    names = list_chips()
    matches = [name for name in names if _plain_name(name) == wanted]
    if not matches:  # by the prefixes `h100`, `h100sxm` and `h100sxm80gb` of `h100-sxm-80gb`
        matches = [name for name in names if wanted in map(_plain_name, accumulate(name.split("-")))]
    if not matches:
        matches = [name for name in names if wanted in map(_plain_name, map(str, read_yaml(_shipped("chips", name)).get("aliases", ())))]
    if len(matches) > 1:
        clusters = [name for name in list_clusters() if wanted in _plain_name(name)]
        remedy = "give one of them" + (f", or a cluster: {', '.join(clusters)}" if clusters else "")
        raise bad_field("chip", text, f"several chips are called so: {', '.join(matches)}", remedy)
    return matches[0] if matches else ""


def _plain_name(text: str) -> str:
    return "".join(char for char in text.lower() if char.isalnum())


def load_cluster(name_or_path: str | Path, *, num_chips: int | None = None) -> Cluster:
    """Load a shipped cluster by its name, `localhost`, or any cluster file by its path; `num_chips` as in `Cluster.with_chips`.

    A cluster file names its chip, or the path of a chip file relative to itself. A chip (by name if no cluster has that name, or by file)
    is a cluster too, with its usual node and links or with those given in the text: see `hardware/cluster_text.py`. Several kinds
    of chips also form a cluster: `8@dgx-h100+8@dgx-a100` or a file with `pools`, see `hardware/cluster_text.py`.
    """
    check_path(name_or_path, "cluster")
    if isinstance(name_or_path, str) and _is_shipped(name_or_path, "clusters"):
        return _shipped_cluster(name_or_path, num_chips)
    if str(name_or_path) == LOCALHOST:
        from perfmodel.hardware.local import local_cluster

        return local_cluster(num_chips=num_chips)
    if is_mixed(str(name_or_path)):
        mixed = mixed_cluster(str(name_or_path), lambda name, chips: load_cluster(name, num_chips=chips))
        return mixed if num_chips is None else mixed.with_chips(num_chips)
    stated = chip_cluster(str(name_or_path))
    if stated is not None:
        return _around_chip(_named(stated), num_chips)
    if not isinstance(name_or_path, Path):
        chip_name = chip_called(name_or_path)
        if chip_name:
            return _around_chip(ChipCluster(chip=chip_name), num_chips)
    return _cluster_in(_find(name_or_path, "clusters", "cluster", lambda: (*list_clusters(), *list_chips())), num_chips)


@session_cache(maxsize=64)
def _shipped_cluster(name: str, num_chips: int | None) -> Cluster:
    return _cluster_in(_shipped("clusters", name), num_chips)


def _cluster_in(path: Path, num_chips: int | None) -> Cluster:
    """Return the cluster in a file, or around the chip in it."""
    text = read_text(path, "YAML file")
    content = parse_yaml(text, where=str(path))
    if "tiers" not in content and ("peak_flop_rate" in content or is_chip_spec(content)):
        return _around_chip(state_chip_cluster(path), num_chips)
    cluster = _cluster_of(content, text, str(path), is_shipped(path), path.parent)
    return cluster if num_chips is None else cluster.with_chips(num_chips)


def _around_chip(stated: ChipCluster, num_chips: int | None) -> Cluster:
    return make_cluster(
        load_chip(stated.chip),
        num_chips=num_chips,
        chips_per_node=stated.per_node,
        scale_up_bandwidth=stated.scale_up,
        inter_node_bandwidth_per_chip=stated.scale_out,
        nics_per_node=stated.nics,
        name=stated.text,
    )


def cluster_of_chip(
    chip: str | Path,
    *,
    per_node: int | None = None,
    scale_up: str | float | None = None,
    scale_out: str | float | None = None,
    chips: int | None = None,
) -> Cluster:
    """Return a cluster around any chip (name or file) for `cluster=` of the verbs; a plan saved with it can be predicted again.

    per_node    chips of one host; None = as usual for the chip
    scale_up    one direction of one chip inside a node, such as "450 GB/s" (a number is byte/s); None = the chip's usual links
    scale_out   one direction of one chip between nodes, such as "400 Gbit/s"; None = the chip's usual NICs
    chips       None = one node
    """
    return _around_chip(_named(state_chip_cluster(chip, per_node=per_node, scale_up=scale_up, scale_out=scale_out)), chips)


def _named(stated: ChipCluster) -> ChipCluster:
    """Return it with the full name of a shipped chip: a prefix that is unique now may become ambiguous."""
    return dataclasses.replace(stated, chip=chip_called(stated.chip) or stated.chip)


def cluster_of(
    chip_name: str | Path,
    chips_per_node: int | None = None,
    num_chips: int = 1,
    inter_node_bandwidth_per_chip: float | None = None,
) -> Cluster:
    """Return a cluster of any size around a chip with its usual links, as in descriptions of published runs.

    inter_node_bandwidth_per_chip   one direction [byte/s]; None = the chip's usual NICs. 1600 Gbit/s for a node of 8 is 25e9.
    """
    return make_cluster(
        load_chip(chip_name),
        num_chips=num_chips,
        chips_per_node=chips_per_node,
        inter_node_bandwidth_per_chip=inter_node_bandwidth_per_chip,
    )


def load_calibration(name_or_path: str | Path, folders: Sequence[Path] = ()) -> "Calibration":
    """Load a shipped calibration by its name (or one in `folders`), or any calibration file by its path."""
    check_path(name_or_path, "calibration")
    for path in _calibration_paths((*folders, _shipped_calibrations())):
        if path.stem == str(name_or_path):
            return _read_calibration(path)
    return _read_calibration(_find(name_or_path, "calibrations", "calibration", lambda: list_calibrations(folders)))


def calibrations_for(chip: Chip | str, folders: Sequence[Path] = ()) -> "tuple[Calibration, ...]":
    """Return the calibrations for this chip, those in `folders` first; a relative's at this chip's power. Others are not parsed.

    Without any, the shipped calibrations of the vendor's neighbouring generations form a prior, if there are any.
    """
    check_name(chip, "chip", Chip, "give a chip's name")
    name = chip.name if isinstance(chip, Chip) else str(chip)
    calibrations = [*_calibrations_in(folders, name), *_shipped_for(name)]
    if not calibrations:
        prior = prior_for(chip) if isinstance(chip, Chip) else prior_for(load_chip(name)) if name in list_chips() else None
        calibrations += [prior] if prior else []
    return tuple(calibrations)


@lru_cache(maxsize=256)
def _shipped_for(chip_name: str) -> "tuple[Calibration, ...]":
    """Return the shipped calibrations for this chip."""
    return tuple(_calibrations_in((_shipped_calibrations(),), chip_name))


def _calibrations_in(folders: Iterable[Path], chip_name: str) -> "list[Calibration]":
    """Return the calibrations in these folders for this chip; a relative's at this chip's power."""
    calibrations = []
    for path in _calibration_paths(folders):
        try:
            mentions = chip_name.encode(errors="replace") in read_bytes(path, "calibration")
        except InputError as error:
            raise InputError(f"{error}; make {path.name} readable or remove it") from error
        # A file without the name does not apply to the chip. One with it may contain a longer name, or mention the chip in its source.
        if mentions:
            calibration = _read_calibration(path)
            if chip_name in (*calibration.chips, *calibration.relatives):
                calibrations.append(_at_power_of(chip_name, calibration))
    return calibrations


def user_calibrations_dir() -> Path:
    """Return the folder of the user's calibrations, which predictions search first; it need not exist.

    It is $XDG_DATA_HOME/perfmodel/calibrations. Without that variable, or with a relative path (ignored by its specification), it is
    ~/.local/share/perfmodel/calibrations.
    """
    data = os.environ.get("XDG_DATA_HOME", "")
    if not os.path.isabs(data):
        try:
            data = os.path.join(Path.home(), ".local", "share")
        except RuntimeError as error:
            raise InputError(
                "home: this user has no home folder; save the calibration with --save and name it with --calibration"
            ) from error
    return Path(data, "perfmodel", "calibrations")


def prior_for(chip: Chip) -> "Calibration | None":
    """Return the prior of a chip from the shipped calibrations of its vendor's other chips; None if the vendor has none of its kind."""
    from perfmodel.hardware.prior import prior_calibration

    return prior_calibration(chip, measured_chips())


@lru_cache(maxsize=1)
def measured_chips() -> "tuple[tuple[Calibration, Chip], ...]":
    """Return each shipped calibration with the chip that it was measured on."""
    known = [_read_calibration(path) for path in _calibration_paths((_shipped_calibrations(),))]
    return tuple((calibration, load_chip(calibration.chips[0])) for calibration in known if calibration.chips)


def _at_power_of(chip_name: str, calibration: "Calibration") -> "Calibration":
    """Return the calibration of a relative with the sustained clock that this chip's power limit allows."""
    if chip_name not in calibration.relatives or not set(calibration.chips) & set(list_chips()):
        return calibration
    measured = next(load_chip(name) for name in calibration.chips if name in list_chips())
    from perfmodel.hardware.prior import as_measured

    chip = load_chip(chip_name)
    if chip.matmul_fraction:
        return as_measured(calibration, chip)
    return dataclasses.replace(calibration, sustained=calibration.sustained.at_clock(power_limited_fraction(chip, measured)))


@dataclass(slots=True, frozen=True, kw_only=True)
class Price:
    """Indicative rental price of one chip on one date. Prices change fast, so they are in a separate table. [USD/h]"""

    chip: str
    date: str
    per_hour: float
    low: float
    high: float
    provenance: str
    source: str


def load_prices(path: str | Path | None = None) -> dict[str, Price]:
    """Load the dated price table (tab-separated, units in every cell), by chip; the shipped one unless a path is given."""
    table = Path(path) if path is not None else resource_dir("hardware_specs") / "prices.tsv"
    try:
        lines = table.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise InputError(f"{table}: cannot be read ({error}); give a tab-separated price table") from error
    rows = [(number, line.split("\t")) for number, line in enumerate(lines, 1) if line.strip() and not line.startswith("#")]
    if not rows or tuple(rows[0][1]) != _PRICE_COLUMNS:
        raise InputError(f"{table}: the first line must be the columns {', '.join(_PRICE_COLUMNS)}, separated by tabs")
    prices = {}
    for number, cells in rows[1:]:
        where = f"{table}: line {number}"
        if len(cells) != len(_PRICE_COLUMNS):
            raise InputError(f"{where}: {len(cells)} cells; must be {len(_PRICE_COLUMNS)}, separated by tabs")
        chip, date, *texts, provenance, source = cells
        if provenance not in PROVENANCES:
            remedy = f"use one of {', '.join(PROVENANCES)}"
            raise InputError(f"{where}: {bad_field('provenance', provenance, 'unknown provenance', remedy)}")
        numbers = zip(("per_hour", "low", "high"), texts, strict=True)
        per_hour, low, high = (parse_quantity(text, "price", field=f"{where}: {column}") for column, text in numbers)
        prices[chip] = Price(chip=chip, date=date, per_hour=per_hour, low=low, high=high, provenance=provenance, source=source)
    return prices


_PRICE_COLUMNS = ("chip", "date", "per_hour", "low", "high", "provenance", "source")


_shipped_prices = lru_cache(maxsize=1)(load_prices)


def _names(folder: str) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in (resource_dir("hardware_specs") / folder).glob("*.yaml")))


def _shipped_calibrations() -> Path:
    return resource_dir("hardware_specs") / "calibrations"


def _calibration_paths(folders: Iterable[Path]) -> list[Path]:
    """Return the calibration files of these folders, sorted in every folder."""
    paths: list[Path] = []
    for folder in folders:
        with suppress(OSError, ValueError):  # a folder that is missing, has an invalid name or denies access
            paths += sorted(filter(Path.is_file, Path(folder).glob("*.yaml")))
    return paths


def _find(name_or_path: str | Path, folder: str, what: str, known: Any) -> Path:
    """Return the file of a name or a path. A name is looked up first, without listing the folder."""
    text = str(name_or_path)
    if isinstance(name_or_path, Path) or is_path(text):
        path = Path(text)
        if not os.path.isfile(path):
            raise InputError(
                f"{what}={one_line(text, 200)}: no such file; give the path of a YAML file, or a name from `perfmodel {folder}`"
            )
        return path
    if _is_shipped(text, folder):
        return _shipped(folder, text)
    raise InputError(
        f"{what}={one_line(text, 60)}: unknown {what}{suggest(text, known())} (`perfmodel {folder}` lists them; "
        f"{'a chip or ' if folder == 'clusters' else ''}a path works too)"
    )


@lru_cache(maxsize=1024)
def _is_shipped(name: str, folder: str) -> bool:
    is_name = bool(name) and not name.startswith(".") and not {"/", "\\"} & set(name)
    return is_name and os.path.isfile(_shipped(folder, name))  # pathlib raises for a name too long


def _shipped(folder: str, name: str) -> Path:
    return resource_dir("hardware_specs") / folder / f"{name}.yaml"


@contextmanager
def _located(where: str | Path) -> Iterator[None]:
    """Prefix an InputError with the name of the file."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{where}: {error.full}") from error


def is_shipped(path: Path) -> bool:
    """Return whether a hardware file is shipped: the tests validate those, so the schema need not be loaded."""
    return path.parent.parent == resource_dir("hardware_specs")


def _chip(data: Mapping[str, Any]) -> Chip:
    memory, on_chip, facts = data["memory"], data.get("on_chip", {}), data["facts"]
    scale_up = [_tier(tier, f"scale_up.{number}") for number, tier in enumerate(data.get("scale_up", ()))]
    scale_out = [_tier(data["scale_out"], "scale_out")] if "scale_out" in data else []
    groups = ["launch_year", "peak_flop_rate", "memory_capacity", "memory_bandwidth", "on_chip"]
    groups += ["memory_usable"] if "usable_capacity" in memory else []
    groups += [name for name in ("host_link", "matmul_fraction", "tdp") if name in data]
    groups += ["node"] if "chips_per_node" in data else []
    for group in groups:
        if group not in facts:
            raise bad_field("facts", group, "every number has a provenance and a source", f"add facts.{group}")
    price = _shipped_prices().get(data["name"])
    return Chip(
        name=data["name"],
        title=data.get("title", ""),
        vendor=data["vendor"],
        launch_year=data["launch_year"],
        peak_flop_rate={
            Dtype(name): parse_quantity(rate, "flop_rate", field=f"peak_flop_rate.{name}") for name, rate in data["peak_flop_rate"].items()
        },
        memory=_memory(memory, data["vendor"]),
        on_chip_bytes=parse_quantity(on_chip.get("capacity", "0 B"), "bytes", field="on_chip.capacity"),
        units=ComputeUnits(
            compute_units=on_chip["compute_units"],
            unit_kind=on_chip["unit_kind"],
            devices_per_chip=data.get("devices_per_chip", 1),
            any_operand_order=data.get("any_operand_order", False),
        ),
        tdp_watts=parse_quantity(data.get("tdp", "0 W"), "power", field="tdp"),
        host_bandwidth=parse_quantity(data["host_link"], "bandwidth", field="host_link") if "host_link" in data else HOST_BANDWIDTH,
        matmul_fraction=float(data.get("matmul_fraction", 0.0)),
        price_per_hour=price.per_hour if price else 0.0,
        provenance=(
            {group: fact["provenance"] for group, fact in facts.items()}
            | _tier_provenance("scale_up", scale_up)
            | _tier_provenance("scale_out", scale_out)
            | ({"price": price.provenance} if price else {})
        ),
        source="; ".join(dict.fromkeys(fact["source"] for fact in facts.values())),
        notes=data.get("notes", ""),
        node=UsualNode(chips_per_node=data.get("chips_per_node", 1), default_tiers=(*scale_up, *scale_out)),
        aliases=tuple(data.get("aliases", ())),
    )


def _memory(memory: Mapping[str, Any], vendor: str) -> MemoryTier:
    capacity = parse_quantity(memory["capacity"], "bytes", field="memory.capacity")
    if "usable_capacity" in memory:
        usable = parse_quantity(memory["usable_capacity"], "bytes", field="memory.usable_capacity")
        if usable == 0:
            raise bad_field("memory.usable_capacity", memory["usable_capacity"], "must be positive", "leave it out where it is unknown")
    else:
        usable = capacity * USABLE_FRACTIONS.get(vendor, USABLE_FRACTION_ELSE)
    return MemoryTier(
        name=memory["name"],
        capacity=capacity,
        bandwidth=parse_quantity(memory["bandwidth"], "bandwidth", field="memory.bandwidth"),
        usable=usable,
    )


def _tier_provenance(group: str, tiers: Sequence[NetworkTier]) -> dict[str, str]:
    """Return the common provenance of a group of tiers; empty without tiers."""
    stated = {tier.provenance for tier in tiers}
    return {group: stated.pop() if len(stated) == 1 else "mixed"} if stated else {}


def _cluster(data: Mapping[str, Any], chip: Chip) -> Cluster:
    tiers = tuple(_tier(tier, f"tiers.{number}") for number, tier in enumerate(data["tiers"]))
    return Cluster(
        name=data["name"],
        title=data.get("title", ""),
        chip=chip,
        num_chips=data["num_chips"],
        chips_per_node=data["chips_per_node"],
        tiers=tiers,
        source=data["source"],
        provenance=data["provenance"],
        notes=data.get("notes", ""),
        largest_job=data.get("largest_job", 0),
    )


def _tier(data: Mapping[str, Any], where: str) -> NetworkTier:
    bandwidth = parse_quantity(data["bandwidth"], "bandwidth", field=f"{where}.bandwidth")
    pair_bandwidth = parse_quantity(data.get("pair_bandwidth", data["bandwidth"]), "bandwidth", field=f"{where}.pair_bandwidth")
    latency = parse_quantity(data["latency"], "time", field=f"{where}.latency")
    try:
        link = Link(bandwidth=bandwidth, pair_bandwidth=pair_bandwidth, latency=latency)
    except InputError as error:
        raise InputError(f"{where}.{error}") from error
    return NetworkTier(
        name=data["name"],
        topology=Topology(data["topology"]),
        size=data["size"],
        link=link,
        torus_shape=tuple(data.get("torus_shape", ())),
        wrap_multiple=data.get("wrap_multiple", 0),
        oversubscription=float(data.get("oversubscription", 1.0)),
        peer_to_peer=data.get("peer_to_peer", True),
        nics_per_node=data.get("nics_per_node", 0),
        source=data["source"],
        provenance=data["provenance"],
    )


def _read_calibration(path: Path) -> "Calibration":
    return _calibration_of(read_text(path, "YAML file"), path)


@session_cache(maxsize=64)
def _calibration_of(text: str, path: Path) -> "Calibration":
    from perfmodel.hardware.calibration import Calibration

    data = parse_yaml(text, where=str(path))
    with _located(path):
        if is_shipped(path):
            return record_from_data(Calibration, data, where="calibration")
        from perfmodel.foundation.schema import checked_record

        return checked_record(Calibration, data, where="calibration")


def parse_cluster(text: str, *, where: str = "cluster") -> Cluster:
    """Parse the text of a cluster file whose chip is a shipped one."""
    return _cluster_of(parse_yaml(text, where=where), text, where)


def _cluster_of(data: Mapping[str, Any], text: str, where: str, is_shipped: bool = False, folder: Path | None = None) -> Cluster:
    """Build a cluster from the data of a text. folder: base of the path of a chip file; None: the chip is given by name."""
    if "pools" in data:
        from perfmodel.foundation.schema import check
        from perfmodel.hardware.schemas import MixedClusterFile

        check(MixedClusterFile, data, where=where)
        with _located(where):
            pools = tuple(_pool_of(entry, number, data, folder) for number, entry in enumerate(data["pools"]))
            return cluster_of_pools(pools, name=data["name"], title=data.get("title", ""), notes=data.get("notes", ""))
    if not is_shipped:
        from perfmodel.foundation.schema import check
        from perfmodel.hardware.schemas import ClusterFile

        check(ClusterFile, data, where=where)
    chip = load_chip(folder / data["chip"] if folder is not None and is_path(data["chip"]) else data["chip"])
    return _equal_chips_of(text, where, chip)


@session_cache(maxsize=64)
def _equal_chips_of(text: str, where: str, chip: Chip) -> Cluster:
    """Build a cluster of equal chips from its text: of an edited file, or of another chip, it is another one."""
    with _located(where):
        return _cluster(parse_yaml(text, where=where), chip)


_NODE_TYPE = ("chip", "chips_per_node", "tiers")


def _pool_of(entry: Mapping[str, Any], number: int, data: Mapping[str, Any], folder: Path | None) -> Cluster:
    """Build one pool: of a cluster that it names, or of the node type that it describes."""
    described, named = [field for field in _NODE_TYPE if field in entry], entry.get("cluster")
    if len(described) < len(_NODE_TYPE) if named is None else described or "name" in entry:
        rule = "must name a cluster, or describe a node type by chip, chips_per_node and tiers"
        raise bad_field(f"pools.{number}", one_line(dict(entry), 60), rule, "give one of the two")
    text = PoolText(chips=entry["chips"], name=named or entry.get("name", entry.get("chip")), speed=read_speed(entry.get("speed", 1.0)))

    def load(chips: int | None) -> Cluster:
        if named is not None:
            is_file = folder is not None and is_path(named) and chip_cluster(named) is None
            return load_cluster(folder / named if folder is not None and is_file else named, num_chips=chips)
        chip = load_chip(folder / entry["chip"] if folder is not None and is_path(entry["chip"]) else entry["chip"])
        of_file = {"source": data.get("source", "stated by its file"), "provenance": data.get("provenance", "recalled")}
        node = {**of_file, "name": text.name, "num_chips": chips, "chips_per_node": entry["chips_per_node"], "tiers": entry["tiers"]}
        return _cluster(node, chip)

    if named is not None and load(None).pools:
        raise bad_field(f"pools.{number}.cluster", named, "has several kinds of chips itself", "list its pools here")
    return make_pool(text, load)


def parse_chip(text: str, *, where: str = "chip") -> Chip:
    """Parse the text of a chip file."""
    return _chip_of(text, where, False)


@session_cache(maxsize=64)
def _chip_of(text: str, where: str, is_shipped: bool) -> Chip:
    data = parse_yaml(text, where=where)
    if is_chip_spec(data):
        from perfmodel.hardware.construct import construct_chip

        spec = chip_spec(data, where=where)
        return construct_chip(spec, technology_of(spec)).chip
    if not is_shipped:
        from perfmodel.foundation.schema import check
        from perfmodel.hardware.schemas import ChipFile

        check(ChipFile, data, where=where)
    with _located(where):
        return _chip(data)
