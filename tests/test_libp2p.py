"""Streams over p2pd: authenticated, full duplex, and gone with their handlers."""

import asyncio
import contextlib
import logging
import sys

import pytest
from hivemind.p2p.p2p_daemon_bindings.utils import write_pbmsg
from hivemind.proto import p2pd_pb2

from peers.address import parse
from peers.errors import DaemonError, UnreachableError
from peers.exchange import PeerId
from peers.libp2p import Libp2pTransport
from tests.conftest import StartDaemon

ECHO = "/test/echo/1"


async def echo(peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()


async def test_streams_carry_bytes_both_ways_and_name_who_opened_them(start_daemon: StartDaemon) -> None:
    a, b = await start_daemon("a"), await start_daemon("b")
    await b.connect(parse((await a.addresses())[0]), 5.0)
    server, client = Libp2pTransport(a), Libp2pTransport(b)
    callers: list[PeerId] = []

    async def handler(peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        callers.append(peer)
        await echo(peer, reader, writer)

    await server.serve(ECHO, handler)
    reader, writer = await client.dial(server.me, ECHO, timeout_s=5.0)
    sent = bytes(range(256)) * 16_384  # 4 MiB: more than every buffer on the way
    writer.write(sent)
    received, _ = await asyncio.gather(reader.readexactly(len(sent)), writer.drain())
    assert received == sent
    assert callers == [client.me]
    writer.close()
    await client.close()
    await server.close()


async def test_the_stream_ends_with_its_handler_and_what_it_raises_is_logged(
    start_daemon: StartDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = await start_daemon("a"), await start_daemon("b")
    await b.connect(parse((await a.addresses())[0]), 5.0)
    server, client = Libp2pTransport(a), Libp2pTransport(b)

    async def fail(peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(1)
        raise ValueError("no good")

    await server.serve(ECHO, fail)
    with caplog.at_level(logging.ERROR):
        reader, writer = await client.dial(server.me, ECHO, timeout_s=5.0)
        writer.write(b"x")
        assert await reader.read() == b""
    assert "no good" in caplog.text
    writer.close()
    await server.close()


async def test_closing_ends_the_streams_of_handlers_that_run(start_daemon: StartDaemon) -> None:
    a, b = await start_daemon("a"), await start_daemon("b")
    await b.connect(parse((await a.addresses())[0]), 5.0)
    server, client = Libp2pTransport(a), Libp2pTransport(b)
    await server.serve(ECHO, echo)
    reader, writer = await client.dial(server.me, ECHO, timeout_s=5.0)
    writer.write(b"x")
    assert await reader.readexactly(1) == b"x"
    await server.close()
    async with asyncio.timeout(5):
        assert await reader.read() == b""
    writer.close()


async def test_peers_that_cannot_be_dialled_have_a_reason(start_daemon: StartDaemon) -> None:
    a, b, c = await start_daemon("a"), await start_daemon("b"), await start_daemon("c", client_only=True)
    await b.connect(parse((await a.addresses())[0]), 5.0)
    client = Libp2pTransport(b)
    for peer, reason in (
        (a.peer_id, "it does not speak this protocol"),
        (c.peer_id, "no address of it is known"),
        ("nonsense", "'nonsense' is not a peer id"),
    ):
        with pytest.raises(UnreachableError, match=reason):
            await client.dial(peer, ECHO, timeout_s=2.0)


async def test_addresses_that_the_peer_published_are_used_when_nobody_else_knows_it(
    start_daemon: StartDaemon,
) -> None:
    a, b = await start_daemon("a"), await start_daemon("b")
    published = ["rubbish", f"/ip4/127.0.0.1/tcp/1/p2p/{a.peer_id}", *(await a.addresses())]
    server, client = Libp2pTransport(a), Libp2pTransport(b, lambda peer: published)
    await server.serve(ECHO, echo)
    reader, writer = await client.dial(server.me, ECHO, timeout_s=5.0)
    writer.write(b"hello")
    assert await reader.readexactly(5) == b"hello"
    writer.close()
    await server.close()


async def test_dialling_without_a_p2pd_says_so(start_daemon: StartDaemon) -> None:
    a = await start_daemon("a")
    await a.close()
    with pytest.raises(DaemonError, match="p2pd has ended"):
        await Libp2pTransport(a).dial(a.peer_id, ECHO, timeout_s=1.0)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the socket is a file that others cannot open")
async def test_a_stream_that_p2pd_did_not_hand_over_is_refused(
    start_daemon: StartDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    a = await start_daemon("a")
    server = Libp2pTransport(a)
    called = asyncio.Event()

    async def handler(peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        called.set()

    await server.serve(ECHO, handler)
    reader, writer = await asyncio.open_unix_connection(a.sockets.streams_path)
    await write_pbmsg(writer, p2pd_pb2.StreamInfo(peer=b"\x00\x01x", addr=b"", proto=ECHO))
    with contextlib.suppress(ConnectionResetError):  # as it closes with our words unread
        assert await reader.read() == b""
    writer.close()
    assert not called.is_set()
    assert "was refused" in caplog.text
    await server.close()
