"""The controller's cache of rows, under requests that overlap."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass

from controller.dataset_rows import DatasetRows
from controller.ledger.commands import Kind
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
