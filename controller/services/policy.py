"""PolicyService: plans, rejected groups, votes, checkpoints."""

import logging
import re
from pathlib import PurePosixPath

from controller.diagnosis.bottleneck import utilisation_of
from controller.directives import message_of, wire_values
from controller.leader import Leader
from controller.ledger import decisions as cmd
from controller.ledger.decisions.commands import caller as check_worker
from controller.ledger.decisions.held_out import due_for, spared
from controller.ledger.enums import VoteOutcome
from controller.ledger.events import Topic
from controller.ledger.state.state import State
from controller.ledger.state.token_ages import trained_sequences, trained_tokens
from controller.ledger.state.versions import REMEMBERED_CHECKPOINTS
from controller.ledger.step_metrics import reward_totals
from controller.services.validation import FAULT_OF, Caller, check_stats, from_worker
from paceline.ids import MeshEpoch, Step, TaskId, Version
from paceline.payloads.group_limits import Invalid, check_task
from paceline.process.structured_log import event
from paceline.v1 import common_pb2, policy_pb2

log = logging.getLogger(__name__)

HELD_OUT_AT_ONCE = 64  # Rows that are read before the size of the reply is looked at again
MOST_KEPT = 32  # Older checkpoints that stay while no replica of Redis confirms records

_OUTCOMES = wire_values(VoteOutcome, policy_pb2.Outcome, "OUTCOME")


@from_worker
async def next_plan(
    leader: Leader, caller: Caller, request: policy_pb2.PlanRequest
) -> policy_pb2.PlanReply:
    deadline = leader.clock.monotonic() + request.wait_s
    while True:
        await leader.ready()
        seen = leader.long_polls[Topic.PLAN].turn
        check_worker(leader.ledger.state, *caller)
        formed, holds = MeshEpoch(request.mesh_epoch), Version(request.state_version)
        reply = plan_of(leader.ledger.state, *caller, formed, holds)
        # A replica acts on the plan, so the acceptance of its groups must be durable before.
        await leader.group_commit.durable()
        left_s = deadline - leader.clock.monotonic()
        if reply.state != policy_pb2.PLAN_STATE_WAIT or left_s <= 0:
            return reply
        await leader.long_polls[Topic.PLAN].wait(seen, left_s)


def plan_of(
    state: State, worker_id: str, incarnation: int, mesh_epoch: MeshEpoch, state_version: Version
) -> policy_pb2.PlanReply:
    """The plan, if one is open, for a replica that formed ``mesh_epoch`` and holds the state of
    ``state_version``."""
    mesh = state.fleet.whole_mesh
    rank = mesh.rank(worker_id, incarnation) if mesh is not None else -1
    formed = mesh is not None and mesh.epoch == mesh_epoch
    if formed and (due := due_for(state, worker_id, incarnation, state_version)) is not None:
        return policy_pb2.PlanReply(state=policy_pb2.PLAN_STATE_EVALUATE, evaluate_step=due)
    if state.ended or state.versions.step >= state.run.steps:
        return policy_pb2.PlanReply(state=policy_pb2.PLAN_STATE_FINISHED)
    # Who forms an epoch holds its state. A replica without it formed one whose number was lost with
    # the end of the journal and is given again.
    if mesh is None or not formed or rank < 0 or state_version < mesh.state_version:
        return policy_pb2.PlanReply(state=policy_pb2.PLAN_STATE_EPOCH_OVER)
    step = state.steps.open
    if step is None or state_version != step.version:
        return policy_pb2.PlanReply(state=policy_pb2.PLAN_STATE_WAIT)
    records = state.tasks.records
    metas = {task_id: g for task_id in step.groups if (g := records[task_id].group) is not None}
    groups = metas.values()
    rewards = reward_totals(groups)
    shard = step.shard(worker_id)
    plan = message_of(
        policy_pb2.StepPlan,
        step,
        next_version=step.version + 1,
        shard=[
            common_pb2.TaskRef(task_id=task_id, attempt=records[task_id].attempt)
            for task_id in shard
        ],
        groups=[
            message_of(
                policy_pb2.PlannedGroup, metas[task_id], suspect=task_id in state.steps.suspects
            )
            for task_id in shard
        ],
        total_tokens=sum(trained_tokens(state, g, step.step) for g in groups),
        total_sequences=sum(trained_sequences(state, g, step.step) for g in groups),
        total_groups=len(metas),
        total_samples=rewards.samples,
        reward_sum=rewards.total,
        reward_squares=rewards.squares,
        within_squares=rewards.within,
        rank=rank,
        size=len(mesh.members),
        version_epochs=[
            message_of(policy_pb2.VersionEpoch, epoch) for epoch in reversed(state.versions.epochs)
        ],
        oldest_step=max(0, step.step - 1 - step.settings.token_age),
        lr=step.settings.lr,
        checkpoint=step.step % state.run.checkpoint_every == 0,
    )
    return policy_pb2.PlanReply(state=policy_pb2.PLAN_STATE_OPEN, plan=plan)


