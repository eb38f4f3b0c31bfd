"""Run files with some points in them, and the run as sinks know it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.config.schema import MetricsConfig
from paceline.recorder import Recorder
from paceline.sinks.base import ExternalRun


def external_run(directory: Path, **options: Any) -> ExternalRun:
    return ExternalRun(
        id="paceline-0123456789abcdef",
        name="arithmetic",
        settings={"train.lr": 1e-4, "rollout.stop": ["\n"], "data.eval_path": None},
        directory=directory,
        options=MetricsConfig(**options),
    )


class RunPoints:
    """Writes metrics.jsonl as leaders do: a step every 10 s, an evaluation after every third one."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "metrics.jsonl"
        self._recorder = Recorder(directory)
        self._directory = directory
        self._at = 1000
        self.step = self.version = 0
        self.expected: list[tuple[str, int]] = []
        """(kind, step) of every point so far."""

    def write(self, steps: int) -> None:
        for _ in range(steps):
            self.step, self.version = self.step + 1, self.version + 1
            values = {"reward_mean": self.version / 100, "time_wait_s": 0.5, "kl": float("nan")}
            self._record(
                {
                    "type": "StepCommitted",
                    "step": self.step,
                    "version": self.version,
                    "metrics": values,
                }
            )
            self.expected.append(("step", self.step))
            if self.step % 3 == 0:
                self._record(
                    {
                        "type": "EvalRecorded",
                        "step": self.step - 1,
                        "version": self.version - 1,
                        "reward_mean": 0.75,
                        "count": 8,
                    }
                )
                self.expected.append(("eval", self.step - 1))

    def roll_back(self, step: int) -> None:
        self.step, self.version = step, self.version + 1

    def hand_over(self) -> None:
        """Another leader goes on with the files."""
        self._recorder.close()
        self._recorder = Recorder(self._directory)

    def _record(self, event: dict[str, Any]) -> None:
        self._at += 10
        self._recorder.record(f"{self._at}000-0", float(self._at), event)
