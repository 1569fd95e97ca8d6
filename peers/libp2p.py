"""`Transport` over p2pd: authenticated, encrypted streams between peers, handed over on unix sockets."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import read_pbmsg_safe
from hivemind.proto import p2pd_pb2

from peers.address import Address, parse
from peers.daemon import Daemon
from peers.direct import serve_streams
from peers.errors import AddressError, UnreachableError
from peers.exchange import PeerId
from peers.transport import Handler

_HEADER_S = 5.0
_CLOSE_S = 2.0

_log = logging.getLogger(__name__)


class Libp2pTransport:
    """Opens and accepts streams through a running p2pd. Made by `start`."""

    def __init__(self, daemon: Daemon, addresses_of: Callable[[PeerId], Sequence[str]] = lambda peer: ()) -> None:
        """`addresses_of` gives addresses of a peer that p2pd itself cannot find; they are tried in order."""
        self._daemon = daemon
        self._addresses_of = addresses_of
        self._handlers: dict[str, Handler] = {}
        self._server: asyncio.Server | None = None
        self._streams: set[asyncio.Task[None]] = set()

    @property
    def me(self) -> PeerId:
        """Our own peer id."""
        return self._daemon.peer_id

    async def serve(self, protocol: str, handler: Handler) -> None:
        """Accepts streams of `protocol` from now on; see `Transport.serve`. Raises `DaemonError`."""
        if self._server is None:
            self._server = await serve_streams(self._on_connection, self._daemon.sockets.streams_path)
        self._handlers[protocol] = handler
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.STREAM_HANDLER,
            streamHandler=p2pd_pb2.StreamHandlerRequest(
                addr=self._daemon.sockets.streams_maddr,
                proto=[protocol],
                balanced=False,
            ),
        )
        _, _, writer = await self._daemon.ask(request, _HEADER_S)
        writer.close()

    async def resume(self) -> None:
        """Serves the same protocols through a p2pd that was started again; the old one's streams have broken.

        Raises `DaemonError`.
        """
        if self._server:
            self._server.close()
            self._server = None
        for protocol, handler in list(self._handlers.items()):
            await self.serve(protocol, handler)

    async def dial(
        self, peer: PeerId, protocol: str, *, timeout_s: float
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Opens a stream; see `Transport.dial`.

        Where p2pd cannot reach the peer by its id alone, the addresses that the peer itself published are
        tried. Raises `UnreachableError` with the reason, and `DaemonError` when p2pd is gone.
        """
        deadline = time.monotonic() + timeout_s
        try:
            return await self._daemon.open(peer, protocol, timeout_s)
        except UnreachableError as error:
            reason = error
        for address in self._published(peer):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            try:
                await self._daemon.connect(address, left_s)
                return await self._daemon.open(peer, protocol, max(deadline - time.monotonic(), 0.0))
            except UnreachableError as error:
                reason = error
        raise reason

    async def close(self) -> None:
        """Accepts no more streams, cancels the handlers that run, and waits for them."""
        if self._server:
            self._server.close()
            self._server = None
        for task in self._streams:
            task.cancel()
        if self._streams:
            await asyncio.wait(self._streams, timeout=_CLOSE_S)

    def _published(self, peer: PeerId) -> list[Address]:
        addresses = []
        for text in self._addresses_of(peer):
            try:
                address = parse(text)
            except AddressError as error:
                _log.debug("%s published a bad address: %s", peer, error)
                continue
            if address.peer_id == peer:
                addresses.append(address)
        return addresses

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._streams.add(task)
        try:
            await self._handle(reader, writer)
        except asyncio.CancelledError:
            writer.transport.abort()  # not raised on: asyncio's server would log it as an error
        except Exception:
            _log.exception("a stream's handler failed")
        finally:
            self._streams.discard(task)
            writer.close()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._daemon.sockets.comes_from(writer, self._daemon.pid):
            _log.warning("another program on this machine tried to hand us a stream, and was refused")
            return
        info = p2pd_pb2.StreamInfo()
        try:
            async with asyncio.timeout(_HEADER_S):
                await read_pbmsg_safe(reader, info)
        except (EOFError, OSError, TimeoutError) as error:
            _log.debug("p2pd opened a connection and named no stream: %r", error)
            return
        peer: PeerId = PeerID(info.peer).to_base58()
        handler = self._handlers.get(info.proto)
        if handler:
            await handler(peer, reader, writer)
