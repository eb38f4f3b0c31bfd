"""Mutation check: each guard that a promise depends on is removed, and its tests must fail.

    python -m benchmarks.mutation [--only fence,owner] [--table | --check]

Works on a scratch copy of the tree; the tree itself is never changed. For each guard the copy is
patched, the tests that cover it run, and the patch is undone. Before that, the same tests must pass
on the unchanged copy. Exit status 0 only if every removal turns its tests red. The result is
written to benchmarks/results/mutation.json and into docs/fault-tolerance.md. ``--check`` runs no
test: it only finds out whether the lines of each guard are there to be removed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.runs import REPOSITORY, RESULTS

OUT = RESULTS / "mutation.json"
PAGE = REPOSITORY / "docs" / "fault-tolerance.md"
BEGIN, END = "<!-- mutation table: begin -->", "<!-- mutation table: end -->"
COPIED = (
    *("benchmarks", "controller", "examples", "paceline", "policy_worker", "proto"),
    *("rollout_worker", "testbed", "tests", "pyproject.toml"),
)
LIMIT_S = 300.0


@dataclass(frozen=True, slots=True)
class Patch:
    file: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Guard:
    """Something a promise rests on, how to take it away, and the tests that must then fail."""

    name: str
    what: str
    patches: tuple[Patch, ...]
    tests: tuple[str, ...]
    choose: str = ""
    """Expression for pytest -k."""


LEASING = "controller/ledger/decisions/leases.py"
STEPPING = "controller/ledger/decisions/steps.py"
TASKS = "controller/ledger/state/tasks.py"
TOKEN_AGES = "controller/ledger/state/token_ages.py"
TASK_TESTS = "tests/unit/ledger/test_ledger_tasks.py"
AGE_TESTS = "tests/unit/ledger/test_token_age.py"
DIVERGED_TESTS = "tests/unit/ledger/test_diverged_checkpoints.py"
STEP_TESTS = "tests/unit/ledger/test_ledger_steps.py"
SCHEDULES = ("tests/unit/simulator/test_simulator.py", "--schedules=80")
FENCE_TESTS = "tests/process/controller/test_fence_and_election.py"

GUARDS = (
    Guard(
        "stop-saves",
        "a stop for now waits for a checkpoint of the last step",
        (
            Patch(
                "controller/ledger/decisions/run.py",
                "    elif s.phase is Phase.SUSPENDING and (covered or not s.fleet.holders(v.version)):\n",
                "    elif s.phase is Phase.SUSPENDING:\n",
            ),
        ),
        ("tests/unit/ledger/test_suspend.py",),
    ),
    Guard(
        "stop-is-no-fault",
        "a worker that ends with a stopped fleet is no death",
        (
            Patch(
                "controller/ledger/decisions/membership.py",
                "    if d.state.phase is Phase.SUSPENDED:\n",
                "    if False:\n",
            ),
        ),
        ("tests/unit/ledger/test_suspend.py",),
    ),
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
        "best-kept",
        "the best checkpoint is kept however many newer ones there are",
        (
            Patch(
                "controller/ledger/decisions/held_out.py",
                "c for c in s.versions.checkpoints if c.step == s.versions.best or c.step in s.evals.rounds",
                "c for c in s.versions.checkpoints if c.step in s.evals.rounds",
            ),
        ),
        ("tests/unit/ledger/test_held_out.py",),
    ),
    Guard(
        "checkpoint-name",
        "a checkpoint's directory is its writer's own",
        (
            Patch(
                "policy_worker/checkpoint/checkpoint.py",
                'path=self._root / f"step-{state.step:06d}.{writer}",',
                'path=self._root / f"step-{state.step:06d}.one",',
            ),
        ),
        ("tests/unit/policy/test_checkpoint_exactness.py",),
        "overwrite",
    ),
    Guard(
        "checkpoint-sweep",
        "a sweep leaves a finished checkpoint whose record may be under way",
        (
            Patch(
                "policy_worker/checkpoint/litter.py",
                "if match is None or int(match[1]) >= settled or path.name in recorded:",
                "if match is None or path.name in recorded:",
            ),
        ),
        ("tests/unit/policy/test_checkpoint_sweep.py",),
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
        "parity",
        "an engine whose parameters differ after a swap generates nothing",
        (
            Patch(
                "rollout_worker/engine/transformers/engine.py",
                "        wrong = self._differing(swap)\n",
                "        wrong: list[str] = []\n",
            ),
        ),
        ("tests/unit/engine/test_parity_guard.py",),
        "left_out_a_tensor",
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
        "lease-key",
        "a repeated lease request gets the same tasks",
        (
            Patch(
                LEASING,
                "if c.lease_seq == worker.lease_seq and worker.lease_reply:\n"
                "        return cmd.LeaseResult(worker.lease_reply)\n"
                "    if c.lease_seq <= worker.lease_seq:",
                "if c.lease_seq < worker.lease_seq:",
            ),
        ),
        (TASK_TESTS,),
    ),
    Guard(
        "submit-key",
        "a repeated submission counts once",
        (
            Patch(
                TASKS,
                "return self.leased and (self.attempt, self.owner) == (attempt, worker_id)",
                "return (self.attempt, self.owner) == (attempt, worker_id)",
            ),
        ),
        (TASK_TESTS,),
    ),
    Guard(
        "vote",
        "a step is committed only with the votes of all members",
        (
            Patch(
                STEPPING,
                "    if len(step.votes) < len(mesh.members):\n        return cmd.VoteResult(VoteOutcome.PENDING)\n"
                "    wrong = diverged(mesh, step)\n",
                "    wrong = ()\n",
            ),
        ),
        (STEP_TESTS,),
    ),
    Guard(
        "digest",
        "votes carry a digest of the weights, and a difference is acted upon",
        (Patch(STEPPING, "    wrong = diverged(mesh, step)\n", "    wrong = ()\n"),),
        (STEP_TESTS,),
    ),
    Guard(
        "scratch",
        "gradients are reduced in a scratch copy",
        (
            Patch(
                "policy_worker/trainer.py",
                "        self._on_all_ranks(reduce)\n        self._norm = ",
                "        try:\n"
                "            self._on_all_ranks(reduce)\n"
                "        finally:\n"
                "            for part, parameter in zip(\n"
                "                self.gradients.views(scratch), self.gradients.parameters\n"
                "            ):\n"
                "                if parameter.grad is not None:\n"
                "                    parameter.grad.copy_(part)\n"
                "        self._norm = ",
            ),
        ),
        ("tests/process/policy/test_policy_step_transaction.py",),
        "fails_halfway or (lost_in_the_all_reduce and die)",
    ),
    Guard(
        "outvoted-record",
        "a checkpoint of an outvoted replica is not recorded",
        (Patch(STEPPING, " or _outvoted(s, worker, c):", ":"),),
        (DIVERGED_TESTS,),
        "outvoted_replica_is_refused or agreed_on_are_not_recorded",
    ),
    Guard(
        "outvoted-output",
        "what an outvoted replica wrote and published before the vote is withdrawn",
        (Patch(STEPPING, "        _disown_output(d, step.version, wrong)\n", ""),),
        (DIVERGED_TESTS,),
        "voided_and_never_restored or published_are_replaced",
    ),
    Guard(
        "agreed-cover",
        "groups are forgotten only once the replicas agree on the checkpoint that covers them",
        (
            Patch(
                "controller/ledger/state/versions.py",
                "return not checkpoint.digest or checkpoint.digest == "
                "self.digests.get(checkpoint.version)",
                "return True",
            ),
        ),
        (DIVERGED_TESTS,),
        "forgotten_once_the_replicas_agree",
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
        "full-store",
        "a report that the controller has no room for is not sent again with every new token",
        (
            Patch(
                "rollout_worker/tasks/partial_rollouts.py",
                "return self.news and self.unsent >= self.due",
                "return self.news",
            ),
        ),
        ("tests/unit/engine/test_partial_reports.py",),
        "full_store",
    ),
    Guard(
        "masked-sequences",
        "the sequences of a step leave out those whose tokens are all masked for their age",
        (
            Patch(
                "controller/ledger/views/views.py",
                "sum(trained_sequences(state, g, step.step) for g in groups)",
                "sum(g.sequences for g in groups)",
            ),
        ),
        ("tests/unit/ledger/test_token_age.py",),
        "none_of_the_steps",
    ),
    Guard(
        "score-of-most-rows",
        "a held-out score rests on more than half of the rows of its round",
        (
            Patch(
                "controller/ledger/decisions/run.py",
                "score.mean if 2 * score.count > round_.rows else None",
                "score.mean",
            ),
        ),
        ("tests/unit/ledger/test_evaluation_versions.py",),
        "without_a_version_of_most_rows",
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
        "owner",
        "only the owner of a lease may finish its task",
        (
            Patch(
                TASKS,
                "return self.leased and (self.attempt, self.owner) == (attempt, worker_id)",
                "return self.leased and self.attempt == attempt",
            ),
        ),
        (TASK_TESTS,),
    ),
    Guard(
        "company",
        "a death is charged only to a task that its owner held alone",
        (
            Patch(
                "controller/ledger/decisions/membership.py",
                "    counts = suspected and len(worker.held) == 1\n",
                "    counts = suspected\n",
            ),
        ),
        ("tests/unit/controller/test_suspects.py",),
    ),
    Guard(
        "suspect-alone",
        "a group leaves its step only for deaths in which it was computed alone",
        (
            Patch(
                "controller/ledger/decisions/rejections.py",
                "blame.deaths >= limit and blame.alone >= max(1, limit - 1)",
                "blame.deaths >= limit",
            ),
        ),
        ("tests/unit/ledger/test_rejected_groups.py",),
    ),
    Guard(
        "killer-group",
        "a death in the middle of a step is charged to the groups of the shard",
        (
            Patch(
                "controller/ledger/decisions/membership.py",
                "    condemned = blame(d, worker) if died else []\n",
                "    condemned = []\n",
            ),
        ),
        ("tests/unit/ledger/test_rejected_groups.py",),
        "kills_trainers",
    ),
    Guard(
        "left-epoch",
        "a step that a group has left goes on in a new mesh epoch",
        (
            Patch(
                "controller/ledger/decisions/rejections.py",
                "        d.emit(ev.MeshBroken(mesh.epoch, MeshEnd.GROUP_LEFT_OUT, _names(groups)))\n"
                "        d.mend_mesh(now)\n",
                "        d.settle_fleet(now)\n",
            ),
        ),
        ("tests/unit/ledger/test_rejected_groups.py",),
    ),
    Guard(
        "eval-version",
        "the score of an evaluation is of one version",
        (
            Patch(
                LEASING,
                "version = group.min_version if group.min_version == group.max_version else MIXED\n",
                "version = state.versions.version_of(task.eval_step)\n",
            ),
        ),
        ("tests/unit/ledger/test_evaluation_versions.py",),
    ),
    Guard(
        "payload-facts",
        "a payload is compared with the facts that were accepted",
        (
            Patch(
                "policy_worker/step/payload_check.py",
                "    if planned is not None and found != (planned.sequences, planned.tokens):\n",
                "    if False:\n",
            ),
        ),
        ("tests/unit/policy/test_policy_bad_groups.py",),
        "contradicts",
    ),
    Guard(
        "unsettled",
        "a buffer that an operation may still write to is not used again",
        (Patch("policy_worker/trainer.py", "if not mesh.settled:\n", "if False:\n"),),
        ("tests/unit/policy/test_policy_reduction.py",),
    ),
    Guard(
        "incarnation",
        "a process of an earlier incarnation is refused",
        (
            Patch(
                "controller/ledger/decisions/decider.py",
                "    if worker.incarnation != incarnation:\n",
                "    if False:\n",
            ),
        ),
        ("tests/unit/ledger/test_ledger_fleet.py", TASK_TESTS),
    ),
    Guard(
        "stale-group",
        "a group too old for the next step is dropped on arrival",
        (
            Patch(
                LEASING,
                "    if found := too_old(state, group, state.next_step):\n",
                "    if found := None:\n",
            ),
        ),
        (TASK_TESTS, AGE_TESTS),
    ),
    Guard(
        "stale-ready",
        "a ready group that grew too old is dropped before the step opens",
        (
            Patch(
                STEPPING,
                "        if found := too_old(s, group, step):\n",
                "        if found := None:\n",
            ),
        ),
        (TASK_TESTS, AGE_TESTS),
    ),
    Guard(
        "late-group",
        "a group is trained however long it took",
        (Patch(TOKEN_AGES, "    if s.run.trains_late:\n", "    if False:\n"),),
        ("tests/unit/ledger/test_slow_groups.py",),
    ),
    Guard(
        "oldest-lease",
        "a step takes the groups that were leased first",
        (
            Patch(
                STEPPING,
                "sorted(s.tasks.ready, key=lambda t: s.tasks.records[t].ordinal)",
                "list(s.tasks.ready)",
            ),
        ),
        (AGE_TESTS,),
    ),
    Guard(
        "slow-sample",
        "a sample that began long ago goes on with its tokens after the death of its owner",
        (
            Patch(
                "controller/ledger/views/views.py",
                "deciding = newest if state.run.trains_late else oldest",
                "deciding = oldest",
            ),
        ),
        (AGE_TESTS,),
    ),
    Guard(
        "number-of-a-lost-epoch",
        "a replica of an epoch that was lost with the end of the journal does not wait in the new one",
        (
            Patch(
                "controller/ledger/views/views.py",
                "if state_version < mesh.state_version:",
                "if False:",
            ),
        ),
        (STEP_TESTS,),
    ),
    Guard(
        "masked-totals",
        "the totals of a step leave out the tokens that are masked for their age",
        (
            Patch(
                "controller/ledger/views/views.py",
                "sum(trained_tokens(state, g, step.step) for g in groups)",
                "sum(g.tokens for g in groups)",
            ),
        ),
        (AGE_TESTS,),
    ),
    Guard(
        "masked-tokens",
        "a token older than max_token_age has no weight in the loss",
        (
            Patch(
                "policy_worker/step/gradients.py",
                "batch.trained * (age <= spec.token_age).astype(np.float32)",
                "batch.trained",
            ),
        ),
        ("tests/unit/policy/test_policy_gradients.py",),
        "beyond_the_age",
    ),
    Guard(
        "stale-weights",
        "an engine never goes back to an older version",
        (
            Patch(
                "paceline/weights/weight_transfer.py",
                "    if version <= newer_than:\n",
                "    if False:\n",
            ),
        ),
        ("tests/process/weights/test_weights_transfer.py",),
        "not_newer",
    ),
    Guard(
        "cursor",
        "after a crash the data goes on at the first row that was not dispatched",
        (
            Patch(
                LEASING,
                "    cursor = state.tasks.cursor\n    new = range(",
                "    cursor = state.tasks.cursor + state.terms - 1\n    new = range(",
            ),
        ),
        (
            "tests/unit/simulator/test_crash_points.py::"
            "test_no_row_is_skipped_or_trained_twice_at_any_crash_and_resume_point[0]",
        ),
    ),
    Guard(
        "replay-lr",
        "a step that is trained again has the learning rate and the token age that it had",
        (
            Patch(
                STEPPING,
                "    terms = s.steps.terms_of(step)\n",
                "    terms = None\n",
            ),
        ),
        ("tests/unit/ledger/test_settings.py",),
    ),
    Guard(
        "kept-groups",
        "a step that opens again without a rejected group keeps its other groups",
        (
            Patch(
                "controller/ledger/decisions/rejections.py",
                "[:1024], kept=True))",
                "[:1024]))",
            ),
        ),
        ("tests/unit/ledger/test_settings.py",),
        "keeps_its_terms",
    ),
    Guard(
        "missing-group",
        "a step that misses a group gets a new one, although later steps have theirs",
        (
            Patch(
                LEASING,
                "    return max(rest, missing - len(state.tasks.ready) - state.tasks.leased)\n",
                "    return rest\n",
            ),
        ),
        ("tests/unit/ledger/test_rejected_groups.py",),
        "misses_a_group",
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
        "rows-after-upgrade",
        "rows that an earlier release did not record excuse none that are skipped after it",
        (
            Patch(
                "controller/ledger/views/coverage_report.py",
                "    upgrade = min(max(start, state.tasks.coverage.recorded_from), stop)\n",
                "    upgrade = stop\n",
            ),
        ),
        ("tests/unit/ledger/test_coverage.py",),
        "after_an_upgrade",
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
    Guard(
        "old-file",
        "a new leader with an unchanged config file keeps what paceline set has changed",
        (
            Patch(
                "controller/ledger/decisions/settings.py",
                "    edited = s.settings.edited(c.settings)\n",
                "    edited = dict(c.settings)\n",
            ),
        ),
        ("tests/unit/ledger/test_settings.py",),
    ),
    Guard(
        "checksum",
        "weights damaged on the way are refused",
        (
            Patch(
                "paceline/weights/weight_transfer.py",
                "        if found != wanted:\n",
                "        if False:\n",
            ),
        ),
        ("tests/process/weights/test_weights_transfer.py",),
        "damaged",
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="names of guards; results of others are kept")
    parser.add_argument("--table", action="store_true", help="write the page's table only")
    parser.add_argument("--check", action="store_true", help="only look for the guards' lines")
    args = parser.parse_args()
    if args.check:
        found = [missing(REPOSITORY, guard) for guard in GUARDS]
        sys.exit("\n".join(filter(None, found)) or 0)
    if args.table:
        write_table(json.loads(OUT.read_text()))
        return
    wanted = set(filter(None, args.only.split(",")))
    if unknown := wanted - {g.name for g in GUARDS}:
        sys.exit(f"--only: unknown {', '.join(sorted(unknown))}")
    rows = []
    with tempfile.TemporaryDirectory(prefix="paceline-mutation-") as name:
        tree = Path(name)
        copy_tree(tree)
        for guard in GUARDS:
            if wanted and guard.name not in wanted:
                continue
            row = judge(tree, guard)
            rows.append(row)
            verdict = "red" if row["red"] else "NOT NOTICED"
            print(f"{guard.name:<14} {verdict:<12} {', '.join(row['failed'][:3])}", flush=True)
    known = {row["guard"]: row for row in json.loads(OUT.read_text())} if OUT.exists() else {}
    known.update((row["guard"], row) for row in rows)
    merged = [known[guard.name] for guard in GUARDS if guard.name in known]
    OUT.write_text(json.dumps(merged, indent=1) + "\n")
    write_table(merged)
    sys.exit(0 if all(row["red"] for row in rows) else 1)


def copy_tree(tree: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc", "results", "runs")
    for name in COPIED:
        source = REPOSITORY / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=ignored)
        else:
            shutil.copy2(source, tree / name)


def missing(tree: Path, guard: Guard) -> str:
    """Why the guard cannot be removed from ``tree``; empty if it can."""
    files = [p.file for p in guard.patches if (tree / p.file).read_text().count(p.old) != 1]
    return f"{guard.name}: its lines are not (once) in {', '.join(files)}" if files else ""


def judge(tree: Path, guard: Guard) -> dict[str, object]:
    """Runs the guard's tests without and with the guard removed."""
    before, _ = run_tests(tree, guard)
    if before != 0:
        raise SystemExit(f"{guard.name}: its tests fail on the unchanged tree")
    if why := missing(tree, guard):
        raise SystemExit(why)
    originals = {patch.file: (tree / patch.file).read_text() for patch in guard.patches}
    try:
        for patch in guard.patches:
            path = tree / patch.file
            path.write_text(path.read_text().replace(patch.old, patch.new))
        status, failed = run_tests(tree, guard)
    finally:
        for file, text in originals.items():
            (tree / file).write_text(text)
    return {"guard": guard.name, "what": guard.what, "red": status == 1, "failed": failed}


def run_tests(tree: Path, guard: Guard) -> tuple[int, list[str]]:
    """(exit status of pytest, names of the tests that failed)."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *guard.tests]
    if guard.choose:
        command += ["-k", guard.choose]
    done = subprocess.run(
        command,
        cwd=tree,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        # The copy must win over an installed project, in every process that a test starts.
        env={**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"},
    )
    failed = re.findall(r"^(?:FAILED|ERROR) \S+::(\S+)", done.stdout, re.MULTILINE)
    return done.returncode, failed


def write_table(rows: list[dict[str, object]]) -> None:
    lines = ["| guard removed | tests | first of those that fail |", "|---|---|---|"]
    for row in rows:
        failed = row["failed"]
        assert isinstance(failed, list)
        shown = f"`{failed[0]}`" if failed else "none"
        more = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
        verdict = "red" if row["red"] else "**green**"
        lines.append(f"| {row['what']} | {verdict} | {shown}{more} |")
    head, rest = PAGE.read_text().split(BEGIN)
    tail = rest.split(END)[1]
    PAGE.write_text(head + BEGIN + "\n" + "\n".join(lines) + "\n" + END + tail)
    print(f"table written to {PAGE}")


if __name__ == "__main__":
    main()
