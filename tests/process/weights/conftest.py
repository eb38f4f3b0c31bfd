"""Ends of weights links in processes of their own."""

import signal
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from testbed.workers import weight_link_peer
from tests.fixtures.forked import WITH_TORCH, forking

StartPeer = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start_peer(
    url: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[StartPeer]:
    """Starts one, as ``weight_link_peer.start`` does, that ends with the test even if stopped."""
    monkeypatch.setattr(weight_link_peer, "subprocess", forking(WITH_TORCH))
    started: list[subprocess.Popen[str]] = []

    def start(part: str, epoch: int, **options: Any) -> subprocess.Popen[str]:
        started.append(weight_link_peer.start(part, url, request.node.name, epoch, **options))
        return started[-1]

    yield start
    for process in started:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()
