"""Reading of payloads while the store fails: what has arrived stays, what is lost is named, nothing is given up."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import pytest

from paceline.payloads.store import Ref, StoreUnavailable
from policy_worker import payload_reader
from policy_worker.payload_reader import read_payloads

KEYS = [(f"t{n}", 1) for n in range(4)]


class FailingStore:
    """Gives ``give`` payloads at a time and then fails. It has lost t2."""

    def __init__(self, give: Sequence[int]) -> None:
        self.give = list(give)
        self.asked: list[list[str]] = []

    async def stream(self, refs: Sequence[Ref]) -> AsyncIterator[bytes | None]:
        self.asked.append([task_id for task_id, _ in refs])
        left = self.give.pop(0) if self.give else len(refs)
        for task_id, _ in refs:
            if not left:
                raise StoreUnavailable("the connection broke")
            left -= 1
            yield None if task_id == "t2" else task_id.encode()


async def test_payloads_that_have_arrived_are_not_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(payload_reader, "FIRST_RETRY_S", 0.0)
    store = FailingStore([2, 0, 1])
    found = await read_payloads(store, KEYS)  # type: ignore[arg-type]
    assert found == [b"t0", b"t1", None, b"t3"]
    assert store.asked == [["t0", "t1", "t2", "t3"], ["t2", "t3"], ["t2", "t3"], ["t3"]]
