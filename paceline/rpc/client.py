"""Control-plane client: calls that always reach the leading controller.

- Every request is idempotent, so a call whose reply was lost is made again.
- A standby refuses and names the leader. If a controller is dead or hangs, the client tries the
  next.
- If none answers, the addresses are read again in the run's directory: a controller whose port was
  taken while it was dead comes back at another one.
- A definite refusal (malformed, unknown, fenced, unauthenticated) is raised at once and never
  retried.
"""

import asyncio
import logging
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from paceline.config.schema import Config
from paceline.errors import RefusalCode, Unreachable, UserError
from paceline.process.structured_log import event, first_line
from paceline.rpc.addresses import written_by_controllers
from paceline.rpc.auth import client_root, worker_token
from paceline.rpc.grpc_channel import LEADER_KEY, METHODS, bind_method, call_metadata, open_channel
from paceline.rpc.listeners import UNIX, UNPROVEN
from paceline.v1 import admin_pb2

log = logging.getLogger(__name__)

ATTEMPT_S = 3.0
"""Time for one controller to answer, in addition to the wait that the request asks for."""
ASK_INTERVAL_S = 0.1
ASK_LIMIT_S = 0.5
READ_AGAIN_S = 1.0
FIRST_BACKOFF_S = 0.02
LAST_BACKOFF_S = 0.25

RETRIED = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.ABORTED,
        # gRPC reports a connection reset in the middle of a message as INTERNAL.
        grpc.StatusCode.INTERNAL,
    }
)


class RequestRefused(UserError):
    """The leader refused the request. Nothing has changed, and a retry would be refused too.
    ``code``: name of the gRPC status, for example FAILED_PRECONDITION if the caller's incarnation
    has ended."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message

    @property
    def bad_input(self) -> bool:
        """True if a registration failed because the worker's config or token differs from the
        run's."""
        codes = (RefusalCode.INVALID.grpc_status, RefusalCode.FENCED.grpc_status)
        return self.code in (*codes, "UNAUTHENTICATED")


class ControlPlaneUnavailable(Unreachable):
    """No controller answered in time. The request may or may not have had an effect: repeat it."""


