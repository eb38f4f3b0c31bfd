"""Alerts: what is worth one, and that each arrives across leaders, slow and dead receivers."""

import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from controller.export.alert_delivery import Alert, NotDelivered, deliver
from controller.export.alerts import AlertRules, AlertThread
from paceline.config.sections.services import AlertsConfig
from paceline.observe.projection import Projection, Projector
from paceline_launcher.cli import app
from testbed.redis.external_redis import until
from tests.fakes.http_server import Answer, HttpServer


def line(kind: str, n: int, t: float = 0.0, **fields: Any) -> dict[str, Any]:
    return {"position": f"{n}-0", "n": 0, "t": t, "type": kind, "text": f"{kind} {n}", **fields}


def row(step: int, **metrics: Any) -> dict[str, Any]:
    return line("StepCommitted", step, 1e4 * step, step=step, metrics=metrics)


class Rules:
    """With a run that they look at after every line."""

    def __init__(self, **config: Any) -> None:
        self._rules = AlertRules(AlertsConfig.model_validate(config))
        self._run = Projection()

    def alerts(self, *lines: dict[str, Any]) -> list[Alert]:
        found: list[Alert] = []
        for line in lines:
            self._run.add_line(line)
            found += iter(lambda: self._rules.next(self._run, {}), None)
        return found

    def kinds(self, *lines: dict[str, Any]) -> list[str]:
        return [alert.kind for alert in self.alerts(*lines)]


def test_faults_falls_and_the_end_are_alerts_and_what_goes_as_planned_is_none() -> None:
    records = [
        line("StepCommitted", 1, step=1, severity="info"),
        line("WorkerDied", 2, severity="warning"),
        line("RunStarted", 3, spec={"eval_drop": 0.1}),
        line("EvalRecorded", 4, step=4, score=0.5),
        line("EvalRecorded", 5, step=5, score=0.1),
        line("RunFailed", 6, severity="error"),
    ]
    assert Rules().kinds(*records) == ["fault", "held_out", "end"]
    assert Rules(on=["end"]).kinds(*records) == ["end"]


def test_many_faults_at_once_are_one_alert() -> None:
    rules = Rules()
    dead = [line("WorkerDied", n, t=n, severity="warning") for n in range(100)]
    assert rules.kinds(*dead) == ["fault"]
    (later,) = rules.alerts(line("WorkerDied", 100, t=1000.0, severity="warning"))
    assert later.message("demo")["text"] == "[demo] fault: WorkerDied 100"


@pytest.mark.parametrize(
    "values", [{"loss": None}, {"grad_norm": None}, {"loss": 1.0, "update_skipped": 1.0}]
)
def test_a_step_that_is_not_finite_is_an_alert(values: dict[str, Any]) -> None:
    assert Rules().kinds(row(1, loss=0.5, grad_norm=1.0), row(2, **values)) == ["nan"]


class Receiver(HttpServer):
    """A webhook."""

    def __init__(self) -> None:
        super().__init__()
        self.url += "/secret-key"
        self.got: list[dict[str, Any]] = []
        self.status = 200
        self.open = threading.Event()
        self.open.set()

    def answer(self, asked: Any, body: bytes) -> Answer:
        self.open.wait(60)
        if self.status == 200:
            self.got.append(json.loads(body))
        return self.status, {}


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as made:
        yield made
        made.open.set()


class Run:
    def __init__(self, directory: Path, receiver: Receiver, **config: Any) -> None:
        self.directory = directory
        (directory / "webhook").write_text(receiver.url + "\n")
        values = {"webhook_file": str(directory / "webhook"), "disk_free_gb": 0.0, **config}
        self.config = AlertsConfig.model_validate(values)
        self.progress: int | None = None
        self._projector = Projector(directory, inline=True)

    def happens(self, kind: str, n: int, later_s: float = 1000.0, **fields: Any) -> None:
        told = line(kind, n, t=time.time() + later_s * n, **fields)
        self._projector.begin_ask(lambda run: run.add_line(told)).result()

    @contextmanager
    def leader(self) -> Iterator[AlertThread]:
        """A leader's time: at its end all alerts are out."""
        place = self.config, "demo", self.directory, self._projector, lambda: self.progress
        often: dict[str, Any] = {"first_pause_s": 0.01, "poll_s": 0.02}
        thread = AlertThread(*place, may_write=lambda: True, **often)
        thread.start()
        yield thread
        thread.begin_close()
        assert thread.join(60)


def test_the_next_leader_sends_what_the_last_one_did_not_and_nothing_twice(
    tmp_path: Path, receiver: Receiver
) -> None:
    run = Run(tmp_path, receiver)
    # Before alerts were set up.
    run.happens("WorkerDied", 1, -1e5, severity="warning")
    with run.leader():
        run.happens("WorkerDied", 2, severity="warning")
        until(lambda: len(receiver.got) == 1)
    run.happens("MeshBroken", 3, severity="warning")
    with run.leader():
        run.happens("RunFinished", 4, severity="info")
    told = [f"demo/{alert}/0" for alert in ("fault/2-0", "fault/3-0", "end/4-0")]
    assert [m["id"] for m in receiver.got] == told


