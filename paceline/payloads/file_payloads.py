"""Payloads as files in a directory that every process of the run sees, such as a shared file
system."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from paceline.payloads.store import Payloads, Ref, Refs, StoreFull, StoreUnavailable, parse_ref
from paceline.process.files import make_directory, sync_directory, write_durably

T = TypeVar("T")
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class FilePayloads:
    """One file for each payload. It counts once it and its name would outlive a power cut."""

    largest = 2047 << 20

    def __init__(self, directory: Path) -> None:
        """Raises OSError if the directory cannot be made."""
        self._directory = directory
        make_directory(directory)

    async def put(self, payloads: Mapping[Ref, bytes]) -> None:
        if payloads:
            await self._in_thread(lambda: self._write(dict(payloads)))

    async def get(self, refs: Sequence[Ref]) -> Payloads:
        return await self._in_thread(lambda: [self._read(ref) for ref in refs])

    async def stream(self, refs: Sequence[Ref]) -> AsyncIterator[bytes | None]:
        for ref in refs:
            (data,) = await self.get([ref])
            yield data

    async def delete(self, refs: Sequence[Ref]) -> None:
        def remove() -> None:
            for ref in refs:
                self._path(ref).unlink(missing_ok=True)

        await self._in_thread(remove)

    async def list(self) -> Refs:
        return await self._in_thread(
            lambda: [parse_ref(path.stem) for path in self._directory.glob("*.group")]
        )

    async def missing(self, refs: Sequence[Ref]) -> Refs:
        return await self._in_thread(lambda: [r for r in refs if not self._path(r).exists()])

    async def close(self) -> None:
        """Nothing is open."""

    def _path(self, ref: Ref) -> Path:
        # Task ids were checked at admission: letters, digits and dots only.
        return self._directory / f"{ref[0]}-{ref[1]}.group"

    def _write(self, payloads: Mapping[Ref, bytes]) -> None:
        for ref, data in payloads.items():
            path = self._path(ref)
            partial = path.with_suffix(f".{os.getpid()}.part")
            write_durably(partial, data)
            # Atomic: a reader never sees an incomplete payload.
            partial.replace(path)
        # Their facts follow: after a power cut they must be there if those are.
        sync_directory(self._directory)

    def _read(self, ref: Ref) -> bytes | None:
        try:
            return self._path(ref).read_bytes()
        except FileNotFoundError:
            return None

    async def _in_thread(self, act: Callable[[], T]) -> T:
        try:
            return await asyncio.to_thread(act)
        except OSError as error:
            why = f"the payload store {self._directory}: {error.strerror or error}"
            if error.errno in NO_ROOM:
                raise StoreFull(f"{why}. Free space there, or set payloads.url") from error
            raise StoreUnavailable(why) from error
