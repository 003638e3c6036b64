"""Fit the calibrations of A100, H100, H200 and B200 to published kernel tables, and to nothing else.

    python -m lab.kernels.fit --data DIR --chip a100 [--chip h100 ...] --out hardware_specs/calibrations [--part serving]

DIR holds the tables as aiconfigurator, LLMCompass, SimuMax, SimAI and vidur publish them (`lab.kernels.tables`). No run of
a whole model enters, but for what no table of short bursts can give: sustained clocks and older generations of attention, below, with
their source; `python -m lab.kernels.clocks` says what published runs make of them, and of which they tell nothing.
"""

import datetime
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from lab.command import command_parser, exits_on_errors
from lab.kernels.decode import decode_errors, fit_decode, read_decode, serving_decode
from lab.kernels.grouped import fit_grouped, grouped_errors, tuned_grouped
from lab.kernels.held_out import DECODE_ROWS, attention_errors, collective_errors, matmul_errors, sample, size_decades
from lab.kernels.serving import fit_serving
from lab.kernels.tables import (
    AICONFIGURATOR_KINDS,
    LATENT_WIDTH,
    published_all_to_all,
    read_attention,
    read_collectives,
    read_latent_attention,
    read_llmcompass,
    read_many_nodes_all_reduce,
    read_matmuls,
    read_published_all_reduce,
    read_simai,
    read_simumax,
    read_vidur_sends,
    simumax_backward_rate,
    simumax_matmuls,
)
from perfmodel.calibrate.fits import (
    Array,
    AttentionTable,
    CollectiveTable,
    Indices,
    MatmulTable,
    Tiles,
    bare_machine,
    fit_attention,
    fit_collective,
    fit_linear,
    fit_logarithm,
    fit_matmul,
    held_out_errors,
    predict_matmul,
    relative_errors,
    rounded,
)
from perfmodel.cost.collectives import collective_time
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.dtypes import Dtype
from perfmodel.hardware.calibration import (
    GPU_TILES,
    LATENT_KERNEL,
    SCALE_OUT,
    SCALE_UP,
    AttentionModel,
    Calibration,
    CollectiveModel,
    DecodeAttentionModel,
    GroupedMatmulModel,
    KernelClass,
    LongAttention,
    MatmulModel,
    StreamingModel,
)
from perfmodel.hardware.cluster import Cluster
from perfmodel.hardware.fabric import Link
from perfmodel.hardware.reader import load_calibration, load_cluster
from perfmodel.hardware.writer import save_calibration

CONTEXT_BYTES = 500e6
"""[byte] What the driver's context and libraries take of a GPU's memory: 551 MB of a process that only computes (aiconfigurator, system
files), .4-.5 GB commonly quoted. The framework's allocator does not count them."""

CHANNEL_BYTES = 22e6
"""[byte] Buffers of one channel of a communicator: 392 MiB on 4 and 8 H100 (aiconfigurator, `nccl_mem`) and 688 MiB on 4 A100
(NVIDIA/nccl issue 964) have 24 channels each; the geometric mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipTables:
    """Where a chip's tables are, and the one number that they cannot give.

    tuned   of products in these formats the table of another engine: `gemm` ran one kernel without trying others, as engines do at start
    """

    chip: str
    cluster: str
    folder: str
    gemm: str
    attention: str
    latent: str
    nccl: str
    sends: str
    relatives: tuple[str, ...]
    sustained_clock_fraction: float
    attention_clock_fraction: float
    attention_generations: Mapping[str, float]
    clock_source: str
    long_attention: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    tiles: Tiles = GPU_TILES
    tuned: Mapping[str, str] = field(default_factory=dict)

    def cluster_of_fits(self) -> Cluster:
        """Two nodes of it, of whose rates the figures are fractions."""
        return load_cluster(self.cluster, num_chips=16)


NARROW_TILE = (64.0, 32.0, 6.0)
"""Ampere's libraries choose it for small products (its table is 1 % nearer with it); on Hopper and Blackwell it makes the fit no better."""

