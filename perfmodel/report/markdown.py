"""Documents and tables as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from perfmodel.report.document import Block, Command, Facts, Notes, Text
from perfmodel.report.table import Table


def markdown(blocks: Iterable[Block], *, verbose: bool = False) -> str:
    """Return the blocks of a document, separated by blank lines. Tables keep all columns at any width."""
    shown = (block for block in blocks if not (isinstance(block, Notes) and block.is_empty))
    return "\n\n".join("\n".join(_lines(block, verbose=verbose)) for block in shown) + "\n"


def markdown_table(table: Table, *, title: bool = False) -> str:
    """Return a pipe table with right-aligned numbers."""
    rule = ["---:" if header in table.right else "---" for header in table.headers]
    rows = [table.headers, tuple(rule), *table.rows]
    lines = ["| " + " | ".join(_one_line(cell.replace("|", "\\|")) or " " for cell in row) + " |" for row in rows]
    return "\n".join([*([f"**{table.title}**", ""] if title and table.title else []), *lines])


def _lines(block: Block, *, verbose: bool) -> Iterator[str]:
    if isinstance(block, Table):
        yield from (block.caption, "") if block.caption else ()
        yield markdown_table(block, title=True)
    elif isinstance(block, Facts):
        yield f"**{_one_line(block.title)}**"
        yield ""
        for name, value in block.facts:
            yield f"- {name}: {_one_line(value)}" if name else f"  {_one_line(value)}"
    elif isinstance(block, Notes):
        shown, left_out = block.shown(verbose=verbose)
        yield from (f"- note: {_one_line(note)}" for note in shown)
        yield from (f"- {left_out} more note{'s' * (left_out > 1)}: --verbose",) if left_out else ()
    elif isinstance(block, Command):
        yield from ("```sh", block.command, "```")
    else:
        assert isinstance(block, Text)
        yield block.text.strip("\n")


def _one_line(text: str) -> str:
    return " ".join(text.split())
