"""Marks of waits: what a report says of them, from any thread, at any load."""

import asyncio
import time

from paceline.process.waits import MOST, WaitKind, from_message, messages, present, waiting
from paceline.v1 import worker_pb2


def test_every_kind_has_a_number_in_the_protocol() -> None:
    names = {f"WAIT_KIND_{kind.name}" for kind in WaitKind} | {"WAIT_KIND_UNSPECIFIED"}
    assert names == set(worker_pb2.WaitKind.keys())


def test_a_wait_is_present_while_its_body_runs_also_if_that_fails() -> None:
    try:
        with waiting(WaitKind.REWARD, "scoring", "mine:judge", limit_s=10.0):
            (found,) = present(0.0)
            raise RuntimeError
    except RuntimeError:
        pass
    assert (found.kind, found.of, found.limit_s) == (WaitKind.REWARD, "mine:judge", 10.0)
    assert found.left_s is not None and 9.0 < found.left_s <= 10.0
    assert present(0.0) == []


def test_short_waits_are_not_reported() -> None:
    with (
        waiting(WaitKind.GROUPS, "new"),
        waiting(WaitKind.VOTES, "old", since=time.monotonic() - 9),
    ):
        assert [wait.what for wait in present()] == ["old"]


async def test_a_thousand_equal_waits_are_one_with_a_number() -> None:
    begun, over = asyncio.Event(), asyncio.Event()
    marked = 0

    async def score() -> None:
        nonlocal marked
        with waiting(WaitKind.REWARD, "scoring", since=time.monotonic() - 2):
            marked += 1
            if marked == 1000:
                begun.set()
            await over.wait()

    tasks = [asyncio.create_task(score()) for _ in range(1000)]
    await begun.wait()
    (found,) = present()
    over.set()
    await asyncio.gather(*tasks)
    assert found.count == 1000
    assert sum(message.ByteSize() for message in messages([found])) < 100


def test_a_report_has_at_most_a_few_waits_the_oldest_first() -> None:
    contexts = [
        waiting(WaitKind.REWARD, f"w{n}", since=time.monotonic() - 100 + n) for n in range(2 * MOST)
    ]
    for context in contexts:
        context.__enter__()
    found = present()
    for context in contexts:
        context.__exit__(None, None, None)
    assert [wait.what for wait in found] == [f"w{n}" for n in range(MOST)]


def test_a_wait_survives_the_wire_and_ages_with_the_silence_of_its_worker() -> None:
    with waiting(WaitKind.COLLECTIVE, "inside", "policy-1", since=time.monotonic() - 3):
        (message,) = messages(present())
    found = from_message(message, older_s=4.0)
    assert found is not None
    assert (found.kind, found.what, found.of) == (WaitKind.COLLECTIVE, "inside", "policy-1")
    assert 7.0 <= found.age_s < 8.0
    # A worker of a later release may know more kinds.
    message.kind = 99  # type: ignore[assignment]
    assert from_message(message) is None
