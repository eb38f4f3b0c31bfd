"""Chore that writes the sample archive, behind the journal.

    step committed ──► metadata of its groups ──► queue ──► payloads, texts ──► Parquet file

Steps are written once a minute, if there is enough for a file, and before payloads are deleted:
together, because a step at a time would cost the leader more than all its other exports. A new
leader archives again the steps that are in no file and that no checkpoint covers. So the death of a
leader loses at most the covered steps that it was just writing.

Memory: steps are read until their text fills a file, payloads in slices that are turned into text
at once.
"""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from controller.export.group_content import content_of, meta_of
from controller.ledger.state.state import State
from controller.ledger.state.tasks import ordinal_of
from paceline.config.sections.services import ArchiveConfig
from paceline.dataset.data_order import mix
from paceline.ids import Step, TaskId
from paceline.observe.samples import ArchiveWriter, archived_steps
from paceline.payloads.store import PayloadStore, Ref
from paceline.process.structured_log import event

log = logging.getLogger(__name__)

T = TypeVar("T")

FLUSH_S = 60.0  # a step waits at most this long for its file
FLUSH_BYTES = 16 << 20  # content that fills a file
STEP_BYTES, READ_BYTES_S = 64 << 20, 1 << 20
"""Payloads that are read of one step, and a second on average: reading all would slow down a leader
that commits steps as fast as it can."""
SLICE, SLICE_BYTES = 64, 1 << 20
"""Payloads that are turned into text in one go, at most, and about how many bytes."""
_TOKEN_BYTES = 12  # about what a token takes: id and log-prob in the payload, and its text


@dataclass(frozen=True, slots=True)
class _Step:
    rows: dict[str, dict[str, Any]]  # metadata by group id
    wanted: list[Ref]  # groups whose content is archived too
    size: int  # bytes of that, about


class SampleArchiver:
    """Archiver of one term. ``keep`` and ``drop`` return at once."""

    def __init__(
        self,
        config: ArchiveConfig,
        run_dir: Path,
        payloads: PayloadStore,
        *,
        may_write: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._room, self._room_at = float(STEP_BYTES), clock()
        """Bytes that may be read now, as of that time."""
        self._config = config
        self._run_dir = run_dir
        self._payloads = payloads
        self._may_write = may_write
        self._steps: list[_Step] = []  # steps, and dropped groups, that are in no file yet
        self._writing = asyncio.Lock()
        self._writer: ArchiveWriter | None = None
        self._full = asyncio.Event()
        self._failed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="archive")

    def _in_thread(self, work: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        """One thread of its own: the allocator keeps an arena for each thread, and a minute's
        content passed through those of all others, which kept its size."""
        return asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    async def run(self, term: int, state: State, t: float) -> None:
        """Archives what earlier leaders committed and did not write, as far as it is still there,
        and then what comes, until cancelled."""
        max_bytes = self._config.max_mb << 20
        self._writer = await self._in_thread(ArchiveWriter, self._run_dir, term, max_bytes)
        done = await self._in_thread(archived_steps, self._run_dir)
        for step in sorted(state.steps.history):
            if step not in done:
                self.keep(state, step, t)
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._full.wait(), FLUSH_S)
            self._full.clear()
            await self.write()

    def keep(self, state: State, step: Step, t: float) -> None:
        rows = {
            str(task_id): {**meta_of(state, task, task.group, step), "t": t}
            for task_id in state.steps.history.get(step, ())
            if (task := state.tasks.records.get(task_id)) is not None and task.group is not None
        }
        size = sum(row["tokens"] for row in rows.values()) * _TOKEN_BYTES
        share = self._take(size) / max(size, 1)
        # By number, not by size: else long completions would be missing.
        wanted = [name for name in rows if mix(int(name[1:])) / 2**64 < share]
        refs = [(TaskId(name), rows[name]["attempt"]) for name in wanted]
        if rows:
            self._steps.append(_Step(rows, refs, round(size * share)))
        if sum(step.size for step in self._steps) > FLUSH_BYTES:
            self._full.set()

    def drop(self, state: State, dropped: Mapping[str, Any], t: float) -> None:
        """Takes the metadata of a group that is not trained. ``dropped``: the journalled event."""
        meta, task_id = dropped.get("group"), dropped["task_id"]
        # An evaluation's task is of no row of the training data.
        if not meta or not task_id.startswith("t"):
            return
        dataset_pass, row = state.run.order.place(ordinal_of(task_id))
        about = {"group_id": task_id, "epoch": dataset_pass, "dataset_row": row, "t": t}
        about |= {
            "state": "dropped",
            "reason": dropped["reason"],
            "step": state.versions.step or None,
        }
        self._steps.append(_Step({task_id: {**meta, **about}}, [], 0))

    async def write(self, *, over: bool = False) -> None:
        """Writes all that has come so far, if this process still leads or the run is ``over``: its
        payloads may be deleted then. What a cancelled call did not write is written by the next."""
        async with self._writing:
            while self._steps and self._writer is not None and (over or self._may_write()):
                size = count = 0
                while count < len(self._steps) and size <= FLUSH_BYTES:
                    size += self._steps[count].size
                    count += 1
                steps = self._steps[:count]
                await self._fill(steps)
                rows = [row for step in steps for row in step.rows.values()]
                try:
                    await self._in_thread(self._writer.write, rows)
                except Exception as error:  # logged once, and it stops nothing
                    if not self._failed:
                        event(log, "samples cannot be archived", logging.ERROR, why=str(error))
                    self._failed = True
                del self._steps[:count]

    async def _fill(self, steps: Sequence[_Step]) -> None:
        wanted = [(step.rows[ref[0]], ref) for step in steps for ref in step.wanted]
        rows = iter([row for row, _ in wanted])
        try:
            async for payloads in _slices(self._payloads.stream([ref for _, ref in wanted])):
                # A thread for each group would cost the event loop more than all else here.
                for content in await self._in_thread(self._contents, payloads):
                    next(rows).update(content)
        except Exception as error:
            event(log, "samples not archived", logging.WARNING, why=str(error))

    def _contents(self, payloads: list[bytes | None]) -> list[dict[str, str]]:
        """Content as text at once: the objects of a minute's completions would make every garbage
        collection a pause. Empty if the payload is gone."""
        found = (content_of(p) if p else None for p in payloads)
        return [c | {"completions": json.dumps(c["completions"])} if c else {} for c in found]

    def _take(self, size: int) -> float:
        """Bytes of a step's ``size`` that may be read."""
        now = self._clock()
        room = min(self._room + (now - self._room_at) * READ_BYTES_S, float(STEP_BYTES))
        taken = min(room, float(size))
        self._room, self._room_at = room - taken, now
        return taken


async def _slices(payloads: AsyncIterator[bytes | None]) -> AsyncIterator[list[bytes | None]]:
    """Lists of a few payloads each, in their order."""
    found: list[bytes | None] = []
    async for payload in payloads:
        found.append(payload)
        if len(found) == SLICE or sum(len(p or b"") for p in found) >= SLICE_BYTES:
            yield found
            found = []
    if found:
        yield found
