"""A controller process: it campaigns for the leader lease, and leads or follows the journal.

    requests ──► Leader             while this process leads
             └─► refusal + hint     while it stands by

Loops:
    run        follow the journal ──lease free──► acquire a term ──► lead ──deposed──► follow anew
    presence   says in Redis once a second who and where this process is; learns of the others
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

from redis.exceptions import RedisError

from controller.context import ControllerContext, RunSettings
from controller.dataset_rows import DatasetRows
from controller.export.group_content import GroupReader
from controller.leader import Leader
from controller.ledger import decisions as cmd
from controller.ledger.decisions.commands import CommandRefused
from controller.ledger.state.settings import SettingChange
from controller.ledger.state.state import State
from controller.runtime import NotLeading, WakeUps, cancel_all
from controller.store.journal import Deposed, JournalGap
from controller.store.ledger_follower import LedgerFollower
from paceline.errors import BadInput, RefusalCode
from paceline.process.structured_log import event
from paceline.redis.client import log_fields, trouble_of
from paceline.redis.leader_lease import LeaderIdentity
from paceline.redis.server import ensure_redis

log = logging.getLogger(__name__)

PRESENCE_S = 1.0
EDITED_S = 30.0
"""How long a standby's config may differ from the leader's: a new leader takes its own over at
once."""
FOREIGN_LEASES = 3  # Lease times for which a leader of another fleet may lead
STALE_PEER_S = 3600.0
READING = "reading the journal"
"""Trouble of a controller that has led, until it has a copy of the ledger again."""


KeepFleet = Callable[["Controller", Leader], None]
"""Starts the leader's chores for the fleet, beside deciding."""


