"""AdminService: requests of users and launchers. Standbys answer GetStatus and WatchEvents."""

import json
import re
from collections.abc import AsyncIterator

from controller.diagnosis.collect import why_of
from controller.ledger import commands as cmd
from controller.ledger.enums import SuspendStage
from controller.ledger.events import from_json, record_of
from controller.proto_encoding import wire_values
from controller.replicated_controller import Controller
from controller.services.validation import check_caller, check_request_id
from controller.status import setting_changes, status_of
from paceline.observe.vocabulary import DeathCause, FaultCause
from paceline.payloads.group_limits import Invalid, check_text
from paceline.providers.base import who_scales
from paceline.v1 import admin_pb2, common_pb2
from paceline.worker_pools import ROLES, role_of

POSITION = re.compile(r"\d{1,20}(-\d{1,20})?")
FOLLOW_S = 5.0
LAST_SIGNAL = -64
MAX_WORKERS = 100_000
MAX_SETTINGS = 64
MAX_DETAIL = 1024
_STAGES = {
    number: stage
    for stage, number in wire_values(SuspendStage, admin_pb2.SuspendStage, "SUSPEND_STAGE").items()
}


async def get_status(
    controller: Controller, request: admin_pb2.StatusRequest
) -> admin_pb2.StatusReply:
    await controller.context.projector.look()
    return status_of(controller)


async def watch_events(
    controller: Controller, request: admin_pb2.WatchRequest
) -> AsyncIterator[admin_pb2.EventRecord]:
    position = request.after or "0-0"
    if not POSITION.fullmatch(position):
        raise Invalid(f"after = {position[:64]!r} is not a journal position")
    while True:
        seen = controller.journal_topic.turn
        entries = await controller.journal.scan(position)
        for entry in entries:
            last = len(entry.events) - 1
            for number, event in enumerate(entry.events):
                # If a connection ends within an entry, the reader gets the whole entry again.
                reached = entry.at.entry if number == last else position
                record = record_of(from_json(event), event)
                own = {"position": entry.at.entry, **record, "at": entry.t}
                yield admin_pb2.EventRecord(position=reached, json=json.dumps(own))
            position = entry.at.entry
        if entries:
            continue
        if not request.follow:
            return
        await controller.journal_topic.wait(seen, FOLLOW_S)


async def report_exit(controller: Controller, request: admin_pb2.ExitReport) -> admin_pb2.ExitReply:
    leader = controller.leading()
    check_caller(common_pb2.Caller(worker_id=request.worker_id, incarnation=1))
    host = check_text(request.host, "host", 256)
    code = request.exit_code
    how = f"signal {-code}" if code < 0 else f"exit status {code}"
    if code < LAST_SIGNAL:
        # The launcher adopted the process, so it could not read the exit status.
        how = "exit status unknown"
    cause = cause_of(request.cause) if request.cause else _cause_of_exit(code)
    detail = check_text(request.detail, "detail", MAX_DETAIL) or how
    await leader.ready()
    if request.incarnation:
        # Of an earlier incarnation it is no evidence about the present one: the ledger ignores it.
        key = request.worker_id, request.incarnation
        await leader.execute(cmd.DeclareDead(*key, DeathCause.EXIT, detail, cause))
    else:
        await leader.execute(cmd.RecordExit(request.worker_id, host, request.pid, cause, detail))
    return admin_pb2.ExitReply()


async def report_fault(
    controller: Controller, request: admin_pb2.FaultReport
) -> admin_pb2.FaultReply:
    leader = controller.leading()
    check_caller(common_pb2.Caller(worker_id=request.name, incarnation=1))
    host = check_text(request.host, "host", 256)
    detail = check_text(request.detail, "detail", MAX_DETAIL)
    cause = cause_of(request.cause)
    request_id = check_request_id(request.request_id)
    await leader.ready()
    await leader.execute(
        cmd.RecordFault(request_id, request.name, host, request.pid, cause, detail)
    )
    return admin_pb2.FaultReply()


def cause_of(text: str) -> FaultCause:
    """Raises Invalid for an unknown cause."""
    try:
        return FaultCause(text)
    except ValueError:
        known = ", ".join(FaultCause)
        raise Invalid(f"cause = {text[:64]!r} is unknown: one of {known}") from None


