"""Construction of a chip from technology and budgets: the number of units that area and power allow, and the resulting data sheet."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from perfmodel.foundation.dtypes import Dtype
from perfmodel.foundation.errors import bad_field, suggest
from perfmodel.hardware.chip import FACT_GROUPS, USABLE_FRACTION_ELSE, USABLE_FRACTIONS, Chip, ComputeUnits, MemoryTier, UsualNode
from perfmodel.hardware.cluster import MAX_SCALE_OUT_CHIPS
from perfmodel.hardware.fabric import Link, NetworkTier, Topology
from perfmodel.hardware.technology import ChipSpec, Floorplan, LinkGeneration, LinkSpec, LogicNode, MemoryGeneration, Technology

_BITS = 8
_HOST_FRACTION = 0.875
"""Share of a link's rate reached by copies from pinned memory: 55 of 63 GB/s over PCIe 5.0 (hardware_specs/chips)."""

Entry = TypeVar("Entry")


@dataclass(frozen=True, slots=True, kw_only=True)
class Construction:
    """A chip constructed from a specification, and its limits.

    binding         area or power, whichever allows fewer units; `die edge` if memory stacks were left out for lack of die edge
    units_by_area, units_by_power   units that each budget alone allows
    stacks          memory stacks that fit the die edge; at most `ChipSpec.memory.stacks`
    stacks_by_edge  memory stacks that fit the die edge, without that limit
    areas           area of the dies by part; sums to the die area            [m2]
    powers          power by part; sums to the power                          [W]
    """

    chip: Chip
    spec: ChipSpec
    binding: str
    units_by_area: float
    units_by_power: float
    stacks: int
    stacks_by_edge: float
    areas: Mapping[str, float]
    powers: Mapping[str, float]


def construct_chip(spec: ChipSpec, technology: Technology) -> Construction:
    """Construct the chip of a specification.

    units = floor(min(A_units / a, P_units / p))                  rate(dtype) = units x FLOP a cycle(dtype) x clock
    a   = T x overhead / (d x density) + bits x cell              area of a unit; T: transistors of its multiply-adds and control
    p   = e x power factor(node) x F x clock x (F0 / F)^reuse     power of a unit; F: FLOP in 16 bits a cycle
    A_units = dies x die x (1 - other) - cache - interfaces - controllers
    P_units = power - 8 x bandwidth x energy of a bit, of memory, and of links in both directions

    The clock is given by the specification: a logic node changes the number of units. `die_area` is per die, all else per chip.
    Source: DeepFlow (nanocad-lab/DeepFlow) for the budgets, LLMCompass for transistors and interfaces; the numbers are in
    `hardware_specs/technology`. Raises InputError if a budget does not allow one unit.
    """
    node = _named(technology.logic, spec.logic, "logic")
    memory = _named(technology.memory, spec.memory.generation, "memory.generation")
    plan = _named(technology.floorplans, spec.floorplan, "floorplan")
    link_specs = {"scale_up": spec.scale_up, "scale_out": spec.scale_out, "host": spec.host}
    links = [(link_spec, _named(technology.links, link_spec.link, f"{name}.link")) for name, link_spec in link_specs.items()]
    factor = _named(node.power_factor, spec.law, "law")
    # Square dies in a row: each joint removes one edge of both dies from the outer edge. [m]
    edge_length = (4 * spec.num_dies - 2 * (spec.num_dies - 1)) * math.sqrt(spec.die_area)
    stacks_by_edge = edge_length * plan.edge_fraction / memory.edge_length
    stacks = min(spec.memory.stacks, int(stacks_by_edge + 1e-9))
    if stacks < 1:
        rule = f"leaves no edge for a stack of {spec.memory.generation} ({memory.edge_length * 1e3:.3g} mm)"
        raise bad_field("die_area", f"{spec.die_area * 1e6:.4g} mm2", rule, "give a larger die")
    bandwidth = stacks * memory.pins * (spec.memory.pin_bandwidth or memory.pin_bandwidth)
    areas = _areas(spec, node, memory, plan, links, stacks)
    powers = {
        "memory": _BITS * bandwidth * memory.bit_energy,
        "links": sum(2 * _BITS * link_spec.links * link.bandwidth * link.bit_energy for link_spec, link in links),
    }
    wide = _wide_flops(spec)
    unit_power = plan.flop_energy * factor * wide * spec.unit.clock * (plan.reference_flops / wide) ** plan.reuse_exponent
    by_area = (spec.num_dies * spec.die_area - sum(areas.values())) / _unit_area(spec, node, plan)
    by_power = (spec.power - sum(powers.values())) / unit_power
    for name, budget, allowed in (("die_area", f"{spec.die_area * 1e6:.4g} mm2", by_area), ("power", f"{spec.power:.4g} W", by_power)):
        if allowed < 1:
            taken = ", ".join(areas if name == "die_area" else powers)
            raise bad_field(name, budget, f"leaves no room for a unit next to {taken}", "raise it, or ask for less of these")
    units = int(min(by_area, by_power))
    binding = "die edge" if stacks < spec.memory.stacks else "area" if by_area < by_power else "power"
    return Construction(
        chip=_chip(spec, units, stacks, memory, bandwidth, links),
        spec=spec,
        binding=binding,
        units_by_area=by_area,
        units_by_power=by_power,
        stacks=stacks,
        stacks_by_edge=stacks_by_edge,
        areas=_with_units(areas, units * _unit_area(spec, node, plan), spec.num_dies * spec.die_area),
        powers=_with_units(powers, units * unit_power, spec.power),
    )


