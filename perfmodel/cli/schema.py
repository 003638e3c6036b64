"""`perfmodel schema`: fields of input files, and inputs and outputs of commands."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Annotated, Any

import typer

from perfmodel.cli import options
from perfmodel.cli.output import Output, show
from perfmodel.cli.words import command
from perfmodel.foundation.errors import bad_field, one_line, suggest
from perfmodel.foundation.plain import to_plain
from perfmodel.report.document import Block, Document
from perfmodel.report.table import Table

_SHOWN_LEVELS = 2
_TYPES: dict[Any, str] = {int: "integer", float: "number", bool: "boolean"}


@command(output=options.PLAIN_OUTPUT)
def schema(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="KIND|COMMAND",
            help="chip, cluster, calibration, profile, engine, plan, rule-set, study, case, serving-case, measured-run or request; "
            "or a command, such as predict.",
        ),
    ],
    *,
    is_command: Annotated[bool, typer.Option("--command", help="The name is a command's; needed for chip, which is both.")] = False,
    output: Output,
) -> None:
    """Print the fields of a kind of input file, or what a command takes and prints; with --json its JSON Schema."""
    from perfmodel.cli.app import VERBS
    from perfmodel.verbs.schemas import KINDS, schema_of, schema_rows

    if is_command or kind not in KINDS:
        if kind not in VERBS:
            known = VERBS if is_command else (*KINDS, *VERBS)
            raise bad_field("kind", one_line(kind), f"is not known{suggest(kind, known)}", f"use {', '.join(known)}")
        content, title = command_schema(kind), f"What `perfmodel {kind}` takes (input) and prints with --json (output)"
        rows = [row for part in ("input", "output") for row in schema_rows(content[part], f"{part}.")]
    else:
        content, title = schema_of(kind), f"Fields of a {kind} file"
        rows = list(schema_rows(content))

    def blocks() -> Iterator[Block]:
        headers = ("field", "value", "required", "meaning")
        # The table has two levels of the output of a command; --json has all.
        shown = [row for row in rows if not row["field"].startswith("output.") or row["field"].count(".") <= _SHOWN_LEVELS]
        options = set(content.get("options", ()))
        cells = tuple((_indented(row["field"], options), row["value"], "yes" if row["required"] else "", row["meaning"]) for row in shown)
        yield Table(title=title, headers=headers, rows=cells, fold=("value", "meaning"))

    show(Document(content=lambda: content, blocks=blocks, rows=lambda: rows), output)


def command_schema(verb: str) -> dict[str, Any]:
    """Return the JSON Schemas of a command: `input` (arguments and options; `options` lists the options) and `output`."""
    from perfmodel.cli.app import VERBS, command_of
    from perfmodel.verbs.schemas import DRAFT, output_schema

    properties: dict[str, Any] = {}
    required, options = [], []
    for parameter in command_of(verb).params:
        kind = parameter.type_descriptor.annotation
        name = parameter.name
        if parameter.param_type_name == "option":
            name = next(spelling for spelling in parameter.opts if spelling.startswith("--"))[2:]
            options.append(name)
        value: dict[str, Any] = {"type": _TYPES.get(kind, "string") if isinstance(kind, type) else "string"}
        if parameter.multiple or parameter.nargs == -1:
            value = {"type": "array", "items": value}
        value["description"] = " ".join((getattr(parameter, "help", "") or "").split())
        if parameter.default not in (None, [], (), "") and not callable(parameter.default):
            value["default"] = to_plain(parameter.default)
        properties.setdefault(name, value)  # an argument that is also an option is described once
        if parameter.required:
            required.append(name)
    input_schema = {"$schema": DRAFT, "type": "object", "properties": properties, "required": required, "additionalProperties": False}
    described = {"command": verb, "summary": VERBS[verb][1], "options": options}
    return {**described, "input": input_schema, "output": {"$schema": DRAFT, **output_schema(verb)}}


def _indented(path: str, options: Collection[str]) -> str:
    """Return a field indented below its mapping.

    options   options of a command, written with dashes
    """
    part, _, field = path.partition(".")
    if part in ("input", "output") and field:
        path = field
    if part == "input" and field in options:
        return f"--{field}"
    above, _, name = path.replace(".*", "").rpartition(".")
    return "  " * (above.count(".") + bool(above)) + name
