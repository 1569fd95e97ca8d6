"""The run card and the whole state, served to newcomers; and the newcomer's side of it.

card:   request {} -> {"answer", "reason", "run", "digest", "size_bytes"}, then the document in blocks
state:  request {"run", "digest"} -> {"answer", "reason", "round", "meta"}, then table, blocks, and
        DONE {"sha256": of the table and all tensor bytes}
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from peers.body import Body, new_digest, receive_table, receive_tensors
from peers.errors import (
    LayoutError,
    NoDonorError,
    PeersError,
    ProtocolError,
    RefusedError,
    UnreachableError,
    WireError,
)
from peers.exchange import Answer, PeerId, Tensors
from peers.meter import Meter
from peers.stall import StallLimit
from peers.transport import Transport
from peers.wire import BLOCK_BYTES, MAX_HEADER_BYTES, Kind, Wire, clean, encode_json, reason_of

CARD_PROTOCOL = "/gasloc/card/1"
STATE_PROTOCOL = "/gasloc/state/1"

MAX_CARD_BYTES = 1024 * 1024
MAX_STATE_BYTES = 64 * 1024**3
_MAX_META = 256
_MAX_TEXT_CHARACTERS = 128
_CLOSE_S = 2.0

_log = logging.getLogger(__name__)

Meta = Mapping[str, int | float | str]


@dataclass(frozen=True, slots=True)
class RunCard:
    """What a newcomer needs to know of a run."""

    run: str
    digest: str
    """Of the recipe, in hex, as the trainer computes it."""
    document: bytes
    """The recipe, opaque here; at most 1 MiB."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A peer's whole state at a round. Its tensors must not change once it was handed over."""

    round: int
    meta: Meta = field(default_factory=dict)
    tensors: Tensors = field(default_factory=dict)
    """Of any shape and any floating-point, integer or boolean dtype; they travel exactly."""


@dataclass(frozen=True, slots=True)
class _Prepared:
    header: bytes
    body: Body


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
        stall_s: float = 10.0,
    ) -> None:
        """`provide` is called on a worker thread, once for each download; None: there is no state to give yet.

        At most `max_downloads` run at once; others are answered `busy`. Raises `ValueError` for a card over
        `MAX_CARD_BYTES`.
        """
        if len(card.document) > MAX_CARD_BYTES:
            raise ValueError(f"the run's document has {len(card.document)} bytes, over {MAX_CARD_BYTES}")
        self._transport = transport
        self._card = card
        self._provide = provide
        self._meter = meter
        self._max_downloads = max_downloads
        self._stall_s = stall_s
        self._downloads = 0

    async def start(self) -> None:
        """Serves from now on."""
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
        try:
            async with StallLimit(self._stall_s):
                request = await wire.receive_header(Kind.HEADER)
            declined = self._decline(request)
            if declined:
                await _send_no(wire, *declined)
            else:
                await self._give(wire)
            await wire.linger(self._stall_s)
        except (ProtocolError, RefusedError, TimeoutError) as error:
            _log.debug("%s did not take the whole state: %s", peer, error)

    async def _give(self, wire: Wire) -> None:
        self._downloads += 1
        try:
            prepared = await asyncio.to_thread(self._prepare)
            if isinstance(prepared, _Prepared):
                async with StallLimit(self._stall_s) as limit:
                    wire.on_moved(limit.moved)
                    await _send_state(wire, prepared)
            else:
                await _send_no(wire, *prepared)
        finally:
            self._downloads -= 1

    def _decline(self, request: Mapping[str, object]) -> tuple[Answer, str] | None:
        for key, ours in (("run", self._card.run), ("digest", self._card.digest)):
            theirs = request.get(key)
            if theirs != ours:
                return Answer.REFUSED, f"{key} {clean(repr(theirs))} against '{ours}'"
        if self._downloads >= self._max_downloads:
            return Answer.BUSY, f"{self._max_downloads} downloads are under way already"
        return None

    def _prepare(self) -> _Prepared | tuple[Answer, str]:
        """On a worker thread: takes the state and makes it ready, or says why there is none."""
        try:
            snapshot = self._provide()
            if snapshot is None:
                return Answer.REFUSED, "it has no state to give yet"
            return _Prepared(_state_header(snapshot), Body(snapshot.tensors, "fp32"))
        except PeersError as error:
            return Answer.REFUSED, f"its own state is unfit: {error}"
        except Exception:
            _log.exception("no state for a newcomer: the trainer failed to give it")
            return Answer.REFUSED, "it failed to give its state"


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


def _state_header(snapshot: Snapshot) -> bytes:
    """Raises `ProtocolError` for a round or a meta that a newcomer would refuse."""
    _check_round(snapshot.round)
    meta = read_meta(dict(snapshot.meta))
    fields = {"answer": Answer.ACCEPT.value, "reason": "", "round": snapshot.round, "meta": meta}
    header = encode_json(fields)
    if len(header) > MAX_HEADER_BYTES:
        raise ProtocolError(f"a state's meta of {len(header)} bytes is over the limit of {MAX_HEADER_BYTES}")
    return header


