"""Lending policy: the best split of the pairs, and what keeps it from moving back and forth."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from controller.fleet.autoscale_policy import Waits
from controller.fleet.lend_policy import Lender, Measured, Split, best_move
from controller.ledger import decisions as cmd
from controller.ledger import events as ev
from controller.ledger.state.evals import EvalRound
from controller.lending import Lending
from paceline.ids import Step
from tests.unit.ledger.test_seats import lent, obey

LONG_S = 1e6


def measured(starved: float, throttled: float, ready: float, left_s: float = LONG_S) -> Measured:
    return Measured(Waits(starved, throttled), ready, left_s)


@pytest.mark.parametrize(
    ("now", "seen", "best"),
    [
        (Split(3, 1), measured(0.8, 0.0, 0.2), Split(2, 2)),
        (Split(1, 3), measured(0.0, 0.8, 2.0), Split(2, 2)),
        (Split(6, 2), measured(0.6, 0.0, 0.2), Split(4, 4)),
        (Split(2, 2), measured(0.5, 0.0, 0.2), None),  # one pair more would be too much
        (Split(1, 1), measured(0.9, 0.0, 0.2), None),  # none is left to give
        (Split(3, 1), measured(0.8, 0.0, 1.5), None),  # groups wait: it is not generation
        (Split(1, 3), measured(0.0, 0.8, 0.5), None),  # none wait: it is not training
        (Split(3, 1), measured(0.8, 0.0, 0.2, left_s=1.0), None),  # it would not pay any more
        (Split(3, 1), measured(0.8, 0.0, 0.2, left_s=15.0), None),  # twice as fast saves half of it
    ],
)
def test_the_best_split(now: Split, seen: Measured, best: Split | None) -> None:
    found = best_move(now, seen, switch_s=20.0, least=0.05)
    assert (found.split if found else None) == best


def simulated(now: Split, generate: float, train: float) -> Measured:
    """A run whose pairs would generate and train so many steps a second."""
    made, used = generate * now.generating, train * now.training
    starved, throttled = max(0.0, 1 - made / used), max(0.0, 1 - used / made)
    return measured(starved, throttled, 2.0 if throttled else 0.0)


@pytest.mark.parametrize("start", [1, 4, 7])
@pytest.mark.parametrize(("generate", "train"), [(1.0, 1.0), (1.0, 3.1), (5.0, 1.0)])
def test_it_comes_to_the_best_split_from_any_and_stays(
    start: int, generate: float, train: float
) -> None:
    lender, now, moves = Lender(steps=2), Split(start, 8 - start), []
    for _ in range(100):
        lender.observe(now, simulated(now, generate, train), settled=True)
        if lender.move is not None:
            now = lender.move.split
            moves.append(now.training)
    best = max(min(train * n, generate * (8 - n)) for n in range(1, 8))
    assert min(train * now.training, generate * now.generating) >= 0.95 * best
    assert len(moves) <= 2, moves


def test_one_odd_measurement_and_a_switch_under_way_move_nothing() -> None:
    lender, now = Lender(steps=2), Split(2, 2)
    odd, even = measured(0.6, 0.0, 0.0), measured(0.0, 0.0, 0.0)
    for seen, settled in [(odd, True)] * 3 + [(even, True)] * 2 + [(odd, False)] * 8:
        lender.observe(now, seen, settled=settled)
        assert lender.move is None


def test_the_steps_after_a_move_are_skipped() -> None:
    lender, odd = Lender(steps=2), measured(0.6, 0.0, 0.0)
    lender.observe(Split(3, 1), odd, settled=True)
    moves = []
    for _ in "the move", "skipped", "skipped", "a first", "measurement", "a second", "one":
        lender.observe(Split(2, 2), odd, settled=True)
        moves.append(lender.move is not None)
    assert moves == [False] * 6 + [True]


def test_a_move_back_must_gain_more() -> None:
    seen, split = measured(0.0, 0.09, 2.0), Split(30, 50)  # 5.5 % faster with two more that train
    first, back = Lender(steps=1), Lender(steps=1)
    back.observe(Split(50, 30), seen, settled=True)
    moves = []
    for _ in range(6):
        for lender in first, back:
            lender.observe(split, seen, settled=True)
        moves.append((first.move is not None, back.move is not None))
    assert moves[-1] == (True, False)


class Lent:
    """The loop of a leader over a run of three pairs, one of which trains."""

    def __init__(self) -> None:
        self.run, self.commands = lent(steps=40), list[cmd.Command[Any]]()
        clock = SimpleNamespace(monotonic=lambda: self.run.now)
        leader: Any = SimpleNamespace(clock=clock, execute=self._execute)
        self.lending = Lending(leader, steps=1)
        obey(self.run)

    async def _execute(self, command: cmd.Command[Any]) -> None:
        self.commands.append(command)

    def step(self, waits: Waits) -> None:
        """Commits a step, after which the groups of the next one are there at once."""
        run = self.run
        if run.state.steps.open is None:
            run.fill("r1", 4)
        run.fill("r1", 4)
        run.now += 1.0
        run.vote("p0")
        run.observe("r1", loaded=run.state.versions.version)
        self.sample()
        asyncio.run(self.lending.committed(run.state, waits))

    def sample(self, seconds: float = 0.0) -> None:
        self.run.now += seconds
        self.lending.sample(self.run.state)


def test_training_gets_a_pair_although_its_next_step_has_taken_the_ready_groups() -> None:
    loop = Lent()
    loop.sample()
    for _ in range(6):
        loop.step(Waits(0.0, 0.6))
        assert not loop.run.state.tasks.ready, "max_staleness is 1: the next step is open"
        if loop.commands:
            break
    loop.run.do(cmd.scale("somebody", {"training": 2}))
    with pytest.raises(cmd.CommandRefused, match="conflict"):
        loop.run.do(loop.commands[0])
    loop.run.do(cmd.scale("somebody else", {"training": 1}))
    assert loop.run.do(loop.commands[0]) == "2 of 3 pairs train"


def test_steps_of_evaluations_are_left_out_and_do_not_keep_devices_from_moving() -> None:
    loop = Lent()
    loop.sample()
    for step in range(12):
        evaluates = step % 2 == 0
        if evaluates:
            loop.run.state.evals.rounds[0] = EvalRound(Step(0), 1, ())
            loop.sample()
            loop.run.state.evals.rounds.clear()
        loop.step(Waits(0.9, 0.0) if evaluates else Waits(0.0, 0.6))
    assert loop.commands, "it is measured between the evaluations"


def test_a_loan_that_a_pause_holds_up_is_not_timed() -> None:
    loop = Lent()
    loop.sample()
    loop.run.do(cmd.scale("a", {"training": 2}))
    loop.sample()
    loop.lending.paused()
    loop.run.now += 3600.0
    obey(loop.run)
    loop.sample()
    assert loop.lending._lender.switch_s == 0.0


def test_only_a_change_of_sides_is_timed_and_no_cold_start() -> None:
    loop = Lent()
    for _ in "the first start", "another one":
        loop.run.die("r1")
        loop.run.register("r1", seat="h/1")
        loop.sample()
        loop.run.observe("r1")
        loop.run.observe("r1", loaded=0)
        loop.sample(50.0)
    assert loop.lending._lender.switch_s == 0.0
    loop.run.do(cmd.scale("a", {"training": 2}))
    loop.sample()
    obey(loop.run)
    granted = [e for e in loop.run.journal if e["type"] == ev.SeatGranted.__name__][-1]
    assert granted["why"] == "2 of 3 pairs train: by request"
    loop.sample(7.0)
    assert loop.lending._lender.switch_s == 7.0
