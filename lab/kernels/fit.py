"""Fit the calibrations of A100, H100, H200 and B200 to published kernel tables, and to nothing else.

    python -m lab.kernels.fit --data DIR --chip a100 [--chip h100 ...] --out hardware_specs/calibrations [--part serving]

DIR holds the tables as aiconfigurator, LLMCompass, SimuMax, SimAI and vidur publish them (`lab.kernels.tables`). No run of a model enters,
except for what no table of short bursts determines: sustained clocks and older generations of attention, below, with their source.
`python -m lab.kernels.clocks` compares these with published runs.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from lab.command import command_parser, exits_on_errors
from lab.kernels.between_nodes import between_nodes, with_tree
from lab.kernels.chip_kernels import (
    MEASURED_DTYPES,
    attention_of_chip,
    collective_of_chip,
    decode_of_chip,
    grouped_of_chip,
    latent_attention_of_chip,
    matmul_kernel,
    matmuls_of_chip,
)
from lab.kernels.chips import TABLES, ChipTables
from lab.kernels.kernel_fit import KernelFit, PartErrors, chosen_rows
from lab.kernels.serving import fit_serving
from lab.kernels.tables import (
    AICONFIGURATOR_KINDS,
    MatmulTable,
    read_llmcompass,
    read_matmuls,
    read_simumax,
    read_vidur_sends,
    simumax_backward_rate,
    simumax_matmuls,
)
from perfmodel.calibrate.fits import Array, fit_linear, relative_errors, rounded
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.dtypes import Dtype
from perfmodel.hardware.calibration import (
    LATENT_KERNEL,
    SCALE_OUT,
    SCALE_UP,
    AttentionModel,
    Calibration,
    CalibrationFit,
    CollectiveModel,
    KernelClass,
    KernelModels,
    LongAttention,
    SoftwareMemory,
    StreamingModel,
    SustainedRates,
)
from perfmodel.hardware.cluster import Cluster
from perfmodel.hardware.reader import load_calibration, load_cluster
from perfmodel.hardware.writer import save_calibration

CONTEXT_BYTES = 500e6
"""[byte] GPU memory of the driver's context and libraries: 551 MB of a process that only computes (aiconfigurator, system
files), .4-.5 GB commonly quoted. The framework's allocator does not count them."""

CHANNEL_BYTES = 22e6
"""[byte] Buffers of one channel of a communicator: 392 MiB on 4 and 8 H100 (aiconfigurator, `nccl_mem`) and 688 MiB on 4 A100
(NVIDIA/nccl issue 964) have 24 channels each; the geometric mean."""


LONG_CLOCK = 0.95
"""Clock over the burst clock in attention calls that take seconds: that of the A100, whose matmuls are as little power-bound."""

EXPOSED_FLOOR_FRACTION = 0.5
"""Exposed share of a kernel's floor: in a stream, launch and drain (about half of it) overlap with the adjacent kernels."""


def _long_attention(tables: ChipTables, peak: float) -> dict[str, LongAttention]:
    def share(rate: float) -> float:
        return round(rate * 1e12 * LONG_CLOCK / peak, 3)

    return {name: LongAttention(forward=share(rates[0]), backward=share(rates[1])) for name, rates in tables.long_attention.items()}


