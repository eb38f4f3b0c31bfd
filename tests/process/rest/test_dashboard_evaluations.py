"""Curves of evaluations on the dashboard: those of several sets, and those of recorded pairs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.v1 import common_pb2, policy_pb2, rollout_pb2
from testbed.fleets.controller_processes import Controllers
from testbed.fleets.controllers import addresses, config_of, running_controllers, until
from testbed.workers.fake_workers import FakePolicy, FakeRollout, make_group
from tests.fixtures.browser import browser, errors_of
from tests.fixtures.rest import rest_url
from tests.process.rest.test_dashboard import api, open_page, rows_of, wait

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


class Preferring(FakePolicy):
    """Tells pairs apart better with each step, on held-out rows as well."""

    def stats(self, plan: policy_pb2.StepPlan) -> dict[str, common_pb2.Stat]:
        return {**super().stats(plan), **_pairs(plan.step, 8)}

    async def step(self) -> None:
        caller = self.session.caller
        request = policy_pb2.PlanRequest(
            caller=caller, mesh_epoch=self.mesh_epoch, state_version=self.state_version, wait_s=0.5
        )
        reply = await self.control.call("PolicyService.NextPlan", request, None)
        if reply.state == policy_pb2.PLAN_STATE_OPEN:
            await self.vote(reply.plan)
        elif reply.state == policy_pb2.PLAN_STATE_EVALUATE:
            step = reply.evaluate_step
            measured = policy_pb2.HeldOutMeasured(
                caller=caller,
                step=step,
                version=self.state_version,
                rows=8,
                stats={"loss": _mean(0.7 - step / 60), **_pairs(step, 4)},
            )
            await self.control.call("PolicyService.RecordHeldOut", measured, None)
        else:
            await asyncio.sleep(0.01)


def _mean(value: float) -> common_pb2.Stat:
    return common_pb2.Stat(sum=8 * value, weight=8, max=value)


def _pairs(step: int, scale: int) -> dict[str, common_pb2.Stat]:
    chosen, rejected = 0.02 * step, -0.03 * step
    return {
        "pair_accuracy": _mean(0.5 + 0.5 * min(1.0, step * scale / 320)),
        "chosen_reward": _mean(chosen),
        "rejected_reward": _mean(rejected),
        "reward_margin": _mean(chosen - rejected),
    }


async def run(
    controllers: Controllers, policy: type[FakePolicy], rollout: type[FakeRollout]
) -> None:
    config, where = config_of(controllers), addresses(controllers)
    trainer = policy(config, where, "policy-0")
    workers = [trainer, rollout(config, where, "rollout-0", tasks_a_lease=2)]
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
        asyncio.run(run(controllers, FakePolicy, Improving))
        yield controllers


@pytest.fixture(scope="module")
def of_pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controllers]:
    directory = tmp_path_factory.mktemp("pairs")
    rows = directory / "pairs.jsonl"
    row = {"prompt": "s21=", "chosen": "12", "rejected": "21"}
    rows.write_text((json.dumps(row) + "\n") * 64)
    settings: dict[str, Any] = {
        "data": {
            "path": str(rows),
            "chosen_field": "chosen",
            "rejected_field": "rejected",
            "eval_path": str(rows),
        },
        "train": {"algorithm": "dpo", "checkpoint_every": 1000, "eval_every": 4},
        "rollout": {"source": "recorded", "group_size": 2},
        "fleet": {"lease_ttl_s": 60.0},
        "controller": {"leader_lease_s": 30.0},
    }
    with running_controllers(directory, 1, **settings) as controllers:
        asyncio.run(run(controllers, Preferring, FakeRollout))
        yield controllers


SHOWN = """return Object.fromEntries([...document.querySelectorAll('.chart:not([hidden])')].map((chart) => [
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


def test_recorded_pairs_show_held_out_accuracy_and_nothing_that_has_no_value(
    of_pairs: Controllers, page: Any
) -> None:
    shown = curves(page, of_pairs)
    assert page.execute_script(LEAD) == "Loss"
    newest = api(rest_url(of_pairs), "metrics?names=loss&points=360")["evals"][-1]
    for title, metric in (("Loss", "eval_loss"), ("Pair accuracy", "eval_pair_accuracy")):
        value = float(shown[title].partition("held-out ")[2])
        assert value == pytest.approx(newest[metric], abs=1e-3)
    assert not {"Reward", "Staleness", "Effective sample size", "Clip fraction"} & set(shown)
    head, *_ = page.execute_async_script(SAVED).splitlines()
    assert {"eval_loss", "eval_pair_accuracy"} <= set(head.split(","))
