"""Rows of cells as people read them: in a terminal, in a notebook."""

from __future__ import annotations

from collections.abc import Sequence


def columns_text(rows: Sequence[Sequence[str]]) -> str:
    """A line for each row, its cells under those of the others, two blanks between."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def flop_rate_text(teraflops: float) -> str:
    """A rate in TFLOP/s to the whole number, a small one to two digits: 423, 0.31."""
    return f"{teraflops:,.0f}" if teraflops >= 9.5 else f"{teraflops:.2g}"


def html_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table for notebooks."""
    from html import escape  # with its tables it is slow to load

    head = f"<tr>{''.join(f'<th>{escape(cell)}</th>' for cell in headers)}</tr>" if headers else ""
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table>{head}{body}</table>"
