"""The leader deletes stored weights that no worker can need, and no others."""

import asyncio
import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from controller import weight_sweep
from controller.weight_sweep import sweep_weights
from paceline.weights.weight_store import MANIFEST, WeightStore, prefix_of
from tests.fixtures.ledgers import Driven


def name(version: int, replica: str = "0123456789ab") -> str:
    return f"{version}-{replica}-1-{'0' * 32}"


OF_ANOTHER_WRITER = name(5, "ba9876543210")
OF_A_DEAD_WRITER = name(4, "ba9876543210")
STORED = [*(name(version) for version in (3, 4, 5, 6)), OF_A_DEAD_WRITER, OF_ANOTHER_WRITER]
NEWEST = [name(5), name(6), OF_ANOTHER_WRITER]


class Sweeping:
    """A leader of r0 and r1, and a store; version 5 is the newest that the ledger knows."""

    def __init__(self, where: Path) -> None:
        run = Driven.fleet("p0", "r0", "r1", stores_weights=True)
        run.state.versions.stored = name(5)
        self.reads = {"r0": "", "r1": ""}
        self.store = WeightStore(where.as_uri(), "run")
        self.leader: Any = SimpleNamespace(
            ledger=run.ledger,
            active=True,
            term=1,
            sessions=SimpleNamespace(of=self._session),
            group_commit=Mock(durable=AsyncMock()),
            election=Mock(renew=AsyncMock(return_value=True)),
        )

    def _session(self, worker_id: str, incarnation: int) -> Any:
        if worker_id not in self.reads:
            return None
        return SimpleNamespace(report=SimpleNamespace(stored_weights=self.reads[worker_id]))

    def left(self) -> list[str]:
        found = [self.store.first(prefix_of(stored), MANIFEST) for stored in STORED]
        return [stored for stored, data in zip(STORED, found, strict=True) if data is not None]

    async def left_after(self, limit_s: float = 60.0) -> list[str]:
        """After the first deletion, or ``limit_s``."""
        for stored in STORED:
            await asyncio.to_thread(self.store.write, prefix_of(stored), {MANIFEST: b"x"})
        swept, delete = asyncio.Event(), self.store.sweep

        async def sweep(*given: Any) -> None:
            await delete(*given)
            swept.set()

        self.store.sweep = sweep  # type: ignore[method-assign]
        running = asyncio.create_task(sweep_weights(self.leader, self.store))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(swept.wait(), limit_s)
        running.cancel()
        return await asyncio.to_thread(self.left)


@pytest.fixture
def sweeping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sweeping:
    monkeypatch.setattr(weight_sweep, "POLL_S", 0.01)
    return Sweeping(tmp_path)


async def test_older_weights_and_those_of_a_dead_writer_go(sweeping: Sweeping) -> None:
    """The successor of a writer that has just died writes the newest version again."""
    assert await sweeping.left_after() == NEWEST


async def test_weights_that_a_worker_reads_stay(sweeping: Sweeping) -> None:
    sweeping.reads["r1"] = name(3)
    assert await sweeping.left_after() == [name(3), *NEWEST]


async def test_nothing_goes_while_nobody_knows_what_a_worker_reads(sweeping: Sweeping) -> None:
    del sweeping.reads["r1"]
    assert await sweeping.left_after(0.2) == STORED


async def test_a_deposed_leader_deletes_nothing(sweeping: Sweeping) -> None:
    sweeping.leader.election.renew = AsyncMock(return_value=False)
    assert await sweeping.left_after(0.2) == STORED
