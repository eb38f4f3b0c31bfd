"""Stored samples of a run, read from Redis without a controller. Writes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from redis.exceptions import RedisError

from controller.rest.problem_details import Problem
from controller.rest.replies.archived_groups import ArchivedGroups
from controller.rest.routes import samples
from controller.rest.schemas import GroupReply
from controller.store.journal import Journal
from controller.store.ledger_follower import LedgerFollower
from controller.store.redis_keys import Keys
from controller.store.run_registry import urls_of
from paceline.payloads.open_store import open_payloads
from paceline.payloads.store import PayloadStore
from paceline.redis.client import connect, without_password
from paceline.redis.server import NoRedis
from paceline.token_texts import TextDecoder


async def kept_groups(
    redis_url: str,
    run_id: str,
    run_dir: Path,
    texts: TextDecoder,
    wanted: samples.Filter,
    sort: str,
    limit: int,
    text: str | None = None,
) -> dict[str, Any]:
    """``groups``, each as in ``GET groups/{id}``, and ``total``, their number before the limit:
    those in the payload store and those in the archive of ``run_dir``. With ``text`` only archived
    groups that have it in their prompt or in a completion.

    Raises NoRedis if the journal cannot be read.
    """
    archive = ArchivedGroups(run_dir)
    client = connect(redis_url, timeout_s=30.0)
    keys = Keys(run_id)
    payloads: PayloadStore | None = None
    try:
        urls = urls_of(await client.get(keys.payloads_at))
        payloads = open_payloads(urls, run_id, redis_url)
        replica = await LedgerFollower.load(Journal(client, keys))
        state = replica.ledger.state
        groups = archive.beside(samples.kept_groups(state), dropped=wanted.row is not None)
        if text is not None:
            groups = archive.with_text(groups, text)
        found = samples.listed(groups, wanted, sort, limit)
        details = []
        for summary in found.groups:
            try:
                group = await samples.read_group(state, payloads, texts.fill, summary.group_id)
            except Problem:  # deleted, because a checkpoint covers it
                group = archive.group(summary.group_id) or GroupReply(
                    **summary.model_dump(), prompt="", completions=[]
                )
            details.append(group.model_dump(mode="json"))
        return {"groups": details, "total": found.total}
    except (RedisError, OSError) as error:
        raise NoRedis(
            f"the journal at {without_password(redis_url)} cannot be read: {error}"
        ) from error
    finally:
        await client.aclose()
        if payloads is not None:
            await payloads.close()


def archived_groups(
    run_dir: Path, wanted: samples.Filter, sort: str, limit: int, text: str | None = None
) -> dict[str, Any]:
    """As ``kept_groups``, from the archive alone: the journal is gone or cannot be read."""
    archive = ArchivedGroups(run_dir)
    groups = archive.beside([], dropped=wanted.row is not None)
    if text is not None:
        groups = archive.with_text(groups, text)
    found = samples.listed(groups, wanted, sort, limit)
    details = [archive.group(summary.group_id) for summary in found.groups]
    return {
        "groups": [group.model_dump(mode="json") for group in details if group is not None],
        "total": found.total,
    }