_HOPPER_CLOCK = (
    "Clock .83: with it, matrix multiplies of eager torch (Composer, torchtitan, nanotron) reach the same share of the calibrated rate on "
    "H100 as on A100 (.86), and NVIDIA's recipes all of it (2 % off in bf16). Attention .72: in those recipes in fp8 it takes 1.4 to 1.6 "
    "times as long as in a burst. FlashAttention-2 reaches .8 of FlashAttention-3 under that clock (runs of torchtitan and nanotron; .6 in "
    "a burst, Shah et al. 2024), FlashAttention-1 .5 (MPT)"
)
CLOCK_FRACTIONS = {Dtype.FP8: 1.0}
"""Of products in 8 bits on Hopper and Blackwell: with the casts between them counted, NVIDIA's recipes and torchtitan's runs in fp8 take
what a burst's clock gives."""

_HOPPER_GENERATIONS = {"flash1": 0.5, "flash2": 0.8}

LONG_CLOCK = 0.95
"""Of a burst's clock, in calls of attention that take seconds: that of the A100, whose matrix multiplies are bound by power as little."""

#: [TFLOP/s] forward and backward, heads of 128, 16k tokens, every key seen: Shah et al. 2024 (FlashAttention-3), figures 5 and 6.
_HOPPER_LONG = {"flash2": (370.0, 322.0), "flash3": (648.0, 561.0), "cudnn": (595.0, 516.0)}
#: Dao 2023 (FlashAttention-2): up to 73 % of the peak forward and 63 % backward.
_AMPERE_LONG = {"flash2": (228.0, 196.0)}
#: FlashAttention-2 has no kernels for Blackwell: its warp-level products are those of Hopper, on 148 compute units in the place of 132.
_BLACKWELL_LONG = {"flash2": (415.0, 361.0)}
TABLES = {
    "a100": ChipTables(
        chip="a100-sxm-80gb",
        cluster="dgx-a100",
        folder="a100_sxm",
        gemm="trtllm/1.0.0",
        attention="vllm/0.14.0",
        latent="trtllm/1.0.0",
        nccl="2.27.3",
        sends="a100_dgx",
        relatives=("a100-sxm-40gb", "a100-pcie-80gb", "a100-pcie-40gb", "a10g-24gb", "rtx3090-24gb",
                   "v100-sxm2-16gb", "v100-sxm2-32gb", "v100-sxm3-32gb", "v100-sxm3-32gb-450w"),
        sustained_clock_fraction=0.95,
        attention_clock_fraction=0.95,
        attention_generations={"flash1": 0.69},
        long_attention=_AMPERE_LONG,
        clock_source="Clock .95: the power limit of 400 W costs a long run of matrix multiplies 3-8 % against a burst on a cool chip. "
        "FlashAttention-1 .69 of FlashAttention-2 (MPT)",
        tiles=(*GPU_TILES, NARROW_TILE),
    ),
    "h100": ChipTables(
        chip="h100-sxm-80gb",
        cluster="dgx-h100",
        folder="h100_sxm",
        gemm="trtllm/1.3.0rc20",
        attention="trtllm/1.3.0rc20",
        latent="trtllm/1.3.0rc20",
        nccl="2.29.2",
        sends="h100_dgx",
        relatives=("h100-sxm-96gb-hbm2e", "h100-pcie-80gb", "h100-nvl-94gb", "gh200-96gb"),
        sustained_clock_fraction=0.83,
        attention_clock_fraction=0.72,
        attention_generations=_HOPPER_GENERATIONS,
        long_attention=_HOPPER_LONG,
        clock_source=_HOPPER_CLOCK,
    ),
    "h200": ChipTables(
        chip="h200-sxm-141gb",
        cluster="hgx-h200",
        folder="h200_sxm",
        gemm="trtllm/1.3.0rc20",
        attention="trtllm/1.3.0rc20",
        latent="trtllm/1.3.0rc20",
        nccl="2.29.2",
        sends="h100_dgx",
        relatives=(),
        sustained_clock_fraction=0.83,
        attention_clock_fraction=0.72,
        attention_generations=_HOPPER_GENERATIONS,
        long_attention=_HOPPER_LONG,
        clock_source=_HOPPER_CLOCK + ". The H200 has the same compute and the same power limit",
    ),
    "b200": ChipTables(
        chip="b200-180gb",
        cluster="dgx-b200",
        folder="b200_sxm",
        gemm="trtllm/1.3.0rc20",
        attention="trtllm/1.3.0rc20",
        latent="trtllm/1.3.0rc20",
        nccl="2.29.2",
        sends="h100_dgx",
        relatives=("b100-192gb", "gb200-nvl72", "b300-288gb", "gb300-nvl72"),
        long_attention=_BLACKWELL_LONG,
        sustained_clock_fraction=0.68,
        attention_clock_fraction=1.0,
        attention_generations=_HOPPER_GENERATIONS,
        clock_source="Clock .68: SimuMax's matrix multiplies under load reach .70 of the rate of the burst table (errors: 1 - clock), and "
        "with .68 its steps are predicted within 3 %. Generations of attention as on H100. Attention runs at the clock of a burst: .68 "
        "makes NeMo's runs of long sequences 14 to 38 % too slow. Matrix multiplies in nvfp4: the table of vLLM 0.19",
        tuned={"nvfp4": "vllm/0.19.0"},
    ),
}  # fmt: skip

