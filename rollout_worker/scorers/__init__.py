"""Scorers as a rollout worker sees them: who lives, calls with retries, and checked replies."""