async def _send_state(wire: Wire, prepared: _Prepared) -> None:
    await wire.send_payload(Kind.HEADER, prepared.header)
    digest = new_digest()
    await prepared.body.send(wire, digest)
    await wire.send_header(Kind.DONE, {"sha256": digest.hexdigest()})


async def _send_no(wire: Wire, answer: Answer, reason: str) -> None:
    await wire.send_header(Kind.HEADER, {"answer": answer.value, "reason": reason})


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
    header = await accepted(wire)
    size_bytes = header.get("size_bytes")
    if type(size_bytes) is not int or not 0 <= size_bytes <= MAX_CARD_BYTES:
        raise ProtocolError(f"a run card of {clean(repr(size_bytes))} bytes: the limit is {MAX_CARD_BYTES}")
    run, digest = _text(header, "run"), _text(header, "digest")
    document = bytearray(size_bytes)
    for start in range(0, size_bytes, BLOCK_BYTES):
        await wire.receive_block(memoryview(document)[start : start + BLOCK_BYTES])
    return RunCard(run, digest, bytes(document))


async def fetch_state(
    transport: Transport,
    donors: Sequence[PeerId],
    *,
    run: str,
    digest: str,
    stall_s: float = 10.0,
    dial_s: float = 5.0,
    limit_bytes: int = MAX_STATE_BYTES,
    prefixes: Sequence[str] = ("",),
    meter: Meter | None = None,
) -> Snapshot:
    """The whole state, from the first donor that gives it; donors are tried in order.

    Each tensor's name must start with one of `prefixes`, and all together must have at most `limit_bytes`,
    which is checked before a tensor is received. Every block's checksum and the SHA-256 of the whole are
    verified before this returns. A donor that makes no progress for `stall_s` is given up.

    Raises `NoDonorError` that lists each donor and its reason.
    """
    reasons = []
    for donor in donors:
        try:
            async with StallLimit(stall_s + dial_s) as limit:
                reader, writer = await transport.dial(donor, STATE_PROTOCOL, timeout_s=dial_s)
                wire = Wire(reader, writer, "state", meter)
                wire.on_moved(limit.moved)
                try:
                    await wire.send_header(Kind.HEADER, {"run": run, "digest": digest})
                    return await _receive_state(wire, limit_bytes, tuple(prefixes))
                finally:
                    wire.cut()
        except TimeoutError:
            reasons.append(f"{donor}: no progress for {stall_s:g} s")
        except PeersError as error:
            reasons.append(f"{donor}: {error}")
    raise NoDonorError(f"nobody could give the state: {'; '.join(reasons) or 'there is no donor'}")


async def _receive_state(wire: Wire, limit_bytes: int, prefixes: tuple[str, ...]) -> Snapshot:
    header = await accepted(wire)
    round_, meta = _check_round(header.get("round")), read_meta(header.get("meta"))
    digest = new_digest()
    entries = await receive_table(wire, digest)
    total_bytes = sum(entry.size_bytes for entry in entries)
    if total_bytes > limit_bytes:
        raise LayoutError(f"a state of {total_bytes} bytes is over the limit of {limit_bytes}")
    for entry in entries:
        if not entry.name.startswith(prefixes):
            raise LayoutError(f"tensor '{entry.name}' does not belong to a state")
    tensors = await receive_tensors(wire, entries, digest)
    if (await wire.receive_header(Kind.DONE)).get("sha256") != digest.hexdigest():
        raise WireError("the state does not match its SHA-256")
    return Snapshot(round_, meta, tensors)


async def accepted(wire: Wire) -> dict[str, object]:
    """The answer to a request. Raises `RefusedError` with the reason when it is no."""
    header = await wire.receive_header(Kind.HEADER)
    if header.get("answer") != Answer.ACCEPT.value:
        raise RefusedError(f"{clean(str(header.get('answer')))}: {reason_of(header)}")
    return header


def _text(header: Mapping[str, object], key: str) -> str:
    text = header.get(key)
    if not (isinstance(text, str) and 0 < len(text) <= _MAX_TEXT_CHARACTERS and text.isprintable()):
        raise ProtocolError(f"the run card's '{key}' is not a printable text of 1 to 128 characters")
    return text


def _check_round(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ProtocolError("the state's round is not a whole number from 0 to 2^63")
    return value


def read_meta(value: object) -> dict[str, int | float | str]:
    if not isinstance(value, dict) or len(value) > _MAX_META:
        raise ProtocolError(f"the state's meta is not an object of at most {_MAX_META} entries")
    for name, item in value.items():
        if type(item) not in (int, float, str) or (type(item) is float and not math.isfinite(item)):
            raise ProtocolError(f"the state's meta {clean(repr(name))} is neither a finite number nor a text")
    return value