EXPOSED_FLOOR_FRACTION = 0.5
"""Kernels of one stream follow one another: the launch and drain of about half their floor hide under the neighbours."""

SCALE_OUT_FRACTION = 0.85
"""Of a NIC's rate, for large messages between nodes: SimAI's tables reach .95, EFA clusters .8, InfiniBand in Calculon's A100 system .9."""

TREE_LEVEL_TIME = 39e-6
"""[s] A level of the tree between nodes, up and down: nccl-tests floors of 44 and 69 us on 2 nodes (1 level), 184 us on 16 (4 levels)."""

NVLINK_OVER_NETWORK_HOP = 3.4 / 14.0
"""Latency of a ring hop inside a node over one between nodes, simple protocol, in NCCL's own tuning table (src/graph/tuning.cc)."""

SIMAI_NIC_BANDWIDTH = 50e9
"""[byte/s] of one chip: SimAI's tables are taken to be of 400 Gbit/s NICs."""


def _long_attention(tables: ChipTables, peak: float) -> dict[str, LongAttention]:
    def share(rate: float) -> float:
        return round(rate * 1e12 * LONG_CLOCK / peak, 3)

    return {name: LongAttention(forward=share(each[0]), backward=share(each[1])) for name, each in tables.long_attention.items()}


def fit_chip(folder: Path, name: str, *, say: Callable[[str], None] = print) -> Calibration:
    """The calibration of one chip from the tables in `folder`; `say` reports each part."""
    tables = TABLES[name]
    cluster = tables.cluster_of_fits()
    points: dict[str, int] = {}
    errors: dict[str, float] = {}

    def note(part: str, found: Array) -> None:
        points[part], errors[part] = len(found), round(float(np.median(found)), 4)
        say(f"{name} {part}: {len(found)} points, held-out errors: median {np.median(found):.1%}, p90 {np.quantile(found, 0.9):.1%}")

    matmul = {
        dtype: _fit_matmuls(folder, tables, cluster, dtype, note) for dtype in MEASURED_DTYPES if dtype in cluster.chip.peak_flop_rate
    }
    grouped = {dtype: _fit_grouped(folder, tables, cluster, dtype, plain, note) for dtype, plain in matmul.items()}
    attention = _fit_attention(folder, tables, cluster, note)
    decode = _fit_decode(folder, tables, cluster, note)
    streaming = _fit_streaming(folder, tables, cluster, note)
    inside = _fit_inside(folder, tables, cluster, note)
    outside = _fit_outside(folder, note)
    if name == "b200":
        table, _ = simumax_matmuls(read_simumax(folder, "b200_bf16_ceperm"))
        is_large = 2 * table.m * table.n * table.k > 5e11
        ratio = np.median(predict_matmul(matmul[Dtype.BF16], table, cluster, Dtype.BF16)[is_large] / table.time[is_large])
        points["1 - clock"], errors["1 - clock"] = int(is_large.sum()), round(float(1 - ratio), 4)
        say(f"b200 clock: SimuMax's large matrix multiplies run at {ratio:.2f} of the burst rate")
    return Calibration(
        name=name,
        chips=(tables.chip,),
        relatives=tables.relatives,
        borrowed=() if name == "h100" else (SCALE_OUT,),
        software=f"aiconfigurator tables: TensorRT-LLM {tables.gemm.split('/')[1]}, attention {tables.attention}, NCCL {tables.nccl}",
        source=(
            "Fitted by lab.kernels.fit to aiconfigurator (matmul, grouped matmul, attention, collectives in a node), "
            "LLMCompass and SimuMax (streaming, attention backward), SimAI, nccl-tests and vidur (between nodes). " + tables.clock_source
        ),
        date=datetime.date.today().isoformat(),
        matmul=matmul,
        streaming=streaming,
        attention=attention,
        grouped_matmul=grouped,
        decode_attention=decode,
        serving=fit_serving(folder, tables, matmul[Dtype.BF16], say=say),
        collectives={SCALE_UP: inside, SCALE_OUT: outside},
        sustained_clock_fraction=tables.sustained_clock_fraction,
        clock_fractions={} if name == "a100" else CLOCK_FRACTIONS,
        attention_clock_fraction=tables.attention_clock_fraction,
        attention_generations=tables.attention_generations,
        long_attention=_long_attention(tables, cluster.chip.flop_rate(Dtype.BF16)),
        exposed_floor_fraction=EXPOSED_FLOOR_FRACTION,
        context_bytes=CONTEXT_BYTES,
        channel_bytes=CHANNEL_BYTES,
        points=points,
        errors=errors,
        notes=(
            "No table has batches of small products: tiles are counted over the batch. Attention fitted for lengths from 512 and head dims "
            "64 and 128, of values narrower than keys for DeepSeek's widths alone, that of decoding for caches from 128 tokens and up to "
            "16 query heads to a key-value head. Grouped matmul: fused layers of experts routed evenly (A100: by a power law), without "
            "the runs of kernels that tuning did not choose. Softmax, layernorm, cross-entropy and GELU: A100 figures, rows put in order: "
            "B200's, on the other chips in the same proportion to plain streaming. Between nodes: one set of figures for all chips (SimAI, "
            "nccl-tests of H100 and H200, "
            "all-to-alls of Megatron-Core's report)."
        ),
    )


