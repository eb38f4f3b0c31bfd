"""Lies of a worker that has a token: what it says, under its own name, of leases, groups, steps and
epochs that are not its own, and of its own ones once they are over.

None of it may change anything. Where an owner check is missing, the liar is told that its word
counts, or the oracle finds its word in the journal.
"""

import contextlib
from collections.abc import Callable
from random import Random
from typing import Any

from controller.services import policy, rollout, worker
from paceline.v1 import common_pb2, policy_pb2, rollout_pb2, worker_pb2
from testbed.simulator.cluster import Cluster
from testbed.simulator.oracles.ledger import Violation
from testbed.simulator.worker import Client, Fenced

SHARE = 0.4  # Of the runs have a liar
Told = tuple[Callable[..., Any], Any] | None  # Service and request; None: nothing to lie about now


class Liar(Client):
    """Lies under the names of living workers, whose own processes tell the truth."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        super().__init__(cluster, "liar")
        self.lot = Random(f"liar {seed}")

    def plan(self, until: float) -> None:
        """Draws when it lies. A run without a liar stays as it is."""
        if self.lot.random() < SHARE:
            for _ in range(self.lot.choice([5, 20, 40])):
                self.timeline.after(self.lot.uniform(1.0, until), self._lie)

    def _lie(self) -> None:
        living = list(self.cluster.oracle.living.items())
        if living and not self.cluster.oracle.finished:
            caller = common_pb2.Caller()
            caller.worker_id, caller.incarnation = self.lot.choice(living)
            told = self.lot.choice(_LIES)(self, caller)
            if told is not None:
                self.spawn(self._tell(*told))

    async def _tell(self, handler: Callable[..., Any], request: Any) -> None:
        reply = None
        # Refused, or its name has died meanwhile. It says it once: later it may have become true.
        with contextlib.suppress(Fenced, AssertionError):
            reply = await self.call(handler, request, patience_s=0.0)
        self.cluster.oracle.counts["lies"] += 1
        for result in getattr(reply, "results", ()):
            if result.verdict == rollout_pb2.VERDICT_ACCEPTED:
                raise Violation(f"a lie was accepted: {request}")
        if getattr(reply, "left", 0) or getattr(reply, "stands", False):
            raise Violation(f"a lie had an effect: {request}")

    # ---- leases ---------------------------------------------------------------------------

    def _of_another(self, caller: common_pb2.Caller) -> common_pb2.TaskRef | None:
        leases = self.cluster.oracle.leases.items()
        theirs = [(t, a) for t, (a, owner, _) in leases if owner != caller.worker_id]
        return self._ref(theirs)

    def _over(self, caller: common_pb2.Caller) -> common_pb2.TaskRef | None:
        """A try that was given up, or whose group was accepted."""
        oracle = self.cluster.oracle
        tries = [(t, n) for t, tries in oracle.attempts.items() for n in range(1, tries + 1)]
        return self._ref([(t, n) for t, n in tries if oracle.leases.get(t, (0,))[0] != n])

    def _ref(self, refs: list[tuple[str, int]]) -> common_pb2.TaskRef | None:
        if not refs:
            return None
        task_id, attempt = self.lot.choice(refs)
        return common_pb2.TaskRef(task_id=task_id, attempt=attempt)

    def submits_anothers(self, caller: common_pb2.Caller) -> Told:
        return self._submits(caller, self._of_another(caller))

    def submits_again(self, caller: common_pb2.Caller) -> Told:
        return self._submits(caller, self._over(caller))

    def _submits(self, caller: common_pb2.Caller, ref: common_pb2.TaskRef | None) -> Told:
        if ref is None:
            return None
        train, oracle = ref.task_id[0] == "t", self.cluster.oracle
        count = self.cluster.shape.spec.group_size if train else 1
        version = max(oracle.versions)
        group = rollout_pb2.GroupMeta(
            task=ref,
            kind=rollout_pb2.TASK_KIND_TRAIN if train else rollout_pb2.TASK_KIND_EVAL,
            digest="0" * 32 if train else "",
            prompt_tokens=8,
            min_version=version,
            max_version=version,
            token_versions=[common_pb2.VersionSpan(version=version, length=10 * count)],
            lengths=[10] * count,
            rewards=[float(n % 2) for n in range(count)],
        )
        group.sequence_versions.add(versions=[version], sequences=count)
        request = rollout_pb2.SubmitRequest(caller=caller, groups=[group])
        return rollout.submit_groups, request

    def returns_anothers(self, caller: common_pb2.Caller) -> Told:
        if (ref := self._of_another(caller)) is None:
            return None
        kind = self.lot.choice(rollout_pb2.ReturnKind.values()[1:])
        task = rollout_pb2.ReturnedTask(task=ref, kind=kind, reason="lie")
        return rollout.return_tasks, rollout_pb2.ReturnRequest(caller=caller, tasks=[task])

    # ---- steps ----------------------------------------------------------------------------

    def votes_as_a_stranger(self, caller: common_pb2.Caller) -> Told:
        oracle = self.cluster.oracle
        if oracle.open is None or caller.worker_id in oracle.members:
            return None
        request = policy_pb2.VoteRequest(
            caller=caller,
            step=oracle.open.step,
            mesh_epoch=oracle.epochs["mesh"],
            weights_digest=oracle.states.get(oracle.open.version, "lie"),
        )
        return policy.vote, request

    def _in_anothers_shard(self, caller: common_pb2.Caller) -> list[str]:
        oracle = self.cluster.oracle
        shards = oracle.shards.items() if oracle.open is not None else ()
        theirs = [i for name, shard in shards for i in shard if name != caller.worker_id]
        return [oracle.open.groups[i] for i in theirs] if oracle.open is not None else []

    def rejects_anothers(self, caller: common_pb2.Caller) -> Told:
        oracle, groups = self.cluster.oracle, self._in_anothers_shard(caller)
        if not groups or oracle.open is None:
            return None
        task_id = self.lot.choice(groups)
        ref = common_pb2.TaskRef(task_id=task_id, attempt=oracle.attempts[task_id])
        request = policy_pb2.RejectRequest(
            caller=caller,
            step=oracle.open.step,
            groups=[ref],
            fault=policy_pb2.GROUP_FAULT_PAYLOAD_INVALID,
        )
        return policy.reject_groups, request

    def tries_anothers(self, caller: common_pb2.Caller) -> Told:
        oracle, groups = self.cluster.oracle, self._in_anothers_shard(caller)
        if not groups or oracle.open is None:
            return None
        request = policy_pb2.TryRequest(
            caller=caller,
            step=oracle.open.step,
            mesh_epoch=oracle.epochs["mesh"],
            task_id=self.lot.choice(groups),
        )
        return policy.try_group, request

    def saves_what_it_never_had(self, caller: common_pb2.Caller) -> Told:
        oracle = self.cluster.oracle
        if not oracle.line or not caller.worker_id.startswith("rollout"):
            return None
        request = policy_pb2.CheckpointRequest(
            caller=caller,
            step=len(oracle.line),
            version=max(oracle.versions),
            path=f"lie/checkpoints/step-{len(oracle.line)}",
            weights_digest="lie",
        )
        return policy.record_checkpoint, request

    def breaks_an_epoch_of_others(self, caller: common_pb2.Caller) -> Told:
        oracle = self.cluster.oracle
        if caller.worker_id in oracle.members or not oracle.epochs["mesh"]:
            return None
        request = worker_pb2.PeerError(caller=caller, epoch=oracle.epochs["mesh"], detail="lie")
        return worker.report_peer_error, request


_LIES = (
    Liar.submits_anothers,
    Liar.submits_again,
    Liar.returns_anothers,
    Liar.votes_as_a_stranger,
    Liar.rejects_anothers,
    Liar.tries_anothers,
    Liar.saves_what_it_never_had,
    Liar.breaks_an_epoch_of_others,
)
