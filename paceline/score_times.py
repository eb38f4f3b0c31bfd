"""Histogram of a scorer's request times, as gauges of its report: cumulative, as in Prometheus."""

import bisect
from collections.abc import Mapping

BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_BUCKET, _SUM = "request_s_le_", "request_s_sum"


class ScoreTimes:
    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._sum_s = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect.bisect_left(BOUNDS_S, seconds)] += 1
        self._sum_s += seconds

    @property
    def gauges(self) -> dict[str, float]:
        found, total = {_SUM: self._sum_s}, 0
        for bound, count in zip((*BOUNDS_S, float("inf")), self._counts, strict=True):
            total += count
            found[f"{_BUCKET}{bound:g}"] = float(total)
        return found


def histogram_of(gauges: Mapping[str, float]) -> tuple[list[tuple[str, float]], float] | None:
    """Buckets (upper bound, cumulative count) and the sum in seconds; None if ``gauges`` have
    none."""
    names = [f"{_BUCKET}{bound:g}" for bound in (*BOUNDS_S, float("inf"))]
    if _SUM not in gauges or not all(name in gauges for name in names):
        return None
    bounds = [*map(str, BOUNDS_S), "+Inf"]
    counts = [gauges[name] for name in names]
    return list(zip(bounds, counts, strict=True)), gauges[_SUM]
