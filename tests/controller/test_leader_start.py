"""What a leader owes before it answers anybody."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from pathlib import Path

from benchmarks.processes import write_config
from controller.leader import Leader
from controller.ledger.commands import Register, Role
from controller.main import Controller
from controller.replica import Replica
from controller.rows import Rows
from paceline.config.load import load_config
from paceline.leader_lease import LeaderIdentity
from tests.helpers.redis_process import throwaway_redis


async def test_a_command_that_arrives_before_the_term_begins_waits_for_it(tmp_path: Path) -> None:
    """A worker that registered in the instant between winning and beginning a term was refused."""
    config = load_config(write_config(tmp_path), [])
    with throwaway_redis(tmp_path) as url:
        identity = LeaderIdentity("c", "c:1", socket.gethostname(), os.getpid(), "nonce")
        controller = Controller(config, tmp_path, identity, url)
        term = await controller.election.acquire(0)
        assert term is not None
        replica = await Replica.load(controller.journal)
        leader = Leader(controller.plant(await Rows.load(config)), replica, term)
        register = Register("rollout-0", "first", Role.ROLLOUT, "host", 1, "127.0.0.1", 1, -1)
        early = asyncio.create_task(leader.execute(register))
        await asyncio.sleep(0)  # the command is at the door; the term has not begun
        leading = asyncio.create_task(leader.run())
        try:
            async with asyncio.timeout(20.0):
                await early
        finally:
            leading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await leading
        entries = await controller.journal.scan("0")
        await controller.redis.aclose()
    kinds = [event["type"] for entry in entries for event in entry.events]
    assert kinds[:3] == ["RunStarted", "TermBegun", "WorkerRegistered"]
