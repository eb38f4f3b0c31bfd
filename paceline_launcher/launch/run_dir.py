"""Run directory: its lock, its clearing, and the processes that a killed launcher left behind."""

import contextlib
import fcntl
import os
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from paceline.config.schema import Config
from paceline.errors import BadInput, in_words
from paceline.observe.fleet_file import FleetRecord, ProcessId
from paceline.process.files import new_private_directory

OWN_ENTRIES = (
    *("redis", "controllers", "logs", "checkpoints", "export", "samples"),
    *("sockets", "sockets.path"),
    *("tensorboard", "wandb", "mlflow"),
    *("events.jsonl", "metrics.jsonl", "summary.json", "fleet.json", "config.toml", "alerts.json"),
)
"""Entries that a run makes in its directory; nothing else in there is ever removed."""
STAGES = (signal.SIGTERM, 4.0), (signal.SIGTERM, 6.0), (signal.SIGKILL, 0.0)
"""Signals, and the seconds after each in which a process may end by itself."""
POLL_S = 0.05


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Makes ``run_dir`` and locks it: one launcher at a time. Raises BadInput."""
    try:
        new_private_directory(run_dir)
        lock = (run_dir / "supervisor.lock").open("a+")
    except OSError as error:
        raise BadInput(f"--run-dir: it cannot be written: {in_words(error, run_dir)}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BadInput(
                f"{run_dir} is in use by another `paceline up` or `paceline node`, of which a node "
                f"runs one (torchrun --nproc-per-node 1). Look at it with `paceline status "
                f"--run-dir {run_dir}`, or choose another --run-dir"
            ) from None
        yield


def clear(config: Config, run_dir: Path) -> None:
    """Removes an earlier run with everything it made (``--fresh``). Raises BadInput."""
    from paceline.redis.client import connect_sync
    from paceline.redis.server import stop_redis

    end_leftovers(run_dir)
    check_no_leader(config)
    stop_redis(run_dir)
    for name in OWN_ENTRIES:
        path = run_dir / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    if config.redis.url is not None:
        with connect_sync(config.redis.url) as client:
            for key in client.scan_iter(match=f"paceline:{config.run.name}:*", count=1000):
                client.unlink(key)


def check_no_leader(config: Config) -> None:
    """Raises BadInput if a fleet of another run directory leads the run in ``redis.url``: two
    fleets of one run would replace each other's workers in turn."""
    from paceline.redis.leader_lease import living_leader

    if config.redis.url is None:
        return
    leader = living_leader(config.redis.url, config.run.name)
    if leader is not None:
        raise BadInput(
            f"run {config.run.name!r} in redis.url is led by {leader.controller_id} at "
            f"{leader.address} (pid {leader.pid} on {leader.host}): another fleet runs it. Choose "
            "another run.name, or stop that fleet first"
        )


def end_leftovers(run_dir: Path) -> list[ProcessId]:
    """Ends exactly the processes that a killed launcher left behind, and returns them."""
    record = FleetRecord.read(run_dir)
    left = record.survivors() if record else []
    end_processes(left)
    return left


def end_processes(left: Sequence[ProcessId]) -> None:
    """SIGTERM, once more for those of ``left`` that wait for others of them, then SIGKILL."""
    for number, patience_s in STAGES:
        _signal(left, number)
        deadline = time.monotonic() + patience_s
        while any(process.alive() for process in left) and time.monotonic() < deadline:
            time.sleep(POLL_S)


def _signal(processes: Sequence[ProcessId], number: signal.Signals) -> None:
    for process in processes:
        # Each leads a session of its own, with its ranks and pools in it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if process.alive() and os.getpgid(process.pid) == process.pid:
                os.killpg(process.pid, number)
            elif process.alive():
                os.kill(process.pid, number)
