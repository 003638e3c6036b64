"""`perfmodel schema | mcp`: fields of input files, inputs and outputs of commands, and the commands as tools of an agent."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from perfmodel.cli import options
from perfmodel.cli.output import Output, show
from perfmodel.cli.words import argument, command
from perfmodel.foundation.errors import InputError, bad_field, one_line, suggest
from perfmodel.foundation.files import read_yaml
from perfmodel.foundation.plain import to_plain
from perfmodel.report.document import Block, Document
from perfmodel.report.table import Table

if TYPE_CHECKING:
    from mcp.server.lowlevel import Server

_SHOWN_LEVELS = 2
_TYPES: dict[Any, str] = {int: "integer", float: "number", bool: "boolean"}


@command(output=options.PLAIN_OUTPUT)
def schema(
    kind: Annotated[
        str,
        argument(
            "KIND|COMMAND",
            "chip, cluster, calibration, profile, engine, plan, rule-set, study, case, serving-case, measured-run or request; "
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
        cells = []
        for row in shown:
            *above, name = row["field"].removeprefix("input.").removeprefix("output.").replace(".*", "").split(".")
            is_option = row["field"].startswith("input.") and not above and name in content.get("options", ())
            field = f"--{name}" if is_option else "  " * len(above) + name
            cells.append((field, row["value"], "yes" if row["required"] else "", row["meaning"]))
        yield Table(title=title, headers=headers, rows=tuple(cells), fold=("value", "meaning"))

    show(Document(content=lambda: content, blocks=blocks, rows=lambda: rows), output)


@lru_cache(maxsize=64)
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


# --- tools of an agent -------------------------------------------------------------------------------------------------

_TEXTS: Final = read_yaml(Path(__file__).with_name("tools.yaml"))
TOOLS: Final[Sequence[str]] = _TEXTS["tools"]
_FORMATS: Final = ("markdown", "json", "csv")


@command()
def mcp() -> int:
    """Answer the tool calls of an agent over standard input and output (Model Context Protocol).

    An agent starts it; its configuration names the command `perfmodel mcp`. Each command that answers in one result is a tool.
    """
    try:
        import anyio
        from mcp.server.stdio import stdio_server
    except ImportError:
        raise InputError("mcp: needs the package mcp; install perfmodel[mcp]") from None

    async def answer() -> None:
        server = make_server()
        async with stdio_server() as (requests, answers):
            await server.run(requests, answers, server.create_initialization_options())

    anyio.run(answer)
    return 0


def make_server() -> Server[Any]:
    """Return the server: tools/list returns the schemas of the commands, tools/call runs a command in a separate process.

    A cancelled command is killed. Its output never reaches the stream of the protocol.
    """
    import anyio
    from mcp.server.lowlevel import Server
    from mcp_types import CallToolRequestParams, CallToolResult, ListToolsResult, PaginatedRequestParams, TextContent, Tool, ToolAnnotations

    from perfmodel import __version__

    async def list_tools(context: object, params: PaginatedRequestParams | None) -> ListToolsResult:
        closed, tools = ToolAnnotations(open_world_hint=False), []
        for verb in TOOLS:
            content = tool_schema(verb)
            tools.append(Tool(name=verb, description=content["summary"], input_schema=content["input"], annotations=closed))
        return ListToolsResult(tools=tools)

    async def call_tool(context: object, params: CallToolRequestParams) -> CallToolResult:
        given = dict(params.arguments or {})
        try:
            arguments = command_line(params.name, given)
        except InputError as error:
            return CallToolResult(content=[TextContent(text=str(error))], is_error=True)
        done = await anyio.run_process([sys.executable, "-P", "-m", "perfmodel", *arguments], check=False)
        out, err = done.stdout.decode(), done.stderr.decode()
        content = json.loads(out) if given.get("format") == "json" and out else None
        text = "\n".join(filter(None, (out.strip(), err.strip())))
        return CallToolResult(content=[TextContent(text=text)], structured_content=content, is_error=done.returncode != 0 and not out)

    return Server("perfmodel", version=__version__, instructions=_TEXTS["instructions"], on_list_tools=list_tools, on_call_tool=call_tool)


def tool_schema(verb: str) -> dict[str, Any]:
    """Return summary, options and input schema of a tool: those of the command without `left_out`."""
    content = command_schema(verb)
    properties = {name: value for name, value in content["input"]["properties"].items() if name not in _TEXTS["left_out"]}
    if "format" in properties:
        properties["format"] = {"type": "string", "enum": list(_FORMATS), "description": "Form of the result.", "default": _FORMATS[0]}
    return {**content, "input": {**content["input"], "properties": properties}}


def command_line(tool: str, given: Mapping[str, Any]) -> list[str]:
    """Return the arguments of `perfmodel` for a call.

    Options are written --name=value, so that no value is read as an option.
    Raise InputError for a tool or argument that is unknown, missing, or of the wrong type.
    """
    if tool not in TOOLS:
        raise bad_field("tool", tool, f"is not known{suggest(tool, TOOLS)}", f"use {', '.join(TOOLS)}")
    content = tool_schema(tool)
    properties, options = content["input"]["properties"], set(content["options"])
    for name in content["input"]["required"]:
        if name not in given:
            raise InputError(f"{name}: {tool} needs it; {properties[name]['description']}")
    written: list[str] = []
    positional: list[str] = []
    for name, value in ({"format": _FORMATS[0]} | dict(given)).items():
        if name not in properties:
            raise bad_field("argument", name, f"{tool} has none of this name{suggest(name, properties)}", f"use {', '.join(properties)}")
        has_negation = properties[name]["type"] == "boolean" and "default" not in properties[name]
        if value is None or (value is False and not has_negation):
            continue
        values = value if isinstance(value, list) else [value]
        if any(isinstance(entry, (list, dict)) for entry in values):
            raise bad_field(name, json.dumps(value), "must be text, a number, true or a list of these", "write it as on the command line")
        if name not in options:
            positional += [str(entry) for entry in values]
        elif isinstance(value, bool):
            written.append(f"--{name}" if value else f"--no-{name}")
        else:
            written += [f"--{name}={entry}" for entry in values]
    return [tool, *written, "--", *positional]
