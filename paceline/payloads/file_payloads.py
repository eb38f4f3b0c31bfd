"""Payloads as files or objects: in a directory that every process of the run sees, or in any store
that fsspec opens (S3, Google Cloud Storage and others).

A payload appears whole or not at all, and counts once the store has acknowledged it; as a file,
once it and its name would outlive a power cut.
"""

import asyncio
import errno
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from paceline.masking import masked
from paceline.payloads.store import Payloads, Ref, Refs, StoreFull, StoreUnavailable, parse_ref
from paceline.process.files import make_directory, sync_directory, write_durably

T = TypeVar("T")
AT_ONCE = 16
"""Requests under way at the same time: an object store answers each of them late, and many at once.
"""
SUFFIX = ".group"
LEFT_S = 3600.0
"""Age at which a file that is not complete is no writer's any more."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


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
        # In bulk, a name with one of these characters would be taken for a pattern.
        self._bulk = self._files.async_impl and set(self._root).isdisjoint("*?[")
        self._threads = ThreadPoolExecutor(AT_ONCE, "payloads")

    async def put(self, payloads: Mapping[Ref, bytes]) -> None:
        await self._each(list(payloads), lambda ref: self._write(self._path(ref), payloads[ref]))

    async def get(self, refs: Sequence[Ref]) -> Payloads:
        return [*await self._each(refs, self._read)]

    async def stream(self, refs: Sequence[Ref]) -> AsyncIterator[bytes | None]:
        for start in range(0, len(refs), AT_ONCE):
            for data in await self.get(refs[start : start + AT_ONCE]):
                yield data

    async def delete(self, refs: Sequence[Ref]) -> None:
        if not (self._bulk and all(await self._each([refs], self._remove_all))):
            await self._each(refs, self._remove)

    async def list(self) -> Refs:
        names = await self._each([self._root], self._names)
        return names[0]

    async def missing(self, refs: Sequence[Ref]) -> Refs:
        lacks = await self._each(refs, self._lacks)
        return [ref for ref, lacking in zip(refs, lacks, strict=True) if lacking]

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _path(self, ref: Ref) -> str:
        # Task ids were checked at admission: letters, digits and dots only.
        return f"{self._root}/{ref[0]}-{ref[1]}{SUFFIX}"

    def _write(self, path: str, data: bytes) -> None:
        self._files.pipe_file(path, data)

    def _read(self, ref: Ref) -> bytes | None:
        with suppress(FileNotFoundError):
            return bytes(self._files.cat_file(self._path(ref)))
        return None

    def _lacks(self, ref: Ref) -> bool:
        # Not exists(), to which any error means that there is none.
        with suppress(FileNotFoundError):
            self._files.info(self._path(ref))
            return False
        return True

    def _remove(self, ref: Ref) -> None:
        with suppress(FileNotFoundError):
            self._files.rm_file(self._path(ref))

    def _remove_all(self, refs: Sequence[Ref]) -> bool:
        """Deletes them with few requests. False if they are to be deleted one by one, which raises
        what is in the way: S3 says nothing of objects that may not be deleted, and a store may have
        no such request."""
        with suppress(Exception):
            self._files.rm([self._path(ref) for ref in refs])
            return self._lacks(refs[0])
        return False

    def _names(self, root: str) -> Refs:
        paths: Sequence[Any] = ()
        with suppress(FileNotFoundError):
            paths = self._files.ls(root, detail=False)
        names = [str(path).rpartition("/")[2] for path in paths]
        return [parse_ref(name.removesuffix(SUFFIX)) for name in names if name.endswith(SUFFIX)]

    async def _each(self, items: Sequence[Any], act: Callable[[Any], T]) -> Sequence[T]:
        loop = asyncio.get_running_loop()
        running = [loop.run_in_executor(self._threads, act, item) for item in items]
        try:
            return await asyncio.gather(*running)
        except Exception as error:
            if isinstance(error, OSError) and error.errno in NO_ROOM:
                raise StoreFull(
                    f"the payload store {self._shown}: {error.strerror}. Free space there, or set "
                    "payloads.url"
                ) from error
            # Each store's library raises errors of its own.
            why = f"{type(error).__name__}: {error}"
            raise StoreUnavailable(
                f"the payload store {self._shown} does not answer: {why}"
            ) from error


class FilePayloads(FsspecPayloads):
    """One file for each payload."""

    def __init__(self, directory: Path) -> None:
        """Raises OSError if the directory cannot be made."""
        # Not as a URL: to fsspec, "::" in one chains file systems.
        super().__init__("file:///", directory.name)
        self._root = self._shown = str(directory)
        make_directory(directory)
        for partial in directory.glob(f"*{SUFFIX}.*.part"):
            with suppress(OSError):  # Another process may delete it, too
                if partial.stat().st_mtime < time.time() - LEFT_S:
                    partial.unlink()

    async def put(self, payloads: Mapping[Ref, bytes]) -> None:
        await super().put(payloads)
        # The metadata follow: after a power cut the names must be there if those are.
        await self._each([self._root][: len(payloads)], lambda root: sync_directory(Path(root)))

    def _write(self, path: str, data: bytes) -> None:
        partial = Path(f"{path}.{os.getpid()}.part")
        write_durably(partial, data)
        # Atomic: a reader never sees an incomplete payload.
        partial.replace(path)
