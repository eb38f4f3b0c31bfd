"""Side channel of a worker: says what it waits for while it has no session.

    starting (imports, hub, model), or its event loop is stuck ──► ReportWaits, every two seconds

A thread with a blocking client of its own, because what it reports on may block everything else. It
sends to every controller, as there may be no leader, and nobody's answer matters. A worker at work
sends nothing. The stacks of a stuck event loop go to the process's log.
"""

import asyncio
import contextlib
import faulthandler
import os
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc

from paceline.config.schema import Config
from paceline.errors import UserError
from paceline.process import waits
from paceline.process.waits import Wait, WaitKind
from paceline.rpc.auth import client_root, worker_token
from paceline.rpc.grpc_channel import METHODS, bind_method, call_metadata, open_blocking_channel
from paceline.v1 import common_pb2, worker_pb2

EVERY_S = 2.0
LOOK_S = 0.5
STUCK_S = 2.0
ANSWER_S = 1.0


class SideChannel:
    """Starts its thread at once. ``registered`` ends the reports of the start."""

    def __init__(
        self,
        config: Config,
        addresses: Sequence[str],
        worker_id: str,
        role: common_pb2.Role,
        run_dir: Path | None = None,
    ) -> None:
        self._config, self._run_dir = config, run_dir
        self._addresses = list(addresses)
        self._worker_id, self._role = worker_id, role
        self._began = self._ran = time.monotonic()
        self._registered = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._dumped = False  # The stacks of the present stall are in the log
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="side-channel", daemon=True)
        self._thread.start()

    def registered(self) -> None:
        self._registered = True

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Reports if ``loop`` no longer runs. Called on that loop."""
        self._ran = time.monotonic()
        self._loop = loop
        self._tick()

    def close(self) -> None:
        self._ended.set()

    def _tick(self) -> None:
        self._ran = time.monotonic()
        if self._loop is not None and not self._ended.is_set():
            self._loop.call_later(LOOK_S, self._tick)

    def _run(self) -> None:
        sent = -EVERY_S
        while not self._ended.wait(LOOK_S):
            report = self._report()
            if report is not None and time.monotonic() - sent >= EVERY_S:
                sent = time.monotonic()
                self._send(report)

    def _report(self) -> worker_pb2.WaitsReport | None:
        silent_s = time.monotonic() - self._ran if self._loop is not None else 0.0
        found = waits.present()
        if silent_s < STUCK_S:
            self._dumped = False
        if silent_s >= STUCK_S:
            what = "its event loop does not run: a call in it blocks"
            found.insert(0, Wait(WaitKind.EVENT_LOOP, what, age_s=silent_s))
            if not self._dumped:
                self._dumped = True
                faulthandler.dump_traceback(all_threads=True)
        elif self._registered:
            return None
        elif not found:
            age_s = time.monotonic() - self._began
            found = [Wait(WaitKind.START, "starting: imports and devices", age_s=age_s)]
        return worker_pb2.WaitsReport(
            worker_id=self._worker_id,
            role=self._role,
            host=socket.gethostname(),
            pid=os.getpid(),
            waits=waits.messages(found),
        )

    def _send(self, report: worker_pb2.WaitsReport) -> None:
        with contextlib.suppress(UserError, OSError):
            token = worker_token(self._config, self._run_dir)
            metadata = call_metadata(token)
            root = client_root(self._config.auth)
            for address in self._addresses:
                # Opened for each report: there are few of them, and none in a healthy run.
                with open_blocking_channel(address, token, tls_ca=root) as channel:
                    call: Any = bind_method(channel, METHODS["WorkerService.ReportWaits"])
                    with contextlib.suppress(grpc.RpcError):
                        call(report, timeout=ANSWER_S, metadata=metadata)