Note = Callable[[str, Array], None]
MEASURED_DTYPES = {Dtype.BF16: "bfloat16", Dtype.FP8: "fp8"}
"""What the tables call them."""


def _fit_matmuls(folder: Path, tables: ChipTables, cluster: Cluster, dtype: Dtype, note: Note) -> MatmulModel:
    table: MatmulTable = read_matmuls(folder, tables.folder, tables.gemm, MEASURED_DTYPES[dtype])
    held_out = matmul_errors(table, cluster, dtype, tiles=tables.tiles)
    note(f"matmul.{dtype}", held_out[table.m >= DECODE_ROWS])
    note(f"matmul.{dtype}.m>=1024", held_out[table.m >= 1024])
    note(f"matmul.{dtype}.m<{DECODE_ROWS}", held_out[table.m < DECODE_ROWS])
    return fit_matmul(table.rows(sample(len(table.time))), cluster, dtype, tiles=tables.tiles)


def _fit_attention(folder: Path, tables: ChipTables, cluster: Cluster, note: Note) -> dict[str, AttentionModel]:
    table = training_attention(read_attention(folder, tables.folder, tables.attention))
    backward_rate = simumax_backward_rate(read_simumax(folder, "a100_pcie" if tables.folder == "a100_sxm" else "b200_bf16_ceperm"))
    note("attention.flash", attention_errors(table, cluster))
    flash = fit_attention(table, cluster, Dtype.BF16, backward_rate=backward_rate)
    return {"flash": flash, LATENT_KERNEL: fit_latent_attention(folder, tables, cluster, flash, note)}


