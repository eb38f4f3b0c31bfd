"""State machines of the ledger: every state is reached, and ends stay ends."""

import itertools
from typing import Any

import pytest

from controller.ledger.enums import LIFECYCLE_TRANSITIONS, PHASE_TRANSITIONS, Lifecycle, Phase
from tests.fixtures.ledgers import Driven

MACHINES: list[tuple[Any, Any, set[Any]]] = [
    (Phase.NONE, PHASE_TRANSITIONS, {Phase.FAILED}),
    (Lifecycle.STARTING, LIFECYCLE_TRANSITIONS, {Lifecycle.STOPPED, Lifecycle.DEAD}),
]


@pytest.mark.parametrize(("start", "transitions", "ends"), MACHINES)
def test_every_state_is_reached_from_the_first_and_only_ends_are_final(
    start: Any, transitions: Any, ends: set[Any]
) -> None:
    assert set(transitions) == set(type(start))
    reached, frontier = {start}, [start]
    while frontier:
        for state in transitions[frontier.pop()] - reached:
            reached.add(state)
            frontier.append(state)
    assert reached == set(type(start))
    assert {state for state, following in transitions.items() if not following} == ends


ALIVE = [stage for stage, following in LIFECYCLE_TRANSITIONS.items() if following]


@pytest.mark.parametrize(("now", "reported"), itertools.product(ALIVE, Lifecycle))
def test_a_report_moves_a_worker_forward_and_never_declares_it_dead(
    now: Lifecycle, reported: Lifecycle
) -> None:
    run = Driven()
    run.register("r0")
    worker = run.state.fleet.workers["r0"]
    worker.lifecycle = now
    run.observe("r0", reported)
    forward = reported in LIFECYCLE_TRANSITIONS[now] and reported is not Lifecycle.DEAD
    assert worker.lifecycle is (reported if forward else now)
