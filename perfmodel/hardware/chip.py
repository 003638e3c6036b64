"""One accelerator, as specified by its data sheet."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from perfmodel.foundation.dtypes import Dtype
from perfmodel.foundation.errors import InputError, bad_field
from perfmodel.foundation.records import INLINE
from perfmodel.hardware.fabric import NetworkTier, check_tiers

PROVENANCES = ("read", "recalled", "mixed", "measured", "derived")
"""`derived`: computed from other numbers, as described in the source."""

# Groups of a chip's numbers; each has a provenance and a source (a network tier includes its own).
FACT_GROUPS = (
    "launch_year", "peak_flop_rate", "memory_capacity", "memory_usable", "memory_bandwidth", "on_chip", "node", "tdp", "host_link",
    "matmul_fraction",
)  # fmt: skip

#: Usable share of the memory capacity if the chip's file does not state it: the smallest of the vendor's shipped chips that state it.
#: Drivers, ECC and XLA reserve the rest.
USABLE_FRACTIONS: Mapping[str, float] = MappingProxyType({"nvidia": 0.97, "amd": 0.998, "google": 0.935, "intel": 0.985})
#: The same for other vendors: the smallest of all.
USABLE_FRACTION_ELSE = min(USABLE_FRACTIONS.values())

MAX_MATMUL_FRACTION = 1.5
"""Upper bound: clocks above the data sheet's reference clock cannot gain more."""

HOST_BANDWIDTH = 25e9
"""[byte/s] From a chip to its host's pinned memory if its file does not state it: PCIe 4.0 x16, 31.5 GB/s minus protocol overhead."""


@dataclass(slots=True, frozen=True, kw_only=True)
class MemoryTier:
    """One memory of a chip.

    capacity   as reported by the driver, all devices of the chip together   [byte]
    bandwidth  reads or writes                                              [byte/s]
    usable     capacity available to programs; 0 = all of it                [byte]
    """

    name: str
    capacity: float
    bandwidth: float
    usable: float = 0.0

    def __post_init__(self) -> None:
        for name in ("capacity", "bandwidth"):
            value = getattr(self, name)
            if not 1 <= value < math.inf:
                raise bad_field(f"memory.{name}", value, "must be positive, 1 byte (a second) at least", "give what the data sheet says")
        if not 0 <= self.usable <= self.capacity:
            raise bad_field(
                "memory.usable_capacity", self.usable, f"must not exceed the capacity of {self.capacity:.12g} bytes", "correct it"
            )

    @property
    def usable_capacity(self) -> float:
        is_left_out = isinstance(self.usable, (int, float)) and not self.usable  # an array of values counts as stated
        return self.capacity if is_left_out else self.usable

    @property
    def usable_fraction(self) -> float:
        return self.usable_capacity / self.capacity


@dataclass(slots=True, frozen=True, kw_only=True)
class ComputeUnits:
    """Compute units of a chip.

    compute_units     SMs, CUs, TensorCores, ... (`unit_kind`)
    devices_per_chip  devices visible to torch or JAX (MI250X: 2)
    any_operand_order products in 8 bits take operands in either order; else both must be contiguous along the contracted dim
    """

    compute_units: int
    unit_kind: str
    devices_per_chip: int = 1
    any_operand_order: bool = False

    def __post_init__(self) -> None:
        for name in ("compute_units", "devices_per_chip"):
            if getattr(self, name) < 1:
                raise bad_field(name, getattr(self, name), "must be at least 1", "correct it")


@dataclass(slots=True, frozen=True, kw_only=True)
class UsualNode:
    """Usual node of a chip and its network, for `cluster_of`.

    chips_per_node   chips of one host
    default_tiers    network tiers, innermost first
    """

    chips_per_node: int = 1
    default_tiers: tuple[NetworkTier, ...] = ()

    def __post_init__(self) -> None:
        if self.chips_per_node < 1:
            raise bad_field("chips_per_node", self.chips_per_node, "must be at least 1", "correct it")
        if self.default_tiers:
            check_tiers(self.default_tiers, chips_per_node=self.chips_per_node)


@dataclass(slots=True, frozen=True, kw_only=True)
class Chip:
    """One accelerator (a package that is sold as one; it may appear as several devices).

    peak_flop_rate    dense rate of each dtype that it multiplies in hardware, all devices  [FLOP/s]
    on_chip_bytes     last-level cache or scratchpad; 0 = not published                     [byte]
    tdp_watts         0 = not published                                                     [W]
    matmul_fraction   fraction of the dense 16-bit peak of the best of many measured products; 0: not measured  [-]
    host_bandwidth    bandwidth of the link to the host's memory, one direction             [byte/s]
    price_per_hour    indicative, from the dated price table; 0 = unknown                   [USD/h]
    provenance        group of numbers -> read | recalled | mixed | measured
    aliases           common names in addition to its name and prefixes of it
    """

    name: str
    vendor: str
    launch_year: int
    peak_flop_rate: Mapping[Dtype, float]
    memory: MemoryTier
    on_chip_bytes: float
    units: ComputeUnits = field(metadata=INLINE)
    tdp_watts: float = 0.0
    host_bandwidth: float = HOST_BANDWIDTH
    matmul_fraction: float = 0.0
    price_per_hour: float = 0.0
    provenance: Mapping[str, str] = field(default_factory=dict)
    source: str = ""
    notes: str = ""
    title: str = ""
    node: UsualNode = field(default_factory=UsualNode, metadata=INLINE)
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.peak_flop_rate:
            raise InputError("peak_flop_rate: empty; give the dense rate of at least one dtype")
        for dtype, rate in self.peak_flop_rate.items():
            if not 1 <= rate < math.inf:
                raise bad_field(
                    f"peak_flop_rate.{dtype}",
                    rate,
                    "must be positive, 1 FLOP/s at least",
                    "leave out a dtype that the chip does not multiply",
                )
        if not 0 <= self.matmul_fraction <= MAX_MATMUL_FRACTION:
            rule = f"must be a share of the peak, {MAX_MATMUL_FRACTION:g} at most"
            raise bad_field("matmul_fraction", self.matmul_fraction, rule, "leave it out where it is unknown")
        if not 1 <= self.host_bandwidth < math.inf:
            raise bad_field(
                "host_link", self.host_bandwidth, "must be positive, 1 byte a second at least", "leave it out where it is unknown"
            )
        for name in ("on_chip_bytes", "tdp_watts", "price_per_hour"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise bad_field(name, getattr(self, name), "must not be negative", "leave it out where it is unknown")
        if not 1990 <= self.launch_year <= 2100:
            raise bad_field("launch_year", self.launch_year, "must be a year between 1990 and 2100", "correct it")
        for group, provenance in self.provenance.items():
            if provenance not in PROVENANCES:
                raise bad_field(f"provenance.{group}", provenance, "unknown provenance", f"use one of {', '.join(PROVENANCES)}")

    def __hash__(self) -> int:
        return hash(self.name)

    def flop_rate(self, dtype: Dtype | str) -> float:
        """Return the dense peak of one dtype [FLOP/s]. An unsupported dtype is an error, never another dtype's rate."""
        rate = {str(name): value for name, value in self.peak_flop_rate.items()}.get(str(dtype))
        if rate is None:
            known = ", ".join(self.peak_flop_rate)
            raise bad_field("dtype", dtype, f"chip {self.name} has no {dtype} units", f"it has {known}")
        return 1.0 * rate  # a float, or an array of floats
