"""Late, masked and dropped groups: their shares, lengths and ages in REST, Prometheus and the
dashboard."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline.v1 import common_pb2, policy_pb2, rollout_pb2
from testbed.fleets.controller_processes import Controllers
from testbed.fleets.controllers import addresses, config_of, running_controllers, until
from testbed.workers.fake_workers import FakePolicy, FakeRollout, make_group
from tests.fixtures.rest import rest_url
from tests.process.rest.test_dashboard import api

BATCH = 4
STEPS_BEFORE = 5
# Versions and tokens of each completion in the last step, and before it of a group that no step may
# train.
EXPIRED = ((0, 40),)
LAST_STEP = (((1, 20), (5, 10)), ((3, 10), (5, 10)), ((5, 16),), ((5, 16),))


class Weighing(FakePolicy):
    """Half of its tokens have the importance weight 1, half 0.5."""

    def stats(self, plan: policy_pb2.StepPlan) -> dict[str, common_pb2.Stat]:
        n = plan.total_tokens
        weights = {
            "ratio": common_pb2.Stat(sum=0.75 * n, weight=n, max=1.0),
            "ratio_square": common_pb2.Stat(sum=0.625 * n, weight=n, max=1.0),
        }
        return super().stats(plan) | weights


async def hand_in(worker: FakeRollout, versions: Sequence[tuple[int, int]]) -> int:
    """A group whose completions have tokens of these versions; the verdict."""
    reply = await worker.lease(30.0)
    (lease,) = reply.leases
    tokens = sum(length for _, length in versions)
    group = make_group(lease.task, completions=lease.group_size, tokens=tokens, version=0)
    for completion in group.completions:
        del completion.versions[:]
        for version, length in versions:
            completion.versions.add(version=version, length=length)
    result: rollout_pb2.SubmitResult = await worker.submit(group)
    return result.verdict


async def train(controllers: Controllers) -> None:
    config, where = config_of(controllers), addresses(controllers)
    trainer = Weighing(config, where, "policy-0")
    worker = FakeRollout(config, where, "rollout-0", tasks_a_lease=1)
    await asyncio.gather(trainer.start(), worker.start())
    working = asyncio.create_task(trainer.work(lambda: False))
    for version in range(STEPS_BEFORE):
        await until(lambda at=version: worker.version == at)  # type: ignore[misc]
        for _ in range(BATCH):
            verdict = await hand_in(worker, ((version, 8),))
            assert verdict == rollout_pb2.VERDICT_ACCEPTED
    await until(lambda: worker.version == STEPS_BEFORE)
    assert await hand_in(worker, EXPIRED) == rollout_pb2.VERDICT_TOO_STALE
    for versions in LAST_STEP:
        assert await hand_in(worker, versions) == rollout_pb2.VERDICT_ACCEPTED
    await until(lambda: trainer.timings.steps == STEPS_BEFORE + 1)
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    await asyncio.gather(trainer.stop(goodbye=False), worker.stop(goodbye=False))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controllers]:
    settings = {
        "train": {"groups_per_step": BATCH, "max_staleness": 1, "max_token_age": 2},
        "fleet": {"lease_ttl_s": 60.0},
        "controller": {"leader_lease_s": 30.0},
    }
    with running_controllers(tmp_path_factory.mktemp("ages"), 1, **settings) as controllers:
        asyncio.run(train(controllers))
        yield controllers


def test_shares_lengths_and_ages_of_the_newest_step_are_served(served: Controllers) -> None:
    ages = api(rest_url(served), "flow")["ages"]
    assert ages["late_share"] == pytest.approx(2 / 4)
    assert ages["masked_share"] == pytest.approx(20 / 82)
    assert ages["dropped_share"] == pytest.approx(1 / 5)
    lengths = {"all": 20.5, "late": 25.0, "masked": 30.0, "dropped": 40.0}
    assert ages["response_tokens"] == pytest.approx(lengths)
    shares = {age: share for age, share in ages["token_ages"].items() if share}
    assert shares == pytest.approx({"0": 52 / 62, "2": 10 / 62})
    assert ages["ess"] == pytest.approx(0.75**2 / 0.625)


def test_prometheus_has_the_same_numbers(served: Controllers) -> None:
    url = rest_url(served)
    ages = api(url, "flow")["ages"]
    found = {}
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=60).text):
        for sample in family.samples:
            labels = ",".join(sample.labels.values())
            found[f"{sample.name} {labels}".strip()] = sample.value
    for name in ("late_share", "masked_share", "dropped_share"):
        assert found[f"paceline_{name}"] == pytest.approx(ages[name])
    for name in ("late", "masked", "dropped"):
        length = found[f"paceline_{name}_response_tokens_mean"]
        assert length == pytest.approx(ages["response_tokens"][name])
    assert found["paceline_effective_sample_size_ratio"] == pytest.approx(ages["ess"])
    assert found["paceline_token_age_share 2"] == pytest.approx(10 / 62)
