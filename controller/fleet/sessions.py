"""Sessions of workers: streams that carry reports to the leader and directives to the workers.

- A directive is built when a batch of events is closed, from the state after that batch. It is sent
  only once the batch is durable. It is built again only if something that it depends on has
  changed: its *grounds*, a value that is quick to take and to compare. Most reports change only the
  leases that they name: if all of these are the worker's own, nothing is to be cancelled, and
  nothing is built.
- Every report is answered. If nothing changed, the same directive is sent again, so that a worker
  can detect a leader that hangs.
- ``seq`` counts all directives of a term, so a worker that reconnects never sees it fall.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from controller.directives import Grounds, directive_grounds, directive_of
from controller.ledger import Ledger
from controller.ledger.views import is_leased
from paceline.ids import TaskId
from paceline.v1 import worker_pb2


@dataclass(eq=False, slots=True)
class ServerSession:
    worker_id: str
    incarnation: int
    report: worker_pb2.Report
    latest: worker_pb2.Directive | None = None
    """Newest directive that may be sent: its events are durable."""
    content: bytes = b""  # The newest directive that was built, serialised without term and seq
    cancels: bool = False
    grounds: Grounds | None = None  # Values that the newest directive was built from
    due: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when ``latest`` is to be sent, or the session is closed."""
    closed: bool = False

    @property
    def key(self) -> tuple[str, int]:
        return self.worker_id, self.incarnation

    def close(self) -> None:
        self.closed = True
        self.due.set()


class Sessions:
    """All open sessions of one leader. A newer stream of an incarnation ends its older one."""

    def __init__(self, term: int, ledger: Ledger, redis_port: int = 0) -> None:
        self._term = term
        self._ledger = ledger
        self._redis_port = redis_port
        self._seq = 0
        self._open: dict[tuple[str, int], ServerSession] = {}

    def open(self, report: worker_pb2.Report) -> ServerSession:
        session = ServerSession(report.caller.worker_id, report.caller.incarnation, report)
        if (older := self._open.get(session.key)) is not None:
            older.close()
        self._open[session.key] = session
        return session

    def close(self, session: ServerSession) -> bool:
        """Forgets a session. Returns whether it was its incarnation's newest."""
        session.close()
        if self._open.get(session.key) is session:
            del self._open[session.key]
            return True
        return False

    def close_all(self) -> None:
        for session in list(self._open.values()):
            session.close()

    def of(self, worker_id: str, incarnation: int) -> ServerSession | None:
        return self._open.get((worker_id, incarnation))

    def collect(self) -> list[tuple[ServerSession, worker_pb2.Directive]]:
        """Builds the directives that have changed. Call ``send`` once their events are durable."""
        grounds_of = self._grounds()
        built = [
            (session, self._rebuild(session, grounds))
            for session in self._open.values()
            if (grounds := grounds_of(session)) != session.grounds
        ]
        return [(session, directive) for session, directive in built if directive is not None]

    def refresh(self, session: ServerSession) -> worker_pb2.Directive | None:
        """Builds the directive of one session; None if it has not changed."""
        grounds, before = self._grounds()(session), session.grounds
        same = before is not None and before.firm == grounds.firm
        if same and not session.cancels and self._owns(session):
            session.grounds = grounds
            return None
        return self._rebuild(session, grounds)

    def _grounds(self) -> Callable[[ServerSession], Grounds]:
        """Grounds of a session's directive at this moment."""
        grounds_of = directive_grounds(self._ledger.state)

        def of(session: ServerSession) -> Grounds:
            firm, leases = grounds_of(*session.key)
            return Grounds(firm, (leases, session.report.seq))

        return of

    def _owns(self, session: ServerSession) -> bool:
        """True if all leases that the session's report names are its worker's."""
        state, worker_id = self._ledger.state, session.worker_id
        named = session.report.held_leases
        return all(is_leased(state, worker_id, TaskId(x.task_id), x.attempt) for x in named)

    def _build(self, session: ServerSession) -> worker_pb2.Directive:
        """The desired state of the session's worker, without term and seq."""
        directive = directive_of(self._ledger.state, *session.key, session.report)
        directive.redis_port = self._redis_port
        return directive

    def _rebuild(self, session: ServerSession, grounds: Grounds) -> worker_pb2.Directive | None:
        session.grounds = grounds
        directive = self._build(session)
        session.cancels = bool(directive.cancelled)
        content = directive.SerializeToString(deterministic=True)
        if content == session.content:
            return None
        session.content = content
        self._seq += 1
        directive.term = self._term
        directive.seq = self._seq
        return directive

    @staticmethod
    def send(session: ServerSession, directive: worker_pb2.Directive | None) -> None:
        """Sends ``directive``, or the latest one again if it is None or older than that."""
        if directive is not None and (session.latest is None or directive.seq > session.latest.seq):
            session.latest = directive
        session.due.set()
