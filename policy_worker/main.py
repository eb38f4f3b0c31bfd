"""A policy replica: what the controller says should be true, made true; and the step, over and over.

    directive ─┬─ no mesh ────────► leave it; draining: finish and exit
               ├─ another epoch ──► form ─► restore | seed | receive ─┐
               │                                                      ▼
               │   ┌──────────────────────────────────────────── formed ◄───────────┐
               │   ▼                                                                │
               │  NextPlan ─► fetch ─► add ─► reduce ─► Vote ─┬─ COMMITTED ─► commit│─► publish,
               │   (waits for   (my       (scratch   (waits   │                     │   checkpoint
               │    groups)    groups)      copy)    for all) └─ RETRY: keep the local gradients,
               │                                                 wait for the next epoch
               └─ STOPPED ────────► finish checkpoints, exit 0

What ends each wait: NextPlan and fetch, a directive with another epoch; form, reduce, seed and
receive, the same, within 20 ms; Vote, only its outcome, a new incarnation or (3 s later) STOPPED:
whether a step was committed is never guessed. A failed collective is reported, and again as long as the
controller names no other epoch; this replica waits for the next one like everybody else.

Threads: training here; session and calls in control.py's; what outlets.py hands over goes on in
publisher.py's and checkpoint.py's.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from paceline.config.schema import Config
from paceline.mesh.elastic_mesh import EpochCancelled, MeshError
from paceline.process import structured_log as logs
from paceline.process.structured_log import event
from paceline.rpc.addresses import own_address
from paceline.rpc.auth import AuthError
from paceline.rpc.client import RequestRefused
from paceline.v1 import policy_pb2, worker_pb2
from policy_worker.checkpoint.checkpoint import CheckpointError
from policy_worker.control_plane import BlockingControlPlane
from policy_worker.model import ModelError, pick_device
from policy_worker.publish_and_checkpoint import PublishAndCheckpoint
from policy_worker.ranks.rank_group import RankGroup, ReplicaBroken, lead
from policy_worker.refusal_limit import RefusalLimit, RefusedForGood
from policy_worker.step.batch import BadGroup
from policy_worker.step.gradients import StepSpec
from policy_worker.step.stats import Stats
from policy_worker.trainer import EpochMesh, Trainer
from policy_worker.worker_report import WorkerReport

log = logging.getLogger(__name__)

PLAN_WAIT_S = 10.0
"""How long the controller may hold a NextPlan or Vote request. Being asked again costs little."""
SAID_AGAIN_S = 5.0
"""After this the controller is told once more that an epoch has failed where it names no other one: in
a long outage it may not have heard of it, and Redis may have lost in a failover that it did."""
LAST_ANSWER_S = 3.0
"""How long after STOPPED an answer to a vote is waited for: nobody may be left to give it."""


def run(
    config: Config,
    *,
    controllers: Sequence[str],
    worker_id: str,
    run_dir: Path | None = None,
    tensor_host: str | None = None,
) -> int:
    """Runs until the controller says STOPPED. Returns the exit status; see ``__main__``."""
    logs.setup(worker_id)
    torch.set_num_threads(config.fleet.policy_threads)
    worker: PolicyWorker | None = None
    try:
        worker = PolicyWorker(config, controllers, worker_id, run_dir, tensor_host)
        worker.run()
    except (ModelError, AuthError) as error:
        print(f"policy_worker: {error}", file=sys.stderr)
        return 2
    except RequestRefused as error:
        print(f"policy_worker: the controller refused {worker_id}: {error}", file=sys.stderr)
        return 2 if error.bad_input and (worker is None or not worker.admitted) else 1
    except (CheckpointError, ReplicaBroken, RefusedForGood, BadGroup) as error:
        print(f"policy_worker: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


class PolicyWorker:
    """One policy replica, in the process of its rank 0."""

    def __init__(
        self,
        config: Config,
        controllers: Sequence[str],
        worker_id: str,
        run_dir: Path | None = None,
        tensor_host: str | None = None,
    ) -> None:
        """Loads the model; raises ModelError, AuthError or ReplicaBroken."""
        self.config = config
        self.worker_id = worker_id
        self.run_dir = run_dir
        self.host = tensor_host or own_address(controllers[0])
        self.standing = WorkerReport()
        self.admitted = False
        """The controller took this worker's config and token."""
        self.outlets: PublishAndCheckpoint | None = None
        self.over = 0  # newest epoch that this replica knows to be over
        self.newest_epoch = 0
        self.followed: worker_pb2.Directive | None = None
        self.idle_since = time.monotonic()
        self.last_commit_s = 0.0
        self.refusals = RefusalLimit(worker_id)
        self.control = BlockingControlPlane(
            config, controllers, worker_id=worker_id, report=self.report, tensor_host=self.host
        )
        self.trainer = self.load_trainer()

    def load_trainer(self) -> Trainer:
        device = pick_device(self.config.model.device)
        replica: RankGroup = lead(
            self.config.fleet.policy_ranks,
            config_json=_follower_settings(self.config, self.worker_id),
            threads=self.config.fleet.policy_threads,
            device_type=device.type,
        )
        return Trainer(self.config, device, replica=replica, on_progress=self.step_on)

    # -- the loop -----------------------------------------------------------------------------

    def run(self) -> None:
        """Joins the fleet and follows its directives until the end."""
        reply = self.control.register()
        self.admitted = True
        self.rendezvous_url, self.run_id = reply.rendezvous_url, reply.run_id
        self.trainer.attach(self.run_dir or Path(reply.run_dir))
        self.outlets = PublishAndCheckpoint(self.control, self.trainer, reply, self.host)
        self.control.on_directive(self.end_epochs)
        if (directive := self.control.directive) is not None:  # came before the line above
            self.end_epochs(directive)
        self.standing.lifecycle = worker_pb2.LIFECYCLE_RUNNING
        try:
            while (directive := self.next_directive()) is not None:
                self.follow(directive)
            self.finish()
        finally:
            self.close()

    def next_directive(self) -> worker_pb2.Directive | None:
        """The present directive; None once this worker is to leave."""
        self.control.wait(lambda: self.control.directive is not None)
        directive = self.control.directive
        if directive is None:  # rejoining at this very moment
            return self.next_directive()
        draining = directive.lifecycle == worker_pb2.LIFECYCLE_DRAINING
        if draining and self.standing.lifecycle == worker_pb2.LIFECYCLE_RUNNING:
            self.standing.lifecycle = worker_pb2.LIFECYCLE_DRAINING
            self.control.poke()
        if self.control.stopped or (draining and self.control.mesh is None):
            return None
        return directive

    def follow(self, directive: worker_pb2.Directive) -> None:
        """One move towards what ``directive`` says; returns when there may be another to make."""
        self.followed = directive
        self.out.serve()
        mesh = self.control.mesh
        try:
            if mesh is None:
                self.leave()
                self.sleep(directive, "no mesh")
            elif mesh.epoch == self.over:
                self.leave()
                if not self.sleep(directive, "epoch over", SAID_AGAIN_S):
                    self.tell_failure(mesh.epoch, "still over")
            elif mesh.epoch != self.standing.mesh_epoch:
                self.join(mesh)
            else:
                self.take_step(mesh)
        except EpochCancelled:
            self.leave()
        except MeshError as error:
            self.collective_failed(mesh, error)
        except RequestRefused as error:
            # Usually of an incarnation that is over, and then so is this report. Otherwise the
            # others must not wait in an epoch that this replica cannot go on in.
            self.refusals.add(self.control.caller.incarnation, error)
            self.collective_failed(mesh, MeshError(f"refused by the controller: {error}"))

    # -- membership -----------------------------------------------------------------------------

    def join(self, mesh: worker_pb2.PolicyMesh) -> None:
        """Forms the epoch and brings this replica to the state every member must hold."""
        self.leave()
        rank = [m.incarnation for m in mesh.members].index(self.control.caller.incarnation)
        begun = time.monotonic()
        self.standing.work(f"epoch {mesh.epoch}: forming")
        trainer = self.trainer
        trainer.form(
            EpochMesh(
                mesh.epoch, rank, len(mesh.members), self.rendezvous_url, self.run_id, self.host
            ),
            cancelled=lambda: self.epoch_is_over(mesh.epoch),
        )
        needy = [i for i, member in enumerate(mesh.members) if member.needs_state]
        if mesh.restore:
            if trainer.state.version != mesh.state_version:
                self.standing.work(f"epoch {mesh.epoch}: restoring")
                trainer.restore(mesh.checkpoint_path, mesh.step, mesh.state_version)
        elif rank in needy:
            self.standing.work(f"epoch {mesh.epoch}: receiving the state")
            trainer.receive(mesh.source_rank)
            self.out.forget_after(mesh.state_version)
        elif needy and rank == mesh.source_rank:
            self.standing.work(f"epoch {mesh.epoch}: seeding {len(needy)}")
            trainer.seed(needy)
        if trainer.state.version != mesh.state_version:
            # The controller learns of it from the report and forms an epoch that seeds this one.
            raise MeshError(
                f"holds version {trainer.state.version}, the epoch needs {mesh.state_version}"
            )
        self.standing.mesh_epoch = mesh.epoch
        self.control.poke()
        event(
            log,
            "mesh formed",
            epoch=mesh.epoch,
            rank=rank,
            size=len(mesh.members),
            version=trainer.state.version,
            step=trainer.state.step,
            ms=(time.monotonic() - begun) * 1e3,
        )

    def leave(self) -> None:
        """Out of the mesh, local gradients kept."""
        self.trainer.abandon()
        if self.standing.mesh_epoch:
            self.standing.mesh_epoch = 0
            self.control.poke()

    def collective_failed(self, mesh: worker_pb2.PolicyMesh | None, error: MeshError) -> None:
        """Says so, then waits for the controller's next epoch like every other member."""
        epoch = mesh.epoch if mesh is not None else self.standing.mesh_epoch
        event(log, "collective failed", logging.WARNING, epoch=epoch, error=error)
        self.over = epoch
        self.leave()
        self.tell_failure(epoch, str(error))

    def tell_failure(self, epoch: int, detail: str) -> None:
        self.control.post(
            "WorkerService.ReportPeerError",
            worker_pb2.PeerError(caller=self.control.caller, epoch=epoch, detail=detail),
        )

    def end_epochs(self, directive: worker_pb2.Directive) -> None:
        """On the session's thread: the training thread may have had its share of a collective and
        wait for another rank of this replica, which waits for a peer that is gone."""
        self.newest_epoch = max(self.newest_epoch, directive.mesh.epoch)
        current = self.control.mesh
        self.trainer.replica.end_epoch(self.newest_epoch - (current is not None))

    def epoch_is_over(self, epoch: int) -> bool:
        mesh = self.control.mesh
        return mesh is None or mesh.epoch != epoch

    # -- the step -----------------------------------------------------------------------------

    def take_step(self, mesh: worker_pb2.PolicyMesh) -> None:
        """One step, or as much of it as this epoch lasts for."""
        plan = self.next_plan(mesh.epoch)
        if plan is None:
            return
        facts = StepSpec.of(plan)
        shard = [(ref.task_id, ref.attempt) for ref in plan.shard]
        missing = self.trainer.begin(facts, shard)
        groups = self.control.fetch(missing, lambda: self.epoch_is_over(mesh.epoch))
        if groups is None:
            return
        times = Stats()
        fetched = time.monotonic()
        times.set("time_wait_s", fetched - self.idle_since)
        self.standing.work(f"step {plan.step}: computing {len(groups)} groups")
        self.trainer.add(groups)
        computed = time.monotonic()
        times.set("time_compute_s", computed - fetched)
        self.standing.work(f"step {plan.step}: reducing")
        stats = self.trainer.reduce()
        times.set("time_reduce_s", time.monotonic() - computed)
        times.set("time_commit_s", self.last_commit_s)
        times.set("time_publish_s", self.out.last_publish_s)
        stats.merge([times.entries])
        begun = time.monotonic()
        version = self.vote(plan, stats)
        if version is None:
            self.over = mesh.epoch
            self.leave()
            return
        self.standing.work(f"step {plan.step}: committing")
        self.trainer.commit(version)
        self.last_commit_s = time.monotonic() - begun
        self.refusals.clear()
        self.control.poke()
        event(
            log,
            "committed",
            step=plan.step,
            version=version,
            groups=len(shard),
            loss=stats.mean("loss"),
            ms=(time.monotonic() - fetched) * 1e3,
        )
        self.out.publish()
        if self.trainer.state.step % self.config.train.checkpoint_every == 0:
            self.out.save_checkpoint()
        self.idle_since = time.monotonic()

    def next_plan(self, epoch: int) -> policy_pb2.StepPlan | None:
        """The open step's plan; None where there is none yet, or none to come in this epoch."""
        self.standing.rest(f"step {self.trainer.state.step + 1}: waiting for groups")
        reply = self.control.call(
            "PolicyService.NextPlan",
            policy_pb2.PlanRequest(
                caller=self.control.caller,
                mesh_epoch=epoch,
                state_version=self.trainer.state.version,
                wait_s=PLAN_WAIT_S,
            ),
            # A publisher or a checkpoint is asked for by directive, too: come back and look.
            lambda: self.epoch_is_over(epoch) or self.out.wanted() or self.control.stopped,
        )
        if reply is None or reply.state == policy_pb2.PLAN_STATE_WAIT:
            return None
        if reply.state == policy_pb2.PLAN_STATE_FINISHED:
            # Until one newer than this turn began with: the present one may be STOPPED already,
            # and then none comes after it.
            self.standing.rest("finished")
            self.control.wait(
                lambda: self.control.directive is not self.followed or self.checkpoint_due()
            )
            return None
        if reply.state != policy_pb2.PLAN_STATE_OPEN:
            self.over = epoch
            return None
        plan: policy_pb2.StepPlan = reply.plan
        return plan

    def checkpoint_due(self) -> bool:
        """The last one, too, may have to be written again."""
        return self.outlets is not None and self.outlets.checkpoint_due()

    def vote(self, plan: policy_pb2.StepPlan, stats: Stats) -> int | None:
        """The committed version; None where the step is to be done again."""
        self.standing.rest(f"step {plan.step}: voting")
        caller = self.control.caller
        request = policy_pb2.VoteRequest(
            caller=caller,
            step=plan.step,
            mesh_epoch=plan.mesh_epoch,
            weights_digest=self.trainer.digest(),
            stats=stats.messages(),
            wait_s=PLAN_WAIT_S,
        )
        while True:
            reply = self.control.call(
                "PolicyService.Vote",
                request,
                lambda: (
                    self.control.caller.incarnation != caller.incarnation
                    # STOPPED may overtake the answer that says the last step is committed.
                    or self.control.stopped_for_s > LAST_ANSWER_S
                ),
            )
            if reply is None or reply.outcome == policy_pb2.OUTCOME_RETRY:
                return None
            if reply.outcome == policy_pb2.OUTCOME_COMMITTED:
                return int(reply.version)
            if self.control.stopped:
                return None

    # -- what others see of this process ----------------------------------------------------------

    def report(self) -> worker_pb2.Report:
        """On the session's thread; there is no session before there is a trainer."""
        links = self.outlets.link_epochs if self.outlets is not None else []
        return self.standing.report(self.trainer.state.version, links)

    def step_on(self) -> None:
        """The training thread got somewhere."""
        self.standing.progress += 1
        if self.outlets is not None and self.trainer.replica.size == 1:
            # A receiver that joins in the middle of a long step need not wait for its end: weights
            # do not change before the commit. With more ranks publishing is collective.
            self.outlets.publish()

    def sleep(
        self, directive: worker_pb2.Directive, activity: str, limit_s: float = math.inf
    ) -> bool:
        """Until there is a newer directive than ``directive``; False where there is none in time."""
        self.standing.rest(activity)
        end = time.monotonic() + limit_s
        self.control.wait(
            lambda: self.control.directive is not directive or time.monotonic() >= end
        )
        return self.control.directive is not directive

    @property
    def out(self) -> PublishAndCheckpoint:
        if self.outlets is None:
            raise RuntimeError("not registered yet")
        return self.outlets

    # -- the end --------------------------------------------------------------------------------

    def finish(self) -> None:
        """Completes what is under way: checkpoints are on disk and recorded before the last report."""
        self.standing.work("finishing")
        self.trainer.close()
        self.out.finish()
        self.standing.lifecycle = worker_pb2.LIFECYCLE_STOPPED
        event(log, "finished", step=self.trainer.state.step, version=self.trainer.state.version)

    def close(self) -> None:
        if self.outlets is not None:
            self.outlets.close()
        self.trainer.abandon()
        self.control.close()


def _follower_settings(config: Config, worker_id: str) -> str:
    return json.dumps({"config": config.model_dump(mode="json"), "worker_id": worker_id})