def fit_latent_attention(folder: Path, tables: ChipTables, cluster: Cluster, flash: AttentionModel, note: Note) -> AttentionModel:
    """Of values with other widths than keys. One width is measured: what a score costs besides is the other kernel's; its backward was
    measured on B200."""
    table = training_attention(read_latent_attention(folder, tables.folder, tables.latent))
    note(f"attention.{LATENT_KERNEL}", attention_errors(table, cluster, head_dim_offset=flash.head_dim_offset))
    backward = simumax_backward_rate(read_simumax(folder, "b200_bf16_ceperm"), key_dim=192)
    return fit_attention(table, cluster, Dtype.BF16, backward_rate=backward, head_dim_offset=flash.head_dim_offset)


def training_attention(table: AttentionTable) -> AttentionTable:
    """The shapes of training: lengths from 512, head dims 64 and 128, and those of latent attention."""
    return table.rows((table.length >= 512) & np.isin(table.head_dim, (64, 128, LATENT_WIDTH)))


def _fit_grouped(folder: Path, tables: ChipTables, cluster: Cluster, dtype: Dtype, plain: MatmulModel, note: Note) -> GroupedMatmulModel:
    table = tuned_grouped(folder, tables.folder, tables.gemm, MEASURED_DTYPES[dtype])
    note(f"grouped_matmul.{dtype}", grouped_errors(table, plain, cluster, dtype))
    return fit_grouped(table.only(sample(len(table.time))), plain, cluster, dtype)


def _fit_decode(folder: Path, tables: ChipTables, cluster: Cluster, note: Note) -> dict[str, DecodeAttentionModel]:
    table = serving_decode(read_decode(folder, tables.folder, tables.attention))
    note("decode_attention.flash", decode_errors(table, cluster))
    return {"flash": fit_decode(table.rows(sample(len(table.time))), cluster, Dtype.BF16)}


def _linear_stream(num_bytes: Array, time: Array) -> tuple[float, float]:
    """Floor [s] and bandwidth [byte/s] of t = t0 + V / B."""
    floor_time, inverse_bandwidth = fit_linear(np.stack([np.ones_like(num_bytes), num_bytes], axis=1), time)
    return rounded(floor_time), float(1.0 / inverse_bandwidth)


def _weight_stream(folder: Path, tables: ChipTables) -> tuple[Array, Array]:
    """Bytes and times of products with one row: they do nothing but stream the weight."""
    table = read_matmuls(folder, tables.folder, tables.gemm, "bfloat16")
    table = table.rows((table.m == 1) & (table.n * table.k >= 2**19))
    return 2 * table.n * table.k, table.time


