"""Plot of curves as a PNG, with matplotlib, an optional dependency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.errors import BadInput


class NoMatplotlib(BadInput):
    pass


def plot_curves(curves: Mapping[str, Sequence[tuple[int, float]]], metric: str, out: Path) -> None:
    """Writes ``out`` with a line for each curve of (step, value). Raises NoMatplotlib and BadInput."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise NoMatplotlib("plotting needs matplotlib: pip install 'paceline[plot]'") from None
    figure = Figure(figsize=(9, 5), layout="constrained")
    # No window system, and no global state of pyplot.
    FigureCanvasAgg(figure)
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
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, dpi=140, format="png")
    except OSError as error:
        raise BadInput(f"--out {out}: cannot be written: {error.strerror or error}") from error
