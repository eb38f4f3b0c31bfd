"""Curves of the evaluation sets on the dashboard."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.v1 import rollout_pb2
from testbed.fleets.controller_processes import Controllers
from testbed.fleets.controllers import addresses, config_of, running_controllers, until
from testbed.workers.fake_workers import FakePolicy, FakeRollout, make_group
from tests.fixtures.browser import browser, errors_of
from tests.fixtures.rest import rest_url
from tests.process.rest.test_dashboard import open_page, rows_of, wait

STEPS = 24


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with browser(tmp_path_factory.mktemp("chromium")) as driver:
        yield driver


class Improving(FakeRollout):
    """More samples of a prompt are solved with each version; of a set's four, some prompts give
    none."""

    def group_for(self, lease: rollout_pb2.Lease) -> rollout_pb2.Group:
        version, size = max(0, self.version), lease.group_size
        group = make_group(
            lease.task, completions=size, tokens=self.tokens, version=version, kind=lease.kind
        )
        solved = round(size * min(1.0, 0.2 + version / STEPS + 0.1 * (lease.index % 5)))
        for number, completion in enumerate(group.completions):
            completion.reward = float(number < solved)
            completion.answer = "right" if number < solved else f"wrong {number % 2}"
        return group


async def run(controllers: Controllers) -> None:
    config, where = config_of(controllers), addresses(controllers)
    trainer = FakePolicy(config, where, "policy-0")
    workers = [trainer, Improving(config, where, "rollout-0", tasks_a_lease=2)]
    await asyncio.gather(*(w.start() for w in workers))
    loops = [asyncio.create_task(w.work(lambda: False)) for w in workers]
    await until(lambda: trainer.timings.steps >= STEPS)
    for loop in loops:
        loop.cancel()
    await asyncio.gather(*loops, return_exceptions=True)
    await asyncio.gather(*(w.stop(goodbye=False) for w in workers))


@pytest.fixture(scope="module")
def of_sets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controllers]:
    directory = tmp_path_factory.mktemp("sets")
    held_out = directory / "held_out.jsonl"
    held_out.write_text(
        "".join(json.dumps({"prompt": f"s{i}=", "answer": "1"}) + "\n" for i in range(10))
    )
    settings: dict[str, Any] = {
        "data": {"eval_path": str(held_out)},
        "train": {"checkpoint_every": 1000, "eval_every": 4, "max_staleness": 1},
        "fleet": {"lease_ttl_s": 60.0},
        "controller": {"leader_lease_s": 30.0},
        "evaluation": {
            "sets": {
                "math500": {"path": str(held_out), "samples": 8},
                "aime24": {"path": str(held_out), "samples": 4},
            }
        },
    }
    with running_controllers(directory, 1, **settings) as controllers:
        asyncio.run(run(controllers))
        yield controllers


SHOWN = """const charts = document.querySelectorAll('.chart:not([hidden])');
    return Object.fromEntries([...charts].map((chart) => [
    chart.querySelector('h3').textContent, chart.querySelector('.now').textContent]))"""
LEAD = "return document.querySelector('.chart.lead h3').textContent"
SAVED = """const done = arguments[0]; const make = URL.createObjectURL;
    URL.createObjectURL = (blob) => { blob.text().then(done); return make.call(URL, blob); };
    document.getElementById('curves-csv').click(); URL.createObjectURL = make;"""


def curves(page: Any, controllers: Controllers) -> dict[str, str]:
    """The newest values of each chart, by its title."""
    errors_of(page)
    open_page(page, rest_url(controllers), "learning")
    wait(lambda: rows_of(page, "steps-table"), "no table of steps")
    wait(lambda: "held-out" in " ".join(page.execute_script(SHOWN).values()), "no evaluation")
    assert errors_of(page) == []
    found: dict[str, str] = page.execute_script(SHOWN)
    return found


def test_each_set_has_a_chart_of_its_reward_and_one_of_what_it_solves(
    of_sets: Controllers, page: Any
) -> None:
    shown = curves(page, of_sets)
    assert page.execute_script(LEAD) == "Reward"
    assert shown["math500: reward"] == "held-out 1"
    assert shown["math500: solved"] == "pass@1 1   pass@8 1   maj@8 1"
    assert shown["aime24: solved"] == "pass@1 1   pass@4 1   maj@4 1"
    assert shown["held_out: solved"] == "pass@1 1"
    head, first, *_ = page.execute_async_script(SAVED).splitlines()
    assert {"eval_math500/pass@2", "eval_aime24/reward", "eval_reward_mean"} <= set(head.split(","))
    assert first.startswith("0,") and len(first.split(",")) == len(head.split(","))
