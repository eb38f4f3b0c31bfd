"""Reading of payloads while the store fails: what has arrived stays, what is lost is named, nothing
is given up."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from paceline.errors import BadInput
from paceline.payloads.file_payloads import FilePayloads
from paceline.payloads.store import Ref, StoreUnavailable
from policy_worker.rows import payload_reader
from policy_worker.rows.payload_reader import PayloadReader, StorePlace, read_payloads

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


def test_a_rank_without_a_session_reads_the_store_that_it_is_told(tmp_path: Path) -> None:
    asyncio.run(FilePayloads(tmp_path / "run").put({KEYS[0]: b"payload"}))  # type: ignore[dict-item]
    reader = PayloadReader(StorePlace([f"file://{tmp_path}"], "run", ""))
    assert reader.fetch(KEYS[:2], lambda: False) == [b"payload", None]
    reader.close()


def test_a_rank_whose_store_does_not_answer_is_freed_when_the_epoch_ends(tmp_path: Path) -> None:
    reader = PayloadReader(StorePlace([f"file://{tmp_path}"], "run", ""))
    store = FailingStore([0] * 1000)
    reader._store = store  # type: ignore[assignment]
    ended = threading.Event()

    def over() -> bool:
        if store.asked:
            ended.set()
        return ended.is_set()

    assert reader.fetch(KEYS, over) is None
    assert ended.is_set()
    reader._background.close()


def test_a_store_that_cannot_be_opened_on_the_host_of_a_rank_is_named() -> None:
    with pytest.raises(BadInput, match=r"payloads\.url: nosuch://x cannot be opened"):
        PayloadReader(StorePlace(["nosuch://x"], "run", ""))
