"""Held-out errors of the kernel fits, for shapes and for chips left out.

    python -m lab.kernels.cross_validate FOLDER [--chip a100 ...] [--out FILE.csv | FILE.md]

FOLDER holds the tables that `lab.kernels.fit` reads. First, every group of shapes is predicted by a fit to the others
(`lab.kernels.kernel_fit`). Then every chip is predicted by the prior of its neighbours (`perfmodel.hardware.prior`), which is made of the
shipped calibrations of the others. Errors are over all points of a table. The same folder gives the same figures.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lab.command import command_parser, exits_on_errors
from lab.kernels.between_nodes import between_nodes
from lab.kernels.chip_kernels import (
    FEW_ROWS,
    MEASURED_DTYPES,
    attention_kernel,
    attention_of_chip,
    collective_kernel,
    collective_of_chip,
    decode_of_chip,
    grouped_of_chip,
    matmuls_of_chip,
)
from lab.kernels.chips import TABLES, ChipTables
from lab.kernels.kernel_fit import DECODE_ROWS, FIT_POINTS, chosen_rows
from lab.kernels.serving import serving_kernels, serving_prior_errors
from lab.kernels.tables import AICONFIGURATOR_KINDS, read_attention, read_collectives
from lab.pages import page, table
from perfmodel.calibrate.fits import Array
from perfmodel.foundation.dtypes import Dtype
from perfmodel.hardware.calibration import SCALE_UP, Calibration
from perfmodel.hardware.prior import prior_calibration
from perfmodel.hardware.reader import load_calibration, load_chip, load_cluster
from perfmodel.report.document import csv_text

CHIPS = ("a100", "h100", "b200")
"""One chip of each generation: the H200 computes as the H100 does."""

SAME_GENERATION = {"h100": ("h200",), "h200": ("h100",)}
"""Chips that are left out together with a chip."""

RELATIVE = {"b200": ("gb200", "gb200-nvl72", "2.29.2")}
"""Measured chip -> folder, cluster and NCCL version of a related chip whose collectives were measured and that no fit uses."""

GEMM, FP8, DECODE = "matmul", "matmul fp8", f"matmul, under {DECODE_ROWS} rows"
ATTENTION, ALL_ATTENTION = "attention", "attention, lengths from 128, every head dim to 256"
GROUPED = {Dtype.BF16: "matmul, grouped", Dtype.FP8: "matmul, grouped fp8"}
DECODE_ATTENTION = "attention, decoding"
INSIDE, BETWEEN = "collectives in a node", "collectives between nodes"
SERVING = "serving"
LEFT_OUT = "chip left out"
BORROWED = "a relative that borrows"

SUMMARISED = (
    *(GEMM, ATTENTION, INSIDE, DECODE, BETWEEN, LEFT_OUT),
    *(f"{LEFT_OUT}: {part}" for part in (GEMM, ATTENTION, INSIDE, DECODE)),
)
"""Parts whose median over chips is reported. A chip left out: all its parts together, and each."""

_Parts = Iterator[tuple[str, Array]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Errors:
    """Errors |predicted / measured - 1| of one part on one chip, of shapes or of a chip that the fit did not see."""

    part: str
    chip: str
    errors: Array

    @property
    def median(self) -> float:
        return float(np.median(self.errors))

    @property
    def p90(self) -> float:
        return float(np.quantile(self.errors, 0.9))


def shape_errors(folder: Path, name: str) -> _Parts:
    """Yield the errors of the kernels of one chip with one group of shapes left out at a time."""
    tables = TABLES[name]
    cluster = tables.cluster_of_fits()
    dtypes = [dtype for dtype in MEASURED_DTYPES if dtype in cluster.chip.peak_flop_rate]
    for dtype in dtypes:
        matmuls = matmuls_of_chip(folder, tables, dtype)
        errors = matmuls.held_out_errors()
        yield GEMM if dtype is Dtype.BF16 else FP8, errors[matmuls.parts[""]]
        if dtype is Dtype.BF16:
            yield DECODE, errors[matmuls.parts[FEW_ROWS]]
    for dtype in dtypes:
        yield GROUPED[dtype], grouped_of_chip(folder, tables, load_calibration(name).kernels.matmul[dtype], dtype).held_out_errors()
    yield ATTENTION, attention_of_chip(folder, tables).held_out_errors()
    attention = read_attention(folder, tables.folder, tables.attention)
    longer = chosen_rows(attention, (attention.length >= 128) & (attention.head_dim <= 256))
    yield ALL_ATTENTION, attention_kernel(longer, cluster).held_out_errors()
    yield DECODE_ATTENTION, decode_of_chip(folder, tables).held_out_errors()
    inside = []
    for kind in AICONFIGURATOR_KINDS:
        inside.append(collective_of_chip(folder, tables, kind).held_out_errors())
        yield f"{INSIDE}: {kind}", inside[-1]
    yield INSIDE, np.concatenate(inside)
    for kernel in serving_kernels(folder, tables, load_calibration(name).kernels.matmul[Dtype.BF16]):
        for called, part_errors in kernel.by_part(kernel.held_out_errors()):
            yield f"{SERVING}: {called}", part_errors


def chip_errors(folder: Path, name: str) -> _Parts:
    """Yield the errors of the prior of a chip's neighbours, whose calibrations never saw it, on the chip's tables."""
    tables = TABLES[name]
    others = [other for other in sorted(TABLES) if other != name and other not in SAME_GENERATION.get(name, ())]
    calibrations = [(load_calibration(other), load_chip(TABLES[other].chip)) for other in others]
    prior = prior_calibration(tables.cluster_of_fits().chip, calibrations)
    assert prior is not None
    for part, errors in _prior_errors(folder, tables, prior):
        yield f"{LEFT_OUT}: {part}", errors
    for part, errors in serving_prior_errors(folder, tables, prior.kernels.matmul[Dtype.BF16], prior.kernels.serving):
        yield f"{SERVING}, {LEFT_OUT}: {part}", errors


def _prior_errors(folder: Path, tables: ChipTables, prior: Calibration) -> _Parts:
    matmuls = matmuls_of_chip(folder, tables, Dtype.BF16)
    errors = matmuls.errors(prior.kernels.matmul[Dtype.BF16])
    yield GEMM, errors[matmuls.parts[""]]
    yield DECODE, errors[matmuls.parts[FEW_ROWS]]
    yield ATTENTION, attention_of_chip(folder, tables).errors(prior.kernels.attention["flash"])
    inside = [collective_of_chip(folder, tables, kind).errors(prior.kernels.collectives[SCALE_UP][kind]) for kind in AICONFIGURATOR_KINDS]
    yield INSIDE, np.concatenate(inside)


def relative_chip_errors(folder: Path, name: str) -> Iterator[Errors]:
    """Yield the errors of the collectives of a chip that borrows the calibration of `name`."""
    for source, cluster, version in [RELATIVE[name]] if name in RELATIVE else []:
        models, machine = load_calibration(name).kernels.collectives[SCALE_UP], load_cluster(cluster, num_chips=8)
        kernels = {kind: collective_kernel(read_collectives(folder, source, version, kind), kind, machine) for kind in AICONFIGURATOR_KINDS}
        errors = np.concatenate([kernel.errors(models[kind]) for kind, kernel in kernels.items()])
        yield Errors(part=f"{BORROWED}: {INSIDE}", chip=source, errors=errors)


def cross_validate(folder: Path, chips: Sequence[str] = CHIPS) -> Iterator[Errors]:
    """Yield every row of the table, in its order."""
    for name in chips:
        yield from (Errors(part=part, chip=name, errors=errors) for part, errors in shape_errors(folder, name))
    # sends between nodes, a straight line, are left out
    between = {kind: next(kernel.by_part(kernel.held_out_errors()))[1] for kind, kernel in between_nodes(folder, TABLES["h100"])}
    parts = {f"{BETWEEN}: {kind}": between[kind] for kind in AICONFIGURATOR_KINDS if kind in between}
    for part, errors in {**parts, BETWEEN: np.concatenate([*parts.values()])}.items():
        yield Errors(part=part, chip="h100, h200", errors=errors)
    for name in chips:
        yield from (Errors(part=part, chip=name, errors=errors) for part, errors in chip_errors(folder, name))
    for name in chips:
        yield from relative_chip_errors(folder, name)


def summary(rows: Sequence[Errors]) -> list[tuple[str, float, float]]:
    """Return name, median over chips of the median error, and the largest median error of each summarised part."""
    parts = []
    for part in SUMMARISED:
        medians = [row.median for row in rows if row.part == part or (part == LEFT_OUT and row.part.startswith(part))]
        if medians:
            parts.append((part, float(np.median(medians)), max(medians)))
    return parts


def rows_text(rows: Sequence[Errors]) -> str:
    """Return the rows as CSV."""
    names = ("part", "chip", "points", "median_error", "p90_error")
    cells = ((row.part, row.chip, str(len(row.errors)), f"{row.median:.4f}", f"{row.p90:.4f}") for row in rows)
    return csv_text([{name: cell.replace(",", "") for name, cell in zip(names, line, strict=True)} for line in cells], names)


def document(rows: Sequence[Errors]) -> str:
    """Return the page docs/kernels.md."""
    medians = [(part, f"{middle:.1%}", f"{largest:.1%}") for part, middle, largest in summary(rows)]
    lines = [(row.part, row.chip, f"{len(row.errors):,}", f"{row.median:.1%}", f"{row.p90:.1%}") for row in rows]
    headers = ("part", "chip", "points", "median", "90th percentile")
    values = {
        "decode_rows": DECODE_ROWS,
        "left_out": LEFT_OUT,
        "fit_points": f"{FIT_POINTS:,}",
        "summary": table(("median error of", "median over chips", "largest"), medians),
        "rows": table(headers, lines, headers[2:]),
    }
    return page("kernels", [("page", values)])


@exits_on_errors
def main(arguments: Sequence[str] | None = None, *, say: Callable[[str], None] = print) -> None:
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
        options.out.write_text(document(rows) if options.out.suffix == ".md" else rows_text(rows), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
