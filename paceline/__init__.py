"""Paceline: asynchronous, fault-tolerant reinforcement learning for language models."""
