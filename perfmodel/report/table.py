"""Tables as plain text cells, and the formats of their numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from perfmodel.foundation.text import percent


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of text cells.

    caption    sentence below the title
    right      headers of right-aligned (numeric) columns
    fold       headers of columns whose text may wrap
    optional   headers of columns omitted on a narrow page, in this order; `--wide` shows them
    """

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: tuple[str, ...] = ()
    fold: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    caption: str = ""


def table_of(title: str, columns: str, rows: Iterable[Sequence[str]], *, caption: str = "") -> Table:
    """Return a table of rows of cells.

    columns   headers with ` | ` between them; `>` before a header: its cells are right-aligned, `~`: they may wrap, `?`: its column is
              omitted on a narrow page, the first of several at first
    """
    marks: dict[str, list[str]] = {mark: [] for mark in ">~?"}
    headers = []
    for column in columns.split(" | "):
        header = column.lstrip(">~?")
        headers.append(header)
        for mark in column.removesuffix(header):
            marks[mark].append(header)
    right, fold, optional = map(tuple, marks.values())
    cells = tuple(tuple(row) for row in rows)
    return Table(title=title, headers=tuple(headers), rows=cells, right=right, fold=fold, optional=optional, caption=caption)


def table_of_rows(
    title: str,
    rows: Sequence[Mapping[str, str]],
    *,
    right: tuple[str, ...] = (),
    fold: tuple[str, ...] = (),
    optional: tuple[str, ...] = (),
    caption: str = "",
) -> Table:
    """Return a table of rows that name their columns: header -> cell. All rows have the headers of the first."""
    headers, cells = tuple(rows[0]) if rows else (), tuple(tuple(row.values()) for row in rows)
    return Table(title=title, headers=headers, rows=cells, right=right, fold=fold, optional=optional, caption=caption)


def without_empty(table: Table) -> Table:
    """Return the table without columns that have no text in any row, such as the requests in flight of plans under a rate."""
    kept = [at for at in range(len(table.headers)) if not table.rows or any(row[at] for row in table.rows)]
    headers, *rows = (tuple(cells[at] for at in kept) for cells in (table.headers, *table.rows))
    return replace(table, headers=headers, rows=tuple(rows))


def shares_table(
    title: str, headers: tuple[str, str], values: Mapping[str, float], total: float, text: Callable[[float], str], last: tuple[str, ...]
) -> Table:
    """Return positive values and their shares of a total, largest first. last: final row."""
    shown = sorted(((name, value) for name, value in values.items() if value > 0), key=lambda item: -item[1])
    rows = [(words(name), text(value), percent(value / total), bar(value / total)) for name, value in shown]
    return Table(title=title, headers=(*headers, "share", ""), rows=(*rows, last), right=(headers[1], "share"))


def bar(share: float, width: int = 20) -> str:
    """Return a bar of `share` times `width` characters, at least one for a positive share."""
    filled = round(min(share, 1.0) * width)
    return "#" * (filled or (1 if share > 0 else 0))


def times_like(reference: float) -> Callable[[float], str]:
    """Return the format of the times of a column, in the unit and with the decimals of the reference (four digits)."""
    scale, unit = next(((1.0 / size, unit) for size, unit in ((1.0, "s"), (1e-3, "ms")) if reference >= size), (1e6, "us"))
    return _like(reference, scale, unit)


def bytes_like(reference: float) -> Callable[[float], str]:
    """Return the format of the sizes of a column, in the unit and with the decimals of the reference (four digits)."""
    scale, unit = next(((1.0 / size, unit) for size, unit in ((2.0**30, "GiB"), (2.0**20, "MiB")) if reference >= size), (2.0**-10, "KiB"))
    return _like(reference, scale, unit)


def _like(reference: float, scale: float, unit: str) -> Callable[[float], str]:
    shown = reference * scale
    digits = 2 if shown < 100 else 1 if shown < 1000 else 0

    def text(value: float) -> str:
        least = 0.5 * 10.0**-digits
        return f"<{2 * least:.{digits}f} {unit}" if 0 < value * scale < least else f"{value * scale:,.{digits}f} {unit}"

    return text


def rate(per_second: float) -> str:
    """Return a rate, with one decimal below ten."""
    return f"{per_second:,.0f}" if per_second >= 9.95 else f"{per_second:,.1f}"


def words(name: str) -> str:
    """Return the display name of a step-time part or memory class."""
    return name.replace("_", " ")
