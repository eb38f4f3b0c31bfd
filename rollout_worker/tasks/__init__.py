"""Tasks of a rollout worker: leasing, group production, submission."""
