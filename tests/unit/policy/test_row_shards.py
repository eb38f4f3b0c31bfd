"""Ranks of a replica read the groups of their own rows, and agree on what they find, whoever found
it."""

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from paceline.mesh.elastic_mesh import EpochCancelled
from paceline.payloads.group_payload import encode
from policy_worker.objectives.batch import BadGroup, StepTotals
from policy_worker.objectives.load import load_objective
from policy_worker.rows.group_reading import AcceptedGroup, ModelLimits
from policy_worker.rows.row_shards import RowShard, RowShards, deal_rows, wanted_groups
from testbed.patience import patient
from tests.fixtures.group_meta import submitted
from tests.fixtures.policy_models import make_config, random_groups

TOTALS = StepTotals(1, 0, 1000, 100)


class Ranks:
    """What the ranks of one replica say to one another, as threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.met = threading.Barrier(size, timeout=patient(30))
        self.said: list[Any] = [None] * size
        self.gathers = 0


class Rank:
    def __init__(self, ranks: Ranks, rank: int) -> None:
        self.ranks, self.rank, self.size = ranks, rank, ranks.size

    def gather(self, value: Any) -> list[Any]:
        self.ranks.said[self.rank] = json.dumps(value)
        self.ranks.met.wait()
        found = [json.loads(each) for each in self.ranks.said]
        if self.rank == 0:
            self.ranks.gathers += 1
        self.ranks.met.wait()
        return found


class Reading:
    """A payload store, and what each rank has read of it."""

    def __init__(self, groups: Sequence[Any], ranks: int) -> None:
        self.payloads = {(g.task.task_id, g.task.attempt): encode(g) for g in groups}
        self.accepted = [accepted(g) for g in groups]
        self.read: list[list[str]] = [[] for _ in range(ranks)]
        self.fetch: dict[int, Callable[[Any], Any]] = {}

    def take(self, limit: int, train: dict[str, Any] | None = None) -> list[RowShard | Exception]:
        """The share of each rank, or its error. ``limit``: tokens of a row."""
        ranks = Ranks(len(self.read))
        config = make_config(train={"tokens_per_microbatch": limit, **(train or {})})

        def one(rank: int) -> RowShard | Exception:
            shares = RowShards(load_objective(config), config, Rank(ranks, rank))  # type: ignore[arg-type]
            try:
                limits = ModelLimits(vocabulary=1000)
                return shares.take(
                    self.accepted, TOTALS, limits, lambda keys: self._fetch(rank, keys)
                )
            except (BadGroup, EpochCancelled, RuntimeError) as error:
                return error

        with ThreadPoolExecutor(ranks.size) as pool:
            found = list(pool.map(one, range(ranks.size)))
        self.gathers = ranks.gathers
        return found

    def _fetch(self, rank: int, keys: Any) -> Any:
        self.read[rank] += [task_id for task_id, _ in keys]
        return self.fetch.get(rank, lambda some: [self.payloads.get(k) for k in some])(keys)


def accepted(group: Any) -> AcceptedGroup:
    meta = submitted(group)
    key = group.task.task_id, group.task.attempt
    lengths = tuple(meta.lengths)
    return AcceptedGroup(key, 0, 0, meta.prompt_tokens, lengths, meta.digest)


def informative(count: int, size: int = 4, **lengths: Any) -> list[Any]:
    groups = random_groups(count, group_size=size, seed=3, **lengths)
    for group in groups:
        group.prompt_tokens = np.arange(4, dtype="<i4").tobytes()
        for number, completion in enumerate(group.completions):
            completion.reward = float(number % 2)
    return groups


def counted(shares: Sequence[Any]) -> list[tuple[str, bytes]]:
    """Every sequence that a rank computes: its group and tokens, sorted."""
    found = []
    for share in shares:
        for row in share.rows:
            for sequence in row:
                group = share.groups[share.batch.group_of[sequence]]
                start = int((np.cumsum(share.batch.length) - share.batch.length)[sequence])
                end = start + int(share.batch.length[sequence])
                tokens = share.batch.tokens[start:end].astype("<i4").tobytes()
                found.append((group.task.task_id, tokens))
    return sorted(found)


def sequences_of(groups: Sequence[Any]) -> list[tuple[str, bytes]]:
    return sorted((g.task.task_id, c.tokens) for g in groups for c in g.completions)


@pytest.mark.parametrize(
    ("count", "length", "ranks", "limit"),
    [(6, 6, 3, 40), (4, 9, 4, 16)],
    ids=["groups in a row", "rows of a group stay with one rank"],
)
def test_each_rank_reads_its_groups_alone_and_all_sequences_are_computed_once(
    count: int, length: int, ranks: int, limit: int
) -> None:
    """Four groups of four rows on four ranks: dealt row by row, every rank would read every
    group."""
    groups = informative(count, shortest=length, longest=length)
    reading = Reading(groups, ranks)
    shares: Any = reading.take(limit)
    assert sorted(task for read in reading.read for task in read) == [f"t{n}" for n in range(count)]
    assert {len(read) for read in reading.read} == {count // ranks}, reading.read
    assert counted(shares) == sequences_of(groups)
    assert reading.gathers == 1
    assert {share.rounds for share in shares} == {max(len(share.rows) for share in shares)}
    assert {share.trained for share in shares} == {4 * count}


@pytest.mark.parametrize("size", [2, 4])
def test_one_group_is_shared_by_all_ranks_and_one_without_a_row_takes_part(size: int) -> None:
    groups = informative(1, size)
    reading = Reading(groups, 3)
    shares: Any = reading.take(limit=1000)
    assert reading.read == [["t0"]] * 3
    assert counted(shares) == sequences_of(groups)
    assert {share.trained for share in shares} == {size}, "counted by one rank alone"
    assert [len(share.owned) for share in shares] == [1, 0, 0]
    idle = [share for share in shares if not share.rows]
    assert bool(idle) == (size < 3) and all(len(share.filler) for share in idle)


def test_sequences_without_a_gradient_are_left_out_and_the_rest_is_dealt_anew() -> None:
    groups = informative(8, shortest=6, longest=6)
    for group in groups[:6]:
        for completion in group.completions:
            completion.reward = 1.0
    reading = Reading(groups, 2)
    shares = reading.take(limit=40, train={"skip_zero_advantage": True})
    assert counted(shares) == sequences_of(groups[6:])
    assert [len(share.rows) for share in shares] == [1, 1]  # type: ignore[union-attr]
    read = [task for some in reading.read for task in some]
    assert len(read) == len(set(read)), "a group that nobody has to read again was read again"


def test_groups_of_which_the_plan_has_no_lengths_are_read_by_all() -> None:
    groups = informative(3)
    reading = Reading(groups, 2)
    reading.accepted = [AcceptedGroup(group.key) for group in reading.accepted]
    shares = reading.take(limit=1000)
    assert reading.read == [["t0", "t1", "t2"]] * 2
    assert counted(shares) == sequences_of(groups)
    assert {share.trained for share in shares} == {12}  # type: ignore[union-attr]


def test_what_one_rank_finds_all_report_and_a_lost_group_is_named_before_a_wrong_one() -> None:
    reading = Reading(informative(6, shortest=5, longest=6), 3)
    whole = dict(reading.payloads)
    del reading.payloads["t1", 1], reading.payloads["t4", 1]
    reading.payloads["t2", 1] = b"other bytes"
    lost = "payload_lost", (("t1", 1), ("t4", 1))
    wrong = "payload_invalid", (("t1", 1), ("t2", 1))
    for expected in (lost, wrong):
        errors: Any = reading.take(limit=40)
        assert all(isinstance(error, BadGroup) for error in errors)
        assert {(error.fault, error.groups) for error in errors} == {expected}
        reading.payloads |= {("t1", 1): b"too", ("t4", 1): whole["t4", 1]}


def test_lengths_that_are_not_those_of_the_payload_are_found_out() -> None:
    """Rows were planned by them: without it a rank would compute sequences that others compute,
    too."""
    groups = informative(2)
    reading = Reading(groups, 2)
    meta = reading.accepted[1]
    reading.accepted[1] = AcceptedGroup(
        meta.key, prompt_tokens=meta.prompt_tokens, lengths=(*meta.lengths[1:], 999)
    )
    errors: Any = reading.take(limit=1000)
    assert {(e.fault, e.groups) for e in errors} == {("payload_invalid", (("t1", 1),))}
    assert "other counts" in str(errors[0])


@pytest.mark.parametrize("rank", [0, 1])
def test_an_epoch_that_ends_while_one_rank_waits_for_the_store_ends_for_all(rank: int) -> None:
    reading = Reading(informative(4), 2)
    reading.fetch[rank] = lambda keys: None
    assert [type(error) for error in reading.take(limit=40)] == [EpochCancelled] * 2


def test_an_error_of_one_rank_reaches_the_others_as_the_end_of_the_epoch() -> None:
    """Without a word of it they would wait for ever."""
    reading = Reading(informative(4), 2)

    def fail(keys: Any) -> Any:
        raise RuntimeError("the session is over")

    reading.fetch[0] = fail
    errors = reading.take(limit=40)
    assert [type(error) for error in errors] == [RuntimeError, EpochCancelled]


def test_dealing_adds_no_round_and_keeps_the_order_of_rows() -> None:
    rng = np.random.default_rng(1)
    for _ in range(200):
        groups, ranks = int(rng.integers(1, 9)), int(rng.integers(1, 6))
        group_of = np.repeat(np.arange(groups), 4)
        cuts = np.sort(rng.choice(np.arange(1, 4 * groups), rng.integers(0, 4 * groups), False))
        rows = [row for row in np.split(np.arange(4 * groups), cuts) if len(row)]
        dealt = deal_rows(rows, group_of, ranks)
        assert max(map(len, dealt)) == -(-len(rows) // ranks)
        assert sorted(int(row[0]) for some in dealt for row in some) == [int(r[0]) for r in rows]
        assert all([int(r[0]) for r in some] == sorted(int(r[0]) for r in some) for some in dealt)
        assert all(wanted_groups(dealt, group_of))


def test_rows_of_whole_groups_are_dealt_one_to_each_rank_in_turn() -> None:
    """Rows come longest first: those of equal length meet in a round."""
    rows = [np.array([n]) for n in range(7)]
    dealt = deal_rows(rows, np.arange(7), 3)
    assert [[int(r[0]) for r in some] for some in dealt] == [[0, 3, 6], [1, 4], [2, 5]]
