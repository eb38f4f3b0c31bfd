"""A run of a tiny model under ``paceline up``, started as a user starts it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from paceline.config.schema import with_new_names
from paceline.observe.fleet_file import FleetRecord, ProcessId
from paceline.observe.vocabulary import EventType
from testbed.patience import Patience, patient, until
from testbed.tiny_model import make_tiny_model

ROOT = Path(__file__).resolve().parents[2]


def write_run(where: Path, *, rows: int = 64, **sections: dict[str, Any]) -> Path:
    """Model, data and configuration of a small run in ``where``; ``sections`` override fields.

    Returns the path of the TOML file.
    """
    make_tiny_model(where / "model", hidden=32)
    draw = random.Random(0)
    for name, count in (("train", rows), ("held_out", 8)):
        lines = []
        for _ in range(count):
            digits = "".join(draw.choices("0123456789", k=draw.randint(2, 4)))
            lines.append(json.dumps({"prompt": f"s{digits}=", "answer": "".join(sorted(digits))}))
        (where / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    settings: dict[str, dict[str, Any]] = {
        "run": {"name": "tiny"},
        "model": {"path": str(where / "model"), "device": "cpu"},
        "data": {
            "path": str(where / "train.jsonl"),
            "eval_path": str(where / "held_out.jsonl"),
            "max_prompt_tokens": 16,
        },
        "reward": {"functions": ["testbed.rewards:digit_first"], "processes": 0},
        "train": {
            "steps": 6,
            "groups_per_step": 4,
            "lr": 1e-4,
            "max_staleness": 2,
            "checkpoint_every": 3,
            "eval_every": 3,
        },
        "rollout": {"group_size": 4, "max_tokens": 8, "max_sequences": 32},
        "fleet": {"controllers": 2, "policy": 2, "rollout": 2},
    }
    for dotted, fields in sections.items():
        table = settings
        for name in dotted.split("."):
            table = table.setdefault(name, {})
        table.update(fields)
    path = where / "run.toml"
    path.write_text(tomli_w.dumps(with_new_names(settings)))
    return path


class RunFiles:
    """A run, as its directory tells of it."""

    run_dir: Path

    def homes(self) -> list[Path]:
        """Directories with a record of the processes that were started."""
        return [self.run_dir]

    def step(self) -> int:
        """Newest committed step."""
        return max((r["step"] for r in self.metrics() if r["kind"] == "step"), default=0)

    def metrics(self) -> list[dict[str, Any]]:
        return self._lines("metrics.jsonl")

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        return [e for e in self._lines("events.jsonl") if kind in (None, e["type"])]

    def _lines(self, name: str) -> list[dict[str, Any]]:
        path = self.run_dir / name
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def summary(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads((self.run_dir / "summary.json").read_text())
        return value

    def logs(self) -> str:
        """Ends of all logs."""
        found = sorted((self.run_dir / "logs").glob("*.log"))
        return "".join(f"\n--- {p.name}\n{p.read_text(errors='replace')[-3000:]}" for p in found)

    def alive(self) -> list[ProcessId]:
        """Every process of the run that still runs, Redis included."""
        records = [r for home in self.homes() if (r := FleetRecord.read(home)) is not None]
        return [one for r in records for one in (*r.survivors(), *r.redis) if one.alive()]

    def end_all(self) -> None:
        for one in self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)


class Up(RunFiles):
    """``paceline up`` as a child process; ``close`` leaves nothing of it behind."""

    def __init__(
        self,
        config: Path,
        run_dir: Path,
        *options: str,
        environment: Mapping[str, str] | None = None,
        python: Sequence[str] = (sys.executable,),
        cwd: Path = ROOT,
    ) -> None:
        self.run_dir = run_dir
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        self.output = run_dir.parent / f"{run_dir.name}.out"
        with self.output.open("ab") as out:
            self.process = subprocess.Popen(
                [
                    *(*python, "-m", "paceline_launcher", "up", str(config)),
                    *("--run-dir", str(run_dir), *options),
                ],
                stdout=out,
                stderr=out,
                cwd=cwd,
                env=environment,
                start_new_session=True,
            )

    def wait(self, limit_s: float = 240.0) -> int:
        """Exit status; what was printed is in the failure if it takes too long."""
        patience = Patience(limit_s)
        while True:
            try:
                return self.process.wait(1.0)
            except subprocess.TimeoutExpired:
                assert patience.left(), f"no end within {limit_s} s:\n{self.said()}"

    def said(self) -> str:
        return self.output.read_text(errors="replace") + self.logs()

    def until(self, true: Callable[[], object], limit_s: float = 150.0) -> None:
        """Polls until ``true()``; fails if the run ends or the time runs out first."""
        until(true, limit_s, goes_on=self._check, said=self.said)

    def _check(self) -> None:
        assert self.process.poll() is None, f"the run ended:\n{self.said()}"

    def status(self) -> dict[str, Any]:
        shown = paceline("status", "--json", "--run-dir", str(self.run_dir))
        assert shown.returncode == 0, shown.stderr + self.said()
        value: dict[str, Any] = json.loads(shown.stdout)
        return value

    def pid(self, name: str) -> int:
        """Process id of the newest process of that name."""
        record = FleetRecord.read(self.run_dir)
        assert record is not None
        return next(p for p in record.processes if p.name == name).ids[-1].pid

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.pid(name), number)

    def leader(self) -> str:
        """Name of the controller that leads."""
        return str(self.events(EventType.TERM_BEGUN)[-1]["controller_id"])

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.end_all()


def paceline(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """One command, to its end."""
    return subprocess.run(
        [sys.executable, "-m", "paceline_launcher", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=patient(120),
    )
