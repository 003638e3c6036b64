"""`perfmodel schema`: the fields of the files that users write."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated

import typer

from perfmodel.cli import options
from perfmodel.cli.output import Output, show
from perfmodel.cli.words import command
from perfmodel.report.document import Block, Document
from perfmodel.report.table import Table


@command(output=options.PLAIN_OUTPUT)
def schema(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="chip, cluster, calibration, profile or engine.")],
    *,
    output: Output,
) -> None:
    """Print the fields of a kind of input file: types, units and meaning; with --json its JSON Schema."""
    from perfmodel.foundation.schemas import field_rows, json_schema
    from perfmodel.verbs.schemas import model_of_kind

    model = model_of_kind(kind)

    def blocks() -> Iterator[Block]:
        rows = tuple((row.name, row.kind, "yes" if row.is_needed else "", row.says) for row in field_rows(model))
        headers = ("field", "type", "required", "meaning")
        yield Table(title=f"Fields of a {kind} file", headers=headers, rows=rows, fold=("type", "meaning"))

    show(Document(content=lambda: json_schema(model), blocks=blocks, rows=lambda: map(asdict, field_rows(model))), output)
