"""Kinds of events: their effect, their severity, and journals of other releases.

That every kind has words and survives the journal is tested on simulated runs:
``test_every_event_survives_the_journals_json_exactly``.
"""

import pytest

from controller.ledger import events as ev
from controller.ledger.enums import GroupFault
from paceline.observe.vocabulary import DeathCause, EventType, MeshEnd, Severity


def test_every_kind_has_an_effect_on_the_state_and_readers_know_no_other() -> None:
    assert all(kind.apply is not ev.Event.apply for kind in ev.TYPES.values())
    assert set(EventType) <= set(ev.TYPES)


@pytest.mark.parametrize(
    ("event", "severity"),
    [
        (ev.TermBegun(1, "controller-0", 1.0), Severity.INFO),
        (ev.TermBegun(3, "controller-1", 1.0, failover=True), Severity.WARNING),
        (ev.WorkerDied("p", 1, DeathCause.REPLACED, ""), Severity.INFO),
        (ev.WorkerDied("p", 1, DeathCause.LEASE, ""), Severity.WARNING),
        (ev.MeshBroken(1, MeshEnd.MEMBERSHIP), Severity.INFO),
        (ev.MeshBroken(1, MeshEnd.PEER_ERROR, "reset by peer"), Severity.WARNING),
        (ev.StepAborted(3, "suspended"), Severity.INFO),
        (ev.StepAborted(3, "all replicas are gone"), Severity.WARNING),
        (ev.RunFinished("completed", 1.0), Severity.INFO),
        (ev.RunFailed("r", "out of disk", 1.0), Severity.ERROR),
        (ev.TaskDropped("t5", 1, "prompt_too_long"), Severity.WARNING),
        (ev.GroupLost("t5", 1, GroupFault.PAYLOAD_LOST, "not there", "r0"), Severity.WARNING),
    ],
)
def test_losses_are_warnings_and_a_failed_run_is_an_error(
    event: ev.Event, severity: Severity
) -> None:
    assert event.severity is severity


def test_the_journal_of_a_later_release_is_refused_and_not_guessed() -> None:
    with pytest.raises(ValueError, match="unknown type 'TeaMade'"):
        ev.from_json({"type": "TeaMade"})
    with pytest.raises(KeyError):
        ev.from_json({"type": "Paused", "paused": True})
