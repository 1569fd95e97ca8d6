"""Answers questions about the members' records that our DHT node holds; `/gasloc/members/1`.

One stream carries any number of questions, one after another, each with its answer: to open a stream costs as much
as some twenty of them. Anybody may ask, as anybody may read the DHT.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from peers.errors import PeersError
from peers.exchange import PeerId
from peers.record_log import Page
from peers.record_wire import MAX_ASK_BYTES, MAX_PAGE_BYTES, Ask, decode_ask, decode_page, encode_ask, encode_page
from peers.transport import Transport
from peers.wire import Kind, Wire

MEMBERS_PROTOCOL = "/gasloc/members/1"
MOST_STREAMS = 256
"""Beyond so many a stream is closed after one answer; whoever comes then has to open one for each question."""
_IDLE_S = 60.0
_SEND_S = 10.0
_DIAL_S = 2.0
_ANSWER_S = 4.0

_log = logging.getLogger(__name__)


class RecordDesk:
    """Serves from `start` on, for as long as the transport does."""

    def __init__(self, transport: Transport, answer: Callable[[Ask], Page]) -> None:
        self._transport = transport
        self._answer = answer
        self._streams = 0

    async def start(self) -> None:
        """Raises `DaemonError`."""
        await self._transport.serve(MEMBERS_PROTOCOL, self._on_stream)

    async def _on_stream(self, peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire = Wire(reader, writer, "members")
        self._streams += 1
        try:
            with contextlib.suppress(PeersError, TimeoutError):
                while True:
                    await self._answer_one(wire)
                    if self._streams > MOST_STREAMS:
                        return
        finally:
            self._streams -= 1

    async def _answer_one(self, wire: Wire) -> None:
        async with asyncio.timeout(_IDLE_S):
            _, payload = await wire.receive(Kind.BLOCK, limit_bytes=MAX_ASK_BYTES)
        page = self._answer(decode_ask(payload))
        async with asyncio.timeout(_SEND_S):
            await wire.send_payload(Kind.BLOCK, encode_page(page))


class RecordStream:
    """Our stream to another peer's desk, opened when it is needed and kept."""

    def __init__(self, transport: Transport, peer: PeerId) -> None:
        self._transport = transport
        self._peer = peer
        self._wire: Wire | None = None
        self._asking = False
        self._retired = False

    async def ask(self, ask: Ask) -> Page:
        """One question and its answer; one at a time.

        A stream that was closed in the meantime is opened again. Raises an error of `peers.errors`, and `TimeoutError`
        where the other does not answer in time.
        """
        self._asking = True
        try:
            return await self._ask(encode_ask(ask))
        finally:
            self._asking = False
            if self._retired:
                self.close()

    async def _ask(self, payload: bytes) -> Page:
        if self._wire is not None:
            try:
                return await self._converse(self._wire, payload)
            except PeersError as error:
                _log.debug("asking %s again: %s", self._peer, error)
        reader, writer = await self._transport.dial(self._peer, MEMBERS_PROTOCOL, timeout_s=_DIAL_S)
        self._wire = Wire(reader, writer, "members")
        return await self._converse(self._wire, payload)

    async def _converse(self, wire: Wire, payload: bytes) -> Page:
        try:
            async with asyncio.timeout(_ANSWER_S):
                await wire.send_payload(Kind.BLOCK, payload)
                _, answer = await wire.receive(Kind.BLOCK, limit_bytes=MAX_PAGE_BYTES)
            return decode_page(answer)
        except BaseException:  # a cancelled question's answer must not be taken for the next one's
            self.close()
            raise

    def retire(self) -> None:
        """Closes the stream, after the answer where one is due."""
        self._retired = True
        if not self._asking:
            self.close()

    def close(self) -> None:
        """Closes the stream; it may be asked again."""
        if self._wire is not None:
            self._wire.cut()
            self._wire = None
