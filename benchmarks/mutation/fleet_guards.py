"""Guards of the run, its members and its evaluations in the ledger."""

from __future__ import annotations

from benchmarks.mutation.guard import Guard, Patch

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
        "score-of-most-rows",
        "a held-out score rests on more than half of the rows of its round",
        (
            Patch(
                "controller/ledger/decisions/run.py",
                "scores is not None and 2 * count > of.rows",
                "scores is not None",
            ),
        ),
        ("tests/unit/ledger/test_evaluation_versions.py",),
        "without_a_version_of_most_rows",
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
        "former-senders",
        "weights of an outvoted replica are taken back from receivers that have another source by now",
        (
            Patch(
                "controller/ledger/state/fleet.py",
                "        self.former.setdefault(link.publisher, {})[link.receiver] = None\n",
                "",
            ),
        ),
        ("tests/unit/ledger/test_weight_sources.py",),
        "has_moved or does_not_hide",
    ),
    Guard(
        "share-of-receivers",
        "no replica sends weights to more than its share of the receivers",
        (
            Patch(
                "controller/ledger/decisions/links.py",
                "    over = [w for w in sources if fleet.sends_to(w.worker_id) > share]\n",
                "    over: list[Worker] = []\n",
            ),
        ),
        ("tests/unit/ledger/test_weight_sources.py",),
        "takes_its_share or newest_state",
    ),
)
