"""Row shares: the rows of some groups that each rank of a replica computes, and the groups that it
reads for them.

    lengths ─► rows ─► dealt to ranks ─► each reads and checks its groups ─► all tell all
                ▲                                                                      │
                └───── without the sequences whose gradient is zero, if there are any ◄┘

- No rank hands a payload to another one. A group is read by every rank that has a row of it; rows
  of a group go to as few ranks as that costs no round.
- Taking is collective, and its outcome is the same on all ranks: what one of them finds wrong, all
  raise.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.config.schema import Config
from paceline.mesh.elastic_mesh import EpochCancelled
from paceline.payloads.store import Payloads
from paceline.process.structured_log import first_line
from paceline.v1 import rollout_pb2
from policy_worker.objectives.batch import (
    BadGroup,
    GroupKey,
    GroupLengths,
    Ints,
    StepTotals,
    TokenBatch,
    key_of,
)
from policy_worker.objectives.columns import TokenColumns, trained_by_sequence
from policy_worker.objectives.objective import Objective
from policy_worker.rows.group_reading import (
    AcceptedGroup,
    ModelLimits,
    planned_lengths,
    read_batch,
    read_groups,
)
from policy_worker.rows.packing import attended_tokens, forest_of, plan_rows
from policy_worker.rows.replica import Replica

Fetch = Callable[[Sequence[GroupKey]], Payloads | None]
"""Payloads of these groups, None for a lost one; or None, if the epoch ended meanwhile."""


@dataclass(frozen=True, slots=True)
class RowShard:
    """One rank's part of some groups."""

    keys: tuple[GroupKey, ...]
    groups: Sequence[rollout_pb2.Group]
    batch: TokenBatch
    columns: TokenColumns[np.ndarray]
    rows: Sequence[Ints]
    rounds: int
    filler: Ints
    """Computed without counting in rounds without a row: forwards are collective."""
    trained: int
    owned: Sequence[rollout_pb2.Group] = ()
    """Groups that this rank counts, each of one rank."""

    def in_words(self, row: Ints, error: Exception) -> tuple[tuple[GroupKey, ...], str]:
        """The groups of ``row``, which did not fit into memory, and why."""
        groups = np.unique(self.batch.group_of[row])
        tokens = forest_of(self.batch, row, last_tokens=True)[1].total
        size = f"a row of {len(row)} sequences with {tokens} tokens, prompts included"
        return tuple(key_of(self.groups[g]) for g in groups), f"{size}: {first_line(error)}"


