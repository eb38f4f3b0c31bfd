"""Operations of a policy replica: rank 0 calls them, and every rank of the replica executes them.

    form ─► restore | send_state | receive_state ─► begin ─► take ─► add ─► reduce ─► commit ─► save
      ▲                                               ▲        │      │       │
      └─────────────────── abandon ◄──────────────────┴────────┴──────┴───────┘
                           (local gradients stay)
    between steps: park ─► (another process has the device) ─► unpark

- Nothing here talks to the controller. Operations are declared with ``on_every_rank``, so all ranks
  execute the same sequence.
- An operation on the mesh that fails on one rank fails on all, and leaves the mesh abandoned.
- Only restore, receive_state and commit change the state. commit computes from the reduced buffer,
  which is the same on all replicas bit for bit, and from nothing else.
"""

import hashlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, NewType

import torch
from pydantic import PlainSerializer, PlainValidator
from torch import Tensor

from paceline.config.schema import Config
from paceline.ids import MeshEpoch, Step, Version
from paceline.memory_plan import PARKED, scorers_of_a_pair
from paceline.mesh.elastic_mesh import EpochCancelled, MeshError, ProcessMesh
from paceline.payloads.store import Payloads
from paceline.process.compute_device import peak_flops
from paceline.process.parked_memory import ParkedMemory, await_room
from paceline.process.structured_log import first_line
from paceline.redis.client import front_moved, front_port
from paceline.v1 import rollout_pb2
from paceline.weights.tensor_checksum import weights_digest
from policy_worker.checkpoint.checkpoint import Checkpointer, CheckpointInfo
from policy_worker.model import host_weights
from policy_worker.model.train_state import NO_VERSION, TrainState, local_tensor
from policy_worker.objectives.batch import BadGroup, GroupKey, StepTotals
from policy_worker.objectives.load import load_objective
from policy_worker.objectives.objective import POLICY, is_base
from policy_worker.publisher import PublishingPlace, ReplicaPublisher
from policy_worker.ranks.operations import follow as follow_operations
from policy_worker.ranks.operations import on_every_rank
from policy_worker.ranks.rank_group import RankGroup
from policy_worker.ranks.sharding import load_again, load_sharded, load_sharded_state, local_weights
from policy_worker.ranks.state_transfer import receive_state, send_state
from policy_worker.rows.group_reading import AcceptedGroup
from policy_worker.rows.packing import settle_rows
from policy_worker.rows.payload_reader import PayloadReader, StorePlace
from policy_worker.rows.replica import Replica
from policy_worker.rows.row_shards import RowShard
from policy_worker.step.gradients import Gradients
from policy_worker.step.held_out import measure_held_out
from policy_worker.step.stats import Stats
from policy_worker.step.update import Update

Taken = NewType("Taken", int)
"""Names groups whose payloads the ranks have read: the first ones of a step have 0."""

PackedGroup = Annotated[
    rollout_pb2.Group,
    PlainValidator(lambda text: rollout_pb2.Group.FromString(b64decode(text))),
    PlainSerializer(lambda group: b64encode(group.SerializeToString()).decode()),
]


def follow(replica: RankGroup, config: Config, device: torch.device) -> None:
    """Ranks above 0: executes what rank 0 announces until it announces the end."""
    Trainer(config, device, replica=replica).follow()
    replica.close()


@dataclass(frozen=True, slots=True)
class EpochMesh:
    """A mesh epoch from this replica's point of view."""

    number: MeshEpoch
    rank: int
    size: int
    url: str
    run_id: str
    host: str


