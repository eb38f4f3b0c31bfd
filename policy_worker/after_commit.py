"""Output of a policy worker after a commit: weights to engines, checkpoints to disk.

    commit ──► publisher ──► its threads ──► receivers            (replicas with links)
          └──► checkpoint ──► writer's thread ──► RecordCheckpoint ──► obsolete ones deleted
                                                                  (rank 0 of the mesh)

Both read the state beside training, and an update waits for their copies; each version leaves once.
If a checkpoint is due and nobody is writing it (its writer died, its write failed), it is written
at the next opportunity, not at the next regular step. If a failover of Redis loses the record of
one, a leader of a newer term asks for it still: the record is posted again, because the files are
on disk.

What becomes of a checkpoint is known on other threads first. They post it, and the training thread,
which alone changes what is held here, reads it when it looks what is due.
"""

import time
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue

from paceline.ids import Step, Version
from paceline.v1 import policy_pb2, worker_pb2
from policy_worker.checkpoint.checkpoint import CheckpointInfo
from policy_worker.control_plane import BlockingControlPlane
from policy_worker.model.train_state import NO_VERSION
from policy_worker.publisher import PublishingPlace
from policy_worker.trainer import Trainer

RETRY_S = 10.0
"""Between a checkpoint that could not be written or recorded and the next try."""


@dataclass(frozen=True, slots=True)
class _Outcome:
    """End of the write and of the record of a checkpoint."""

    version: Version
    recorded: CheckpointInfo | None = None
    """None: it could not be written, or not recorded."""
    term: int = 0


class AfterCommit:
    """Made once the worker has registered. Methods are for the training thread."""

    def __init__(
        self,
        control: BlockingControlPlane,
        trainer: Trainer,
        reply: worker_pb2.RegisterReply,
        host: str,
    ) -> None:
        self._control = control
        self._trainer = trainer
        self.publisher = trainer.open_publisher(
            PublishingPlace(reply.rendezvous_url, reply.run_id, host),
            on_link_error=lambda link, why: control.report_failure(link, why, is_link=True),
            on_stored=control.poke,
        )
        self._saved = NO_VERSION
        """Version of the newest checkpoint that is being written or is recorded."""
        self._saved_step = Step(0)
        self._save_again_at = 0.0
        self._recorded: _Outcome | None = None
        self._outcomes: SimpleQueue[_Outcome] = SimpleQueue()
        self._records: list[Future[None]] = []
        # On the session's thread: links form while the training thread computes.
        control.on_directive(self._link)

    def _link(self, directive: worker_pb2.Directive) -> None:
        own = self._control.caller.incarnation
        links = [link for link in directive.links if link.publisher.incarnation == own]
        self.publisher.set_links(links)
        self.publisher.note_stored(directive.stored_weights)

    def work_due(self) -> bool:
        """There is something that the training thread does between steps."""
        if self._control.directive is None or self.publisher.due or self.checkpoint_due():
            return True
        if self._control.leaves_last:
            return True
        return self._lost_record() is not None

    def serve(self) -> None:
        """Does it."""
        if not self._trainer.parked:
            self.publisher.publish_newest()
        if self.checkpoint_due():
            self.save_checkpoint()
        elif (lost := self._lost_record()) is not None:
            self._recorded = None
            self._record(lost)

    def forget_from(self, version: Version) -> None:
        """This replica received the state of ``version`` from another one: what it published or
        saved as that version was outvoted, and later versions were never committed."""
        self._read_outcomes()
        if self.publisher.version >= version:
            self.publisher.take_back()
        if self._saved >= version:
            self._trainer.checkpointer.abandon(version)
            self._saved, self._saved_step = NO_VERSION, Step(0)

    def checkpoint_due(self) -> bool:
        """This replica is to write a checkpoint of its present state now."""
        self._read_outcomes()
        directive, state = self._control.directive, self._trainer.state
        return (
            directive is not None
            and self._saved_step_of_this_line() < directive.checkpoint_step <= state.step
            and self._saved != state.version
            and self._trainer.rank == 0
            and time.monotonic() >= self._save_again_at
        )

    def save_checkpoint(self) -> None:
        """Rank 0 of the mesh writes the present state, once, in the background."""
        self._read_outcomes()
        state = self._trainer.state
        if self._trainer.rank != 0 or self._saved == state.version or state.step == 0:
            return
        self._saved, self._saved_step = state.version, state.step
        version = state.version

        def written(future: Future[CheckpointInfo]) -> None:
            """On the writer's thread, which has logged a failure."""
            if future.exception() is None:
                self._record(future.result())
            else:
                self._outcomes.put(_Outcome(version))

        self._trainer.save().add_done_callback(written)

    def finish(self) -> None:
        """Waits until checkpoints under way are recorded; the trainer is closed by then."""
        for record in self._records:
            record.result()

    def _saved_step_of_this_line(self) -> int:
        """A checkpoint before a rollback does not count: version and step rise together."""
        state = self._trainer.state
        same_line = self._saved - self._saved_step == state.version - state.step
        return self._saved_step if same_line else 0

    def _lost_record(self) -> CheckpointInfo | None:
        """The saved checkpoint, if a newer leader than the one that recorded it asks for it."""
        self._read_outcomes()
        outcome, directive = self._recorded, self._control.directive
        if outcome is None or directive is None or self._trainer.rank != 0:
            return None
        wanted = 0 < directive.checkpoint_step <= self._saved_step_of_this_line()
        lost = directive.term > outcome.term and outcome.version == self._saved
        return outcome.recorded if wanted and lost else None

    def _record(self, info: CheckpointInfo) -> None:
        directive = self._control.directive
        term = 0 if directive is None else directive.term
        request = policy_pb2.CheckpointRequest(
            caller=self._control.caller,
            step=info.step,
            version=info.version,
            path=str(info.path),
            size_bytes=info.size_bytes,
            seconds=info.seconds,
            weights_digest=info.digest,
        )
        outcome = _Outcome(info.version)

        def recorded(reply: policy_pb2.CheckpointReply) -> None:
            nonlocal outcome
            outcome = _Outcome(info.version, info, term)
            self._trainer.checkpointer.delete(list(reply.obsolete_paths))
            if step := reply.settled_step:
                self._trainer.checkpointer.sweep(Step(step), frozenset(reply.recorded_names))

        record = self._control.post("PolicyService.RecordCheckpoint", request, recorded)
        record.add_done_callback(lambda _: self._outcomes.put(outcome))
        self._records.append(record)

    def _read_outcomes(self) -> None:
        while not self._outcomes.empty():
            outcome = self._outcomes.get()
            if outcome.recorded is not None:
                self._recorded = outcome
            elif self._saved == outcome.version:
                self._save_again_at = time.monotonic() + RETRY_S
                self._saved, self._saved_step = NO_VERSION, Step(0)
