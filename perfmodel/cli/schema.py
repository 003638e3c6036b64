"""`perfmodel schema`: the fields of the files that users write."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer

from perfmodel.cli import options
from perfmodel.cli.output import Output, show
from perfmodel.cli.words import command
from perfmodel.report.document import Block, Document
from perfmodel.report.table import Table


@command(output=options.PLAIN_OUTPUT)
def schema(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="chip, cluster, calibration, profile, engine, plan or rule-set.")],
    *,
    output: Output,
) -> None:
    """Print the fields of a kind of input file: types, units and meaning; with --json its JSON Schema."""
    from perfmodel.verbs.schemas import field_rows, schema_of

    rows = list(field_rows(kind))

    def blocks() -> Iterator[Block]:
        headers = ("field", "value", "required", "meaning")
        cells = tuple((_indented(row["field"]), row["value"], "yes" if row["required"] else "", row["meaning"]) for row in rows)
        yield Table(title=f"Fields of a {kind} file", headers=headers, rows=cells, fold=("value", "meaning"))

    show(Document(content=lambda: schema_of(kind), blocks=blocks, rows=lambda: rows), output)


def _indented(path: str) -> str:
    """A field below the mapping that it is in."""
    above, _, name = path.replace(".*", "").rpartition(".")
    return "  " * (above.count(".") + bool(above)) + name