def _with_units(parts: Mapping[str, float], units: float, budget: float) -> dict[str, float]:
    """Return the parts with the units and the unused rest of the budget."""
    return {"units": units, **parts, "unused": budget - units - sum(parts.values())}


def _named(entries: Mapping[str, Entry], name: str, field: str) -> Entry:
    if name not in entries:
        raise bad_field(field, name, "there is no data", f"{suggest(name, entries)[2:]} (a technology file adds others)")
    return entries[name]


def _wide_flops(spec: ChipSpec) -> float:
    """Return the FLOP per cycle of a unit in 16 bits, or in the widest format that it multiplies."""
    flops = spec.unit.flops_per_cycle
    return flops.get(Dtype.FP16) or flops.get(Dtype.BF16) or max(flops.values())


def _unit_area(spec: ChipSpec, node: LogicNode, plan: Floorplan) -> float:
    flops = spec.unit.flops_per_cycle
    arithmetic = flops.get(Dtype.FP64, 0.0) * plan.fp64_transistors + flops.get(Dtype.FP32, 0.0) * plan.fp32_transistors
    transistors = (arithmetic + _wide_flops(spec) * plan.fp16_transistors) / 2 + plan.control_transistors
    logic = transistors * plan.unit_overhead / (plan.density_fraction * node.logic_density)
    return logic + _BITS * spec.unit.on_unit_capacity * node.sram_area * plan.cell_overhead


def _areas(
    spec: ChipSpec,
    node: LogicNode,
    memory: MemoryGeneration,
    plan: Floorplan,
    links: list[tuple[LinkSpec, LinkGeneration]],
    stacks: int,
) -> dict[str, float]:
    """Return the area other than units, by part. [m2]"""
    controllers = stacks * memory.controller_transistors + sum(link_spec.links * link.controller_transistors for link_spec, link in links)
    return {
        "cache": _BITS * spec.cache_capacity * node.sram_area * plan.cell_overhead,
        "interfaces": stacks * memory.phy_area + sum(link_spec.links * link.phy_area for link_spec, link in links),
        "controllers": controllers / (plan.density_fraction * node.logic_density),
        "other": plan.other_fraction * spec.num_dies * spec.die_area,
    }


def _chip(
    spec: ChipSpec,
    units: int,
    stacks: int,
    memory: MemoryGeneration,
    bandwidth: float,
    links: list[tuple[LinkSpec, LinkGeneration]],
) -> Chip:
    capacity = stacks * (spec.memory.stack_capacity or memory.stack_capacity) - spec.memory.reserved_capacity
    up, out, host = (link for _, link in links)
    domain = spec.scale_up.size or spec.chips_per_node
    tiers = (
        _tier("scale_up", spec.scale_up, up, domain, spec.scale_up.topology),
        _tier("fabric", spec.scale_out, out, spec.scale_out.size or -(-MAX_SCALE_OUT_CHIPS // domain) * domain, Topology.FAT_TREE),
    )
    return Chip(
        name=spec.name,
        vendor=spec.vendor,
        launch_year=spec.launch_year,
        peak_flop_rate={dtype: units * flops * spec.unit.clock for dtype, flops in spec.unit.flops_per_cycle.items()},
        memory=MemoryTier(
            name=spec.memory.generation,
            capacity=capacity,
            bandwidth=bandwidth,
            usable=capacity * USABLE_FRACTIONS.get(spec.vendor, USABLE_FRACTION_ELSE),
        ),
        on_chip_bytes=spec.cache_capacity,
        units=ComputeUnits(compute_units=units, unit_kind=spec.unit.unit_kind),
        tdp_watts=spec.power,
        host_bandwidth=host.bandwidth * spec.host.links * _HOST_FRACTION,
        provenance=dict.fromkeys((*FACT_GROUPS[:-1], "scale_up", "scale_out"), "derived"),
        source=f"made from technology ({spec.logic}, law {spec.law}, {spec.memory.generation}): {spec.source or spec.name}",
        node=UsualNode(chips_per_node=spec.chips_per_node, default_tiers=tiers if spec.scale_up.size != 1 else tiers[1:]),
    )


def _tier(name: str, spec: LinkSpec, link: LinkGeneration, size: int, topology: Topology) -> NetworkTier:
    rates = Link(
        bandwidth=spec.links * link.bandwidth,
        pair_bandwidth=(spec.pair_links or spec.links) * link.bandwidth,
        latency=link.latency,
    )
    source = f"{spec.links:g} links of {spec.link}"
    return NetworkTier(name=name, topology=topology, size=size, link=rates, provenance="derived", source=source)
