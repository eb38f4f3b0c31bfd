"""Guards of tasks, leases and token ages in the ledger."""

from __future__ import annotations

from benchmarks.mutation.guard import Guard, Patch

LEASING = "controller/ledger/decisions/leases.py"
TASKS = "controller/ledger/state/tasks.py"
TOKEN_AGES = "controller/ledger/state/token_ages.py"
TASK_TESTS = "tests/unit/ledger/test_ledger_tasks.py"
AGE_TESTS = "tests/unit/ledger/test_token_age.py"
STEP_TESTS = "tests/unit/ledger/test_ledger_steps.py"

GUARDS = (
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
        "eval-version",
        "the score of an evaluation is of one version",
        (
            Patch(
                "controller/ledger/state/evals.py",
                "return MIXED if oldest != newest or oldest in self.doubtful else oldest\n",
                "return MIXED if oldest in self.doubtful else oldest\n",
            ),
        ),
        ("tests/unit/ledger/test_evaluation_versions.py",),
    ),
    Guard(
        "hacking-once",
        "a run warns of an exploited reward when it begins, not at every evaluation",
        (
            Patch(
                "controller/ledger/decisions/held_out.py",
                "        if name not in known:\n",
                "        if True:\n",
            ),
        ),
        ("tests/unit/ledger/test_reward_hacking_events.py",),
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
        "late-group",
        "a group is trained however long it took",
        (Patch(TOKEN_AGES, "    if s.run.trains_late:\n", "    if False:\n"),),
        ("tests/unit/ledger/test_slow_groups.py",),
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
)
