"""One donor's streams, as a newcomer opens them: its manifest, and chunks of the state that it announced."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from peers.caps import PIECE_BYTES
from peers.donor import GONE, MOST_SIGNS, SIGN_EVERY_S, STATE_PROTOCOL
from peers.errors import BusyError, GoneError, RefusedError, UnreachableError
from peers.exchange import Answer, PeerId
from peers.manifest import CHUNK_BYTES, Manifest, decode, hashes_bytes, read_entries
from peers.meter import Meter
from peers.stall import StallLimit
from peers.table import MAX_TABLE_BYTES
from peers.transport import Transport
from peers.wire import BLOCK_BYTES, Kind, Wire, clean, decode_json, reason_of

_CLOSE_S = 2.0


@dataclass(frozen=True, slots=True)
class Newcomer:
    """Who downloads, what, and within which limits."""

    transport: Transport
    run: str
    digest: str
    dial_s: float
    stall_s: float
    limit_bytes: int
    prefixes: tuple[str, ...]
    meter: Meter | None
    least_round: int = 0
    """States of earlier rounds are of no use, if there is a later one."""

    def reason(self, error: BaseException) -> str:
        """An error of this module in words."""
        return f"no progress for {self.stall_s:g} s" if isinstance(error, TimeoutError) else str(error)


async def receive_manifest(newcomer: Newcomer, donor: PeerId) -> Manifest:
    """What a donor holds now.

    Waits while it says that it is taking its state. Raises `UnreachableError`, `WireError` where the stream breaks,
    `TimeoutError` where nothing comes for `stall_s`, `BusyError` and other `RefusedError`s with its reason, and
    `ProtocolError` or `LayoutError` for what is no manifest, or is over the limits.
    """
    async with _opened(newcomer, donor, {"round": newcomer.least_round}) as wire:
        header = accepted(await _patiently(newcomer, wire))
        async with StallLimit(newcomer.stall_s) as limit:
            wire.on_moved(limit.moved)
            _, table = await wire.receive(Kind.TABLE, limit_bytes=MAX_TABLE_BYTES)
            entries = read_entries(table, limit_bytes=newcomer.limit_bytes, prefixes=newcomer.prefixes)
            hashes = bytearray(hashes_bytes(entries))
            for start in range(0, len(hashes), BLOCK_BYTES):
                await wire.receive_block(memoryview(hashes)[start : start + BLOCK_BYTES])
        return decode(header, table, entries, bytes(hashes))


class ChunkStream:
    """An open stream on which a donor gives chunks of one state. Made by `open_chunks`."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._scratch = memoryview(bytearray(CHUNK_BYTES))
        self._told_at = 0.0

    async def ask(self, chunks: range) -> None:
        """Asks for chunks; they are to be received in this order before more are asked for."""
        await self._wire.send_header(Kind.HEADER, {"first": chunks.start, "count": len(chunks)})
        self._told_at = _now()

    async def receive(self, size_bytes: int) -> memoryview:
        """The next chunk, of so many bytes; not verified, and valid until the next call."""
        data = self._scratch[:size_bytes]
        for start in range(0, size_bytes, PIECE_BYTES):
            await self._wire.receive_block(data[start : start + PIECE_BYTES])
            if _now() - self._told_at > SIGN_EVERY_S:
                # megabytes may lie on the way to us: the donor has sent them all, and hears nothing
                await self._wire.send_header(Kind.PROGRESS, {})
                self._told_at = _now()
        return data

    async def say_goodbye(self) -> None:
        """Frees our place at the donor at once."""
        await self._wire.send_header(Kind.DONE, {})
        await self._wire.close(_CLOSE_S)


@asynccontextmanager
async def open_chunks(newcomer: Newcomer, donor: PeerId, root: str) -> AsyncIterator[ChunkStream]:
    """A stream for chunks of the state with that root; cut at the end.

    Raises as `receive_manifest` does, and `GoneError` where the donor has dropped that state. Within the block,
    `TimeoutError` where nothing moves for `stall_s`.
    """
    async with _opened(newcomer, donor, {"root": root}) as wire, StallLimit(newcomer.stall_s) as limit:
        accepted(await wire.receive_header(Kind.HEADER))
        wire.on_moved(limit.moved)
        yield ChunkStream(wire)


@asynccontextmanager
async def _opened(newcomer: Newcomer, donor: PeerId, wanted: Mapping[str, object]) -> AsyncIterator[Wire]:
    reader, writer = await newcomer.transport.dial(donor, STATE_PROTOCOL, timeout_s=newcomer.dial_s)
    wire = Wire(reader, writer, "state", newcomer.meter)
    try:
        await wire.send_header(Kind.HEADER, {"run": newcomer.run, "digest": newcomer.digest, **wanted})
        yield wire
    finally:
        wire.cut()


async def _patiently(newcomer: Newcomer, wire: Wire) -> Mapping[str, object]:
    """The header that comes after any signs of life."""
    for _ in range(MOST_SIGNS):
        async with asyncio.timeout(newcomer.stall_s):
            kind, payload = await wire.receive(Kind.HEADER, Kind.PROGRESS)
        if kind is Kind.HEADER:
            return decode_json(payload)
    raise UnreachableError("it has been taking its state for too long")


def accepted(header: Mapping[str, object]) -> Mapping[str, object]:
    """The header, if it says yes. Raises `BusyError`, `GoneError` or `RefusedError` with the reason."""
    answer = header.get("answer")
    if answer == Answer.ACCEPT.value:
        return header
    kinds: dict[object, type[RefusedError]] = {Answer.BUSY.value: BusyError, GONE: GoneError}
    kind = kinds.get(answer, RefusedError) if isinstance(answer, str) else RefusedError
    raise kind(f"{clean(str(answer))}: {reason_of(header)}")


def _now() -> float:
    return asyncio.get_running_loop().time()
