"""Named tensors over a `Wire`: the table first, then blocks in sorted order of names."""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Protocol, Self

import torch

from peers import codec, modular, quantize
from peers.codec import CodecName
from peers.errors import LayoutError, ProtocolError, WireError
from peers.exchange import Layout, Tensors
from peers.modular import PIECE_ELEMENTS, Lattice, Restore
from peers.table import (
    DTYPES,
    MAX_TABLE_BYTES,
    MODULAR_BITS,
    Entry,
    Packing,
    decode_table,
    encode_table,
    first_difference,
    layout,
)
from peers.wire import BLOCK_BYTES, Kind, Wire

_SCALE_BYTES = 4
_AHEAD_BYTES = 1024 * 1024
_BEHIND_PIECES = 4
_ALIGNED_BYTES = 64
_SMALL_ELEMENTS = 2**14
"""What is smaller is looked at where it is: a hop to a thread takes longer."""


class Digest(Protocol):
    """What `hashlib` makes; fed every byte of the body as it travels."""

    def update(self, data: bytes | memoryview, /) -> None: ...


class NoDigest:
    """For exchanges, where each block's checksum is enough."""

    def update(self, data: bytes | memoryview, /) -> None: ...


class Body:
    """Tensors made ready to be sent: names sorted, values flat, wire forms chosen, movements bounded."""

    def __init__(self, tensors: Tensors, codec_name: CodecName, start: Tensors | None = None) -> None:
        """Reads every value once, and of modular tensors what they moved from, too.

        Raises `LayoutError` for a dtype that cannot travel and for a start of another shape, and `ProtocolError`
        that names a tensor with NaN or infinite values.
        """
        self.entries: list[Entry] = []
        self.rows: dict[str, torch.Tensor] = {}
        self.bounds: dict[str, torch.Tensor] = {}
        """See `modular.Bounds`."""
        for name in sorted(tensors):
            tensor = tensors[name]
            if tensor.dtype not in DTYPES.values():
                raise LayoutError(f"tensor '{name}' is {tensor.dtype}, which cannot be sent")
            origin = start.get(name) if start else None
            row, shape = codec.flat(tensor), tuple(tensor.shape)
            packing = codec.packing(codec_name, shape, row, has_start=origin is not None)
            finite = False
            if packing in MODULAR_BITS and origin is not None:
                self.bounds[name], finite = _movement(name, tensor.detach(), origin.detach())
            if not finite:
                codec.check_finite(name, row)
            wire_dtype = codec.wire_dtype(codec_name, row)
            self.entries.append(Entry(name, shape, tensor.dtype, wire_dtype, packing))
            self.rows[name] = row
        self.table = encode_table(self.entries)

    def blocks(self, lattice: Lattice | None = None) -> Iterator[memoryview]:
        """The bytes, in pieces of at most `BLOCK_BYTES`. `lattice` must be given where tensors are modular."""
        for entry in self.entries:
            for start, end in _pieces(entry):
                yield _encode(entry, start, self.rows[entry.name][start:end], lattice)

    async def blocks_ahead(self, lattice: Lattice | None = None) -> AsyncGenerator[memoryview, None]:
        """`blocks`, some made in a worker thread while those before are sent, where there is anything to make."""
        blocks = self.blocks(lattice)
        if all(_as_it_is(entry) for entry in self.entries):
            for block in blocks:
                yield block
            return
        ahead = asyncio.create_task(asyncio.to_thread(_some, blocks))
        try:
            while made := await ahead:
                ahead = asyncio.create_task(asyncio.to_thread(_some, blocks))
                for block in made:
                    yield block
        finally:
            await asyncio.gather(ahead, return_exceptions=True)

    async def send(self, wire: Wire, digest: Digest) -> None:
        """Sends the table and every block. Raises `WireError` when the stream breaks.

        Not for modular tensors, which need the partner's bounds: a body without a start has none.
        """
        digest.update(self.table)
        await wire.send_payload(Kind.TABLE, self.table)
        async with contextlib.aclosing(self.blocks_ahead()) as blocks:
            async for block in blocks:
                digest.update(block)
                await wire.send_block(block)


