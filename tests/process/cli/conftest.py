"""``paceline`` commands in the process of a test: one of their own takes a second to start."""

import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from paceline_launcher.cli import main, node, up


@pytest.fixture
def paceline(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Runs a command to its end. What it changes of this process ends with the test.

    Its output is that of its children, too, as a process of its own would have it.
    """

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["paceline", *arguments]
        monkeypatch.setattr(sys, "argv", command)
        capfd.readouterr()
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capfd.readouterr()
        return subprocess.CompletedProcess(command, int(left.value.code or 0), out, err)

    # Had it to start a fleet, that would be the fleet of this process.
    for module in (node, up):
        monkeypatch.delattr(module, "run_to_end")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    mask = os.umask(0o077)
    os.umask(mask)
    yield run
    os.umask(mask)
    resource.setrlimit(resource.RLIMIT_NOFILE, files)
