"""End of a run: exports its newest checkpoint as a model, and writes summary.json."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.config.schema import Config
from paceline.errors import in_words
from paceline.observe.projection import Projection
from paceline.observe.run_watcher import leader_status
from paceline.observe.runs import summarise, write_summary
from paceline.redis.server import embedded_pid, ensure_redis
from paceline.rpc.client import ControlPlane, ControlPlaneUnavailable
from paceline_launcher.launch.exports import EXPORT_LOG, export_checkpoint, export_while_it_runs


async def export_newest(
    config: Config,
    run_dir: Path,
    note: Callable[[str], None],
    give_up: asyncio.Future[None] | None = None,
) -> Path | None:
    """The Hugging Face directory. None if there is no checkpoint, or it was not exported."""
    checkpoints = Projection.read(run_dir).checkpoints.saved
    if not checkpoints:
        note("no checkpoint to export")
        return None
    checkpoint, out = checkpoints[-1].path, run_dir / "export"
    note(f"exporting {checkpoint}: torch is loaded, and the model written (log: {EXPORT_LOG})")
    if not await export_checkpoint(config, run_dir, checkpoint, out, give_up):
        return None
    note(f"exported the model to {out}; verifying the journal")
    return out


async def close_books(
    config: Config,
    run_dir: Path,
    note: Callable[[str], None],
    *,
    status: str,
    reason: str,
    redis_url: str,
    wall_s: float | None = None,
    give_up: asyncio.Future[None] | None = None,
) -> dict[str, Any]:
    """Exports the newest checkpoint of a run that has finished, and writes summary.json. Returns
    the summary. A run without its export, as on a full disk, has finished all the same: its reason
    says how to export it. ``redis_url``: of the journal, or empty if that cannot be replayed.
    ``wall_s``: default, as the run's files tell."""
    export = None
    if status == "finished":
        trouble = f"see {run_dir / EXPORT_LOG}"
        try:
            export = await export_newest(config, run_dir, note, give_up)
        except OSError as error:
            trouble = in_words(error, run_dir)
        if export is None:
            note(f"error: the model is not exported: {trouble}")
            again = f"paceline export {run_dir} --out {run_dir / 'export'}"
            reason = f"{reason}, and not exported ({trouble}): run {again}"
    replayed = await asyncio.to_thread(replay, redis_url, config.run.name)
    records = Projection.read(run_dir)
    summary = summarise(
        records,
        status=status,
        reason=reason,
        wall_s=records.took_s if wall_s is None else wall_s,
        group_size=config.rollout.group_size,
        export=str(export) if export else None,
        **replayed,
    )
    try:
        write_summary(run_dir, summary)
    except OSError as error:
        # It takes nothing from how the run has ended.
        note(f"error: summary.json is not written: {in_words(error, run_dir)}")
    return summary


def exit_status(summary: Mapping[str, Any]) -> int:
    """0 if the run has finished and its model is exported, 130 if it was interrupted, else 1."""
    done = summary["status"] == "finished" and summary["export"]
    return 0 if done else 130 if summary["status"] == "interrupted" else 1


def replay(redis_url: str, run_id: str) -> dict[str, Any]:
    """``counts``, ``problems`` and ``faults`` of the replayed journal, for the summary; empty if it
    cannot be read. Blocks."""
    from controller.store.journal_audit import verify

    try:
        report = verify(redis_url, run_id)
    except Exception:  # the summary must not fail with the accounting
        return {}
    return {name: getattr(report, name) for name in ("counts", "problems", "faults")}


POLL_S = 1.0
ASK_LIMIT_S = 5.0
FILES_S = 30.0
"""How long files that the leader has written may take to be seen on a shared file system."""
GONE = ("dead", "stopped")


@dataclass(frozen=True, slots=True)
class RunWait:
    """Wait for the end of a run whose processes a scheduler started, with what `paceline up` leaves
    at its end. It starts and ends none of the run's processes, and may be ended and started again
    at any time."""

    config: Config
    run_dir: Path
    control: ControlPlane
    note: Callable[[str], None]
    extends_to: int = 0  # the run was finished, and is given more steps

    async def end(self) -> dict[str, Any]:
        """The summary of the run, once it has ended. Raises RequestRefused if controllers refuse to
        answer."""
        exporting = asyncio.create_task(export_while_it_runs(self.config, self.run_dir, self.note))
        try:
            status, reason = await self._ended()
        finally:
            exporting.cancel()
        self.note(f"the run has {status}")
        with contextlib.suppress(ControlPlaneUnavailable):  # the controllers end with the run
            await self._wait("not all workers have left", self.config.fleet.finish_s, self._left)

        async def told() -> bool:
            return Projection.read(self.run_dir).status == status

        # Controllers write the files, perhaps on another machine and to another --run-dir.
        await self._wait(f"{self.run_dir} does not tell of the end of the run", FILES_S, told)
        redis = self.config.redis
        known = redis.url is not None or embedded_pid(self.run_dir) is not None
        return await close_books(
            self.config,
            self.run_dir,
            self.note,
            status=status,
            reason=reason,
            redis_url=ensure_redis(self.run_dir, redis).url if known else "",
        )

    async def _ended(self) -> tuple[str, str]:
        """(status, reason) of the run that has ended. An election, or controllers that start, are
        waited out."""
        silent = False
        while True:
            try:
                status = await leader_status(self.control, ASK_LIMIT_S)
            except ControlPlaneUnavailable as error:
                if not silent:
                    self.note(f"waiting for a controller: {error}")
                silent = True
                # Its controllers may have ended with it before anybody waited. A failed run may be
                # going on again.
                end = Projection.read(self.run_dir)
                if end.status == "finished" and not self.extends_to:
                    return end.status, end.reason
            else:
                silent = False
                # At first the journal of an extended run tells of its earlier end.
                if status.phase in ("finished", "failed") and status.total_steps >= self.extends_to:
                    return str(status.phase), str(status.reason)
            await asyncio.sleep(POLL_S)

    async def _left(self) -> bool:
        """True once all workers have left, which write the last checkpoint."""
        status = await leader_status(self.control, ASK_LIMIT_S)
        return all(worker.state in GONE for worker in status.workers)

    async def _wait(
        self, otherwise: str, limit_s: float, done: Callable[[], Awaitable[bool]]
    ) -> None:
        try:
            async with asyncio.timeout(limit_s):
                # Another process does it, perhaps on another machine.
                while not await done():  # noqa: ASYNC110
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            self.note(f"{otherwise} within {limit_s:g} s")
