"""Training loop of a policy worker: gradients, all-reduce, vote and commit, all or nothing.

    NextPlan ─► take ──► add ─► reduce ─► Vote ─┬─ COMMITTED ─► commit ─► published, checkpointed
    (waits for  (reads    │ (scratch   (waits   └─ RETRY: keep the local gradients, wait for the
     groups)   payloads)  │  copy)    for all)            next epoch
                          └─ RejectGroups: wait for the next epoch

Gradients of a replica's shard:

take (each rank fetches and checks) ─► add the others ─► each suspect: TryGroup ─► add it alone
           │             │
           │             └─ out of memory ─┬─ row of several groups: each of them alone
           │                               └─ row of one group ─┐
           └─ lost or invalid payload ──────────────────────────┴─► RejectGroups: the step goes on
                                                                     in another epoch without it

- NextPlan and take end early when a directive names another epoch, reduce within 20 ms.
- Vote ends only with its outcome, with a new incarnation, or 3 s after STOPPED: whether a step was
  committed is never guessed.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from paceline.errors import plural
from paceline.ids import Version
from paceline.process.structured_log import event
from paceline.process.waits import WaitKind, waiting
from paceline.v1 import common_pb2, policy_pb2, worker_pb2
from policy_worker.after_commit import AfterCommit
from policy_worker.control_plane import BlockingControlPlane, PolicyReport, RefusalLimit
from policy_worker.held_out_evaluation import HeldOutEvaluation
from policy_worker.objectives.batch import BadGroup, GroupKey, StepTotals
from policy_worker.rows.group_reading import AcceptedGroup
from policy_worker.step.stats import Stats
from policy_worker.trainer import Taken, Trainer

log = logging.getLogger(__name__)

PLAN_WAIT_S = 10.0
"""How long the controller may hold a NextPlan or Vote request. Asking again costs little."""
LAST_REPLY_S = 3.0
"""How long after STOPPED a vote's reply is waited for: no controller may be left to send it."""


