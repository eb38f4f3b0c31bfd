"""Decisions about accepted groups that cannot be trained: blame, isolation, rejection, another
generation.

- A trainer that can name the group (a payload that is lost or wrong, a row that does not fit into
  memory) rejects it, and the group leaves the step at once.
- If its payload is at fault, its prompt is leased again: nothing speaks against the task. It counts
  as a failed attempt, so that a store which loses every payload cannot keep a task for ever.
- A trainer that dies names nobody. All groups of its shard become suspects. From then on a member
  computes a suspect by itself and says so before (``TryGroup``), so the next death has one culprit.
- A group leaves the step after ``max_attempts`` deaths, if it was computed by itself in all of them
  but the first. One kill from outside thus never costs a group.
- The step opens again in a new mesh epoch with its other groups and a ready one: votes and
  gradients of the former composition belong to an epoch that is over, and count for nothing.
"""

from collections.abc import Mapping, Sequence

from controller.ledger import events as ev
from controller.ledger.decisions.commands import Decider, of_worker
from controller.ledger.decisions.mesh import mend_mesh
from controller.ledger.decisions.steps import attempt_at
from controller.ledger.enums import GroupFault
from controller.ledger.state.fleet import Worker
from controller.ledger.state.tasks import Task
from paceline.ids import MeshEpoch, Step, TaskId
from paceline.observe.vocabulary import MeshEnd

PAYLOAD_FAULTS = (GroupFault.PAYLOAD_LOST, GroupFault.PAYLOAD_INVALID)
MOST_REJECTIONS = 20
"""A run fails after so many attempts in a row at a step that a group had to leave: a fault that
every group has is no group's fault, and the data set has no end."""


@of_worker
def reject(
    d: Decider,
    now: float,
    worker: Worker,
    step_number: Step,
    attempts: Mapping[TaskId, int],
    fault: GroupFault,
    detail: str = "",
) -> int:
    """A trainer cannot train these groups of its shard. Returns the number that left the step:
    those that have left it, or are in another member's shard, are not counted again."""
    s, who = d.state, worker.worker_id
    step = s.steps.open
    if step is None or step.step != step_number or not s.fleet.in_mesh(worker):
        return 0
    shard = step.shard(who)
    named = [s.tasks.records[task_id] for task_id in attempts if task_id in shard]
    groups = [task for task in named if task.attempt == attempts[task.task_id]]
    if not groups:
        return 0
    drop_from_step(d, groups, fault, f"{who}: {detail}")
    mesh = s.fleet.whole_mesh
    if mesh is not None:
        d.emit(ev.MeshBroken(mesh.epoch, MeshEnd.GROUP_LEFT_OUT, _names(groups)))
        mend_mesh(d)
        d.settle_fleet(now)
    return len(groups)


@of_worker
def try_group(
    d: Decider,
    now: float,
    worker: Worker,
    step_number: Step,
    mesh_epoch: MeshEpoch,
    task_id: TaskId,
) -> bool:
    """The trainer computes this suspect group next, and nothing else; "": no further one. Returns
    True if the attempt at the step still stands. Idempotent."""
    who, step = worker.worker_id, attempt_at(d.state, worker, step_number, mesh_epoch)
    if step is None or (task_id and task_id not in step.shard(who)):
        return False
    if step.trials.get(who) != task_id:
        d.emit(ev.GroupTried(who, step.step, task_id))
    return True


def blame(d: Decider, worker: Worker) -> list[Task]:
    """Charges the groups that ``worker`` may have died of. Returns those that have to leave."""
    s = d.state
    step, who = s.steps.open, worker.worker_id
    if step is None or worker.leaving or not s.fleet.in_mesh(worker):
        return []
    tried = step.trials.get(who)
    if who in step.votes or tried == "":
        return []  # it had computed all of its groups
    groups = step.shard(who) if tried is None else (tried,)
    if groups:
        d.emit(ev.GroupsBlamed(who, step.step, groups, alone=tried is not None))
    limit = s.run.max_attempts
    blamed = ((task_id, s.steps.suspects[task_id]) for task_id in groups)
    return [
        s.tasks.records[task_id]
        for task_id, blame in blamed
        if blame.deaths >= limit and blame.alone >= max(1, limit - 1)
    ]


def drop_from_step(d: Decider, groups: Sequence[Task], fault: GroupFault, detail: str) -> None:
    """The groups leave the open step, which is over: they are generated again, or dropped."""
    step = d.state.steps.open
    assert step is not None
    why = f"left by {_names(groups)}"
    d.emit(ev.StepAborted(step.step, why, f"{fault}: {detail}"[:1024], kept=True))
    for task in groups:
        if fault in PAYLOAD_FAULTS and len(task.failures) + 1 < d.state.run.max_attempts:
            lengths = task.group.whole_lengths if task.group else ()
            d.emit(ev.GroupLost(*task.ref, fault, detail[:512], task.owner, lengths))
        else:
            d.emit(ev.TaskDropped(*task.ref, fault, detail, group=task.group))


def _names(groups: Sequence[Task]) -> str:
    first = groups[0].task_id
    return first if len(groups) == 1 else f"{first} and {len(groups) - 1} more"
