"""Live view of a run: a table on a terminal, plain lines otherwise."""

import time
from collections import deque
from collections.abc import Iterable, Mapping

from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.text import Text

from paceline.observe.progress import WIDTH, Progress, duration
from paceline.v1 import admin_pb2
from paceline_launcher.console.status_tables import fleet_table, headline, progress_table
from paceline_launcher.console.terminal import printable

EVENTS_SHOWN = 8
LEAST_PROCESSES = 2
AROUND_BARS = 48
"""Columns for the rest of the line: its name, the range of rewards and the time left."""
PLAIN_EVERY_S = 2.0  # shortest interval between two lines about steps, without a terminal


class PlainConsole:
    """Plain lines: each event, and a line about the newest step every few seconds."""

    private = False  # a log may be written from what is shown: no token belongs there

    def __init__(self, out: RichConsole, progress: Progress | None = None) -> None:
        self._out = out
        self._progress = progress or Progress()
        self._began = time.monotonic()
        self._step = 0
        self._next_at = 0.0

    def show(self, status: admin_pb2.StatusReply) -> None:
        self._progress.observe(status)
        now = time.monotonic()
        last = status.step == status.total_steps
        if status.step <= self._step or (now < self._next_at and not last):
            return
        self._step, self._next_at = status.step, now + PLAIN_EVERY_S
        m = status.metrics
        left = self._progress.seconds_left(int(status.step), int(status.total_steps))
        self.note(
            f"step {status.step}/{status.total_steps} {_learning(m)} "
            f"{m['samples_per_s']:.0f} samples/s {m['tokens_per_s']:.0f} tokens/s"
            + (f", {duration(left)} left" if left else "")
        )

    def note(self, line: str, t: float | None = None) -> None:
        """Takes an event at ``t`` (Unix seconds), or now."""
        when = f"{time.monotonic() - self._began:7.1f}s" if t is None else _clock(t)
        self._out.print(f"{when}  {printable(line)}", markup=False, highlight=False, soft_wrap=True)

    keep = note  # of a line that must stay in sight

    def close(self) -> None:
        pass


class LiveConsole:
    """A table that redraws itself, with the last events below it."""

    private = True  # only the person at the terminal sees it

    def __init__(self, out: RichConsole, progress: Progress) -> None:
        self._progress = progress
        self._events: deque[tuple[float, str]] = deque(maxlen=EVENTS_SHOWN)
        self._status: admin_pb2.StatusReply | None = None
        self._live = Live(console=out, auto_refresh=False, transient=False)
        self._live.start()

    def show(self, status: admin_pb2.StatusReply) -> None:
        self._progress.observe(status)
        self._status = status
        self._draw()

    def note(self, line: str, t: float | None = None) -> None:
        self._events.append((time.time() if t is None else t, line))
        self._draw()

    def keep(self, line: str) -> None:
        # Above the view, whole: a terminal cannot follow an address that is cut.
        self._live.console.print(printable(line), markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._live.stop()

    def _draw(self) -> None:
        drawn = fitted(self._live.console, self._status, self._progress, list(self._events))
        self._live.update(drawn, refresh=True)


Console = PlainConsole | LiveConsole


def open_console(out: RichConsole | None = None, progress: Progress | None = None) -> Console:
    out, progress = out or RichConsole(), progress or Progress()
    # A dumb terminal cannot redraw: rich would show nothing before the end.
    live = out.is_terminal and not out.is_dumb_terminal
    return LiveConsole(out, progress) if live else PlainConsole(out, progress)


def fitted(
    out: RichConsole,
    status: admin_pb2.StatusReply | None,
    progress: Progress,
    events: list[tuple[float, str]],
) -> Group:
    """The view with fewer events, then with fewer processes, until it fits the terminal."""
    room = out.size.height
    most = min(room, len(status.controllers) + len(status.workers)) if status is not None else 0
    while True:
        drawn = picture(status, progress, events, most, out.size.width)
        over = len(out.render_lines(drawn, pad=False)) - room
        if over <= 0 or (len(events) <= 1 and most <= LEAST_PROCESSES):
            return drawn
        fewer = min(over, max(0, len(events) - 1))
        events = events[fewer:]
        if not fewer:
            most = max(LEAST_PROCESSES, most - over)


def picture(
    status: admin_pb2.StatusReply | None,
    progress: Progress,
    events: Iterable[tuple[float, str]],
    processes: int | None = None,
    width: int = 150,
) -> Group:
    """The whole view, with at most ``processes`` lines for processes, in ``width`` columns."""
    parts: list[RenderableType] = []
    if status is not None:
        learning = Text.assemble(
            ("learning ", "dim"),
            progress.line(status, max(8, min(WIDTH, width - AROUND_BARS))),
            no_wrap=True,
        )
        parts += [
            Text(headline(status), style="bold", no_wrap=True),
            ProgressBar(total=max(1, status.total_steps), completed=status.step),
            Text(""),  # the bar does not end its line: the next one would be cut off
            learning,
            progress_table(status),
            Rule(style="dim"),
            fleet_table(status, gone=False, most=processes),
            Rule(style="dim"),
        ]
    last = list(events)
    for t, line in last:
        newest = (t, line) == last[-1]
        shown = f"{_clock(t)}  {printable(line)}"
        shown += f"  ({duration(max(0.0, time.time() - t))} ago)" if newest else ""
        parts.append(Text(shown, style="bold" if newest else "", no_wrap=True, overflow="ellipsis"))
    return Group(*parts)


def _learning(m: Mapping[str, float]) -> str:
    loss = f"loss {m['loss']:.4f}"
    if "reward_mean" not in m:
        return loss
    return f"reward {m['reward_mean']:.3f} {loss} staleness {m['staleness_mean']:.2f}"


def _clock(t: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(t))
