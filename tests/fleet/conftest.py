"""Runs that tests start as a user does, and end if the test has not."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from testbed.fleets.local_run import Up, write_run

Start = Callable[..., Up]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts ``paceline up`` in ``tmp_path / "run"``: (options, sections of the configuration).

    The configuration is written once, so a later start goes on with that of the first one.
    """
    running: list[Up] = []

    def begin(*options: str, environment: dict[str, str] | None = None, **sections: Any) -> Up:
        config = tmp_path / "run.toml"
        if not config.exists():
            config = write_run(tmp_path, **sections)
        running.append(Up(config, tmp_path / "run", *options, environment=environment))
        return running[-1]

    yield begin
    for up in running:
        up.close()
