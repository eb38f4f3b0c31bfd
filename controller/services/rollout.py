"""RolloutService: tasks out, groups in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from controller.ledger.commands import AcceptGroup, LeaseResult, LeaseTasks, ReturnTask, Verdict
from controller.ledger.enums import EmptyReason, Kind, ReturnKind, VerdictCode
from controller.ledger.events import Topic
from controller.proto_encoding import wire_values
from controller.services.validation import (
    MAX_TASKS,
    Invalid,
    check_caller,
    check_group,
    check_task,
    check_text,
    check_wait,
)
from paceline.ids import Version
from paceline.v1 import rollout_pb2

if TYPE_CHECKING:
    from controller.leader import Leader
    from controller.replicated_controller import Controller

MAX_LEASED = 256
MAX_GROUPS = 1024

_KINDS = wire_values(Kind, rollout_pb2.TaskKind, "TASK_KIND")
_EMPTY = wire_values(EmptyReason, rollout_pb2.EmptyReason, "EMPTY_REASON")
_VERDICTS = wire_values(VerdictCode, rollout_pb2.Verdict, "VERDICT")
_RETURNS = {
    value: kind
    for kind, value in wire_values(ReturnKind, rollout_pb2.ReturnKind, "RETURN_KIND").items()
}


async def lease_tasks(
    controller: Controller, request: rollout_pb2.LeaseRequest
) -> rollout_pb2.LeaseReply:
    leader = controller.leading()
    worker_id, incarnation = check_caller(request.caller)
    deadline = leader.clock.monotonic() + check_wait(request.wait_s)
    if not 1 <= request.max_tasks <= MAX_TASKS:
        raise Invalid(f"max_tasks must be 1 to {MAX_TASKS}, not {request.max_tasks}")
    if request.lease_seq < 1:
        raise Invalid("lease_seq counts from 1")
    loaded_version = Version(request.loaded_version)
    if loaded_version < -1:
        raise Invalid("loaded_version must be -1 or a version")
    while True:
        polls = leader.long_polls[Topic.LEASE], leader.long_polls[Topic.ISOLATED]
        seen, seen_isolated = (poll.turn for poll in polls)
        worker = leader.ledger.state.fleet.current(worker_id, incarnation)
        if worker is not None:
            # Newer weights may have been loaded while the request waited.
            loaded_version = max(loaded_version, worker.loaded_version)
        result: LeaseResult = await leader.execute(
            LeaseTasks(
                worker_id=worker_id,
                incarnation=incarnation,
                lease_seq=request.lease_seq,
                max_tasks=min(request.max_tasks, MAX_LEASED),
                loaded_version=loaded_version,
            )
        )
        left_s = deadline - leader.clock.monotonic()
        if result.leases or result.empty_reason is EmptyReason.STOPPED or left_s <= 0:
            break
        if result.empty_reason is EmptyReason.ISOLATED:
            await polls[1].wait(seen_isolated, left_s)
        else:
            await polls[0].wait(seen, left_s)
    return rollout_pb2.LeaseReply(
        leases=await _with_rows(leader, result), empty_reason=_EMPTY[result.empty_reason]
    )


async def _with_rows(leader: Leader, result: LeaseResult) -> list[rollout_pb2.Lease]:
    rows = await leader.rows.of(result.leases)
    # The rest of the message is small: prompts as they are in the data set.
    room = leader.context.config.controller.max_message_mb << 19
    partials = await leader.partials.of(result.leases, room)
    group_size = leader.limits.group_size
    leases = []
    for lease, row in zip(result.leases, rows, strict=True):
        message = rollout_pb2.Lease(
            kind=_KINDS[lease.kind],
            epoch=lease.epoch,
            index=lease.index,
            row_json=row,
            seed=lease.seed,
            group_size=group_size if lease.kind is Kind.TRAIN else 1,
        )
        message.task.task_id = lease.task_id
        message.task.attempt = lease.attempt
        if lease.task_id in partials:
            message.partial.CopyFrom(partials[lease.task_id])
        leases.append(message)
    return leases


async def submit_groups(
    controller: Controller, request: rollout_pb2.SubmitRequest
) -> rollout_pb2.SubmitReply:
    leader = controller.leading()
    worker_id, incarnation = check_caller(request.caller)
    if len(request.groups) > MAX_GROUPS:
        raise Invalid(f"more than {MAX_GROUPS} groups in one request")
    await leader.ready()
    reply = rollout_pb2.SubmitReply()
    for group in request.groups:
        result = reply.results.add()
        result.task.CopyFrom(group.task)
        try:
            facts = check_group(group, leader.limits, leader.version)
        except Invalid as error:
            result.verdict = rollout_pb2.VERDICT_INVALID
            result.message = str(error)
            continue
        verdict = leader.decide_group(
            AcceptGroup(worker_id, incarnation, facts),
            (facts.task_id, facts.attempt),
            group.SerializeToString(),
        )
        _tell(verdict, result)
    await leader.group_commit.durable()
    return reply


async def return_tasks(
    controller: Controller, request: rollout_pb2.ReturnRequest
) -> rollout_pb2.ReturnReply:
    leader = controller.leading()
    worker_id, incarnation = check_caller(request.caller)
    if len(request.tasks) > MAX_TASKS:
        raise Invalid(f"more than {MAX_TASKS} tasks in one request")
    commands = []
    for returned in request.tasks:
        task_id, attempt = check_task(returned.task)
        if returned.kind not in _RETURNS:
            raise Invalid(f"kind of {task_id} is missing")
        commands.append(
            ReturnTask(
                worker_id=worker_id,
                incarnation=incarnation,
                task_id=task_id,
                attempt=attempt,
                kind=_RETURNS[returned.kind],
                reason=check_text(returned.reason, "reason", 64) or "unspecified",
                detail=returned.detail[:2048],
            )
        )
    await leader.ready()
    reply = rollout_pb2.ReturnReply()
    for command, returned in zip(commands, request.tasks, strict=True):
        result = reply.results.add()
        result.task.CopyFrom(returned.task)
        _tell(leader.decide(command), result)
    await leader.group_commit.durable()
    return reply


def _tell(verdict: Verdict, result: rollout_pb2.SubmitResult) -> None:
    result.verdict = _VERDICTS[verdict.code]
    if verdict.message:
        result.message = verdict.message
