"""Streams that fill memory directly: the same bytes as any stream's, whoever reads, on asyncio and uvloop."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import uvloop

from peers.direct import READ_AHEAD_BYTES, DirectReader, fill, open_stream, serve_streams

Use = Callable[[DirectReader, asyncio.StreamWriter], Awaitable[None]]
Speak = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
LIMIT_S = 30.0


@pytest.fixture(params=["asyncio", "uvloop"])
def runner(request: pytest.FixtureRequest) -> Iterator[asyncio.Runner]:
    loops: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
        "asyncio": asyncio.new_event_loop,
        "uvloop": uvloop.new_event_loop,
    }
    with asyncio.Runner(loop_factory=loops[request.param]) as made:
        yield made


def talk(runner: asyncio.Runner, folder: Path, speak: Speak, listen: Use) -> None:
    """`listen` reads what the other end speaks; nothing is left running."""

    async def scenario() -> None:
        done = asyncio.Event()

        async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await speak(reader, writer)
            finally:
                writer.close()
                done.set()

        server = await serve_streams(accepted, str(folder / "s"))
        reader, writer = await open_stream(folder / "s")
        try:
            async with asyncio.timeout(LIMIT_S):
                await listen(reader, writer)
        finally:
            writer.close()
            await done.wait()
            server.close()

    runner.run(scenario())


def nobody(size_bytes: int) -> None:
    assert size_bytes > 0


@pytest.mark.parametrize("seed", range(4))
def test_bytes_come_in_order_however_they_are_read(runner: asyncio.Runner, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    sent = chance.randbytes(3 * READ_AHEAD_BYTES + chance.randrange(1000))

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        at = 0
        while at < len(sent):
            size = chance.choice([1, 9, 5_000, 300_000])
            writer.write(memoryview(sent)[at : at + size])
            await writer.drain()
            at += size

    async def listen(reader: DirectReader, writer: asyncio.StreamWriter) -> None:
        got = bytearray()
        moved: list[int] = []
        filled = 0
        while len(got) < len(sent):
            size = min(chance.choice([1, 9, 70_000, READ_AHEAD_BYTES]), len(sent) - len(got))
            way = chance.choice(["read", "exactly", "fill", "fill"])
            if way == "read":
                got += await reader.read(size)
            elif way == "exactly":
                got += await reader.readexactly(size)
            else:
                target = bytearray(size)
                await fill(reader, memoryview(target), moved.append)
                got += target
                filled += size
        assert got == sent
        assert sum(moved) == filled
        assert await reader.read() == b""
        with pytest.raises(EOFError):
            await reader.fill(memoryview(bytearray(1)), nobody)

    talk(runner, tmp_path, speak, listen)


def test_a_stream_that_ends_in_the_middle_says_so(runner: asyncio.Runner, tmp_path: Path) -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"half")

    async def listen(reader: DirectReader, writer: asyncio.StreamWriter) -> None:
        target = bytearray(8)
        with pytest.raises(EOFError):
            await reader.fill(memoryview(target), nobody)
        assert target == b"half\0\0\0\0"

    talk(runner, tmp_path, speak, listen)


def test_a_stream_that_is_cut_here_says_so(runner: asyncio.Runner, tmp_path: Path) -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"half")
        await reader.read()

    async def listen(reader: DirectReader, writer: asyncio.StreamWriter) -> None:
        came = asyncio.Event()
        filling = asyncio.create_task(reader.fill(memoryview(bytearray(8)), lambda size: came.set()))
        await came.wait()
        writer.transport.abort()
        with pytest.raises((EOFError, OSError)):
            await filling

    talk(runner, tmp_path, speak, listen)


def test_more_than_any_buffer_is_read_in_one_go(runner: asyncio.Runner, tmp_path: Path) -> None:
    total = 16 * READ_AHEAD_BYTES

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(bytes(total))
        await writer.drain()
        writer.write(b"end")

    async def listen(reader: DirectReader, writer: asyncio.StreamWriter) -> None:
        first = bytearray(1)
        await reader.fill(memoryview(first), nobody)
        rest = bytearray(total - 1)
        await reader.fill(memoryview(rest), nobody)
        assert await reader.readexactly(3) == b"end"

    talk(runner, tmp_path, speak, listen)


def test_nothing_to_fill_waits_for_nothing(runner: asyncio.Runner, tmp_path: Path) -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async def listen(reader: DirectReader, writer: asyncio.StreamWriter) -> None:
        await reader.fill(memoryview(b""), nobody)

    talk(runner, tmp_path, speak, listen)