def test_a_fall_in_the_last_evaluation_of_a_run_is_told(tmp_path: Path, receiver: Receiver) -> None:
    run = Run(tmp_path, receiver)
    run.happens("RunStarted", 1, spec={"eval_drop": 0.1})
    for n, score in (2, 0.5), (3, 0.1):
        run.happens("EvalRecorded", n, step=n, score=score)
    with run.leader() as last:
        last.begin_close("finished")
    assert [m["kind"] for m in receiver.got] == ["held_out"]


def test_a_failing_receiver_is_tried_a_few_times_and_the_next_alert_has_its_turn(
    tmp_path: Path, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, receiver)
    receiver.status = 503
    with run.leader():
        run.happens("WorkerDied", 1, severity="warning")
        until(lambda: caplog.text.count("alert not delivered") >= 5)
        receiver.status = 200
        run.happens("RunFinished", 2, severity="info")
        until(lambda: receiver.got)
    assert [m["kind"] for m in receiver.got] == ["end"]
    assert "secret-key" not in caplog.text and "answered 503" in caplog.text


def test_a_receiver_that_hangs_blocks_nobody(tmp_path: Path, receiver: Receiver) -> None:
    run = Run(tmp_path, receiver)
    receiver.open.clear()
    with run.leader() as thread:
        run.happens("WorkerDied", 1, severity="warning")
        thread.begin_close()
        assert not thread.join(0.2), "the leader goes on"
        receiver.open.set()
    assert [m["kind"] for m in receiver.got] == ["fault"]


def test_a_stall_and_a_full_disk_are_told_once_also_by_the_next_leader(
    tmp_path: Path, receiver: Receiver
) -> None:
    run = Run(tmp_path, receiver, stall_s=0.05, disk_free_gb=1e9)
    run.happens("StepCommitted", 0, step=7)
    run.progress = 7
    for number in 1, 2:
        with run.leader():
            until(lambda: len(receiver.got) == 2)
            run.happens("RunFinished", number, severity="info")
            until(lambda: any(m["kind"] == "end" for m in receiver.got))
        receiver.got = [m for m in receiver.got if m["kind"] != "end"]
    assert sorted(m["kind"] for m in receiver.got) == ["disk", "stall"]
    assert any("the last one was step 7" in m["text"] for m in receiver.got)


def test_a_disk_without_room_for_the_cursor_costs_no_alert(
    tmp_path: Path, receiver: Receiver
) -> None:
    run = Run(tmp_path, receiver)
    (tmp_path / "alerts.json").mkdir()  # cannot be replaced by a file
    for number in range(1, 4):
        run.happens(("WorkerDied", "StepFailed", "RunFailed")[number - 1], number, severity="error")
    with run.leader():
        until(lambda: "end" in {m["kind"] for m in receiver.got})
    told = [f"demo/{alert}/0" for alert in ("fault/1-0", "fault/2-0", "end/3-0")]
    assert [m["id"] for m in receiver.got] == told


def test_a_run_directory_that_is_gone_costs_no_alert(tmp_path: Path, receiver: Receiver) -> None:
    run = Run(tmp_path, receiver)
    run.directory = tmp_path / "gone"
    with run.leader():
        run.happens("WorkerDied", 1, severity="warning")
        until(lambda: receiver.got)


def test_a_command_gets_the_alert_on_its_standard_input(tmp_path: Path) -> None:
    def run(*command: str) -> None:
        deliver(AlertsConfig(command=list(command)), {"kind": "end"})

    script = f"import sys; open({str(tmp_path / 'got')!r}, 'w').write(sys.stdin.read())"
    run(sys.executable, "-c", script)
    assert json.loads((tmp_path / "got").read_text()) == {"kind": "end"}
    with pytest.raises(NotDelivered, match="status 3"):
        run(sys.executable, "-c", "exit(3)")
    with pytest.raises(NotDelivered, match="cannot be run"):
        run(str(tmp_path / "missing"))


def test_paceline_alerts_test_sends_one_and_says_what_is_wrong(
    tmp_path: Path, receiver: Receiver
) -> None:
    config = tmp_path / "run.toml"
    config.write_text('[model]\npath = "m"\n[data]\npath = "d"\nanswer_field = "a"\n')
    nobody = CliRunner().invoke(app, ["alerts", "test", str(config)])
    assert "alerts.webhook_file or alerts.command" in str(nobody.exception)
    (tmp_path / "webhook").write_text(receiver.url)
    setting = ["--set", f"alerts.webhook_file={tmp_path / 'webhook'}"]
    sent = CliRunner().invoke(app, ["alerts", "test", str(config), *setting])
    assert (sent.exit_code, sent.stdout) == (0, "delivered\n")
    assert receiver.got[0]["id"].endswith("/end/test")
    receiver.status = 403
    refused = CliRunner().invoke(app, ["alerts", "test", str(config), *setting])
    assert refused.exit_code == 1 and "the webhook answered 403" in refused.stderr


def test_a_webhook_that_speaks_no_http_has_not_taken_the_alert(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with server.accept()[0] as connection:
                connection.recv(1 << 16)
                connection.sendall(b"220 mail.example ESMTP\r\n")

        threading.Thread(target=answer, daemon=True).start()
        (tmp_path / "webhook").write_text(f"http://127.0.0.1:{server.getsockname()[1]}/")
        with pytest.raises(NotDelivered, match=r"did not answer \(BadStatusLine\)"):
            deliver(AlertsConfig(webhook_file=str(tmp_path / "webhook")), {"kind": "end"})
