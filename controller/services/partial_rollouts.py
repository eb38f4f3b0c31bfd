"""RolloutService.ReportPartials: the tokens of running tasks so far."""

from __future__ import annotations

from typing import TYPE_CHECKING

from controller.ledger import views
from controller.ledger.decisions import decider
from controller.services.rollout import MAX_GROUPS
from controller.services.validation import Invalid, check_caller, check_partial
from controller.store.partial_rollouts import Partial
from paceline.ids import TaskId
from paceline.v1 import rollout_pb2

if TYPE_CHECKING:
    from controller.leader import Leader
    from controller.replicated_controller import Controller


async def report_partials(
    controller: Controller, request: rollout_pb2.PartialRequest
) -> rollout_pb2.PartialReply:
    leader = controller.leading()
    worker_id, incarnation = check_caller(request.caller)
    if len(request.groups) > MAX_GROUPS:
        raise Invalid(f"more than {MAX_GROUPS} groups in one request")
    await leader.ready()
    decider.caller(leader.ledger.state, worker_id, incarnation)
    reply = rollout_pb2.PartialReply()
    partials, results = [], []
    for group in request.groups:
        result = reply.results.add()
        result.task.CopyFrom(group.task)
        result.verdict, result.message, tokens = _verdict(leader, worker_id, group)
        if tokens:
            ref = group.task
            data = group.SerializeToString()
            partials.append(Partial(TaskId(ref.task_id), ref.attempt, tokens, data))
            results.append(result)
    for result, kept in zip(results, await leader.partials.keep(partials), strict=True):
        if not kept:
            result.message = "accepted, but there is no room to keep it"
    return reply


def _verdict(
    leader: Leader, worker_id: str, group: rollout_pb2.PartialGroup
) -> tuple[rollout_pb2.Verdict, str, int]:
    """Verdict, message, and the number of tokens to be kept: 0 if the report is not accepted."""
    try:
        tokens = check_partial(group, leader.limits, leader.version)
    except Invalid as error:
        return rollout_pb2.VERDICT_INVALID, str(error), 0
    if not views.is_leased(
        leader.ledger.state, worker_id, TaskId(group.task.task_id), group.task.attempt
    ):
        return rollout_pb2.VERDICT_SUPERSEDED, "this lease is over", 0
    return rollout_pb2.VERDICT_ACCEPTED, "", tokens