@dataclass(eq=False)
class TrainingSteps:
    """Made once the worker has registered. Methods are for the training thread."""

    control: BlockingControlPlane
    trainer: Trainer
    report: PolicyReport
    out: AfterCommit
    held_out: HeldOutEvaluation
    refusals: RefusalLimit
    _alone: set[GroupKey] = field(default_factory=set)
    """Groups of rows that did not fit into memory: each is computed by itself."""
    _idle_since: float = field(default_factory=time.monotonic)
    _last_commit_s: float = 0.0

    def take(self, epoch: int, followed: worker_pb2.Directive) -> bool:
        """One step, or as much of it as mesh ``epoch`` lasts for. False: the epoch is over for this
        replica. Raises EpochCancelled, RequestRefused, and what the trainer raises."""
        reply = self.next_plan(epoch)
        if reply is None or reply.state == policy_pb2.PLAN_STATE_WAIT:
            return True
        if reply.state == policy_pb2.PLAN_STATE_EVALUATE:
            self.held_out.run(
                reply.evaluate_step,
                lambda: self.control.epoch_is_over(epoch) or self.control.stopped,
            )
            return True
        if reply.state == policy_pb2.PLAN_STATE_FINISHED:
            # Waits for a directive newer than the one this move began with: the present one may be
            # STOPPED already, and then none follows it. The last checkpoint may have to be retried.
            self.report.rest("finished")
            self.control.wait(
                lambda: self.control.directive is not followed or self.out.checkpoint_due()
            )
            return True
        return reply.state == policy_pb2.PLAN_STATE_OPEN and self._train(reply.plan)

    def next_plan(self, epoch: int) -> policy_pb2.PlanReply | None:
        """The plan of the open step, or why there is none yet; None if it is not waited for."""
        what = f"waiting for the groups of step {self.trainer.state.step + 1}"
        self.report.rest(f"step {self.trainer.state.step + 1}: waiting for groups")
        request = policy_pb2.PlanRequest(
            caller=self.control.caller,
            mesh_epoch=epoch,
            state_version=self.trainer.state.version,
            wait_s=PLAN_WAIT_S,
        )
        with waiting(WaitKind.GROUPS, what, since=self._idle_since):
            reply: policy_pb2.PlanReply | None = self.control.call(
                "PolicyService.NextPlan",
                request,
                lambda: (
                    self.control.epoch_is_over(epoch)
                    or self.control.stopped
                    # A directive may also ask for a publication or a checkpoint.
                    or self.out.work_due()
                    or self.control.turn_is_over
                ),
            )
        return reply

    def _train(self, plan: policy_pb2.StepPlan) -> bool:
        fetched = self.add_shard(plan)
        if fetched is None:
            return False
        self.trainer.computed()
        computed = time.monotonic()
        self.report.work(f"step {plan.step}: reducing")
        with waiting(WaitKind.COLLECTIVE, f"inside the all-reduce of epoch {plan.mesh_epoch}"):
            stats = self.trainer.reduce()
        reduced = time.monotonic()
        stats.set("lr", plan.lr)
        stats.set("time_wait_s", fetched - self._idle_since)
        stats.set("time_compute_s", computed - fetched)
        stats.set("time_reduce_s", reduced - computed)
        stats.set("time_commit_s", self._last_commit_s)
        stats.set("time_publish_s", self.out.publisher.last_publish_s)
        whole_s = reduced - self._idle_since + self._last_commit_s
        if (mfu := self.trainer.mfu(stats, whole_s)) is not None:
            stats.set("mfu", mfu)
        with waiting(WaitKind.VOTES, f"waiting for the votes of step {plan.step}"):
            version = self.vote(plan, stats)
        if version is None:
            return False
        self.report.work(f"step {plan.step}: committing")
        self.trainer.commit(version, plan.lr)
        self.report.change()
        self._last_commit_s = time.monotonic() - reduced
        self.refusals.clear()
        self.control.poke()
        event(
            log,
            "committed",
            step=plan.step,
            version=version,
            groups=len(plan.shard),
            loss=stats.mean("loss"),
            ms=(time.monotonic() - fetched) * 1e3,
        )
        self.out.publisher.publish_newest()
        if plan.checkpoint:
            self.out.save_checkpoint()
        self._idle_since = time.monotonic()
        return True

    def vote(self, plan: policy_pb2.StepPlan, stats: Stats) -> Version | None:
        """The committed version; None if the step is to be done again."""
        self.report.rest(f"step {plan.step}: voting")
        caller = self.control.caller
        request = policy_pb2.VoteRequest(
            caller=caller,
            step=plan.step,
            mesh_epoch=plan.mesh_epoch,
            weights_digest=self.trainer.digest(),
            stats=stats.messages(),
            wait_s=PLAN_WAIT_S,
            term=plan.term,
        )
        while True:
            reply = self.control.call(
                "PolicyService.Vote",
                request,
                lambda: (
                    self.control.caller.incarnation != caller.incarnation
                    # STOPPED may overtake the reply that the last step is committed.
                    or time.monotonic() - self.control.stopped_at > LAST_REPLY_S
                ),
            )
            if reply is None or reply.outcome == policy_pb2.OUTCOME_RETRY:
                return None
            if reply.outcome == policy_pb2.OUTCOME_COMMITTED:
                return Version(reply.version)
            if self.control.stopped:
                return None

    # -- gradients of the shard -------------------------------------------------------------------

    def add_shard(self, plan: policy_pb2.StepPlan) -> float | None:
        """Adds the groups of the plan's shard that are still missing. Returns the time (monotonic)
        at which all had been fetched; None if the attempt at the step is over, and another epoch
        follows. Raises EpochCancelled if this one ended while they were fetched, RequestRefused,
        and what the trainer raises."""
        keys = [(ref.task_id, ref.attempt) for ref in plan.shard]
        planned = dict(zip(keys, plan.groups, strict=False))
        suspects = {key for key, group in planned.items() if group.suspect}
        while True:
            missing = self.trainer.begin(StepTotals.of(plan), keys)
            alone = suspects | self._alone
            others = [key for key in missing if key not in alone]
            batches = [others, *([key] for key in missing if key in alone)]
            try:
                taken = [self._take(plan, batch, planned) for batch in batches]
                fetched = time.monotonic()
                self.report.work(f"step {plan.step}: computing {plural(len(missing), 'group')}")
                return fetched if self._add(plan, batches, taken, suspects) else None
            except BadGroup as error:
                if error.fault == "out_of_memory" and len(error.groups) > 1:
                    event(log, "row out of memory", logging.WARNING, groups=len(error.groups))
                    self._alone.update(error.groups)
                    self.report.rest(f"step {plan.step}: fetching groups again")
                    continue  # no gradient is left: all of them again
                self._reject(plan, error)
                return None

    def _over(self, plan: policy_pb2.StepPlan) -> Callable[[], bool]:
        return lambda: self.control.epoch_is_over(plan.mesh_epoch) or self.control.step_is_left()

    def _take(
        self,
        plan: policy_pb2.StepPlan,
        batch: list[GroupKey],
        planned: Mapping[GroupKey, policy_pb2.PlannedGroup],
    ) -> Taken | None:
        if not batch:
            return None
        none = policy_pb2.PlannedGroup()
        groups = [AcceptedGroup.of(key, planned.get(key, none)) for key in batch]
        with waiting(
            WaitKind.PAYLOADS, f"fetching {plural(len(batch), 'group')} of step {plan.step}"
        ):
            return self.trainer.take(groups)

    def _add(
        self,
        plan: policy_pb2.StepPlan,
        batches: Sequence[Sequence[GroupKey]],
        taken: Sequence[Taken | None],
        suspects: Collection[GroupKey],
    ) -> bool:
        others, *alone = taken
        if others is not None:
            self.trainer.add(others, last=not alone)
        for (key,), found in zip(batches[1:], alone, strict=True):
            if key in suspects and not self._try(plan, key[0]):
                return False
            if found is not None:
                self.trainer.add(found)
        self._alone.clear()
        # From here on no group can be the cause if this process dies.
        return not suspects or self._try(plan, "")

    def _try(self, plan: policy_pb2.StepPlan, task_id: str) -> bool:
        epoch = {"step": plan.step, "mesh_epoch": plan.mesh_epoch}
        request = policy_pb2.TryRequest(caller=self.control.caller, task_id=task_id, **epoch)
        with waiting(WaitKind.CONTROLLER, f"announcing a suspect group of step {plan.step}"):
            reply = self.control.call("PolicyService.TryGroup", request, self._over(plan))
        return reply is not None and reply.stands

    def _reject(self, plan: policy_pb2.StepPlan, error: BadGroup) -> None:
        """Has the groups leave the step, which goes on in another epoch."""
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
