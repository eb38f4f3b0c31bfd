"""The demo's reward: a function of one's own, as a configuration names it."""

from __future__ import annotations


def sorted_exactly(completion: str, answer: str, finish_reason: str, token_count: int) -> float:
    """1 for exactly the answer and the end of the sequence, else 0.

    A character is a token. The count tells what the text does not: special tokens that were sampled
    in between are left out of it, and the end of the sequence is a token of its own.
    """
    ended = finish_reason == "stop" and token_count == len(answer) + 1
    return float(ended and completion == answer)
