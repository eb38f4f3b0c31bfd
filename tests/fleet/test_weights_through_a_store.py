"""A fleet whose trainers and rollout workers have no route to each other trains, with weights
through S3, and survives the loss of the replica that writes them."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import fsspec
import pytest

from testbed.faults.network_namespaces import HUB, why_not
from testbed.fleets.namespaced_fleet import NamespacedFleet
from tests.fixtures.object_stores import s3_server

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.timeout(600),
]

TRAINERS, WORKERS = ("policy-0", "policy-1"), ("rollout-0", "rollout-1")


class DataCentres(NamespacedFleet):
    """Trainers in one, rollout workers in another: each reaches the controllers, Redis and S3."""

    def _start(self, where: Path) -> None:
        for trainer in TRAINERS:
            self.part(trainer, *WORKERS)
        self._store = ExitStack()
        self._store.enter_context(s3_server(self.hosts.address[HUB]))
        super()._start(where)

    def write_config(self, where: Path, **sections: Any) -> Path:
        return super().write_config(where, weights={"url": "s3://bucket/weights"}, **sections)

    def close(self) -> None:
        super().close()
        self._store.close()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[DataCentres]:
    made = DataCentres(tmp_path)
    try:
        yield made
    finally:
        made.close()


def stored_versions() -> set[int]:
    files = fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False)
    names = [path.rpartition("/")[2] for path in files.find("bucket/weights")]
    return {int(name.partition("-")[0]) for name in names if name[0].isdigit()}


def test_rollouts_in_another_data_centre_follow_the_weights(fleet: DataCentres) -> None:
    fleet.settled()
    at = fleet.mark()
    _, stored, at = fleet.first(lambda e: e["type"] == "WeightsStored", at)
    writer = str(stored["worker_id"])
    fleet.steps(5)
    fleet.hosts.cut(writer)
    fleet.first(lambda e: e["type"] == "WeightsStored" and e["worker_id"] != writer, at)
    fleet.steps(5)
    fleet.until(lambda: len(stored_versions()) <= 3, 60.0)
    fleet.hosts.mend(writer)
    fleet.settled()
    fleet.assert_sound()