@dataclass(eq=False)
class RowShards:
    """Shares of one rank of ``replica``."""

    objective: Objective
    config: Config
    replica: Replica

    def take(
        self,
        accepted: Sequence[AcceptedGroup],
        totals: StepTotals,
        limits: ModelLimits,
        fetch: Fetch,
    ) -> RowShard:
        """Collective, with the same groups on all ranks. Reads and checks what this rank's rows
        need, in rounds that all ranks enter in the same order:

        1. Every rank plans all rows, from lengths alone, reads the groups of its own, and tells the
           others what it has found.
        2. If sequences contribute nothing, every rank plans the rows without them: the same rows,
           because all have been told the same.
        3. If a rank lacks a group then, all enter another round of reading and telling.

        Raises BadGroup with the groups that any rank found lost, or else with those that any found
        invalid; EpochCancelled if a ``fetch`` ended early; and what this rank's ``fetch`` raises.
        """
        held = _Held(accepted, self.objective, totals, limits)
        # One rank reads all groups in any case, and plans when it knows what contributes.
        lengths = planned_lengths(accepted) if self.replica.size > 1 else None
        if lengths is None:
            wanted = [list(range(len(accepted)))] * self.replica.size
        else:
            dealt = self._deal(lengths, np.arange(len(lengths.length)))
            wanted = wanted_groups(dealt, lengths.group_of)
        here = self.replica.rank
        # Groups that no rank before it has: their sequences are counted once.
        owned = set(wanted[here]).difference(*wanted[:here])
        reports = self._read_and_tell(held, wanted[here], owned, fetch)
        trained = sum(report["trained"] for report in reports)
        without = {s for report in reports for s in report["without"]}
        if lengths is None or without:
            lengths = lengths or held.batch
            keep = np.setdiff1d(np.arange(len(lengths.length)), np.array([*without], np.int64))
            dealt = self._deal(lengths, keep, wanted)
            more = wanted_groups(dealt, lengths.group_of)
            if any(set(m) - set(w) for m, w in zip(more, wanted, strict=True)):
                self._read_and_tell(held, more[here], (), fetch)
        return self._share(held, dealt, trained, owned)

    def of(
        self, groups: Sequence[rollout_pb2.Group], totals: StepTotals, limits: ModelLimits
    ) -> RowShard:
        """The share of groups that every rank has. Raises BadGroup if one contradicts itself."""
        keys = [AcceptedGroup(key_of(group)) for group in groups]
        held = _Held(keys, self.objective, totals, limits)
        held.add(dict(enumerate(groups)))
        keep = np.setdiff1d(np.arange(len(held.batch.length)), np.array(held.without, np.int64))
        dealt = self._deal(held.batch, keep)
        owned = range(len(groups)) if self.replica.leads else ()
        return self._share(held, dealt, held.trained(range(len(groups))), owned)

    def _deal(
        self, lengths: GroupLengths, keep: Ints, held: Sequence[Collection[int]] = ()
    ) -> list[list[Ints]]:
        limit, ranks = self.config.train.memory.row_tokens, self.replica.size
        if ranks > 1:
            total = int(attended_tokens(lengths, keep).sum())
            limit = max(1, min(limit, -(-total // ranks)))
        rows = plan_rows(lengths, keep, limit, whole_groups=self.objective.whole_groups)
        return deal_rows(rows, lengths.group_of, ranks, held)

    def _read_and_tell(
        self, held: "_Held", wanted: Sequence[int], owned: Collection[int], fetch: Fetch
    ) -> list[dict[str, Any]]:
        """Collective. Reads missing groups of ``wanted``; returns the reports of all ranks."""
        failure: Exception | None = None
        report: dict[str, Any] = {"over": True}
        try:
            if held.read(wanted, fetch):
                report = {"without": held.without, "trained": held.trained(owned)}
        except BadGroup as error:
            report = {"fault": error.fault, "why": str(error), "groups": error.groups}
        except Exception as error:  # the other ranks wait for word of this one
            failure = error
        reports = self.replica.gather(report)
        if failure is not None:
            raise failure
        if any(each.get("over") for each in reports):
            raise EpochCancelled("the epoch ended while payloads were read")
        if faults := [each for each in reports if "fault" in each]:
            raise _merged(faults, held.accepted)
        return reports

    def _share(
        self,
        held: "_Held",
        dealt: Sequence[Sequence[Ints]],
        trained: int,
        owned: Collection[int],
    ) -> RowShard:
        here = dealt[self.replica.rank]
        rows = [held.local(row) for row in here]
        last = next((rows[-1] for rows in (here, *reversed(dealt)) if rows), None)
        return RowShard(
            keys=tuple(group.key for group in held.accepted),
            groups=[*held.groups.values()],
            batch=held.batch,
            columns=held.columns,
            rows=rows,
            rounds=max(map(len, dealt)),
            filler=held.local(last) if last is not None else np.empty(0, np.int64),
            trained=trained,
            owned=[held.groups[g] for g in sorted(owned)],
        )


@dataclass(eq=False)
class _Held:
    accepted: Sequence[AcceptedGroup]
    objective: Objective
    totals: StepTotals
    limits: ModelLimits
    groups: dict[int, rollout_pb2.Group] = field(default_factory=dict)
    batch: TokenBatch = field(init=False)
    columns: TokenColumns[np.ndarray] = field(init=False)
    numbers: Ints = field(init=False)
    """[S]: the number that each sequence of ``batch`` has among those of all accepted groups, which
    is the same on all ranks; rising."""

    def read(self, wanted: Sequence[int], fetch: Fetch) -> bool:
        """False if ``fetch`` ended early. Raises BadGroup, and what ``fetch`` raises."""
        missing = [g for g in wanted if g not in self.groups]
        payloads = fetch([self.accepted[g].key for g in missing]) if missing else []
        if payloads is None:
            return False
        found = read_groups(payloads, [self.accepted[g] for g in missing])
        self.add(dict(zip(missing, found, strict=True)))
        return True

    def add(self, groups: Mapping[int, rollout_pb2.Group]) -> None:
        """Raises BadGroup."""
        self.groups = dict(sorted({**self.groups, **groups}.items()))
        present, every = [*self.groups], [*self.groups.values()]
        self.batch = read_batch(every, [self.accepted[g] for g in present], self.limits)
        self.columns = self.objective.columns(self.batch, self.totals)
        # Sequences of groups that are not here are counted by what was planned.
        sizes = np.array([len(group.lengths) for group in self.accepted])
        sizes[present] = self.batch.sequences
        before = (np.cumsum(sizes) - sizes)[present]
        before_here = np.cumsum(self.batch.sequences) - self.batch.sequences
        places = np.arange(len(self.batch.length))
        self.numbers = places + np.repeat(before - before_here, self.batch.sequences)

    @property
    def without(self) -> list[int]:
        """Sequences of held groups that do not contribute, by their numbers."""
        keep = self.objective.contributing(self.batch, self.columns)
        found: list[int] = self.numbers[np.flatnonzero(~keep)].tolist()
        return found

    def trained(self, groups: Collection[int]) -> int:
        """Sequences of ``groups`` with a token to train on, counted as the totals count them."""
        first, length = self.batch.units(self.objective.config.train.loss.branches)
        counts = trained_by_sequence(self.columns.trained, length) > 0
        group = np.array([*self.groups])[self.batch.group_of[first]]
        return int(np.count_nonzero(counts & np.isin(group, [*groups])))

    def local(self, row: Ints) -> Ints:
        """Sequences of ``batch``, from their numbers."""
        return np.searchsorted(self.numbers, row)


def deal_rows(
    rows: Sequence[Ints], group_of: Ints, ranks: int, held: Sequence[Collection[int]] = ()
) -> list[list[Ints]]:
    """``rows`` (of sequences) by rank, in their order: at most ceil(rows / ranks) each, so that no
    round is added. A row goes to the rank that has most of its groups, from ``held`` or from rows
    before it; of equals to the one with the fewest rows. So rows of equal length meet in a round,
    and few groups are read twice. The same input gives the same."""
    most = -(-len(rows) // ranks)
    has = [set(groups) for groups in held] or [set[int]() for _ in range(ranks)]
    dealt: list[list[Ints]] = [[] for _ in range(ranks)]
    for row in rows:
        groups = set(np.unique(group_of[row]).tolist())
        free = [rank for rank in range(ranks) if len(dealt[rank]) < most]
        rank = min(free, key=lambda r: (-len(groups & has[r]), len(dealt[r]), r))
        dealt[rank].append(row)
        has[rank] |= groups
    return dealt


def wanted_groups(dealt: Sequence[Sequence[Ints]], group_of: Ints) -> list[list[int]]:
    """Groups that each rank needs, rising; without a row those of the last one, its filler."""
    last = next((rows[-1] for rows in reversed(dealt) if rows), None)
    found = []
    for rows in dealt:
        needed = rows or ([last] if last is not None else [])
        found.append(np.unique(group_of[np.concatenate(needed)]).tolist() if needed else [])
    return found


def _merged(faults: Sequence[Mapping[str, Any]], accepted: Sequence[AcceptedGroup]) -> BadGroup:
    """One error for all ranks: of lost groups, or else of others, in the plan's order."""
    lost = [each for each in faults if each["fault"] == "payload_lost"]
    told = lost or faults
    named = {(task_id, attempt) for each in told for task_id, attempt in each["groups"]}
    why = "; ".join(dict.fromkeys(each["why"] for each in told))
    order = [group.key for group in accepted if group.key in named]
    return BadGroup(why, order, told[0]["fault"])
