"""RolloutService: tasks out, metadata of groups in.

The controller never sees a group's payload, only a worker's metadata. Policy ranks compare its
digest with the payload. Here its fields must be possible, and agree with one another.
"""

import math
import re
from collections.abc import Sequence

from controller.directives import wire_values
from controller.leader import Leader
from controller.ledger import decisions as cmd
from controller.ledger import views
from controller.ledger.enums import EmptyReason, Kind, ReturnKind, VerdictCode
from controller.ledger.events import Topic
from controller.ledger.specs import GroupMeta, LeasedTask
from controller.services.validation import RETURN_OF, Caller, from_worker
from paceline.errors import one_line
from paceline.ids import Version
from paceline.payloads.group_limits import GroupLimits, Invalid, check_task, task_settings
from paceline.payloads.group_payload import check_consistency
from paceline.payloads.store import Ref, partial_ref
from paceline.v1 import rollout_pb2

MAX_LEASED = 256
LEASE_BYTES = 1024  # Upper bound for one encoded lease, excluding its row

DIGEST = re.compile("[0-9a-f]{32}")
_KINDS = wire_values(Kind, rollout_pb2.TaskKind, "TASK_KIND")
_EMPTY = wire_values(EmptyReason, rollout_pb2.EmptyReason, "EMPTY_REASON")
_VERDICTS = wire_values(VerdictCode, rollout_pb2.Verdict, "VERDICT")


