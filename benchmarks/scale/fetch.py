"""Reading of a large step's payloads by all its replicas at once, against raw GETs of the same
bytes.

Every replica reads its shard as the policy worker does, from the payload store of a run whose
controller leads meanwhile, and compares each payload with its digest. The same connections' worth
of plain GETs of the same keys is timed in the same run, by turns. Either keeps what it has read, as
a trainer does. Replicas share a few processes; each has a client of its own. The store holds the
payloads of one shard, which every replica reads: that bounds its memory, and the bytes that travel
are the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import secrets
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from paceline.groups.payload import encode, payload_digest
from paceline.ids import TaskId
from paceline.payloads.redis_payloads import RedisPayloads, payload_key
from paceline.payloads.store import Ref
from paceline.payloads.transfer_limits import limit_s
from paceline.redis.client import connect
from paceline.v1 import common_pb2
from policy_worker.rows.group_reading import read_payloads
from testbed.fleets.controllers import running_controllers, until
from testbed.workers.fake_workers import make_group

RUN = "load"
"""Name of the run that ``running_controllers`` starts."""
WAYS = ("raw", "fetch", "checked")


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale fetch", description=__doc__)
    parser.add_argument("--replicas", type=int, default=32)
    parser.add_argument("--groups", type=int, default=16, help="of a replica's shard")
    parser.add_argument("--completions", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/payload_fetch.json"))
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as name:
        result = _measure(args, Path(name))
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


def _measure(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    with running_controllers(directory, 1) as controllers:
        url = controllers.redis_url
        digests = asyncio.run(_store(url, args))
        size = sum(size for _, size in digests.values())
        barrier = multiprocessing.get_context("spawn").Barrier(args.processes + 1)
        seconds = _timed(args, url, digests, barrier)
        status = Path(f"/proc/{controllers.started[0].pid}/status").read_text()
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    medians = {way: statistics.median(seconds[way]) for way in WAYS}
    return {
        "replicas": args.replicas,
        "groups": args.groups,
        "payload": f"{args.completions}x{args.tokens}",
        "gigabytes": args.replicas * size / 1e9,
        "seconds": seconds,
        "median_s": medians,
        "fetch_over_raw": medians["fetch"] / medians["raw"],
        "checked_over_raw": medians["checked"] / medians["raw"],
        "controller_peak_mb": int(peak.split()[1]) / 1024,
    }


async def _store(url: str, args: argparse.Namespace) -> dict[Ref, tuple[str, int]]:
    """Stores one shard; (digest, bytes) of each payload."""
    store = RedisPayloads([url], RUN)
    # The leader sweeps payloads of no group once, at the beginning of its term.
    decoy = TaskId("t999999999"), 1
    await store.put({decoy: b"decoy"})

    async def swept() -> bool:
        return bool(await store.missing([decoy]))

    await until(swept)
    found = {}
    for number in range(args.groups):
        task = common_pb2.TaskRef(task_id=f"t{10**9 + number}", attempt=1)
        group = make_group(task, completions=args.completions, tokens=args.tokens, version=0)
        for completion in group.completions:
            completion.logprobs = secrets.token_bytes(4 * args.tokens)
        payload = encode(group)
        ref = TaskId(task.task_id), 1
        await store.put({ref: payload})
        found[ref] = payload_digest(payload), len(payload)
    await store.close()
    return found


def _timed(
    args: argparse.Namespace, url: str, digests: dict[Ref, tuple[str, int]], barrier: Barrier
) -> dict[str, list[float]]:
    """Seconds from the start of all replicas to the end of the last, of each round and way."""
    context = multiprocessing.get_context("spawn")
    shares = [args.replicas // args.processes] * args.processes
    shares[0] += args.replicas - sum(shares)
    workers = [
        context.Process(target=_replicas, args=(url, digests, share, args.rounds, barrier))
        for share in shares
    ]
    for worker in workers:
        worker.start()
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(args.rounds):
        for way in WAYS:
            barrier.wait()
            began = time.perf_counter()
            barrier.wait()
            seconds[way].append(time.perf_counter() - began)
            print(f"{way}: {seconds[way][-1]:.2f} s", flush=True)
    for worker in workers:
        worker.join()
        if worker.exitcode:
            raise SystemExit(f"a process of replicas ended with {worker.exitcode}")
    return seconds


def _replicas(
    url: str, digests: dict[Ref, tuple[str, int]], count: int, rounds: int, barrier: Barrier
) -> None:
    """One process of ``count`` replicas."""
    refs = list(digests)

    async def raw() -> None:
        client = connect(url, timeout_s=limit_s(1 << 30))
        payloads = [await client.get(payload_key(RUN, *ref)) for ref in refs]
        assert [len(each) for each in payloads] == [digests[ref][1] for ref in refs]
        await client.aclose()

    async def fetch(*, check: bool) -> None:
        store = RedisPayloads([url], RUN)
        payloads = await read_payloads(store, refs)
        for ref, payload in zip(refs, payloads, strict=True):
            assert payload is not None and len(payload) == digests[ref][1]
            if check:
                assert await asyncio.to_thread(payload_digest, payload) == digests[ref][0]
        await store.close()

    ways: dict[str, Callable[[], Awaitable[None]]] = {
        "raw": raw,
        "fetch": lambda: fetch(check=False),
        "checked": lambda: fetch(check=True),
    }

    async def all_at_once(way: str) -> None:
        await asyncio.gather(*(ways[way]() for _ in range(count)))

    for _ in range(rounds):
        for way in WAYS:
            barrier.wait()
            asyncio.run(all_at_once(way))
            barrier.wait()
