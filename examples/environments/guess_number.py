"""The model guesses a number and is told whether it is higher or lower, turn by turn.

    prompt ──► "50" ──► higher ──► "75" ──► lower ──► "62" ──► ...

A row may have ``low`` and ``high`` (default 1 and 100); the number is its answer where it has one,
else drawn by the task's seed: the same for all samples of a group, which are compared. Two rewards:
``solved``, 1 where it was found, and ``speed``, half the share of turns that were left.
"""

from __future__ import annotations

import random
import re

from rollout_worker.environments.base import EnvironmentTask, Said, Sample, TranscriptFull

HIGHER, LOWER, UNCLEAR = "higher", "lower", "say one number"
_NUMBER = re.compile(r"-?\d{1,12}")
_SPEED = 0.5


async def guess_number(task: EnvironmentTask, sample: Sample) -> dict[str, float]:
    secret = number_of(task)
    said: Said = task.prompt
    for turn_number in range(1, task.max_turns + 1):
        try:
            turn = await sample(said)
        except TranscriptFull:
            break
        guess = last_number(turn.text)
        if guess == secret:
            left = (task.max_turns - turn_number) / task.max_turns
            return {"solved": 1.0, "speed": _SPEED * left}
        said = reply(task, UNCLEAR if guess is None else HIGHER if guess < secret else LOWER)
    return {"solved": 0.0, "speed": 0.0}


def number_of(task: EnvironmentTask) -> int:
    """Raises ValueError for a row whose numbers are none."""
    if task.answer is not None:
        return int(task.answer)
    low, high = int(task.row.get("low", 1)), int(task.row.get("high", 100))
    return random.Random(f"guess {task.group_seed}").randint(low, high)


def last_number(text: str) -> int | None:
    found = _NUMBER.findall(text)
    return int(found[-1]) if found else None


def reply(task: EnvironmentTask, hint: str) -> Said:
    """A message of the user in a chat, a line of its own in plain text."""
    if isinstance(task.prompt, str):
        return f"\n{hint}\n"
    return [{"role": "user", "content": hint}]
