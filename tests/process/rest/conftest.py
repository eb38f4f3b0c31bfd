"""One pair of controllers with some trained steps, for tests that read and steer them."""

import asyncio
from collections.abc import Iterator

import pytest

from testbed.fleets.controller_processes import Controllers
from testbed.fleets.controllers import running_controllers
from tests.fixtures.rest import train


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controllers]:
    directory = tmp_path_factory.mktemp("rest")
    settings = {
        "train": {"checkpoint_every": 1000, "filter_uninformative": True},
        "fleet": {"lease_ttl_s": 60.0},
        # No test of this fixture is about a change of the leader, and a busy machine stalls it for
        # seconds.
        "controller": {"leader_lease_s": 30.0},
    }
    with running_controllers(directory, 2, **settings) as controllers:
        asyncio.run(train(controllers, 8))
        yield controllers
