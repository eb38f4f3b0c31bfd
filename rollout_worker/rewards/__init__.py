"""Reward functions, built-in and the user's, and the pool of processes that runs them."""
