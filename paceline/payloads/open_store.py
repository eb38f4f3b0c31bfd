"""Opening of a run's payload store by its URLs.

none            the journal's Redis
redis, rediss   one or several other servers, also behind sentinels; payloads are spread over them
file            a directory that every process of the run sees
s3, gs, ...     any other file system or object store that fsspec opens
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from paceline.config.sections.services import REDIS_SCHEMES
from paceline.payloads.file_payloads import FilePayloads
from paceline.payloads.fsspec_payloads import FsspecPayloads
from paceline.payloads.redis_payloads import RedisPayloads
from paceline.payloads.store import PayloadStore


def open_payloads(urls: Sequence[str], run_id: str, redis_url: str) -> PayloadStore:
    """The store of run ``run_id``. ``urls``: as in the config. ``redis_url``: the journal's, used
    if there are none. Raises OSError if a directory cannot be made, ValueError on a malformed URL,
    ImportError if its library is missing."""
    if not urls:
        return RedisPayloads([redis_url], run_id)
    url = urlsplit(urls[0])
    if url.scheme == "file":
        return FilePayloads((Path(unquote(url.path)) / run_id).resolve())
    if url.scheme in REDIS_SCHEMES:
        return RedisPayloads(urls, run_id)
    return FsspecPayloads(urls[0], run_id)
