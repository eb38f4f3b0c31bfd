"""Thread that writes the sample archive, behind the journal.

    step committed ──► facts of its groups ──► payloads read ──► queue ──► thread ──► Parquet file

A file is written when there is enough for it, after a minute, before payloads are deleted, and when
the term ends. A new leader archives again the steps that are in no file and that no checkpoint
covers. So the death of a leader loses at most the covered steps that it was just writing.

Memory: steps are read one after the other, and payloads in slices of at most 8 MiB (a larger group
alone), each turned into text at once. Rows that wait for the file have the text of archive.step_mb
a step.
"""

from __future__ import annotations

import asyncio
import json
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from controller.ledger.state.state import State
from controller.ledger.views.group_views import place_of
from controller.rest.replies.group_replies import FillTexts, content_of, facts_of
from paceline.config.sections.services import ArchiveConfig
from paceline.dataset.row_sampler import mix
from paceline.ids import Step, TaskId
from paceline.observe.sample_archive import ArchiveWriter, archived_steps
from paceline.payloads.store import PayloadStore
from paceline.process.structured_log import event

log = logging.getLogger(__name__)

FLUSH_S = 60.0
"""A row waits at most this long for its file."""
FLUSH_BYTES = 16 << 20
"""Text in memory from which a file is written at once."""
WRITTEN_S = 30.0
"""Longest wait of a deletion of payloads for the archive to read them, and to write them."""
SLICE, SLICE_BYTES = 64, 1 << 20
"""Payloads that are turned into text in one go, at most, and about how many bytes."""
_TOKEN_BYTES = 12
"""About what a token takes: id and log-prob in the payload, and its text."""

Rows = list[dict[str, Any]]


