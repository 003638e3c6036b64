"""Schemas of chip and cluster files. A calibration file has the fields of `Calibration`."""

from typing import Annotated

from pydantic import Field

from perfmodel.foundation.dtypes import Dtype
from perfmodel.foundation.schema import OMITTED, Bandwidth, Bytes, Count, FileModel, OneOf, Text, Time, quantity
from perfmodel.hardware.chip import FACT_GROUPS, MAX_MATMUL_FRACTION, PROVENANCES
from perfmodel.hardware.fabric import Topology

_PROVENANCE = Annotated[str, OneOf(PROVENANCES)]


class TierFile(FileModel):
    """One network tier; links are one direction of one chip."""

    name: Text = Field(description="name of the tier, as tables print it")
    topology: Annotated[str, OneOf(Topology)] = Field(description="how the chips, or the domains of the tier inside, are wired")
    size: Count = Field(description="chips in one domain, inner tiers included")
    bandwidth: Bandwidth = Field(description="one direction of one chip, to all peers together")
    latency: Time = Field(description="one hop")
    provenance: _PROVENANCE = Field(description="where the numbers are from")
    source: Text = Field(description="data sheet, page or measurement, with its date")
    pair_bandwidth: Bandwidth = Field(OMITTED, description="one direction of one chip, to one peer; default: `bandwidth`")
    torus_shape: list[Count] = Field(OMITTED, min_length=1, max_length=6, description="members along each dimension of a torus")
    wrap_multiple: Count = Field(OMITTED, description="a torus dimension wraps around if its size is a multiple of this; default: never")
    oversubscription: Annotated[float, Field(ge=1, le=1000)] = Field(
        1.0, description="factor by which the shared links of a fat tree are slower than the sum of the chips' links"
    )
    peer_to_peer: bool = Field(True, description="false: a PCIe tree stages transfers through host memory")
    nics_per_node: Count = Field(
        OMITTED, description="NICs that the chips of a node share; a chip that sends alone gets the rate of a NIC; default: its share only"
    )


class MemoryFile(FileModel):
    """The memory of a chip."""

    name: Text = Field(description="kind of memory, such as hbm")
    capacity: Bytes = Field(description="as the driver reports it, all devices of the chip together")
    bandwidth: Bandwidth = Field(description="reads or writes")
    usable_capacity: Bytes = Field(OMITTED, description="what the runtime offers of the capacity; default: a share by the vendor")


class OnChipFile(FileModel):
    """Compute units and on-chip memory."""

    compute_units: Count = Field(description="number of SMs, CUs, TensorCores, ...")
    unit_kind: Text = Field(description="what a compute unit is called, such as SM")
    capacity: Bytes = Field(OMITTED, description="last-level cache or scratchpad; default: not published")


class FactFile(FileModel):
    """Where one group of numbers is from."""

    provenance: _PROVENANCE = Field(description="read in a source, recalled, mixed or measured")
    source: Text = Field(description="data sheet, page or measurement, with its date")


class ChipFile(FileModel):
    """One accelerator as its data sheet describes it."""

    name: Text = Field(description="name in tables and plan files")
    vendor: Text = Field(description="nvidia, amd, google, aws, intel or another; decides the default framework and the prior")
    launch_year: Count = Field(description="year of its announcement")
    peak_flop_rate: dict[Annotated[str, OneOf(Dtype)], Annotated[str, quantity("flop_rate")]] = Field(
        min_length=1, description="dense rate of each dtype that it multiplies in hardware, whole chip"
    )
    memory: MemoryFile = Field(description="its memory")
    on_chip: OnChipFile = Field(description="compute units and on-chip memory")
    facts: dict[Annotated[str, OneOf(FACT_GROUPS)], FactFile] = Field(description="provenance and source of each group of numbers")
    title: Text = Field(OMITTED, description="full name")
    aliases: list[Text] = Field([], max_length=16, description="other names that people type for it")
    devices_per_chip: Count = Field(1, description="devices that torch or JAX shows for one chip")
    any_operand_order: bool = Field(False, description="products in 8 bits take operands in either order, without transposed copies")
    tdp: Annotated[str, quantity("power")] = Field(OMITTED, description="power limit; default: not published")
    host_link: Bandwidth = Field("25 GB/s", description="one direction between chip and pinned memory of the host")
    matmul_fraction: Annotated[float, Field(ge=0, le=MAX_MATMUL_FRACTION)] = Field(
        OMITTED, description="share of the dense 16-bit peak that the best of many measured products reached; default: not measured"
    )
    chips_per_node: Count = Field(1, description="chips of one host")
    scale_up: list[TierFile] = Field([], max_length=8, description="usual links inside a node, innermost first")
    scale_out: TierFile = Field(OMITTED, description="usual fabric between nodes")
    notes: str = Field("", description="free text")


class ClusterFile(FileModel):
    """Chips of one type and their network tiers."""

    name: Text = Field(description="name in tables and plan files")
    chip: Text = Field(description="name of a chip, or the path of a chip file relative to this file")
    num_chips: Count = Field(description="chips of the cluster where `--chips` is not given")
    chips_per_node: Count = Field(description="chips of one host")
    tiers: list[TierFile] = Field(min_length=1, max_length=8, description="innermost first; the last covers the whole cluster")
    source: Text = Field(description="data sheet, page or measurement, with its date")
    provenance: _PROVENANCE = Field(description="where the numbers are from")
    title: Text = Field(OMITTED, description="full name")
    notes: str = Field("", description="free text")
    largest_job: Count = Field(OMITTED, description="most chips of one job; a prediction for more prints a warning; default: no limit")


class PoolFile(FileModel):
    """Chips of one type in a cluster of several: a cluster by name or file, or a node type with its chip and tiers."""

    chips: Count = Field(description="chips of the pool")
    cluster: Text = Field(OMITTED, description="name of a cluster or chip, or the path of its file relative to this file")
    name: Text = Field(OMITTED, description="name of a node type in tables; default: its chip")
    chip: Text = Field(OMITTED, description="chip of a node type: a name, or the path of a chip file relative to this file")
    chips_per_node: Count = Field(OMITTED, description="chips of one host of a node type")
    tiers: list[TierFile] = Field(
        OMITTED, min_length=1, max_length=8, description="network of a node type, innermost first; the last connects nodes"
    )
    speed: str | float = Field("100%", description="share of its chips' rates that the pool reaches")


class MixedClusterFile(FileModel):
    """Pools of chips of several types, in the order of the ranks."""

    name: Text = Field(description="name in tables and plan files")
    pools: list[PoolFile] = Field(min_length=2, max_length=64, description="pools in the order in which ranks are placed on them")
    title: Text = Field(OMITTED, description="full name")
    source: Text = Field("stated by its file", description="data sheet, page or measurement, with its date")
    provenance: _PROVENANCE = Field("recalled", description="where the numbers are from")
    notes: str = Field("", description="free text")
