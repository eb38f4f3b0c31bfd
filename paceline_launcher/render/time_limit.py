"""Time limit of a job, as Slurm writes it."""

from __future__ import annotations

import math
import re

from paceline.errors import BadInput

NO_LIMIT = ("0", "UNLIMITED", "INFINITE")
"""As Slurm reads them."""


def minutes(text: str) -> int | None:
    """Minutes of a time limit as Slurm writes it: D-HH:MM:SS and its shorter forms; None for no
    limit. Raises BadInput."""
    if text.upper() in NO_LIMIT:
        return None
    long = re.fullmatch(r"(\d+)-(\d+)(?::(\d+))?(?::(\d+))?", text)
    short = re.fullmatch(r"(?:(\d+):)?(\d+):(\d+)|(\d+)", text)
    if long:
        days, hours, minute, seconds = (int(part or 0) for part in long.groups())
    elif short:
        days = 0
        hours, minute, seconds = int(short[1] or 0), int(short[2] or short[4]), int(short[3] or 0)
    else:
        raise BadInput(f"--time-limit {text}: write D-HH:MM:SS, HH:MM:SS or minutes")
    return max(1, (days * 24 + hours) * 60 + minute + math.ceil(seconds / 60))
