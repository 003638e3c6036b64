"""Text of a cluster that is named after its chip, as used in flags, plan files and `load_cluster`.

h20-96gb                                                          default node and links of the chip's file
h20-96gb per-node=8 scale-up=450 GB/s scale-out=400 Gbit/s        as given; rates are one direction of one chip
t4-16gb per-node=4 scale-out=12.5 Gbit/s nics=1                    the four chips of a node share a NIC of 50 Gbit/s
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from perfmodel.foundation.errors import InputError, bad_field, plain_text, shown
from perfmodel.foundation.units import exact_quantity, parse_quantity
from perfmodel.foundation.values import is_path
from perfmodel.hardware.mixed import is_mixed, read_pools

_STATED = re.compile(r"(?P<chip>\S.*?)(?P<stated>(?: +(?:per-node|scale-up|scale-out|nics)=[^=]*?)+) *")
_FIELD = re.compile(r" +(per-node|scale-up|scale-out|nics)=")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipCluster:
    """A chip with its node and links as given by the user; None: as in the chip's file.

    chip        a name, or the path of a chip file
    per_node    chips per host
    scale_up    one direction of one chip inside a node                [byte/s]
    scale_out   one direction of one chip between nodes                [byte/s]
    nics        NICs that the chips of a node share
    """

    chip: str
    per_node: int | None = None
    scale_up: float | None = None
    scale_out: float | None = None
    nics: int | None = None

    @property
    def text(self) -> str:
        """Text of this cluster in plan files; `chip_cluster` parses it."""
        stated = [self.chip]
        if self.per_node is not None:
            stated.append(f"per-node={self.per_node}")
        for field, rate in (("scale-up", self.scale_up), ("scale-out", self.scale_out)):
            if rate is not None:
                stated.append(f"{field}={exact_quantity(rate, 'bandwidth')}")
        if self.nics is not None:
            stated.append(f"nics={self.nics}")
        return " ".join(stated)


def state_chip_cluster(
    chip: str | Path,
    *,
    per_node: int | str | None = None,
    scale_up: str | float | None = None,
    scale_out: str | float | None = None,
    nics: int | str | None = None,
) -> ChipCluster:
    """Return the cluster from user input: a chip, and rates with units (a bare number is byte/s, in Python only)."""
    name = plain_text(chip).strip()
    if not name:
        raise InputError("chip: is missing; give a name from `perfmodel chips` or the path of a chip file")
    if isinstance(chip, Path) or is_path(name):
        with suppress(OSError, ValueError, RuntimeError):
            name = str(Path(name).resolve())
    return ChipCluster(
        chip=name,
        per_node=None if per_node is None else _count(per_node, "per_node", "how many chips one host has, such as 8"),
        scale_up=_rate(scale_up, "scale_up"),
        scale_out=_rate(scale_out, "scale_out"),
        nics=None if nics is None else _count(nics, "nics", "how many NICs the chips of one host share, such as 1"),
    )


def chip_cluster(text: str) -> ChipCluster | None:
    """Parse the text of `ChipCluster.text`; None for pools and for a text without options, which may still be a chip's name."""
    if is_mixed(text):
        return None
    match = _STATED.fullmatch(text.strip())
    if match is None:
        return None
    _, *parts = _FIELD.split(match["stated"])
    stated = dict(zip(parts[::2], parts[1::2], strict=True))
    if len(stated) < len(parts) // 2:
        raise bad_field("cluster", text, "states the same thing twice", "keep one of the two")
    return state_chip_cluster(
        match["chip"],
        per_node=stated.get("per-node"),
        scale_up=stated.get("scale-up"),
        scale_out=stated.get("scale-out"),
        nics=stated.get("nics"),
    )


def _rate(value: str | float | None, field: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        rate: float = value
    else:
        rate = parse_quantity(value, "bandwidth", field=field)
    if not 0 < rate < 1e18:
        raise bad_field(field, shown(value), "must be positive and below 1e18 B/s", "give one direction of one chip, such as '450 GB/s'")
    return float(rate)


def _count(value: int | str, field: str, remedy: str) -> int:
    text = str(value).strip()
    if isinstance(value, bool) or not (text.isascii() and text.isdecimal()) or not 1 <= len(text) <= 6 or int(text) < 1:
        raise bad_field(field, value, "must be a whole number from 1 to 999999", f"write {remedy}")
    return int(text)


def short_name(reference: str) -> str:
    """Return the name of a cluster in tables: the file name for a path, anything else unchanged."""
    if is_mixed(reference):
        return "+".join(f"{pool.chips}@{short_name(pool.name)}{pool.speed_text}" for pool in read_pools(reference))
    stated = chip_cluster(reference)
    if stated is not None:
        return replace(stated, chip=short_name(stated.chip)).text
    return Path(reference).name if "/" in reference else reference


def chips_text(count: int) -> str:
    """Return the number of chips as text."""
    return "1 chip" if count == 1 else f"{count:,} chips"
