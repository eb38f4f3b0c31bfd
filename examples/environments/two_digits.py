"""An agent with a tool and a sub-agent, which compact their histories: a tiny model learns it from
nothing on a CPU.

    python -m examples.environments.two_digits

Two digits are hidden. The agent looks for the first one and its sub-agent for the second, side by
side, in conversations of their own: each guesses, and a tool says "higher" or "lower".

    agent        ?  ──► "2" ──► higher ──► "6" ──► lower
      compacted  3 5?  ──► "4"                    the history is the range that is left
    sub-agent    ??  ──► "7" ──► lower ──► "1" ──► higher
      compacted  2 6?  ──► "3" ──► higher ──► "5"

So a sample has up to four sequences, which have its reward in common. Someone who ignores tool and
notes and never repeats a guess gets 0.5 on average; halving the range gets 1.1. What the model gets
is in docs/environments.md, measured by benchmarks/two_digits.py.
"""

from __future__ import annotations

import asyncio
import random
import sys

from examples.environments.guess_number import HIGHER, LOWER, UNCLEAR, last_number
from rollout_worker.environments.base import EnvironmentTask, Sample

HISTORY = 2  # Guesses after which an agent goes on from its notes
SPEED = 0.5


async def two_digits(task: EnvironmentTask, sample: Sample) -> dict[str, float]:
    first, second = random.Random(f"two {task.group_seed}").choices(range(10), k=2)
    guesses = task.max_turns // 2
    agent, helper = await asyncio.gather(
        search(sample, str(task.prompt), first, guesses),
        search(sample.branch(), "??", second, guesses),
    )
    return {"agent": agent / 2, "sub_agent": helper / 2}


async def search(agent: Sample, opening: str, secret: int, guesses: int) -> float:
    """Up to 1 + SPEED for a digit that is found at once, and 0 for one that is not found."""
    low, high, said = 0, 9, opening
    for number in range(guesses):
        if number and number % HISTORY == 0:
            agent, said = agent.branch(), f"{low} {high}?"
        guess = last_number((await agent(said)).text)
        if guess == secret:
            return 1.0 + SPEED * (guesses - number - 1) / guesses
        hint = UNCLEAR
        if guess is not None and guess < secret:
            hint, low = HIGHER, max(low, guess + 1)
        elif guess is not None:
            hint, high = LOWER, min(high, guess - 1)
        said = f"\n{hint}\n"
    return 0.0


if __name__ == "__main__":
    from examples.environments import guess_digit

    sys.exit(guess_digit.main("two_digits.toml"))
