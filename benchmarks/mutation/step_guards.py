"""Guards of steps, votes, checkpoints and settings in the ledger."""

from __future__ import annotations

from benchmarks.mutation.guard import Guard, Patch

STEPPING = "controller/ledger/decisions/steps.py"
TASK_TESTS = "tests/unit/ledger/test_ledger_tasks.py"
AGE_TESTS = "tests/unit/ledger/test_token_age.py"
DIVERGED_TESTS = "tests/unit/ledger/test_diverged_checkpoints.py"
STEP_TESTS = "tests/unit/ledger/test_ledger_steps.py"

GUARDS = (
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
)
