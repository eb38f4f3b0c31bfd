"""Rewards that are built in, beside format:REGEX: the one list of their names. All compare with the
row's answer."""

from __future__ import annotations

from collections.abc import Mapping

BUILT_IN_REWARDS: Mapping[str, str] = {
    "exact_match": "exact_match",
    "math_verify": "math_verify",
    "math_boxed": "math_boxed",
    "math_boxed:intervals": "math_boxed_intervals",
}
"""Name in the configuration, and name of the function among the rewards of the rollout worker."""
