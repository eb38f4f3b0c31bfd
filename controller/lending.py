"""Lending: measures what switches cost, and moves devices as the policy says. Part of the
autoscaling loop of the leader; the next leader measures anew.

    sample, ten times a second ──► a loan's time until its worker works at it
    committed ──► waits, ready groups ──► Lender ──► move ──► cmd.scale: training=N
"""

import logging

from controller.fleet.autoscale_policy import Waits
from controller.fleet.lend_policy import Lender, Measured, Split
from controller.leader import Leader
from controller.ledger import decisions as cmd
from controller.ledger.decisions.commands import CommandRefused
from controller.ledger.enums import Role
from controller.ledger.state.seats import Seat
from controller.ledger.state.state import State
from controller.runtime import NotLeading
from controller.store.journal import Deposed
from paceline.process.structured_log import event
from paceline.worker_pools import TRAINING

log = logging.getLogger(__name__)


class Lending:
    def __init__(self, leader: Leader, *, steps: int) -> None:
        self._leader = leader
        self._lender = Lender(steps=steps)
        self._evaluated = False  # During this step
        self._sides: dict[str, Role | None] = {}
        self._moving: dict[str, float | None] = {}
        """Time of each loan under way, by seat; None: its worker starts, and it had no other side.
        """

    def sample(self, state: State) -> None:
        """Times the loans: from the decision until the worker has what it needs to work."""
        now, seats = self._leader.clock.monotonic(), state.fleet.seats.by_name
        self._evaluated |= bool(state.evals.rounds)
        for seat in seats.values():
            if (before := self._sides.get(seat.name)) is not seat.role:
                self._moving[seat.name] = None if before is None else now
            elif seat.role is not None and not works(state, seat):
                self._moving.setdefault(seat.name, None)
            elif (begun := self._moving.pop(seat.name, None)) is not None:
                self._lender.switch_s = now - begun
        self._sides = {name: seat.role for name, seat in seats.items()}
        self._moving = {name: begun for name, begun in self._moving.items() if name in seats}

    def paused(self) -> None:
        """Loans under way wait for more than the switch, and are not timed."""
        self._moving = dict.fromkeys(self._moving)

    async def committed(self, state: State, waits: Waits) -> None:
        """``waits``: of the step that was committed."""
        seats, step = state.fleet.seats, state.versions.step
        now = Split(seats.to_train, len(seats.by_name) - seats.to_train)
        evaluated, self._evaluated = self._evaluated, False
        if not now.training or evaluated:
            return  # its workers come or go, or a part of them was busy with other work
        left_s = (state.run.steps - step) * state.steps.metrics.get("step_s", 0.0)
        # The next step may have taken its groups with this commit.
        ready = (len(state.tasks.ready) + state.tasks.in_step) / state.run.groups_per_step
        seen = Measured(waits, ready, left_s)
        self._lender.observe(now, seen, settled=not self._moving)
        if (move := self._lender.move) is None:
            return
        counts, expected = {TRAINING: move.split.training}, {TRAINING: seats.training}
        # A retry, by any leader, has the same request id. After a rollback steps come again.
        request = f"lend-v{state.versions.version}-{move.split.training}"
        event(
            log, "lending", **counts, gain=move.gain, why=move.why, switch_s=self._lender.switch_s
        )
        try:
            await self._leader.execute(cmd.scale(request, counts, expected, why=move.why))
        except (CommandRefused, NotLeading, Deposed) as error:
            event(log, "not lent", why=str(error), level=logging.WARNING)


def works(state: State, seat: Seat) -> bool:
    """True if its holder can do what the seat is lent for: train with the newest state, or generate
    with weights."""
    holder = None if seat.holder is None else state.fleet.current(*seat.holder)
    if holder is None or seat.asked or holder.role is not seat.role:
        return False
    if holder.role is Role.ROLLOUT:
        return holder.joinable and holder.loaded_version >= 0
    return state.fleet.in_mesh(holder) and holder.state_version == state.versions.version
