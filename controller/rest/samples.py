"""Groups of samples: the ledger's facts of each, and the completions in its payload or, once that
is deleted, in the run's archive. Also without a controller, from Redis and the run directory."""

import asyncio
import contextlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import Query
from google.protobuf.message import DecodeError
from pydantic import BeforeValidator
from redis.exceptions import RedisError

from controller.export.group_content import FillTexts, content_of, facts_of
from controller.ledger.enums import Kind
from controller.ledger.state.state import State
from controller.ledger.state.tasks import Task
from controller.ledger.views import views
from controller.ledger.views.group_views import step_of_task
from controller.rest.schemas import GroupReply, GroupsReply, GroupSummary, Problem
from controller.store.journal import Journal
from controller.store.ledger_follower import LedgerFollower
from controller.store.redis_keys import Keys
from controller.store.stores import urls_of
from paceline.config.schema import Config
from paceline.ids import Step, TaskId
from paceline.masking import masked
from paceline.observe.samples import ArchiveReader
from paceline.payloads.open_store import open_payloads
from paceline.payloads.store import PayloadStore
from paceline.redis.client import connect
from paceline.redis.server import NoRedis
from paceline.token_texts import TextDecoder

MOST_STEP = 1 << 53


def _whole(text: object) -> object:
    """Pydantic reads "0.0" as 0, which the published schema does not allow."""
    if isinstance(text, str) and not re.fullmatch(r"-?[0-9]+", text):
        raise ValueError("give a whole number, such as 12")
    return text


WholeNumber = Annotated[int, BeforeValidator(_whole)]
StepNumber = Annotated[WholeNumber, Query(ge=0, le=MOST_STEP)]
SearchText = Annotated[
    str,
    Query(
        min_length=1,
        max_length=256,
        description="Only groups with this text in the prompt or in a completion, in any case. "
        "The sample archive is searched: a trained group is in it after a minute at most.",
    ),
]
Reward = Annotated[float, Query(allow_inf_nan=False)]


SORTS: dict[str, Callable[[GroupSummary], float]] = {
    "recent": lambda g: -int(g.group_id[1:]),
    "oldest": lambda g: int(g.group_id[1:]),
    "reward": lambda g: g.reward_mean,
    "-reward": lambda g: -g.reward_mean,
    "-length": lambda g: -g.tokens,
    "-staleness": lambda g: -g.staleness,
}


@dataclass(frozen=True, slots=True)
class Filter:
    """Conditions on a group; None: any. Tokens are those of the whole group."""

    state: Literal["ready", "in_step", "trained", "dropped"] | None = None
    step: StepNumber | None = None
    min_reward: Reward | None = None
    max_reward: Reward | None = None
    min_tokens: StepNumber | None = None
    max_tokens: StepNumber | None = None
    row: StepNumber | None = None
    """Row of the data set: the groups of one prompt over epochs and attempts."""

    @property
    def by_content(self) -> bool:
        bounds = (self.min_reward, self.max_reward, self.min_tokens, self.max_tokens)
        return any(bound is not None for bound in bounds)

    def __call__(self, group: GroupSummary) -> bool:
        equal = ((self.state, group.state), (self.step, group.step), (self.row, group.dataset_row))
        between = (
            (self.min_reward, group.reward_mean, self.max_reward),
            (self.min_tokens, group.tokens, self.max_tokens),
        )
        return all(wanted in (None, value) for wanted, value in equal) and all(
            (least is None or value >= least) and (most is None or value <= most)
            for least, value, most in between
        )


def kept_groups(state: State) -> list[GroupSummary]:
    """The groups whose samples are kept."""
    steps = step_of_task(state)
    return [
        _summary_of(state, task, steps.get(task.task_id, Step(0)))
        for task in state.tasks.records.values()
        if task.kind is Kind.TRAIN and task.group is not None
    ]


def listed(found: Iterable[GroupSummary], chosen: Filter, sort: str, limit: int) -> GroupsReply:
    matching = sorted(filter(chosen, found), key=SORTS[sort])
    return GroupsReply(groups=matching[:limit], total=len(matching))


async def read_group(
    state: State, payloads: PayloadStore, fill_texts: FillTexts, group_id: str
) -> GroupReply:
    """The group with its completions. Raises Problem if its payload is deleted."""
    task_id = TaskId(group_id)
    ref = views.payload_ref(state, task_id)
    if ref is None:
        raise Problem(404, _reason_of_absence(state, group_id))
    task = state.tasks.records[task_id]
    summary = _summary_of(state, task, step_of_task(state).get(task_id, Step(0)))
    (payload,) = await payloads.get([ref])
    if payload is None:
        raise Problem(404, f"a checkpoint has just covered group {group_id}: its samples are gone")
    try:
        content = await asyncio.to_thread(content_of, payload, fill_texts, tokens=True)
        return GroupReply.model_validate({**summary.model_dump(), **content})
    except DecodeError:
        raise Problem(404, f"the stored payload of group {group_id} cannot be decoded") from None


