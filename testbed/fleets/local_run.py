"""A run of a tiny model under ``paceline up``, started as a user starts it."""

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

from paceline.observe.fleet_file import FleetRecord, ProcessId
from paceline.observe.vocabulary import EventType
from testbed.nested_settings import nested_sections
from testbed.patience import Patience, patient, until
from testbed.tiny_model import make_tiny_model

ROOT = Path(__file__).resolve().parents[2]
SLOWLY = {"functions": ["testbed.rewards:digit_first_later"]}
"""A reward with which a run makes some two steps a second: what a test does to it comes before its
end."""


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
    path.write_text(tomli_w.dumps(nested_sections(settings)))
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


class Commands(RunFiles):
    """Commands that a test starts for one run, each in a session and with an output file of its
    own; ``close`` leaves nothing of them behind."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        self.started: dict[str, subprocess.Popen[bytes]] = {}

    def launch(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
    ) -> subprocess.Popen[bytes]:
        """``environment``: all of it; None: that of the test."""
        with self.output_of(name).open("ab") as out:
            self.started[name] = subprocess.Popen(
                command, stdout=out, stderr=out, cwd=cwd, env=environment, start_new_session=True
            )
        return self.started[name]

    def output_of(self, name: str) -> Path:
        return self.run_dir.parent / f"{name}.out"

    def ended(self, name: str, limit_s: float = 240.0) -> int:
        """Exit status, once it has ended; what was printed is in the failure if it takes too
        long."""
        patience = Patience(limit_s)
        while True:
            try:
                return self.started[name].wait(1.0)
            except subprocess.TimeoutExpired:
                assert patience.left(), f"{name} does not end in {limit_s} s:\n{self.said()}"

    def said(self) -> str:
        """Outputs of the commands, and the ends of all logs."""
        outputs = [self.output_of(name) for name in self.started]
        text = "".join(f"\n--- {p.name}\n{p.read_text(errors='replace')}" for p in outputs)
        return text + self.logs()

    def until(self, true: Callable[[], object], limit_s: float = 180.0) -> None:
        """Polls until ``true()``; fails if a command ends or the time runs out first."""
        until(true, limit_s, goes_on=self._check, said=self.said)

    def steps(self, more: int) -> None:
        """Waits for so many more steps."""
        goal = self.step() + more
        self.until(lambda: self.step() >= goal)

    def command(self, *arguments: str) -> str:
        """What a command of ``paceline`` about the run prints; it succeeds."""
        done = paceline(*arguments, "--run-dir", str(self.run_dir))
        assert done.returncode == 0, done.stdout + done.stderr + self.said()
        return done.stdout

    def _check(self) -> None:
        running = [p for p in self.started.values() if p.returncode is None]
        assert all(p.poll() is None for p in running), f"a command ended:\n{self.said()}"

    def assert_sound(self, status: str = "finished", steps: int | None = None) -> dict[str, Any]:
        """The run has ended, every sample is accounted for, and nothing is left running; its
        summary. A finished run has exported its model."""
        summary = self.summary()
        assert summary["status"] == status, self.said()
        assert steps in (None, summary["steps"])
        assert summary["ledger_ok"] is True, summary["ledger_problems"]
        assert summary["samples_lost"] == summary["samples_duplicated"] == 0
        assert status != "finished" or (Path(summary["export"]) / "paceline.json").is_file()
        assert self.alive() == []
        return summary

    def close(self) -> None:
        for process in self.started.values():
            # What a shell has started is in its group.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.end_all()


class Up(Commands):
    """``paceline up`` as a child process."""

    def __init__(
        self,
        config: Path,
        run_dir: Path,
        *options: str,
        environment: Mapping[str, str] | None = None,
        python: Sequence[str] = (sys.executable,),
        cwd: Path = ROOT,
    ) -> None:
        super().__init__(run_dir)
        command = [*python, "-m", "paceline_launcher", "up", str(config), "--run-dir", str(run_dir)]
        self.process = self.launch(run_dir.name, [*command, *options], environment, cwd)
        self.output = self.output_of(run_dir.name)

    def wait(self, limit_s: float = 240.0) -> int:
        """Exit status of the command."""
        return self.ended(self.run_dir.name, limit_s)

    def status(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.command("status", "--json"))
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


def paceline(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """One command, to its end."""
    return subprocess.run(
        [sys.executable, "-m", "paceline_launcher", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=patient(120),
    )
