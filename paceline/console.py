"""What a person sees while a run goes on: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import deque
from typing import Protocol

from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.text import Text

from paceline.tables import fleet_table, headline, progress_table
from paceline.v1 import admin_pb2

EVENTS_SHOWN = 8
PLAIN_EVERY_S = 2.0
"""A run of fast steps prints at most one line in this time where there is no terminal."""


class Console(Protocol):
    def show(self, status: admin_pb2.StatusReply) -> None:
        """The newest state of the run."""

    def note(self, line: str) -> None:
        """Something happened."""

    def close(self) -> None: ...


def open_console(out: RichConsole | None = None) -> Console:
    """The console that fits where standard output goes."""
    out = out or RichConsole()
    return LiveConsole(out) if out.is_terminal else PlainConsole(out)


class PlainConsole:
    """A line for each event, and one for a step now and then."""

    def __init__(self, out: RichConsole) -> None:
        self._out = out
        self._began = time.monotonic()
        self._step = 0
        self._next_at = 0.0

    def show(self, status: admin_pb2.StatusReply) -> None:
        now = time.monotonic()
        last = status.step == status.total_steps
        if status.step <= self._step or (now < self._next_at and not last):
            return
        self._step, self._next_at = status.step, now + PLAIN_EVERY_S
        m = status.metrics
        self.note(
            f"step {status.step}/{status.total_steps} reward {m['reward_mean']:.3f} "
            f"loss {m['loss']:.4f} staleness {m['staleness_mean']:.2f} "
            f"{m['samples_per_s']:.0f} samples/s {m['tokens_per_s']:.0f} tokens/s"
        )

    def note(self, line: str) -> None:
        text = f"{time.monotonic() - self._began:7.1f}s  {line}"
        self._out.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        pass


class LiveConsole:
    """One table that redraws itself, with the last events under it."""

    def __init__(self, out: RichConsole) -> None:
        self._began = time.monotonic()
        self._events: deque[str] = deque(maxlen=EVENTS_SHOWN)
        self._status: admin_pb2.StatusReply | None = None
        self._live = Live(console=out, auto_refresh=False, transient=False)
        self._live.start()

    def show(self, status: admin_pb2.StatusReply) -> None:
        self._status = status
        self._draw()

    def note(self, line: str) -> None:
        elapsed = int(time.monotonic() - self._began)
        self._events.append(f"{elapsed // 60:3d}:{elapsed % 60:02d}  {line}")
        self._draw()

    def close(self) -> None:
        self._live.stop()

    def _draw(self) -> None:
        parts: list[RenderableType] = []
        status = self._status
        if status is not None:
            parts += [
                Text(headline(status), style="bold", no_wrap=True),
                ProgressBar(total=max(1, status.total_steps), completed=status.step),
                progress_table(status),
                Rule(style="dim"),
                fleet_table(status, gone=False),
                Rule(style="dim"),
            ]
        parts += [Text(line, no_wrap=True, overflow="ellipsis") for line in self._events]
        self._live.update(Group(*parts), refresh=True)
