"""Frames on a byte stream.

    frame = kind (1 byte) | payload length (4 bytes) | checksum (4 bytes) | payload

All integers are little-endian. A header's payload is a JSON object; a block's is tensor bytes, whose length both
sides know beforehand. The checksum is the lower half of XXH3-64 of the payload, seeded with kind and length. It guards
against faults on the way, not against a liar: streams are authenticated by the transport. (On one core here XXH3 runs
at 58 GiB/s in the cache, `zlib.crc32` at 4, BLAKE3 at 6.)
"""

import asyncio
import contextlib
import json
import struct
from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum

import xxhash

from peers import direct
from peers.errors import GarbledError, ProtocolError, RefusedError, WireError
from peers.meter import Meter

_HEAD = struct.Struct("<BII")

MAX_HEADER_BYTES = 64 * 1024
BLOCK_BYTES = 1024 * 1024
_BUFFER_BYTES = BLOCK_BYTES // 4
_SHOW_S = 0.25  # how often a slow link shows progress within a piece
_HEADED_BYTES = 32 * 1024 - _HEAD.size
_SKIPPED_BYTES = 4 * BLOCK_BYTES
MAX_REASON_CHARACTERS = 400


class Kind(IntEnum):
    """What a frame holds."""

    HEADER = 1
    TABLE = 2
    """Names, shapes and dtypes of the tensors that follow."""
    BLOCK = 3
    PROGRESS = 4
    """How much has been received so far, sent while we have nothing else to say."""
    DONE = 5
    """All was received, or all was sent, and is good."""
    ABORT = 6
    """The sender ends the conversation here, and says why."""
    REQUEST = 7
    """Which blocks of modular tensors could not be restored and are to come as they are; see `modular`."""


