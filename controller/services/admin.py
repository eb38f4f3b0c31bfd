"""AdminService: what people, launchers and dashboards ask. Reading works on a standby too."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from controller.export.event_words import described
from controller.ledger.commands import CommandRefused, DeclareDead, Drain, Pause, Scale, Stop
from controller.proto_encoding import status_of
from controller.services.validation import Invalid, check_caller, check_request_id, check_text
from paceline.v1 import admin_pb2, common_pb2

if TYPE_CHECKING:
    from controller.replicated_controller import Controller

POSITION = re.compile(r"\d{1,20}(-\d{1,20})?")
FOLLOW_S = 5.0
LAST_SIGNAL = -64
MAX_WORKERS = 100_000


async def get_status(
    controller: Controller, request: admin_pb2.StatusRequest
) -> admin_pb2.StatusReply:
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
                # Who is cut off in the middle of an entry gets it again from its beginning.
                reached = entry.at.entry if number == last else position
                yield admin_pb2.EventRecord(
                    position=reached, json=json.dumps({**described(event), "at": entry.t})
                )
            position = entry.at.entry
        if entries:
            continue
        if not request.follow:
            return
        await controller.journal_topic.wait(seen, FOLLOW_S)


async def report_exit(controller: Controller, request: admin_pb2.ExitReport) -> admin_pb2.ExitReply:
    leader = controller.leading()
    check_caller(common_pb2.Caller(worker_id=request.worker_id, incarnation=1))
    await leader.ready()
    worker = leader.ledger.state.fleet.workers.get(request.worker_id)
    if worker is None:
        return admin_pb2.ExitReply()
    same = (
        request.incarnation == worker.incarnation
        if request.incarnation
        else (request.pid, request.host) == (worker.pid, worker.host)
    )
    # Of an earlier incarnation: its successor is alive and none of the launcher's news.
    if same:
        code = request.exit_code
        how = f"signal {-code}" if code < 0 else f"exit status {code}"
        if code < LAST_SIGNAL:
            # Adopted by its launcher: its end was seen, its status was not.
            how = "exit status unknown"
        await leader.execute(DeclareDead(worker.worker_id, worker.incarnation, "exit", how))
    return admin_pb2.ExitReply()


async def scale(controller: Controller, request: admin_pb2.ScaleRequest) -> admin_pb2.AdminReply:
    for what, counts in (("desired", request.desired), ("expected", request.expected)):
        for role, count in counts.items():
            if role not in ("policy", "rollout") or not 0 <= count <= MAX_WORKERS:
                raise Invalid(f"{what} {role[:32]} = {count}: policy and rollout, 0 or more, exist")
    if not request.desired:
        raise Invalid("desired is empty")
    request_id = check_request_id(request.request_id)
    return await _admin(
        controller, Scale(request_id, dict(request.desired), dict(request.expected))
    )


async def drain(controller: Controller, request: admin_pb2.DrainRequest) -> admin_pb2.AdminReply:
    check_caller(common_pb2.Caller(worker_id=request.worker_id, incarnation=1))
    request_id = check_request_id(request.request_id)
    return await _admin(
        controller, Drain(request_id, request.worker_id, request.replace, request.incarnation)
    )


async def pause(controller: Controller, request: admin_pb2.PauseRequest) -> admin_pb2.AdminReply:
    return await _admin(controller, Pause(check_request_id(request.request_id), request.paused))


async def stop(controller: Controller, request: admin_pb2.StopRequest) -> admin_pb2.AdminReply:
    reason = check_text(request.reason, "reason", 1024) or "stopped by request"
    return await _admin(controller, Stop(check_request_id(request.request_id), reason))


async def _admin(
    controller: Controller, command: Scale | Drain | Pause | Stop
) -> admin_pb2.AdminReply:
    try:
        done = await controller.leading().execute(command)
    except CommandRefused as refusal:
        return admin_pb2.AdminReply(accepted=False, message=str(refusal))
    return admin_pb2.AdminReply(accepted=True, message=str(done or ""))
