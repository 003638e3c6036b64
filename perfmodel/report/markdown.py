"""Tables as Markdown."""

from __future__ import annotations

from perfmodel.report.table import Table


def markdown_table(table: Table, *, title: bool = False) -> str:
    """A pipe table; numbers to the right."""
    rule = ["---:" if header in table.right else "---" for header in table.headers]
    rows = [table.headers, tuple(rule), *table.rows]
    lines = ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row in rows]
    return "\n".join([*([f"**{table.title}**", ""] if title and table.title else []), *lines])


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split()) or " "
