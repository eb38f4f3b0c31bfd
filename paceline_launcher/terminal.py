"""Text and tables for standard output, without control sequences and without cuts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paceline.masking import masked

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDE = 240


def printable(text: str) -> str:
    """``text`` with secrets masked and control characters escaped, except line ends and tabs."""
    return "".join(c if c in "\n\t" or c.isprintable() else repr(c)[1:-1] for c in masked(text))


def out_console(wide: int = WIDE) -> Console:
    """A console as wide as the terminal; without one, wide enough that no table is cut."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=wide)


def table(columns: str, rows: Iterable[Sequence[Any]], *, header: bool = True) -> Table:
    """A table without lines. ``columns``: titles, separated by |; one that begins with > is aligned
    to the right, one that begins with ~ is cut on a narrow terminal."""
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, pad_edge=False, header_style="dim", show_header=header)
    for title in columns.split("|"):
        made.add_column(
            title.lstrip(">~"),
            justify="right" if title.startswith(">") else "left",
            no_wrap=header and not title.startswith("~"),
            style="dim" if not header and not made.columns else "",
        )
    for row in rows:
        cells = (c if isinstance(c, Text) else Text(printable(short(c))) for c in row)
        made.add_row(*cells)
    return made


def short(value: Any) -> str:
    """A value as the cell of a table: numbers with three digits, counts with their sum."""
    if isinstance(value, Mapping) and all(isinstance(n, int) for n in value.values()):
        counts = ", ".join(f"{name} {count}" for name, count in sorted(value.items()))
        return f"{sum(value.values())} ({counts})" if counts else "0"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return "-" if value is None else str(value)
