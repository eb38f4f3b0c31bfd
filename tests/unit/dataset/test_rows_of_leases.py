"""The controller's cache of rows, under requests that overlap; and rows that cannot be given."""

import asyncio
import json
import os
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from controller.dataset_rows import DatasetRows
from controller.ledger import decisions as cmd
from controller.ledger.enums import Kind, ReturnKind
from controller.services.rollout import _fitting
from paceline.dataset.row_source import Row, RowSource
from paceline.dataset.rows import load_rows


@dataclass(frozen=True)
class Leased:
    kind: Kind
    index: int
    eval_set: str = ""


async def test_a_row_pushed_out_of_the_cache_while_a_lease_waits_is_still_handed_out(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("controller.dataset_rows.CACHED_ROWS", 4)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"n": n}) + "\n" for n in range(200)))
    rows = DatasetRows(load_rows(path), None)

    async def ask(start: int) -> None:
        for at in range(start, start + 150):
            indices = [at % 200, (at + 1) % 200, (at + 7) % 200]
            texts = await rows.of([Leased(Kind.TRAIN, index) for index in indices])
            assert [json.loads(text)["n"] for text in texts] == indices

    await asyncio.gather(*(ask(17 * n) for n in range(8)))


class Odd(RowSource):
    """Three rows, of which the second one is what no message can carry, or cannot be read."""

    digest, fields, where = "0" * 32, ("prompt",), "odd.jsonl"

    def __init__(self, second: Any) -> None:
        self.second = second

    def __len__(self) -> int:
        return 3

    def _read(self, index: int) -> Row:
        if index == 1 and isinstance(self.second, Exception):
            raise self.second
        return {"prompt": "p", "extra": self.second if index == 1 else 0}


def leader_of(rows: Any, **more: Any) -> tuple[Any, list[cmd.Command[Any]]]:
    """A leader with these rows, and what it decides."""
    decided: list[cmd.Command[Any]] = []

    async def durable() -> None:
        pass

    commit = SimpleNamespace(durable=durable)
    return SimpleNamespace(rows=rows, decide=decided.append, group_commit=commit, **more), decided


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("second", "kind"),
    [
        ("\ud83d", ReturnKind.DROP),
        ({"\ude00": 1}, ReturnKind.DROP),
        (nested(100_000), ReturnKind.DROP),
        ({1, 2}, ReturnKind.DROP),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad \ud800"), ReturnKind.DROP),
        (OSError(5, "Input/output error"), ReturnKind.FAILED),
    ],
    ids=["half a pair", "in a name", "deep", "no JSON", "raises", "disk"],
)
async def test_a_row_that_cannot_be_given_ends_its_own_task_and_nothing_else(
    second: Any, kind: ReturnKind
) -> None:
    """LeaseTasks raised: every rollout worker ended, and the run failed at each start anew."""
    leader, decided = leader_of(DatasetRows(Odd(second), None))
    leases: Any = [
        SimpleNamespace(kind=Kind.TRAIN, eval_set="", index=n, task_id=f"t{n}", attempt=1)
        for n in range(3)
    ]
    tasks, rows = await _fitting(leader, ("r0", 1), leases, 1 << 20)
    assert [lease.task_id for lease in tasks] == ["t0", "t2"] and len(rows) == 2
    (returned,) = decided
    task_id, _, *found, detail = returned.args[2:]
    assert returned.name == "give_back" and [task_id, *found] == ["t1", kind, "malformed_row"]
    assert detail.startswith("row 1 of odd.jsonl: ") and detail.isascii()


async def test_large_rows_are_leased_in_parts_and_one_that_fits_no_message_is_dropped() -> None:
    """The reply with all of them was larger than any message: nothing was ever leased."""

    async def rows_of(leases: Any) -> list[str]:
        return ["x" * size for size in (40, 900, 40, 40, 1)]

    limits = SimpleNamespace(controller=SimpleNamespace(max_message_mb=1))
    context = SimpleNamespace(config=limits)
    leader, decided = leader_of(SimpleNamespace(of=rows_of), context=context)
    leases: Any = [SimpleNamespace(task_id=f"t{n}", attempt=1) for n in range(5)]
    tasks, rows = await _fitting(leader, ("r0", 1), leases, 100)
    assert [lease.task_id for lease in tasks] == ["t0", "t2"] and list(map(len, rows)) == [40, 40]
    returned = [(*command.args[2:3], *command.args[4:6]) for command in decided]
    assert returned == [
        ("t1", ReturnKind.DROP, "prompt_too_long"),
        ("t3", ReturnKind.HAND_BACK, "reply_full"),
        ("t4", ReturnKind.HAND_BACK, "reply_full"),
    ], "in their order: a small row does not overtake a large one"
    said = "its row has 900 bytes, and controller.max_message_mb = 1 allows 100"
    assert decided[0].args[-1] == said


def test_a_row_that_changed_since_the_scan_fails_alone(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    rows = DatasetRows(load_rows(path), None)
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), b"\xff" * 8, 16)
    leases: Any = [Leased(Kind.TRAIN, 0), Leased(Kind.TRAIN, 1)]
    first, second = asyncio.run(rows.of(leases))
    assert first == '{"prompt": "a"}' and "changed" in str(second)
