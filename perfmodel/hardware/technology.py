"""Technology files and chip specifications: generations of logic, memory and links, and the area and power of a unit.

Shipped: `hardware_specs/technology/*.yaml`, read as one `Technology`, and `hardware_specs/chip_specs/*.yaml`. The records are the schemas
of the files. `hardware/construct.py` constructs the chip of a specification.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path

from perfmodel.foundation.dtypes import Dtype
from perfmodel.foundation.errors import InputError, bad_field, suggest
from perfmodel.foundation.files import read_yaml
from perfmodel.foundation.records import record_from_data
from perfmodel.foundation.resources import resource_dir
from perfmodel.foundation.values import is_path
from perfmodel.hardware.chip import PROVENANCES
from perfmodel.hardware.fabric import Topology

DEFAULT_LAW = "kundu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """Provenance and source of one number.

    provenance   read, recalled, mixed, measured or derived
    source       data sheet, page or derivation
    """

    provenance: str
    source: str

    def __post_init__(self) -> None:
        if self.provenance not in PROVENANCES:
            raise bad_field("provenance", self.provenance, "unknown provenance", f"use one of {', '.join(PROVENANCES)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogicNode:
    """A generation of logic.

    launch_year    year of its first products
    logic_density  transistors per area of published designs
    sram_area      area of one bit cell
    power_factor   power of one operation at equal speed, N7 = 1, by scaling law
    facts          provenance and source of each number
    """

    launch_year: int
    logic_density: float
    sram_area: float
    power_factor: Mapping[str, float]
    facts: Mapping[str, Fact]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryGeneration:
    """A generation of memory.

    pins                    data pins of a stack (GDDR: of a device)
    pin_bandwidth           bandwidth of one pin, fastest bin
    stack_capacity          capacity of a stack
    bit_energy              energy of one bit read or written, on both sides
    edge_length             die edge occupied by a stack
    phy_area                area of the interface to one stack; does not shrink with the node
    controller_transistors  transistors of the controller of one stack
    facts                   provenance and source of each number
    """

    pins: int
    pin_bandwidth: float
    stack_capacity: float
    bit_energy: float
    edge_length: float
    phy_area: float
    controller_transistors: float
    facts: Mapping[str, Fact]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkGeneration:
    """A generation of links.

    bandwidth               one direction of one link
    latency                 one hop
    phy_area                area of one link on the chip
    controller_transistors  transistors of the controller of one link
    bit_energy              energy of one bit, on the chip
    facts                   provenance and source of each number
    """

    bandwidth: float
    latency: float
    phy_area: float
    controller_transistors: float
    bit_energy: float
    facts: Mapping[str, Fact]


@dataclass(frozen=True, slots=True, kw_only=True)
class Floorplan:
    """Area and power of a unit, and the rest of a die.

    density_fraction     density of a full chip over that of the node's logic
    fp64_transistors     transistors of a multiply-add in 64 bits
    fp32_transistors     transistors of a multiply-add in 32 bits
    fp16_transistors     transistors of a multiply-add in 16 bits
    control_transistors  transistors of the instruction control of a unit
    unit_overhead        transistors of a unit over those of its arithmetic and control
    cell_overhead        area of memory over that of its bit cells
    other_fraction       share of the die that is neither units, caches, controllers nor interfaces
    edge_fraction        share of the perimeter available for memory
    flop_energy          energy of a FLOP in 16 bits at N7 in a unit of `reference_flops`
    reference_flops      FLOP in 16 bits per cycle of a unit
    reuse_exponent       energy of a FLOP decreases with this power of the unit's FLOP per cycle
    facts                provenance and source of each number
    """

    density_fraction: float
    fp64_transistors: float
    fp32_transistors: float
    fp16_transistors: float
    control_transistors: float
    unit_overhead: float
    cell_overhead: float
    other_fraction: float
    edge_fraction: float
    flop_energy: float
    reference_flops: float
    reuse_exponent: float
    facts: Mapping[str, Fact]


@dataclass(frozen=True, slots=True, kw_only=True)
class Technology:
    """Generations by name.

    logic       generations of logic
    memory      generations of memory
    links       generations of links
    floorplans  area and power of units and interfaces, by family of chips
    """

    logic: Mapping[str, LogicNode] = field(default_factory=dict)
    memory: Mapping[str, MemoryGeneration] = field(default_factory=dict)
    links: Mapping[str, LinkGeneration] = field(default_factory=dict)
    floorplans: Mapping[str, Floorplan] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSpec:
    """Architecture of one compute unit.

    clock             rated clock
    flops_per_cycle   dense FLOP of one unit in a cycle, by dtype
    on_unit_capacity  registers, L1 and shared memory of a unit
    unit_kind         name of a unit, such as SM
    """

    clock: float
    flops_per_cycle: Mapping[Dtype, float]
    on_unit_capacity: float
    unit_kind: str = "unit"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySpec:
    """Memory of the chip.

    generation         name of a generation of memory
    stacks             number of stacks; those that do not fit the die edge are left out
    stack_capacity     capacity of a stack; 0 = the generation's
    pin_bandwidth      bandwidth of a pin; 0 = the generation's fastest
    reserved_capacity  capacity that the driver does not report
    """

    generation: str
    stacks: int
    stack_capacity: float = 0.0
    pin_bandwidth: float = 0.0
    reserved_capacity: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpec:
    """Links of the chip to its peers.

    link        name of a generation of links
    links       number of links; 0.5: two chips share one
    size        chips of one domain; 0 = no domain
    topology    wiring of the chips
    pair_links  links to one peer; 0 = all
    """

    link: str
    links: float = 1.0
    size: int = 0
    topology: Topology = Topology.SWITCH
    pair_links: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipSpec:
    """A chip specified by technology and budgets.

    name            of the chip
    vendor          decides the default framework and the prior, as in a chip file
    launch_year     of the chip
    logic           name of a generation of logic
    die_area        of one die
    power           of the chip, memory included
    unit            architecture of a compute unit
    cache_capacity  last-level cache
    memory          generation and stacks
    scale_up        links inside a node
    scale_out       links between nodes, of network cards
    host            link to the host
    chips_per_node  chips per host
    num_dies        dies of the package
    law             scaling law of power: kundu, foundry or deepflow
    floorplan       name of a floorplan
    technology      path of a technology file whose generations are added to the shipped ones
    source          source of the specification
    """

    name: str
    vendor: str
    launch_year: int
    logic: str
    die_area: float
    power: float
    unit: UnitSpec
    cache_capacity: float
    memory: MemorySpec
    scale_up: LinkSpec
    scale_out: LinkSpec
    host: LinkSpec
    chips_per_node: int = 8
    num_dies: int = 1
    law: str = DEFAULT_LAW
    floorplan: str = "gpu"
    technology: str = ""
    source: str = ""


@cache
def shipped_technology() -> Technology:
    """Load the generations of `hardware_specs/technology/`."""
    parts: dict[str, dict[str, object]] = {}
    for path in sorted((resource_dir("hardware_specs") / "technology").glob("*.yaml")):
        for section, entries in read_yaml(path).items():
            parts.setdefault(section, {}).update(entries)
    return record_from_data(Technology, parts, where="technology")


def technology_of(spec: ChipSpec) -> Technology:
    """Return the shipped generations, with those of the specification's own file in place of equal names. Raise InputError."""
    shipped = shipped_technology()
    if not spec.technology:
        return shipped
    from perfmodel.foundation.schema import checked_record

    more = checked_record(Technology, read_yaml(spec.technology), where=spec.technology)
    return Technology(**{section.name: {**getattr(shipped, section.name), **getattr(more, section.name)} for section in fields(Technology)})


