"""Every kind of event brings its words, severity and topics, and survives the journal."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from controller.ledger import events as ev
from controller.ledger.enums import (
    GroupFault,
    Kind,
    Lifecycle,
    ReleaseReason,
    Role,
    SuspendStage,
    VerdictCode,
)
from controller.ledger.events import Topic
from controller.ledger.specs import (
    EvalSet,
    LeasedTask,
    Member,
    SetResult,
    StatValue,
)
from paceline.evaluation.set_scores import RowScore
from paceline.observe.vocabulary import DeathCause, EventType, FaultCause, MeshEnd, Severity
from tests.fixtures.ledgers import group, run_spec

MEMBER = Member("policy-0", 7, "10.0.0.1", False)
SHARDS = {"policy-0": (0, 1)}
LEASE = LeasedTask("t5", 1, Kind.TRAIN, 0, 3, 99)
SPEC = run_spec().live
LISTED: dict[str, ev.Event] = {
    "group of task t5 is generated again (payload lost: policy-1: not there)": ev.GroupLost(
        "t5", 1, GroupFault.PAYLOAD_LOST, "policy-1: not there", "rollout-0"
    ),
    "run started": ev.RunStarted(run_spec(), 1.0),
    "controller-1 leads (term 3)": ev.TermBegun(3, "controller-1", 1.0, failover=True),
    "policy-0 joined (pid 9 on h)": ev.WorkerRegistered(
        "policy-0", 7, Role.POLICY, "h", 9, "10.0.0.1", 1, -1
    ),
    "policy-0 died (lease)": ev.WorkerDied("policy-0", 7, DeathCause.LEASE, ""),
    "policy-0 died (exit: signal 9)": ev.WorkerDied("policy-0", 7, DeathCause.EXIT, "signal 9"),
    "policy-0 died (killed; exit: signal 9)": ev.WorkerDied(
        "policy-0", 7, DeathCause.EXIT, "signal 9", FaultCause.KILLED, "b", 0.0, 5.0
    ),
    "policy-0 died (wedged: busy)": ev.WorkerDied(
        "policy-0", 7, DeathCause.WEDGED, "busy", FaultCause.WEDGED
    ),
    "redis (pid 12 on b): killed: signal 9": ev.ProcessFault(
        "r", "redis", "b", 12, FaultCause.KILLED, "signal 9", 5.0
    ),
    "the death of policy-0 is explained (network partition: it ran)": ev.FaultExplained(
        "policy-0", 7, FaultCause.NETWORK_PARTITION, "it ran"
    ),
    "host b is suspected: 3 of its processes' faults within 10 min (policy-0, rollout-0)": (
        ev.HostBlamed("b", 3, ("policy-0", "rollout-0"), 600.0, 5.0)
    ),
    "rollout-0 is draining": ev.WorkerChanged("rollout-0", 7, Lifecycle.DRAINING, -1, 3),
    "rollout-2 stands by": ev.SpareSet("rollout-2", 7, True),
    "rollout-2 works again": ev.SpareSet("rollout-2", 7, False),
    "task t5 dropped (prompt too long: 900 tokens)": ev.TaskDropped(
        "t5", 1, "prompt_too_long", "900 tokens"
    ),
    "rollout-0 serves nothing until it has loaded the weights again (parity failure: w differs)": (
        ev.ParityFailed("rollout-0", 7, 1, "w differs")
    ),
    "rollout-0 tries again to load weights (weights not staged: out of memory)": (
        ev.WeightsNotLoaded("rollout-0", 7, 1, "weights not staged: out of memory")
    ),
    "task t7 dropped (out of memory: p0: 80 GiB; sequences of 12, 18 and 9 tokens)": ev.TaskDropped(
        "t7", 1, "out_of_memory", "p0: 80 GiB", group=group(LEASE, lengths=(7, 13, 4))
    ),
    "mesh epoch 4 is over (peer error: reset by peer)": ev.MeshBroken(
        4, MeshEnd.PEER_ERROR, "reset by peer"
    ),
    "mesh epoch 5: policy-0": ev.MeshFormed(5, (MEMBER,), 3, 3, 0, False, ""),
    "run rolled back from step 9 to step 5: no replica holds the newest state": ev.RolledBack(
        5, 12, 9, 9, "checkpoints/step-000005"
    ),
    "step 3 resharded over mesh epoch 5": ev.StepResharded(3, 5, SHARDS),
    "step 3 committed, reward 0.500": ev.StepCommitted(3, 3, {"reward_mean": 0.5}, 1.0),
    "step 3 aborted: all replicas are gone": ev.StepAborted(3, "all replicas are gone"),
    "checkpoint of step 5: checkpoints/step-5": ev.CheckpointRecorded(
        "policy-0", 5, 5, "checkpoints/step-5", 9, 0.1
    ),
    "checkpoint of step 5 is the best so far: held-out reward 0.750": ev.BestCheckpointChosen(
        5, "checkpoints/step-5", 0.75
    ),
    "held-out reward fell to 0.500 after step 7; it was 0.750 after step 5": ev.HeldOutFell(
        7, 0.5, 5, 0.75
    ),
    "evaluation after step 5 started over 8 prompts": ev.EvalScheduled(5, 5, 8),
    "evaluation after step 5: reward 0.750 over 8 prompts": ev.EvalRecorded(5, 5, 0.75, 8),
    "evaluation after step 5: loss 0.7500 over 8 rows": ev.EvalRecorded(
        5, 5, None, 8, loss=0.75, measured={"loss": 0.75}
    ),
    "held-out loss rose to 0.7500 after step 7; it was 0.5000 after step 5": ev.HeldOutFell(
        7, -0.75, 5, -0.5, is_loss=True
    ),
    "checkpoint of step 5 is the best so far: held-out loss 0.7500": ev.BestCheckpointChosen(
        5, "checkpoints/step-5", -0.75, is_loss=True
    ),
    (
        "the training score rises (0.500 to 1.250) while truth/reward falls (0.750 after step 3, "
        "0.250 after step 7): the learned reward is probably being exploited; begin again with a "
        "larger train.loss.kl_coef, or stop at step 3"
    ): ev.RewardHackingSuspected(7, "truth/reward", 0.25, 3, 0.75, 1.25, 0.5),
    "evaluation after step 6: no prompt could be scored": ev.EvalRecorded(6, 6, None, 0),
    "evaluation after step 5 started over 8 prompts of math, rare": ev.EvalScheduled(
        5, 5, 8, (EvalSet("math", 6, 4), EvalSet("rare", 2))
    ),
    "evaluation after step 5: math: pass@4 0.750, reward 0.500 over 6 prompts; rare: no prompt could be scored": (
        ev.EvalRecorded(
            5,
            5,
            0.5,
            6,
            metric="math/pass@4",
            score=0.75,
            sets=(
                SetResult("math", 6, 0, {"reward": 0.5, "pass@4": 0.75}),
                SetResult("rare", 0, 2, {}),
            ),
        )
    ),
    "desired counts set to policy=1, rollout=3": ev.Scaled("r", {"policy": 1, "rollout": 3}),
    "limits of the desired counts set to policy_max=4": ev.BoundsSet({"policy_max": 4}),
    "limits of the desired counts set to none": ev.BoundsSet({}),
    "policy-0 is asked to leave": ev.Drained("r", "policy-0", {}),
    "policy-1 is asked to leave; desired counts set to policy=1": ev.Drained(
        "r", "policy-1", {"policy": 1}
    ),
    "settings changed from step 4: train.optimizer.lr 1e-06 -> 5e-07": ev.SettingsChanged(
        "r", {"train.optimizer.lr": (1e-6, 5e-7)}, {"train.optimizer.lr": 5e-7}, SPEC, 4, 1.0
    ),
    "run extended to 20 steps": ev.RunExtended(20, 1.0),
    "run paused": ev.Paused("r", True),
    "run resumed": ev.Paused("r", False),
    "checkpoint of step 5 is void (checkpoints/step-5): the other replicas' weights differ from "
    "those "
    "that policy-0 wrote": ev.CheckpointVoided("policy-0", 5, 5, "checkpoints/step-5"),
    "weights of version 5 from policy-0 are withdrawn: the other replicas' weights differ "
    "(2 receivers)": ev.WeightsWithdrawn("policy-0", 5, ("rollout-0", "rollout-1")),
    "checkpoint of step 7 requested": ev.CheckpointRequested("r", 7),
    "stop for now requested: Ctrl-C": ev.SuspendRequested("r", "Ctrl-C", SuspendStage.FINISH_STEP),
    "run stopped for now after step 7; a checkpoint covers it": ev.RunSuspended(7, 7),
    "run stopped for now after step 7; the newest checkpoint is of step 5": ev.RunSuspended(7, 5),
    "run goes on": ev.RunContinued("r"),
    "step 3 left: its groups are kept for the run to go on": ev.StepAborted(3, "suspended"),
    "stop requested: enough": ev.StopRequested("r", "enough"),
    "run finished (completed)": ev.RunFinished("completed", 1.0),
    "run failed: out of disk": ev.RunFailed("r", "out of disk", 1.0),
}
COUNTED: dict[str, ev.Event] = {
    "stop for now requested": ev.SuspendRequested("r", "", SuspendStage.AT_ONCE),
    "rollout-0 leased 1 tasks": ev.TasksLeased("rollout-0", 7, 1, (LEASE,)),
    "group of task t5 accepted from rollout-0": ev.GroupAccepted("rollout-0", group(LEASE)),
    "2 rows passed over by the curriculum": ev.RowsPassedOver((4, 6)),
    "task t5 taken back from rollout-0 (owner died: exit)": ev.TaskReleased(
        "t5", 1, "rollout-0", ReleaseReason.OWNER_DIED, True, "exit", True
    ),
    "task t6 dropped (stale: 3 steps old)": ev.TaskDropped(
        "t6", 1, "stale", "3 steps old", VerdictCode.TOO_STALE
    ),
    "task t7 dropped (expired: 9 steps old)": ev.TaskDropped(
        "t7", 1, "expired", "9 steps old", VerdictCode.TOO_STALE, group(LEASE)
    ),
    "rollout-0 is running": ev.WorkerChanged("rollout-0", 7, Lifecycle.RUNNING, -1, 3),
    "evaluation prompt e5.0 scored, reward 1.000": ev.EvalTaskDone(
        "e5.0", 1, "rollout-0", 1.0, 3, RowScore(1.0, 4, 4, 1.0, 20, 1)
    ),
    "step 3 opened with 2 groups": ev.StepOpened(3, 2, 5, ("t1", "t2"), SHARDS, False),
    "policy-0 voted for step 3": ev.VoteCast(
        "policy-0", 7, 3, 5, "same", {"loss": StatValue(1.0, 2.0, 3.0)}
    ),
    "policy-0 computes suspect group t1 by itself": ev.GroupTried("policy-0", 3, "t1"),
    "policy-0 died in step 3, perhaps because of t1": ev.GroupsBlamed("policy-0", 3, ("t1",), True),
    "policy-0 died in step 3, perhaps because of one of 2 groups": ev.GroupsBlamed(
        "policy-0", 3, ("t1", "t2"), False
    ),
    "weights link 9 from policy-0 to rollout-0": ev.LinkAssigned(9, "policy-0", 7, "rollout-0", 8),
}
EXAMPLES = {**LISTED, **COUNTED}


def journalled(event: ev.Event) -> dict[str, Any]:
    written: dict[str, Any] = json.loads(json.dumps(ev.to_json(event)))
    return written


def test_every_kind_has_an_example_here_and_an_effect_on_the_state() -> None:
    assert {type(event).__name__ for event in EXAMPLES.values()} == set(ev.TYPES)
    assert all(kind.apply is not ev.Event.apply for kind in ev.TYPES.values())


@pytest.mark.parametrize("words", EXAMPLES)
def test_an_event_has_words_severity_and_topics(words: str) -> None:
    event = EXAMPLES[words]
    assert event.text() == words
    assert isinstance(event.severity, Severity)
    assert event.wakes <= frozenset(Topic)
    assert event.listed == (words in LISTED)


@pytest.mark.parametrize("words", EXAMPLES)
def test_the_journal_gives_back_the_same_event(words: str) -> None:
    event = EXAMPLES[words]
    again = ev.from_json(journalled(event))
    assert again == event and type(again) is type(event)


@pytest.mark.parametrize("words", EXAMPLES)
def test_records_of_listed_events_carry_severity_and_text(words: str) -> None:
    event = EXAMPLES[words]
    data = journalled(event)
    record = json.loads(json.dumps(ev.record_of(event, data)))
    added = {"severity": str(event.severity), "text": words} if words in LISTED else {}
    assert record == {**data, **added}


def test_only_losses_are_warnings_and_only_the_failed_run_is_an_error() -> None:
    by_severity: dict[Severity, set[str]] = {severity: set() for severity in Severity}
    for event in LISTED.values():
        if event != LISTED["step 3 left: its groups are kept for the run to go on"]:
            by_severity[event.severity].add(type(event).__name__)
    assert by_severity[Severity.ERROR] == {"RunFailed"}
    assert by_severity[Severity.WARNING] == {
        *("TermBegun", "WorkerDied", "TaskDropped", "MeshBroken", "RolledBack", "StepAborted"),
        *("ParityFailed", "WeightsNotLoaded", "GroupLost"),
        *("CheckpointVoided", "WeightsWithdrawn"),
        *("HeldOutFell", "RewardHackingSuspected"),
        *("ProcessFault", "HostBlamed"),
    }
    assert ev.TermBegun(1, "controller-0", 1.0).severity is Severity.INFO
    assert ev.WorkerDied("p", 1, DeathCause.REPLACED, "").severity is Severity.INFO
    assert ev.MeshBroken(1, MeshEnd.MEMBERSHIP).severity is Severity.INFO


def test_an_event_of_an_earlier_release_lacks_newer_fields_and_is_read() -> None:
    accepted = journalled(ev.GroupAccepted("rollout-0", group(LEASE)))
    del accepted["lengths"]
    dropped = journalled(ev.TaskDropped("t5", 1, "prompt_too_long"))
    del dropped["group"]
    lost = ev.GroupLost("t5", 1, GroupFault.PAYLOAD_LOST, "policy-1: not there", "rollout-0", (9,))
    lost_before = journalled(lost)
    del lost_before["lengths"]
    assert ev.from_json(lost_before) == replace(lost, lengths=())
    assert ev.from_json(accepted) == ev.GroupAccepted("rollout-0", group(LEASE))
    assert ev.from_json(dropped) == ev.TaskDropped("t5", 1, "prompt_too_long")


def test_the_journal_of_a_later_release_is_refused_and_not_guessed() -> None:
    with pytest.raises(ValueError, match="unknown type 'TeaMade'"):
        ev.from_json({"type": "TeaMade"})
    with pytest.raises(KeyError):
        ev.from_json({"type": "Paused", "paused": True})


def test_an_event_of_an_earlier_release_has_the_defaults_of_fields_that_came_later() -> None:
    event = ev.CheckpointRecorded("policy-0", 5, 5, "checkpoints/step-5", 9, 0.1, "digest")
    old = journalled(event)
    del old["digest"]
    assert ev.from_json(old) == ev.CheckpointRecorded(
        "policy-0", 5, 5, "checkpoints/step-5", 9, 0.1
    )


def test_readers_of_a_run_know_only_types_that_exist() -> None:
    assert set(EventType) <= set(ev.TYPES)