class SampleArchiver:
    """One term's. ``keep`` and ``drop`` return at once."""

    def __init__(
        self,
        config: ArchiveConfig,
        run_dir: Path,
        payloads: PayloadStore,
        *,
        fill_texts: FillTexts,
        may_write: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``may_write`` returns whether this process still leads."""
        self._clock = clock
        self._room, self._room_at = float(config.step_mb << 20), clock()
        """Bytes that may be read now, as of that time."""
        self._config = config
        self._run_dir = run_dir
        self._payloads = payloads
        self._fill_texts = fill_texts
        self._may_write = may_write
        self._queue: queue.SimpleQueue[Rows | threading.Event | None] = queue.SimpleQueue()
        """Rows; an event to set once those before it are written; None to end."""
        self._reading: set[asyncio.Task[None]] = set()
        self._one_step = asyncio.Lock()
        self._closing = False
        self._thread: threading.Thread | None = None

    def start(self, term: int) -> None:
        writer = ArchiveWriter(self._run_dir, term, self._config.max_mb << 20)
        self._thread = threading.Thread(
            target=self._serve, args=[writer], name="sample-archive", daemon=True
        )
        self._thread.start()

    async def resume(self, state: State, t: float) -> None:
        """Archives what earlier leaders committed and did not write, as far as it is still there."""
        done = await asyncio.to_thread(archived_steps, self._run_dir)
        for step in sorted(state.steps.history):
            if step not in done:
                self.keep(state, step, t)

    def keep(self, state: State, step: Step, t: float) -> None:
        """The groups of a step that was just committed."""
        groups = [
            facts_of(state, task, task.group, step)
            for task_id in state.steps.history.get(step, ())
            if (task := state.tasks.records.get(task_id)) is not None and task.group is not None
        ]
        if groups:
            reading = asyncio.create_task(self._read(groups, t))
            self._reading.add(reading)
            reading.add_done_callback(self._read_done)

    def drop(self, state: State, dropped: Mapping[str, Any], t: float) -> None:
        """A group that is not trained: its facts. ``dropped``: the event, as it is journalled."""
        facts = dropped.get("group")
        # An evaluation's task is of no row of the training data.
        if facts and dropped["task_id"].startswith("t"):
            epoch, row = place_of(state, dropped["task_id"])
            self._queue.put(
                [
                    {
                        **facts,
                        "epoch": epoch,
                        "dataset_row": row,
                        "group_id": dropped["task_id"],
                        "state": "dropped",
                        "reason": dropped["reason"],
                        "step": state.versions.step,
                        "t": t,
                    }
                ]
            )

    async def written(self) -> None:
        """Waits, for a limited time, until all steps so far are in files: their payloads may be
        deleted then."""
        if self._reading:
            await asyncio.wait(set(self._reading), timeout=WRITTEN_S)
        if self._closing or self._thread is None:
            # No thread takes anything from the queue any more, or yet.
            await asyncio.to_thread(self.join, WRITTEN_S)
            return
        on_disk = threading.Event()
        self._queue.put(on_disk)
        await asyncio.to_thread(on_disk.wait, WRITTEN_S)

    def begin_close(self) -> None:
        """Returns at once: what is read and what was read is written, then the thread ends."""
        self._closing = True
        if not self._reading:
            self._queue.put(None)

    def join(self, timeout_s: float) -> bool:
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def _read_done(self, reading: asyncio.Task[None]) -> None:
        self._reading.discard(reading)
        if self._closing and not self._reading:
            self._queue.put(None)

    async def _read(self, groups: Sequence[dict[str, Any]], t: float) -> None:
        size = sum(group["tokens"] for group in groups) * _TOKEN_BYTES
        share = self._take(size) / max(size, 1)
        # By number, not by size: else long completions would be missing.
        wanted = [g for g in groups if mix(int(g["group_id"][1:])) / 2**64 < share]
        refs = [(TaskId(group["group_id"]), group["attempt"]) for group in wanted]
        rows = {group["group_id"]: {**group, "t": t} for group in groups}
        async with self._one_step:
            try:
                names = [group["group_id"] for group in wanted]
                async for payloads in _slices(self._payloads.stream(refs)):
                    # A thread for each group would cost the event loop more than all else here.
                    texts = await asyncio.to_thread(
                        lambda found: [_content(p, self._fill_texts) for p in found], payloads
                    )
                    for name, text in zip(names, texts, strict=False):
                        rows[name] |= text
                    names = names[len(texts) :]
            except Exception as error:
                event(log, "samples not archived", logging.WARNING, why=str(error))
            self._queue.put(list(rows.values()))

    def _take(self, size: int) -> float:
        """How many of a step's ``size`` bytes may be read; at most archive.step_mb, and
        archive.read_mb_s on average."""
        now = self._clock()
        room = self._room + (now - self._room_at) * self._config.read_mb_s * (1 << 20)
        room = min(room, float(self._config.step_mb << 20))
        taken = min(room, float(size))
        self._room, self._room_at = room - taken, now
        return taken

    def _serve(self, writer: ArchiveWriter) -> None:
        rows: Rows = []
        size, due, failed = 0, 0.0, False
        closing = False
        while not closing:
            left = max(0.0, due - time.monotonic()) if rows else None
            asked: threading.Event | None = None
            try:
                match self._queue.get(timeout=left):
                    case None:
                        closing = True
                    case threading.Event() as asked:
                        pass
                    case more:
                        due = due if rows else time.monotonic() + FLUSH_S
                        rows += more
                        size += sum(len(row.get("completions", "")) for row in more)
            except queue.Empty:
                pass
            full = size > FLUSH_BYTES or time.monotonic() >= due
            if rows and (closing or asked is not None or full):
                failed = self._write(writer, rows, failed)
                rows, size = [], 0
            if asked is not None:
                asked.set()

    def _write(self, writer: ArchiveWriter, rows: Rows, failed: bool) -> bool:
        """Whether this write has failed or an earlier one: that is logged once, and stops nothing."""
        if not self._may_write():
            return failed
        try:
            writer.write(rows)
        except Exception as error:
            if not failed:
                event(log, "samples cannot be archived", logging.ERROR, why=str(error))
            return True
        return failed


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


def _content(payload: bytes | None, fill_texts: FillTexts) -> dict[str, str]:
    """As text at once: the objects of a minute's completions would make every garbage collection a
    pause. Empty if the payload is gone."""
    if payload is None:
        return {}
    content = content_of(payload, fill_texts)
    return {"prompt": content["prompt"], "completions": json.dumps(content["completions"])}
