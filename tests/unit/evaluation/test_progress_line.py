"""Progress of ``paceline eval``: lines by time and by share of the work."""

from __future__ import annotations

import pytest

from paceline_launcher.cli.evaluation.evaluate import Judged
from paceline_launcher.cli.evaluation.report import LOG_S, ProgressLine


def test_a_log_gets_a_line_each_tenth_and_each_ten_seconds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    times = [0.0]
    line = ProgressLine(lambda: times[-1])
    outcome = Judged(40_000)
    shown = []
    for finished, at in (
        (1, 1.0),
        (2, LOG_S),
        (3, LOG_S + 1),
        (4000, LOG_S + 2),
        (4001, LOG_S + 3),
    ):
        times.append(at)
        outcome.failed["late"] = finished
        line(outcome)
        shown.append(capsys.readouterr().err.partition(" of ")[0])
    line.close()
    assert shown == ["", "2", "", "4000", ""]
    assert capsys.readouterr().err == ""
