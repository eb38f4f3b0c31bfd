"""Plot of curves as a PNG, with matplotlib, an optional dependency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import BadInput

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class NoMatplotlib(BadInput):
    pass


def plot_curves(curves: Mapping[str, Sequence[tuple[int, float]]], metric: str, out: Path) -> None:
    """Writes ``out`` with a line for each curve of (step, value). Raises BadInput."""
    figure = new_figure((9, 5))
    axes = figure.add_subplot()
    for label, curve in curves.items():
        shown = label.replace("$", r"\$")  # no formula
        steps, values = [step for step, _ in curve], [value for _, value in curve]
        # A single value would be an invisible line.
        axes.plot(steps, values, label=shown, marker="o" if len(curve) < 3 else None, linewidth=1.4)
    axes.set_xlabel("step")
    axes.set_ylabel(metric)
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(figure, out)


def new_figure(inches: tuple[float, float]) -> Figure:
    """Without a window system, and without the global state of pyplot. Raises NoMatplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise NoMatplotlib("plotting needs matplotlib: pip install 'paceline[plot]'") from None
    figure = Figure(figsize=inches, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, out: Path) -> None:
    """Writes a PNG. Raises BadInput."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, dpi=140, format="png")
    except OSError as error:
        raise BadInput(f"--out {out}: cannot be written: {error.strerror or error}") from error
