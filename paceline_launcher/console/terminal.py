"""Text for standard output, without control sequences and without cuts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

WIDE = 240


def printable(text: str) -> str:
    """``text`` with control characters escaped, except line ends and tabs."""
    return "".join(c if c in "\n\t" or c.isprintable() else repr(c)[1:-1] for c in text)


def out_console(wide: int = WIDE) -> Console:
    """As wide as the terminal; without one, wide enough that no table is cut."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=wide)