def _fit_streaming(folder: Path, tables: ChipTables, cluster: Cluster, note: Note) -> dict[KernelClass, StreamingModel]:
    """Plain streaming from this chip's weight streaming; other classes in the proportion that they have to it on the A100."""
    peak = cluster.chip.memory.bandwidth
    num_bytes, time = _weight_stream(folder, tables)

    def refit(chosen: Indices) -> Callable[[Indices], Array]:
        floor_time, bandwidth = _linear_stream(num_bytes[chosen], time[chosen])
        return lambda rows: floor_time + num_bytes[rows] / bandwidth

    note("streaming.default", held_out_errors(num_bytes, time, refit))
    floor_time, bandwidth = _linear_stream(num_bytes, time)
    a100 = load_cluster("dgx-a100").chip.memory.bandwidth
    _, a100_stream = _linear_stream(*_weight_stream(folder, TABLES["a100"]))
    shares = {}
    for kernel in (KernelClass.SOFTMAX, KernelClass.LAYERNORM, KernelClass.GELU):
        elements, kernel_time = read_llmcompass(folder, str(kernel))
        # fp16 in and out. Below 2^24 elements the host, not the kernel, sets the time of these eager calls.
        is_large = elements >= 2**24
        kernel_bytes, kernel_time = 4 * elements[is_large], kernel_time[is_large]
        host_time, kernel_bandwidth = _linear_stream(kernel_bytes, kernel_time)
        shares[kernel] = min(kernel_bandwidth / a100_stream, 1.0)
        note(f"streaming.{kernel} (in sample, A100)", relative_errors(host_time + kernel_bytes / kernel_bandwidth, kernel_time))
    simumax = read_simumax(folder, "a100_pcie")["accelerator"]["bandwidth"]
    pcie = 1935e9  # [byte/s] of its A100 PCIe 80 GB
    plain = simumax["default"]["efficient_factor"] * simumax["default"]["gbps"] * 1e9 / pcie * a100 / a100_stream
    loss = simumax["ce"]["efficient_factor"] * simumax["ce"]["gbps"] * 1e9 / pcie * a100 / a100_stream

    # rows in the order of their experts, and back: fused kernels on B200 (the A100's of that table are not)
    moved = read_simumax(folder, "b200_bf16_ceperm")["accelerator"]["bandwidth"]
    _, b200_stream = _linear_stream(*_weight_stream(folder, TABLES["b200"]))
    there, back = (moved[name]["efficient_factor"] * moved[name]["gbps"] * 1e9 for name in ("permute_fwd", "permute_bwd"))

    def model(share: float) -> StreamingModel:
        return StreamingModel(bandwidth_fraction=rounded(bandwidth / peak * share), floor_time=floor_time)

    return {
        KernelClass.DEFAULT: model(plain),
        KernelClass.CROSS_ENTROPY: model(loss),
        KernelClass.PERMUTE: model(0.5 * (there + back) / b200_stream),
        **{kernel: model(share) for kernel, share in shares.items()},
    }


def _fit_inside(folder: Path, tables: ChipTables, cluster: Cluster, note: Note) -> dict[CollectiveKind, CollectiveModel]:
    models = {}
    for kind in AICONFIGURATOR_KINDS:
        models[kind] = _fit_one_inside(inside_table(folder, tables, kind), kind, cluster, note)
    num_bytes, time = read_vidur_sends(folder, tables.sends, per_node=2)
    floor_time, bandwidth = _linear_stream(num_bytes, time)
    link = load_cluster({"a100_dgx": "dgx-a100", "h100_dgx": "dgx-h100"}[tables.sends]).tiers[0].link.bandwidth
    note("scale_up.send_recv", relative_errors(floor_time + num_bytes / bandwidth, time))
    models[CollectiveKind.SEND_RECV] = CollectiveModel(hop_time=floor_time, bandwidth_fraction=rounded(bandwidth / link))
    return models


def inside_table(folder: Path, tables: ChipTables, kind: CollectiveKind) -> CollectiveTable:
    """What was measured of a collective in a node of the chip."""
    table = read_collectives(folder, tables.folder, tables.nccl, kind)
    if kind is CollectiveKind.ALL_REDUCE and tables.folder == "h100_sxm":
        return _joined(table, _large(read_published_all_reduce(folder, "H100", nodes=1)))
    return table


def reduces_in_switch(kind: CollectiveKind, cluster: Cluster) -> bool:
    """Whether the switches can add: NVLink SHARP came with the H100's."""
    return kind is CollectiveKind.ALL_REDUCE and cluster.name != "dgx-a100"


def _large(table: CollectiveTable) -> CollectiveTable:
    """Messages beyond the range of the other table: they fix the asymptote."""
    return table.rows(table.num_bytes > 2**29)


def _joined(first: CollectiveTable, second: CollectiveTable) -> CollectiveTable:
    return CollectiveTable(
        num_bytes=np.concatenate([first.num_bytes, second.num_bytes]),
        ranks=np.concatenate([first.ranks, second.ranks]),
        ranks_per_node=np.concatenate([first.ranks_per_node, second.ranks_per_node]),
        time=np.concatenate([first.time, second.time]),
        link_scale=np.concatenate([first.link_scales, second.link_scales]),
    )


