"""Held-out errors of the kernel fits, for shapes and for chips left out.

    python -m lab.kernels.cross_validate FOLDER [--chip a100 ...] [--out FILE.csv | FILE.md]

FOLDER holds the tables that `lab.kernels.fit` reads. First, every group of shapes is predicted by a fit to the others
(`lab.kernels.held_out`: five folds of whole groups for matrix multiplies and attention, each decade of sizes by itself for
collectives). Then every chip is predicted by the prior of its neighbours (`perfmodel.hardware.prior`), as if it had no table: the
shipped calibrations of the others, and none of its own. Fits look at up to 3,000 points, drawn with a fixed seed; errors are on all
points of a table. The same folder gives the same figures, in about half a minute.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lab.command import command_parser, exits_on_errors
from lab.kernels.decode import decode_errors, read_decode, serving_decode
from lab.kernels.fit import (
    MEASURED_DTYPES,
    TABLES,
    ChipTables,
    between_nodes_errors,
    inside_table,
    reduces_in_switch,
    training_attention,
)
from lab.kernels.grouped import grouped_errors, tuned_grouped
from lab.kernels.held_out import DECODE_ROWS, FIT_POINTS, attention_errors, collective_errors, matmul_errors
from lab.kernels.serving import serving_parts, serving_prior_errors
from lab.kernels.tables import AICONFIGURATOR_KINDS, read_attention, read_collectives, read_matmuls
from perfmodel.calibrate.fits import Array, predict_attention, predict_collective, predict_matmul, relative_errors
from perfmodel.foundation.dtypes import Dtype
from perfmodel.hardware.calibration import SCALE_UP, Calibration
from perfmodel.hardware.chip import Chip
from perfmodel.hardware.prior import prior_calibration
from perfmodel.hardware.reader import load_calibration, load_chip, load_cluster

CHIPS = ("a100", "h100", "b200")
"""One chip of each generation: the H200 computes as the H100 does."""

SAME_GENERATION = {"h100": ("h200",), "h200": ("h100",)}
"""What leaving a chip out also leaves out."""

RELATIVE = {"b200": ("gb200", "gb200-nvl72", "2.29.2")}
"""By the chip that was measured: folder, cluster and NCCL version of a relative whose collectives were measured; no fit sees them."""

GEMM, FP8, DECODE = "matmul", "matmul fp8", f"matmul, under {DECODE_ROWS} rows"
ATTENTION, ALL_ATTENTION = "attention", "attention, lengths from 128, every head dim to 256"
GROUPED, GROUPED_FP8, DECODE_ATTENTION = "matmul, grouped", "matmul, grouped fp8", "attention, decoding"
INSIDE, BETWEEN = "collectives in a node", "collectives between nodes"
SERVING = "serving"
LEFT_OUT = "chip left out"
BORROWED = "a relative that borrows"

SUMMARISED = (
    GEMM,
    ATTENTION,
    INSIDE,
    DECODE,
    BETWEEN,
    LEFT_OUT,
    f"{LEFT_OUT}: {GEMM}",
    f"{LEFT_OUT}: {ATTENTION}",
    f"{LEFT_OUT}: {INSIDE}",
    f"{LEFT_OUT}: {DECODE}",
)
"""Parts whose median over chips is told. A chip left out: all its parts together, and each."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Errors:
    """Errors of one part on one chip, of shapes or of a chip that the fit did not see. errors: |predicted / measured - 1|."""

    part: str
    chip: str
    errors: Array

    @property
    def median(self) -> float:
        return float(np.median(self.errors))

    @property
    def p90(self) -> float:
        return float(np.quantile(self.errors, 0.9))


