"""The projection in its thread: what waits for it while it is held up."""

import threading
from functools import partial
from pathlib import Path

from paceline.observe.projection import Projector, Totals


def test_beginnings_that_follow_one_another_faster_than_they_are_read_keep_nothing(
    tmp_path: Path,
) -> None:
    """A standby whose Redis comes and goes loads the ledger each time. On a starved machine each
    load's entries and snapshot waited for the thread: hundreds of MB in minutes."""
    projector, held = Projector(tmp_path), threading.Event()
    read: list[int] = []

    def totals(n: int) -> Totals:
        read.append(n)
        return Totals()

    try:
        projector.begin_ask(lambda projection: held.wait(30))
        asked = []
        for n in range(20):
            projector.begin(partial(totals, n), f"{n}-0")
            projector.post(f"{n}-1", 1.0, [])
            asked.append(projector.begin_ask(lambda projection: projection))
        waiting = [entries for entries in projector._asked.values() if entries]
        assert [[position for position, *_ in entries] for entries in waiting] == [["19-1"]]
        held.set()
        assert len({id(one.result(30)) for one in asked}) == 1
        assert read == [19], "only the newest is read"
        assert projector._asked == {}
    finally:
        held.set()
        projector.close()
