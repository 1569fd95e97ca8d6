"""Named tensors over a `Wire`: the table first, then blocks in sorted order of names."""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Protocol

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
            wire_dtype = codec.wire_dtype(codec_name, name, row)
            packing = codec.packing(codec_name, shape, row, has_start=origin is not None)
            if packing in MODULAR_BITS and origin is not None:
                self.bounds[name] = _movement(name, tensor.detach(), origin.detach())
            self.entries.append(Entry(name, shape, tensor.dtype, wire_dtype, packing))
            self.rows[name] = row
        self.table = encode_table(self.entries)

    def blocks(self, lattice: Lattice | None = None) -> Iterator[memoryview]:
        """The bytes, in pieces of at most `BLOCK_BYTES`. `lattice` must be given where tensors are modular."""
        for entry in self.entries:
            for start, end in _pieces(entry):
                yield _encode(entry, start, self.rows[entry.name][start:end], lattice)

    async def blocks_ahead(self, lattice: Lattice | None = None) -> AsyncGenerator[memoryview, None]:
        """`blocks`, each made in a worker thread while the one before is sent, where there is anything to make."""
        blocks = self.blocks(lattice)
        if all(entry.packing is Packing.PLAIN and entry.wire_dtype is entry.dtype for entry in self.entries):
            for block in blocks:
                yield block
            return
        ahead = asyncio.create_task(asyncio.to_thread(next, blocks, None))
        try:
            while (made := await ahead) is not None:
                ahead = asyncio.create_task(asyncio.to_thread(next, blocks, None))
                yield made
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


def _movement(name: str, tensor: torch.Tensor, origin: torch.Tensor) -> torch.Tensor:
    """Where the tensor lies, so that no second copy leaves a device; in pieces, so that none is made on it."""
    if origin.shape != tensor.shape:
        raise LayoutError(f"tensor '{name}' has shape {list(tensor.shape)}, but started as {list(origin.shape)}")
    pieces = zip(_cut(tensor.reshape(-1)), _cut(origin.reshape(-1)), strict=True)
    return torch.cat([quantize.movement_bounds(piece, before.to(piece)) for piece, before in pieces]).cpu()


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

    What is packed is unpacked in a worker thread while the next piece comes in. Modular tensors are restored by
    `restore`; blocks that it marks as wrong are to be replaced.

    Raises `WireError` when the stream breaks or memory is short, `ProtocolError` that names a tensor with NaN
    or infinite values, or a modular one without `restore`; what was received so far is dropped.
    """
    scratch = torch.empty(BLOCK_BYTES, dtype=torch.uint8)
    packed_bytes = BLOCK_BYTES if any(entry.packing is not Packing.PLAIN for entry in entries) else 0
    packed = torch.empty(2, packed_bytes, dtype=torch.uint8)  # one comes in while the other is unpacked
    tensors = {}
    turn = 0
    unpacking: asyncio.Task[None] | None = None
    try:
        for entry in entries:
            row = _allocate(entry)
            for start, end in _pieces(entry):
                if entry.packing is Packing.PLAIN:
                    await _receive_piece(wire, row[start:end], entry, scratch, digest)
                    continue
                turn = 1 - turn
                data = packed[turn, : _piece_bytes(entry, end - start)]
                await wire.receive_block(codec.view(data))
                digest.update(codec.view(data))
                if unpacking:
                    await unpacking
                work = asyncio.to_thread(_unpack, entry, start, data, row[start:end], restore)
                unpacking = asyncio.create_task(work)
            tensors[entry.name] = row.reshape(entry.shape)
        if unpacking:
            await unpacking
    finally:
        if unpacking:
            await asyncio.gather(unpacking, return_exceptions=True)
    return tensors


def _allocate(entry: Entry) -> torch.Tensor:
    try:
        return torch.empty(entry.count, dtype=entry.dtype)
    except RuntimeError:
        raise WireError(f"no memory for tensor '{entry.name}' of {entry.size_bytes} bytes") from None


def _unpack(entry: Entry, start: int, data: torch.Tensor, row: torch.Tensor, restore: Restore | None) -> None:
    if entry.packing is Packing.INT8:
        scale_bytes = _SCALE_BYTES * quantize.blocks_in(row.numel())
        scales, codes = data[:scale_bytes].view(torch.float32), data[scale_bytes:].view(torch.int8)
        row.copy_(quantize.int8_decode(scales, codes, entry.dtype))
    elif restore is None:
        raise ProtocolError(f"tensor '{entry.name}' travels as {entry.packing.value}, which nothing here restores")
    else:
        restore.piece(entry, start, data, row)
    check_finite(entry, row)


def check_finite(entry: Entry, row: torch.Tensor) -> None:
    """Raises `ProtocolError` that names the tensor when received values are NaN or infinite."""
    if not codec.is_finite(row):
        raise ProtocolError(f"tensor '{entry.name}' holds NaN or infinite values")


async def _receive_piece(wire: Wire, row: torch.Tensor, entry: Entry, scratch: torch.Tensor, digest: Digest) -> None:
    if entry.wire_dtype is entry.dtype:
        data = codec.view(row)
        await wire.receive_block(data)
    else:
        data = codec.view(scratch)[: row.numel() * entry.wire_dtype.itemsize]
        await wire.receive_block(data)
        row.copy_(scratch[: len(data)].view(entry.wire_dtype))
    digest.update(data)
    check_finite(entry, row)


def new_digest() -> "hashlib._Hash":
    """SHA-256, for what must be whole across all its blocks."""
    return hashlib.sha256()