def _cause_of_exit(code: int) -> FaultCause:
    """Cause for a launcher that looks at nothing but the exit status."""
    if code < LAST_SIGNAL:
        return FaultCause.UNATTRIBUTED
    if code == 0:
        return FaultCause.ASKED_TO_LEAVE
    return FaultCause.ERROR if code > 0 else FaultCause.KILLED


async def scale(controller: Controller, request: admin_pb2.ScaleRequest) -> admin_pb2.AdminReply:
    for what, counts in (("desired", request.desired), ("expected", request.expected)):
        for role, count in counts.items():
            if role_of(role) not in ROLES or len(role) > 64 or not 0 <= count <= MAX_WORKERS:
                raise Invalid(
                    f"{what} {role[:64]} = {count}: write policy, rollout or scorer:NAME, and 0 or "
                    "more"
                )
    if not request.desired:
        raise Invalid("desired is empty")
    request_id = check_request_id(request.request_id)
    command = cmd.Scale(request_id, dict(request.desired), dict(request.expected))
    reply = await _admin(controller, command)
    if reply.accepted:
        reply.message += f"; {who_scales(controller.config.fleet.provider, controller.run_dir)}"
    return reply


async def drain(controller: Controller, request: admin_pb2.DrainRequest) -> admin_pb2.AdminReply:
    check_caller(common_pb2.Caller(worker_id=request.worker_id, incarnation=1))
    request_id = check_request_id(request.request_id)
    return await _admin(
        controller, cmd.Drain(request_id, request.worker_id, request.replace, request.incarnation)
    )


async def pause(controller: Controller, request: admin_pb2.PauseRequest) -> admin_pb2.AdminReply:
    return await _admin(controller, cmd.Pause(check_request_id(request.request_id), request.paused))


async def save_checkpoint(
    controller: Controller, request: admin_pb2.SaveCheckpointRequest
) -> admin_pb2.AdminReply:
    return await _admin(controller, cmd.RequestCheckpoint(check_request_id(request.request_id)))


async def suspend(
    controller: Controller, request: admin_pb2.SuspendRequest
) -> admin_pb2.AdminReply:
    stage = _STAGES.get(request.stage)
    if stage is None:
        raise Invalid(f"stage = {request.stage} does not exist")
    reason = check_text(request.reason, "reason", 1024)
    return await _admin(
        controller, cmd.Suspend(check_request_id(request.request_id), stage, reason)
    )


async def continue_(
    controller: Controller, request: admin_pb2.ContinueRequest
) -> admin_pb2.AdminReply:
    return await _admin(controller, cmd.Continue(check_request_id(request.request_id)))


async def change_settings(
    controller: Controller, request: admin_pb2.SettingsRequest
) -> admin_pb2.SettingsReply:
    request_id = check_request_id(request.request_id)
    if len(request.settings) > MAX_SETTINGS:
        raise Invalid(f"at most {MAX_SETTINGS} settings in one request")
    asked = {}
    for name, text in request.settings.items():
        try:
            asked[check_text(name, "name", 128)] = json.loads(check_text(text, name[:128], 4096))
        except ValueError as error:
            raise Invalid(f"{name[:128]}: the value is not JSON: {error}") from error
    try:
        message, changes = await controller.set_settings(request_id, asked, dry_run=request.dry_run)
    except cmd.CommandRefused as refusal:
        return admin_pb2.SettingsReply(accepted=False, message=str(refusal))
    return admin_pb2.SettingsReply(accepted=True, message=message, changes=setting_changes(changes))


async def stop(controller: Controller, request: admin_pb2.StopRequest) -> admin_pb2.AdminReply:
    reason = check_text(request.reason, "reason", 1024) or "stopped by request"
    return await _admin(controller, cmd.Stop(check_request_id(request.request_id), reason))


async def why(controller: Controller, request: admin_pb2.WhyRequest) -> admin_pb2.WhyReply:
    """Any controller answers, with what it can see."""
    await controller.context.projector.look()
    return why_of(controller)


async def _admin(controller: Controller, command: cmd.AdminCommand) -> admin_pb2.AdminReply:
    try:
        done = await controller.leading().execute(command)
    except cmd.CommandRefused as refusal:
        return admin_pb2.AdminReply(accepted=False, message=str(refusal))
    return admin_pb2.AdminReply(accepted=True, message=str(done or ""))