def _fit_one_inside(table: CollectiveTable, kind: CollectiveKind, cluster: Cluster, note: Note) -> CollectiveModel:
    in_switch = reduces_in_switch(kind, cluster)
    note(f"scale_up.{kind}", collective_errors(table, kind, cluster, reduces_in_switch=in_switch))
    model = fit_collective(table, kind, cluster, reduces_in_switch=in_switch)
    # A tree instead of the ring's hops beyond the ranks that were measured; equal to the ring at the largest that was.
    most_ranks = float(table.ranks.max())
    return replace(model, tree_hop_time=rounded(model.hop_time * (most_ranks - 1) / np.ceil(np.log2(most_ranks))))


def between_nodes_errors(folder: Path) -> dict[CollectiveKind, Array]:
    """Of every message between nodes, by a fit that saw none of its decade of sizes. Sends, a straight line, are left aside. [-]"""
    found: dict[str, Array] = {}
    _fit_outside(folder, found.__setitem__)
    kinds = (CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.ALL_TO_ALL)
    return {kind: found[f"{SCALE_OUT}.{kind}"] for kind in kinds}


def _fit_outside(folder: Path, note: Note) -> dict[CollectiveKind, CollectiveModel]:
    """Between nodes, from H100 and H200 tables; fractions of the NIC's rate, so that they carry over to other chips."""
    tables = TABLES["h100"]
    cluster = load_cluster("dgx-h100", num_chips=1024)
    silent: Note = lambda part, found: None  # noqa: E731
    inside = {
        kind: fit_collective(read_collectives(folder, tables.folder, tables.nccl, kind), kind, cluster)
        for kind in (CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.ALL_TO_ALL)
    }
    inside[CollectiveKind.ALL_REDUCE] = _fit_inside(folder, tables, cluster, silent)[CollectiveKind.ALL_REDUCE]

    def ring(x: Array) -> CollectiveModel:
        hop_time = rounded(x[0] * 1e-6)
        inner = max(hop_time * NVLINK_OVER_NETWORK_HOP - inside[CollectiveKind.ALL_GATHER].hop_time, 0.0)
        return _ramped(x, hop_time=hop_time, inner_hop_time=rounded(inner))

    def tree(x: Array) -> CollectiveModel:
        both_ways = 2.0 * gather.hop_time
        return _ramped(x, base_time=rounded(x[0] * 1e-6), hop_time=both_ways, inner_hop_time=2.0 * gather.inner_hop_time)

    def exchange(x: Array) -> CollectiveModel:
        return _ramped(x, hop_time=rounded(x[0] * 1e-6))

    gather = _fit_one_outside(
        read_simai(folder, "nic_ratio", nic_bandwidth=SIMAI_NIC_BANDWIDTH), CollectiveKind.ALL_GATHER, ring, inside, cluster, note
    )
    two_nodes = _joined(read_published_all_reduce(folder, "H100", nodes=2), read_published_all_reduce(folder, "H200", nodes=2))
    published = _joined(two_nodes, read_many_nodes_all_reduce(folder))
    reduce = _fit_one_outside(
        published,
        CollectiveKind.ALL_REDUCE,
        lambda x: replace(tree(x), tree_hop_time=TREE_LEVEL_TIME, nested=True),
        inside,
        cluster,
        note,
    )
    simai = read_simai(folder, "ata_ratio", nic_bandwidth=SIMAI_NIC_BANDWIDTH)
    exchanges, num_points = _exchanges(simai.rows(simai.ranks > 16))
    shuffle = _fit_one_outside(
        exchanges, CollectiveKind.ALL_TO_ALL, exchange, inside, cluster, lambda part, found: note(part, found[:num_points])
    )
    num_bytes, time = read_vidur_sends(folder, "h100_dgx", per_node=1)
    floor_time, bandwidth = _linear_stream(num_bytes, time)
    note("scale_out.send_recv", relative_errors(floor_time + num_bytes / bandwidth, time))
    send = CollectiveModel(hop_time=floor_time, bandwidth_fraction=rounded(bandwidth / cluster.tiers[-1].link.bandwidth))
    return {
        CollectiveKind.ALL_REDUCE: reduce,
        CollectiveKind.ALL_GATHER: gather,
        CollectiveKind.REDUCE_SCATTER: gather,
        CollectiveKind.ALL_TO_ALL: shuffle,
        CollectiveKind.SEND_RECV: send,
    }


