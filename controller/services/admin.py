"""AdminService: requests of users and launchers. Standbys answer those that only read."""

import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter

from controller.diagnosis.collect import why_of
from controller.export.group_content import GroupGone
from controller.ledger import decisions as cmd
from controller.replicated_controller import Controller
from controller.services.validation import STAGE_OF, check
from controller.status import setting_changes, status_of
from paceline.errors import RefusalCode
from paceline.observe.groups import Filter, Group, listed
from paceline.observe.vocabulary import DeathCause, FaultCause
from paceline.payloads.group_limits import Invalid, check_text
from paceline.providers.base import who_scales
from paceline.v1 import admin_pb2
from paceline.worker_pools import TRAINING

POSITION = re.compile(r"\d{1,20}(-\d{1,20})?")
FOLLOW_S = 5.0
ENTRIES = 64  # Of a reply, at most
_GROUP = TypeAdapter(Group)


async def get_status(
    controller: Controller, request: admin_pb2.StatusRequest
) -> admin_pb2.StatusReply:
    await controller.context.projector.look()
    return status_of(controller)


async def read_events(
    controller: Controller, request: admin_pb2.EventsRequest
) -> admin_pb2.EventsReply:
    check(request)
    position = request.after or "0-0"
    if not POSITION.fullmatch(position):
        raise Invalid(f"after = {position[:64]!r} is not a journal position")
    seen = controller.journal_topic.turn
    entries = await controller.journal.scan(position, count=ENTRIES)
    if not entries and request.wait_s > 0:
        await controller.journal_topic.wait(seen, min(request.wait_s, FOLLOW_S))
        entries = await controller.journal.scan(position, count=ENTRIES)
    records = [
        {"position": entry.at.entry, **record, "at": entry.t}
        for entry in entries
        for record in entry.records
    ]
    reached = entries[-1].at.entry if entries else position
    return admin_pb2.EventsReply(position=reached, events=map(json.dumps, records))


async def read_groups(
    controller: Controller, request: admin_pb2.GroupsRequest
) -> admin_pb2.GroupsReply:
    check(request)
    state, reader = controller.state, controller.groups
    if request.group_id:
        try:
            found = await reader.whole(state, request.group_id)
        except GroupGone as gone:
            raise cmd.CommandRefused(RefusalCode.UNKNOWN, str(gone)) from None
        group = _GROUP.validate_python(found)
        return admin_pb2.GroupsReply(json=_GROUP.dump_json(group).decode())
    fields = {name: getattr(request, name) for name in ("step", "row") if request.HasField(name)}
    chosen = Filter(**fields)
    groups = await reader.matching(state, chosen)
    if request.grep:
        groups = await reader.with_text(groups, request.grep)
    shown = listed(groups, chosen, request.sort or "recent", request.limit)
    return admin_pb2.GroupsReply(json=json.dumps(asdict(shown)))


async def report_exit(controller: Controller, request: admin_pb2.ExitReport) -> admin_pb2.ExitReply:
    leader = controller.leading()
    check(request)
    cause = FaultCause(request.cause or FaultCause.UNATTRIBUTED)
    detail = request.detail or f"exit status {request.exit_code}"
    await leader.ready()
    if request.incarnation:
        # Of an earlier incarnation it is no evidence about the present one: the ledger ignores it.
        key = request.worker_id, request.incarnation
        await leader.execute(cmd.declare_dead(*key, DeathCause.EXIT, detail, cause))
    else:
        exited = request.worker_id, request.host, request.pid
        await leader.execute(cmd.record_exit(*exited, cause, detail))
    return admin_pb2.ExitReply()


async def report_fault(
    controller: Controller, request: admin_pb2.FaultReport
) -> admin_pb2.FaultReply:
    leader = controller.leading()
    check(request)
    process = request.name, request.host, request.pid
    cause = FaultCause(request.cause or FaultCause.UNATTRIBUTED)
    await leader.execute(cmd.record_fault(request.request_id, *process, cause, request.detail))
    return admin_pb2.FaultReply()


def _command(
    command_of: Callable[[Any], cmd.Command[str]],
) -> Callable[[Controller, Any], Awaitable[admin_pb2.AdminReply]]:
    """Handler of a request that is one command of the ledger."""

    async def handle(controller: Controller, request: Any) -> admin_pb2.AdminReply:
        leader = controller.leading()
        check(request)
        return admin_pb2.AdminReply(message=await leader.execute(command_of(request)))

    return handle


drain = _command(lambda r: cmd.drain(r.request_id, r.worker_id, r.replace, r.incarnation))
set_host = _command(
    lambda r: (cmd.block_host if r.blocked else cmd.allow_host)(r.request_id, r.host)
)
pause = _command(lambda r: cmd.pause(r.request_id, r.paused))
save_checkpoint = _command(lambda r: cmd.request_checkpoint(r.request_id))
suspend = _command(lambda r: cmd.suspend(r.request_id, STAGE_OF[r.stage], r.reason))
continue_ = _command(lambda r: cmd.go_on(r.request_id))
stop = _command(lambda r: cmd.stop(r.request_id, r.reason or "stopped by request"))
_scale = _command(lambda r: cmd.scale(r.request_id, dict(r.desired), dict(r.expected)))


async def scale(controller: Controller, request: admin_pb2.ScaleRequest) -> admin_pb2.AdminReply:
    if not request.desired:
        raise Invalid("desired is empty")
    reply = await _scale(controller, request)
    if TRAINING not in request.desired:
        reply.message += f"; {who_scales(controller.config.fleet.provider, controller.run_dir)}"
    return reply


async def change_settings(
    controller: Controller, request: admin_pb2.SettingsRequest
) -> admin_pb2.SettingsReply:
    controller.leading()
    check(request)
    asked = {}
    for name, text in request.settings.items():
        try:
            asked[name] = json.loads(check_text(text, name, 4096))
        except (ValueError, RecursionError) as error:
            raise Invalid(f"{name}: the value is not JSON: {error}") from error
    message, changes = await controller.set_settings(
        request.request_id, asked, dry_run=request.dry_run
    )
    return admin_pb2.SettingsReply(message=message, changes=setting_changes(changes))


async def why(controller: Controller, request: admin_pb2.WhyRequest) -> admin_pb2.WhyReply:
    """Any controller answers, with what it can see."""
    await controller.context.projector.look()
    return why_of(controller)
