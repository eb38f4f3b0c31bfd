"""Every event that people are shown is told in words, whatever it is; a new kind must bring its own."""

from __future__ import annotations

import json
from typing import Any

import pytest

from controller.export.event_words import COUNTED, described
from controller.ledger import events as ev
from controller.ledger.commands import Role
from paceline.run_view.event_history import EventHistory
from tests.fixtures.ledgers import facts

MEMBER = ev.Member("policy-0", 7, "10.0.0.1", False)
SHARDS = {"policy-0": (0, 1)}
HAPPENED: dict[str, ev.Event] = {
    "run started": ev.RunStarted(facts(), 1.0),
    "controller-1 leads": ev.TermBegun(3, "controller-1", 1.0),
    "policy-0 joined": ev.WorkerRegistered("policy-0", 7, Role.POLICY, "h", 9, "10.0.0.1", 1, -1),
    "policy-0 died (lease": ev.WorkerDied("policy-0", 7, "lease", ""),
    "rollout-0 is draining": ev.WorkerChanged("rollout-0", 7, "draining", -1, 3),
    "rollout-2 stands by": ev.SpareSet("rollout-2", 7, True),
    "rollout-2 works again": ev.SpareSet("rollout-2", 7, False),
    "task t5 dropped (prompt too long: 900 tokens)": ev.TaskDropped(
        "t5", 1, "prompt_too_long", "900 tokens"
    ),
    "mesh epoch 4 is over (peer error: reset by peer)": ev.MeshBroken(
        4, "peer_error", "reset by peer"
    ),
    "mesh epoch 5: policy-0": ev.MeshFormed(5, (MEMBER,), 3, 3, 0, False, ""),
    "back from step 9 to step 5": ev.RolledBack(5, 12, 9, 9, "checkpoints/step-000005"),
    "step 3 resharded": ev.StepResharded(3, 2, 5, SHARDS),
    "step 3 committed": ev.StepCommitted(3, 3, {"reward_mean": 0.5}, 1.0),
    "step 3 aborted: all replicas are gone": ev.StepAborted(3, "all replicas are gone"),
    "checkpoint of step 5": ev.CheckpointRecorded("policy-0", 5, 5, "checkpoints/step-5", 9, 0.1),
    "evaluation after step 5 over 8 prompts": ev.EvalScheduled(5, 5, 8),
    "evaluation after step 5: reward": ev.EvalRecorded(5, 5, 0.75, 8),
    "desired: policy=1, rollout=3": ev.Scaled("r", {"policy": 1, "rollout": 3}),
    "bounds: policy_max=4": ev.BoundsSet({"policy_max": 4}),
    "policy-0 is asked to leave": ev.Drained("r", "policy-0", {}),
    "paused": ev.Paused("r", True),
    "resumed": ev.Paused("r", False),
    "checkpoint requested after step 7": ev.CheckpointRequested("r", 7),
    "stop requested: enough": ev.StopRequested("r", "enough"),
    "run finished (completed)": ev.RunFinished("completed", 1.0),
    "run failed: out of disk": ev.RunFailed("r", "out of disk", 1.0),
}


def as_journalled(event: ev.Event) -> dict[str, Any]:
    written: dict[str, Any] = json.loads(json.dumps(ev.to_json(event)))
    return written


def test_there_are_words_for_every_kind_that_is_shown() -> None:
    shown = {type(event).__name__ for event in HAPPENED.values()}
    assert shown | COUNTED == set(ev.TYPES)


@pytest.mark.parametrize("words", HAPPENED)
def test_an_event_is_told_in_plain_words(words: str) -> None:
    event = described(as_journalled(HAPPENED[words]))
    assert words in event["text"]
    assert event["type"] not in event["text"] and not set(event["text"]) & set("{}[]")
    assert event["severity"] in ("info", "warning", "error")


@pytest.mark.parametrize(
    ("event", "noticed"),
    [
        *((ev.WorkerDied("p", 1, how, ""), True) for how in ("exit", "lease", "suspect", "wedged")),
        *(
            (ev.MeshBroken(1, why), True)
            for why in ("peer_error", "member_died", "diverged", "lost_commit")
        ),
        (ev.TermBegun(2, "controller-1", 1.0), True),
        (ev.TermBegun(1, "controller-0", 1.0), False),
    ],
)
def test_of_a_fault_it_is_said_how_it_was_noticed(event: ev.Event, noticed: bool) -> None:
    history = EventHistory()
    history.add({"position": "2-0", "n": 0, "t": 2.0, **described(as_journalled(event))})
    told = history.after(None, limit=9)[-1]
    assert bool(told.noticed) == noticed
    assert (told.severity == "fault") == noticed
