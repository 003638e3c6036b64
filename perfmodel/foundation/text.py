"""Tables of cells for terminals and notebooks."""

from __future__ import annotations

from collections.abc import Sequence


def columns_text(rows: Sequence[Sequence[str]]) -> str:
    """Return a line for each row, with aligned columns separated by two blanks."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def flop_rate_text(teraflops: float) -> str:
    """Return a rate in TFLOP/s, rounded to an integer or, if small, to two digits: 423, 0.31."""
    return f"{teraflops:,.0f}" if teraflops >= 9.5 else f"{teraflops:.2g}"


def html_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an HTML table for notebooks."""
    from html import escape  # slow to load

    head = f"<tr>{''.join(f'<th>{escape(cell)}</th>' for cell in headers)}</tr>" if headers else ""
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table>{head}{body}</table>"