@from_worker
async def lease_tasks(
    leader: Leader, caller: Caller, request: rollout_pb2.LeaseRequest
) -> rollout_pb2.LeaseReply:
    deadline = leader.clock.monotonic() + request.wait_s
    loaded_version = Version(request.loaded_version)
    while True:
        polls = leader.long_polls[Topic.LEASE], leader.long_polls[Topic.ISOLATED]
        seen, seen_isolated = (poll.turn for poll in polls)
        worker = leader.ledger.state.fleet.current(*caller)
        if worker is not None:
            # Newer weights may have been loaded while the request waited.
            loaded_version = max(loaded_version, worker.loaded_version)
        result = await leader.execute(
            cmd.lease(
                *caller,
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
        leases=await _with_rows(leader, caller, result), empty_reason=_EMPTY[result.empty_reason]
    )


async def _with_rows(
    leader: Leader, caller: Caller, result: cmd.LeaseResult
) -> list[rollout_pb2.Lease]:
    room = leader.context.config.controller.max_message_mb << 19
    tasks, rows = await _fitting(leader, caller, result.leases, room - MAX_LEASED * LEASE_BYTES)
    group_size, run = leader.limits.group_size, leader.ledger.state.run
    settings = task_settings(leader.settings.config)
    leases = []
    for lease, row in zip(tasks, rows, strict=True):
        message = rollout_pb2.Lease(
            kind=_KINDS[lease.kind],
            epoch=lease.dataset_pass,
            index=lease.index,
            row_json=row,
            seed=lease.seed,
            group_size=group_size if lease.kind is Kind.TRAIN else run.samples_of(lease.eval_set),
            eval_set=lease.eval_set,
            settings=settings,
        )
        message.task.task_id = lease.task_id
        message.task.attempt = lease.attempt
        if lease.attempt > 1:
            fresh = views.oldest_fresh(leader.ledger.state, lease.task_id)
            message.oldest_fresh, message.newest_fresh = fresh
        leases.append(message)
    return leases


async def _fitting(
    leader: Leader, caller: Caller, leases: Sequence[LeasedTask], room: int
) -> tuple[list[LeasedTask], list[str]]:
    """The first leases, with their rows, whose rows have at most ``room`` bytes together; the
    others are handed back. A row that is larger alone is dropped: no reply could carry it. So is
    one that cannot be given; a failed read of the disk counts as a failed attempt."""
    tasks, rows, left = [], [], room
    for lease, row in zip(leases, await leader.rows.of(leases), strict=True):
        held = (*caller, lease.task_id, lease.attempt)
        if isinstance(row, Exception):
            kind = ReturnKind.FAILED if isinstance(row, OSError) else ReturnKind.DROP
            detail = f"{row.__notes__[0]}: {one_line(row)}"
            leader.decide(cmd.give_back(*held, kind, "malformed_row", ascii(detail)[1:-1]))
            continue
        size = len(row) if row.isascii() else len(row.encode())
        if size > room:
            limit = leader.context.config.controller.max_message_mb
            detail = f"its row has {size:,} bytes, and controller.max_message_mb = {limit}"
            detail += f" allows {room:,}"
            leader.decide(cmd.give_back(*held, ReturnKind.DROP, "prompt_too_long", detail))
        elif size > left:
            left = 0  # in their order: a small row does not overtake a large one
            leader.decide(cmd.give_back(*held, ReturnKind.HAND_BACK, "reply_full"))
        else:
            left -= size
            tasks.append(lease)
            rows.append(row)
    if len(tasks) < len(leases):
        await leader.group_commit.durable()
    return tasks, rows


@from_worker
async def submit_groups(
    leader: Leader, caller: Caller, request: rollout_pb2.SubmitRequest
) -> rollout_pb2.SubmitReply:
    await leader.ready()
    reply = rollout_pb2.SubmitReply()
    submitted: list[Ref] = []
    writes_partials = leader.context.config.rollout.partial_every_tokens > 0
    for group in request.groups:
        result = reply.results.add()
        result.task.CopyFrom(group.task)
        try:
            meta = check_meta(group, leader.limits, leader.version)
        except Invalid as error:
            result.verdict = rollout_pb2.VERDICT_INVALID
            result.message = str(error)
            continue
        _tell(leader.decide(cmd.accept(*caller, meta)), result)
        if meta.digest:
            submitted.append((meta.task_id, meta.attempt))
        if writes_partials or meta.attempt > 1:
            submitted.append(partial_ref(meta.task_id))
    await leader.group_commit.durable()
    leader.discard_unneeded(submitted)
    return reply


def check_meta(meta: rollout_pb2.GroupMeta, limits: GroupLimits, newest_version: int) -> GroupMeta:
    """The metadata as the ledger keeps it. Raises Invalid."""
    task_id, attempt = check_task(meta.task)
    train = task_id[0] == "t"
    if train and not DIGEST.fullmatch(meta.digest):
        raise Invalid(f"digest {meta.digest[:64]!r} is invalid: expected 32 hexadecimal digits")
    check_consistency(meta, limits, newest_version)
    rewards = list(meta.rewards)
    mean = sum(rewards) / len(rewards)
    return GroupMeta(
        task_id=task_id,
        attempt=attempt,
        sequences=len(meta.lengths),
        prompt_tokens=meta.prompt_tokens,
        tokens=sum(span.length for span in meta.token_versions),
        min_version=Version(meta.min_version),
        max_version=Version(meta.max_version),
        reward_mean=mean,
        reward_std=_std(rewards, mean),
        reward_max=max(rewards),
        generate_s=meta.generate_s,
        reward_s=meta.reward_s,
        token_versions=tuple((Version(s.version), s.length) for s in meta.token_versions),
        sequence_versions=tuple(
            (tuple(map(Version, each.versions)), each.sequences) for each in meta.sequence_versions
        ),
        lengths=tuple(meta.lengths),
        rewards=() if train else tuple(rewards),
        answers=() if train else tuple(meta.answers),
        truncated=0 if train else meta.truncated,
        prompt_cut=meta.prompt_cut,
        digest=meta.digest if train else "",
        branches=tuple(meta.branches),
        prefixes=tuple(meta.prefixes),
    )


def _std(rewards: Sequence[float], mean: float) -> float:
    """Standard deviation of a sample, as in advantages; exactly 0 for equal rewards, whose mean may
    be rounded."""
    if min(rewards) == max(rewards):
        return 0.0
    return math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))


@from_worker
async def return_tasks(
    leader: Leader, caller: Caller, request: rollout_pb2.ReturnRequest
) -> rollout_pb2.ReturnReply:
    commands = []
    for returned in request.tasks:
        task_id, attempt = check_task(returned.task)
        commands.append(
            cmd.give_back(
                *caller,
                task_id=task_id,
                attempt=attempt,
                kind=RETURN_OF[returned.kind],
                reason=returned.reason or "unspecified",
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


def _tell(verdict: cmd.Verdict, result: rollout_pb2.SubmitResult) -> None:
    result.verdict = _VERDICTS[verdict.code]
    if verdict.message:
        result.message = verdict.message
