"""A link that a test can cut: forwards one port to another on loopback, until told otherwise."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class TcpProxy:
    """`cut` breaks the connections there are; `forwarding` False: new ones are accepted and closed at once.

    `hold` keeps bytes from arriving, both ways and silently; those held are lost with a `cut`, which ends the hold.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self.forwarding = True
        self.accepted = 0
        self.address = ""

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()
        for task in self._tasks:
            task.cancel()
        self._flowing.set()

    def hold(self) -> None:
        self._flowing.clear()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self.forwarding:
            writer.transport.abort()
            return
        self.accepted += 1
        there_reader, there_writer = await asyncio.open_connection(*self._target)
        self._writers |= {writer, there_writer}
        for source, sink in ((reader, there_writer), (there_reader, writer)):
            task = asyncio.create_task(self._forward(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _forward(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                await self._flowing.wait()
                sink.write(data)
                await sink.drain()
        except OSError:
            pass
        finally:
            sink.close()


@asynccontextmanager
async def tcp_proxy(target: str) -> AsyncIterator[TcpProxy]:
    proxy = TcpProxy(target)
    server = await asyncio.start_server(proxy._connected, "127.0.0.1", 0)
    proxy.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()
        proxy.cut()
        await asyncio.gather(*proxy._tasks, return_exceptions=True)
        await server.wait_closed()
