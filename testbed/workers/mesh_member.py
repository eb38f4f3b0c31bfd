"""Mesh members as processes of their own, driven by JSON lines, for tests and benchmarks of faults.

``python -m testbed.workers.mesh_member REDIS_URL`` reads one command a line and answers each with
one line. ``cancel`` is the exception: it has no answer and takes effect at once, whatever the main
thread is blocked in. ``reduce`` answers twice: once its operation is under way, and with the
result.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from testbed.patience import patient

_ANSWER_S = 60.0


class Member:
    """The test's end of one member process."""

    def __init__(self, url: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "testbed.workers.mesh_member", url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def tell(self, command: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
        self.process.stdin.flush()

    def answer(self, timeout_s: float = _ANSWER_S) -> dict[str, Any]:
        """The next answer; queue.Empty if there is none within ``timeout_s``."""
        return self._answers.get(timeout=patient(timeout_s))

    def outcome(self, timeout_s: float = _ANSWER_S) -> dict[str, Any]:
        """As ``answer``, without the one that a reduction is under way."""
        answer = self.answer(timeout_s)
        return self.answer(timeout_s) if "reducing" in answer else answer

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        self.tell(command, **arguments)
        return self.answer()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def await_stopped(self) -> None:
        """Returns once every thread of the process has stopped (SIGSTOP)."""
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._answers.put(json.loads(line))


class Crew:
    """Member processes on one Redis; ``members`` replaces the dead."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._members: list[Member] = []
        self._epoch = 0

    def members(self, count: int) -> list[Member]:
        self._members = [m for m in self._members if m.process.poll() is None]
        while len(self._members) < count:
            self._members.append(Member(self.url))
        for member in self._members[:count]:
            member.ask("hello")
        return self._members[:count]

    def form(self, members: list[Member], timeout_s: float = 60.0) -> list[dict[str, Any]]:
        """Forms the next epoch over ``members``, in rank order; their answers."""
        self._epoch += 1
        for rank, member in enumerate(members):
            member.tell(
                "form",
                key=f"epoch-{self._epoch}",
                rank=rank,
                size=len(members),
                timeout_s=timeout_s,
            )
        return [member.answer() for member in members]

    def discard(self) -> None:
        """Kills all members: a later ``members`` starts new ones, whatever state these were in."""
        for member in self._members:
            member.kill()
        self._members = []


@contextmanager
def crew_on(url: str) -> Iterator[Crew]:
    crew = Crew(url)
    try:
        yield crew
    finally:
        crew.discard()


class _Child:
    """The member process. Its gradients are drawn from a seed and must never change."""

    def __init__(self, url: str) -> None:
        import torch

        torch.set_num_threads(1)
        self._url = url
        self._over = threading.Event()
        self._mesh: Any = None
        self._commands: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def run(self) -> None:
        threading.Thread(target=self._main, daemon=True).start()
        for line in sys.stdin:
            command = json.loads(line)
            if command["command"] == "cancel":
                self._over.set()
            else:
                self._commands.put(command)
        # The test is gone. Whatever the main thread hangs in, do not outlive it.
        os._exit(0)

    def _main(self) -> None:
        from paceline.mesh.elastic_mesh import EpochCancelled, MeshError

        while True:
            command = self._commands.get()
            started = time.perf_counter()
            try:
                answer = getattr(self, "do_" + command.pop("command"))(**command)
            except (EpochCancelled, MeshError) as error:
                answer = {"error": type(error).__name__, "detail": str(error)}
                answer["settled"] = self._mesh is None or self._mesh.settled
            answer["ms"] = (time.perf_counter() - started) * 1e3
            answer["at"] = time.time()
            print(json.dumps(answer), flush=True)

    def do_hello(self) -> dict[str, Any]:
        return {"pid": os.getpid()}

    def do_form(self, key: str, rank: int, size: int, timeout_s: float) -> dict[str, Any]:
        import torch

        from paceline.mesh.elastic_mesh import ProcessMesh

        # A flag of its own: cancelling one epoch must not end the next.
        self._over = over = threading.Event()
        if self._mesh is not None:
            self._mesh.abandon()
        self._mesh = ProcessMesh.form(
            url=self._url,
            key=key,
            rank=rank,
            size=size,
            device=torch.device("cpu"),
            cancelled=over.is_set,
            timeout_s=timeout_s,
        )
        return {"rank": rank}

    def do_reduce(self, seed: int, elements: int, stop_inside: bool = False) -> dict[str, Any]:
        """Reduces gradients drawn from ``seed`` through a scratch copy; answers with their digest.

        ``stop_inside``: the process stops itself with the operation under way."""
        import torch

        from paceline.weights.tensor_checksum import weights_digest

        gradients = torch.randn(elements, generator=torch.Generator().manual_seed(seed))
        before = weights_digest([("g", gradients)])
        scratch = gradients.clone()
        started = time.perf_counter()
        try:
            handle = self._mesh.all_reduce_async(scratch)
            print(json.dumps({"reducing": True}), flush=True)
            if stop_inside:
                os.kill(os.getpid(), signal.SIGSTOP)
            self._mesh.wait(handle)
        finally:
            took_ms = (time.perf_counter() - started) * 1e3
            assert weights_digest([("g", gradients)]) == before, "gradients changed"
        return {
            "sum": float(scratch.double().sum()),
            "digest": weights_digest([("g", scratch)]),
            "reduce_ms": took_ms,
        }

    def do_usage(self) -> dict[str, Any]:
        import psutil

        # Old groups are dropped in the background.
        for thread in threading.enumerate():
            if thread.name == "mesh-drop":
                thread.join(60)
        me = psutil.Process()
        return {
            "threads": me.num_threads(),
            "descriptors": me.num_fds(),
            "rss": me.memory_info().rss,
        }


if __name__ == "__main__":
    _Child(sys.argv[1]).run()