def shape_errors(folder: Path, name: str) -> Iterator[Errors]:
    """Leave one group of shapes out: matrix multiplies, attention and collectives in a node of one chip."""
    tables = TABLES[name]
    cluster = tables.cluster_of_fits()
    table = read_matmuls(folder, tables.folder, tables.gemm, "bfloat16")
    errors = matmul_errors(table, cluster, Dtype.BF16, tiles=tables.tiles)
    yield Errors(part=GEMM, chip=name, errors=errors[table.m >= DECODE_ROWS])
    yield Errors(part=DECODE, chip=name, errors=errors[table.m < DECODE_ROWS])
    if Dtype.FP8 in cluster.chip.peak_flop_rate:
        table = read_matmuls(folder, tables.folder, tables.gemm, "fp8")
        errors = matmul_errors(table, cluster, Dtype.FP8, tiles=tables.tiles)
        yield Errors(part=FP8, chip=name, errors=errors[table.m >= DECODE_ROWS])
    for part, dtype in ((GROUPED, Dtype.BF16), (GROUPED_FP8, Dtype.FP8)):
        if dtype in cluster.chip.peak_flop_rate:
            layers = tuned_grouped(folder, tables.folder, tables.gemm, MEASURED_DTYPES[dtype])
            plain = load_calibration(name).matmul[dtype]
            yield Errors(part=part, chip=name, errors=grouped_errors(layers, plain, cluster, dtype))
    attention = read_attention(folder, tables.folder, tables.attention)
    yield Errors(part=ATTENTION, chip=name, errors=attention_errors(training_attention(attention), cluster))
    longer = attention.rows((attention.length >= 128) & (attention.head_dim <= 256))
    yield Errors(part=ALL_ATTENTION, chip=name, errors=attention_errors(longer, cluster))
    decode = serving_decode(read_decode(folder, tables.folder, tables.attention))
    yield Errors(part=DECODE_ATTENTION, chip=name, errors=decode_errors(decode, cluster))
    inside = []
    for kind in AICONFIGURATOR_KINDS:
        found = collective_errors(inside_table(folder, tables, kind), kind, cluster, reduces_in_switch=reduces_in_switch(kind, cluster))
        inside.append(found)
        yield Errors(part=f"{INSIDE}: {kind}", chip=name, errors=found)
    yield Errors(part=INSIDE, chip=name, errors=np.concatenate(inside))
    for kernel in serving_parts(folder, tables, load_calibration(name).matmul[Dtype.BF16]):
        for called, found in kernel.by_rows(kernel.held_out()):
            yield Errors(part=f"{SERVING}: {called}", chip=name, errors=found)


def chip_errors(folder: Path, name: str) -> Iterator[Errors]:
    """Leave the chip out: its tables against the prior of its neighbours, whose calibrations never saw it."""
    tables = TABLES[name]
    cluster = tables.cluster_of_fits()
    others = [other for other in sorted(TABLES) if other != name and other not in SAME_GENERATION.get(name, ())]
    prior = prior_calibration(cluster.chip, [_measured(other) for other in others])
    assert prior is not None
    for part, errors in _prior_errors(folder, tables, prior):
        yield Errors(part=f"{LEFT_OUT}: {part}", chip=name, errors=errors)
    for part, errors in serving_prior_errors(folder, tables, prior.matmul[Dtype.BF16], prior.serving):
        yield Errors(part=f"{SERVING}, {LEFT_OUT}: {part}", chip=name, errors=errors)


def relative_chip_errors(folder: Path, name: str) -> Iterator[Errors]:
    """The collectives of a chip that borrows this one's calibration."""
    for source, cluster_name, version in [RELATIVE[name]] if name in RELATIVE else []:
        cluster, models = load_cluster(cluster_name, num_chips=8), load_calibration(name).collectives[SCALE_UP]
        found = []
        for kind in AICONFIGURATOR_KINDS:
            messages = read_collectives(folder, source, version, kind)
            found.append(relative_errors(predict_collective(models[kind], kind, messages, cluster), messages.time))
        yield Errors(part=f"{BORROWED}: {INSIDE}", chip=source, errors=np.concatenate(found))


def _measured(name: str) -> tuple[Calibration, Chip]:
    return load_calibration(name), load_chip(TABLES[name].chip)


def _prior_errors(folder: Path, tables: ChipTables, prior: Calibration) -> Iterator[tuple[str, Array]]:
    cluster = tables.cluster_of_fits()
    table = read_matmuls(folder, tables.folder, tables.gemm, "bfloat16")
    errors = relative_errors(predict_matmul(prior.matmul[Dtype.BF16], table, cluster, Dtype.BF16), table.time)
    yield GEMM, errors[table.m >= DECODE_ROWS]
    yield DECODE, errors[table.m < DECODE_ROWS]
    attention = training_attention(read_attention(folder, tables.folder, tables.attention))
    yield ATTENTION, relative_errors(predict_attention(prior.attention["flash"], attention, cluster, Dtype.BF16), attention.time)
    inside = []
    for kind in AICONFIGURATOR_KINDS:
        messages = inside_table(folder, tables, kind)
        inside.append(relative_errors(predict_collective(prior.collectives[SCALE_UP][kind], kind, messages, cluster), messages.time))
    yield INSIDE, np.concatenate(inside)


def cross_validate(folder: Path, chips: Sequence[str] = CHIPS) -> Iterator[Errors]:
    """Every row of the table, in its order."""
    for name in chips:
        yield from shape_errors(folder, name)
    between = between_nodes_errors(folder)
    for kind, errors in between.items():
        yield Errors(part=f"{BETWEEN}: {kind}", chip="h100, h200", errors=errors)
    yield Errors(part=BETWEEN, chip="h100, h200", errors=np.concatenate(list(between.values())))
    for name in chips:
        yield from chip_errors(folder, name)
    for name in chips:
        yield from relative_chip_errors(folder, name)