class Wire:
    """Reads and writes frames on one stream, and counts its bytes.

    A stream that ends or breaks raises `WireError`; a frame that is garbled, unexpected or over its limit its kind
    `GarbledError`.
    Nothing is allocated for a payload before its length was checked. JSON takes up to about fifty times its
    size once parsed, so header limits are small.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        conversation: str,
        meter: Meter | None = None,
    ) -> None:
        """`conversation` is the kind under which `meter` counts: "exchange", "probe", "state", "card"."""
        self._reader = reader
        self._writer = writer
        self._conversation = conversation
        self._meter = meter
        self._moved: Callable[[int], None] | None = None
        self._unmoved_bytes = 0
        """Written, and not told to `_moved` yet."""
        self.sent_bytes = 0
        self.received_bytes = 0
        writer.transport.set_write_buffer_limits(high=_BUFFER_BYTES)

    def on_moved(self, moved: Callable[[int], None] | None) -> None:
        """From now on `moved` is told the size of each piece that was sent or received, in bytes."""
        self._moved = moved

    async def send_header(self, kind: Kind, value: Mapping[str, object]) -> None:
        """Sends a JSON object. Raises `WireError` when the stream is broken."""
        await self._send(kind, encode_json(value))

    async def send_payload(self, kind: Kind, payload: bytes) -> None:
        """Sends bytes that were encoded by the caller."""
        await self._send(kind, payload)

    async def send_block(self, block: memoryview) -> None:
        """Sends tensor bytes without copying them; waits while the stream is full."""
        await self._send(Kind.BLOCK, block)

    async def _send(self, kind: Kind, payload: bytes | memoryview) -> None:
        head = _HEAD.pack(kind, len(payload), _checksum(kind, payload))
        # what is written alone goes through p2pd alone, and costs there what 32 KiB do
        await self._write(head + payload[:_HEADED_BYTES])
        if len(payload) > _HEADED_BYTES:
            # in one piece: to be woken for each part of it would cost as much as to send it
            await self._write(memoryview(payload)[_HEADED_BYTES:])

    async def _write(self, piece: bytes | memoryview) -> None:
        self.sent_bytes += len(piece)
        self._unmoved_bytes += len(piece)
        if self._meter:
            self._meter.sent(self._conversation, len(piece))
        try:
            self._writer.write(piece)
            with self._showing(len(piece)):
                await self._writer.drain()
        except (OSError, EOFError, RuntimeError) as error:
            raise WireError(f"the stream broke while sending: {str(error) or type(error).__name__}") from None
        self._tell_moved(0)

    @contextlib.contextmanager
    def _showing(self, size_bytes: int) -> Iterator[None]:
        """Tells now and then how much of a large piece has left."""
        if self._moved is None or size_bytes <= _BUFFER_BYTES:
            yield
            return
        loop = asyncio.get_running_loop()
        timers: list[asyncio.TimerHandle] = []

        def show() -> None:
            timers[:] = [loop.call_later(_SHOW_S, show)]
            self._tell_moved(self._writer.transport.get_write_buffer_size())

        timers.append(loop.call_later(_SHOW_S, show))
        try:
            yield
        finally:
            timers[0].cancel()

    def _tell_moved(self, left_bytes: int) -> None:
        """Tells what was written and has left since the last time."""
        moved_bytes = max(self._unmoved_bytes - left_bytes, 0)  # what is left may be of before, and told already
        self._unmoved_bytes -= moved_bytes
        if self._moved and moved_bytes:
            self._moved(moved_bytes)

    async def receive_head(self) -> tuple[Kind, int, int]:
        """The next frame's kind, payload length in bytes, and checksum."""
        head = memoryview(bytearray(_HEAD.size))
        await self._read_into(head)
        number, length, checksum = _HEAD.unpack(head)
        try:
            return Kind(number), length, checksum
        except ValueError:
            raise GarbledError(f"a frame of unknown kind {number}: the stream is garbled") from None

    async def receive_payload(self, head: tuple[Kind, int, int], *, limit_bytes: int = MAX_HEADER_BYTES) -> bytes:
        """The payload that belongs to `head`, of at most `limit_bytes`."""
        kind, length, checksum = head
        if length > limit_bytes:
            raise GarbledError(f"a {kind.name} frame of {length} bytes is over the limit of {limit_bytes}")
        payload = bytearray(length)
        await self._read_into(memoryview(payload))
        _check(kind, payload, checksum)
        return bytes(payload)

    async def receive(self, *kinds: Kind, limit_bytes: int = MAX_HEADER_BYTES) -> tuple[Kind, bytes]:
        """The next frame, which must be one of `kinds` and no longer than `limit_bytes`.

        An `ABORT`, unless asked for, raises `RefusedError` with the other side's reason.
        """
        head = await self.receive_head()
        await self._expect(head, kinds)
        return head[0], await self.receive_payload(head, limit_bytes=limit_bytes)

    async def receive_header(self, kind: Kind, *, limit_bytes: int = MAX_HEADER_BYTES) -> dict[str, object]:
        """The next frame as a JSON object."""
        _, payload = await self.receive(kind, limit_bytes=limit_bytes)
        return decode_json(payload)

    async def receive_block(self, block: memoryview) -> None:
        """Reads the next block straight into `block`, whose length it must have."""
        head = await self.receive_head()
        await self._expect(head, (Kind.BLOCK,))
        kind, length, checksum = head
        if length != len(block):
            raise GarbledError(f"a block of {length} bytes where {len(block)} were due: the stream is garbled")
        await self._read_into(block)
        _check(kind, block, checksum)

    async def _expect(self, head: tuple[Kind, int, int], kinds: tuple[Kind, ...]) -> None:
        kind = head[0]
        if kind in kinds:
            return
        if kind is Kind.ABORT:
            raise RefusedError(reason_of(decode_json(await self.receive_payload(head))))
        due = " or ".join(wanted.name for wanted in kinds)
        raise GarbledError(f"a {kind.name} frame where {due} was due")

    async def _read_into(self, target: memoryview) -> None:
        try:
            await direct.fill(self._reader, target, self._received)
        except EOFError:
            reason = f"the stream ended after {self.received_bytes} bytes, in the middle of a frame"
            raise WireError(reason) from None
        except OSError as error:
            raise WireError(f"the stream broke: {str(error) or type(error).__name__}") from None

    def _received(self, size_bytes: int) -> None:
        self.received_bytes += size_bytes
        if self._meter:
            self._meter.received(self._conversation, size_bytes)
        if self._moved:
            self._moved(size_bytes)

    async def ended(self) -> None:
        """Returns when the other side closes, or speaks out of turn. May be cancelled without loss."""
        with contextlib.suppress(OSError, EOFError):
            await self._reader.read(1)

    async def abort(self, reason: str) -> None:
        """Tells the other side why we end here. A broken stream is left alone."""
        with contextlib.suppress(WireError):
            await self.send_header(Kind.ABORT, {"reason": clean(reason)})

    async def skip_until(self, *kinds: Kind) -> None:
        """Drops frames up to one of `kinds`, after which the other side has nothing more to say.

        Raises `WireError` when the stream ends before; see `linger` for why anybody would read on.
        """
        kind = None
        while kind not in kinds:
            head = await self.receive_head()
            kind = head[0]
            await self.receive_payload(head, limit_bytes=_SKIPPED_BYTES)

    async def linger(self, limit_s: float) -> None:
        """Reads and drops what still comes, until the other side closes or `limit_s` passed.

        A stream that is closed while bytes wait to be read may be reset, and what we sent last be lost.
        """
        with contextlib.suppress(OSError, EOFError, TimeoutError):
            async with asyncio.timeout(limit_s):
                while await self._reader.read(BLOCK_BYTES):
                    pass

    async def close(self, limit_s: float) -> None:
        """Sends what is buffered and closes; drops what could not be sent within `limit_s`.

        Never raises for what the other side did.
        """
        self._writer.close()
        try:
            async with asyncio.timeout(limit_s):
                await self._writer.wait_closed()
        except (OSError, EOFError, TimeoutError):
            self.cut()

    def cut(self) -> None:
        """Closes at once and drops what is buffered."""
        self._writer.transport.abort()


def _checksum(kind: Kind, payload: bytes | bytearray | memoryview) -> int:
    return xxhash.xxh3_64_intdigest(payload, seed=kind | len(payload) << 8) & 0xFFFFFFFF


def _check(kind: Kind, payload: bytes | bytearray | memoryview, checksum: int) -> None:
    if _checksum(kind, payload) != checksum:
        raise GarbledError(f"a {kind.name} frame of {len(payload)} bytes does not match its checksum")


def encode_json(value: Mapping[str, object]) -> bytes:
    """Compact JSON, without NaN and infinities."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def decode_json(payload: bytes) -> dict[str, object]:
    """A JSON object out of a stranger's bytes. Raises `ProtocolError` for anything else, and nothing else."""
    try:
        value = json.loads(payload.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a header is not JSON: {clean(str(error))}") from None
    if not isinstance(value, dict):
        raise ProtocolError(f"a header is a JSON {type(value).__name__}, not an object")
    return value


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key appears twice")
    return value


def _no_constant(text: str) -> object:
    raise ValueError(f"{text} is not JSON")


def clean(text: str) -> str:
    """A stranger's words as one printable line of at most `MAX_REASON_CHARACTERS`."""
    printable = "".join(character if character.isprintable() else " " for character in text[:MAX_REASON_CHARACTERS])
    return printable.strip()


def reason_of(header: Mapping[str, object]) -> str:
    """The reason in a header, made printable; "no reason given" where there is none."""
    reason = header.get("reason")
    return (clean(reason) if isinstance(reason, str) else "") or "no reason given"
