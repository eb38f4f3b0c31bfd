"""Row shares: which rows of some groups each rank of a replica computes, and the groups that it
reads for them.

    lengths (facts) ─► rows ─► dealt to ranks ─► each reads the groups of its rows ─► checks them ─► all tell all
                        ▲                                                                              │
                        └───── without the sequences whose gradient is zero, if there are any ◄────────┘

- No rank hands a payload to another one. A group is read by every rank that has a row of it; rows
  of a group go to as few ranks as that costs no round.
- Taking is collective, and its outcome is the same on all ranks: what one of them finds wrong, all
  raise.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.config.schema import Config
from paceline.mesh.elastic_mesh import EpochCancelled
from paceline.payloads.store import Payloads
from paceline.v1 import rollout_pb2
from policy_worker.objectives.batch import (
    BadGroup,
    GroupKey,
    Ints,
    StepTotals,
    TokenBatch,
    check_vocabulary,
    decode,
)
from policy_worker.objectives.columns import TokenColumns, trained_by_sequence
from policy_worker.objectives.objective import Objective
from policy_worker.rows.group_reading import AcceptedGroup, Outline, read_groups
from policy_worker.rows.packing import attended_tokens, plan_rows
from policy_worker.rows.replica import Replica

Fetch = Callable[[Sequence[GroupKey]], Payloads | None]
"""The payloads of these groups, None for one that is lost; or None, if the epoch ended meanwhile.
"""


@dataclass(frozen=True, slots=True)
class RowShare:
    """One rank's part of some groups."""

    keys: tuple[GroupKey, ...]
    """Of the groups of all ranks."""
    groups: Sequence[rollout_pb2.Group]
    """That this rank has."""
    batch: TokenBatch
    """Of ``groups``."""
    columns: TokenColumns[np.ndarray]
    rows: Sequence[Ints]
    """Of this rank, as sequences of ``batch``."""
    rounds: int
    """Rows of the rank that has the most."""
    filler: Ints
    """What this rank computes, without counting it, in rounds in which it has no row: forwards are
    collective."""
    trained: int
    """Sequences of all ranks that have a token to train on."""


