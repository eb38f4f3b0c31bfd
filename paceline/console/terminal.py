"""What is written to standard output for people: never obeyed by a terminal, never cut without one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

WIDE = 240


def printable(text: str) -> str:
    """``text`` with what would steer a terminal made visible; line ends and tabs stay."""
    return "".join(c if c in "\n\t" or c.isprintable() else repr(c)[1:-1] for c in text)


def out_console(wide: int = WIDE) -> Console:
    """As wide as the terminal; where there is none, wide enough that no table is cut."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=wide)