def _some(blocks: Iterator[memoryview]) -> list[memoryview]:
    """The next blocks, `_AHEAD_BYTES` or little more of them: a hop to a thread costs what many small ones do."""
    made: list[memoryview] = []
    size_bytes = 0
    for block in blocks:
        made.append(block)
        size_bytes += len(block)
        if size_bytes >= _AHEAD_BYTES:
            break
    return made


def _movement(name: str, tensor: torch.Tensor, origin: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """A tensor's bounds, and whether it was seen to be finite on the way.

    Computed where the tensor lies, so that no second copy leaves a device; in pieces, so that none is made on it.
    """
    if origin.shape != tensor.shape:
        raise LayoutError(f"tensor '{name}' has shape {list(tensor.shape)}, but started as {list(origin.shape)}")
    pieces = zip(_cut(tensor.reshape(-1)), _cut(origin.reshape(-1)), strict=True)
    found = [quantize.movement(piece, before.to(piece)) for piece, before in pieces]
    return torch.cat([bounds for bounds, _ in found]).cpu(), all(finite for _, finite in found)


def _cut(row: torch.Tensor) -> list[torch.Tensor]:
    return [row[start : start + PIECE_ELEMENTS] for start in range(0, row.numel(), PIECE_ELEMENTS)]


def _encode(entry: Entry, start: int, row: torch.Tensor, lattice: Lattice | None) -> memoryview:
    if entry.packing is Packing.PLAIN:
        return codec.encode(row, entry.wire_dtype)
    if entry.packing is Packing.INT8:
        scales, codes = quantize.int8_encode(row)
        return codec.view(torch.cat([scales.view(torch.uint8), codes.view(torch.uint8)]))
    assert lattice is not None, "modular tensors are sent on a lattice"
    return modular.encode_piece(entry, start, row, lattice)


def _pieces(entry: Entry) -> Iterator[tuple[int, int]]:
    """Where each block of a tensor starts and ends, in elements."""
    plain = entry.packing is Packing.PLAIN
    step = BLOCK_BYTES // entry.wire_dtype.itemsize if plain else PIECE_ELEMENTS
    for start in range(0, entry.count, step):
        yield start, min(start + step, entry.count)


def _piece_bytes(entry: Entry, count: int) -> int:
    """The length of a piece of `count` elements."""
    if entry.packing is Packing.PLAIN:
        return count * entry.wire_dtype.itemsize
    if entry.packing is Packing.INT8:
        return count + _SCALE_BYTES * quantize.blocks_in(count)
    return modular.piece_bytes(entry, count)


async def receive_table(wire: Wire, digest: Digest, *, limit_bytes: int = MAX_TABLE_BYTES) -> list[Entry]:
    """The next table. Raises `ProtocolError` for what is not one, or names an impossible conversion."""
    _, payload = await wire.receive(Kind.TABLE, limit_bytes=limit_bytes)
    digest.update(payload)
    entries = decode_table(payload)
    for entry in entries:
        if not codec.may_travel(entry.dtype, entry.wire_dtype):
            raise ProtocolError(f"tensor '{entry.name}' of {entry.dtype} cannot travel as {entry.wire_dtype}")
    return entries


def check_layout(entries: Sequence[Entry], expected: Layout) -> None:
    """Raises `LayoutError` that names the first difference between what is announced and what is expected."""
    difference = first_difference(expected, layout(entries))
    if difference:
        raise LayoutError(difference)


async def receive_tensors(
    wire: Wire, entries: Sequence[Entry], digest: Digest, restore: Restore | None = None
) -> dict[str, torch.Tensor]:
    """Receives the tensors of an accepted table into fresh memory, each allocated as its turn comes.

    What came packed is unpacked and checked in a worker thread while the next pieces come in, some at a time; what is
    as it will be is checked at once. Modular tensors are restored by `restore`; blocks that it marks as wrong are to be
    replaced.

    Raises `WireError` when the stream breaks or memory is short, `ProtocolError` that names a tensor with NaN
    or infinite values, or a modular one without `restore`; what was received so far is dropped.
    """
    packed = _Ring(max((_most_packed_bytes(entry) for entry in entries), default=0))
    tensors = {}
    async with _Behind() as behind:
        for entry in entries:
            row = _allocate(entry)
            for start, end in _pieces(entry):
                piece = row[start:end]
                data = codec.view(piece) if _as_it_is(entry) else packed.next(_piece_bytes(entry, end - start))
                await wire.receive_block(data)
                digest.update(data)
                if _as_it_is(entry):  # it is in the cache: a look takes less than a hop to a thread and back
                    codec.check_finite(entry.name, piece)
                else:
                    await behind.work(partial(_unpack, entry, start, data, piece, restore), piece.numel())
            tensors[entry.name] = row.reshape(entry.shape)
    return tensors


class _Ring:
    """Memory for packed pieces: as many as may be on their way to be unpacked, and the one that comes in."""

    def __init__(self, piece_bytes: int) -> None:
        aligned = -(-piece_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        self._slots = [codec.view(row) for row in torch.empty(2 * _BEHIND_PIECES, aligned, dtype=torch.uint8)]
        self._turn = 0

    def next(self, size_bytes: int) -> memoryview:
        """The slot whose turn it is."""
        self._turn = (self._turn + 1) % len(self._slots)
        return self._slots[self._turn][:size_bytes]


class _Behind:
    """Works in a worker thread on what came, in order, behind what comes; at most `_BEHIND_PIECES` behind and running.

    As an async context manager it ends once all is done, and raises what the work raised.
    """

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []
        self._running: asyncio.Task[None] | None = None

    async def work(self, work: Callable[[], None], elements: int) -> None:
        """Does it now where it is small; else soon. Raises what earlier work raised."""
        if elements < _SMALL_ELEMENTS:
            work()
            return
        self._waiting.append(work)
        if len(self._waiting) == _BEHIND_PIECES:  # a hop to a thread and back for each takes as long as the work
            await self._start()

    async def _start(self) -> None:
        if self._running:
            await self._running
        waiting, self._waiting = self._waiting, []
        self._running = asyncio.create_task(asyncio.to_thread(_all, waiting))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                await self._start()
        finally:
            if self._running:
                await asyncio.gather(self._running, return_exceptions=kind is not None)


def _all(works: Sequence[Callable[[], None]]) -> None:
    for work in works:
        work()


def _as_it_is(entry: Entry) -> bool:
    """Whether a tensor's bytes on the wire are those in memory."""
    return entry.packing is Packing.PLAIN and entry.wire_dtype is entry.dtype


def _most_packed_bytes(entry: Entry) -> int:
    return (
        0 if _as_it_is(entry) else max((_piece_bytes(entry, end - start) for start, end in _pieces(entry)), default=0)
    )


def _allocate(entry: Entry) -> torch.Tensor:
    try:
        return torch.empty(entry.count, dtype=entry.dtype)
    except RuntimeError:
        raise WireError(f"no memory for tensor '{entry.name}' of {entry.size_bytes} bytes") from None


def _unpack(entry: Entry, start: int, data: memoryview, row: torch.Tensor, restore: Restore | None) -> None:
    """From a packed piece's bytes to its values; checks that they are finite."""
    if entry.packing is Packing.INT8:
        packed = _tensor(data)
        scale_bytes = _SCALE_BYTES * quantize.blocks_in(row.numel())
        scales, codes = packed[:scale_bytes].view(torch.float32), packed[scale_bytes:].view(torch.int8)
        row.copy_(quantize.int8_decode(scales, codes, entry.dtype))
    elif entry.packing is not Packing.PLAIN:
        if restore is None:
            words = f"tensor '{entry.name}' travels as {entry.packing.value}, which nothing here restores"
            raise ProtocolError(words)
        restore.piece(entry, start, _tensor(data), row)
        return  # finite, as our own values are: see `quantize.decode_into`
    else:
        row.copy_(_tensor(data).view(entry.wire_dtype))
    codec.check_finite(entry.name, row)


def _tensor(data: memoryview) -> torch.Tensor:
    return torch.frombuffer(data, dtype=torch.uint8)


def new_digest() -> "hashlib._Hash":
    """SHA-256, for what must be whole across all its blocks."""
    return hashlib.sha256()
