"""Gradients of a replica's shard: payloads are checked, suspects computed alone, bad groups
rejected.

take (each rank fetches and checks) ─► add the others ─► each suspect: TryGroup ─► add it alone ─►
complete
           │             │
           │             └─ out of memory ─┬─ row of several groups: each of them alone
           │                               └─ row of one group ─┐
           └─ lost or invalid payload ──────────────────────────┴─► RejectGroups: the step goes on
                                                                     in another epoch without it
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from paceline.process.structured_log import event
from paceline.process.waits import WaitKind, waiting
from paceline.v1 import common_pb2, policy_pb2
from policy_worker.control_plane import BlockingControlPlane, PolicyReport
from policy_worker.objectives.batch import BadGroup, GroupKey, StepTotals
from policy_worker.rows.group_reading import AcceptedGroup
from policy_worker.trainer import Taken, Trainer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ShardResult:
    complete: bool
    """False: the attempt at the step is over, and another epoch follows."""
    fetched: float
    computed: float
    """Both by time.monotonic()."""


@dataclass(eq=False)
class ShardGradients:
    """Computes the shards of one policy worker."""

    control: BlockingControlPlane
    trainer: Trainer
    report: PolicyReport
    _alone: set[GroupKey] = field(default_factory=set)
    """Groups of rows that did not fit into memory: each is computed by itself."""

    def compute(self, plan: policy_pb2.StepPlan, over: Callable[[], bool]) -> ShardResult:
        """Adds the groups of the plan's shard that are still missing. Raises EpochCancelled if
        ``over()`` turned true while they were fetched, RequestRefused, and what the trainer raises.
        """
        keys = [(ref.task_id, ref.attempt) for ref in plan.shard]
        planned = dict(zip(keys, plan.groups, strict=False))
        suspects = {key for key, group in planned.items() if group.suspect}
        while True:
            missing = self.trainer.begin(StepTotals.of(plan), keys)
            alone = suspects | self._alone
            others = [key for key in missing if key not in alone]
            batches = [others, *([key] for key in missing if key in alone)]
            try:
                taken = [self._take(plan, batch, planned, over) for batch in batches]
                fetched = time.monotonic()
                self.report.work(f"step {plan.step}: computing {len(missing)} groups")
                complete = self._add(plan, batches, taken, suspects, over)
            except BadGroup as error:
                if error.fault == "out_of_memory" and len(error.groups) > 1:
                    event(log, "row out of memory", logging.WARNING, groups=len(error.groups))
                    self._alone.update(error.groups)
                    self.report.rest(f"step {plan.step}: fetching groups again")
                    continue  # no gradient is left: all of them again
                if error.fault != "out_of_memory":  # found while they were fetched
                    fetched = time.monotonic()
                complete = self._reject(plan, error)
            return ShardResult(complete, fetched, time.monotonic())

    def _take(
        self,
        plan: policy_pb2.StepPlan,
        batch: list[GroupKey],
        planned: Mapping[GroupKey, policy_pb2.PlannedGroup],
        over: Callable[[], bool],
    ) -> Taken | None:
        if not batch:
            return None
        none = policy_pb2.PlannedGroup()
        groups = [AcceptedGroup.of(key, planned.get(key, none)) for key in batch]
        with waiting(WaitKind.PAYLOADS, f"fetching {len(batch)} groups of step {plan.step}"):
            return self.trainer.take(groups, fetch=lambda keys: self.control.fetch(keys, over))

    def _add(
        self,
        plan: policy_pb2.StepPlan,
        batches: Sequence[Sequence[GroupKey]],
        taken: Sequence[Taken | None],
        suspects: Collection[GroupKey],
        over: Callable[[], bool],
    ) -> bool:
        others, *alone = taken
        if others is not None:
            self.trainer.add(others, last=not alone)
        for (key,), found in zip(batches[1:], alone, strict=True):
            if key in suspects and not self._try(plan, key[0], over):
                return False
            if found is not None:
                self.trainer.add(found)
        self._alone.clear()
        # From here on no group can be the cause if this process dies.
        return not suspects or self._try(plan, "", over)

    def _try(self, plan: policy_pb2.StepPlan, task_id: str, over: Callable[[], bool]) -> bool:
        epoch = {"step": plan.step, "mesh_epoch": plan.mesh_epoch}
        request = policy_pb2.TryRequest(caller=self.control.caller, task_id=task_id, **epoch)
        with waiting(WaitKind.CONTROLLER, f"announcing a suspect group of step {plan.step}"):
            reply = self.control.call("PolicyService.TryGroup", request, over)
        return reply is not None and reply.stands

    def _reject(self, plan: policy_pb2.StepPlan, error: BadGroup) -> bool:
        """Has the groups leave the step. Always False: it goes on in another epoch."""
        if not error.groups:
            raise error
        tasks = [common_pb2.TaskRef(task_id=t, attempt=a) for t, a in error.groups]
        names = ",".join(ref.task_id for ref in tasks[:8])
        event(log, "groups rejected", logging.ERROR, step=plan.step, groups=names, why=error)
        request = policy_pb2.RejectRequest(
            caller=self.control.caller,
            step=plan.step,
            groups=tasks,
            fault=policy_pb2.GroupFault.Value(f"GROUP_FAULT_{error.fault.upper()}"),
            detail=str(error)[:1024],
        )
        # Not ended early: a lost request would leave the group in the step.
        with waiting(WaitKind.CONTROLLER, f"rejecting groups of step {plan.step}"):
            self.control.call("PolicyService.RejectGroups", request, lambda: self.control.stopped)
        return False
