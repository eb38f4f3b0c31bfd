"""Sample archiver: what was committed is in a file before its payloads are deleted."""

import asyncio
import gc
import tracemalloc
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow
import pytest

from controller.export.group_content import content_of
from controller.export.sample_archiver import SampleArchiver, _Step
from paceline.config.sections.services import ArchiveConfig
from paceline.ids import TaskId
from paceline.observe.samples import ArchiveReader, ArchiveWriter, archived_steps
from paceline.payloads.store import Ref
from paceline.v1 import rollout_pb2
from testbed.fleets.controllers import until
from tests.fixtures.ledgers import Driven


class Payloads:
    """``made`` of a task is what it has, which is told once ``answer`` is set."""

    def __init__(self, made: Callable[[str], rollout_pb2.Group] | None = None) -> None:
        self.made, self.answer = made, asyncio.Event()
        self.readers = self.most_readers = 0
        self.read: set[str] = set()

    async def stream(self, refs: Sequence[Ref]) -> AsyncIterator[bytes | None]:
        self.readers += 1
        self.most_readers = max(self.most_readers, self.readers)
        await self.answer.wait()
        for task_id, _ in refs:
            self.read.add(task_id)
            yield self.made(task_id).SerializeToString() if self.made else None
        self.readers -= 1


def archiver_of(run_dir: Path, payloads: Any, **named: Any) -> SampleArchiver:
    usual = {"may_write": lambda: True}
    return SampleArchiver(ArchiveConfig(), run_dir, payloads, **{**usual, **named})


@asynccontextmanager
async def running(archiver: SampleArchiver, driven: Driven) -> AsyncIterator[None]:
    chore = asyncio.create_task(archiver.run(1, driven.state, 1.0))
    await until(lambda: archiver._steps)
    yield
    chore.cancel()
    await asyncio.gather(chore, return_exceptions=True)


def trained(count: int, **settings: Any) -> Driven:
    driven = Driven.fleet("p0", "r0", **settings)
    for _ in range(count):
        driven.train()
    return driven


async def test_a_new_leader_archives_what_is_in_no_file_and_reads_it_once(tmp_path: Path) -> None:
    driven, payloads = trained(3), Payloads()
    payloads.answer.set()
    archiver = archiver_of(tmp_path, payloads)
    async with running(archiver, driven):
        await asyncio.gather(*(archiver.write() for _ in range(3)))
    assert archived_steps(tmp_path) == {1, 2, 3}
    assert payloads.most_readers == 1


async def test_a_deletion_waits_until_what_is_being_read_is_written(tmp_path: Path) -> None:
    driven, payloads = trained(1), Payloads()
    archiver = archiver_of(tmp_path, payloads)
    async with running(archiver, driven):
        first = asyncio.create_task(archiver.write())
        await until(lambda: payloads.readers)
        deletion = asyncio.create_task(archiver.write())
        await asyncio.sleep(0)
        assert not deletion.done()
        payloads.answer.set()
        await asyncio.gather(first, deletion)
        assert archived_steps(tmp_path) == {1}


async def test_a_write_that_is_cancelled_or_of_a_deposed_leader_loses_no_step(
    tmp_path: Path,
) -> None:
    driven, payloads, leads = trained(2), Payloads(), True
    archiver = archiver_of(tmp_path, payloads, may_write=lambda: leads)
    async with running(archiver, driven):
        cut = asyncio.create_task(archiver.write())
        await until(lambda: payloads.readers)
        cut.cancel()
        await asyncio.gather(cut, return_exceptions=True)
    payloads.answer.set()
    leads = False
    await archiver.write()
    assert archived_steps(tmp_path) == set()
    await archiver.write(over=True)
    assert archived_steps(tmp_path) == {1, 2}


async def test_steps_that_come_too_fast_keep_the_content_of_a_part_and_the_facts_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driven = trained(40, steps=50)
    state = driven.state
    tokens = sum(task.group.tokens for task in state.tasks.records.values() if task.group)
    now, payloads = [0.0], Payloads(lambda task_id: rollout_pb2.Group(prompt_text="1+1="))
    payloads.answer.set()
    # Half of what the steps have, which come once a second.
    monkeypatch.setattr("controller.export.sample_archiver.READ_BYTES_S", tokens * 12 / 40 / 2)
    archiver = archiver_of(tmp_path, payloads, clock=lambda: now[0])
    archiver._room, archiver._room_at = 0.0, 0.0  # nothing is saved up from the time before
    steps = sorted(state.steps.history)
    for step in steps:
        now[0] += 1.0
        archiver.keep(state, step, now[0])
    archiver._writer = ArchiveWriter(tmp_path, 1, 1 << 30)
    await archiver.write()
    found = ArchiveReader(tmp_path).groups()
    assert len(found) == sum(map(len, state.steps.history.values())), "the metadata of all"
    for part in (steps[:20], steps[20:]):
        groups = [group for step in part for group in state.steps.history[step]]
        assert 0.3 < len(payloads.read & set(groups)) / len(groups) < 0.7


@pytest.mark.parametrize(
    ("rewards", "relative"), [([0.1] * 3, [0.0] * 3), ([0.0, 0.1], [-1.0, 1.0])]
)
def test_rewards_are_told_relative_to_their_group_and_equal_ones_as_0(
    rewards: list[float], relative: list[float]
) -> None:
    """A branch has its sample's, and is no sample of its own."""
    group = rollout_pb2.Group()
    for reward in rewards:
        group.completions.add(reward=reward)
        branch = rollout_pb2.Branch(of=len(group.completions) - 1, prefix=5)
        group.completions.add(branch=branch)
    told = content_of(group.SerializeToString())["completions"]
    for kind in (told[::2], told[1::2]):
        assert [completion["relative_reward"] for completion in kind] == pytest.approx(relative)
        assert [completion["reward"] for completion in kind] == rewards
    assert [c.get("branch_of") for c in told[:4]] == [None, 0, None, 2]
    assert told[1]["shared_tokens"] == 5


def long(task_id: str) -> rollout_pb2.Group:
    group = rollout_pb2.Group(prompt_text=task_id * 50)
    for number in range(8):
        group.completions.add(text=f"{task_id} {number} " * 60, reward=number / 8)
    return group


def held_kb() -> float:
    gc.collect()
    return float(tracemalloc.get_traced_memory()[0] + pyarrow.total_allocated_bytes()) / 1024


@pytest.mark.heavy
async def test_the_archive_keeps_no_memory_of_the_steps_that_it_has_written(tmp_path: Path) -> None:
    """In kB of live objects a step, over twenty flushes after ten in which libraries fill.

    Resident memory is no measure here: it moves by tens of kB a step with the arenas.
    """
    archiver = archiver_of(tmp_path, payloads := Payloads(long))
    payloads.answer.set()
    archiver._writer = ArchiveWriter(tmp_path, 1, 8 << 20)
    count, held = 0, []
    tracemalloc.start()
    try:
        for minute in range(30):
            for step in range(60):
                ids = [TaskId(f"t{count + n}") for n in range(4)]
                count += len(ids)
                meta = {"attempt": 1, "state": "trained", "step": step}
                rows = {i: {"group_id": i, **meta} for i in ids}
                archiver._steps.append(_Step(rows, [(i, 1) for i in ids], 10_000))
            await archiver.write()
            if minute % 5 == 4:
                held.append(held_kb())
        # Something else in the process may load a library in one of the spans, a leak is in all.
        assert min(after - before for before, after in pairwise(held)) / (5 * 60) < 0.5
    finally:
        tracemalloc.stop()