class ControlPlane:
    """Client of whichever of ``addresses`` leads; belongs to the event loop that first uses it."""

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        token: str | None = None,
        tls_ca: Path | None = None,
        max_message_mb: int = 64,
        run_dir: Path | None = None,
    ) -> None:
        """``run_dir``: directory in which the controllers write their addresses."""
        if not addresses:
            raise ValueError("no controller address given")
        self.addresses = list(dict.fromkeys(addresses))
        self.address = self.addresses[0]
        """The controller that receives the next call."""
        self.metadata = call_metadata(token)
        self._token = token
        self._tls_ca = tls_ca
        self._max_message_mb = max_message_mb
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._bound: dict[tuple[str, str], Any] = {}
        self._answers: dict[asyncio.Future[Any], str] = {}
        """Calls under way, with the controller that each was sent to."""
        self._run_dir = run_dir
        self._reading: asyncio.Future[None] | None = None

    @classmethod
    def from_config(
        cls, config: Config, addresses: Sequence[str], run_dir: Path | None = None
    ) -> "ControlPlane":
        """With the TLS root of ``config`` and its token, or that of the run in ``run_dir``. Raises
        AuthError if they cannot be read."""
        return cls(
            addresses,
            token=worker_token(config, run_dir),
            tls_ca=client_root(config.auth),
            max_message_mb=config.controller.max_message_mb,
            run_dir=run_dir,
        )

    async def call(
        self,
        method: str,
        request: Any,
        timeout_s: float | None = 30.0,
        attempt_s: float | None = None,
    ) -> Any:
        """Calls the unary "Service.Method" on the leader and returns its reply. Retries during
        failovers, and if a controller takes longer than ``attempt_s`` seconds (None: ATTEMPT_S).
        Raises RequestRefused on a definite refusal, and ControlPlaneUnavailable after
        ``timeout_s`` seconds (None: never)."""
        deadline = time.monotonic() + (math.inf if timeout_s is None else timeout_s)
        patience = ATTEMPT_S if attempt_s is None else attempt_s
        patience += float(getattr(request, "wait_s", 0.0))
        backoff = Backoff()
        failure = ""
        while True:
            address = self.address
            limit_s = min(patience, max(0.001, deadline - time.monotonic()))
            try:
                return await self._attempt(address, method, request, limit_s)
            except grpc.aio.AioRpcError as error:
                trouble = self.failed(address, error)
                # An attempt that this call's own deadline cut short says less than the one before
                # it.
                cut = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and limit_s < patience
                failure = failure if cut and failure else trouble
            except _LeaderChanged:
                backoff = Backoff()
                continue
            if time.monotonic() >= deadline:
                raise ControlPlaneUnavailable(
                    f"{method}: no controller of {', '.join(self.addresses)} answered within "
                    f"{timeout_s:g} s ({failure})"
                )
            await backoff.wait(deadline)

    async def _attempt(self, address: str, method: str, request: Any, timeout_s: float) -> Any:
        """The reply of one controller. Raises AioRpcError, and _LeaderChanged if another controller
        turns out to lead meanwhile."""
        call = self.bind(address, method)(request, timeout=timeout_s, metadata=self.metadata)
        # The call is awaited in a task of its own: gRPC may answer, or raise an error, if its
        # caller is cancelled while it ends, and the cancellation would be lost.
        answer = asyncio.ensure_future(call)
        self._answers[answer] = address
        try:
            await asyncio.wait({answer})
            if answer.cancelled() and address != self.address:
                raise _LeaderChanged
            return answer.result()
        finally:
            del self._answers[answer]
            # This cancels the call too.
            answer.cancel()

    def bind(self, address: str, method: str) -> Any:
        """The callable of ``method`` at one controller. The caller adds the metadata."""
        if (address, method) not in self._bound:
            if address not in self._channels:
                self._channels[address] = open_channel(
                    address,
                    self._token,
                    tls_ca=self._tls_ca,
                    max_message_mb=self._max_message_mb,
                )
            self._bound[address, method] = bind_method(self._channels[address], METHODS[method])
        return self._bound[address, method]

    def failed(self, address: str, error: grpc.aio.AioRpcError) -> str:
        """Chooses the next controller after ``error``. Raises RequestRefused if the refusal is
        definite. Returns a description of the error."""
        code = error.code()
        if code not in RETRIED:
            raise RequestRefused(code.name, error.details() or "") from None
        trailing = error.trailing_metadata() or ()
        hint = next((str(value) for key, value in trailing if key == LEADER_KEY), "")
        if hint and hint != address:
            if hint not in self.addresses:
                self.addresses.append(hint)
            if self.address == address:
                self.address = hint
        else:
            self.leave(address)
        return f"{address}: {code.name} {call_error(error)}"

    def leave(self, address: str) -> None:
        """Switches to the next controller, unless another call already did."""
        if self.address != address:
            return
        following = (self.addresses.index(address) + 1) % len(self.addresses)
        self.address = self.addresses[following]
        idle = self._reading is None or self._reading.done()
        if following == 0 and self._run_dir is not None and idle:
            self._reading = asyncio.ensure_future(self._read_again(self._run_dir))

    async def _read_again(self, run_dir: Path) -> None:
        """Adds addresses that controllers have written since. Not more often than once a second:
        the directory may be on another machine."""
        for address in await asyncio.to_thread(_written, run_dir):
            if address not in self.addresses:
                self.addresses.append(address)
                self.address = address
        await asyncio.sleep(READ_AGAIN_S)

    def prefer(self, address: str) -> None:
        """``address`` leads: pending calls to other controllers move to it now."""
        if address not in self.addresses:
            self.addresses.append(address)
        if self.address != address:
            event(log, "leader", address=address, was=self.address, level=logging.DEBUG)
        self.address = address
        for answer, asked in self._answers.items():
            if asked != address:
                answer.cancel()

    async def newer_leader(self, besides: str, term: int) -> str:
        """Asks all controllers but ``besides`` until one knows a leader of a term after ``term``.
        Returns the leader's address."""
        while True:
            asked = [a for a in self.addresses if a != besides]
            for found in await asyncio.gather(*(self._leader_after(a, term) for a in asked)):
                if found not in ("", besides):
                    return found
            await asyncio.sleep(ASK_INTERVAL_S * random.uniform(0.5, 1.0))

    async def _leader_after(self, address: str, term: int) -> str:
        """The leader that ``address`` knows; empty if it knows none or does not answer."""
        ask = self.bind(address, "AdminService.GetStatus")
        try:
            status = await ask(
                admin_pb2.StatusRequest(), timeout=ASK_LIMIT_S, metadata=self.metadata
            )
        except grpc.aio.AioRpcError:
            return ""
        if status.term <= term:
            return ""
        return next((c.address for c in status.controllers if c.state == "leader"), "")

    async def close(self) -> None:
        """Closes all channels. Idempotent."""
        channels, self._channels = list(self._channels.values()), {}
        self._bound.clear()
        if self._reading is not None:
            self._reading.cancel()
        for channel in channels:
            await channel.close()


def _written(run_dir: Path) -> list[str]:
    """Addresses of controllers, without sockets of earlier ones: where /tmp was cleaned, anyone may
    make their directory."""
    found = written_by_controllers(run_dir, "address")
    return [a for a in found if not a.startswith(UNIX) or Path(a.removeprefix(UNIX)).exists()]


def call_error(error: grpc.aio.AioRpcError) -> str:
    """The reason why a call failed, for people."""
    reason = first_line(error.details() or error.code().name)
    if "CERTIFICATE_VERIFY_FAILED" not in reason:
        return reason
    return f"the listener {UNPROVEN}: it is a stranger, or the token here is that of another run"


class _LeaderChanged(Exception):
    """Another controller leads than the one that was asked."""


class Backoff:
    """Waits that double, with jitter: a thousand clients must not return in the same instant."""

    def __init__(self) -> None:
        self._next_s = FIRST_BACKOFF_S

    async def wait(self, deadline: float = math.inf) -> None:
        pause = self._next_s * random.uniform(0.5, 1.0)
        self._next_s = min(self._next_s * 2, LAST_BACKOFF_S)
        await asyncio.sleep(min(pause, max(0.0, deadline - time.monotonic())))
