"""Ranks hear of every change of links, whatever their training threads do, and the store keeps none
of it."""

import queue
from collections.abc import Iterator, Sequence
from datetime import timedelta

import pytest
import torch.distributed as dist

from paceline.mesh.rendezvous import host_store
from paceline.v1 import worker_pb2
from policy_worker.publisher import LinkNotices
from tests.process.weights.test_weights_links import until

SIZE = 3


@pytest.fixture
def store() -> dist.Store:
    return dist.PrefixStore("replica", host_store("127.0.0.1", timedelta(minutes=1)))


@pytest.fixture
def leader(store: dist.Store) -> Iterator[LinkNotices]:
    made = LinkNotices(store, 0, SIZE, lambda links: None)
    yield made
    made.close()


def reader(store: dist.Store, rank: int) -> queue.Queue[list[int]]:
    heard: queue.Queue[list[int]] = queue.Queue()
    LinkNotices(store, rank, SIZE, lambda links: heard.put([k.epoch for k in links]))
    return heard


def links(*epochs: int) -> Sequence[worker_pb2.WeightsLink]:
    return [worker_pb2.WeightsLink(epoch=epoch) for epoch in epochs]


def last(heard: queue.Queue[list[int]], wanted: list[int]) -> int:
    """Waits for this list; returns how many came until then."""
    count = 1
    while heard.get(timeout=60) != wanted:
        count += 1
    return count


def test_every_rank_ends_with_the_newest_links(store: dist.Store, leader: LinkNotices) -> None:
    first, second = reader(store, 1), reader(store, 2)
    for epoch in range(20):
        leader.tell(links(epoch, epoch + 1))
    leader.tell(links())
    assert last(first, []) == last(second, [])


def test_one_that_was_late_hears_what_was_said_before_and_what_all_have_read_is_deleted(
    store: dist.Store, leader: LinkNotices
) -> None:
    keys = store.num_keys()
    heard = [reader(store, 1)]
    leader.tell(links(7))
    assert heard[0].get(timeout=60) == [7]
    heard.append(reader(store, 2))
    assert heard[1].get(timeout=60) == [7]
    for epoch in range(5):
        for _ in range(3):  # only the first says something new
            leader.tell(links(epoch))
        assert [one.get(timeout=60) for one in heard] == [[epoch], [epoch]]
    until(lambda: store.num_keys() == keys)
