"""A TCP proxy between two roles, with switches for delay, loss and partition.

with TcpProxy(("127.0.0.1", 6379)) as proxy:
    client = connect(proxy.address)
    proxy.partition()    # packets vanish: connections stay open, nothing arrives any more
    proxy.heal()         # what was held back arrives, as after retransmission
    proxy.cut()          # every connection is reset, new ones are refused until heal()
    proxy.delay_s = 0.2  # one way
    proxy.bytes_per_s = 1e5  # of each connection, each way
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from paceline.process.threads import BackgroundLoop

CHUNK = 1 << 16


class TcpProxy:
    """Runs on a thread of its own; methods are for any thread."""

    def __init__(self, target: tuple[str, int] | str) -> None:
        """``target``: host and port, or the path of a Unix socket."""
        self.target = target
        self.delay_s = 0.0
        self.bytes_per_s = 0.0
        """0: no limit."""
        self._loop = BackgroundLoop("tcp-proxy")
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._refusing = False
        self._open = self._loop.run(self._event())
        self._server = self._loop.run(self._serve())
        self.port: int = self._server.sockets[0].getsockname()[1]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def partition(self) -> None:
        self._do(self._partition())

    def heal(self) -> None:
        self._do(self._heal())

    def cut(self) -> None:
        self._do(self._cut())

    def close(self) -> None:
        self._do(self._cut())
        self._server.close()
        self._loop.close()

    def __enter__(self) -> TcpProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        self._loop.run(work, 10.0)

    async def _event(self) -> asyncio.Event:
        event = asyncio.Event()
        event.set()
        return event

    async def _serve(self) -> asyncio.Server:
        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.create_task(self._connected(reader, writer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        return await asyncio.start_server(connected, "127.0.0.1", 0)

    async def _partition(self) -> None:
        self._open.clear()

    async def _heal(self) -> None:
        self._refusing = False
        self._open.set()

    async def _cut(self) -> None:
        self._refusing = True
        for writer in self._writers:
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            await self._open.wait()
            if self._refusing:
                return
            if isinstance(self.target, str):
                far_reader, far_writer = await asyncio.open_unix_connection(self.target)
            else:
                far_reader, far_writer = await asyncio.open_connection(*self.target)
            self._writers.add(far_writer)
            try:
                ways = (self._pump(reader, far_writer), self._pump(far_reader, writer))
                tasks = [asyncio.create_task(way) for way in ways]
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            finally:
                self._writers.discard(far_writer)
                far_writer.transport.abort()
        except OSError:
            pass
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(CHUNK):
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            if self.bytes_per_s:
                await asyncio.sleep(len(data) / self.bytes_per_s)
            await self._open.wait()
            writer.write(data)
            await writer.drain()
