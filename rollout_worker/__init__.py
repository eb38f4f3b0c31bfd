"""The rollout worker: engines, rewards, environments, and leasing of tasks."""
