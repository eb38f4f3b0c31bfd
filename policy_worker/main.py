"""Policy worker: follows the controller's directives, one training step after the other.

    directive ─┬─ no mesh ────────► leave it; draining: finish and exit
               ├─ another epoch ──► form ─► restore | receive_state | send_state
               ├─ this epoch ─────► a training step (``training_steps``)
               ├─ another's turn ─► park: the state to host memory, until the turn is this one's
               └─ STOPPED ────────► finish checkpoints, exit 0

- SIGTERM: the report says DRAINING, and the others go on without this replica from the next step
  on. The only replica writes a checkpoint between two steps, and leaves.
- After a commit the state is published and, if it is due, written (``after_commit``).
- Form and both ends of a state transfer end within 20 ms when a directive names another epoch.
- A replica that takes turns (fleet.sharing) loads its model when its first turn comes. One that is
  parked keeps its session, its mesh and its links; it forms no other epoch before its next turn.
- A failed collective is reported, and reported again until the controller names another epoch. This
  replica waits for that epoch like every other member.

Threads: training runs here; the session and all calls on control_plane's event loop; what
after_commit takes over, on the threads of the weight publisher and the checkpoint writer.
"""

import functools
import json
import logging
import math
import time
from argparse import Namespace
from pathlib import Path

import torch

from paceline.config.schema import Config
from paceline.errors import BadInput
from paceline.ids import MeshEpoch, Step, Version
from paceline.mesh.elastic_mesh import EpochCancelled, MeshError
from paceline.process import structured_log as logs
from paceline.process.compute_device import pick_device
from paceline.process.lifetime import leave_on_signal
from paceline.process.structured_log import event
from paceline.process.torchrun_environment import TorchrunPlace
from paceline.process.waits import WaitKind, loading_model, messages, waiting
from paceline.redis.client import present_url
from paceline.rpc.addresses import own_address
from paceline.rpc.client import RequestRefused
from paceline.rpc.turn import Turn
from paceline.v1 import worker_pb2
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
from policy_worker.rows.payload_reader import StorePlace
from policy_worker.rows.replica import Replica
from policy_worker.trainer import EpochMesh, Trainer
from policy_worker.training_steps import TrainingSteps

log = logging.getLogger(__name__)

FORM_LIMIT_S = 60.0
REPORT_AGAIN_S = 5.0
"""A failed epoch is reported again after this time if the controller names no other one: a long
outage may have swallowed the report, and a failover of Redis may have lost it."""


def run(config: Config, options: Namespace, place: TorchrunPlace | None = None) -> int:
    """Runs until the controller says STOPPED. Returns the exit status. Raises UserError.
    ``options``: of ``worker_command``. ``place``: of rank 0, if the ranks of the replica were
    started from outside."""
    logs.setup(options.id)
    torch.set_num_threads(config.fleet.policy_threads)
    with loading_model(config.model.path):
        worker = PolicyWorker(config, options, place)
    worker.run()
    return 0


