"""The verbs of a policy replica. Rank 0 decides when; every rank of the replica does.

    form ──► restore | seed | receive ──► begin ─► add ─► reduce ─► commit ──► save, gathered
      ▲                                     ▲        │       │
      └────────── abandon ◄─────────────────┴────────┴───────┘   (local gradients stay)

- Nothing here talks to the controller. Each verb hands itself to the followers first, so that all
  ranks run the same sequence.
- A verb on the mesh that fails on one rank fails on all, and leaves the mesh abandoned.
- Only restore, receive and commit change the state. commit computes from the reduced buffer, which
  is the same on all replicas bit for bit, and from nothing else.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.config.schema import Config
from paceline.mesh.elastic_mesh import EpochCancelled, Handle, MeshError, ProcessMesh
from paceline.v1 import rollout_pb2
from paceline.weights.weight_transfer import weights_digest
from policy_worker.checkpoint.checkpoint import Checkpointer, CheckpointInfo
from policy_worker.model import load_reference
from policy_worker.ranks.rank_group import RankGroup
from policy_worker.ranks.sharding import (
    gathered_weights,
    load_sharded_state,
    local_weights,
    shard_model,
    squared_norm,
)
from policy_worker.state import TrainState
from policy_worker.state_transfer import BUCKET, receive_state, send_state, state_tensors
from policy_worker.step.batch import BadGroup
from policy_worker.step.gradients import Gradients, GroupKey, StepSpec
from policy_worker.step.optimizer import learning_rate
from policy_worker.step.optimizer_step import apply_update
from policy_worker.step.stats import Stats


@dataclass(frozen=True, slots=True)
class EpochMesh:
    """A mesh epoch from this replica's point of view."""

    number: int
    rank: int
    size: int
    url: str
    """Redis of the rendezvous."""
    run_id: str
    host: str
    """Address of this replica for the others."""


