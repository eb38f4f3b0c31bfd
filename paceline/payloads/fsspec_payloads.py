"""Payloads in any file system or object store that fsspec opens: S3, Google Cloud Storage and
others.

An object appears whole or not at all, and counts once the store has acknowledged it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from urllib.parse import urlsplit

from paceline.masking import masked
from paceline.payloads.store import Payloads, Ref, Refs, StoreUnavailable, parse_ref

T = TypeVar("T")
AT_ONCE = 16
"""Requests under way at the same time: an object store answers each of them late, and many at once.
"""
SUFFIX = ".group"


class FsspecPayloads:
    """One object for each payload, under ``url``/RUN/."""

    largest = 2047 << 20

    def __init__(self, url: str, run_id: str) -> None:
        """Raises ValueError or ImportError if fsspec cannot open such a URL."""
        import fsspec

        self._shown = masked(url)
        # A listing that is remembered would show payloads that others have written or deleted
        # since.
        options = {"use_listings_cache": False, "skip_instance_cache": True}
        if urlsplit(url).scheme in ("memory", "file"):
            options = {}
        self._files, root = fsspec.core.url_to_fs(url, **options)
        self._root = f"{root.rstrip('/')}/{run_id}"
        self._threads = ThreadPoolExecutor(AT_ONCE, "payloads")

    async def put(self, payloads: Mapping[Ref, bytes]) -> None:
        await self._each(list(payloads), lambda ref: self._write(ref, payloads[ref]))

    async def get(self, refs: Sequence[Ref]) -> Payloads:
        return [*await self._each(refs, self._read)]

    async def stream(self, refs: Sequence[Ref]) -> AsyncIterator[bytes | None]:
        for start in range(0, len(refs), AT_ONCE):
            for data in await self.get(refs[start : start + AT_ONCE]):
                yield data

    async def delete(self, refs: Sequence[Ref]) -> None:
        await self._each(refs, self._remove)

    async def list(self) -> Refs:
        names = await self._each([self._root], self._names)
        return names[0]

    async def missing(self, refs: Sequence[Ref]) -> Refs:
        there = await self._each(refs, lambda ref: bool(self._files.exists(self._path(ref))))
        return [ref for ref, found in zip(refs, there, strict=True) if not found]

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _path(self, ref: Ref) -> str:
        return f"{self._root}/{ref[0]}-{ref[1]}{SUFFIX}"

    def _write(self, ref: Ref, data: bytes) -> None:
        self._files.pipe_file(self._path(ref), data)

    def _read(self, ref: Ref) -> bytes | None:
        try:
            return bytes(self._files.cat_file(self._path(ref)))
        except FileNotFoundError:
            return None

    def _remove(self, ref: Ref) -> None:
        try:
            self._files.rm_file(self._path(ref))
        except FileNotFoundError:
            return

    def _names(self, root: str) -> Refs:
        try:
            paths = self._files.ls(root, detail=False)
        except FileNotFoundError:
            return []
        names = [str(path).rpartition("/")[2] for path in paths]
        return [parse_ref(name.removesuffix(SUFFIX)) for name in names if name.endswith(SUFFIX)]

    async def _each(self, items: Sequence[Any], act: Callable[[Any], T]) -> Sequence[T]:
        loop = asyncio.get_running_loop()
        running = [loop.run_in_executor(self._threads, act, item) for item in items]
        try:
            return await asyncio.gather(*running)
        except Exception as error:
            # Each store's library raises errors of its own.
            why = f"{type(error).__name__}: {error}"
            raise StoreUnavailable(
                f"the payload store {self._shown} does not answer: {why}"
            ) from error
