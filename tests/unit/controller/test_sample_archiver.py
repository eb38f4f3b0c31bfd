"""Sample archiver at the end of a run: what is being read is written, and nobody waits for a thread
that ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from controller.export import sample_archiver
from controller.export.sample_archiver import SampleArchiver
from paceline.config.sections.services import ArchiveConfig
from paceline.ids import Step
from paceline.observe.sample_archive import ArchiveReader, archived_steps
from paceline.payloads.store import Ref
from paceline.v1 import rollout_pb2
from tests.fixtures.ledgers import Driven


class SlowPayloads:
    """None is there, which is told once ``answer`` is set."""

    def __init__(self) -> None:
        self.answer = asyncio.Event()
        self.readers = self.most_readers = 0

    async def stream(self, refs: Sequence[Ref]) -> AsyncIterator[bytes | None]:
        self.readers += 1
        self.most_readers = max(self.most_readers, self.readers)
        await self.answer.wait()
        for _ in refs:
            yield None
        self.readers -= 1


def started(run_dir: Path, payloads: Any) -> SampleArchiver:
    archiver = SampleArchiver(
        ArchiveConfig(), run_dir, payloads, fill_texts=lambda group: None, may_write=lambda: True
    )
    archiver.start(1)
    return archiver


async def test_a_step_that_is_read_when_the_run_ends_is_archived(tmp_path: Path) -> None:
    driven = Driven()
    driven.policy("p0")
    driven.rollout("r0")
    driven.train()
    payloads = SlowPayloads()
    archiver = started(tmp_path, payloads)
    archiver.keep(driven.state, Step(1), 1.0)
    await asyncio.sleep(0)
    archiver.begin_close()
    payloads.answer.set()
    await archiver.written()
    assert not archiver._reading
    assert await asyncio.to_thread(archiver.join, 60)
    assert archived_steps(tmp_path) == {1}


async def test_a_deletion_does_not_wait_for_an_archive_that_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The payloads of a run that had ended stayed for half a minute, or for ever if its controllers
    ended."""
    monkeypatch.setattr(sample_archiver, "WRITTEN_S", 90.0)
    archiver = started(tmp_path, SlowPayloads())
    archiver.begin_close()
    assert await asyncio.to_thread(archiver.join, 60)
    async with asyncio.timeout(60):
        await archiver.written()


async def test_steps_are_read_one_after_the_other_and_never_all_at_once(tmp_path: Path) -> None:
    """A new leader archives every step since the last checkpoint: 64 steps of 100 MB would be 6 GB."""
    driven = Driven()
    driven.policy("p0")
    driven.rollout("r0")
    for _ in range(3):
        driven.train()
    payloads = SlowPayloads()
    archiver = started(tmp_path, payloads)
    await archiver.resume(driven.state, 1.0)
    await asyncio.sleep(0)
    archiver.begin_close()
    payloads.answer.set()
    await archiver.written()
    assert await asyncio.to_thread(archiver.join, 60)
    assert archived_steps(tmp_path) == {1, 2, 3}
    assert payloads.most_readers == 1


class Groups:
    """Every payload is there."""

    def __init__(self) -> None:
        self.read: list[str] = []

    async def stream(self, refs: Sequence[Ref]) -> AsyncIterator[bytes | None]:
        for task_id, _ in refs:
            self.read.append(task_id)
            yield rollout_pb2.Group(prompt_text="1+1=").SerializeToString()


async def test_steps_that_come_too_fast_keep_the_content_of_a_part_and_the_facts_of_all(
    tmp_path: Path,
) -> None:
    driven = Driven(steps=50)
    driven.policy("p0")
    driven.rollout("r0")
    for _ in range(40):
        driven.train()
    state = driven.state
    tokens = sum(task.group.tokens for task in state.tasks.records.values() if task.group)
    # Half of what the steps have, which come once a second.
    config = ArchiveConfig(read_mb_s=tokens * 12 / 40 / 2 / 2**20)
    now, payloads = [0.0], Groups()
    archiver = SampleArchiver(
        config,
        tmp_path,
        payloads,
        fill_texts=lambda group: None,
        may_write=lambda: True,
        clock=lambda: now[0],
    )
    archiver._room = 0.0  # nothing is saved up from the time before
    archiver.start(1)
    steps = sorted(state.steps.history)
    for step in steps:
        now[0] += 1.0
        archiver.keep(state, step, now[0])
        await asyncio.sleep(0)  # its share is taken now
    archiver.begin_close()
    await archiver.written()
    assert await asyncio.to_thread(archiver.join, 60)
    found = ArchiveReader(tmp_path).groups()
    assert len(found) == sum(map(len, state.steps.history.values())), "the facts of all"
    for part in (steps[:20], steps[20:]):
        groups = [group for step in part for group in state.steps.history[step]]
        assert 0.3 < len(set(payloads.read) & set(groups)) / len(groups) < 0.7
