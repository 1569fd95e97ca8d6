"""The run card and the whole state, served to newcomers. The newcomer's side of the state is in `download`.

card:      request {} -> {"answer", "reason", "run", "digest", "size_bytes"}, then the document in blocks
manifest:  request {"run", "digest"} -> PROGRESS {} while the state is being taken, {"answer", "reason", "round",
           "meta"}, then table, and the chunks' hashes in blocks; see `manifest`
chunks:    request {"run", "digest", "root"} -> {"answer", "reason"}; then, as often as the newcomer likes,
           {"first", "count"} -> the chunks in blocks of at most `caps.PIECE_BYTES`, while PROGRESS {} comes back now
           and then from a newcomer on a slow link; DONE {} ends it
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from peers.caps import PIECE_BYTES, TokenBucket, check_rate
from peers.errors import ProtocolError, RefusedError, UnreachableError
from peers.exchange import Answer, PeerId
from peers.manifest import Meta as Meta
from peers.manifest import Prepared
from peers.manifest import Snapshot as Snapshot
from peers.manifest import read_meta as read_meta
from peers.meter import Meter
from peers.shelf import Shelf, ShelfLimits
from peers.stall import StallLimit
from peers.transport import Transport
from peers.wire import BLOCK_BYTES, Kind, Wire, clean, decode_json, reason_of

CARD_PROTOCOL = "/gasloc/card/1"
STATE_PROTOCOL = "/gasloc/state/2"

MAX_CARD_BYTES = 1024 * 1024
GONE = "gone"
"""The answer to one that asks for chunks of a state that is no longer kept."""
MOST_CHUNKS_ASKED = 64
"""In one request of a chunk stream."""
MOST_MANIFEST_STREAMS = 64
MOST_STREAMS_OF_ONE = 2
"""Of one newcomer: one that broke may still be open here while its newcomer resumes."""
SIGN_EVERY_S = 2.0
"""A side that keeps the other waiting sends PROGRESS about so often,"""
MOST_SIGNS = 300
"""and at most so many in a row."""
_MAX_TEXT_CHARACTERS = 128
_CLOSE_S = 2.0
_LIMITS = ShelfLimits()

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunCard:
    """What a newcomer needs to know of a run."""

    run: str
    digest: str
    """Of the recipe, in hex, as the trainer computes it."""
    document: bytes
    """The recipe, opaque here; at most 1 MiB."""


class Donor:
    """Serves a run's card and a peer's state."""

    def __init__(
        self,
        transport: Transport,
        card: RunCard,
        provide: Callable[[], Snapshot | None],
        *,
        meter: Meter | None = None,
        max_downloads: int = 3,
        rate_bytes_per_s: int = 0,
        limits: ShelfLimits = _LIMITS,
        stall_s: float = 10.0,
    ) -> None:
        """`provide` is called on a worker thread, once for each state that is kept; None: there is none to give yet.

        At most `max_downloads` newcomers download at once, others are answered `busy`; and all together get at
        most `rate_bytes_per_s`, 0: no limit. Raises `ValueError` for a card over `MAX_CARD_BYTES`, and
        `CapError` for a rate that is too small.
        """
        if len(card.document) > MAX_CARD_BYTES:
            raise ValueError(f"the run's document has {len(card.document)} bytes, over {MAX_CARD_BYTES}")
        check_rate(rate_bytes_per_s)
        self._transport = transport
        self._card = card
        self._meter = meter
        self._max_downloads = max_downloads
        self._rate = rate_bytes_per_s
        self._bucket: TokenBucket | None = None
        self._stall_s = stall_s
        self._streams: Counter[PeerId] = Counter()
        """Chunk streams that are open, by newcomer."""
        self._manifest_streams = 0
        self.shelf = Shelf(provide, limits)

    async def start(self) -> None:
        """Serves from now on."""
        self._bucket = TokenBucket(self._rate, _now())
        await self._transport.serve(CARD_PROTOCOL, self._on_card)
        await self._transport.serve(STATE_PROTOCOL, self._on_state)

    async def _on_card(self, peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire = Wire(reader, writer, "card", self._meter)
        with contextlib.suppress(ProtocolError, RefusedError, TimeoutError):
            async with StallLimit(self._stall_s) as limit:
                wire.on_moved(limit.moved)
                await wire.receive_header(Kind.HEADER)
                await _send_card(wire, self._card)
                await wire.linger(_CLOSE_S)

    async def _on_state(self, peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire = Wire(reader, writer, "state", self._meter)
        # a slow link drains it in less than `stall_s`, or we would take it for a dead one
        writer.transport.set_write_buffer_limits(high=PIECE_BYTES)
        try:
            async with StallLimit(self._stall_s):
                request = await wire.receive_header(Kind.HEADER)
            declined = self._decline(peer, request)
            if declined:
                await _send_no(wire, *declined)
            elif "root" in request:
                await self._give_chunks(peer, wire, request["root"])
            else:
                await self._give_manifest(wire, request)
            await wire.linger(self._stall_s)
        except (ProtocolError, RefusedError, TimeoutError) as error:
            _log.debug("%s did not take the whole state: %s", peer, error)

    def _decline(self, peer: PeerId, request: Mapping[str, object]) -> tuple[Answer, str] | None:
        for key, ours in (("run", self._card.run), ("digest", self._card.digest)):
            theirs = request.get(key)
            if theirs != ours:
                return Answer.REFUSED, f"{key} {clean(repr(theirs))} against '{ours}'"
        if peer not in self._streams and len(self._streams) >= self._max_downloads:
            return Answer.BUSY, f"{self._max_downloads} downloads are under way already"
        if self._streams[peer] >= MOST_STREAMS_OF_ONE:
            return Answer.BUSY, f"{MOST_STREAMS_OF_ONE} downloads of yours are under way already"
        return None

    async def _give_manifest(self, wire: Wire, request: Mapping[str, object]) -> None:
        least_round = request.get("round", 0)
        if type(least_round) is not int:
            raise ProtocolError(f"a newcomer asks for round {clean(repr(least_round))}")
        if self._manifest_streams >= MOST_MANIFEST_STREAMS:
            await _send_no(wire, Answer.BUSY, f"{MOST_MANIFEST_STREAMS} newcomers ask for its state now")
            return
        self._manifest_streams += 1
        try:
            await self._find_and_send_manifest(wire, least_round)
        finally:
            self._manifest_streams -= 1

    async def _find_and_send_manifest(self, wire: Wire, least_round: int) -> None:
        taking = asyncio.create_task(self.shelf.newest(least_round))
        try:
            # a large state takes longer to copy and hash than a newcomer waits without a sign of life
            while not (await asyncio.wait({taking}, timeout=SIGN_EVERY_S))[0]:
                await wire.send_header(Kind.PROGRESS, {})
            found = taking.result()
        finally:
            taking.cancel()
        if not isinstance(found, Prepared):
            await _send_no(wire, *found)
            return
        async with StallLimit(self._stall_s) as limit:
            wire.on_moved(limit.moved)
            await _send_manifest(wire, found)

    async def _give_chunks(self, peer: PeerId, wire: Wire, root: object) -> None:
        prepared = self.shelf.find(root) if isinstance(root, str) else None
        if prepared is None:
            await _send_no(wire, GONE, "it keeps that state no more")
            return
        self._streams[peer] += 1
        try:
            with self.shelf.held(prepared):
                await wire.send_header(Kind.HEADER, {"answer": Answer.ACCEPT.value, "reason": ""})
                while (request := await self._next_request(wire)) is not None:
                    await self._answer(wire, prepared, request)
        finally:
            self._streams -= Counter([peer])

    async def _next_request(self, wire: Wire) -> Mapping[str, object] | None:
        """None where the newcomer needs nothing more. It may still be receiving what we have long sent."""
        for _ in range(MOST_SIGNS):
            async with asyncio.timeout(self._stall_s):
                kind, payload = await wire.receive(Kind.HEADER, Kind.DONE, Kind.PROGRESS)
            if kind is not Kind.PROGRESS:
                return None if kind is Kind.DONE else decode_json(payload)
        raise ProtocolError(f"{MOST_SIGNS} signs of life and no request")

    async def _answer(self, wire: Wire, prepared: Prepared, request: Mapping[str, object]) -> None:
        chunks = asked(request, prepared.manifest.chunks)
        async with StallLimit(self._stall_s) as limit:
            wire.on_moved(limit.moved)
            for chunk in chunks:
                data = prepared.flat.read(*prepared.manifest.span(chunk))
                for start in range(0, len(data), PIECE_BYTES):
                    await self._send(wire, data[start : start + PIECE_BYTES])
        wire.on_moved(None)

    async def _send(self, wire: Wire, piece: memoryview) -> None:
        assert self._bucket is not None, "start() comes first"
        wait_s = self._bucket.take(len(piece), _now())
        if wait_s:
            await asyncio.sleep(wait_s)
        await wire.send_block(piece)


def asked(request: Mapping[str, object], chunks: int) -> range:
    """The chunks that a request names, of a state of `chunks`. Raises `ProtocolError`."""
    first, count = request.get("first"), request.get("count")
    if not (type(first) is int and type(count) is int and first >= 0 and 0 < count <= MOST_CHUNKS_ASKED):
        raise ProtocolError(f"a request for {clean(repr(count))} chunks from {clean(repr(first))}")
    if first + count > chunks:
        raise ProtocolError(f"a request for chunks {first} to {first + count} of {chunks}")
    return range(first, first + count)


async def _send_card(wire: Wire, card: RunCard) -> None:
    await wire.send_header(
        Kind.HEADER,
        {
            "answer": Answer.ACCEPT.value,
            "reason": "",
            "run": card.run,
            "digest": card.digest,
            "size_bytes": len(card.document),
        },
    )
    for start in range(0, len(card.document), BLOCK_BYTES):
        await wire.send_block(memoryview(card.document)[start : start + BLOCK_BYTES])


async def _send_manifest(wire: Wire, prepared: Prepared) -> None:
    manifest = prepared.manifest
    head = {"answer": Answer.ACCEPT.value, "reason": "", "round": manifest.round, "meta": dict(manifest.meta)}
    await wire.send_header(Kind.HEADER, head)
    await wire.send_payload(Kind.TABLE, prepared.table)
    for start in range(0, len(manifest.hashes), BLOCK_BYTES):
        await wire.send_block(memoryview(manifest.hashes)[start : start + BLOCK_BYTES])


async def _send_no(wire: Wire, answer: str, reason: str) -> None:
    await wire.send_header(Kind.HEADER, {"answer": str(answer), "reason": reason})


async def fetch_card(transport: Transport, peer: PeerId, *, timeout_s: float, meter: Meter | None = None) -> RunCard:
    """A run's card from one of its peers.

    Raises `UnreachableError` when the peer cannot be dialled or does not answer within `timeout_s`,
    `RefusedError` when it says no, `ProtocolError` when what it sends is not a card.
    """
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await transport.dial(peer, CARD_PROTOCOL, timeout_s=timeout_s)
            wire = Wire(reader, writer, "card", meter)
            try:
                await wire.send_header(Kind.HEADER, {})
                return await _receive_card(wire)
            finally:
                wire.cut()
    except TimeoutError:
        raise UnreachableError(f"{peer} did not give its run card within {timeout_s:g} s") from None


async def _receive_card(wire: Wire) -> RunCard:
    header = await wire.receive_header(Kind.HEADER)
    if header.get("answer") != Answer.ACCEPT.value:
        raise RefusedError(f"{clean(str(header.get('answer')))}: {reason_of(header)}")
    size_bytes = header.get("size_bytes")
    if type(size_bytes) is not int or not 0 <= size_bytes <= MAX_CARD_BYTES:
        raise ProtocolError(f"a run card of {clean(repr(size_bytes))} bytes: the limit is {MAX_CARD_BYTES}")
    run, digest = _text(header, "run"), _text(header, "digest")
    document = bytearray(size_bytes)
    for start in range(0, size_bytes, BLOCK_BYTES):
        await wire.receive_block(memoryview(document)[start : start + BLOCK_BYTES])
    return RunCard(run, digest, bytes(document))


def _text(header: Mapping[str, object], key: str) -> str:
    text = header.get(key)
    if not (isinstance(text, str) and 0 < len(text) <= _MAX_TEXT_CHARACTERS and text.isprintable()):
        raise ProtocolError(f"the run card's '{key}' is not a printable text of 1 to 128 characters")
    return text


def _now() -> float:
    return asyncio.get_running_loop().time()
