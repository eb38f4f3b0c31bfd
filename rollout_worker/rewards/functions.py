"""Reward functions by their names in the config, and their execution for a group, in a scoring
process or in the worker. Imports no torch: scoring processes use it."""

import asyncio
import inspect
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from paceline.config.sections.inputs import BUILT_IN_REWARDS
from paceline.config.sections.scorers import named_scorer
from paceline.errors import BadInput, plural
from paceline.payloads.group_limits import usable_reward
from paceline.process.threads import replace_executor
from paceline.user_code import NotFound, find, raised_in
from rollout_worker.rewards import builtin

_FORMAT = "format:"


class RewardError(BadInput):
    """A reward function cannot be used."""


@dataclass(frozen=True, slots=True)
class Reward:
    """One function of the weighted sum. ``component``: the name of its value in reports."""

    component: str
    weight: float
    call: Callable[..., Any]
    accepts: frozenset[str] | None  # Keyword arguments to pass; None: all
    batch: bool  # Takes ``completions`` of a whole group and returns a value for each
    waits: bool  # A coroutine function

    def select(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        if self.accepts is None:
            return dict(arguments)
        return {name: value for name, value in arguments.items() if name in self.accepts}


def weights_of(functions: Sequence[str] | Mapping[str, float]) -> dict[str, float]:
    """Weight of each function; 1 for functions of a plain list."""
    given = functions if isinstance(functions, Mapping) else dict.fromkeys(functions, 1.0)
    return {name: float(weight) for name, weight in given.items()}


def load(functions: Sequence[str] | Mapping[str, float]) -> list[Reward]:
    """Imports every function; scorers are none. Raises RewardError with the function's name."""
    rewards: list[Reward] = []
    for name, weight in weights_of(functions).items():
        if named_scorer(name) is not None:
            continue
        taken = {reward.component for reward in rewards}
        component = base = (
            "format" if name.startswith(_FORMAT) else re.sub(r"[^A-Za-z0-9_.:/-]", "_", name)[-64:]
        )
        for number in range(2, len(taken) + 3):
            if component not in taken:
                break
            component = f"{base[:60]}-{number}"
        rewards.append(_describe(name, component, weight, _find(name)))
    return rewards


def _find(name: str) -> Callable[..., Any]:
    if name in BUILT_IN_REWARDS:
        return cast(Callable[..., Any], getattr(builtin, BUILT_IN_REWARDS[name]))
    if name.startswith(_FORMAT):
        try:
            return builtin.format_reward(name.removeprefix(_FORMAT))
        except re.error as error:
            raise RewardError(f"reward {name!r}: not a regular expression: {error}") from None
    try:
        return cast(Callable[..., Any], find(name))
    except NotFound as error:
        raise RewardError(f"reward {name!r}: {error}") from error


def _describe(name: str, component: str, weight: float, call: Callable[..., Any]) -> Reward:
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):
        raise RewardError(f"reward {name!r}: its parameters cannot be read") from None
    names = frozenset(p.name for p in parameters if p.kind is not p.VAR_KEYWORD)
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if any(p.kind is p.POSITIONAL_ONLY for p in parameters):
        raise RewardError(f"reward {name!r}: parameters must be usable by name")
    batch = "completions" in names
    if not batch and "completion" not in names and not open_ended:
        raise RewardError(
            f"reward {name!r}: it takes neither 'completion' nor 'completions' "
            f"(see docs/rewards.md for the parameters it may take)"
        )
    waits = inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(
        getattr(call, "__call__", None)  # noqa: B004
    )
    return Reward(component, weight, call, None if open_ended else names, batch, waits)


class AttemptFailed(Exception):
    """The attempt makes no group: the worker goes on, and the task is returned with a reason.
    ``reason``: what the ledger counts, for example reward_timeout. A failed attempt never becomes a
    reward of zero. ``trace``: traceback of the user's own frames; ``number``: of the completion
    that it failed on, None if that is not known."""

    def __init__(
        self, reason: str, detail: str, *, trace: str = "", number: int | None = None
    ) -> None:
        super().__init__(detail)
        self.reason, self.trace, self.number = reason, trace, number
        self.job: Job | None = None  # What rewards were asked to score


class ScoringFailed(AttemptFailed):
    """The attempt has no reward. ``reason``: reward_error, reward_timeout or reward_crashed."""


@dataclass(frozen=True, slots=True)
class Job:
    """A group to score. It can be written as JSON."""

    shared: Mapping[str, Any]
    """Keyword arguments that are the same for all completions: prompt, answer, row, ..."""
    each: Mapping[str, list[Any]]
    """Keyword arguments with a value for each completion: completion, finish_reason, ... Functions
    of a whole group get the lists, by the plural of these names."""
    timeout_s: float | None = None
    """reward.timeout_s of this task; None: that of the worker's own configuration."""

    def __len__(self) -> int:
        return len(self.each["completion"])

    def arguments(self, index: int) -> dict[str, Any]:
        return {**self.shared, **{name: values[index] for name, values in self.each.items()}}

    def group_arguments(self) -> dict[str, Any]:
        return {**self.shared, **{f"{name}s": list(values) for name, values in self.each.items()}}


