"""docs/figures.json: the accuracy figures that pages quote, read from the tables of docs/accuracy.md and docs/accuracy-serving.md.

    python -m lab.page_figures [docs]

`make accuracy` writes the file again after the two pages; `python -m tests.documents PAGES` inserts the figures into pages.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lab.command import command_parser, exits_on_errors
from lab.pages import values_on_page
from perfmodel.foundation.errors import InputError
from perfmodel.foundation.resources import write_atomically

TRAINING_PAGE, SERVING_PAGE, FIGURES_FILE = "accuracy.md", "accuracy-serving.md", "figures.json"

Cells = Sequence[tuple[tuple[str, str], str, Mapping[str, int]]]
"""Two column headers that identify a table, row, and key -> column."""

_TRAINING_CELLS: Cells = (
    (("times", "memories"), "all", {"scored_runs": 1, "scored_mean": 2, "scored_median": 3, "scored_p90": 4}),
    (("mean, left out", "p90, left out"), "all but those in brackets", {"known_runs": 1, "known_mean": 7, "known_p90": 8}),
    (("bias", "in 80 %"), "mean over groups", {"unseen_mean": 3, "unseen_coverage": 4}),
    (("coverage", "median width"), "all", {"known_coverage": 4}),
    (("cases", "predicted"), "all", {"expert_runs": 3, "expert_mean": 4}),
)
_LEFT_OUT_CHOICE = (("groups", "rank correlation"), "all")
_GIVEN = (0, 1, 3, 10)
_FEW_TABLE, _FEW_ROW = ("0 given", "coverage, 1"), "mean over groups"
_CHOICE_TABLE = ("runs given", "0 given")
_CHOICE_ROWS = {
    "any_run": "any of the group",
    "job_run": "any of the job",
    "fastest": "the expected fastest of the job",
}
_SERVING_CELLS: Cells = (
    (("what", "runs"), "TPOT, all", {"tpot_runs": 1, "tpot_median": 2, "tpot_p90": 3, "tpot_median_unseen_model": 5}),
    (("what", "runs"), "TTFT, all", {"ttft_median": 2, "ttft_median_unseen_model": 5, "ttft_p90": 3}),
    (("what", "runs"), "request latency, all", {"latency_median": 2}),
)
#: Figures that appear only in the text of the page: section -> names.
_TEXTS = {
    "fit_check": "reliability_mean reliability_worst reliability_sure reliability_runs "
    "false_positives out_of_memory_runs false_negatives fitting_runs",
    "few_runs": "few_common few_jobs few_layouts few_rest",
    "few_runs_choice": "choice_best_of_three",
    "unseen_choice": "unseen_choice_mean unseen_choice_worst",
}


def training_figures(page: str) -> dict[str, str]:
    """Return the figures of docs/accuracy.md, as printed there and without units."""
    tables = _tables(page)
    figures = _cells(tables, _TRAINING_CELLS)
    groups = [row for row in _table(tables, ("bias", "in 80 %"))[1:] if _plain(row[0]) != "mean over groups"]
    figures["unseen_groups"] = str(len(groups))
    figures["unseen_coverage_worst"] = min((_plain(row[4]) for row in groups), key=float)
    left_out = [table for table in tables if {"groups", "rank correlation"} <= set(table[0])][-1:]  # after the table in sample
    figures |= {"choice_groups": _cell(left_out, *_LEFT_OUT_CHOICE, 1), "choice_mean": _cell(left_out, *_LEFT_OUT_CHOICE, 3)}
    few = _table(tables, _FEW_TABLE)
    figures["few_mean_without_common"] = _plain(few[-1][-1])
    for index, given in enumerate(_GIVEN):
        errors = sorted(float(_plain(row[2 + index])) for row in few[1:-1] if _plain(row[2 + index]))
        figures |= {f"few_mean_{given}": _plain(few[-1][2 + index]), f"few_best_{given}": f"{errors[0]:.1f}"}
        figures[f"few_worst_{given}"] = f"{errors[-1]:.1f}"
        if given:
            figures[f"few_coverage_{given}"] = _plain(few[-1][5 + index])
        for name, row in _CHOICE_ROWS.items():
            figures[f"few_choice_{name}_{given}"] = _cell(tables, _CHOICE_TABLE, row, 1 + index)
    for section, names in _TEXTS.items():
        values = values_on_page(page, "accuracy", section)
        figures |= {name: values[name] for name in names.split()}
    return figures


def serving_figures(page: str) -> dict[str, str]:
    """Return the figures of docs/accuracy-serving.md, as printed there and without units."""
    return _cells(_tables(page), _SERVING_CELLS)


def write_page_figures(folder: Path) -> Path:
    """Write `figures.json` from the two pages in the folder; a page that is missing keeps its figures of before."""
    path = folder / FIGURES_FILE
    figures: dict[str, dict[str, str]] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    for name, page, read in (("training", TRAINING_PAGE, training_figures), ("serving", SERVING_PAGE, serving_figures)):
        if (folder / page).is_file():
            figures[name] = read((folder / page).read_text(encoding="utf-8"))
    write_atomically(path, json.dumps(figures, indent=1) + "\n")
    return path


def _tables(page: str) -> list[list[list[str]]]:
    """Return the tables of a page: rows of cells, the header first."""
    tables: list[list[list[str]]] = [[]]
    for line in page.splitlines():
        if not line.startswith("|"):
            tables.append([])
        elif not set(line) <= set("|-: "):
            tables[-1].append([cell.strip() for cell in line.strip().strip("|").split("|")])
    return [table for table in tables if table]


def _table(tables: Sequence[list[list[str]]], headers: tuple[str, str]) -> list[list[str]]:
    for table in tables:
        if set(headers) <= set(table[0]):
            return table
    raise InputError(f"docs: no table has the columns {headers[0]!r} and {headers[1]!r}; write the page again with `make accuracy`")


def _cells(tables: Sequence[list[list[str]]], cells: Cells) -> dict[str, str]:
    return {key: _cell(tables, headers, row, column) for headers, row, columns in cells for key, column in columns.items()}


def _cell(tables: Sequence[list[list[str]]], headers: tuple[str, str], row: str, column: int) -> str:
    for cells in _table(tables, headers):
        if _plain(cells[0]) == row:
            return _plain(cells[column])
    raise InputError(f"docs: the table of {headers[0]!r} has no row {row!r}; write the page again with `make accuracy`")


def _plain(cell: str) -> str:
    return cell.strip("* ").removesuffix("%").strip()


@exits_on_errors
def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_parser("page_figures", __doc__, cases=False)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("docs"), metavar="DOCS")
    print(write_page_figures(parser.parse_args(arguments).folder))


if __name__ == "__main__":
    sys.exit(main())
