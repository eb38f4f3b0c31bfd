"""Policy worker: follows the controller's directives, one training step after the other.

    directive ─┬─ no mesh ────────► leave it; draining: finish and exit
               ├─ another epoch ──► form ─► restore | receive_state | send_state ─┐
               │                                                                  ▼
               │   ┌─────────────────────────────────────────────────────────── formed ◄──┐
               │   ▼                                                                      │
               │  NextPlan ─► take ──► add ─► reduce ─► Vote ─┬─ COMMITTED ─► commit ─────┤
               │   (waits for  (reads    │ (scratch   (waits  │                           │
               │    groups)   payloads)  │  copy)    for all) └─ RETRY: keep the local gradients,
               │                         │                       wait for the next epoch
               │                         └─ RejectGroups: wait for the next epoch
               └─ STOPPED ────────► finish checkpoints, exit 0

- After a commit the state is published and, if it is due, written (``after_commit``).
- NextPlan and take end early when a directive names another epoch; form, reduce and both ends of a
  state transfer do so within 20 ms.
- Vote ends only with its outcome, with a new incarnation, or 3 s after STOPPED: whether a step was
  committed is never guessed.
- A failed collective is reported, and reported again until the controller names another epoch. This
  replica waits for that epoch like every other member.

Threads: training runs here; the session and all calls on control_plane's event loop; what
after_commit takes over, on the threads of the weight publisher and the checkpoint writer.
"""

import functools
import json
import logging
import math
import sys
import time
from argparse import Namespace
from pathlib import Path

import torch

from paceline.config.schema import Config
from paceline.ids import MeshEpoch, Step, Version
from paceline.mesh.elastic_mesh import EpochCancelled, MeshError
from paceline.process import structured_log as logs
from paceline.process.compute_device import pick_device
from paceline.process.structured_log import event
from paceline.process.torchrun_environment import TorchrunPlace
from paceline.process.waits import WaitKind, loading_model, messages, waiting
from paceline.rpc.addresses import own_address
from paceline.rpc.client import RequestRefused
from paceline.rpc.side_channel import SideChannel
from paceline.v1 import common_pb2, policy_pb2, worker_pb2
from policy_worker.after_commit import AfterCommit
from policy_worker.control_plane import (
    BlockingControlPlane,
    PolicyReport,
    RefusalLimit,
    StuckRanks,
)
from policy_worker.held_out_evaluation import HeldOutEvaluation
from policy_worker.ranks.outside_ranks import OutsideRank
from policy_worker.ranks.rank_group import start_ranks
from policy_worker.rows.group_reading import StorePlace
from policy_worker.rows.replica import Replica
from policy_worker.shard_gradients import ShardGradients
from policy_worker.step.stats import Stats
from policy_worker.trainer import EpochMesh, Trainer

log = logging.getLogger(__name__)

PLAN_WAIT_S = 10.0
"""How long the controller may hold a NextPlan or Vote request. Asking again costs little."""
FORM_LIMIT_S = 60.0
REPORT_AGAIN_S = 5.0
"""A failed epoch is reported again after this time if the controller names no other one: a long
outage may have swallowed the report, and a failover of Redis may have lost it."""
LAST_REPLY_S = 3.0
"""How long after STOPPED a vote's reply is waited for: no controller may be left to send it."""


def run(config: Config, options: Namespace, place: TorchrunPlace | None = None) -> int:
    """Runs until the controller says STOPPED. Returns the exit status. Raises UserError.
    ``options``: of ``worker_command``. ``place``: of rank 0, if the ranks of the replica were
    started from outside."""
    worker_id, controllers = options.id, options.controllers
    logs.setup(worker_id)
    torch.set_num_threads(config.fleet.policy_threads)
    worker: PolicyWorker | None = None
    side = SideChannel(config, controllers, worker_id, common_pb2.ROLE_POLICY, options.run_dir)
    try:
        with loading_model(config.model.path):
            worker = PolicyWorker(config, options, place)
        worker.side = side
        worker.run()
    except RequestRefused as error:
        print(f"policy_worker: the controller refused {worker_id}: {error}", file=sys.stderr)
        return 2 if error.bad_input and (worker is None or not worker.admitted) else 1
    finally:
        side.close()
    return 0


