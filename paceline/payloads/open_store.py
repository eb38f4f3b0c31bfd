"""Opening of a run's payload store by its URLs, and the check that it takes, returns and deletes a
payload.

none            the journal's Redis
redis, rediss   one or several other servers, also behind sentinels; payloads are spread over them
file            a directory that every process of the run sees
s3, gs, ...     any other file system or object store that fsspec opens
"""

import asyncio
import secrets
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from paceline.config.sections.services import REDIS_SCHEMES
from paceline.errors import BadInput
from paceline.ids import TaskId
from paceline.masking import masked
from paceline.payloads.file_payloads import FilePayloads, FsspecPayloads
from paceline.payloads.redis_payloads import RedisPayloads
from paceline.payloads.store import PayloadStore, StoreFull, StoreUnavailable

LIMIT_S = 10.0
PROBE_BYTES = 1 << 16
PAYLOADS = "payloads.url"
CHECKED = "paceline-check"
"""Run id under which a check writes where there is no run yet."""


def open_payloads(
    urls: Sequence[str], run_id: str, redis_url: str, setting: str = PAYLOADS
) -> PayloadStore:
    """The store of run ``run_id``. ``urls``: as in the config, under ``setting``. ``redis_url``:
    the journal's, used if there are none. Raises BadInput if it cannot be opened."""
    if not urls:
        return RedisPayloads([redis_url], run_id)
    url, shown = urlsplit(urls[0]), ", ".join(map(masked, urls))
    try:
        if url.scheme == "file":
            return FilePayloads((Path(unquote(url.path)) / run_id).resolve())
        if url.scheme in REDIS_SCHEMES:
            return RedisPayloads(urls, run_id)
        return FsspecPayloads(urls[0], run_id)
    except ImportError as error:
        raise BadInput(
            f"{setting}: {shown} needs a package that is not installed: {error}. S3 needs s3fs "
            "and Google Cloud Storage needs gcsfs: pip install 'paceline[s3]' or 'paceline[gcs]'"
        ) from error
    except (OSError, ValueError) as error:
        raise BadInput(f"{setting}: {shown} cannot be opened: {error}") from error


async def check_store(store: PayloadStore, urls: Sequence[str], setting: str = PAYLOADS) -> None:
    """Raises BadInput with the reason and the remedy if ``store``, which was opened for ``urls``,
    cannot be used. ``setting``: where they come from."""
    shown = ", ".join(map(masked, urls))
    # Several, so that each of several servers gets some.
    probe = {
        (TaskId(f"t{secrets.randbelow(10**15)}"), 1): secrets.token_bytes(PROBE_BYTES)
        for _ in range(8 * max(1, len(urls)))
    }
    try:
        async with asyncio.timeout(LIMIT_S):
            await store.put(probe)
            found = await store.get(list(probe))
            await store.delete(list(probe))
    except StoreFull as error:
        raise BadInput(f"{setting}: {error}") from error
    except TimeoutError as error:
        raise BadInput(
            f"{setting}: {shown} did not answer within {LIMIT_S:g} s. Start the store, or "
            f"correct the URL"
        ) from error
    except StoreUnavailable as error:
        raise BadInput(
            f"{setting}: nothing can be stored: {error}. Start the store, correct the URL, or "
            "grant this user the right to write, read and delete"
        ) from error
    if found != list(probe.values()):
        raise BadInput(
            f"{setting}: {shown} did not return what was written to it. Name a store that keeps "
            "what it acknowledged: a Redis with maxmemory-policy noeviction, or a directory that "
            "is no cache"
        )


async def check_urls(urls: Sequence[str], setting: str = PAYLOADS) -> None:
    """The same for a run that is to be started. Raises BadInput."""
    store = open_payloads(urls, CHECKED, "", setting)
    try:
        await check_store(store, urls, setting)
    finally:
        await store.close()
