"""Members that die or hang while others depend on them: real processes, real Redis, real gloo."""

import queue
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from paceline.weights.tensor_checksum import weights_digest
from testbed.patience import patient
from testbed.workers.mesh_member import Crew, Member, crew_on

SMALL = 10_000
LARGE = 8_000_000


@pytest.fixture(scope="module")
def shared_crew(url: str) -> Iterator[Crew]:
    with crew_on(url) as crew:
        yield crew


@pytest.fixture
def crew(shared_crew: Crew, request: pytest.FixtureRequest) -> Iterator[Crew]:
    """The module's members, which take seconds to start; a test that failed leaves none behind."""
    failed_before = request.session.testsfailed
    yield shared_crew
    if request.session.testsfailed > failed_before:
        shared_crew.discard()


@pytest.mark.parametrize("elements", [SMALL, LARGE])
@pytest.mark.parametrize("instant", ["before it joins the all-reduce", "inside the all-reduce"])
def test_survivors_of_a_killed_member_reduce_in_the_next_epoch(
    crew: Crew, instant: str, elements: int
) -> None:
    members = crew.members(3)
    crew.form(members)
    survivors, victim = members[:2], members[2]
    if instant == "inside the all-reduce":
        stop_inside_all_reduce(victim, elements, seed=2)
    start_reducing(survivors, elements)
    victim.kill()
    for survivor in survivors:
        survivor.tell("cancel")
    for survivor in survivors:
        assert survivor.answer(timeout_s=5)["error"] in {"MeshError", "EpochCancelled"}
    again_from_untouched_gradients(crew, survivors, elements)


def test_every_survivor_of_a_kill_fails_even_without_the_flag(crew: Crew) -> None:
    # The first survivor to see the broken connection shuts its own, which frees all others.
    members = crew.members(3)
    crew.form(members)
    survivors, victim = members[:2], members[2]
    start_reducing(survivors, SMALL)
    victim.kill()
    answers = [survivor.answer(timeout_s=5) for survivor in survivors]
    assert {answer["error"] for answer in answers} == {"MeshError"}
    again_from_untouched_gradients(crew, survivors, SMALL)


def test_a_stopped_member_is_left_by_the_flag(crew: Crew) -> None:
    members = crew.members(3)
    crew.form(members)
    survivors, victim = members[:2], members[2]
    victim.signal(signal.SIGSTOP)
    try:
        start_reducing(survivors, SMALL)
        # A stopped process resets no connection: no survivor notices by itself.
        with pytest.raises(queue.Empty):
            survivors[0].answer(timeout_s=0.3)
        cancelled_at = time.time()
        for survivor in survivors:
            survivor.tell("cancel")
        answers = [survivor.answer(timeout_s=5) for survivor in survivors]
        assert {answer["error"] for answer in answers} == {"EpochCancelled"}
        assert max(answer["at"] for answer in answers) - cancelled_at < patient(0.5)
        again_from_untouched_gradients(crew, survivors, SMALL)
    finally:
        victim.signal(signal.SIGCONT)
    # The stopped one wakes up in an epoch that is over, and can take part in the next.
    victim.tell("reduce", seed=2, elements=SMALL)
    assert victim.outcome(timeout_s=5)["error"] in {"MeshError", "EpochCancelled"}
    again_from_untouched_gradients(crew, members, SMALL)


@pytest.mark.parametrize("elements", [SMALL, LARGE])
def test_a_member_that_stopped_inside_an_all_reduce_goes_on_when_it_wakes(
    crew: Crew, elements: int
) -> None:
    """When it wakes it reads what had reached it, and answers into a connection that is closed:
    gloo may never report the end of such an operation."""
    members = crew.members(2)
    survivor, victim = members
    for _ in range(3):
        crew.form(members)
        stop_inside_all_reduce(victim, elements, seed=1)
        start_reducing([survivor], elements)
        survivor.tell("cancel")
        assert survivor.answer(timeout_s=10)["error"] in {"EpochCancelled", "MeshError"}
        victim.signal(signal.SIGCONT)
        victim.tell("cancel")
        answer = victim.answer(timeout_s=10)
        # If the survivor's part had come whole before it left, the sum is right.
        assert answer.get("error") in {"EpochCancelled", "MeshError", None}, answer
    again_from_untouched_gradients(crew, members, elements)


@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGSTOP])
def test_a_member_lost_during_formation_does_not_hold_the_others(
    crew: Crew, stop: signal.Signals
) -> None:
    members = crew.members(3)
    survivors, victim = members[:2], members[2]
    victim.signal(stop)
    try:
        for rank, survivor in enumerate(survivors):
            survivor.tell("form", key=f"lost-{stop}", rank=rank, size=3, timeout_s=60)
        with pytest.raises(queue.Empty):
            survivors[0].answer(timeout_s=0.3)
        for survivor in survivors:
            survivor.tell("cancel")
        for survivor in survivors:
            assert survivor.answer(timeout_s=1)["error"] == "EpochCancelled"
        again_from_untouched_gradients(crew, survivors, SMALL)
    finally:
        if stop == signal.SIGSTOP:
            victim.signal(signal.SIGCONT)
        else:
            victim.process.wait()


def stop_inside_all_reduce(victim: Member, elements: int, *, seed: int) -> None:
    """The victim is stopped with its operation under way, before any other member joins it: so the
    others' operations cannot end by themselves."""
    victim.tell("reduce", seed=seed, elements=elements, stop_inside=True)
    assert victim.answer() == {"reducing": True}
    victim.await_stopped()


def start_reducing(members: list[Member], elements: int) -> None:
    """Returns with every member's operation under way."""
    for seed, member in enumerate(members):
        member.tell("reduce", seed=seed, elements=elements)
    for member in members:
        assert member.answer() == {"reducing": True}


def reduce_all(members: list[Member], elements: int) -> list[dict[str, Any]]:
    start_reducing(members, elements)
    return [member.answer() for member in members]


def again_from_untouched_gradients(crew: Crew, members: list[Member], elements: int) -> None:
    """The next epoch's sum is that of an undisturbed run over the same members."""
    for answer in crew.form(members):
        assert "error" not in answer, answer
    check_sum(reduce_all(members, elements), elements)


def check_sum(answers: list[dict[str, Any]], elements: int) -> None:
    expected = torch.zeros(elements)
    for seed in range(len(answers)):
        expected += torch.randn(elements, generator=torch.Generator().manual_seed(seed))
    digests = {answer["digest"] for answer in answers}
    assert len(digests) == 1
    if len(answers) == 2:
        # Two terms add up to the same bits in any order; more do not.
        assert digests == {weights_digest([("g", expected)])}
    assert answers[0]["sum"] == pytest.approx(float(expected.double().sum()), rel=1e-4)
