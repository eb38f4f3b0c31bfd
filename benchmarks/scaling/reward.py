"""A reward that differs between completions and takes no time."""

from __future__ import annotations


def first_digit(completion: str) -> float:
    """0 to 1; 0 if the completion does not begin with a digit."""
    return int(completion[0]) / 9 if completion[:1].isdigit() else 0.0
