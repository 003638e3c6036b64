"""Options shared by several verbs. `cli/words.py` makes the options of jobs and knobs from their records."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perfmodel.cli.output import Form, Output, csv_of, show
from perfmodel.cli.words import Group, flag
from perfmodel.foundation.errors import InputError, bad_field
from perfmodel.foundation.resources import check_can_be_written, write_atomically
from perfmodel.foundation.words import Words, check_none_missing, word, words_of
from perfmodel.parallel.request import Request
from perfmodel.report.document import Text

if TYPE_CHECKING:
    from perfmodel.parallel.plan import Plan
    from perfmodel.parallel.serving_plan import ServingPlan
    from perfmodel.planner.result import TrainingSearch
    from perfmodel.report.document import Block, Document
    from perfmodel.verbs.training import AskedRun


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class ChipWords:
    """Options of a chip in place of a cluster, with non-default node size and links."""

    chip: object = word(
        "In place of --cluster: a chip (`perfmodel chips`) with its usual node and links", metavar="NAME|PATH", default="", several=True
    )  # fmt: skip
    per_node: str = word("With --chip: chips of a node", default="")
    scale_up: object = word(
        "With --chip: what a chip sends inside a node, one direction, such as 450GB/s", metavar="RATE", default="", several=True
    )  # fmt: skip
    scale_out: object = word(
        "With --chip: what a chip sends between nodes, one direction, such as 400Gbit/s", metavar="RATE", default="", several=True
    )  # fmt: skip


_file = partial(word, kind=Path)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Files:
    """Options of the files that a verb writes in addition to its output."""

    csv: Path | None = _file("Also write one line for each prediction; - for standard output alone", metavar="FILE.csv")
    plot: Path | None = _file("Also draw a figure (PNG, SVG or PDF)", metavar="FILE.png")
    save: Path | None = _file("Write the plan (of a search: the best) to a file", metavar="PLAN.yaml")
    report: Path | None = _file("Also write an HTML page", metavar="FILE.html")

    def check(self, output: Output) -> Output:
        """Return the form of the output: CSV with `--csv -`. Raise InputError before the work for files that cannot be written."""
        check_figure(self.plot)
        if self.save is not None:
            check_can_be_written(self.save, "save", endings=".yaml .yml", rule=".yaml", remedy="write --save plan.yaml")
        if self.report is not None:
            check_can_be_written(self.report, "--report", endings=".html .htm", rule=".html", remedy="write report.html")
        check_csv(self.csv, output)
        return replace(output, form=Form.CSV) if str(self.csv) == "-" else output

    def save_plan(self, plan: Plan | ServingPlan) -> None:
        """Write a plan to the file of `--save`."""
        if self.save is not None:
            from perfmodel.parallel.plan_file import write_plan

            write_plan(plan, self.save)

    def write_page(self, shown: TrainingSearch | Sequence[Plan | str | Path]) -> None:
        """Write the page of plans, or of the best plan of a search, to the file of `--report`."""
        if self.report is not None:
            from perfmodel.verbs.reporting import write_report

            write_report(shown, out=self.report)

    def draw(self, figure: Callable[[Any], Any]) -> None:
        """Draw to the file of `--plot`. figure: a function of the module of the figures, which is loaded for it alone."""
        if self.plot is not None:
            from perfmodel.report import figures

            figures.write_figure(figure(figures), self.plot)

    def finish(self, document: Document, output: Output, others: Mapping[str, Path | None] = {}) -> None:
        """Write the rows of a result to the file of `--csv`, and print the result and one line per written file, also `others`."""
        if self.csv is not None and str(self.csv) != "-":
            write_atomically(self.csv, csv_of(document))
        show(replace(document, blocks=lambda: chain(document.blocks(), self.written(output, others))), output)

    def written(self, output: Output, others: Mapping[str, Path | None] = {}) -> Iterator[Block]:
        """Yield one line per written file."""
        paths = {"figure": self.plot, "table": self.csv, "plan": self.save, "page": self.report, **others}
        for name, path in paths.items():
            if path is not None and output.is_text:
                yield Text(f"{name}: {path}", apart=True)


#: Assumptions of verbs that take a plan file.
ASSUMED = Words(
    Request,
    only="profile settings calibration memory_headroom risk",
    helps={"profile": "The framework that is assumed (`perfmodel profiles`); the plan's own if left out."},
)
#: Options of verbs that take a plan file or a configuration: fields missing in a configuration, and assumptions.
STARTED = Words(
    Request,
    only="model cluster chips nodes global_batch batch_tokens seq_len profile settings calibration memory_headroom risk",
    helps={"profile": "The framework that is assumed (`perfmodel profiles`); the plan's own if left out."},
)
TimeLimit = Annotated[
    str | None,
    typer.Option(
        "--time-limit", metavar="SECONDS", help="End after it with the best so far, and say so; else work decides and load changes nothing."
    ),
]
AnyFramework = Annotated[
    bool,
    typer.Option(
        "--any-framework", help="Also plans that the framework cannot run (by default only what `perfmodel profiles NAME` lists)."
    ),
]
_SWITCHES = {
    "verbose": "Print every note and detail.",
    "wide": "Print every column of a table, however wide.",
    "json": "One JSON object on standard output, SI units; short for --format json.",
}


def output_options(names: str = "json format") -> Group:
    """Return the group of options that makes an `Output`: `json` and `format`; `verbose` and `wide` if named."""
    options = {name: _option(name, bool, help, default=False) for name, help in _SWITCHES.items() if name in names.split()}
    options["format"] = _option("format", str, f"How to print the result: {', '.join(Form)}.", default=Form.TABLE.value, metavar="NAME")
    return Group(options, _output)


def _option(name: str, kind: type, help: str, *, default: object, **more: Any) -> inspect.Parameter:
    annotation = Annotated[kind, typer.Option(flag(name), help=help, **more)]  # type: ignore[valid-type]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _output(given: dict[str, Any]) -> Output:
    form, as_json = given.pop("format"), given.pop("json")
    if form not in list(Form):
        raise bad_field("format", form, "is not known", f"use {', '.join(Form)}")
    if as_json and form not in (Form.TABLE, Form.JSON):
        raise InputError(f"--format {form}: does not go with --json; give one of the two")
    return Output(form=Form.JSON if as_json else Form(form), **given)


#: Output options of verbs with notes and wide tables.
OUTPUT = output_options("verbose wide json format")
#: Output options of all other verbs.
PLAIN_OUTPUT = output_options()


def with_chip(clusters: list[str], chips: ChipWords) -> list[str]:
    """Return the named clusters, and one cluster per combination of the values of --chip, --per-node, --scale-up and --scale-out."""
    from perfmodel.foundation.values import several
    from perfmodel.hardware.cluster_text import state_chip_cluster
    from perfmodel.hardware.reader import load_chip

    given = {name: getattr(chips, name) for name in words_of(ChipWords) if getattr(chips, name)}
    if "chip" not in given:
        for name in given:
            raise InputError(f"{flag(name)}: goes with --chip NAME, in place of --cluster; see `perfmodel chips`")
        return clusters
    lists = {name: [value] if Path(str(value)).is_file() else several(value) for name, value in given.items()}
    for chip in lists["chip"]:
        load_chip(chip)  # raises for the name of a cluster
    stated = (dict(zip(lists, values, strict=True)) for values in product(*lists.values()))
    return [*clusters, *(state_chip_cluster(**values).text for values in stated)]


def parse_fraction(text: str, field: str) -> float:
    from perfmodel.foundation.values import share

    return share(text, field) if text else 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class WholeRun:
    """Options of a whole training run."""

    tokens: str | None = word("Tokens to train on, such as 15T: adds the whole run, with failures, energy and cost", metavar="COUNT")
    assume: Sequence[str] | None = word(
        "With --tokens: a constant of the whole run (`perfmodel assumptions`), location=NAME, price=USD_PER_CHIP_HOUR or price.CLUSTER=USD",
        metavar="NAME=VALUE", repeats=True,
    )  # fmt: skip

    def read(self) -> AskedRun | None:
        """Return the whole training run; None without --tokens, which --assume needs."""
        if self.assume and not self.tokens:
            raise InputError("--assume: is for the whole run; give its tokens, as --tokens 15T")
        from perfmodel.hardware.assumptions import read_assumed
        from perfmodel.verbs.training import read_run

        assumed = read_assumed(self.assume)
        return read_run(self.tokens, assumed) if self.tokens else None


def single_value(values: list[str], field: str) -> str | None:
    """Return the only value of a flag, or None. Raise InputError for several values."""
    if len(values) > 1:
        raise InputError(f"{flag(field)}: is given {len(values)} times and can be one only; give one")
    return values[0] if values else None


def require(*given: tuple[str, int | str | None, str]) -> None:
    """Raise one InputError for all missing required flags.

    given   (flag, value, meaning) of each required flag
    """
    check_none_missing({flag: meaning for flag, value, meaning in given if not value and value != 0})


def check_csv(path: Path | None, output: Output) -> None:
    if path is None:
        return
    if str(path) == "-":
        if output.form not in (Form.TABLE, Form.CSV):
            given = "--json" if output.form is Form.JSON else f"--format {output.form}"
            raise InputError(f"--csv -: both it and {given} want standard output; name a file for one of them")
        return
    check_can_be_written(path, "csv", endings=".csv", rule=".csv, or be -", remedy="write --csv table.csv")


def check_figure(path: Path | None) -> None:
    """Raise InputError before the work for a figure that cannot be written."""
    if path is not None:
        check_can_be_written(path, "plot", endings=".png .svg .pdf", rule=".png, .svg or .pdf", remedy="write --plot plan.png")
