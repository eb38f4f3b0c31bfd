"""Identity of a weights link: its epoch and the incarnation of the peer."""

import pytest
import torch

from paceline.v1 import worker_pb2
from paceline.weights.weight_link import LinkEnd
from policy_worker.publisher import WeightPublisher


def link(epoch: int, incarnation: int) -> worker_pb2.WeightsLink:
    made = worker_pb2.WeightsLink(epoch=epoch)
    made.receiver.worker_id, made.receiver.incarnation = "rollout-0", incarnation
    return made


def test_an_epoch_that_is_counted_again_names_a_new_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failover of Redis that lost the newest entries made the next receiver wait for ever."""
    monkeypatch.setattr(LinkEnd, "_serve", lambda self, link: None)
    publisher = WeightPublisher(
        url="redis://nowhere", run_id="r", device=torch.device("cpu"), on_link_error=print
    )
    publisher.set_links([link(1, 2)])
    (first,) = publisher._links.values()
    publisher.set_links([link(1, 2)])
    assert list(publisher._links.values()) == [first]
    publisher.set_links([link(1, 4)])
    (second,) = publisher._links.values()
    assert first.withdrawn.is_set() and not second.withdrawn.is_set()
    publisher.close()
