"""Controllers with a REST interface, and workers that hand in text."""

from __future__ import annotations

import asyncio
import json

from benchmarks.load import FakePolicy, FakeRollout
from benchmarks.processes import Controllers
from paceline.v1 import rollout_pb2
from tests.helpers.controllers import addresses, config_of, until

HTML = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>&amp;"


DULL = 5
"""Of seven tasks in a row the one whose rewards are all equal."""


class TextRollout(FakeRollout):
    """Hands in prompts and completions that a careless page would run. One group in seven is dull."""

    def group_for(self, lease: rollout_pb2.Lease) -> rollout_pb2.Group:
        group = super().group_for(lease)
        group.prompt_text = f"prompt of {lease.task.task_id} {HTML}"
        dull = int(lease.task.task_id[1:].split(".")[0]) % 7 == DULL
        for number, completion in enumerate(group.completions):
            completion.reward = 1.0 if dull else float(number % 2)
            completion.text = f"{number} {HTML}"
            completion.reward_components["exact_match"] = completion.reward
        return group


def rest_url(controllers: Controllers, number: int = 0) -> str:
    where = controllers.run_dir / "controllers" / f"controller-{number}.json"
    return str(json.loads(where.read_text())["rest"])


def bearer(controllers: Controllers) -> dict[str, str]:
    token = (controllers.run_dir / "rest-token").read_text().strip()
    return {"Authorization": f"Bearer {token}"}


async def train(controllers: Controllers, steps: int) -> None:
    """A trainer and a generator work until ``steps`` steps are committed, and say goodbye."""
    config, where = config_of(controllers), addresses(controllers)
    trainer = FakePolicy(config, where, "policy-0")
    workers = [trainer, TextRollout(config, where, "rollout-0", tasks_a_lease=2)]
    await asyncio.gather(*(w.start() for w in workers))
    loops = [asyncio.create_task(w.work(lambda: False)) for w in workers]
    await until(lambda: trainer.timings.steps >= steps)
    for loop in loops:
        loop.cancel()
    await asyncio.gather(*loops, return_exceptions=True)
    await asyncio.gather(*(w.stop(goodbye=False) for w in workers))
