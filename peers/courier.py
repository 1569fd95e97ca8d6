"""A parcel of tensors, answered by another one, perhaps much later: from a learner to its syncer.

    asker:    {"run", "digest", "meta"}
    answerer: {"answer", "reason"}                   before a tensor travels
    asker:    table, blocks
    answerer: {"answer", "reason", "meta"}, table, blocks
    asker:    DONE

Before the answer the stream stays open and silent; the one that asked goes on with its own work.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from peers.body import Body, NoDigest, check_layout, receive_table, receive_tensors
from peers.codec import CodecName
from peers.donor import Meta, read_meta
from peers.errors import BehindError, PeersError, ProtocolError, RefusedError, UnreachableError, WireError
from peers.exchange import Answer, Layout, PeerId, Tensors
from peers.meter import Meter
from peers.stall import StallLimit
from peers.transport import Transport
from peers.wire import Kind, Wire, clean, reason_of

T = TypeVar("T")

COURIER_PROTOCOL = "/gasloc/courier/1"
MAX_STREAMS = 512
_CLOSE_S = 2.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parcel:
    """Named tensors with a few plain values beside them."""

    tensors: Tensors
    meta: Meta = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answered:
    """A parcel that came back, and what it cost."""

    parcel: Parcel
    bytes_sent: int
    bytes_received: int


Expect = Callable[[PeerId, Meta], Layout]
"""The layout that a request with this meta must have. Raises `RefusedError` for one that is not wanted."""
Handle = Callable[[PeerId, Parcel], Awaitable[Parcel]]
"""Answers a request, and may take its time. Raises `RefusedError` to say no. Cancelled when the asker leaves."""


class Courier:
    """Sends parcels and answers them, within one run."""

    def __init__(
        self,
        transport: Transport,
        *,
        run: str,
        digest: str,
        codec: CodecName = "fp32",
        meter: Meter | None = None,
        stall_s: float = 10.0,
        handshake_s: float = 5.0,
    ) -> None:
        """`stall_s` ends a transfer that makes no progress; the wait for an answer is bounded by its asker."""
        self._transport = transport
        self._run = run
        self._digest = digest
        self._codec = codec
        self._meter = meter
        self._stall_s = stall_s
        self._handshake_s = handshake_s
        self._streams = 0

    async def ask(self, peer: PeerId, parcel: Parcel, expect: Layout, *, patience_s: float) -> Answered:
        """Sends a parcel and returns the answer, whole and of the expected layout.

        Waits up to `patience_s` for the answer to begin. Raises `UnreachableError` when the peer cannot be
        dialled, goes away, stalls or is silent for longer; `RefusedError` when it says no, `BehindError` when
        that is because we are behind; `ProtocolError` for tensors that are not finite, and for an answer of
        another layout. The sent tensors must not change before this returns or raises.
        """
        body = await asyncio.to_thread(Body, parcel.tensors, self._codec)
        reader, writer = await self._transport.dial(peer, COURIER_PROTOCOL, timeout_s=self._handshake_s)
        wire = Wire(reader, writer, "courier", self._meter)
        try:
            await self._send_request(peer, wire, parcel.meta, body)
            header = await _first_word(peer, wire, patience_s)
            async with StallLimit(self._stall_s) as limit:
                wire.on_moved(limit.moved)
                answer = Parcel(await _receive(wire, expect), read_meta(header.get("meta")))
                await wire.send_header(Kind.DONE, {})
            await wire.close(_CLOSE_S)
            return Answered(answer, wire.sent_bytes, wire.received_bytes)
        except TimeoutError:
            raise UnreachableError(f"{peer} made no progress for {self._stall_s:g} s") from None
        except WireError as error:
            raise UnreachableError(f"{peer} went away before it had answered: {error}") from None
        finally:
            wire.cut()

    async def _send_request(self, peer: PeerId, wire: Wire, meta: Meta, body: Body) -> None:
        await wire.send_header(Kind.HEADER, {"run": self._run, "digest": self._digest, "meta": dict(meta)})
        await _first_word(peer, wire, self._handshake_s)
        async with StallLimit(self._stall_s) as limit:
            wire.on_moved(limit.moved)
            await body.send(wire, NoDigest())
        wire.on_moved(None)

    async def serve(self, expect: Expect, handle: Handle) -> None:
        """Answers parcels from now on. A stranger's faults end its own stream and nothing else."""

        async def on_stream(peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            wire = Wire(reader, writer, "courier", self._meter)
            self._streams += 1
            try:
                await self._answer(peer, wire, expect, handle)
            except (TimeoutError, PeersError) as error:
                _log.debug("%s went away in the middle of a parcel: %s", peer, error)
            finally:
                self._streams -= 1

        await self._transport.serve(COURIER_PROTOCOL, on_stream)

    async def _answer(self, peer: PeerId, wire: Wire, expect: Expect, handle: Handle) -> None:
        try:
            parcel = await self._receive_request(peer, wire, expect)
            answer = await _while_there(wire, handle(peer, parcel))
        except WireError:
            raise
        except (ProtocolError, RefusedError) as error:
            await _decline(wire, error)
            return
        body = await asyncio.to_thread(Body, answer.tensors, self._codec)
        async with StallLimit(self._stall_s) as limit:
            wire.on_moved(limit.moved)
            header = {"answer": Answer.ACCEPT.value, "reason": "", "meta": dict(answer.meta)}
            await wire.send_header(Kind.HEADER, header)
            await body.send(wire, NoDigest())
            await wire.receive(Kind.DONE)

    async def _receive_request(self, peer: PeerId, wire: Wire, expect: Expect) -> Parcel:
        async with StallLimit(self._stall_s) as limit:
            wire.on_moved(limit.moved)
            header = await wire.receive_header(Kind.HEADER)
            if self._streams > MAX_STREAMS:
                raise RefusedError(f"{MAX_STREAMS} parcels are open here already")
            for key, ours in (("run", self._run), ("digest", self._digest)):
                if header.get(key) != ours:
                    raise RefusedError(f"{key} {clean(repr(header.get(key)))} against '{ours}'")
            meta = read_meta(header.get("meta"))
            layout = expect(peer, meta)
            await wire.send_header(Kind.HEADER, {"answer": Answer.ACCEPT.value, "reason": ""})
            tensors = await _receive(wire, layout)
        wire.on_moved(None)
        return Parcel(tensors, meta)


async def _first_word(peer: PeerId, wire: Wire, patience_s: float) -> Mapping[str, object]:
    """The header of an answer that is yes. Raises `BehindError` or `RefusedError` for a no."""
    try:
        async with asyncio.timeout(patience_s):
            header = await wire.receive_header(Kind.HEADER)
    except TimeoutError:
        raise UnreachableError(f"{peer} gave no answer within {patience_s:g} s") from None
    if header.get("answer") == Answer.ACCEPT.value:
        return header
    if header.get("answer") == Answer.AHEAD.value:
        raise BehindError(reason_of(header))
    raise RefusedError(reason_of(header))


async def _receive(wire: Wire, expect: Layout) -> Tensors:
    digest = NoDigest()
    entries = await receive_table(wire, digest)
    check_layout(entries, expect)
    return await receive_tensors(wire, entries, digest)


async def _while_there(wire: Wire, work: Awaitable[T]) -> T:
    """The work's result; cancels it and raises `WireError` when the other side leaves before."""
    working = asyncio.ensure_future(work)
    ended = asyncio.ensure_future(wire.ended())
    try:
        await asyncio.wait({working, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise WireError("it left before it was answered")
        return working.result()
    finally:
        for task in (working, ended):
            task.cancel()
        await asyncio.gather(working, ended, return_exceptions=True)


async def _decline(wire: Wire, error: PeersError) -> None:
    answer = Answer.AHEAD if isinstance(error, BehindError) else Answer.REFUSED
    try:
        await wire.send_header(Kind.HEADER, {"answer": answer.value, "reason": clean(str(error))})
        await wire.linger(_CLOSE_S)
    except PeersError as broken:
        _log.debug("could not decline a parcel: %s", broken)
