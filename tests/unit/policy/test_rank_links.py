"""Links between the ranks of a replica: silence, an end and the end of an epoch reach every
rank."""

import json
import queue
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from torch.distributed import HashStore

from paceline.errors import BadInput
from paceline.process.torchrun_environment import TorchrunPlace
from policy_worker.ranks.outside_ranks import OutsideRank
from policy_worker.ranks.rank_links import RankLinks, RankLost
from tests.fixtures.configs import config_of

QUIET_S = 3600.0
"""A detection time that no test waits for."""
WAIT_S = 30.0


@dataclass
class Ranks:
    """Rank 0 and two others in this process; ``lost[rank]`` gets the reason for which it would
    end."""

    silence_s: float = QUIET_S
    lost: list[queue.Queue[RankLost]] = field(
        default_factory=lambda: [queue.Queue() for _ in range(3)]
    )

    def __post_init__(self) -> None:
        self.pairs = {rank: socket.socketpair() for rank in (1, 2)}
        self.links = [self._made(0, {rank: here for rank, (here, _) in self.pairs.items()})]

    def _made(self, rank: int, links: dict[int, socket.socket]) -> RankLinks:
        return RankLinks(links, beat_s=0.02, silence_s=self.silence_s, lost=self.lost[rank].put)

    def start(self, rank: int) -> RankLinks:
        self.links.append(self._made(rank, {0: self.pairs[rank][1]}))
        return self.links[-1]

    def why(self, rank: int) -> str:
        return str(self.lost[rank].get(timeout=WAIT_S))


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    for pair in made.pairs.values():
        for end in pair:
            end.close()


def test_the_end_of_an_epoch_reaches_all_ranks_and_never_goes_back(ranks: Ranks) -> None:
    one, two = ranks.start(1), ranks.start(2)
    one.end_epoch(7)
    for links in (ranks.links[0], two, one):
        while links.ended_epoch < 7:
            assert all(lost.empty() for lost in ranks.lost)
    two.end_epoch(5)
    assert [links.ended_epoch for links in ranks.links] == [7, 7, 7]


def test_a_killed_rank_ends_rank_0_whose_end_reaches_the_others(ranks: Ranks) -> None:
    ranks.start(2)
    ranks.pairs[1][1].close()  # as the kernel does for a killed process
    assert ranks.why(0).startswith("rank 1: ")
    # Rank 0 closes its links as it goes.
    assert ranks.why(2).startswith("rank 0: ")


def test_a_rank_that_is_stopped_or_cut_off_is_lost_after_the_detection_time() -> None:
    made = Ranks(silence_s=0.3)
    made.start(1)
    assert made.why(0).startswith("rank 2: no message for")
    assert made.why(1).startswith("rank 0: ")
    assert made.lost[2].empty()


def test_a_stranger_that_speaks_something_else_ends_the_replica(ranks: Ranks) -> None:
    ranks.pairs[1][1].sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert ranks.why(0) == "rank 1: it speaks another protocol"


@pytest.mark.parametrize("rank", [0, 3, -1])
def test_a_rank_that_the_world_has_not_is_refused(rank: int) -> None:
    place = TorchrunPlace(0, 3, 0, "127.0.0.1", 1, False, "")
    config = config_of()
    outside = OutsideRank(place, config, "policy-0", "")
    hello = {"rank": rank, "size": 3, "run": config.run.name}
    assert f"no RANK={rank} " in outside._contradiction(hello)


def test_a_loopback_address_of_rank_0_is_refused_elsewhere(monkeypatch) -> None:
    store = HashStore()
    store.set("rank0", json.dumps({"host": "127.0.0.1", "port": 1, "identity": "a"}))
    place = TorchrunPlace(1, 3, 0, "me", 1, False, "")
    outside = OutsideRank(place, config_of(), "policy-0", "")
    monkeypatch.setattr(OutsideRank, "_store", lambda *_: store)
    with pytest.raises(BadInput, match="MASTER_ADDR=me is a loopback address"):
        outside._reach("10.0.0.1", time.monotonic() + WAIT_S)


def test_half_a_message_is_kept_until_the_rest_comes(ranks: Ranks) -> None:
    ranks.start(2)
    raw = b"." + (9).to_bytes(8, "big")
    ranks.pairs[1][1].sendall(raw[:4])
    assert ranks.links[0].ended_epoch == 0
    ranks.pairs[1][1].sendall(raw[4:])
    while ranks.links[0].ended_epoch != 9:
        assert ranks.lost[0].empty()


def test_ranks_that_end_in_order_are_no_loss_and_rank_0_waits_for_the_last(ranks: Ranks) -> None:
    one, two = ranks.start(1), ranks.start(2)
    for links in ranks.links:
        links.begin_end()
    one.await_end()
    waiting = threading.Thread(target=ranks.links[0].await_end)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    two.await_end()
    waiting.join(WAIT_S)
    assert not waiting.is_alive()
    assert all(lost.empty() for lost in ranks.lost)