def fit_chip(folder: Path, name: str, *, say: Callable[[str], None] = print) -> Calibration:
    """Return the calibration of one chip, fitted to the tables in `folder`; `say` reports each part."""
    tables = TABLES[name]
    cluster = tables.cluster_of_fits()
    parts = PartErrors(label=f"{name} ", say=say)
    dtypes = [dtype for dtype in MEASURED_DTYPES if dtype in cluster.chip.peak_flop_rate]
    matmul = {dtype: parts.noted(matmuls_of_chip(folder, tables, dtype)).model() for dtype in dtypes}
    grouped = {dtype: parts.noted(grouped_of_chip(folder, tables, plain, dtype)).model() for dtype, plain in matmul.items()}
    attention = _fit_attention(folder, tables, parts)
    decode = {"flash": parts.noted(decode_of_chip(folder, tables)).model()}
    streaming = _fit_streaming(folder, tables, cluster, parts)
    inside = {kind: with_tree(parts.noted(collective_of_chip(folder, tables, kind))) for kind in AICONFIGURATOR_KINDS}
    link = load_cluster(tables.sends["cluster"]).tiers[0].link.bandwidth
    inside[CollectiveKind.SEND_RECV] = _fit_sends(folder, tables.sends["folder"], 2, link, SCALE_UP, parts)
    between = {kind: parts.noted(kernel).model() for kind, kernel in between_nodes(folder, TABLES["h100"])}
    between[CollectiveKind.REDUCE_SCATTER] = between[CollectiveKind.ALL_GATHER]
    link = load_cluster("dgx-h100", num_chips=1024).tiers[-1].link.bandwidth
    between[CollectiveKind.SEND_RECV] = _fit_sends(folder, "h100_dgx", 1, link, SCALE_OUT, parts)
    outside = {kind: between[kind] for kind in inside}
    if tables.under_load:
        table = simumax_matmuls(read_simumax(folder, tables.under_load))
        is_large = 2 * table.m * table.n * table.k > 5e11
        predicted = matmul_kernel(table, cluster, Dtype.BF16).predict(matmul[Dtype.BF16], table)
        ratio = np.median(predicted[is_large] / table.time[is_large])
        parts.points["1 - clock"], parts.errors["1 - clock"] = int(is_large.sum()), round(float(1 - ratio), 4)
        say(f"{name} clock: SimuMax's large matrix multiplies run at {ratio:.2f} of the burst rate")
    return Calibration(
        name=name,
        chips=(tables.chip,),
        relatives=tuple(tables.relatives),
        borrowed=() if tables.is_measured_between_nodes else (SCALE_OUT,),
        software=f"aiconfigurator tables: TensorRT-LLM {tables.gemm.split('/')[1]}, attention {tables.attention}, NCCL {tables.nccl}",
        source=(
            "Fitted by lab.kernels.fit to aiconfigurator (matmul, grouped matmul, attention, collectives in a node), "
            "LLMCompass and SimuMax (streaming, attention backward), SimAI, nccl-tests and vidur (between nodes). "
            + ". ".join(tables.clock_source)
        ),
        date=datetime.date.today().isoformat(),
        kernels=KernelModels(
            matmul=matmul,
            streaming=streaming,
            attention=attention,
            grouped_matmul=grouped,
            decode_attention=decode,
            serving=fit_serving(folder, tables, matmul[Dtype.BF16], say=say),
            collectives={SCALE_UP: inside, SCALE_OUT: outside},
        ),
        sustained=SustainedRates(
            sustained_clock_fraction=tables.sustained_clock_fraction,
            clock_fractions={Dtype(dtype): fraction for dtype, fraction in tables.clock_fractions.items()},
            attention_clock_fraction=tables.attention_clock_fraction,
            attention_generations=tables.attention_generations,
            long_attention=_long_attention(tables, cluster.chip.flop_rate(Dtype.BF16)),
            exposed_floor_fraction=EXPOSED_FLOOR_FRACTION,
        ),
        memory=SoftwareMemory(context_bytes=CONTEXT_BYTES, channel_bytes=CHANNEL_BYTES),
        fit=CalibrationFit(points=parts.points, errors=parts.errors),
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


def _fit_attention(folder: Path, tables: ChipTables, parts: PartErrors) -> dict[str, AttentionModel]:
    """Return the attention models; the backward rate of latent attention was measured on B200."""
    b200 = read_simumax(folder, "b200_bf16_ceperm")
    backward_rate = simumax_backward_rate(read_simumax(folder, tables.backward_rates))
    flash = parts.noted(attention_of_chip(folder, tables, backward_rate=backward_rate)).model()
    latent = latent_attention_of_chip(folder, tables, flash, backward_rate=simumax_backward_rate(b200, key_dim=192))
    return {"flash": flash, LATENT_KERNEL: parts.noted(latent).model()}


def _linear_stream(num_bytes: Array, time: Array) -> tuple[float, float]:
    """Return floor [s] and bandwidth [byte/s] of t = t0 + V / B."""
    floor_time, inverse_bandwidth = fit_linear(np.stack([np.ones_like(num_bytes), num_bytes], axis=1), time)
    return rounded(floor_time), float(1.0 / inverse_bandwidth)


def _weight_stream(folder: Path, tables: ChipTables) -> KernelFit[MatmulTable, tuple[float, float]]:
    """Return the fit of products with one row, which only stream the weight."""
    table = read_matmuls(folder, tables.folder, tables.gemm, "bfloat16")
    table = chosen_rows(table, (table.m == 1) & (table.n * table.k >= 2**19))
    return KernelFit(
        name="streaming.default",
        table=table,
        groups=2 * table.n * table.k,
        fit=lambda seen: _linear_stream(2 * seen.n * seen.k, seen.time),
        predict=lambda line, rows: line[0] + 2 * rows.n * rows.k / line[1],
        uses_all=True,
    )


def _fit_streaming(folder: Path, tables: ChipTables, cluster: Cluster, parts: PartErrors) -> dict[KernelClass, StreamingModel]:
    """Return plain streaming from this chip's weight streaming, and the other classes in their proportion to it on the A100."""
    peak = cluster.chip.memory.bandwidth
    floor_time, bandwidth = parts.noted(_weight_stream(folder, tables)).model()
    a100 = load_cluster("dgx-a100").chip.memory.bandwidth
    _, a100_stream = _weight_stream(folder, TABLES["a100"]).model()
    shares = {}
    for kernel in (KernelClass.SOFTMAX, KernelClass.LAYERNORM, KernelClass.GELU):
        elements, kernel_time = read_llmcompass(folder, str(kernel))
        # fp16 in and out. Below 2^24 elements the host, not the kernel, sets the time of these eager calls.
        is_large = elements >= 2**24
        kernel_bytes, kernel_time = 4 * elements[is_large], kernel_time[is_large]
        host_time, kernel_bandwidth = _linear_stream(kernel_bytes, kernel_time)
        shares[kernel] = min(kernel_bandwidth / a100_stream, 1.0)
        parts.note(f"streaming.{kernel} (in sample, A100)", relative_errors(host_time + kernel_bytes / kernel_bandwidth, kernel_time))
    simumax = read_simumax(folder, "a100_pcie")["accelerator"]["bandwidth"]
    pcie = 1935e9  # [byte/s] of its A100 PCIe 80 GB
    plain = simumax["default"]["efficient_factor"] * simumax["default"]["gbps"] * 1e9 / pcie * a100 / a100_stream
    loss = simumax["ce"]["efficient_factor"] * simumax["ce"]["gbps"] * 1e9 / pcie * a100 / a100_stream

    # permute and unpermute: fused kernels on B200 (those of the A100 in that table are not)
    moved = read_simumax(folder, "b200_bf16_ceperm")["accelerator"]["bandwidth"]
    _, b200_stream = _weight_stream(folder, TABLES["b200"]).model()
    there, back = (moved[name]["efficient_factor"] * moved[name]["gbps"] * 1e9 for name in ("permute_fwd", "permute_bwd"))

    def model(share: float) -> StreamingModel:
        return StreamingModel(bandwidth_fraction=rounded(bandwidth / peak * share), floor_time=floor_time)

    return {
        KernelClass.DEFAULT: model(plain),
        KernelClass.CROSS_ENTROPY: model(loss),
        KernelClass.PERMUTE: model(0.5 * (there + back) / b200_stream),
        **{kernel: model(share) for kernel, share in shares.items()},
    }


def _fit_sends(folder: Path, cluster: str, per_node: int, link: float, tier: str, parts: PartErrors) -> CollectiveModel:
    """Return the send-receive of two ranks, a straight line. link: bandwidth of which it is a fraction [byte/s]."""
    num_bytes, time = read_vidur_sends(folder, cluster, per_node=per_node)
    floor_time, bandwidth = _linear_stream(num_bytes, time)
    parts.note(f"{tier}.send_recv", relative_errors(floor_time + num_bytes / bandwidth, time))
    return CollectiveModel(hop_time=floor_time, bandwidth_fraction=rounded(bandwidth / link))


@exits_on_errors
def main(arguments: Sequence[str] | None = None) -> None:
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
            serving = fit_serving(options.data, TABLES[chip], calibration.kernels.matmul[Dtype.BF16])
            calibration = replace(calibration, kernels=replace(calibration.kernels, serving=serving))
        else:
            calibration = fit_chip(options.data, chip)
        save_calibration(calibration, path)


if __name__ == "__main__":
    sys.exit(main())