@dataclass(eq=False)
class RowShares:
    """Shares of one rank of ``replica``."""

    objective: Objective
    config: Config
    replica: Replica

    def take(
        self,
        accepted: Sequence[AcceptedGroup],
        totals: StepTotals,
        vocabulary: int,
        fetch: Fetch,
    ) -> RowShare:
        """Collective, with the same groups on all ranks. Reads and checks what this rank's rows
        need.

        Raises BadGroup with the groups that any rank found lost, or else with those that any found
        invalid; EpochCancelled if a ``fetch`` ended early; and what this rank's ``fetch`` raises.
        """
        held = _Held(accepted, self.objective, totals, vocabulary)
        outline = Outline.of(accepted)
        if outline is None:
            wanted = [list(range(len(accepted)))] * self.replica.size
        else:
            dealt = self._deal(outline, np.arange(len(outline.length)))
            wanted = wanted_groups(dealt, outline.group_of)
        said = self._read(held, wanted[self.replica.rank], _owned(wanted, self.replica.rank), fetch)
        trained = sum(each["trained"] for each in said)
        without = {s for each in said for s in each["without"]}
        if outline is None or without:
            outline = outline or held.outline
            keep = np.setdiff1d(np.arange(len(outline.length)), np.array([*without], np.int64))
            dealt = self._deal(outline, keep, wanted)
            more = wanted_groups(dealt, outline.group_of)
            if any(set(m) - set(w) for m, w in zip(more, wanted, strict=True)):
                self._read(held, more[self.replica.rank], (), fetch)
        return self._share(held, dealt, trained)

    def of(
        self, groups: Sequence[rollout_pb2.Group], totals: StepTotals, vocabulary: int
    ) -> RowShare:
        """The share of groups that every rank has. Raises BadGroup if one contradicts itself or the
        model."""
        keys = [AcceptedGroup((g.task.task_id, g.task.attempt)) for g in groups]
        held = _Held(keys, self.objective, totals, vocabulary)
        held.add(dict(enumerate(groups)))
        keep = np.setdiff1d(np.arange(len(held.batch.length)), np.array(held.without, np.int64))
        dealt = self._deal(held.outline, keep)
        return self._share(held, dealt, held.trained(range(len(groups))))

    def _deal(
        self, outline: Outline, keep: Ints, held: Sequence[Collection[int]] = ()
    ) -> list[list[Ints]]:
        limit, ranks = self.config.train.memory.tokens_per_microbatch, self.replica.size
        if ranks > 1:
            total = int(attended_tokens(outline, keep).sum())
            limit = max(1, min(limit, -(-total // ranks)))
        rows = plan_rows(outline, keep, limit, whole_groups=self.objective.whole_groups)
        return deal_rows(rows, outline.group_of, ranks, held)

    def _read(
        self, held: _Held, wanted: Sequence[int], owned: Collection[int], fetch: Fetch
    ) -> list[dict[str, Any]]:
        """Collective. Reads the groups ``wanted`` that are not held; returns what every rank says
        of its own."""
        failure: Exception | None = None
        said: dict[str, Any] = {}
        try:
            over = not held.read(wanted, fetch)
            said = {"over": over}
            if not over:
                said |= {"without": held.without, "trained": held.trained(owned)}
        except BadGroup as error:
            said = {"fault": error.fault, "why": str(error), "groups": error.groups}
        except Exception as error:  # the other ranks wait for word of this one
            failure = error
            said = {"over": True}
        everything = self.replica.gather(said)
        if failure is not None:
            raise failure
        if any(each.get("over") for each in everything):
            raise EpochCancelled("the epoch ended while payloads were read")
        if faults := [each for each in everything if "fault" in each]:
            raise _merged(faults, held.accepted)
        return everything

    def _share(self, held: _Held, dealt: Sequence[Sequence[Ints]], trained: int) -> RowShare:
        here = dealt[self.replica.rank]
        rows = [held.local(row) for row in here]
        last = next((rows[-1] for rows in (here, *reversed(dealt)) if rows), None)
        return RowShare(
            keys=tuple(group.key for group in held.accepted),
            groups=[*held.groups.values()],
            batch=held.batch,
            columns=held.columns,
            rows=rows,
            rounds=max(map(len, dealt)),
            filler=held.local(last) if last is not None else np.empty(0, np.int64),
            trained=trained,
        )


@dataclass(eq=False)
class _Held:
    """Groups that this rank has read, and their columns."""

    accepted: Sequence[AcceptedGroup]
    objective: Objective
    totals: StepTotals
    vocabulary: int
    groups: dict[int, rollout_pb2.Group] = field(default_factory=dict)
    """By position in ``accepted``, rising."""
    batch: TokenBatch = field(init=False)
    columns: TokenColumns[np.ndarray] = field(init=False)

    def read(self, wanted: Sequence[int], fetch: Fetch) -> bool:
        """False if ``fetch`` ended early. Raises BadGroup, and what ``fetch`` raises."""
        missing = [g for g in wanted if g not in self.groups]
        payloads = fetch([self.accepted[g].key for g in missing]) if missing else []
        if payloads is None:
            return False
        found = read_groups(payloads, [self.accepted[g] for g in missing], self.vocabulary)
        self.add(dict(zip(missing, found, strict=True)))
        return True

    def add(self, groups: Mapping[int, rollout_pb2.Group]) -> None:
        """Raises BadGroup."""
        self.groups = dict(sorted({**self.groups, **groups}.items()))
        every = [*self.groups.values()]
        self.batch = decode(every)
        check_vocabulary(self.batch, every, self.vocabulary)
        self.columns = self.objective.columns(self.batch, self.totals)

    @property
    def outline(self) -> Outline:
        """Of all accepted groups, if all of them are held."""
        return Outline(self.batch.prompt_length, self.batch.sequences, self.batch.length)

    @property
    def without(self) -> list[int]:
        """Sequences of held groups that do not contribute, as sequences of all accepted groups."""
        keep = self.objective.contributing(self.batch, self.columns)
        found: list[int] = self._everywhere[np.flatnonzero(~keep)].tolist()
        return found

    def trained(self, groups: Collection[int]) -> int:
        """Sequences of ``groups`` with a token to train on."""
        counts = trained_by_sequence(self.columns.trained, self.batch.length) > 0
        of = np.array([*self.groups])[self.batch.group_of]
        return int(np.count_nonzero(counts & np.isin(of, [*groups])))

    def local(self, row: Ints) -> Ints:
        """Sequences of all accepted groups, as sequences of ``batch``."""
        return np.searchsorted(self._everywhere, row)

    @property
    def _everywhere(self) -> Ints:
        """[S]: the number that each sequence of ``batch`` has among those of all accepted groups,
        rising."""
        sizes = np.array([len(group.lengths) for group in self.accepted])
        sizes[[*self.groups]] = self.batch.sequences
        starts = (np.cumsum(sizes) - sizes)[[*self.groups]]
        places = np.arange(len(self.batch.length))
        own = np.cumsum(self.batch.sequences) - self.batch.sequences
        numbers: Ints = places + np.repeat(starts - own, self.batch.sequences)
        return numbers


def deal_rows(
    rows: Sequence[Ints], group_of: Ints, ranks: int, held: Sequence[Collection[int]] = ()
) -> list[list[Ints]]:
    """``rows`` (of sequences) by rank, in their order: at most ceil(rows / ranks) each, so that no
    round is added.

    A row goes to the rank that has most of its groups, from ``held`` or from rows before it; of
    equals to the one with the fewest rows. So rows of equal length meet in a round, and few groups
    are read twice. The same input gives the same.
    """
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
    """Groups that each rank needs, rising. A rank without a row needs those of the last one, to
    fill its rounds."""
    last = next((rows[-1] for rows in reversed(dealt) if rows), None)
    found = []
    for rows in dealt:
        needed = rows or ([last] if last is not None else [])
        found.append(np.unique(group_of[np.concatenate(needed)]).tolist() if needed else [])
    return found


def _owned(wanted: Sequence[Collection[int]], rank: int) -> set[int]:
    """The groups of ``rank`` that no rank before it has."""
    return set(wanted[rank]).difference(*wanted[:rank])


def _merged(faults: Sequence[Mapping[str, Any]], accepted: Sequence[AcceptedGroup]) -> BadGroup:
    """One error for all ranks: of the lost groups, or else of the others. Groups in their order in
    the plan."""
    lost = [each for each in faults if each["fault"] == "payload_lost"]
    told = lost or faults
    named = {(task_id, attempt) for each in told for task_id, attempt in each["groups"]}
    why = "; ".join(dict.fromkeys(each["why"] for each in told))
    order = [group.key for group in accepted if group.key in named]
    return BadGroup(why, order, told[0]["fault"])