def list_chip_specs() -> tuple[str, ...]:
    """Return the names of the shipped chip specifications."""
    return tuple(sorted(path.stem for path in (resource_dir("hardware_specs") / "chip_specs").glob("*.yaml")))


def load_chip_spec(name_or_path: str | Path) -> ChipSpec:
    """Load a shipped specification by its name, or any by the path of its file. Raise InputError if there is none."""
    text = str(name_or_path)
    if text in list_chip_specs():
        return chip_spec(read_yaml(resource_dir("hardware_specs") / "chip_specs" / f"{text}.yaml"), where=text)
    if not isinstance(name_or_path, Path) and not is_path(text):
        raise InputError(f"spec={text}: unknown specification{suggest(text, list_chip_specs())} (a path works too)")
    return chip_spec(read_yaml(name_or_path), where=text)


def is_chip_spec(data: Mapping[str, object]) -> bool:
    """Return whether the mapping of a file is a specification, not a chip."""
    return "logic" in data and "peak_flop_rate" not in data


def chip_spec(data: Mapping[str, object], *, where: str) -> ChipSpec:
    """Return the specification in the mapping of a file, with the path of its technology file, which is relative to that file."""
    from perfmodel.foundation.schema import checked_record

    spec = checked_record(ChipSpec, data, where=where)
    return replace(spec, technology=str(Path(where).parent / spec.technology)) if spec.technology else spec
