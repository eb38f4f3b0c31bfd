"""Rewards: built-in ones, the user's own, and the pool of processes that runs them."""
