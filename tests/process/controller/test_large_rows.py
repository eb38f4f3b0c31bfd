"""Rows of a data set that together, or alone, are larger than a message."""

import asyncio
import json
from pathlib import Path

from controller.store.journal_audit import verify
from testbed.fleets.controllers import addresses, config_of, running_controllers, status, until
from testbed.workers.fake_workers import FakePolicy, FakeRollout

TOO_LARGE = 3


async def test_large_rows_are_leased_in_parts_and_one_that_fits_no_message_is_dropped(
    tmp_path: Path,
) -> None:
    """The reply with twelve rows was larger than any message: nothing was ever leased, and nobody
    was named."""
    data = tmp_path / "large.jsonl"
    sizes = [100_000 if n != TOO_LARGE else 900_000 for n in range(40)]
    lines = (json.dumps({"prompt": "x" * size, "answer": "1"}) for size in sizes)
    data.write_text("\n".join(lines) + "\n")
    with running_controllers(
        tmp_path,
        data={"path": str(data), "shuffle": False},
        controller={"max_message_mb": 1},
        train={"groups_per_step": 4, "max_staleness": 4, "steps": 6},
    ) as controllers:
        config, where = config_of(controllers), addresses(controllers)
        trainer = FakePolicy(config, where, "policy-0")
        generator = FakeRollout(config, where, "rollout-0", tasks_a_lease=12)
        await asyncio.gather(trainer.start(), generator.start())
        loops = [asyncio.create_task(w.work(lambda: False)) for w in (trainer, generator)]

        async def finished() -> bool:
            return (await status(trainer.control)).phase == "finished"

        try:
            await until(finished)
            reply = await status(trainer.control)
        finally:
            for loop in loops:
                loop.cancel()
            await asyncio.gather(*loops, return_exceptions=True)
            await asyncio.gather(*(w.stop(goodbye=False) for w in (trainer, generator)))
        assert dict(reply.tasks.dropped) == {"prompt_too_long": 1}
        report = verify(controllers.redis_url, "load")
        assert report.ok, report.problems
        events = (controllers.run_dir / "events.jsonl").read_text().splitlines()
    (dropped,) = [e for e in map(json.loads, events) if e["type"] == "TaskDropped"]
    assert "its row has 900," in dropped["detail"]
    assert "controller.max_message_mb = 1 allows" in dropped["detail"]