class PolicyWorker:
    """One policy replica, in the process of its rank 0."""

    def __init__(
        self, config: Config, options: Namespace, place: TorchrunPlace | None = None
    ) -> None:
        """Raises ModelError, AuthError, ReplicaBroken, or BadInput for a wrong ``place``."""
        worker_id, controllers = options.id, options.controllers
        self.config, self._place = config, place
        self.run_dir: Path | None = options.run_dir
        self.host = options.tensor_host or own_address(controllers[0])
        self.worker_report = PolicyReport()
        self.epochs = self.worker_report.epochs
        self.out: AfterCommit
        self.steps: TrainingSteps
        self.admitted = False
        """Registered; only then are there ``out`` and ``steps``."""
        self.refusals = RefusalLimit(worker_id)
        self.control = BlockingControlPlane(
            config,
            controllers,
            worker_id=worker_id,
            report=self.report,
            tensor_host=self.host,
            run_dir=self.run_dir,
        )
        self.stuck_ranks = StuckRanks([])
        self.turn = Turn()
        self.trainer: Trainer
        if config.takes_turns and place is not None and place.size > 1:
            raise BadInput(
                f'fleet.sharing = "{config.fleet.sharing}" needs replicas whose ranks Paceline '
                "starts on one host: start the policy worker without torchrun's environment"
            )
        if not config.takes_turns:
            self.load()

    def load(self) -> None:
        """Starts the ranks and loads the models. Raises as the constructor does."""
        config, place, worker_id = self.config, self._place, self.control.worker_id
        # With the interface to other replicas, before the ranks of this one make their group.
        number = place.local_rank if place is not None else 0
        device = pick_device(config.model.device, number, self.host)
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
            step_left=self.control.step_is_left,
        )
        self.worker_report.state = self.trainer.state

    # -- the loop -----------------------------------------------------------------------------

    def run(self) -> None:
        """Joins the fleet and follows its directives until the end."""
        with waiting(WaitKind.CONTROLLER, "registering"):
            reply = self.control.register()
        if self.config.takes_turns and not self.first_turn():
            self.worker_report.change(lifecycle=worker_pb2.LIFECYCLE_STOPPED)
            self.control.close()
            return
        self.rendezvous_url, self.run_id = reply.rendezvous_url, reply.run_id
        store = StorePlace(list(reply.payload_urls), reply.run_id, reply.rendezvous_url)
        self.trainer.attach(self.run_dir or Path(reply.run_dir), store)
        self.out = AfterCommit(self.control, self.trainer, reply, self.host)
        use = self.control, self.trainer, self.worker_report
        held_out = HeldOutEvaluation(self.config, *use)
        self.steps = TrainingSteps(*use, self.out, held_out, self.refusals)
        self.admitted = True
        self.control.on_directive(self.end_epochs)
        if (directive := self.control.directive) is not None:  # came before the line above
            self.end_epochs(directive)
        self.worker_report.change(lifecycle=worker_pb2.LIFECYCLE_RUNNING)
        leave_on_signal(self.control.leave, self.config.fleet.drain_s)
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
        mesh = self.control.mesh
        if self.control.stopped or (draining and mesh is None):
            return None
        if self.control.leaves_last and mesh is not None and self.epochs.formed == mesh.epoch:
            self.out.save_checkpoint()
            return None
        return directive

    def first_turn(self) -> bool:
        """Loads the models when the device is this replica's, and nobody else's. False: it is to
        leave before that."""
        while (directive := self.next_directive()) is not None:
            if self.turn.begins(directive.seat):
                self.report_turn()
                self.worker_report.rest("loading the model")  # no progress is seen of it
                with loading_model(self.config.model.path):
                    self.load()
                return True
            self.turn.ends(directive.seat)  # it may be asked for a grant that it has not taken
            self.report_turn()
            self.sleep(directive, "no turn yet")
        return False

    def take_turn(self, directive: worker_pb2.Directive) -> bool:
        """Parks or unparks as ``directive`` says. True if this replica has its device."""
        if not self.config.takes_turns:
            return True
        begun, was_parked = time.monotonic(), self.trainer.parked
        if holds := self.turn.begins(directive.seat):
            self.report_turn()  # before it uses the device
            if was_parked:
                self.worker_report.work("taking the device")
                self.trainer.unpark()
        elif not was_parked:
            self.worker_report.work("parking")
            self.trainer.park()
        if was_parked is holds:
            what = "unpark" if holds else "park"
            seconds = self.worker_report.gauges[f"{what}_s"] = time.monotonic() - begun
            seat, grant = directive.seat.name, self.turn.grant
            event(log, f"{what}ed", seat=seat, grant=grant, s=seconds)
        if not holds:
            self.turn.ends(directive.seat)
        self.report_turn()
        return holds

    def report_turn(self) -> None:
        if self.worker_report.now.get("seat") != self.turn.report:
            self.worker_report.change(seat=self.turn.report)
            self.control.poke()

    def follow(self, directive: worker_pb2.Directive) -> None:
        """One move towards the state that ``directive`` describes."""
        self.out.serve()
        # That may have taken its time, and a grant of an earlier leader may be lost since.
        if (newest := self.control.directive) is None:
            return
        directive, mesh = newest, self.control.mesh
        if not self.take_turn(directive):
            if mesh is None or mesh.epoch != self.epochs.formed:
                self.leave()
            self.sleep(directive, "parked")
            return
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
            elif not self.steps.take(mesh.epoch, directive):
                self.end_epoch(mesh.epoch)
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
        here = EpochMesh(*place, present_url(self.rendezvous_url), self.run_id, self.host)
        with waiting(WaitKind.PEERS, f"forming epoch {mesh.epoch}", limit_s=FORM_LIMIT_S):
            over = functools.partial(self.control.epoch_is_over, mesh.epoch)
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

    # -- the worker's report ----------------------------------------------------------------------

    def report(self) -> worker_pb2.Report:
        """On the session's thread; there is no session before there is a trainer."""
        links = self.out.publisher.formed_generations() if self.admitted else []
        report = self.worker_report.report(links, messages(self.stuck_ranks.waits()))
        report.stored_weights = self.out.publisher.stored if self.admitted else ""
        if self.control.leaving and report.lifecycle == worker_pb2.LIFECYCLE_RUNNING:
            report.lifecycle = worker_pb2.LIFECYCLE_DRAINING
        return report

    def progressed(self) -> None:
        """The training thread has completed a part of its work."""
        self.worker_report.progressed()
        if self.admitted and self.trainer.replica.size == 1:
            # A receiver that joins in the middle of a long step need not wait for its end: weights
            # do not change before the commit. With several ranks publishing is collective.
            self.out.publisher.publish_newest()

    def sleep(
        self, directive: worker_pb2.Directive, activity: str, limit_s: float = math.inf
    ) -> bool:
        """Waits for a directive newer than ``directive``; False if none came in time."""
        self.worker_report.rest(activity)
        end = time.monotonic() + limit_s
        with waiting(WaitKind.MESH, f"waiting for a mesh ({activity})"):
            self.control.wait(
                lambda: (
                    self.control.directive is not directive
                    or time.monotonic() >= end
                    or (self.admitted and self.out.checkpoint_due())
                )
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
