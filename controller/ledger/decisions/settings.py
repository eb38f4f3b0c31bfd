"""Decisions about settings: changes by request, those that a leader's edited config brings,
extension of a run. A change is in force from the first step that was never opened. A step that is
open, or opens again, keeps the values and the groups of its plan, so all replicas and all attempts
use the same ones."""

from collections.abc import Mapping
from typing import Any

from controller.ledger import events as ev
from controller.ledger.decisions.commands import CommandRefused, Decider, by_request
from controller.ledger.enums import Phase
from controller.ledger.specs import LiveSpec
from controller.ledger.state.state import State
from paceline.errors import RefusalCode
from paceline.ids import Step


@by_request
def change_settings(
    d: Decider, now: float, request_id: str, settings: Mapping[str, Any], spec: LiveSpec
) -> None:
    """``settings``: to change, by dotted name; the shell has validated them with the others.
    ``spec``: the fields of the run's spec that follow from them."""
    s = d.state
    check_steps(s, spec)
    changes = s.settings.differing(settings)
    if not changes:
        raise CommandRefused(RefusalCode.INVALID, "the run has these settings already")
    first = Step(_newest_step(s) + 1)
    d.emit(ev.SettingsChanged(request_id, changes, {}, spec, first, now))


def check_steps(s: State, spec: LiveSpec) -> None:
    """Raises CommandRefused if the run cannot go on with ``spec``."""
    newest = _newest_step(s)
    if spec.steps < newest:
        raise CommandRefused(
            RefusalCode.INVALID,
            f"train.steps = {spec.steps}: step {newest} is under way or trained already. To end "
            "the run now, use paceline stop",
        )


def _newest_step(s: State) -> Step:
    """The newest step that has its settings: trained, open, or to be opened again."""
    return Step(max([s.versions.step + (s.steps.open is not None), *s.steps.replay]))


def take_over_config(d: Decider, now: float, spec: LiveSpec, file: Mapping[str, Any]) -> None:
    """Puts in force what was edited in ``file``, of a new leader. Raises CommandRefused."""
    s = d.state
    if stays_ended(s, spec.steps):
        return
    extended = s.ended
    check_steps(s, spec)
    edited = s.settings.edited(file)
    # A setting that the run does not know yet is new in this release, and has not been edited.
    known = {name: value for name, value in edited.items() if name in s.settings.values}
    if edited:
        first, changes = Step(_newest_step(s) + 1), s.settings.differing(known)
        d.emit(ev.SettingsChanged("", changes, edited, spec, first, now))
    if extended:
        d.emit(ev.RunExtended(spec.steps, now))
    d.settle_fleet(now)


def stays_ended(s: State, steps: int) -> bool:
    """True if the run has ended and does not go on to ``steps``: its settings are final."""
    extended = s.phase is Phase.FINISHED and s.versions.step >= s.run.steps < steps
    return s.ended and not extended
