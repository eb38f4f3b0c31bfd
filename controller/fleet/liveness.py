"""Failure detection by evidence: takes times and reports, and returns commands for the ledger.
Pure.

Evidence and its consequence:

- The launcher saw the process exit: dead at once.
- The session broke: *suspect*, not dead, because a short network fault breaks sessions too.
- A worker is suspect and a peer reports a failed collective: dead after ``suspect_grace_s``. If no
  worker is suspect, nobody is declared dead; the members form the next epoch.
- No request and no report for ``lease_ttl_s``: dead, suspect or not. This detects hung processes.
  The lease ends 2 % early, so that the worker's tasks are leased again when the full time is over.
- Busy and no progress for ``wedged_after_s``: dead. If several members hang in one collective, only
  the first is declared dead: the others may have waited for it, and their time starts again.

There is no transition from idle to dead: a replica that reports and is not busy is never removed.
The transition would evict a healthy replica that only waits for work.

If the leader itself did not run, as on an overloaded machine, it adds the missed time to every
lease.

Nothing here is journalled. A new leader gives every worker a full lease and learns the rest from
the reports. It forms no new mesh before every living member of a broken one has reported.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache

from controller.ledger import Ledger
from controller.ledger import decisions as cmd
from controller.ledger.decisions.commands import Command
from controller.ledger.decisions.seats import next_turn
from controller.ledger.state.state import State
from paceline.config.sections.workers import FleetConfig
from paceline.ids import TaskId
from paceline.observe.vocabulary import DeathCause, FaultCause
from paceline.v1 import worker_pb2

FORM_DELAY_S = 0.05
"""The error of a collective often arrives before the broken session of the peer that caused it."""
FORM_DELAY_MAX_S = 2.0
"""Longest delay after several epochs that broke without a commit between them."""

EARLY = 0.02
"""Fraction of a lease by which it ends early: two ticks of the leader with the default lease."""
ABSENCE_S = 1.0
"""Longest time between two ticks that counts in full. In the rest of it the leader did not run."""

Key = tuple[str, int]  # (worker id, incarnation)


@dataclass(slots=True)
class Pulse:
    """Evidence about one incarnation of a worker."""

    heard_t: float
    spoke: bool = False  # True if it has sent a request or report to this leader
    suspect_since: float | None = None
    """Time at which its session broke. None: the session is open, or was never opened."""
    progress: int = -1
    busy: bool = False
    progress_t: float = 0.0
    held: frozenset[tuple[str, int]] = frozenset()  # Leases its last report named
    news: bool = False  # True if a report arrived since the last tick
    unnamed: dict[tuple[TaskId, int], float] = field(default_factory=dict)
    """Leases of the ledger that its reports do not name, with the time since which they do not."""


@dataclass(frozen=True, slots=True)
class Prognosis:
    """Evidence about one worker, and when it would be declared dead if nothing changes."""

    silent_s: float  # Since it was last heard of
    dead_in_s: float  # Until its lease expires
    suspect: bool  # Its session broke
    still_s: float = 0.0  # Busy without progress for so long; 0: it is not busy
    wedged_in_s: float | None = None  # Until it counts as wedged; None: it is not busy


class Liveness:
    """Evidence about all workers. Times are seconds of the leader's monotonic clock."""

    def __init__(self, limits: FleetConfig) -> None:
        self.limits = limits
        self.pulses: dict[Key, Pulse] = {}
        self._broken_epoch = 0
        self._broken_t = 0.0  # Epoch whose end has been noticed, and the time of that
        self._breaks = 0
        self._breaks_step = -1
        """Number of epochs that broke in a row at this step, without a commit."""
        self._error_epoch = 0  # Newest epoch with a report of a failed collective
        self._looked_t: float | None = None  # Time of the last tick
        self._began_t = 0.0  # Since then every worker could register with this leader

    # ---- evidence -------------------------------------------------------------------------

    def begin(self, ledger: Ledger, now: float) -> None:
        """This controller leads from now on. Every worker gets a full lease."""
        self.pulses = {}
        self._forget(ledger.state, now)
        self._broken_epoch = self._breaks = 0
        self._looked_t = self._began_t = now
        mesh = ledger.state.fleet.mesh
        self._error_epoch = mesh.epoch if mesh is not None and mesh.broken else 0

    def heard(self, worker_id: str, incarnation: int, now: float) -> Pulse:
        """The worker sent a request: its process lives, even if its session is broken."""
        pulse = self.pulses.setdefault((worker_id, incarnation), Pulse(now, progress_t=now))
        pulse.heard_t = now
        pulse.spoke = True
        return pulse

    def observe(self, report: worker_pb2.Report, now: float) -> None:
        pulse = self.heard(report.caller.worker_id, report.caller.incarnation, now)
        pulse.suspect_since = None
        if report.progress != pulse.progress or not report.busy or not pulse.busy:
            pulse.progress_t = now
        pulse.progress, pulse.busy = report.progress, report.busy
        pulse.held = frozenset((ref.task_id, ref.attempt) for ref in report.held_leases)
        pulse.news = True

    def session_lost(self, worker_id: str, incarnation: int, now: float) -> None:
        pulse = self.pulses.get((worker_id, incarnation))
        if pulse is not None and pulse.suspect_since is None:
            pulse.suspect_since = now

    def peer_error(self, epoch: int) -> None:
        """A worker reported that a collective of mesh ``epoch`` failed."""
        self._error_epoch = max(self._error_epoch, epoch)

    # ---- conclusions ----------------------------------------------------------------------

    def prognosis(self, worker_id: str, incarnation: int, now: float) -> Prognosis | None:
        """State of a worker by the evidence; None for an unknown one."""
        pulse = self.pulses.get((worker_id, incarnation))
        if pulse is None:
            return None
        still_s = now - pulse.progress_t
        return Prognosis(
            silent_s=max(0.0, now - pulse.heard_t),
            dead_in_s=max(0.0, pulse.heard_t + self._lease_s - now),
            suspect=pulse.suspect_since is not None,
            still_s=max(0.0, still_s) if pulse.busy else 0.0,
            wedged_in_s=max(0.0, self.limits.wedged_after_s - still_s) if pulse.busy else None,
        )

    def tick(self, ledger: Ledger, now: float) -> list[Command[None]]:
        """Commands that follow from the evidence at ``now``, in the order of execution. A command
        that the ledger did not carry out is returned again by the next tick."""
        state = ledger.state
        self._forgive_absence(now)
        self._forget(state, now)
        if state.ended:
            return []
        self._watch_mesh(state, now)
        commands: list[Command[None]] = []
        dead: set[Key] = set()
        lost = cache(lambda: self._lost_hosts(state, now))  # Only if a worker is silent, and once
        for key, pulse in sorted(self.pulses.items(), key=lambda item: item[1].progress_t):
            verdict = self._verdict(state, key, pulse, now, lost)
            if verdict is not None:
                how, detail, cause = verdict
                dead.add(key)
                silent_s = max(0.0, now - pulse.heard_t)
                commands.append(cmd.declare_dead(*key, how, detail, cause, silent_s))
                self._excuse_peers(state, key, now)
                continue
            self._compare_leases(state, key, pulse, now)
            commands.extend(
                cmd.expire(task_id, attempt)
                for (task_id, attempt), since in pulse.unnamed.items()
                if now - since >= self._lease_s
            )
        if self._may_form(state, dead, now):
            commands.append(cmd.form_mesh())
        seats = state.fleet.seats
        if seats.by_name and seats.doubted and now - self._began_t >= self._lease_s:
            commands.append(cmd.end_doubt())
        if next_turn(state) is not None:
            commands.append(cmd.settle_turn())
        return commands

    def _forgive_absence(self, now: float) -> None:
        """Extends all times if the leader did not run: reports of that time may be unread."""
        missed_s = 0.0 if self._looked_t is None else now - self._looked_t - ABSENCE_S
        self._looked_t = now
        if missed_s <= 0.0:
            return
        self._began_t = min(now, self._began_t + missed_s)
        for pulse in self.pulses.values():
            pulse.heard_t = min(now, pulse.heard_t + missed_s)
            pulse.progress_t = min(now, pulse.progress_t + missed_s)
            if pulse.suspect_since is not None:
                pulse.suspect_since = min(now, pulse.suspect_since + missed_s)
            for ref, since in pulse.unnamed.items():
                pulse.unnamed[ref] = min(now, since + missed_s)

    def _excuse_peers(self, state: State, key: Key, now: float) -> None:
        """Restarts the progress time of the dead member's peers: they may have waited for it."""
        mesh = state.fleet.mesh
        if mesh is None or mesh.rank(*key) < 0:
            return
        for member in mesh.members:
            pulse = self.pulses.get((member.worker_id, member.incarnation))
            if pulse is not None:
                pulse.progress_t = now

    def _compare_leases(self, state: State, key: Key, pulse: Pulse, now: float) -> None:
        """Updates ``unnamed`` from the newest report."""
        unnamed: dict[tuple[TaskId, int], float] = {}
        if pulse.news:
            pulse.news = False
            for task_id in state.fleet.workers[key[0]].held:
                ref = (task_id, state.tasks.records[task_id].attempt)
                if ref not in pulse.held:
                    unnamed[ref] = pulse.unnamed.get(ref, now)
        else:
            for ref, since in pulse.unnamed.items():
                task = state.tasks.records.get(ref[0])
                if task is not None and task.leased_as(ref[1], key[0]):
                    unnamed[ref] = since
        pulse.unnamed = unnamed

    def _verdict(
        self,
        state: State,
        key: Key,
        pulse: Pulse,
        now: float,
        lost_hosts: Callable[[], Mapping[str, int]],
    ) -> tuple[DeathCause, str, FaultCause] | None:
        silent_s = now - pulse.heard_t
        if silent_s >= self._lease_s:
            why = f"no report for {silent_s:.1f} s"
            host = state.fleet.workers[key[0]].host
            if (lost := lost_hosts().get(host, 0)) > 1:
                why += f", as are all {lost} workers of host {host}"
                return DeathCause.LEASE, why, FaultCause.HOST_LOST
            return DeathCause.LEASE, why, FaultCause.HEARTBEAT_SILENCE
        mesh = state.fleet.mesh
        # A peer of the worker's mesh has reported a failed collective.
        failed = (
            mesh if mesh is not None and mesh.broken and mesh.epoch == self._error_epoch else None
        )
        if pulse.suspect_since is not None and failed is not None and failed.rank(*key) >= 0:
            lost_s = now - pulse.suspect_since
            if lost_s >= self.limits.suspect_grace_s:
                why = f"session lost for {lost_s:.1f} s and a collective failed"
                return DeathCause.SUSPECT, why, FaultCause.COLLECTIVE_ERROR
        still = pulse.busy and now - pulse.progress_t >= self.limits.wedged_after_s
        # What has parked may be still for as long as the other side's turn lasts.
        if still and state.fleet.occupies(state.fleet.workers[key[0]]):
            why = f"busy without progress for {now - pulse.progress_t:.0f} s"
            return DeathCause.WEDGED, why, FaultCause.WEDGED
        return None

    def _lost_hosts(self, state: State, now: float) -> dict[str, int]:
        """Workers of each host of which all are silent; none if no other host is heard."""
        silent: Counter[str] = Counter()
        heard: set[str] = set()
        for worker in state.fleet.workers.values():
            pulse = self.pulses.get((worker.worker_id, worker.incarnation))
            if worker.alive and pulse is not None and now - pulse.heard_t < self._lease_s / 2:
                heard.add(worker.host)
            # Of a host that is lost some may have been declared dead a moment ago.
            elif worker.alive or worker.death is FaultCause.HOST_LOST:
                silent[worker.host] += 1
        return {host: n for host, n in silent.items() if heard and host not in heard}

    @property
    def _lease_s(self) -> float:
        return self.limits.lease_ttl_s * (1.0 - EARLY)

    def _watch_mesh(self, state: State, now: float) -> None:
        mesh = state.fleet.mesh
        if mesh is None or not mesh.broken:
            return
        if mesh.epoch != self._broken_epoch:
            self._breaks = self._breaks + 1 if self._breaks_step == state.versions.step else 1
            self._breaks_step = state.versions.step
            self._broken_epoch, self._broken_t = mesh.epoch, now

    def _may_form(self, state: State, dead: set[Key], now: float) -> bool:
        """True if every member of the broken epoch is dead, or has reported and has a session."""
        mesh = state.fleet.mesh
        if mesh is None or not mesh.broken:
            return False
        present = state.fleet.members()
        if not (state.steps.open or state.fleet.may_form):
            return False  # It is formed in the turn of training
        members = [worker.who for worker in present]
        living = [key for key in members if key not in dead]
        for key in living:
            pulse = self.pulses.get(key)
            if pulse is None or not pulse.spoke or pulse.suspect_since is not None:
                return False
        delay_s = min(FORM_DELAY_S * 2.0 ** (self._breaks - 1), FORM_DELAY_MAX_S)
        if not living or (living == members and now - self._broken_t < delay_s):
            return False
        self._broken_t = now
        return True

    def _forget(self, state: State, now: float) -> None:
        living = {(w.worker_id, w.incarnation) for w in state.fleet.workers.values() if w.alive}
        for key in self.pulses.keys() - living:
            del self.pulses[key]
        for key in sorted(living - self.pulses.keys()):
            self.pulses[key] = Pulse(now, progress_t=now)
