"""Oracle of a simulated run: its promises, checked on the journal without the ledger's code.

It sees every entry as it lands, keeps its own books of leases, votes and steps, and beside them a
checked ledger that applies the same events. What a client was told is compared with what it was
told before.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from controller.ledger import Ledger
from controller.ledger import events as ev
from controller.ledger.codec import encode
from controller.ledger.enums import DropReason, GroupFault, Kind
from controller.ledger.specs import (
    EvalSet,
    GroupMeta,
    LeasedTask,
    LiveSpec,
    RunSpec,
    SetResult,
    values,
)
from controller.ledger.state.evals import MIXED
from controller.ledger.state.tasks import SUSPECT_DEATHS
from controller.store.ledger_follower import LedgerFollower, coverage_of
from paceline.evaluation import RowScore
from paceline.observe.coverage import count
from paceline.observe.projection import Totals
from paceline.payloads.store import Ref
from paceline.v1 import policy_pb2, rollout_pb2
from testbed.simulator.gradient_mesh import Weights
from testbed.simulator.memory_store import Landed
from testbed.simulator.oracles.ages import (
    Ages,
    ages_of,
    bound_of,
    may_be_trained,
    split,
    trained_sequences,
    wrong_drop,
)
from testbed.simulator.oracles.seats import SeatOracle


class Violation(Exception):
    """A promise was broken."""


def next_state(before: str, groups: frozenset[str], lr: float) -> str:
    """The model of an optimizer step: weights after training ``groups`` from ``before`` at
    ``lr``."""
    text = f"{before}|{','.join(sorted(groups))}|{lr!r}"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


class Oracle:
    def __init__(
        self,
        spec: RunSpec,
        entries: Sequence[Landed],
        *,
        guilty: Collection[str] = (),
        untrainable: Collection[str] = (),
        lost_payloads: Collection[Ref] = (),
        checked: bool = True,
    ) -> None:
        """``entries``: the journal as it stands. ``guilty``: tasks that kill their worker or fail.
        No other may be quarantined for deaths it was not alone with. ``untrainable``: tasks whose
        groups no trainer can train. No other may leave a step, unless it was alone with several
        deaths. ``lost_payloads``: what the store has lost so far; only a group of these is
        generated again.
        """
        self.spec = spec
        self.spec_at_start = spec
        self.spec_of: dict[int, RunSpec] = {}
        """Settings of each step when it was opened first: a change comes with the next one."""
        self.entries = entries
        self.guilty = guilty
        self.untrainable = untrainable
        self.lost_payloads = lost_payloads
        self.checked = checked
        self.ledger = Ledger(checked=checked)
        self.totals = Totals()
        self.seats = SeatOracle()
        self.term = 0
        self.opened_in: dict[int, int] = {}
        """The term that opened each step last."""
        self.versions: dict[int, int] = {0: 0}
        """Step that a version stands after."""
        self.states: dict[int, str] = {0: "initial"}
        """Right weights of every version; once corrupted, as the first replica had them."""
        self.by_step = ["initial"]
        self.agreed: dict[int, str] = {}
        """Weights of every version that the replicas have voted on, as most of them had them."""
        self.corrupted = False
        self._damaged = -1
        """A replica's memory was damaged on purpose, at this version: from then on weights need
        only be equal, not right."""
        self.line: list[tuple[str, ...]] = []
        """Compositions of the surviving steps."""
        self.lost: dict[int, tuple[str, ...]] = {}
        self.attempts: Counter[str] = Counter()
        """Leases of each task so far, in the order of the first."""
        self.cursor = 0
        """Number of the next training task."""
        self.leases: dict[str, tuple[int, str, int]] = {}
        """Attempt, worker and incarnation of each task that is leased."""
        self.accepted: dict[str, ev.GroupAccepted] = {}
        self.again: set[Ref] = set()
        """Accepted groups whose payload was lost: their tasks were leased again."""
        self.dropped: set[str] = set()
        self.reasons: dict[str, str] = {}
        """Reasons of every drop."""
        self.deaths: Counter[str] = Counter()
        """Owners of a task that died holding it and had not been told to leave."""
        self.isolated_deaths: Counter[str] = Counter()
        """Deaths of owners that held nothing else."""
        self.leaving: set[str] = set()
        self.spares: set[str] = set()
        self._buried: dict[str, bool] = {}
        """Tasks of the worker that is dying, and whether they are quarantined for it."""
        self.living: dict[str, int] = {}
        self.dead: set[int] = set()  # Incarnations
        self.members: dict[str, int] = {}
        self.votes: dict[str, str] = {}
        self.shards: dict[str, tuple[int, ...]] = {}
        self.trials: dict[str, str] = {}
        """Group that each member computes by itself."""
        self.scored: dict[int, list[tuple[str, int, RowScore]]] = {}
        """(set, version, score) of each row of the evaluations under way, by step."""
        self.rounds: dict[int, tuple[EvalSet, ...]] = {}
        """Sets of each evaluation, by step."""
        self.doubtful: dict[int, set[int]] = {}
        """By step of an evaluation under way: versions whose checkpoint was voided since it began.
        """
        self.trial_deaths: Counter[str] = Counter()
        """Members that died while they computed a group by itself."""
        self.open: ev.StepOpened | None = None
        self.epochs = {"mesh": 0, "link": 0}
        self.outvoted: set[tuple[int, str, int]] = set()
        """(version, replica, incarnation) whose weights were not those of most replicas."""
        self.links: dict[int, frozenset[tuple[int, str, int]]] = {}
        """Replicas that were known to be outvoted when a link was assigned, by its epoch."""
        self.finished: str = ""
        self.told: dict[Any, Any] = {}
        self._void_term = 0
        """Term: what leaders up to this term remember may be lost."""
        self.counts: Counter[str] = Counter()

    # ---- the journal ----------------------------------------------------------------------

    def landed(self, landed: Landed) -> None:
        self.counts["entries"] += 1
        term = landed.entry.term
        if term < self.term:
            raise Violation(f"term {term} wrote after term {self.term} had begun")
        self.term = term
        for event, raw in zip(landed.events, landed.entry.events, strict=True):
            self.counts["events"] += 1
            self.totals.take(landed.entry.t, raw)
            look = getattr(self, f"_on_{type(event).__name__}", None)
            if look is not None:
                look(event)
            if wrong := self.seats.take(event, self.open, self.members):
                raise Violation(wrong)
            self.ledger.apply(event)
        problems = self.ledger.check() if self.checked else []
        if problems:
            raise Violation("; ".join(problems))

    def _on_TermBegun(self, e: ev.TermBegun) -> None:
        if e.term != self.term or e.term <= self.ledger.state.term:
            raise Violation(f"term {e.term} began after term {self.ledger.state.term}")
        self.counts["terms"] += 1

    def _on_WorkerRegistered(self, e: ev.WorkerRegistered) -> None:
        if e.worker_id in self.living:
            raise Violation(f"two living incarnations of {e.worker_id}")
        self.living[e.worker_id] = e.incarnation
        self.leaving.discard(e.worker_id)
        self.spares.discard(e.worker_id)
        if e.spare:
            self.spares.add(e.worker_id)

    def _on_SpareSet(self, e: ev.SpareSet) -> None:
        if self.living.get(e.worker_id) != e.incarnation or not e.worker_id.startswith("rollout"):
            raise Violation(f"{e.worker_id} cannot stand by, or be put to work")
        if (e.worker_id in self.spares) == e.spare:
            raise Violation(f"{e.worker_id} is told what it is already: {e}")
        self.spares ^= {e.worker_id}
        self.counts["spares put to work"] += not e.spare

    def _on_WorkerDied(self, e: ev.WorkerDied) -> None:
        self.trial_deaths[self.trials.pop(e.worker_id, "")] += 1
        self.counts["deaths"] += 1
        self._gone(e.worker_id, e.incarnation)
        buried, self._buried = self._buried, {}
        for task_id, condemned in buried.items():
            if e.worker_id not in self.leaving:
                self.deaths[task_id] += 1
                self.isolated_deaths[task_id] += len(buried) == 1
            alone = self.isolated_deaths[task_id]
            # A group that had to be generated again was a failed attempt, too.
            failed = alone + sum(again == task_id for again, _ in self.again)
            if condemned and task_id not in self.guilty and failed < self.spec.max_attempts:
                raise Violation(f"innocent {task_id} is quarantined, {alone} died of it alone")

    def _on_WorkerChanged(self, e: ev.WorkerChanged) -> None:
        if e.lifecycle == "draining":
            self.leaving.add(e.worker_id)
        if e.lifecycle == "stopped":
            self._gone(e.worker_id, e.incarnation)

    def _on_Drained(self, e: ev.Drained) -> None:
        self.leaving.add(e.worker_id)

    def _gone(self, worker_id: str, incarnation: int) -> None:
        self.dead.add(incarnation)
        if self.living.pop(worker_id, None) != incarnation:
            raise Violation(f"{worker_id} died twice")
        if left := self._held_by(worker_id, incarnation):
            raise Violation(f"{left} died with their owner {worker_id}")

    def may_live(self, worker_id: str, incarnation: int) -> bool:
        """By the journal, which may have lost its registration. Who was declared dead
        stays so, even if that is lost, too."""
        there = self.seats.doubted or self.living.get(worker_id) == incarnation
        return there and incarnation not in self.dead

    def _held_by(self, worker_id: str, incarnation: int) -> list[str]:
        return [t for t, lease in self.leases.items() if lease[1:] == (worker_id, incarnation)]

    def _on_TasksLeased(self, e: ev.TasksLeased) -> None:
        if self.living.get(e.worker_id) != e.incarnation:
            raise Violation(f"{e.worker_id} leased after its death")
        if e.worker_id in self.spares:
            raise Violation(f"{e.worker_id} stands by and leased {e.leases}")
        for lease in e.leases:
            self._check_row(lease)
            task_id, before = lease.task_id, self.attempts[lease.task_id]
            if lease.attempt != before + 1:
                raise Violation(f"{task_id}/{lease.attempt} follows attempt {before}")
            if task_id in self.leases:
                raise Violation(f"{task_id} of {self.leases[task_id]} is leased to {e.worker_id}")
            if task_id in self.accepted or task_id in self.dropped:
                raise Violation(f"{task_id} leased after it was finished")
            self.attempts[task_id] = lease.attempt
            self.leases[task_id] = (lease.attempt, e.worker_id, e.incarnation)
        holds = self._held_by(e.worker_id, e.incarnation)
        suspects = [t for t in holds if self.deaths[t] >= SUSPECT_DEATHS]
        if suspects and len(holds) > 1:
            raise Violation(f"{suspects} leased to {e.worker_id} in company: {holds}")

    def _check_row(self, lease: LeasedTask) -> None:
        """A new task is the next one of the data order: the cursor runs ahead of nothing."""
        spec = self.spec
        if lease.kind is Kind.EVAL:
            of, index = self._eval_row(lease.task_id)
            if (lease.eval_set or "held_out", lease.index) != (of.name, index):
                raise Violation(f"{lease.task_id} is row {index} of {of.name}: {lease}")
            return
        if lease.task_id not in self.attempts:
            if lease.task_id != f"t{self.cursor}":
                raise Violation(f"{lease.task_id} is leased after {self.cursor} tasks")
            self.cursor += 1
        row = spec.order.place(int(lease.task_id[1:]))
        if (lease.dataset_pass, lease.index) != row:
            raise Violation(f"{lease.task_id} is leased with row {lease.index}, not {row}")

    def _end_lease(self, task_id: str, attempt: int, worker_id: str | None = None) -> None:
        held = self.leases.pop(task_id, None)
        if held is None or held[0] != attempt:
            raise Violation(f"{task_id}/{attempt} ended without being leased: {held}")
        if worker_id is not None and held[1:] != (worker_id, self.living.get(worker_id)):
            raise Violation(f"{task_id} of {held[1]} was finished by {worker_id}")

    def _on_GroupAccepted(self, e: ev.GroupAccepted) -> None:
        task_id = e.group.task_id
        if task_id in self.accepted:
            raise Violation(f"{task_id} accepted twice")
        self._end_lease(task_id, e.group.attempt, e.worker_id)
        self.accepted[task_id] = e

    def _eval_row(self, task_id: str) -> tuple[EvalSet, int]:
        """The set of an evaluation's row, and the row in it: the sets follow one another."""
        step, _, row = task_id[1:].partition(".")
        rows = [(each, index) for each in self.rounds[int(step)] for index in range(each.rows)]
        return rows[int(row)]

    def _on_EvalScheduled(self, e: ev.EvalScheduled) -> None:
        if e.rows != sum(each.rows for each in e.sets) or not e.sets:
            raise Violation(f"the sets of {e} do not have its rows")
        self.rounds[e.step] = e.sets
        self.doubtful[e.step] = set()

    def _on_EvalRecorded(self, e: ev.EvalRecorded) -> None:
        scored = self.scored.pop(e.step, [])
        doubtful = self.doubtful.pop(e.step)
        if e.loss is not None:
            # Of recorded data: measured whole, with the state after the step.
            if scored or e.version != self.ledger.state.versions.version_of(e.step):
                raise Violation(f"the held-out loss of step {e.step} is of another state: {e}")
            self.counts["evaluated"] += e.count
            return
        if self.spec.recorded:
            if e.step >= self.ledger.state.versions.step:
                raise Violation(f"the state after step {e.step} is there, and is not measured: {e}")
            return
        if e.score is not None and e.version in doubtful:
            raise Violation(f"the round of step {e.step} is scored with weights in doubt: {e}")
        if [result.name for result in e.sets] != [each.name for each in self.rounds[e.step]]:
            raise Violation(f"the round of step {e.step} has the sets {self.rounds[e.step]}: {e}")
        for of, result in zip(self.rounds[e.step], e.sets, strict=True):
            self._check_set(of, result, e, [(v, row) for n, v, row in scored if n == of.name])

    def _check_set(
        self, of: EvalSet, result: SetResult, e: ev.EvalRecorded, scored: list[tuple[int, RowScore]]
    ) -> None:
        """A set's metrics are of one version, the round's, and of most of its rows."""
        of_one = [row for version, row in scored if version == e.version]
        if (result.count, result.left_out) != (len(of_one), len(scored) - len(of_one)):
            raise Violation(f"{of.name} of step {e.step} has {scored}, and says {result}")
        if bool(result.metrics) != (2 * len(of_one) > of.rows):
            raise Violation(f"{of.name} of step {e.step} rests on few rows, or is missing: {e}")
        for name, total in self._sums(of, of_one).items() if result.metrics else ():
            if abs(result.metrics[name] * len(of_one) - total) > 1e-9:
                raise Violation(f"{name} of {of.name} mixes versions at step {e.step}: {e}")
        name, _, metric = e.metric.partition("/")
        if name == of.name and e.score != result.metrics.get(metric):
            raise Violation(f"the score of step {e.step} is not {e.metric}: {e}")
        self.counts["evaluated"] += result.count
        self.counts["evaluated with other versions"] += result.left_out

    @staticmethod
    def _sums(of: EvalSet, rows: list[RowScore]) -> dict[str, float]:
        """Sums of the rewards and of pass@k for the largest k, which is 1 if any sample is
        solved."""
        passed = sum(row.solved > 0 for row in rows)
        return {
            "reward": sum(row.reward_mean for row in rows),
            f"pass@{of.samples}": float(passed),
        }

    def _on_EvalTaskDone(self, e: ev.EvalTaskDone) -> None:
        step = int(e.task_id[1:].split(".")[0])
        if e.version in self.doubtful[step]:
            raise Violation(f"{e.task_id} counts with weights in doubt: {e}")
        of, _ = self._eval_row(e.task_id)
        if e.row.samples != of.samples:
            raise Violation(f"{e.task_id} of {of.name} has not {of.samples} samples: {e}")
        self.scored.setdefault(step, []).append((of.name, e.version, e.row))
        self._end_lease(e.task_id, e.attempt, e.worker_id)

    def _on_TaskReleased(self, e: ev.TaskReleased) -> None:
        self._end_lease(e.task_id, e.attempt, e.worker_id)
        if e.reason == "owner_died":
            self._buried[e.task_id] = False

    def _on_TaskDropped(self, e: ev.TaskDropped) -> None:
        if e.task_id in self.dropped:
            raise Violation(f"{e.task_id} dropped twice")
        self.dropped.add(e.task_id)
        self.reasons[e.task_id] = e.reason
        ages = self._ages(e.group, len(self.line) + (2 if self.open else 1)) if e.group else {}
        if problem := wrong_drop(e, ages, self.spec):
            raise Violation(problem)
        self.counts["expired"] += e.reason == "expired"
        if e.reason in set(GroupFault):
            self._left_step(e)
        if e.reason == "quarantined" and "owner_died" in e.detail.rpartition("; ")[2]:
            self._buried[e.task_id] = True
        if e.task_id in self.leases:
            self._end_lease(e.task_id, e.attempt)

    def _left_step(self, e: ev.TaskDropped) -> None:
        self.counts[e.reason] += 1
        needed = max(1, self.spec.max_attempts - 1)
        if e.reason == GroupFault.KILLED_TRAINERS:
            if self.trial_deaths[e.task_id] < needed:
                raise Violation(
                    f"{e.task_id} left its step, and was not alone with {needed} deaths"
                )
        elif e.task_id not in self.untrainable:
            raise Violation(f"{e.task_id} left its step without a fault: {e.reason}")

    def _on_GroupLost(self, e: ev.GroupLost) -> None:
        accepted = self.accepted.pop(e.task_id, None)
        if accepted is None or accepted.group.attempt != e.attempt:
            raise Violation(f"{e.task_id}/{e.attempt} is generated again, and was not accepted")
        lost = (e.task_id, e.attempt) in self.lost_payloads
        if e.task_id not in self.untrainable and not lost:
            raise Violation(f"{e.task_id} is generated again without a fault: {e.fault}")
        for step, groups in self.lost.items():
            self.lost[step] = tuple(t for t in groups if t != e.task_id)
        self.again.add((e.task_id, e.attempt))
        self.counts["generated again"] += 1

    def _on_GroupTried(self, e: ev.GroupTried) -> None:
        groups = self.open.groups if self.open is not None else ()
        if e.task_id and e.task_id not in [groups[i] for i in self.shards.get(e.worker_id, ())]:
            raise Violation(f"{e.worker_id} computes {e.task_id}, which is not in its shard")
        self.trials[e.worker_id] = e.task_id

    def _on_MeshFormed(self, e: ev.MeshFormed) -> None:
        self._rise("mesh", e.epoch)
        self.members = {m.worker_id: m.incarnation for m in e.members}
        for worker_id, incarnation in self.members.items():
            if self.living.get(worker_id) != incarnation:
                raise Violation(f"epoch {e.epoch} has the dead member {worker_id}")

    def _on_MeshBroken(self, e: ev.MeshBroken) -> None:
        if e.diverged and self.open is not None:
            believed = next(d for w, d in self.votes.items() if w not in e.diverged)
            self.agreed.setdefault(self.open.version, believed)
            self.outvoted |= {(self.open.version, w, self.members[w]) for w in e.diverged}

    def _on_CheckpointRecorded(self, e: ev.CheckpointRecorded) -> None:
        if e.worker_id not in self.living or not e.worker_id.startswith("policy"):
            raise Violation(f"{e.worker_id} has saved {e.path}, and had no state to save")

    def _on_CheckpointVoided(self, e: ev.CheckpointVoided) -> None:
        self.counts["voided checkpoints"] += 1
        for step, scored in self.scored.items():
            self.scored[step] = [(n, MIXED if v == e.version else v, row) for n, v, row in scored]
        for versions in self.doubtful.values():
            versions.add(e.version)

    def _on_LinkAssigned(self, e: ev.LinkAssigned) -> None:
        self._rise("link", e.generation)
        for name, incarnation in (
            (e.publisher, e.publisher_incarnation),
            (e.receiver, e.receiver_incarnation),
        ):
            if self.living.get(name) != incarnation:
                raise Violation(f"link {e.generation} has the dead end {name}")
        if e.publisher.startswith("policy") and e.publisher not in self.members:
            raise Violation(f"link {e.generation} is from {e.publisher}, which is no member")
        self.links[e.generation] = frozenset(self.outvoted)
        self.counts["relayed links"] += e.publisher.startswith("rollout")

    def receives(self, name: str, link: int, weights: Weights) -> None:
        """A rollout worker loads weights: none of a replica that was outvoted before it got this
        link."""
        if (weights.version, *weights.origin) in self.links.get(link, ()):
            raise Violation(f"{name} loads outvoted weights {weights.version} over link {link}")

    def _rise(self, what: str, epoch: int) -> None:
        if epoch <= self.epochs[what]:
            raise Violation(f"{what} epoch {epoch} after {self.epochs[what]}")
        self.epochs[what] = epoch

    def _on_StepOpened(self, e: ev.StepOpened) -> None:
        if e.step != len(self.line) + 1:
            raise Violation(f"step {e.step} opened after {len(self.line)} steps")
        again = tuple(t for t in self.lost.get(e.step, ()) if t not in self.dropped)
        if e.groups[: len(again)] != again:
            raise Violation(f"step {e.step} is repeated with other groups")
        used = {task_id for groups in self.line for task_id in groups}
        for task_id in e.groups:
            if task_id in used or task_id in self.dropped or task_id not in self.accepted:
                raise Violation(f"{task_id} is in step {e.step}, and used, dropped or not accepted")
        if not e.replay:
            kept = used.union(self.dropped, *self.lost.values())
            ready = [t for t in self.attempts if t in self.accepted and t not in kept]
            if list(e.groups) != ready[: len(e.groups)]:
                raise Violation(f"step {e.step} took {e.groups}, the oldest leases are {ready}")
            self.spec_of[e.step] = self.spec
        self.opened_in[e.step] = self.term
        self.open, self.votes, self.shards, self.trials = e, {}, dict(e.shards), {}

    def _on_StepResharded(self, e: ev.StepResharded) -> None:
        self.votes = {}
        for worker_id, before in self.shards.items():
            if worker_id in e.shards and not set(before) <= set(e.shards[worker_id]):
                raise Violation(f"groups that {worker_id} may have computed were dealt to another")
        self.shards, self.trials = dict(e.shards), {}

    def _on_SettingsChanged(self, e: ev.SettingsChanged) -> None:
        if e.spec.steps < len(self.line):
            raise Violation(f"{len(self.line)} steps are trained, {e.spec.steps} are wanted")
        self.spec = replace(self.spec, **values(LiveSpec, e.spec))
        self.counts["settings changed"] += bool(e.changes)

    def _on_RunExtended(self, e: ev.RunExtended) -> None:
        if not self.finished:
            raise Violation("a run that had not finished was extended")
        self.finished = ""
        self.dropped -= {t for t, reason in self.reasons.items() if reason == DropReason.RUN_ENDED}
        self.counts["extended"] += 1

    def _on_StepAborted(self, e: ev.StepAborted) -> None:
        if self.open is not None and self.open.step == e.step:
            if e.kept:
                self.lost[e.step] = self.open.groups
            self.open, self.trials = None, {}
        else:
            self.lost.pop(e.step, None)

    def _on_RunSuspended(self, e: ev.RunSuspended) -> None:
        self.counts["stops for now"] += 1
        # Whoever is there is asked to leave, and still is if the run goes on before it has left.
        self.leaving.update(self.living)
        if self.open is not None:
            raise Violation(f"the run stopped for now with step {self.open.step} open")

    def _on_VoteCast(self, e: ev.VoteCast) -> None:
        if self.members.get(e.worker_id) != e.incarnation:
            raise Violation(f"{e.worker_id} has voted for step {e.step}, and is no member")
        self.votes[e.worker_id] = e.digest

    def _on_StepCommitted(self, e: ev.StepCommitted) -> None:
        opened = self.open
        if opened is None or opened.step != e.step:
            raise Violation(f"step {e.step} committed without being open")
        if set(self.votes) != set(self.members):
            missing = sorted(set(self.members) - set(self.votes))
            raise Violation(f"step {e.step} committed without the votes of {missing}")
        if len(set(self.votes.values())) != 1:
            raise Violation(f"step {e.step} committed with differing weights")
        if e.version <= max(self.versions):
            raise Violation(f"version {e.version} after {max(self.versions)}")
        for task_id in opened.groups:
            group = self.accepted[task_id].group
            ages = self._ages(group, e.step)
            if not ages and not self._void_term:
                raise Violation(f"{task_id} was sampled with weights that never were")
            if ages and not may_be_trained(ages, self.spec_of.get(e.step, self.spec)):
                raise Violation(f"{task_id} was trained in step {e.step}, {ages} steps late")
        if doomed := set(opened.groups) & set(self.untrainable):
            raise Violation(f"{sorted(doomed)} cannot be trained and were, in step {e.step}")
        self.agreed.setdefault(opened.version, next(iter(self.votes.values())))
        self.line.append(opened.groups)
        self.lost.pop(e.step, None)
        self.versions[e.version] = e.step
        if not self.corrupted:
            state = next_state(
                self.states[opened.version],
                frozenset(opened.groups),
                opened.settings.lr,
            )
            self.states[e.version] = state
            self.by_step[e.step :] = [state]
        self.open = None
        self.counts["commits"] += 1

    def _ages(self, group: GroupMeta, step: int) -> Ages:
        return ages_of(group, step, self.versions)

    def planned(self, plan: policy_pb2.StepPlan) -> None:
        """A replica begins this plan, which is what the journal says: its totals count the tokens
        that are within the age, and it masks the others."""
        opened = self.open
        if opened is None or (opened.step, opened.version) != (plan.step, plan.version):
            return
        if plan.mesh_epoch < opened.mesh_epoch or plan.term != self.opened_in[plan.step]:
            return  # it comes late: a group has left the step since, or the opening was lost
        groups = [self._ages(self.accepted[t].group, plan.step) for t in opened.groups]
        if not all(groups):
            return
        spec = self.spec_of[plan.step]
        tokens, masked = split(groups, spec)
        self.counts["masked"] += masked
        oldest = max(0, plan.step - 1 - bound_of(spec))
        if (plan.total_tokens, plan.oldest_step) != (tokens, oldest):
            raise Violation(f"step {plan.step} counts {plan.total_tokens} tokens, not {tokens}")
        members = [self.accepted[t].group for t in opened.groups]
        sequences = sum(trained_sequences(g, plan.step, self.versions, spec) for g in members)
        if plan.total_sequences != sequences:
            counted = f"{plan.total_sequences} sequences, not {sequences}"
            raise Violation(f"step {plan.step} counts {counted}")
        samples = sum(g.samples for g in members)
        rewards = sum(g.reward_mean * g.samples for g in members)
        if plan.total_samples != samples or abs(plan.reward_sum - rewards) > 1e-6:
            counted = f"{plan.total_samples} samples with {plan.reward_sum}, not {samples}"
            raise Violation(f"step {plan.step} counts {counted} with {rewards}")

    def _on_RolledBack(self, e: ev.RolledBack) -> None:
        if e.version <= max(self.versions) or e.step > len(self.line):
            raise Violation(f"rolled back to version {e.version} of step {e.step}")
        for step in range(e.step, len(self.line)):
            self.lost[step + 1] = self.line[step]
        del self.line[e.step :]
        self.versions[e.version] = e.step
        if not self.corrupted:
            self.states[e.version] = self.by_step[e.step]
        self.counts["rollbacks"] += 1

    def _on_RunFinished(self, e: ev.RunFinished) -> None:
        self.finished = e.reason
        if e.reason == "completed" and len(self.line) != self.spec.steps:
            raise Violation(f"completed with {len(self.line)} steps of {self.spec.steps}")

    # ---- what clients see -----------------------------------------------------------------

    def replied(self, term: int, request: Any, reply: Any) -> None:
        """The leader of ``term`` replies: a repeated request must not learn anything else than
        before."""
        if term <= self._void_term:
            return
        caller = getattr(request, "caller", None)
        who = (caller.worker_id, caller.incarnation) if caller is not None else ()
        if isinstance(request, rollout_pb2.LeaseRequest):
            if reply.leases:
                leases = [(x.task.task_id, x.task.attempt, x.seed) for x in reply.leases]
                self._same(("lease", *who, request.lease_seq), leases)
        elif isinstance(request, rollout_pb2.SubmitRequest):
            for result in reply.results:
                # A deposed leader may say "accepted" of what it made durable, after its successor
                # has said "duplicate": one acceptance, told late.
                duplicate = result.verdict == rollout_pb2.VERDICT_DUPLICATE
                verdict = rollout_pb2.VERDICT_ACCEPTED if duplicate else result.verdict
                task = result.task
                if (task.task_id, task.attempt) in self.again:
                    continue  # superseded now: the task waits for another attempt
                if self._void_term and verdict != rollout_pb2.VERDICT_ACCEPTED:
                    continue  # of a task whose id was lost, and is given again
                self._same(("group", *who, task.task_id, task.attempt), verdict)
        elif (
            isinstance(request, policy_pb2.VoteRequest)
            and reply.outcome != policy_pb2.OUTCOME_PENDING
            # Epochs of a lost tail are counted again.
            and not (self._void_term and reply.outcome == policy_pb2.OUTCOME_RETRY)
        ):
            if request.term != self.opened_in[request.step] and (
                reply.outcome == policy_pb2.OUTCOME_COMMITTED
            ):
                raise Violation(f"{who} has committed groups that step {request.step} lost")
            ballot = (request.step, request.mesh_epoch)
            self._same(("vote", *who, *ballot), (reply.outcome, reply.version))

    def _same(self, key: Any, value: Any) -> None:
        before = self.told.setdefault(key, value)
        if before != value:
            raise Violation(f"{key} was told {before}, and later {value}")

    def saved(self, number: int, state: str, observed: Mapping[str, Any]) -> None:
        """A snapshot is the leader's memory at an entry: it must be what the journal says."""
        if number != len(self.entries):
            return
        if state != self.ledger.fingerprint():
            raise Violation(f"the snapshot at entry {number} differs from the journal")
        counted = json.loads(json.dumps(encode(self.totals)))
        if any(observed[name] != counted[name] for name in ("coverage", "faults")):
            raise Violation(f"the totals at entry {number} differ from the journal's")

    def check_replica(self, name: str, replica: LedgerFollower) -> None:
        """Copy of a controller that is about to lead."""
        if not self.entries or replica.at.batch != self.entries[-1].entry.at.batch:
            return
        if replica.ledger.fingerprint() != self.ledger.fingerprint():
            raise Violation(f"{name}: the replayed state differs from the journal's")

    def tail_lost(self) -> None:
        """The journal has lost its end, and with it every promise that rested on it: the books are
        made anew from what is left. Weights of lost commits may be about, as after a damage."""
        told_until = max(self.versions) + 1
        anew = Oracle(
            self.spec_at_start,
            self.entries,
            guilty=self.guilty,
            untrainable=self.untrainable,
            lost_payloads=self.lost_payloads,
            checked=False,
        )
        anew.corrupted, anew.dead = True, anew.dead | self.dead
        anew._void_term = max(self.term, self._void_term)
        for landed in self.entries:
            anew.landed(landed)
        anew.checked = anew.ledger.checked = self.checked
        anew._damaged = max(told_until, self._damaged)
        anew.counts = self.counts + Counter(["lost tails"])
        self.__dict__.update(anew.__dict__)

    def corrupt(self) -> None:
        """Noticed at the replica's next vote: it may have cast one and be about to apply it."""
        self.corrupted = True
        self._damaged = max(self.versions) + 1

    def holds(self, worker_id: str, version: int, state: str) -> None:
        """A replica says what its weights of ``version`` are."""
        if version <= self._damaged:
            return
        before = self.states.setdefault(version, state)
        if before != state:
            raise Violation(f"{worker_id} has other weights of version {version}")

    def restored(self, path: str, version: int, state: str) -> None:
        """A replica restores a checkpoint: not one of a replica that was outvoted. The model's own
        files are nobody's."""
        if path and self.agreed.get(version, state) != state:
            raise Violation(f"{path} was restored, and its writer's weights had diverged")

    def may_train(self, worker_id: str, incarnation: int, plan: policy_pb2.StepPlan) -> bool:
        """True if the plan still is what the journal says."""
        step, mesh = self.ledger.state.steps.open, self.ledger.state.fleet.mesh
        return (
            step is not None
            and (step.step, step.version) == (plan.step, plan.version)
            and mesh is not None
            and mesh.rank(worker_id, incarnation) >= 0
        )

    def at_end(self) -> None:
        """The run is over: nothing lost, nothing left behind."""
        counts = self.ledger.state.tasks
        trained = {task_id for groups in self.line for task_id in groups}
        train_leases = {t for t in self.attempts if t.startswith("t")}
        lost = train_leases - trained - self.dropped
        if lost or len(train_leases) != counts.cursor:
            raise Violation(f"lost: {sorted(lost)}, dispatched {counts.cursor}")
        if trained & self.dropped:
            raise Violation(f"trained and dropped: {sorted(trained & self.dropped)}")
        self._check_coverage(trained)

    def _check_coverage(self, trained: set[str]) -> None:
        """Every row that the cursor has passed was trained once or dropped, by these books and by
        the ledger's own report, which must agree."""
        rows: Counter[tuple[int, int]] = Counter()
        spec = self.spec
        for task_id in [t for groups in self.line for t in groups] + sorted(self.dropped):
            if task_id.startswith("t"):
                ordinal = int(task_id[1:])
                rows[spec.order.place(ordinal)] += 1
        cursor = self.ledger.state.tasks.cursor
        behind = {spec.order.place(ordinal) for ordinal in range(cursor)}
        if skipped := behind - rows.keys():
            raise Violation(f"rows were skipped: {sorted(skipped)}")
        if twice := [row for row, many in rows.items() if many > 1]:
            raise Violation(f"rows were finished twice: {sorted(twice)}")
        report = coverage_of(self.totals, self.ledger.state)
        if problems := list(report.problems()):
            raise Violation("; ".join(problems))
        coverage = self.totals.coverage
        if (count(coverage.trained), coverage.count()) != (len(trained), rows.total()):
            raise Violation(
                f"{len(trained)} groups of {rows.total()} rows are trained, by these books "
                f"{count(coverage.trained)} of {coverage.count()}"
            )
        self.counts["rows"] += len(rows)