@dataclass(eq=False)
class Trainer:
    """One rank of a policy replica. Operations are called from one thread, on rank 0 only."""

    config: Config
    device: torch.device
    _: KW_ONLY
    replica: Replica = field(default_factory=Replica)
    on_progress: Callable[[], None] = lambda: None
    step_left: Callable[[], bool] = lambda: False
    """True if the open step was given up meanwhile; only for the rank that leads."""

    def __post_init__(self) -> None:
        """Loads the objective's parts. Raises ModelError and ObjectiveError."""
        if self.config.takes_turns and self.device.type == "cuda":
            scorers = sum(scorers_of_a_pair(self.config).values())
            await_room(partial(torch.cuda.mem_get_info, self.device), scorers * PARKED)
        # The run's settings stay as they are: what is settled is this worker's affair.
        config = settle_rows(self.config, self.replica, self.device)
        self.state: TrainState = load_sharded_state(config, self.replica, self.device)
        policy = self.state.parts.get(POLICY)
        frozen = {
            part.name: policy  # without its adapters
            if policy is not None and is_base(part, config)
            else load_sharded(part, config, self.replica, self.device, trainable=False)
            for part in load_objective(config).frozen
        }
        self.gradients = Gradients(
            self.state, self.device, frozen, self.replica, self.on_progress, self.step_left
        )
        self.update = Update(self.gradients)
        self._checkpointer: Checkpointer | None = None
        self._publisher: ReplicaPublisher | None = None
        self._initial = True
        """The state is still the one that model.path gave."""
        self._mesh: ProcessMesh | None = None
        self._epoch = MeshEpoch(0)
        self._digest: tuple[Version, str] = (NO_VERSION, "")
        self._taken: dict[Taken, RowShard | None] = {}
        """Shares that were read in the open step; None for one that was added."""
        self.payloads: PayloadReader | None = None
        self._parked = ParkedMemory(self.device)

    @on_every_rank
    def attach(self, run_dir: Path, store: StorePlace | None = None) -> None:
        """Sets the run directory for checkpoints, and the payload store; the controller names
        both."""
        self._checkpointer = Checkpointer(
            run_dir, self.config, self.replica, self.device, self.on_progress
        )
        if store is not None:
            self.payloads = PayloadReader(store)

    @property
    def checkpointer(self) -> Checkpointer:
        if self._checkpointer is None:
            raise RuntimeError("the trainer is attached to no run directory")
        return self._checkpointer

    # -- mesh ---------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This replica's rank in the mesh it has formed; -1 without one."""
        return -1 if self._mesh is None else self._mesh.rank

    @on_every_rank
    def form(
        self,
        epoch: EpochMesh,
        timeout_s: float = 60.0,
        *,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        """Connects to the epoch's other members, unless ``cancelled`` or another rank says that it
        is over. Raises EpochCancelled or MeshError; this replica has no mesh then."""
        self._leave_mesh()
        self._epoch = epoch.number
        front_moved(front_port(epoch.url))  # of ranks without a session

        def over() -> bool:
            if cancelled():
                self.replica.end_epoch(epoch.number)
            return self.replica.epoch_over(epoch.number)

        def meet() -> None:
            self._mesh = ProcessMesh.form(
                url=epoch.url,
                key=f"paceline:{epoch.run_id}:rdv:mesh:{epoch.number}:{self.replica.rank}",
                rank=epoch.rank,
                size=epoch.size,
                device=self.device,
                cancelled=over,
                timeout_s=timeout_s,
                host=self.replica.host or epoch.host,
            )

        self._on_all_ranks(meet)
        if epoch.rank == 0 and self._checkpointer is not None:
            self._checkpointer.reserve(self.state)

    def abandon(self) -> None:
        """Leaves the mesh, if any. Local gradients stay. Idempotent, never blocks on peers."""
        if self._mesh is None:
            return
        self.replica.end_epoch(self._epoch)
        self.abandon_mesh()

    @on_every_rank
    def abandon_mesh(self) -> None:
        self._leave_mesh()

    # -- state --------------------------------------------------------------------------------

    @on_every_rank
    def restore(self, path: str, step: Step, version: Version) -> None:
        """Loads a checkpoint, or with an empty path the initial state, as ``version`` after
        ``step``.

        The initial state is that of model.path, with the weights of model.initial_checkpoint if it
        is set.

        Raises CheckpointError or ModelError; the state is unusable then.
        """
        self._forget_step()
        self.state.version = NO_VERSION
        if path:
            self.checkpointer.restore(self.state, path, version=version)
        else:
            if not self._initial:
                load_again(self.state, self.replica, self.device, self.on_progress)
            if (initial := self.config.model.initial_checkpoint) is not None:
                self.checkpointer.begin_with(self.state, initial)
        self.state.step, self.state.version = step, version
        self._initial = False

    @on_every_rank
    def send_state(self, peer: int) -> None:
        """Sends the whole state to mesh rank ``peer``. Raises EpochCancelled or MeshError."""
        progress = self.on_progress
        self._on_all_ranks(lambda: send_state(self._need_mesh(), self.state, peer, progress))

    @on_every_rank
    def receive_state(self, source: int, following: int | None = None) -> None:
        """Takes over the whole state of mesh rank ``source``, bit for bit, and hands it on to mesh
        rank ``following``. Raises EpochCancelled or MeshError; the state is void then (version -1).
        """
        self._forget_step()
        self._initial = False

        state, progress = self.state, self.on_progress
        self._on_all_ranks(
            lambda: receive_state(self._need_mesh(), state, source, progress, following)
        )

    @on_every_rank
    def digest(self) -> str:
        """Digest of weights and numbers, equal where the state is equal bit for bit."""
        return self._present_digest()

    def _present_digest(self) -> str:
        if self._digest[0] != self.state.version:
            mine = weights_digest([*local_weights(self.state), *self.state.scalars.items()])
            if self.config.model.lora is not None:
                mine = hashlib.sha256(f"{self._base_digest} {mine}".encode()).hexdigest()
            parts: list[str] = self.replica.gather(mine)
            joined = hashlib.sha256("".join(parts).encode()).hexdigest()
            self._digest = (self.state.version, parts[0] if len(parts) == 1 else joined)
        return self._digest[1]

    @cached_property
    def _base_digest(self) -> str:
        """Replicas whose adapters are on different bases have different digests."""
        base = ((name, local_tensor(weight)) for name, weight in self.state.frozen_base())
        return weights_digest(base)

    # -- step ---------------------------------------------------------------------------------

    @on_every_rank
    def begin(self, spec: StepTotals, shard: Sequence[GroupKey]) -> list[GroupKey]:
        """Opens or continues a step; returns the groups of ``shard`` that are still to be added."""
        self._taken.clear()
        return self.gradients.begin(spec, shard)

    @on_every_rank
    def take(self, accepted: Sequence[AcceptedGroup]) -> Taken:
        """Has each rank read and check the groups that its rows need of ``accepted``, for add().
        Raises BadGroup with the groups that a rank found lost or invalid, and EpochCancelled if the
        epoch ended meanwhile or the step is left. Nothing was added then."""

        def over() -> bool:
            return self.replica.epoch_over(self._epoch) or self.step_left()

        def read_or_end(keys: Sequence[GroupKey]) -> Payloads | None:
            payloads = None
            try:
                if self.payloads is None:
                    raise RuntimeError("the trainer is attached to no payload store")
                payloads = self.payloads.fetch(keys, over)
                return payloads
            finally:
                if payloads is None:
                    # Ranks that still wait for the store are freed without the controller.
                    self.replica.end_epoch(self._epoch)

        taken = Taken(len(self._taken))
        self._taken[taken] = self.gradients.take(accepted, read_or_end)
        return taken

    @on_every_rank
    def add(self, taken: Taken, last: bool = False) -> None:
        """Adds the gradients of what take() returned ``taken`` for to the local ones, once.

        ``last``: nothing is added before reduce(), which begins during the last backward of this
        call.

        Raises BadGroup (out of memory, one rank) or EpochCancelled; the step has to begin again.
        """
        share, self._taken[taken] = self._taken[taken], None
        if share is None:
            raise RuntimeError("added before")
        if not last or self._mesh is None:
            self.gradients.add_share(share)
            return
        try:
            self.gradients.add_share(share, self.update.start(self._mesh).during_backward)
        except BadGroup:
            if not self.update.cancel():
                self.abandon()
            raise

    @on_every_rank
    def measure(self, groups: Sequence[PackedGroup]) -> Stats:
        """Measurements of held-out groups with the present state. Raises BadGroup."""
        found = measure_held_out(self.gradients, groups)
        stats = Stats()
        stats.merge(self.replica.gather(found.entries))
        return stats

    def computed(self) -> None:
        """Waits once for the device, so that a step's time is that of its kernels."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    @on_every_rank
    def reduce(self) -> Stats:
        """Sums the gradients of all members for commit(); local gradients are untouched. Returns
        this replica's stats of the step, grad_norm of each part (before clipping) included. Raises
        EpochCancelled or MeshError."""
        self._on_all_ranks(lambda: self.update.reduce(self._need_mesh(), self.on_progress))
        return self.update.measured()

    def mfu(self, stats: Stats, seconds: float) -> float | None:
        """Share of the peak of this replica's devices that the rows of a step took over
        ``seconds``; None if the peak is not known."""
        if (peak := peak_flops(self.device)) is None:
            return None
        tokens, _, _ = stats.entries.get("row_tokens", (0.0, 0.0, 0.0))
        return self.gradients.operations_a_token * tokens / (seconds * peak * self.replica.size)

    @on_every_rank
    def commit(self, version: Version, lr: float) -> None:
        """Applies the reduced gradients: the state is ``version`` now, one step further."""
        self._before_change()
        self.update.apply(version, lr)
        self._initial = False

    # -- out ----------------------------------------------------------------------------------

    @on_every_rank
    def save(self) -> Future[CheckpointInfo]:
        """Copies the state and writes it in the background; see Checkpointer.save_async."""
        digest, source = self._present_digest(), self._parked.on_host
        return self.checkpointer.save_async(self.state, digest, source)

    @on_every_rank
    def open_publisher(
        self,
        place: PublishingPlace,
        *,
        on_link_error: Callable[[int, str], None] = lambda generation, why: None,
        on_stored: Callable[[], None] = lambda: None,
    ) -> ReplicaPublisher:
        """The publisher of the policy's weights."""
        self._publisher = ReplicaPublisher(
            self.state, self.replica, self.device, place, on_link_error, on_stored
        )
        return self._publisher

    # -- turns --------------------------------------------------------------------------------

    @property
    def parked(self) -> bool:
        """The state is in host memory. Only save() and unpark() may be called, and what concerns
        the mesh alone."""
        return self._parked.parked

    @on_every_rank
    def park(self) -> None:
        """Between steps: gives up the memory of the device on every rank. The state moves to host
        memory, and with it what a checkpoint is written from; published weights are there already.
        Gradients of a step that another epoch would continue are dropped: it begins anew. Raises
        ReplicaBroken if the host of a rank lacks the memory."""
        self._before_change()
        if self._parked.moves:
            self._present_digest()  # a checkpoint needs it, and the weights are still here
        self.gradients.clear()
        self._taken.clear()
        self.update.let_go()
        failure = ""
        try:
            self._parked.copy(*self._on_device())
        except RuntimeError as error:
            failure = f"the host has no room for its state ({first_line(error)})"
        if not self.replica.agree(not failure):
            raise self.replica.given_up(failure or "another rank could not give up its device")
        if self.device.type == "cpu":  # there it is the memory of the device
            self.checkpointer.let_go()
            if self._publisher is not None:
                self._publisher.let_go()
        for model in self.gradients.frozen.values():
            host_weights.let_go(model)
        self._parked.park(self.gradients.forwards.copies.copy_of.values())

    @on_every_rank
    def unpark(self) -> None:
        """Takes the memory again; the state is the same bit for bit. Raises StillInUse."""
        self._parked.unpark()
        self.gradients.forwards.copies.stale = True

    def _on_device(self) -> tuple[list[Tensor], list[Tensor]]:
        """This rank's part of all that the device holds between two steps: what a step changes, and
        what none does."""
        copies = {*self.gradients.forwards.copies.copy_of.values()}
        models = [*self.state.parts.values(), *self.gradients.frozen.values()]
        weights = {p for model in models for p in model.parameters()} - copies
        weights |= {parameter for _, parameter in self.state.named_parameters()}
        moments = [m for state in self.state.optimizer.state.values() for m in state.values()]
        changing = [*(w for w in weights if w.requires_grad), *moments]
        constant = [w for w in weights if not w.requires_grad]
        changing, constant = ([*map(local_tensor, each)] for each in (changing, constant))
        there = self.device.type
        return (
            [tensor for tensor in changing if tensor.device.type == there],
            [tensor for tensor in constant if tensor.device.type == there],
        )

    def close(self) -> None:
        """Ends the mesh, waits for the checkpoints under way, and ends the other ranks."""
        self.abandon()
        if self._checkpointer is not None:
            self._checkpointer.close()
        self.replica.close()

    def follow(self) -> None:
        """Ranks above 0: executes what rank 0 announces, until it announces the end."""
        may_fail = (EpochCancelled, MeshError, BadGroup)
        assert isinstance(self.replica, RankGroup)
        follow_operations(
            self.replica, lambda: [self, self._publisher] if self._publisher else [self], may_fail
        )
        self._leave_mesh()
        if self._checkpointer is not None:
            self._checkpointer.close()
        if self._publisher is not None:
            self._publisher.close()
        if self.payloads is not None:
            self.payloads.close()

    # -- inside an operation ------------------------------------------------------------------

    def _on_all_ranks(self, work: Callable[[], None]) -> None:
        """Runs ``work`` on the mesh; if it fails on one rank of the replica, it fails on all."""
        failure: Exception | None = None
        try:
            work()
        except (EpochCancelled, MeshError) as error:
            failure = error
            # Ranks that still wait for their peers are freed without the controller.
            self.replica.end_epoch(self._epoch)
        if self.replica.agree(failure is None):
            return
        self._leave_mesh()
        raise failure or MeshError("another rank of this replica failed")

    def _forget_step(self) -> None:
        """Before the state is replaced."""
        self._before_change()
        self.gradients.clear()
        self._taken.clear()
        self._digest = (NO_VERSION, "")

    def _before_change(self) -> None:
        """A checkpoint's and a publication's copies of the state may be under way on the device."""
        if self._checkpointer is not None:
            self._checkpointer.before_change()
        if self._publisher is not None:
            self._publisher.before_change()

    def _leave_mesh(self) -> None:
        self.update.mesh_is_left()
        mesh, self._mesh = self._mesh, None
        if mesh is not None:
            mesh.abandon()

    def _need_mesh(self) -> ProcessMesh:
        if self._mesh is None:
            raise EpochCancelled("no mesh")
        return self._mesh