@from_worker
async def reject_groups(
    leader: Leader, caller: Caller, request: policy_pb2.RejectRequest
) -> policy_pb2.RejectReply:
    command = cmd.reject(
        *caller,
        Step(request.step),
        dict(check_task(task) for task in request.groups),
        FAULT_OF[request.fault],
        request.detail,
    )
    return policy_pb2.RejectReply(left=await leader.execute(command))


@from_worker
async def try_group(
    leader: Leader, caller: Caller, request: policy_pb2.TryRequest
) -> policy_pb2.TryReply:
    task_id = TaskId("")
    if request.task_id:
        task_id, _ = check_task(common_pb2.TaskRef(task_id=request.task_id, attempt=1))
    command = cmd.try_group(*caller, Step(request.step), MeshEpoch(request.mesh_epoch), task_id)
    return policy_pb2.TryReply(stands=await leader.execute(command))


@from_worker
async def vote(
    leader: Leader, caller: Caller, request: policy_pb2.VoteRequest
) -> policy_pb2.VoteReply:
    deadline = leader.clock.monotonic() + request.wait_s
    command = cmd.vote(
        *caller,
        Step(request.step),
        MeshEpoch(request.mesh_epoch),
        request.weights_digest,
        check_stats(request.stats),
        request.term,
        utilisation_of(leader),
    )
    while True:
        seen = leader.long_polls[Topic.VOTE].turn
        result = await leader.execute(command)
        left_s = deadline - leader.clock.monotonic()
        if result.outcome is not VoteOutcome.PENDING or left_s <= 0:
            return policy_pb2.VoteReply(outcome=_OUTCOMES[result.outcome], version=result.version)
        await leader.long_polls[Topic.VOTE].wait(seen, left_s)


@from_worker
async def held_out_rows(
    leader: Leader, caller: Caller, request: policy_pb2.HeldOutRequest
) -> policy_pb2.HeldOutReply:
    check_worker(leader.ledger.state, *caller)
    total = leader.ledger.state.run.eval_rows
    reply = policy_pb2.HeldOutReply(total=total)
    room = leader.context.config.controller.max_message_mb << 19
    for first in range(request.first, total, HELD_OUT_AT_ONCE):
        rows = await leader.rows.held_out(first, min(first + HELD_OUT_AT_ONCE, total))
        for row in rows:
            room -= len(row.encode()) + 16
            if room < 0 and reply.rows:
                return reply
            reply.rows.append(row)
    return reply


@from_worker
async def record_held_out(
    leader: Leader, caller: Caller, request: policy_pb2.HeldOutMeasured
) -> policy_pb2.HeldOutRecorded:
    stats = check_stats(request.stats)
    if request.rows and "loss" not in stats:
        raise Invalid("stats has no loss")
    measured = {name: stat.sum / stat.weight for name, stat in stats.items() if stat.weight > 0}
    await leader.execute(
        cmd.record_held_out(
            *caller,
            step=Step(request.step),
            version=Version(request.version),
            measured=measured,
            rows=request.rows,
            left_out=request.left_out,
        )
    )
    return policy_pb2.HeldOutRecorded()


@from_worker
async def record_checkpoint(
    leader: Leader, caller: Caller, request: policy_pb2.CheckpointRequest
) -> policy_pb2.CheckpointReply:
    # The run directory may have another path on the worker's machine.
    if not re.fullmatch(
        rf"(.*/)?checkpoints/step-0*{request.step}(\.[\w-]+)?", request.path
    ) or ".." in (request.path.split("/")):
        raise Invalid(f"path must end with checkpoints/step-{request.step}: {request.path[:200]!r}")
    verdict = await leader.execute(
        cmd.record_checkpoint(
            *caller,
            step=Step(request.step),
            version=Version(request.version),
            path=request.path,
            size_bytes=request.size_bytes,
            seconds=request.seconds,
            digest=request.weights_digest,
        )
    )
    useless, older = verdict.useless, verdict.older
    if request.path in useless:
        return policy_pb2.CheckpointReply(obsolete_paths=useless)
    stay = {checkpoint.path for checkpoint in spared(leader.ledger.state)}
    keep = leader.settings.config.train.keep_checkpoints
    if durable := await leader.context.survives_failover():
        older = older[: max(0, len(older) - max(0, keep - verdict.needed))]
    else:
        # A failover may lose this checkpoint's record, and the run then needs an earlier
        # checkpoint. The next reply names the checkpoints that stay now again.
        event(
            log,
            "checkpoints are kept: no replica of Redis has the record of this one",
            logging.WARNING,
            kept=min(len(older), MOST_KEPT) + 1,
        )
        older = older[: max(0, len(older) - MOST_KEPT)]
    obsolete = [path for path in older if path not in stay]
    reply = policy_pb2.CheckpointReply(obsolete_paths=[*useless, *obsolete])
    # With more than the ledger remembers, a directory that it does not know may be one to keep.
    if durable and keep <= REMEMBERED_CHECKPOINTS:
        reply.settled_step = verdict.settled
        reply.recorded_names.extend(PurePosixPath(path).name for path in verdict.recorded)
    return reply
