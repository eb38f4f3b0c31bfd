"""The tutorial's page as a reader follows it: its own fenced commands, word for word, in their
order, on the tiny model.

The blocks of ``sh`` run to their end. Those marked ``background`` keep their terminal, and the next
ones run beside them.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from transformers import AutoModelForCausalLM

from testbed.fleets.local_run import ROOT, Commands
from testbed.patience import patient
from tests.fixtures.engines import needs_vllm
from tests.unit.sinks.test_sink_tensorboard import read_as_tensorboard_does

SHORT = {"steps": 6, "checkpoint_every": 2, "eval_every": 2}
"""Settings of tiny.toml for a run of a few steps, which has all that the rest of the page needs."""
PORT = 8000
"""Of the page, which is the default of `paceline serve`."""


def port_in_use() -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", PORT)) == 0


pytestmark = [pytest.mark.e2e, pytest.mark.long, needs_vllm, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Block:
    info: str
    text: str


def blocks_of(page: Path) -> list[Block]:
    found = re.findall(r"^```(\w[^\n]*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [Block(info, text) for info, text in found]


def shorten(config: Path) -> None:
    text = config.read_text()
    for name, value in SHORT.items():
        text, found = re.subn(rf"^{name} = \d+$", f"{name} = {value}", text, flags=re.MULTILINE)
        assert found == 1, f"{config} has no {name}"
    config.write_text(text)


class Reader(Commands):
    """A reader with several terminals in a directory that has the examples, as a clone of the
    repository does, but with fewer steps."""

    def __init__(self, home: Path) -> None:
        super().__init__(home / "runs" / "math")
        self.home = home
        shutil.copytree(ROOT / "examples" / "math", home / "examples" / "math")
        shorten(home / "examples" / "math" / "tiny.toml")
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        self.environment = {**os.environ, "PATH": path}

    def exports(self, block: Block) -> None:
        """Variables that a terminal sets last for the whole page."""
        for name, value in re.findall(r"^export (\w+)=(\S+)$", block.text, re.MULTILINE):
            self.environment[name] = value

    def does(self, block: Block) -> str:
        """Runs a block to its end; what it printed."""
        self.exports(block)
        words = [sys.executable, "-"] if block.info == "python" else ["bash", "-eu", "-s"]
        done = subprocess.run(
            words,
            input=block.text,
            cwd=self.home,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=patient(600),
        )
        assert done.returncode == 0, f"{block.text}{done.stdout}{done.stderr}{self.said()}"
        return done.stdout

    def starts(self, block: Block) -> subprocess.Popen[bytes]:
        """Runs a block in a terminal of its own."""
        words = ["bash", "-euc", f"exec {block.text}"]
        return self.launch(f"block-{len(self.started)}", words, self.environment, self.home)

    def output_of(self, name: str) -> Path:
        return self.home / f"{name}.out"


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    if port_in_use():
        pytest.skip(f"port {PORT} of the page is in use: end what listens there")
    one = Reader(tmp_path)
    try:
        yield one
    finally:
        one.close()


def test_the_page_leads_from_the_data_to_a_served_model(reader: Reader) -> None:
    blocks = iter(blocks_of(ROOT / "docs" / "tutorial.md"))
    run = reader.home / "runs" / "math"

    reader.does(next(blocks))
    prepared = reader.does(next(blocks))
    assert "train.jsonl: 512 rows" in prepared and "test.jsonl: 64 rows" in prepared
    assert "fits" in reader.does(next(blocks))

    training = reader.starts(next(blocks))
    metrics = run / "metrics.jsonl"
    reader.until(lambda: metrics.exists() and "\n" in metrics.read_text())
    status = reader.does(next(blocks))
    dashboard = re.search(r"http://127\.0\.0\.1:\d+", status)
    assert dashboard is not None, status
    assert "<title>" in httpx.get(dashboard.group()).text
    assert training.wait(patient(300)) == 0, reader.said()
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["ledger_ok"]) == ("finished", True)
    assert (summary["samples_lost"], summary["samples_duplicated"]) == (0, 0)
    tags = {tag for tag, _, _ in read_as_tensorboard_does(run / "tensorboard")}
    assert {"train/reward_mean", "eval/reward_mean"} <= tags

    after = reader.does(next(blocks))
    assert "finished" in after and r"\boxed{" in after
    reader.does(next(blocks))
    exported = AutoModelForCausalLM.from_pretrained(reader.home / "exported" / "math")
    assert exported.config.model_type == "qwen3"

    server = reader.starts(next(blocks))
    reader.until(healthy)
    called = reader.does(next(blocks))
    assert len(called.splitlines()) == 2 and all(r"\boxed{" in line for line in called.splitlines())
    os.killpg(server.pid, signal.SIGINT)
    assert server.wait(patient(60)) in (0, 130, -signal.SIGINT), reader.said()
    assert next(blocks, None) is None, "a block of the page is not tried"


def healthy() -> bool:
    # A request makes a TLS context, which costs more than all else here: not before somebody
    # listens.
    try:
        return port_in_use() and httpx.get(f"http://127.0.0.1:{PORT}/health").status_code == 200
    except httpx.TransportError:
        return False
