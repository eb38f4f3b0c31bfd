"""Guards of policy replicas and rollout workers."""

from __future__ import annotations

from benchmarks.mutation.guard import Guard, Patch

GUARDS = (
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
        "scratch",
        "gradients are reduced in a scratch copy",
        (
            Patch(
                "policy_worker/trainer.py",
                "        self._on_all_ranks(reduce)\n        self._norms = ",
                "        try:\n"
                "            self._on_all_ranks(reduce)\n"
                "        finally:\n"
                "            for part, parameter in zip(\n"
                "                self.gradients.views(scratch), self.gradients.parameters\n"
                "            ):\n"
                "                if parameter.grad is not None:\n"
                "                    parameter.grad.copy_(part)\n"
                "        self._norms = ",
            ),
        ),
        ("tests/process/policy/test_policy_step_transaction.py",),
        "fails_halfway or (lost_in_the_all_reduce and die)",
    ),
    Guard(
        "payload-facts",
        "a payload is compared with the facts that were accepted",
        (
            Patch(
                "policy_worker/step/payload_check.py",
                "    if accepted.sequences and found != (accepted.sequences, accepted.tokens):\n",
                "    if False:\n",
            ),
        ),
        ("tests/unit/policy/test_policy_bad_groups.py",),
        "contradicts",
    ),
    Guard(
        "payload-digest",
        "a payload is compared with the digest that was submitted",
        (
            Patch(
                "policy_worker/step/payload_check.py",
                "    if accepted.digest and payload_digest(payload) != accepted.digest:\n",
                "    if False:\n",
            ),
        ),
        ("tests/unit/policy/test_policy_bad_groups.py",),
        "other_bytes",
    ),
    Guard(
        "payload-other-facts",
        "facts that are not those of the payload are found out",
        (
            Patch(
                "policy_worker/step/payload_check.py",
                "    if accepted.facts and (why := _other_facts(group, accepted)):\n",
                "    if False:\n",
            ),
        ),
        ("tests/unit/policy/test_policy_bad_groups.py",),
        "other_facts",
    ),
    Guard(
        "unsettled",
        "a buffer that an operation may still write to is not used again",
        (Patch("policy_worker/trainer.py", "if not mesh.settled:\n", "if False:\n"),),
        ("tests/unit/policy/test_policy_reduction.py",),
    ),
    Guard(
        "masked-tokens",
        "a token older than max_token_age has no weight in the loss",
        (
            Patch(
                "policy_worker/objectives/objective.py",
                "batch.trained * (age <= totals.token_age).astype(np.float32)",
                "batch.trained",
            ),
        ),
        ("tests/unit/policy/test_policy_gradients.py",),
        "beyond_the_age",
    ),
    Guard(
        "whole-groups",
        "a row holds all completions of a group whose objective compares them",
        (
            Patch(
                "policy_worker/rows/row_shares.py",
                "whole_groups=self.objective.whole_groups)",
                "whole_groups=False)",
            ),
        ),
        ("tests/unit/policy/test_preference_objectives.py",),
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
        "checksum",
        "weights damaged on the way are refused",
        (
            Patch(
                "paceline/weights/share_reception.py",
                "    if checksum(bucket) != expected:\n",
                "    if False:\n",
            ),
        ),
        ("tests/process/weights/test_weights_transfer.py",),
        "damaged",
    ),
    Guard(
        "mixed-weights",
        "a transfer goes on with the weights that it began with, or begins anew",
        (
            Patch(
                "paceline/weights/weight_sending.py",
                "    return fingerprint([source.checksum(i) for i in ask.have]) == ask.have_fingerprint\n",
                "    return True\n",
            ),
        ),
        ("tests/process/weights/test_weight_relays.py",),
        "not_mixed",
    ),
    Guard(
        "tree-of-relays",
        "a relay hands nothing on that was taken back",
        (
            Patch(
                "rollout_worker/weight_relay.py",
                "        return held if held is not None and held.tree >= link.tree else None\n",
                "        return held\n",
            ),
        ),
        ("tests/process/weights/test_weight_relays.py",),
        "taken_back",
    ),
    Guard(
        "failed-staging",
        "a lack of memory for weights that arrive counts as a failed load",
        (
            Patch(
                "rollout_worker/weight_receiver.py",
                "            self._on_staging_failure(error)\n",
                "            pass\n",
            ),
        ),
        ("tests/process/rollout/test_failed_loads.py",),
        "ends_and_is_named",
    ),
    Guard(
        "idle-copies",
        "a replica that feeds nobody keeps no copy of the weights",
        (
            Patch(
                "policy_worker/publish_and_checkpoint.py",
                "                self._trainer.free_published()\n",
                "",
            ),
        ),
        ("tests/unit/policy/test_publishing_replicas.py",),
    ),
)
