"""Guards of the store: journal, election, payloads and snapshots."""

from __future__ import annotations

from benchmarks.mutation.guard import SCHEDULES, Guard, Patch

FENCE_TESTS = "tests/process/controller/test_fence_and_election.py"

GUARDS = (
    Guard(
        "fence",
        "an append checks the writer's term",
        (
            Patch(
                "controller/store/journal.py",
                "if term ~= ARGV[1] then return {'deposed', term or 'none', syncing} end\n",
                "",
            ),
        ),
        (FENCE_TESTS,),
        "deposed_leader",
    ),
    Guard(
        "release",
        "a lease that was released is not renewed",
        (
            Patch(
                "controller/store/election.py",
                "            if self.released:\n                return False\n",
                "",
            ),
        ),
        (FENCE_TESTS,),
        "released_is_never",
    ),
    Guard(
        "later-term",
        "a leader steps down if a worker has seen a later term",
        (Patch("controller/leader.py", "        if seen > self.term:\n", "        if False:\n"),),
        ("tests/process/controller/test_leader_start.py",),
        "a_report_of_a_later_term",
    ),
    Guard(
        "lease-when-full",
        "a Redis at its memory limit renews a lease that has run out",
        (
            Patch(
                "controller/store/election.py",
                "if redis.call('PEXPIRE', KEYS[1], ARGV[2]) == 0 then\n",
                "if not holder or redis.call('PEXPIRE', KEYS[1], ARGV[2]) == 0 then\n",
            ),
        ),
        (FENCE_TESTS,),
        "while_redis_is_full",
    ),
    Guard(
        "batch-key",
        "an append whose answer was lost is recognised",
        (
            Patch(
                "controller/store/journal.py",
                "if head[1] == ARGV[3] then return {'appended', head[2], syncing} end\n",
                "",
            ),
        ),
        (FENCE_TESTS,),
        "unacknowledged",
    ),
    Guard(
        "written",
        "an append counts once it is in Redis' append-only file",
        (
            Patch(
                "controller/store/journal.py",
                '        if syncing != "0":\n',
                "        if False:\n",
            ),
        ),
        ("tests/process/controller/test_embedded_redis.py",),
        "middle_of_a_sync",
    ),
    Guard(
        "sweep",
        "a deposed leader deletes no payload",
        (
            Patch(
                "controller/housekeeping.py",
                "            if not await self._context.stores.election.renew(self._term):\n",
                "            if False:\n",
            ),
        ),
        ("tests/process/controller/test_leader_start.py",),
        "deposed_leader",
    ),
    Guard(
        "durable",
        "a reply leaves only once what it rests on is durable",
        (
            Patch(
                "controller/store/group_commit.py",
                "        batch.waiters.append(waiter)\n        await waiter\n",
                "",
            ),
        ),
        SCHEDULES,
        "random_faults",
    ),
    Guard(
        "partial-gap",
        "a report of partial work after a gap is not appended",
        (
            Patch(
                "controller/store/partial_store.py",
                "if (self.attempt, self.offset) == (kept.attempt, kept.tokens):",
                "if self.attempt == kept.attempt:",
            ),
            Patch(
                "controller/store/partial_store.py",
                "attempt == before and offset == has\n",
                "attempt == before\n",
            ),
        ),
        ("tests/process/controller/test_partial_work.py",),
        "twice_late_or_after_a_gap",
    ),
    Guard(
        "payload-gate",
        "a payload is deleted only once the record that covers it would survive a failover of Redis",
        (
            Patch(
                "controller/housekeeping.py",
                "        while not await self._is_safe(number):\n",
                "        while False:\n",
            ),
        ),
        SCHEDULES[:1],
        "lost_tail",
    ),
    Guard(
        "old-snapshot",
        "verify compares the snapshot of an earlier release in the fields that it had, and in no others",
        (
            Patch(
                "controller/store/journal_audit.py",
                "json.dumps(known_fields(State, state, stored))",
                "json.dumps(state)",
            ),
        ),
        ("tests/process/controller/test_old_journals.py",),
        "release_before",
    ),
    Guard(
        "snapshot-slices",
        "requests are answered while the snapshot of a long run is encoded",
        (
            Patch(
                "controller/store/snapshot_json.py",
                "            await asyncio.sleep(0)\n",
                "            pass\n",
            ),
        ),
        ("tests/unit/controller/test_snapshot_json.py",),
    ),
)
