"""Request to change settings of the run, over gRPC or REST."""

from collections.abc import Mapping
from typing import Any

from controller.ledger.state.settings import SettingChange
from controller.replicated_controller import Controller


async def set_settings(
    controller: Controller, request_id: str, asked: Mapping[str, Any], *, dry_run: bool
) -> tuple[str, dict[str, SettingChange]]:
    """The effect in words, and what has changed. Raises CommandRefused and NotLeading. ``asked``:
    JSON values by dotted name. A repeated request has one effect and gets the same words; its
    changes are empty then."""
    leader = controller.leading()
    await leader.ready()
    done = leader.ledger.state.requests.get(request_id)
    if done is not None:
        await leader.group_commit.durable()
        return done, {}
    # Nothing is awaited from here to the decision: two requests cannot both rest on the same
    # settings.
    command = leader.settings.change_command(leader.rows, request_id, asked)
    changes = leader.settings.effect_of(command)
    if dry_run:
        return "these settings can change now" if changes else "nothing would change", changes
    reply = leader.decide(command)
    await leader.group_commit.durable()
    return str(reply), changes