class PolicyWorker:
    """One policy replica, in the process of its rank 0."""

    def __init__(
        self, config: Config, options: Namespace, place: TorchrunPlace | None = None
    ) -> None:
        """Raises ModelError, AuthError, ReplicaBroken, or BadInput for a wrong ``place``."""
        worker_id, controllers = options.id, options.controllers
        self.config = config
        self.run_dir: Path | None = options.run_dir
        self.host = options.tensor_host or own_address(controllers[0])
        self.worker_report = PolicyReport()
        self.epochs = self.worker_report.epochs
        self.side: SideChannel | None = None
        self.out: AfterCommit
        self.admitted = False
        """Registered; only then is there ``out``."""
        self.followed: worker_pb2.Directive | None = None
        self.idle_since = time.monotonic()
        self.last_commit_s = 0.0
        self.refusals = RefusalLimit(worker_id)
        self.control = BlockingControlPlane(
            config,
            controllers,
            worker_id=worker_id,
            report=self.report,
            tensor_host=self.host,
            run_dir=self.run_dir,
        )
        device = pick_device(config.model.device, place.local_rank if place is not None else 0)
        if place is not None and place.size > 1:
            replica: Replica
            replica, _ = OutsideRank(place, config, worker_id, self.host).join(device.type)
        else:
            settings = {"config": config.model_dump(mode="json"), "worker_id": worker_id}
            fleet, given = config.fleet, json.dumps(settings)
            limits = {"threads": fleet.policy_threads, "device_type": device.type}
            replica = start_ranks(fleet.policy_ranks, config_json=given, **limits)
        self.stuck_ranks = StuckRanks(replica.follower_pids)
        self.trainer = Trainer(
            config,
            device,
            replica=replica,
            on_progress=self.progressed,
            step_left=self.step_is_left,
        )
        self.worker_report.state = self.trainer.state
        self.shard = ShardGradients(self.control, self.trainer, self.worker_report)
        self.held_out = HeldOutEvaluation(config, self.control, self.trainer, self.worker_report)

    # -- the loop -----------------------------------------------------------------------------

    def run(self) -> None:
        """Joins the fleet and follows its directives until the end."""
        with waiting(WaitKind.CONTROLLER, "registering"):
            reply = self.control.register(self.side)
        self.rendezvous_url, self.run_id = reply.rendezvous_url, reply.run_id
        store = StorePlace(list(reply.payload_urls), reply.run_id, reply.rendezvous_url)
        self.trainer.attach(self.run_dir or Path(reply.run_dir), store)
        self.out = AfterCommit(self.control, self.trainer, reply, self.host)
        self.admitted = True
        self.control.on_directive(self.end_epochs)
        if (directive := self.control.directive) is not None:  # came before the line above
            self.end_epochs(directive)
        self.worker_report.change(lifecycle=worker_pb2.LIFECYCLE_RUNNING)
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
        if draining and self.worker_report.now["lifecycle"] == worker_pb2.LIFECYCLE_RUNNING:
            self.worker_report.change(lifecycle=worker_pb2.LIFECYCLE_DRAINING)
            self.control.poke()
        if self.control.stopped or (draining and self.control.mesh is None):
            return None
        return directive

    def follow(self, directive: worker_pb2.Directive) -> None:
        """One move towards the state that ``directive`` describes."""
        self.followed = directive
        self.out.serve()
        mesh = self.control.mesh
        try:
            if mesh is None:
                self.leave()
                self.sleep(directive, "no mesh")
            elif mesh.epoch == self.epochs.ended or mesh.epoch < self.epochs.wanted:
                # If it is older than one named before, the journal has lost its end, and with it
                # what became of this epoch. Nobody can form it again.
                self.leave()
                if not self.sleep(directive, "epoch over", REPORT_AGAIN_S):
                    self.control.report_failure(mesh.epoch, "still over")
            elif mesh.epoch != self.epochs.formed:
                self.join(mesh)
            else:
                self.take_step(mesh)
        except EpochCancelled:
            self.leave()
        except MeshError as error:
            self.collective_failed(mesh, error)
        except RequestRefused as error:
            # Usually the refusal concerns an incarnation that is over, and the report does, too.
            # Otherwise the others must not wait in an epoch that this replica cannot go on in.
            self.refusals.add(self.control.caller.incarnation, error)
            self.collective_failed(mesh, MeshError(f"refused by the controller: {error}"))

    # -- membership -----------------------------------------------------------------------------

    def join(self, mesh: worker_pb2.PolicyMesh) -> None:
        """Forms the epoch and brings this replica to the state every member must hold."""
        self.leave()
        rank = [m.incarnation for m in mesh.members].index(self.control.caller.incarnation)
        begun = time.monotonic()
        self.worker_report.work(f"epoch {mesh.epoch}: forming")
        trainer = self.trainer
        place = MeshEpoch(mesh.epoch), rank, len(mesh.members)
        here = EpochMesh(*place, self.rendezvous_url, self.run_id, self.host)
        with waiting(WaitKind.PEERS, f"forming epoch {mesh.epoch}", limit_s=FORM_LIMIT_S):
            over = functools.partial(self.epoch_is_over, mesh.epoch)
            trainer.form(here, FORM_LIMIT_S, cancelled=over)
        # Those that need the state stand in one line behind the source.
        joiners = [rank for rank, member in enumerate(mesh.members) if member.needs_state]
        version = Version(mesh.state_version)
        if mesh.restore and trainer.state.version != version:
            self.worker_report.work(f"epoch {mesh.epoch}: restoring")
            path = mesh.checkpoint_path
            what = f"reading checkpoint {path}" if path else "reading the initial model"
            with waiting(WaitKind.CHECKPOINT, what, path or self.config.model.path):
                trainer.restore(path, Step(mesh.step), version)
        elif mesh.restore:
            pass  # it is here
        elif rank in joiners:
            self.receive_state(mesh, [mesh.source_rank, *joiners], joiners.index(rank))
        elif rank == mesh.source_rank and joiners:
            peer = mesh.members[joiners[0]].worker_id
            self.worker_report.work(f"epoch {mesh.epoch}: sending the state to {len(joiners)}")
            with waiting(WaitKind.STATE, f"sending the state to {peer}", peer):
                trainer.send_state(joiners[0])
        if trainer.state.version != version:
            # The controller sees it in the report, and forms an epoch that transfers the state
            # here.
            raise MeshError(
                f"holds version {trainer.state.version}, the epoch needs {mesh.state_version}"
            )
        self.epochs.formed = mesh.epoch
        self.worker_report.change()
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

    def receive_state(self, mesh: worker_pb2.PolicyMesh, line: list[int], place: int) -> None:
        """Takes the state from the member at ``place``, for the one behind this one, too."""
        self.worker_report.work(f"epoch {mesh.epoch}: receiving the state")
        source, *behind = line[place], *line[place + 2 :]
        peer = mesh.members[source].worker_id
        with waiting(WaitKind.STATE, f"receiving the state from {peer}", peer):
            self.trainer.receive_state(source, behind[0] if behind else None)
        self.out.forget_from(Version(mesh.state_version))

    def leave(self) -> None:
        """Leaves the mesh and keeps the local gradients."""
        self.trainer.abandon()
        if self.epochs.formed:
            self.epochs.formed = 0
            self.worker_report.change()
            self.control.poke()

    def collective_failed(self, mesh: worker_pb2.PolicyMesh | None, error: MeshError) -> None:
        """Reports the failure and leaves the mesh; the next epoch comes by directive."""
        epoch = mesh.epoch if mesh is not None else self.epochs.formed
        event(log, "collective failed", logging.WARNING, epoch=epoch, error=error)
        self.end_epoch(epoch)
        self.control.report_failure(epoch, str(error))

    def end_epoch(self, epoch: int) -> None:
        """Leaves the mesh before the controller names another one."""
        self.epochs.ended = epoch
        self.leave()

    def end_epochs(self, directive: worker_pb2.Directive) -> None:
        """Ends the epochs that a new directive ends; on the session's thread, because the training
        thread may wait for another rank of this replica, and that rank for a peer that is gone."""
        self.epochs.wanted = max(self.epochs.wanted, directive.mesh.epoch)
        member = self.control.mesh is not None
        self.trainer.replica.end_epoch(self.epochs.wanted - member)

    def epoch_is_over(self, epoch: int) -> bool:
        mesh = self.control.mesh
        return mesh is None or mesh.epoch != epoch

    # -- the step -----------------------------------------------------------------------------

    def take_step(self, mesh: worker_pb2.PolicyMesh) -> None:
        """One step, or as much of it as this epoch lasts for."""
        plan = self.next_plan(mesh.epoch)
        if plan is None:
            return
        shard = self.shard.compute(
            plan, lambda: self.epoch_is_over(mesh.epoch) or self.step_is_left()
        )
        if not shard.complete:
            self.end_epoch(mesh.epoch)
            return
        self.worker_report.work(f"step {plan.step}: reducing")
        with waiting(WaitKind.COLLECTIVE, f"inside the all-reduce of epoch {mesh.epoch}"):
            stats = self.trainer.reduce()
        reduced = time.monotonic()
        stats.set("lr", plan.lr)
        stats.set("time_wait_s", shard.fetched - self.idle_since)
        stats.set("time_compute_s", shard.computed - shard.fetched)
        stats.set("time_reduce_s", reduced - shard.computed)
        stats.set("time_commit_s", self.last_commit_s)
        stats.set("time_publish_s", self.out.last_publish_s)
        with waiting(WaitKind.VOTES, f"waiting for the votes of step {plan.step}"):
            version = self.vote(plan, stats)
        if version is None:
            self.end_epoch(mesh.epoch)
            return
        self.worker_report.work(f"step {plan.step}: committing")
        self.trainer.commit(version, plan.lr)
        self.worker_report.change()
        self.last_commit_s = time.monotonic() - reduced
        self.refusals.clear()
        self.control.poke()
        event(
            log,
            "committed",
            step=plan.step,
            version=version,
            groups=len(plan.shard),
            loss=stats.mean("loss"),
            ms=(time.monotonic() - shard.fetched) * 1e3,
        )
        self.out.publish()
        if plan.checkpoint:
            self.out.save_checkpoint()
        self.idle_since = time.monotonic()

    def step_is_left(self) -> bool:
        """The run stops without the step that is computed, or has ended."""
        directive = self.control.directive
        return self.control.stopped or (directive is not None and directive.leave_step)

    def next_plan(self, epoch: int) -> policy_pb2.StepPlan | None:
        """The open step's plan; None if there is none yet, or if none will come in this epoch."""
        self.worker_report.rest(f"step {self.trainer.state.step + 1}: waiting for groups")
        request = policy_pb2.PlanRequest(
            caller=self.control.caller,
            mesh_epoch=epoch,
            state_version=self.trainer.state.version,
            wait_s=PLAN_WAIT_S,
        )
        what = f"waiting for the groups of step {self.trainer.state.step + 1}"
        with waiting(WaitKind.GROUPS, what, since=self.idle_since):
            reply = self.control.call(
                "PolicyService.NextPlan",
                request,
                # A directive may also ask for a publication or a checkpoint.
                lambda: self.epoch_is_over(epoch) or self.out.work_due() or self.control.stopped,
            )
        if reply is None or reply.state == policy_pb2.PLAN_STATE_WAIT:
            return None
        if reply.state == policy_pb2.PLAN_STATE_EVALUATE:
            self.held_out.run(
                reply.evaluate_step, lambda: self.epoch_is_over(epoch) or self.control.stopped
            )
            return None
        if reply.state == policy_pb2.PLAN_STATE_FINISHED:
            # Waits for a directive newer than the one this move began with: the present one may be
            # STOPPED already, and then none follows it. The last checkpoint may have to be retried.
            self.worker_report.rest("finished")
            self.control.wait(
                lambda: self.control.directive is not self.followed or self.out.checkpoint_due()
            )
            return None
        if reply.state != policy_pb2.PLAN_STATE_OPEN:
            self.epochs.ended = epoch
            return None
        plan: policy_pb2.StepPlan = reply.plan
        return plan

    def vote(self, plan: policy_pb2.StepPlan, stats: Stats) -> Version | None:
        """The committed version; None if the step is to be done again."""
        self.worker_report.rest(f"step {plan.step}: voting")
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

    # -- the worker's report ----------------------------------------------------------------------

    def report(self) -> worker_pb2.Report:
        """On the session's thread; there is no session before there is a trainer."""
        links = self.out.publisher.formed_generations() if self.admitted else []
        return self.worker_report.report(links, messages(self.stuck_ranks.waits()))

    def progressed(self) -> None:
        """The training thread has completed a part of its work."""
        self.worker_report.progressed()
        if self.admitted and self.trainer.replica.size == 1:
            # A receiver that joins in the middle of a long step need not wait for its end: weights
            # do not change before the commit. With several ranks publishing is collective.
            self.out.publish()

    def sleep(
        self, directive: worker_pb2.Directive, activity: str, limit_s: float = math.inf
    ) -> bool:
        """Waits for a directive newer than ``directive``; False if none came in time."""
        self.worker_report.rest(activity)
        end = time.monotonic() + limit_s
        with waiting(WaitKind.MESH, f"waiting for a mesh ({activity})"):
            self.control.wait(
                lambda: self.control.directive is not directive or time.monotonic() >= end
            )
        return self.control.directive is not directive

    # -- the end --------------------------------------------------------------------------------

    def finish(self) -> None:
        """Its checkpoints are on disk and recorded before the last report."""
        self.worker_report.work("finishing")
        # Its checkpoints are being written: the writer's thread marks its own wait.
        self.trainer.close()
        self.out.finish()
        self.worker_report.change(lifecycle=worker_pb2.LIFECYCLE_STOPPED)
        event(log, "finished", step=self.trainer.state.step, version=self.trainer.state.version)

    def close(self) -> None:
        if self.admitted:
            self.out.publisher.close()
        self.trainer.abandon()
        self.control.close()
