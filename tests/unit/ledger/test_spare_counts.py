"""Who counts spares and who does not."""

from controller.fleet.autoscale_policy import WorkerCounts
from controller.fleet_loops import settled
from paceline.providers.base import NoProvider, desired_of
from paceline.v1 import admin_pb2, common_pb2
from tests.fixtures.ledgers import Driven


def status(*workers: str, spares: int = 1) -> admin_pb2.StatusReply:
    reply = admin_pb2.StatusReply(phase="running", desired={"rollout": 2})
    if spares:
        reply.spares["rollout"] = spares
    for name in workers:
        reply.workers.add(worker_id=name, role=common_pb2.ROLE_ROLLOUT, state="running")
    return reply


async def test_a_provider_starts_spares_and_drains_what_is_beyond_them() -> None:
    drained: list[str] = []

    async def drain(worker: admin_pb2.WorkerStatus) -> None:
        drained.append(worker.worker_id)

    provider = NoProvider(drain)
    assert desired_of(status(), "rollout") == 3
    assert "1 of 3 rollout workers" in await provider.converge(status("r-0", "r-1"))
    assert await provider.converge(status("r-0", "r-1", "r-2")) == "" and drained == []
    await provider.converge(status("r-0", "r-1", "r-2", "r-3"))
    assert drained == ["r-3"]
    await provider.converge(status("r-0", "r-1", "r-2", spares=0))
    assert drained == ["r-3", "r-2"]


def test_the_autoscaler_takes_the_fleet_for_settled_with_its_spares_standing_by() -> None:
    run = Driven.fleet(
        "p0", "r0", "r1", "r2", desired={"policy": 1, "rollout": 2}, bounds={"rollout_spares": 1}
    )
    assert settled(run.state, WorkerCounts(1, 2))
    run.die("r2")
    assert settled(run.state, WorkerCounts(1, 2)), "a spare that is missing holds up nothing"
    run.die("r1")
    assert not settled(run.state, WorkerCounts(1, 2))