class Trainer:
    """One rank of a policy replica. Verbs are called from one thread, on rank 0 only."""

    def __init__(
        self,
        config: Config,
        device: torch.device,
        *,
        replica: RankGroup | None = None,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        """Loads model.path. ``on_progress`` is called whenever work got somewhere.

        Raises ModelError where a model cannot be read.
        """
        self.replica = replica or RankGroup()
        self._config = config
        self.device = device
        self.state: TrainState = load_sharded_state(config, self.replica, device)
        reference = load_reference(config, device)
        if reference is not None and self.replica.mesh is not None:
            shard_model(reference, self.replica.mesh)
        self.gradients = Gradients(self.state, device, reference, self.replica, on_progress)
        self._checkpointer: Checkpointer | None = None
        self._progress = on_progress
        self._initial = True
        self._mesh: ProcessMesh | None = None
        self._epoch = 0
        self._scratch: Tensor | None = None
        self._norm = 0.0
        self._digest: tuple[int, str] = (-1, "")

    def attach(self, run_dir: Path) -> None:
        """Where checkpoints go; known once the controller has answered."""
        self._tell("attach", run_dir=str(run_dir))
        self._attach(str(run_dir))

    @property
    def checkpointer(self) -> Checkpointer:
        if self._checkpointer is None:
            raise RuntimeError("the trainer is attached to no run directory")
        return self._checkpointer

    # -- mesh ---------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Of this replica in the mesh it has formed; -1 without one."""
        return -1 if self._mesh is None else self._mesh.rank

    def form(
        self, epoch: EpochMesh, cancelled: Callable[[], bool], timeout_s: float = 60.0
    ) -> None:
        """Meets the other members. Raises EpochCancelled or MeshError; there is no mesh then."""
        self._tell("form", epoch=_plain(epoch), timeout_s=timeout_s)

        def over() -> bool:
            if cancelled():
                self.replica.end_epoch(epoch.number)
                return True
            return False

        self._form(epoch, over, timeout_s)

    def abandon(self) -> None:
        """Leaves the mesh, if any. Local gradients stay. Idempotent, never blocks on peers."""
        if self._mesh is None:
            return
        self.replica.end_epoch(self._epoch)
        self._tell("abandon")
        self._abandon()

    # -- state --------------------------------------------------------------------------------

    def restore(self, path: str, step: int, version: int) -> None:
        """Loads a checkpoint, or with an empty path the initial model, as ``version`` after ``step``.

        Raises CheckpointError or ModelError; the state is unusable then.
        """
        self._tell("restore", path=path, step=step, version=version)
        self._restore(path, step, version)

    def seed(self, peers: Sequence[int]) -> None:
        """Sends the whole state to mesh ranks ``peers``. Raises EpochCancelled or MeshError."""
        self._tell("seed", peers=list(peers))
        self._seed(list(peers))

    def receive(self, source: int) -> None:
        """Takes over the whole state of mesh rank ``source``, bit for bit.

        Raises EpochCancelled or MeshError; the state is void then (version -1).
        """
        self._tell("receive", source=source)
        self._receive(source)

    def digest(self) -> str:
        """Of the weights, equal on replicas whose weights are equal bit for bit."""
        if self._digest[0] != self.state.version:
            self._tell("digest")
            self._digest = (self.state.version, self._local_digest())
        return self._digest[1]

    # -- step ---------------------------------------------------------------------------------

    def begin(self, facts: StepSpec, shard: Sequence[GroupKey]) -> list[GroupKey]:
        """Opens or continues a step; returns the groups of ``shard`` that are still to be added."""
        self._tell("begin", facts=facts.json(), shard=[list(key) for key in shard])
        return self.gradients.begin(facts, shard)

    def add(self, groups: Sequence[rollout_pb2.Group]) -> None:
        """Adds the gradients of ``groups`` to the local ones.

        Raises BadGroup on a payload that contradicts itself; no rank has added anything then.
        """
        if not groups:
            return
        self._tell("add")
        if self.replica.size > 1:
            packed = rollout_pb2.SubmitRequest(groups=groups)
            self.replica.broadcast_bytes(packed.SerializeToString())
        self.gradients.add(groups)

    def reduce(self) -> Stats:
        """Sums the gradients of all members into a scratch buffer, for commit().

        Local gradients are untouched. Returns this replica's stats of the step, grad_norm (before
        clipping) and lr included. Raises EpochCancelled or MeshError.
        """
        self._tell("reduce")
        self._reduce()
        stats = Stats(self.gradients.stats.entries)
        others = self.replica.gather(stats.entries)[1:]
        stats.merge({n: (t, w, m) for n, (t, w, m) in other.items()} for other in others)
        # Stats are finite numbers; a norm that is not shows as 0, and the commit logs it.
        stats.set("grad_norm", self._norm if math.isfinite(self._norm) else 0.0)
        stats.set("lr", learning_rate(self.state.step + 1, self._config.train))
        return stats

    def commit(self, version: int) -> None:
        """Applies the reduced gradients: the state is now ``version``, one step further."""
        self._tell("commit", version=version)
        self._commit(version)

    # -- out ----------------------------------------------------------------------------------

    def save(self) -> Future[CheckpointInfo]:
        """Copies the state and writes it in the background; see Checkpointer.save_async."""
        self._tell("save")
        return self.checkpointer.save_async(self.state)

    def whole_weights(self) -> Iterable[tuple[str, Tensor]]:
        """Full weights by Hugging Face name; to be exhausted before any other verb is called."""
        self._tell("gather")
        return gathered_weights(self.state)

    def close(self) -> None:
        """Ends the mesh, the checkpoints under way (waits for them) and the followers."""
        self.abandon()
        if self._checkpointer is not None:
            self._checkpointer.close()
        self.replica.close()

    # -- followers ----------------------------------------------------------------------------

    def obey(self) -> None:
        """Ranks above 0: do what rank 0 does until it says stop."""
        over: Callable[[], bool]
        while True:
            command = self.replica.next_command()
            op = command.pop("op")
            if op == "stop":
                break
            try:
                if op == "form":
                    epoch = EpochMesh(**command["epoch"])
                    over = _epoch_over(self.replica, epoch.number)
                    self._form(epoch, over, command["timeout_s"])
                elif op == "begin":
                    shard = [(task, attempt) for task, attempt in command["shard"]]
                    self.gradients.begin(StepSpec.from_json(command["facts"]), shard)
                elif op == "add":
                    packed = self.replica.broadcast_bytes(None)
                    self.gradients.add(rollout_pb2.SubmitRequest.FromString(packed).groups)
                elif op == "reduce":
                    self._reduce()
                    self.replica.gather(self.gradients.stats.entries)
                else:
                    self._verbs[op](**command)
            except (EpochCancelled, MeshError, BadGroup):
                # Rank 0 knows: it raises the same, and says what comes next.
                continue
        self._abandon()
        if self._checkpointer is not None:
            self._checkpointer.close()

    @property
    def _verbs(self) -> dict[str, Callable[..., Any]]:
        return {
            "attach": self._attach,
            "abandon": self._abandon,
            "restore": self._restore,
            "seed": self._seed,
            "receive": self._receive,
            "digest": self._local_digest,
            "commit": self._commit,
            "save": lambda: self.checkpointer.save_async(self.state),
            "gather": lambda: [None for _ in gathered_weights(self.state)],
        }

    def _tell(self, op: str, **arguments: Any) -> None:
        if self.replica.size > 1 and self.replica.leads:
            self.replica.command({"op": op, **arguments})

    def _together(self, work: Callable[[], None]) -> None:
        """Runs ``work`` on the mesh; what fails on one rank of the replica fails on all."""
        failure: Exception | None = None
        try:
            work()
        except (EpochCancelled, MeshError) as error:
            failure = error
            # Ranks that are still waiting for their peers need not wait for the controller's word.
            self.replica.end_epoch(self._epoch)
        if self.replica.agree(failure is None):
            return
        self._abandon()
        raise failure or MeshError("another rank of this replica failed")

    # -- what each rank does --------------------------------------------------------------------

    def _attach(self, run_dir: str) -> None:
        self._checkpointer = Checkpointer(Path(run_dir), self._config, self.replica)

    def _form(self, epoch: EpochMesh, over: Callable[[], bool], timeout_s: float) -> None:
        self._abandon()
        self._epoch = epoch.number

        def meet() -> None:
            self._mesh = ProcessMesh.form(
                url=epoch.url,
                key=f"paceline:{epoch.run_id}:rdv:mesh:{epoch.number}:{self.replica.rank}",
                rank=epoch.rank,
                size=epoch.size,
                device=self.device,
                cancelled=over,
                timeout_s=timeout_s,
                host=epoch.host,
            )

        self._together(meet)

    def _abandon(self) -> None:
        mesh, self._mesh = self._mesh, None
        if mesh is not None:
            mesh.abandon()

    def _restore(self, path: str, step: int, version: int) -> None:
        self.gradients.clear()
        self._digest = (-1, "")
        self.state.version = -1
        if path:
            self.checkpointer.restore(self.state, path, version=version)
        elif not self._initial:
            self._reload()
        self.state.step, self.state.version = step, version
        self._initial = False

    @torch.no_grad()
    def _reload(self) -> None:
        """Back to model.path and zero moments, in place."""
        fresh = load_sharded_state(self._config, self.replica, self.device)
        sources = list(state_tensors(fresh))
        for target, source in zip(state_tensors(self.state), sources, strict=True):
            target.copy_(source)

    def _seed(self, peers: list[int]) -> None:
        self._together(lambda: send_state(self._need_mesh(), self.state, peers, self._progress))

    def _receive(self, source: int) -> None:
        self.gradients.clear()
        self._digest = (-1, "")
        self._initial = False
        self._together(lambda: receive_state(self._need_mesh(), self.state, source, self._progress))

    def _local_digest(self) -> str:
        mine = weights_digest(local_weights(self.state))
        parts = self.replica.gather(mine)
        return mine if len(parts) == 1 else hashlib.sha256("".join(parts).encode()).hexdigest()

    def _reduce(self) -> None:
        if self._scratch is None:
            self._scratch = torch.zeros(
                self.gradients.size, dtype=torch.float32, device=self.device
            )
        scratch = self._scratch
        self.gradients.flatten(scratch)

        def reduce() -> None:
            mesh = self._need_mesh()
            try:
                running: list[Handle] = [
                    mesh.all_reduce_async(bucket) for bucket in scratch.split(BUCKET)
                ]
                for handle in running:
                    mesh.wait(handle)
                    self._progress()
            except (EpochCancelled, MeshError):
                if not mesh.settled:
                    # Something may write to it still, in the middle of the next reduction.
                    self._scratch = None
                raise

        self._together(reduce)
        self._norm = float(squared_norm([scratch], self.replica).sqrt())

    def _commit(self, version: int) -> None:
        if self._scratch is None:
            raise RuntimeError("nothing was reduced")
        apply_update(self.state, self.gradients, self._scratch, self._norm, version)
        self._initial = False

    def _need_mesh(self) -> ProcessMesh:
        if self._mesh is None:
            raise EpochCancelled("no mesh")
        return self._mesh


def _epoch_over(replica: RankGroup, epoch: int) -> Callable[[], bool]:
    return lambda: replica.epoch_over(epoch)


def _plain(epoch: EpochMesh) -> dict[str, Any]:
    return {name: getattr(epoch, name) for name in EpochMesh.__slots__}