def _summary_of(state: State, task: Task, step: Step) -> GroupSummary:
    assert task.group is not None
    return GroupSummary.model_validate(facts_of(state, task, task.group, step))


def _reason_of_absence(state: State, group_id: str) -> str:
    if group_id in state.tasks.outcomes:
        return (
            f"group {group_id} is finished, and its samples are deleted: they are kept until a "
            "checkpoint covers their step"
        )
    task = state.tasks.records.get(TaskId(group_id))
    if task is not None:
        return f"group {group_id} is {task.state}: it has no samples yet"
    return f"there is no group {group_id[:32]!r}, or its samples were deleted long ago"


class ArchivedGroups:
    def __init__(self, run_dir: Path) -> None:
        self._reader = ArchiveReader(run_dir)

    def beside(self, kept: Iterable[GroupSummary], *, dropped: bool = False) -> list[GroupSummary]:
        """``kept``, the groups that are still stored whole, and the archived ones that are not in
        it; with ``dropped`` also those that were not trained."""
        found = list(kept)
        there = {(group.group_id, group.attempt) for group in found}
        for row in self._reader.groups():
            wanted = dropped or row["state"] != "dropped"
            if wanted and (row["group_id"], row["attempt"]) not in there:
                found.append(GroupSummary.model_validate(_without_nulls(row)))
        return found

    def with_text(self, found: Iterable[GroupSummary], text: str) -> list[GroupSummary]:
        """The groups of ``found`` that have ``text`` in their archived prompt or completions."""
        matches = self._reader.groups_with(text)
        return [group for group in found if (group.group_id, group.attempt) in matches]

    def group(self, group_id: str) -> GroupReply | None:
        row = self._reader.group(group_id)
        return None if row is None else GroupReply.model_validate(_without_nulls(row))


def _without_nulls(row: dict[str, object]) -> dict[str, object]:
    """``row`` without what was not known: the reply's default is taken."""
    return {name: value for name, value in row.items() if value is not None}


async def stored_groups(
    redis_url: str | None,
    config: Config,
    run_dir: Path,
    wanted: Filter,
    sort: str,
    limit: int,
    text: str | None = None,
) -> dict[str, Any]:
    """``groups``, each as in ``GET groups/{id}``, and ``total``, their number before the limit:
    those of the archive and, with ``redis_url``, those in the payload store. With ``text`` only
    archived groups that have it in their prompt or in a completion. Writes nothing. Raises NoRedis
    if the journal cannot be read."""
    archive, run_id = ArchivedGroups(run_dir), config.run.name
    if redis_url is None:
        return await _detailed(archive, None, None, config, wanted, sort, limit, text)
    client, keys = connect(redis_url, timeout_s=30.0), Keys(run_id)
    payloads: PayloadStore | None = None
    try:
        urls = urls_of(await client.get(keys.payloads_at))
        payloads = open_payloads(urls, run_id, redis_url)
        state = (await LedgerFollower.load(Journal(client, keys))).ledger.state
        return await _detailed(archive, state, payloads, config, wanted, sort, limit, text)
    except (RedisError, OSError) as error:
        where = masked(redis_url)
        raise NoRedis(f"the journal at {where} cannot be read: {error}") from error
    finally:
        await client.aclose()
        if payloads is not None:
            await payloads.close()


async def _detailed(
    archive: ArchivedGroups,
    state: State | None,
    payloads: PayloadStore | None,
    config: Config,
    wanted: Filter,
    sort: str,
    limit: int,
    text: str | None,
) -> dict[str, Any]:
    kept = [] if state is None else kept_groups(state)
    groups = archive.beside(kept, dropped=wanted.row is not None)
    if text is not None:
        groups = archive.with_text(groups, text)
    found, texts, details = listed(groups, wanted, sort, limit), TextDecoder(config), []
    for summary in found.groups:
        group: GroupReply | None = None
        if state is not None and payloads is not None:
            with contextlib.suppress(Problem):  # deleted, because a checkpoint covers it
                group = await read_group(state, payloads, texts.fill, summary.group_id)
        group = group or archive.group(summary.group_id)
        group = group or GroupReply(**summary.model_dump(), prompt="", completions=[])
        details.append(group.model_dump(mode="json"))
    return {"groups": details, "total": found.total}
