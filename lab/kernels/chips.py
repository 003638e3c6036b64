"""The tables of each chip, and the numbers that they do not determine: `lab/kernels/chips.yaml`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from perfmodel.foundation.files import read_yaml
from perfmodel.hardware.calibration import GPU_TILES
from perfmodel.hardware.cluster import Cluster
from perfmodel.hardware.reader import load_cluster

Tiles = tuple[tuple[float, float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipTables:
    """Paths and versions of a chip's tables, and the numbers that they do not determine.

    tuned               format of products -> the table of another engine; `gemm` ran one kernel without the autotuning of engines
    sends               folder of vidur's sends in a node, and their cluster
    backward_rates      SimuMax's system with the backward rate of attention
    under_load          SimuMax's system with products under load; "": none
    large_all_reduces   chip of published all-reduces that fix the asymptote; "": none
    reduces_in_switch   NVLink SHARP, from the H100 on
    decodes_latent      the table of latent decoding is of a kernel that engines run; that of the A100 reaches a quarter of the memory
                        bandwidth, with 47 % error of any model
    clock_source        sentences
    """

    chip: str
    cluster: str
    folder: str
    gemm: str = "trtllm/1.3.0rc20"
    attention: str = "trtllm/1.3.0rc20"
    latent: str = "trtllm/1.3.0rc20"
    nccl: str = "2.29.2"
    tuned: Mapping[str, str] = field(default_factory=dict)
    sends: Mapping[str, str] = field(default_factory=lambda: {"folder": "h100_dgx", "cluster": "dgx-h100"})
    backward_rates: str = "b200_bf16_ceperm"
    under_load: str = ""
    large_all_reduces: str = ""
    is_measured_between_nodes: bool = False
    relatives: Sequence[str]
    extra_tiles: Sequence[Sequence[float]] = ()
    reduces_in_switch: bool = True
    decodes_latent: bool = True
    sustained_clock_fraction: float
    attention_clock_fraction: float
    clock_fractions: Mapping[str, float] = field(default_factory=lambda: {"fp8": 1.0})
    attention_generations: Mapping[str, float]
    long_attention: Mapping[str, tuple[float, float]]
    clock_source: Sequence[str]

    @property
    def tiles(self) -> Tiles:
        return (*GPU_TILES, *((rows, columns, penalty) for rows, columns, penalty in self.extra_tiles))

    def cluster_of_fits(self) -> Cluster:
        """Return two nodes; the fitted figures are fractions of their rates."""
        return load_cluster(self.cluster, num_chips=16)


TABLES: Mapping[str, ChipTables] = MappingProxyType(
    {name: ChipTables(**entry) for name, entry in read_yaml(Path(__file__).with_suffix(".yaml"))["chips"].items()}
)
