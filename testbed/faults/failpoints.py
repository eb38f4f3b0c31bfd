"""Failpoints: a real worker process receives a signal at an exact instant of its work.

A fleet started with ``environment(directory)`` can be signalled, at any time while it runs, by
``fall(directory, pid, instant)``: the next time that process comes to the instant it writes the
time and sends itself the signal. Instants:

    policy    idle            asking for the next step
              forward         in the forward pass of a micro-batch
              reduce          with its all-reduce under way
              vote            a few milliseconds after its vote was sent
              commit          the commit is known, the optimizer step not yet done
              state_transfer  the state half sent to a joiner; state_arrival: half arrived there
              send            a bucket of new weights on its way to a rollout worker
              park            about to give up its device; parking: in the middle of it; parked:
                              it has, and has not said so; unpark: about to take it again
    scorer    park, parking, parked, unpark  likewise
    rollout   park, parking, parked, unpark  likewise
              generate        a few milliseconds after a prompt went to the engine
              submit          a few milliseconds after finished groups were sent
              receive         a bucket of new weights on its way
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from testbed.patience import Patience

ROOT = Path(__file__).resolve().parents[2]
VARIABLE = "PACELINE_INSTANTS"
POLICY = ("idle", "forward", "reduce", "vote", "commit", "state_transfer", "send")
ROLLOUT = ("generate", "submit", "receive")
TURNS = ("park", "parking", "parked", "unpark")
"""Of all, if they take turns at a device."""


def environment(directory: Path) -> dict[str, str]:
    """Of a fleet whose processes can be armed; requests and times are kept in ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = [str(ROOT / "testbed" / "armed"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        VARIABLE: str(directory),
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
    }


def fall(
    directory: Path, pid: int, instant: str, number: signal.Signals = signal.SIGKILL
) -> Callable[[float], float]:
    """Arms process ``pid``. Returns a function: waits at most so many seconds for the fall and
    returns its time (Unix seconds); TimeoutError if it does not reach the instant."""
    fallen = directory / f"{pid}.{instant}.fallen"
    fallen.unlink(missing_ok=True)
    _ask(directory, pid, {"instant": instant, "signal": int(number)})

    def wait(limit_s: float) -> float:
        patience = Patience(limit_s)
        while not fallen.exists():
            if not patience.left():
                raise TimeoutError(f"process {pid} did not come to {instant} in {limit_s} s")
            time.sleep(0.005)
        return float(fallen.read_text())

    return wait


def leave(directory: Path, pid: int, status: int) -> None:
    """Process ``pid`` exits at once, as after an error of its own."""
    _ask(directory, pid, {"exit": status})


def eat_memory(directory: Path, pid: int) -> None:
    """Process ``pid`` takes memory until the kernel kills it: call this only for a process in a
    group with a limit."""
    _ask(directory, pid, {"eat": True})


def _ask(directory: Path, pid: int, request: dict[str, Any]) -> None:
    (directory / f"{pid}.json").write_text(json.dumps(request))
    os.kill(pid, signal.SIGUSR1)


def arm() -> None:
    """In the process itself, between two of its instructions."""
    directory = Path(os.environ[VARIABLE])
    try:
        request = json.loads((directory / f"{os.getpid()}.json").read_text())
    except FileNotFoundError:
        return
    if "exit" in request:
        os._exit(request["exit"])
    held = []
    while "eat" in request:
        held.append(b"x" * (1 << 20))
    Trap(directory, request["instant"], signal.Signals(request["signal"])).set()


class Trap:
    """Replaces a function of the worker by one that falls, once, and then puts it back."""

    def __init__(self, directory: Path, instant: str, number: signal.Signals) -> None:
        self._where = directory / f"{os.getpid()}.{instant}.fallen"
        self._instant = instant
        self._number = number
        self._once = threading.Lock()
        self._undo: Callable[[], None] = lambda: None

    def set(self) -> None:
        getattr(self, f"_{self._instant}")()

    def _fall(self) -> None:
        if not self._once.acquire(blocking=False):
            return
        self._undo()
        fresh = self._where.with_suffix(".writing")
        fresh.write_text(repr(time.time()))
        fresh.replace(self._where)
        os.kill(os.getpid(), self._number)

    def _soon(self, delay_s: float) -> None:
        threading.Timer(delay_s, self._fall).start()

    def _replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        whole = getattr(owner, name)
        self._undo = lambda: setattr(owner, name, whole)
        setattr(owner, name, make(whole))

    def _before(self, owner: Any, name: str) -> None:
        def make(whole: Any) -> Any:
            def fallen(*arguments: Any, **named: Any) -> Any:
                self._fall()
                return whole(*arguments, **named)

            return fallen

        self._replace(owner, name, make)

    def _during(self, owner: Any, name: str, thread: str = "") -> None:
        """After it was started, for operations that go on in the background."""

        def make(whole: Any) -> Any:
            def fallen(*arguments: Any, **named: Any) -> Any:
                begun = whole(*arguments, **named)
                if threading.current_thread().name.startswith(thread):
                    self._fall()
                return begun

            return fallen

        self._replace(owner, name, make)

    # -- policy worker ------------------------------------------------------------------------

    def _idle(self) -> None:
        self._before(_module("policy_worker.training_steps").TrainingSteps, "next_plan")

    def _forward(self) -> None:
        self._before(_module("policy_worker.step.gradients").Gradients, "_add_row")

    def _reduce(self) -> None:
        self._during(_module("paceline.mesh.elastic_mesh").ProcessMesh, "all_reduce_async")

    def _vote(self) -> None:
        def make(whole: Any) -> Any:
            def vote(*arguments: Any, **named: Any) -> Any:
                self._soon(0.003)
                return whole(*arguments, **named)

            return vote

        self._replace(_module("policy_worker.training_steps").TrainingSteps, "vote", make)

    def _commit(self) -> None:
        self._before(_module("policy_worker.trainer").Trainer, "commit")

    def _state_transfer(self) -> None:
        self._in_transfer("send_state", "send")

    def _state_arrival(self) -> None:
        self._in_transfer("receive_state", "recv")

    def _in_transfer(self, name: str, message: str) -> None:
        def make(whole: Any) -> Any:
            def transfer(mesh: Any, *arguments: Any) -> Any:
                self._replace(type(mesh), message, self._after_header)
                return whole(mesh, *arguments)

            return transfer

        self._replace(_module("policy_worker.trainer"), name, make)

    def _after_header(self, whole: Any) -> Any:
        passed = 0

        def message(*arguments: Any) -> Any:
            nonlocal passed
            passed += 1
            if passed > 2:
                self._fall()
            return whole(*arguments)

        return message

    def _send(self) -> None:
        def make(whole: Any) -> Any:
            def send_buckets(mesh: Any, *arguments: Any) -> Any:
                self._during(type(mesh), "send_async")
                return whole(mesh, *arguments)

            return send_buckets

        _module("policy_worker.publisher")
        self._replace(_module("paceline.weights.weight_sending"), "_send_buckets", make)

    # -- turns ----------------------------------------------------------------------------------

    def _park(self) -> None:
        if policy := sys.modules.get("policy_worker.trainer"):
            self._before(policy.Trainer, "park")
        elif scorer := sys.modules.get("scorer_worker.model_scorers"):
            self._before(scorer.ModelScorer, "park")
        else:
            self._before(_module("rollout_worker.turns").Turns, "_park")

    def _parking(self) -> None:
        self._before(_module("paceline.process.parked_memory").ParkedMemory, "park")

    def _parked(self) -> None:
        self._before(_module("paceline.rpc.turn").Turn, "ends")

    def _unpark(self) -> None:
        self._before(_module("paceline.process.parked_memory").ParkedMemory, "unpark")

    # -- rollout worker -----------------------------------------------------------------------

    def _generate(self) -> None:
        def make(whole: Any) -> Any:
            async def scored_group(*arguments: Any) -> Any:
                self._soon(0.005)
                return await whole(*arguments)

            return scored_group

        # Not ``produce``: the task runner has bound it already.
        producer = _module("rollout_worker.tasks.group_producer").GroupProducer
        self._replace(producer, "_scored_group", make)

    def _submit(self) -> None:
        def make(whole: Any) -> Any:
            async def call(session: Any, method: str, request: Any) -> Any:
                if method == "RolloutService.SubmitGroups":
                    self._soon(0.002)
                return await whole(session, method, request)

            return call

        _module("rollout_worker.main")
        self._replace(_module("paceline.rpc.session").WorkerSession, "call", make)

    def _receive(self) -> None:
        def make(whole: Any) -> Any:
            def receive_shares(weights: Any, coming: Any) -> Any:
                self._during(type(coming[0].mesh), "recv_async")
                return whole(weights, coming)

            return receive_shares

        _module("rollout_worker.weight_receiver")
        self._replace(_module("paceline.weights.weight_transfer"), "receive_shares", make)


def _module(name: str) -> Any:
    """A module the process has loaded: a worker of another role is never armed by mistake."""
    return sys.modules[name]
