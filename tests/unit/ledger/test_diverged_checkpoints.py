"""What a replica wrote and published before it was outvoted counts for nothing."""

from controller.ledger import decisions as cmd
from controller.ledger import events as ev
from controller.ledger import views
from tests.fixtures.ledgers import Driven


def trained(*policy: str) -> Driven:
    """One step is committed, and the groups of the next one are there."""
    run = Driven.fleet(*policy, "r0", checkpoint_every=1)
    run.train()
    run.observe("r0", loaded=1)
    run.fill("r0", 4)
    return run


def outvote_p0(run: Driven) -> None:
    run.vote("p0", "wrong")
    run.vote("p1", "right")
    assert run.vote("p2", "right").outcome == "retry"


def test_a_checkpoint_of_an_outvoted_replica_is_refused() -> None:
    run = trained("p0", "p1", "p2")
    outvote_p0(run)
    run.checkpoint("p0")
    assert run.names() == []
    assert run.state.versions.checkpoint.path == ""
    assert run.ledger.take_garbage() == []


def test_a_checkpoint_that_came_before_the_vote_is_voided_and_never_restored() -> None:
    run = trained("p0", "p1", "p2")
    first = views.counts(run.state)
    run.checkpoint("p0")
    assert run.ledger.take_garbage() == [], "payloads of step 1 may still be needed"
    outvote_p0(run)
    assert run.state.versions.checkpoint.path == ""
    for p in ("p0", "p1", "p2"):
        run.die(p)
    run.policy("p3")
    formed = [e for e in map(ev.from_json, run.journal) if isinstance(e, ev.MeshFormed)][-1]
    assert (formed.restore, formed.checkpoint_path) == (True, "")
    assert views.counts(run.state).dispatched == first.dispatched
    assert run.state.steps.open is not None and run.state.steps.open.replay


def test_a_checkpoint_whose_writer_died_before_it_could_be_outvoted_is_voided_by_the_others() -> (
    None
):
    run = trained("p0", "p1", "p2")
    run.checkpoint("p0", "wrong")
    run.die("p0")
    run.vote("p1", "right")
    assert run.vote("p2", "right").outcome == "committed"
    assert run.event(ev.CheckpointVoided).worker_id == "p0"
    assert run.state.versions.checkpoint.path == ""
    assert run.ledger.take_garbage() == [], "no checkpoint covers step 1"
    run.failover()
    run.checkpoint("p1", "right")
    assert run.state.versions.checkpoint.step == 2


def test_groups_are_forgotten_once_the_replicas_agree_on_the_checkpoint() -> None:
    run = trained("p0", "p1")
    groups = set(views.live_payloads(run.state))
    run.checkpoint("p0")
    assert run.ledger.take_garbage() == []
    run.train()
    freed = set(run.ledger.take_garbage())
    assert freed and freed < groups


def test_a_healthy_replica_may_write_the_voided_step_again() -> None:
    run = trained("p0", "p1", "p2")
    run.checkpoint("p0", "wrong")
    outvote_p0(run)
    path = "checkpoints/step-1-1"
    assert run.state.versions.voided == [path]
    run.checkpoint("p1", "right")
    assert run.names() == ["CheckpointRecorded"]
    assert run.state.versions.agreed.path == path and run.state.versions.voided == []
    assert len(run.ledger.take_garbage()) == 4


def test_other_weights_than_the_replicas_agreed_on_are_not_recorded() -> None:
    run = trained("p0", "p1")
    run.vote("p0", "right")
    run.vote("p1", "right")
    who = ("p1", run.current["p1"])
    late = cmd.record_checkpoint(*who, 1, 1, "step-1", digest="wrong")
    assert run.do(late).useless == ("step-1",)
    assert run.state.versions.checkpoint.path == ""


def test_a_replica_that_was_outvoted_may_save_what_it_commits_with_the_others() -> None:
    """And the directory that was voided may be deleted then."""
    run = trained("p0", "p1", "p2")
    run.checkpoint("p0", "wrong")
    outvote_p0(run)
    run.failover()
    for p in ("p0", "p1", "p2"):
        run.vote(p, "right")
    assert run.checkpoint("p0").useless == ("checkpoints/step-1-1",)
    assert run.names() == ["CheckpointRecorded"]
    assert run.state.versions.checkpoint.version == 2


def test_weights_that_an_outvoted_replica_published_are_replaced() -> None:
    run = trained("p0", "p1", "p2")
    run.rollout("r1")
    links = run.state.fleet.links
    assert {name: link.publisher for name, link in links.items()} == {"r0": "p0", "r1": "p1"}
    outvote_p0(run)
    assert run.event(ev.WeightsWithdrawn).receivers == ("r0",)
    assert {name: (x.publisher, x.reload) for name, x in links.items()} == {
        "r0": ("p2", True),
        "r1": ("p1", False),
    }
    run.observe("r0", loaded=1)
    assert run.state.fleet.workers["r0"].loaded_version == -1, (
        "which of the two it is, nobody knows"
    )
    assert run.lease("r0", version=1).empty_reason == "weights"
    for p in ("p0", "p1", "p2"):
        run.vote(p, "right")
    run.observe("r0", loaded=2)
    assert run.state.fleet.workers["r0"].loaded_version == 2
    run.die("r1")
    run.rollout("r1")
    assert not run.state.fleet.links["r1"].reload


def test_an_outvoted_replica_does_not_pass_its_weights_off_as_the_checkpoints() -> None:
    """It is alone with a version that the checkpoint has, too: that number names its weights."""
    run = Driven.fleet("p0", "p1", "p2", "r0")
    run.fill("r0", 4)
    outvote_p0(run)
    for name in ("p1", "p2"):
        run.die(name)
    mesh = run.state.fleet.mesh
    assert mesh.restore and mesh.state_version == run.state.versions.version == 1
