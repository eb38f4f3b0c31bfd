"""Providers: what is missing is asked for, what is too much leaves, nothing is done twice."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from paceline.providers.base import NoProvider, leader_provider, moves
from paceline.providers.kubernetes import KubernetesProvider
from paceline.providers.ray import RayProvider
from paceline.v1 import admin_pb2, common_pb2
from paceline_launcher.preflight.findings import Start
from paceline_launcher.preflight.network import provider as check_provider
from tests.fixtures.configs import config_of


def status(*workers: tuple[str, str], phase: str = "running", **desired: int):
    reply = admin_pb2.StatusReply(phase=phase, desired=desired)
    for number, (name, state) in enumerate(workers):
        role = common_pb2.ROLE_POLICY if name.startswith("policy") else common_pb2.ROLE_ROLLOUT
        reply.workers.add(worker_id=name, role=role, state=state, incarnation=number + 1)
    reply.controllers.add(controller_id="controller-0", address="a:7000", state="leader")
    reply.controllers.add(controller_id="controller-1", address="b:7000", state="silent")
    return reply


names = st.sets(st.integers(min_value=0, max_value=30).map("rollout-{}".format), max_size=8)


@given(st.integers(min_value=0, max_value=8), names)
def test_after_the_moves_there_are_as_many_as_wanted(wanted: int, there: set[str]) -> None:
    missing, surplus = moves(wanted, there)
    assert len(there) + missing - len(surplus) == wanted
    assert set(surplus) <= there
    assert not (missing and surplus)
    left = there - set(surplus)
    oldest = sorted(there, key=lambda n: int(n.rpartition("-")[2]))[: len(left)]
    assert left == set(oldest)


async def test_without_a_provider_surplus_leaves_and_missing_workers_are_asked_for() -> None:
    drained: list[str] = []

    async def drain(worker: admin_pb2.WorkerStatus) -> None:
        drained.append(f"{worker.worker_id}/{worker.incarnation}")

    provider = NoProvider(drain)
    here = (("rollout-host-2", "running"), ("rollout-host-10", "starting"), ("rollout-3", "dead"))
    said = await provider.converge(status(*here, rollout=1, policy=2))
    assert drained == ["rollout-host-10/2"]
    assert said == (
        "2 of 2 policy workers are missing: start them with "
        "`paceline policy CONFIG --controllers a:7000`"
    )
    leaving = (("rollout-host-2", "running"), ("rollout-host-10", "draining"))
    assert "rollout" not in await provider.converge(status(*leaving, rollout=1))
    assert len(drained) == 1
    assert await provider.converge(status(phase="finished", rollout=3)) == ""


async def test_the_leader_runs_every_provider_but_the_local_one() -> None:
    async def drain(worker: admin_pb2.WorkerStatus) -> None: ...

    kinds = {
        "local": None,
        "kubernetes": KubernetesProvider,
        "ray": RayProvider,
        "none": NoProvider,
    }
    for name, kind in kinds.items():
        config = config_of(fleet={"provider": name})
        provider = leader_provider(config, "runs/x", drain)
        assert provider is None if kind is None else type(provider) is kind
        refused = list(check_provider(Start(config, Path("runs/x"), here=True)))
        assert bool(refused) == (name != "local"), "paceline up is the local provider"