Calling = Callable[[bool], None]
Components = list[dict[str, float]]
"""For each completion, the value of each function by component name."""
Values = list[dict[str, float | list[float]]]
"""The same, with a list of numbers from a function that rewards turns or tokens."""


async def score(
    rewards: Sequence[Reward],
    job: Job,
    *,
    timeout_s: float | None,
    calling: Calling = lambda entered: None,
) -> Values:
    """Calls every function on every completion; coroutine functions concurrently for a group.
    ``timeout_s`` bounds each wait of a coroutine function. ``calling`` is called before (True) and
    after (False) each call of another function, which only another process can stop. Raises
    ScoringFailed."""
    values: Values = [{} for _ in range(len(job))]
    for reward in rewards:
        if reward.batch:
            column = await _batch(reward, job, timeout_s, calling)
        elif reward.waits:
            column = await _together(reward, job, timeout_s)
        else:
            column = [_call(reward, job.arguments(i), calling, i) for i in range(len(job))]
        if len(column) != len(job):
            raise _bad(
                reward,
                f"returned {plural(len(column), 'value')} for {plural(len(job), 'completion')}",
            )
        for index, value in enumerate(column):
            values[index][reward.component] = _value(value, job, index, reward)
    return values


def _value(value: Any, job: Job, index: int, reward: Reward) -> float | list[float]:
    refusal = partial(_bad, reward, number=index)
    if not isinstance(value, list | tuple):
        return number_of(value, refusal)
    if transcript := job.each.get("transcript"):
        places, what = sum(entry["from"] == "model" for entry in transcript[index]), "turns"
    else:
        places, what = job.each["token_count"][index], "tokens"
    if len(value) != places:
        raise refusal(
            f"returned a list of {plural(len(value), 'reward')} for {places} {what} of the model"
        )
    return [number_of(one, refusal) for one in value]


async def _batch(reward: Reward, job: Job, timeout_s: float | None, calling: Calling) -> list[Any]:
    result = _call(reward, job.group_arguments(), calling)
    if reward.waits:
        result = await _limited(reward, result, timeout_s)
    try:
        # The keys of a dictionary, a set in some order and letters are no rewards.
        if not isinstance(result, Mapping | Set | str | bytes):
            return list(result)
    except TypeError:
        pass
    except BaseException as error:
        raise _raised(reward, error) from error
    raise _bad(reward, f"returned {type(result).__name__}, not a list")


async def _together(reward: Reward, job: Job, timeout_s: float | None) -> list[Any]:
    calls = [
        asyncio.ensure_future(
            _limited(reward, _call(reward, job.arguments(i), number=i), timeout_s, i)
        )
        for i in range(len(job))
    ]
    try:
        return list(await asyncio.gather(*calls))
    finally:
        for call in calls:
            call.cancel()


def _call(
    reward: Reward,
    arguments: Mapping[str, Any],
    calling: Calling = lambda entered: None,
    number: int | None = None,
) -> Any:
    # The user's function may raise anything, SystemExit and exceptions that are no Exception
    # included: then the attempt fails, not the worker.
    calling(True)
    try:
        return reward.call(**reward.select(arguments))
    except BaseException as error:
        raise _raised(reward, error, number) from error
    finally:
        calling(False)


async def _limited(
    reward: Reward, waiting: Any, timeout_s: float | None, number: int | None = None
) -> Any:
    try:
        async with asyncio.timeout(timeout_s) as limit:
            return await waiting
    except TimeoutError as error:
        if limit.expired():
            # It may wait for a thread that never returns.
            replace_executor(asyncio.get_running_loop())
            detail = f"{reward.component} took longer than {timeout_s:g} s"
            raise ScoringFailed("reward_timeout", detail, number=number) from None
        raise _raised(reward, error, number) from error
    except BaseException as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        raise _raised(reward, error, number) from error


def number_of(
    value: Any, refusal: Callable[[str], AttemptFailed], allowed: str = "a number"
) -> float:
    """A reward as a number. Raises ``refusal(detail)`` for a value that cannot be one."""
    # The value's class may be the user's: it may raise anything, also when it is printed.
    try:
        number = float(value)
    except BaseException:
        try:
            printed = f"{value!r:.80}"
        except BaseException:
            printed = f"a {type(value).__name__}"
        raise refusal(f"returned {printed}, not {allowed}") from None
    if not usable_reward(number):
        raise refusal(f"returned the reward {number}")
    return number


def _bad(
    reward: Reward, detail: str, *, trace: str = "", number: int | None = None
) -> ScoringFailed:
    return ScoringFailed("reward_error", f"{reward.component} {detail}", trace=trace, number=number)


def _raised(reward: Reward, error: BaseException, number: int | None = None) -> ScoringFailed:
    line, trace = raised_in(error, __file__)
    return _bad(reward, f"raised {line}", trace=trace, number=number)
