"""Streams on unix sockets whose bytes the system puts straight into the memory that they are for.

Asyncio's own reader copies every byte three times on its way: into its buffer, out of it, and into the target. A
`DirectReader` is one as well, for headers and for whoever knows no better; `fill` goes round its buffer.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import cast

READ_AHEAD_BYTES = 1 << 20
"""How much of a stream may wait in memory until it is read."""
_SCRATCH_BYTES = 64 * 1024

OnConnection = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class DirectReader(asyncio.StreamReader):
    """A reader that can also fill memory directly. Made by `open_stream` and `serve_streams`."""

    # asyncio's own, the same from 3.4 to 3.14; nothing public tells whether bytes were read ahead
    _buffer: bytearray
    _paused: bool

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(limit=READ_AHEAD_BYTES, loop=loop)
        self._running = loop
        self._scratch: memoryview | None = None
        self._target: memoryview | None = None
        self._moved: Callable[[int], None] = _nobody
        self._full: asyncio.Future[None]

    async def fill(self, target: memoryview, moved: Callable[[int], None]) -> None:
        """Fills `target` with the next bytes; `moved` is told of each piece as it comes, in bytes.

        Reading stops there until somebody reads on, so that the next bytes find their memory, too. Raises
        `EOFError` when the stream ends before, and `OSError` when it breaks. One reader at a time.
        """
        while target and self._buffer:
            piece = await self.read(len(target))
            target[: len(piece)] = piece
            target = target[len(piece) :]
            moved(len(piece))
        if not target:
            return
        self._target, self._moved, self._full = target, moved, self._running.create_future()
        try:
            self._raise_if_over()
            if self._paused:
                self._paused = False
                self.transport.resume_reading()
            await self._full
        finally:
            self._target = None

    def connect(self, transport: asyncio.Transport) -> None:
        """Reads from this transport."""
        self.transport = transport

    def room(self) -> memoryview:
        """Where the next bytes go: to whoever waits for them, else into a buffer that is read later."""
        if self._target is not None:
            return self._target
        if self._scratch is None:
            self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        return self._scratch

    def came(self, size_bytes: int) -> None:
        """So many bytes were put where `room` said."""
        if self._target is None:
            assert self._scratch is not None
            self.feed_data(self._scratch[:size_bytes])
            return
        self._target = self._target[size_bytes:]
        self._moved(size_bytes)
        if not self._target:
            self._target = None
            if not self._paused:
                self._paused = True
                self.transport.pause_reading()
            if not self._full.done():
                self._full.set_result(None)

    def over(self) -> None:
        """Wakes who waits, once the stream ended or broke."""
        if self._target is not None and not self._full.done():
            try:
                self._raise_if_over()
            except (EOFError, OSError) as error:
                self._full.set_exception(error)

    def _raise_if_over(self) -> None:
        broken = self.exception()
        if broken is not None:
            raise broken
        if self.at_eof():
            raise EOFError("the stream ended")


class _DirectProtocol(asyncio.BufferedProtocol):
    """Between a transport, the reader, and asyncio's own protocol, which serves the writer."""

    def __init__(self, reader: DirectReader, streams: asyncio.StreamReaderProtocol) -> None:
        self._reader = reader
        self._streams = streams

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._reader.connect(cast(asyncio.Transport, transport))  # uvloop's are none by class
        self._streams.connection_made(transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.room()

    def buffer_updated(self, nbytes: int) -> None:
        self._reader.came(nbytes)

    def eof_received(self) -> bool | None:
        keep_open = self._streams.eof_received()
        self._reader.over()
        return keep_open

    def connection_lost(self, exc: Exception | None) -> None:
        self._streams.connection_lost(exc)
        self._reader.over()

    def pause_writing(self) -> None:
        self._streams.pause_writing()

    def resume_writing(self) -> None:
        self._streams.resume_writing()


async def open_stream(path: str | Path) -> tuple[DirectReader, asyncio.StreamWriter]:
    """Connects to a unix socket. Raises `OSError`."""
    loop = asyncio.get_running_loop()
    reader = DirectReader(loop)
    streams = asyncio.StreamReaderProtocol(reader, loop=loop)
    transport, _ = await loop.create_unix_connection(lambda: _DirectProtocol(reader, streams), str(path))
    return reader, asyncio.StreamWriter(transport, streams, reader, loop)


async def serve_streams(on_connection: OnConnection, path: str) -> asyncio.Server:
    """Accepts connections on a unix socket; `path` may be in the abstract namespace. Raises `OSError`."""
    loop = asyncio.get_running_loop()

    def accept() -> _DirectProtocol:
        reader = DirectReader(loop)
        return _DirectProtocol(reader, asyncio.StreamReaderProtocol(reader, on_connection, loop=loop))

    return await loop.create_unix_server(accept, path)


async def fill(reader: asyncio.StreamReader, target: memoryview, moved: Callable[[int], None]) -> None:
    """Fills `target` from any reader, directly where it can; see `DirectReader.fill`."""
    if isinstance(reader, DirectReader):
        await reader.fill(target, moved)
        return
    while target:
        piece = await reader.read(len(target))
        if not piece:
            raise EOFError("the stream ended")
        target[: len(piece)] = piece
        target = target[len(piece) :]
        moved(len(piece))


def _nobody(size_bytes: int) -> None:
    """Nobody wants to know."""