def _exchanges(simai: CollectiveTable) -> tuple[CollectiveTable, int]:
    """With the other source as often as it takes to weigh as much, after its first time; and how many points there are.

    SimAI's figures of two nodes are not among them: at half of what a NIC carries they are not what NCCL reaches (82 %).
    """
    published = published_all_to_all()
    table = _joined(simai, published)
    for _ in range(round(len(simai.time) / len(published.time)) - 1):
        table = _joined(table, published)
    return table, len(simai.time) + len(published.time)


def with_faster_links(cluster: Cluster, scale: float) -> Cluster:
    """The cluster with all its links that much faster, as no slower to respond."""

    def faster(link: Link) -> Link:
        return replace(link, bandwidth=link.bandwidth * scale, pair_bandwidth=link.pair_bandwidth * scale)

    return replace(cluster, tiers=tuple(replace(tier, link=faster(tier.link)) for tier in cluster.tiers))


def _ramped(x: Array, *, base_time: float = 0.0, hop_time: float = 0.0, inner_hop_time: float = 0.0) -> CollectiveModel:
    ramp_time = rounded(x[1] * 1e-6)
    return CollectiveModel(
        base_time=base_time,
        hop_time=hop_time,
        inner_hop_time=inner_hop_time,
        bandwidth_fraction=SCALE_OUT_FRACTION,
        ramp_time=ramp_time,
        ramp_exponent=rounded(x[2]) if ramp_time > 0 else 0.5,
    )


def _fit_one_outside(
    table: CollectiveTable,
    kind: CollectiveKind,
    model: Callable[[Array], CollectiveModel],
    inside: dict[CollectiveKind, CollectiveModel],
    cluster: Cluster,
    note: Note,
) -> CollectiveModel:
    def predict(x: Array, rows: CollectiveTable) -> Array:
        time = np.empty_like(rows.time)
        for scale in np.unique(rows.link_scales):
            own = rows.link_scales == scale
            machine = bare_machine(
                with_faster_links(cluster, scale), Dtype.BF16, collectives={SCALE_UP: {kind: inside[kind]}, SCALE_OUT: {kind: model(x)}}
            )
            some = rows.rows(own)
            time[own] = collective_time(
                kind, some.num_bytes, group_size=some.ranks, inside=[some.ranks_per_node, some.ranks], machine=machine
            )
        return time

    def fit(rows: CollectiveTable) -> Array:
        return fit_logarithm(lambda x: predict(x, rows), rows.time, start=(10, 10, 0.4), lower=(0, 0, 0.1), upper=(200, 300, 0.95))

    def refit(chosen: Indices) -> Callable[[Indices], Array]:
        found = fit(table.rows(chosen))
        return lambda rows: predict(found, table.rows(rows))

    decades = size_decades(table)
    note(f"scale_out.{kind}", held_out_errors(decades, table.time, refit, num_folds=len(np.unique(decades))))
    return model(fit(table))


@exits_on_errors
def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser("kernels.fit", __doc__, cases=False)
    parser.add_argument("--data", type=Path, required=True, help="folder of the kernel tables")
    parser.add_argument("--chip", choices=sorted(TABLES), action="append", help="a chip; may be repeated; all by default")
    parser.add_argument("--out", type=Path, required=True, help="folder for the calibration files")
    parser.add_argument("--part", choices=("serving",), help="fit this part of the files in --out again, and leave the rest as it is")
    options = parser.parse_args(arguments)
    for chip in options.chip or sorted(TABLES):
        path = options.out / f"{chip}.yaml"
        if options.part:
            calibration = load_calibration(path)
            plain = calibration.matmul[Dtype.BF16]
            calibration = replace(calibration, serving=fit_serving(options.data, TABLES[chip], plain))
        else:
            calibration = fit_chip(options.data, chip)
        save_calibration(calibration, path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