def summary(rows: Sequence[Errors]) -> list[tuple[str, float, float]]:
    """Of each part that is summarised: its name, the median over chips of the median error, and the largest of them."""
    found = []
    for part in SUMMARISED:
        medians = [row.median for row in rows if row.part == part or (part == LEFT_OUT and row.part.startswith(part))]
        if medians:
            found.append((part, float(np.median(medians)), max(medians)))
    return found


def table(rows: Sequence[Errors]) -> str:
    """The rows as CSV."""
    lines = [f"{row.part.replace(',', '')},{row.chip.replace(',', '')},{len(row.errors)},{row.median:.4f},{row.p90:.4f}" for row in rows]
    return "\n".join(("part,chip,points,median_error,p90_error", *lines, ""))


METHOD = f"""# Held-out errors of the kernel fits

Generated by `python -m lab.kernels.cross_validate FOLDER --out docs/kernels.md`; FOLDER holds published kernel tables
(aiconfigurator, nccl-tests, SimAI). Errors are |predicted / measured - 1| over all points of a table.

- **Shapes left out.** Five-fold cross-validation that leaves out whole groups of shapes. Matrix multiplies: a group is one weight
  shape (n, k) with all its m. Attention: one (heads, KV heads, head dim) with all batch sizes and lengths. Grouped matrix multiplies:
  one expert layer (hidden and intermediate size, experts, experts per token) with all numbers of chips and tokens. Collectives: each
  decade of message sizes is left out in turn. One fit covers all m; decoding is m < {DECODE_ROWS}. Attention is causal prefill in bf16
  with lengths from 512 and head dims 64 and 128, unless stated otherwise. Decode attention has KV caches from 128 tokens and at most 16
  query heads per KV head.
- **Grouped matrix multiplies** are based on the shipped fit of plain ones. Routing is even, except in the A100 table, which gives mean
  loads only. One measurement in eight is excluded (none on the A100), because it ran a kernel that tuning had not selected. Such a
  measurement is slower than the same layer with more work per chip.
- **A chip left out.** Its tables are predicted with a prior (`perfmodel.hardware.prior`). The prior is the mean of the calibrations of
  the vendor's neighbouring generations; for collectives, of all generations. H100 is predicted without H200. "{LEFT_OUT}" is the
  median over parts and chips. Latency differs by a factor of 1.7 between these machines, so small messages have large errors.
- **Serving.** Small all-reduces, where the engines' own kernels ran: each decade of message sizes is left out. Dense and expert matrix
  multiplies with quantized weights are based on the chip's 16-bit ones and include the kernel that quantizes activations. Groups are
  those above (m < {DECODE_ROWS} apart). Decode attention: heads are left out; latent caches have the dims of DeepSeek and 1 to 128
  heads. With the chip left out, the fits of its neighbours are used. They scale the 16-bit matrix multiplies of the prior.
- **A related chip.** GB200 collectives (2 and 4 chips) use the B200 calibration.
- The functional *forms* of all fits were chosen with the tables of all chips in view. Only the parameters are left out.
- Each fit uses up to {FIT_POINTS:,} points, drawn with a fixed seed.
"""


def document(rows: Sequence[Errors]) -> str:
    """The rows and their summary as a page of Markdown."""
    lines = [METHOD, "| median error of | median over chips | largest |", "| --- | ---: | ---: |"]
    lines += [f"| {part} | {middle:.1%} | {largest:.1%} |" for part, middle, largest in summary(rows)]
    lines += ["", "| part | chip | points | median | 90th percentile |", "| --- | --- | ---: | ---: | ---: |"]
    lines += [f"| {row.part} | {row.chip} | {len(row.errors):,} | {row.median:.1%} | {row.p90:.1%} |" for row in rows]
    return "\n".join((*lines, ""))


@exits_on_errors
def main(arguments: Sequence[str] | None = None, *, say: Callable[[str], None] = print) -> int:
    parser = command_parser("kernels.cross_validate", __doc__, cases=False)
    parser.add_argument("folder", type=Path, help="folder of the kernel tables")
    parser.add_argument(
        "--chip", choices=sorted(TABLES), action="append", help="a chip; may be repeated; one of each generation by default"
    )
    parser.add_argument("--out", type=Path, help="the rows as a CSV file, or with the method as a page of Markdown (docs/kernels.md)")
    options = parser.parse_args(arguments)
    rows: list[Errors] = []
    say(f"{'part':52} {'chip':10}  points  median    p90")
    for row in cross_validate(options.folder, options.chip or CHIPS):
        rows.append(row)
        say(f"{row.part:52} {row.chip:10} {len(row.errors):7} {row.median:7.1%} {row.p90:6.1%}")
    say(f"\n{'median errors':34} chips' median  largest")
    for part, middle, largest in summary(rows):
        say(f"{part:34} {middle:13.1%} {largest:8.1%}")
    if options.out:
        text = document(rows) if options.out.suffix == ".md" else table(rows)
        options.out.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
