"""Runs a group's reward functions. Used in the pool's processes and, without a pool, in the worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.rpc.wire_limits import usable_reward
from rollout_worker.failures import AttemptFailed
from rollout_worker.rewards.functions import Reward


class ScoringFailed(AttemptFailed):
    """This attempt has no reward. ``reason``: reward_error, reward_timeout or reward_crashed."""


@dataclass(frozen=True, slots=True)
class Job:
    """A group to score. Everything in it can be written as JSON."""

    prompt: str
    completions: list[str]
    answer: Any
    row: Mapping[str, Any]
    shared: Mapping[str, Any]
    """Further keyword arguments, the same for all completions."""
    each: Mapping[str, list[Any]]
    """Further keyword arguments with a value for each completion; singular in the call."""


Calling = Callable[[bool], None]
Components = list[dict[str, float]]
"""For each completion, the value of each function by component name."""


async def score(
    rewards: Sequence[Reward],
    job: Job,
    *,
    timeout_s: float | None,
    calling: Calling = lambda entered: None,
) -> Components:
    """Every function on every completion. Coroutine functions run at once for a whole group.

    ``timeout_s`` bounds each wait of a coroutine function; ``calling`` is called before (True) and
    after (False) each call of any other, which only another process can stop. Raises ScoringFailed.
    """
    values: Components = [{} for _ in job.completions]
    for reward in rewards:
        if reward.batch:
            column = await _batch(reward, job, timeout_s, calling)
        elif reward.waits:
            column = await _together(reward, job, timeout_s)
        else:
            each = range(len(job.completions))
            column = [_call(reward, _single(job, index), calling) for index in each]
        if len(column) != len(values):
            raise ScoringFailed(
                "reward_error",
                f"{reward.component} returned {len(column)} values for {len(values)} completions",
            )
        for target, value in zip(values, column, strict=True):
            target[reward.component] = _number(reward, value)
    return values


async def _batch(reward: Reward, job: Job, timeout_s: float | None, calling: Calling) -> list[Any]:
    arguments = {
        "prompt": job.prompt,
        "completions": list(job.completions),
        "answer": job.answer,
        "row": job.row,
        **job.shared,
        **{f"{name}s": values for name, values in job.each.items()},
    }
    result = _call(reward, arguments, calling)
    if reward.waits:
        result = await _limited(reward, result, timeout_s)
    try:
        return list(result)
    except TypeError:
        raise ScoringFailed(
            "reward_error", f"{reward.component} returned {type(result).__name__}, not a list"
        ) from None


async def _together(reward: Reward, job: Job, timeout_s: float | None) -> list[Any]:
    calls = [
        asyncio.ensure_future(_limited(reward, _call(reward, _single(job, index)), timeout_s))
        for index in range(len(job.completions))
    ]
    try:
        return list(await asyncio.gather(*calls))
    finally:
        for call in calls:
            call.cancel()


def _single(job: Job, index: int) -> dict[str, Any]:
    return {
        "prompt": job.prompt,
        "completion": job.completions[index],
        "answer": job.answer,
        "row": job.row,
        **job.shared,
        **{name: values[index] for name, values in job.each.items()},
    }


def _call(
    reward: Reward, arguments: Mapping[str, Any], calling: Calling = lambda entered: None
) -> Any:
    # The user's function may raise anything; it is the attempt that fails, not the worker.
    calling(True)
    try:
        return reward.call(**reward.select(arguments))
    except _ITS_OWN as error:
        raise _failed(reward, error) from error
    finally:
        calling(False)


_ITS_OWN = (Exception, asyncio.CancelledError, SystemExit)
"""What a user's function may raise without meaning this process."""


async def _limited(reward: Reward, waiting: Any, timeout_s: float | None) -> Any:
    try:
        async with asyncio.timeout(timeout_s) as limit:
            return await waiting
    except TimeoutError as error:
        if limit.expired():
            raise ScoringFailed(
                "reward_timeout", f"{reward.component} took longer than {timeout_s:g} s"
            ) from None
        raise _failed(reward, error) from error
    except _ITS_OWN as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        raise _failed(reward, error) from error


def _failed(reward: Reward, error: BaseException) -> ScoringFailed:
    line = (str(error).strip() or "no message").splitlines()[0]
    return ScoringFailed("reward_error", f"{reward.component}: {type(error).__name__}: {line}")


def _number(reward: Reward, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ScoringFailed(
            "reward_error", f"{reward.component} returned {value!r:.80}, not a number"
        ) from None
    if not usable_reward(number):
        raise ScoringFailed("reward_error", f"{reward.component} returned {number}")
    return number