class Controller:
    FOLLOW_MS = 50
    """Longest wait of a standby for a journal entry before it looks at the lease again."""

    def __init__(
        self, context: ControllerContext, keep_fleet: KeepFleet = lambda controller, leader: None
    ) -> None:
        self.context = context
        self.config, self.run_dir = context.config, context.run_dir
        self.identity, self.clock = context.identity, context.clock
        self.journal, self.payloads = context.stores.journal, context.stores.payloads
        self._keep_fleet = keep_fleet
        self.leader: Leader | None = None
        self.replica: LedgerFollower | None = None
        self.peers: dict[str, dict[str, Any]] = {}
        self.hint = ""  # Address of the leader, as the lease names it
        self.trouble = "waiting for Redis"
        """Reason why a standby cannot follow the journal; empty once it does."""
        self._trouble_since = context.clock.monotonic()
        self.lease_holder: LeaderIdentity | None = None
        """Standby: who held the lease when it last looked."""
        self.rest_url = ""  # URL of this process's REST interface; empty: none
        self.settings = RunSettings(context, lambda: self.state)
        self.groups = GroupReader(self.run_dir, self.payloads)
        self._topic = WakeUps()
        self._rows: asyncio.Task[DatasetRows] | None = None

    # ---- what handlers ask ----------------------------------------------------------------

    def leading(self) -> Leader:
        """The leader in this process. Raises NotLeading with a hint."""
        if self.leader is None:
            raise NotLeading(
                f"{self.identity.controller_id} stands by: {self.trouble or 'another one leads'}",
                self.hint,
            )
        return self.leader

    @property
    def state(self) -> State:
        """The ledger's state, live or as far as it was followed."""
        if self.leader is not None:
            return self.leader.ledger.state
        return self.replica.ledger.state if self.replica is not None else State()

    @property
    def journal_topic(self) -> WakeUps:
        return self.leader.long_polls.journal if self.leader is not None else self._topic

    def sink_states(self) -> list[dict[str, Any]]:
        """name, written (points in this term), failing and trouble of each metric sink. Empty on a
        standby: only the leader feeds sinks."""
        feeds = self.leader.housekeeping.exporters.feeds if self.leader is not None else []
        names = ("name", "written", "failing", "trouble")
        return [{name: getattr(feed, name) for name in names} for feed in feeds]

    async def set_settings(
        self, request_id: str, asked: Mapping[str, Any], *, dry_run: bool
    ) -> tuple[str, dict[str, SettingChange]]:
        """The effect in words, and what has changed. Raises CommandRefused and NotLeading.
        ``asked``: JSON values by dotted name. A repeated request has one effect and gets the same
        words; its changes are empty then."""
        leader = self.leading()
        await leader.ready()
        done = leader.ledger.state.requests.get(request_id)
        if done is not None:
            await leader.group_commit.durable()
            return done, {}
        # Nothing is awaited from here to the decision: two requests cannot both rest on the same
        # settings.
        change = leader.settings.checked_change(leader.rows, asked)
        changes = leader.settings.effect_of(*change)
        if dry_run:
            return "these settings can change now" if changes else "nothing would change", changes
        reply = leader.decide(cmd.change_settings(request_id, *change))
        await leader.group_commit.durable()
        return reply, changes

    # ---- loops ----------------------------------------------------------------------------

    async def run(self) -> None:
        """Follows and leads by turns until cancelled. Raises BadInput if it can never lead."""
        self._rows = asyncio.create_task(self.load_rows())
        presence = asyncio.create_task(self._presence())
        try:
            while True:
                try:
                    await self._lead(await self._stand_by())
                except Deposed as why:
                    event(log, "stepping down", why=str(why), level=logging.WARNING)
                except (RedisError, OSError, JournalGap) as error:
                    self._say_trouble(trouble_of(error))
                    await self._revive_redis()
                    await asyncio.sleep(0.1)
        finally:
            await cancel_all([presence, self._rows])

    async def _stand_by(self) -> int:
        """Keeps a hot copy of the ledger until the lease is free and ours; the new term."""
        # First: a journal of another release is not to be touched.
        self.replica = replica = await LedgerFollower.load(self.journal, self.context.projector)
        stores = self.context.stores
        await stores.registry.agree(
            self.config.run.name, stores.payload_urls, self.context.run_json
        )
        self._say_trouble("")
        event(log, "standing by", at=replica.at.entry)
        block_ms = self.FOLLOW_MS
        edited_since: float | None = None
        foreign_since: float | None = None
        while True:
            if await replica.follow(self.journal, block_ms=block_ms):
                self._topic.wake()
            holder, left_s = await stores.election.holder()
            self.lease_holder = holder
            # Back in the very millisecond in which a lease that is not renewed runs out.
            block_ms = min(self.FOLLOW_MS, max(1, math.ceil(left_s * 1e3)))
            if holder is not None:
                foreign_since = self._check_fleet(holder, foreign_since)
                edited_since = self._check_edited(holder, edited_since)
                self.hint = holder.address if holder.nonce != self.identity.nonce else ""
                continue
            self.hint = ""
            if self._rows is not None and self._rows.done():
                # A data set that cannot be read must end the process, not one candidacy.
                self._rows.result()
                term = await stores.election.acquire(replica.ledger.state.term)
                if term is not None:
                    return term

    def _check_fleet(self, leader: LeaderIdentity, since: float | None) -> float | None:
        """Since when a controller with another token leads. Raises BadInput if it goes on: a killed
        one's lease runs out. As the next leader, this one would refuse that fleet's workers."""
        if leader.fleet in ("", self.identity.fleet):
            return None
        now = self.clock.monotonic()
        if now - (since or now) <= FOREIGN_LEASES * self.config.controller.leader_lease_s:
            return since or now
        raise BadInput(
            f"run {self.config.run.name!r} in this Redis is led by {leader.controller_id} at "
            f"{leader.address} (pid {leader.pid} on {leader.host}), a controller of another fleet, "
            "with another token. Choose another run.name, or stop that fleet first"
        )

    def _check_edited(self, leader: LeaderIdentity, since: float | None) -> float | None:
        """Since when this controller's config differs from the leader's in what a run may change.
        Raises BadInput if it stays so: as the next leader it would take back the leader's
        settings."""
        edited, now = self.settings.edited(), self.clock.monotonic()
        if not edited or since is None:
            return now if edited else None
        if now - since < EDITED_S:
            return since
        configured = self.state.settings.configured
        shown = ", ".join(
            f"{n} is {configured.get(n)!r} there, {v!r} here" for n, v in edited.items()
        )
        raise BadInput(
            f"{leader.controller_id} leads the run with another config: {shown}. Change settings "
            "of a running run with paceline set, or end all of its controllers before you start "
            "them with another config"
        )

    async def _lead(self, term: int) -> None:
        assert self.replica is not None and self._rows is not None
        # Nobody else can append from here on: what is read now is the end.
        await self.replica.catch_up(self.journal)
        leader = self.leader = Leader(self.context, self._rows.result(), self.replica, term)
        self._keep_fleet(self, leader)
        self.replica = None
        self._topic.wake()
        try:
            await leader.run()
        except CommandRefused as refusal:
            if refusal.code is RefusalCode.FENCED:
                # Stopped between winning the term and reading the journal, and succeeded meanwhile.
                raise Deposed(str(refusal)) from refusal
            raise BadInput(str(refusal)) from refusal
        finally:
            # Of its own it has no ledger now: an empty one is not to be taken for the run's.
            self.leader, self.trouble = None, READING
            self._trouble_since = self.clock.monotonic()
            leader.long_polls.wake_all()

    async def load_rows(self) -> DatasetRows:
        """Raises DataError."""
        return await DatasetRows.load(self.config)

    async def _presence(self) -> None:
        """Publishes this process and learns of the others. Redis being away is no reason to
        stop."""
        while True:
            me = self.identity.controller_id
            mine = {
                "address": self.identity.address,
                "pid": self.identity.pid,
                "host": self.identity.host,
                "rest": self.rest_url,
                "t": self.clock.time(),
            }
            self.peers[me] = mine
            with contextlib.suppress(RedisError, OSError):
                peers = await self.context.stores.registry.announce(me, mine)
                recent = self.clock.time() - STALE_PEER_S
                self.peers = {name: peer for name, peer in peers.items() if peer["t"] > recent}
            await asyncio.sleep(PRESENCE_S)

    async def _revive_redis(self) -> None:
        """The embedded server has no other guardian where roles are started by hand."""
        if self.config.redis.url is None:
            with contextlib.suppress(BadInput, OSError):
                await asyncio.to_thread(ensure_redis, self.run_dir, self.config.redis)

    @property
    def troubled_s(self) -> float:
        """How long ``trouble`` has lasted; 0 without any."""
        return self.clock.monotonic() - self._trouble_since if self.trouble else 0.0

    def _say_trouble(self, trouble: str) -> None:
        if trouble and not self.trouble:
            self._trouble_since = self.clock.monotonic()
        if trouble and trouble != self.trouble:
            event(log, "standby cut off", logging.WARNING, **log_fields(trouble))
        self.trouble = trouble
