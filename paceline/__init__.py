"""Paceline: asynchronous, fault-tolerant reinforcement learning for language models."""

from paceline.cuda_extensions import hide_cuda_extensions

# Here, because many modules import transformers, and all of them import this package first.
hide_cuda_extensions()
