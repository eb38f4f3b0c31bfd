"""The store of ranks and of NCCL groups, which anyone who connects to it can read and write."""

from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist

from paceline.mesh.rendezvous import host_store

WAIT = timedelta(seconds=60)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"])
def test_a_store_listens_on_its_address_alone(host: str) -> None:
    store = host_store(host, WAIT)
    listening = {
        c.laddr.ip
        for c in psutil.Process().net_connections("tcp")
        if c.status == psutil.CONN_LISTEN and c.laddr.port == store.port
    }
    assert listening == {host}
    store.set("config", "mine")
    other = dist.TCPStore(host, store.port, None, False, WAIT)
    assert other.get("config") == b"mine"


def test_a_store_that_has_gone_leaves_no_socket() -> None:
    before = psutil.Process().num_fds()
    store = host_store("127.0.0.1", WAIT)
    del store
    assert psutil.Process().num_fds() <= before
