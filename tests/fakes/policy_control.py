"""One control plane of a policy worker whose answers a test scripts. It has no network: for faults
of that, and of the ledger, see policy_controller."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from paceline.v1 import common_pb2, worker_pb2


class ScriptedControl:
    """``answers``: what it says to a request, by the name of the RPC. ``posted``: requests that the
    worker goes on without, until ``settle`` answers the oldest."""

    def __init__(self, **answers: Callable[[Any], Any]) -> None:
        self.answers = answers
        self.caller = common_pb2.Caller(worker_id="policy-0", incarnation=1)
        self.directive = worker_pb2.Directive(lifecycle=worker_pb2.LIFECYCLE_RUNNING)
        self.stopped = self.leaves_last = False
        self.followers: list[Callable[[Any], None]] = []
        self.posted: list[tuple[Any, Callable[[Any], None], Future[None]]] = []

    def call(self, method: str, request: Any, over: Any = None) -> Any:
        return self.answers[method.rpartition(".")[2]](request)

    def post(self, method: str, request: Any, then: Any = lambda reply: None) -> Future[None]:
        self.posted.append((request, then, Future()))
        return self.posted[-1][2]

    def settle(self, reply: Any = None) -> Any:
        """The oldest posted request, which gets ``reply``; None: it failed."""
        request, then, future = self.posted.pop(0)
        if reply is not None:
            then(reply)
        future.set_result(None)
        return request

    def wait(self, done: Callable[[], bool]) -> None:
        while not done():
            threading.Event().wait(0.01)

    def poke(self) -> None: ...

    def on_directive(self, follow: Callable[[Any], None]) -> None:
        self.followers.append(follow)
