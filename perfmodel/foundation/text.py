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


def percent(share: float) -> str:
    """Return a percentage with one decimal: 43.1 %."""
    if 0 < share < 0.0005:
        return "<0.1 %"
    return f"{100 * share:.1f} %" if share < 0.9995 else f"{100 * share:.0f} %"


def facts_text(facts: Sequence[tuple[str, str]]) -> str:
    """Return the facts, one line each, with the names in one column."""
    width = max(len(name) for name, _ in facts)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in facts)
