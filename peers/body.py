"""Named tensors over a `Wire`: the table first, then blocks in sorted order of names."""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from peers import codec
from peers.codec import CodecName
from peers.errors import LayoutError, ProtocolError, WireError
from peers.exchange import Layout, Tensors
from peers.table import DTYPES, MAX_TABLE_BYTES, Entry, decode_table, encode_table, first_difference, layout
from peers.wire import BLOCK_BYTES, Kind, Wire


class Digest(Protocol):
    """What `hashlib` makes; fed every byte of the body as it travels."""

    def update(self, data: bytes | memoryview, /) -> None: ...


class NoDigest:
    """For exchanges, where each block's checksum is enough."""

    def update(self, data: bytes | memoryview, /) -> None: ...


class Body:
    """Tensors made ready to be sent: names sorted, values flat, wire dtypes chosen."""

    def __init__(self, tensors: Tensors, codec_name: CodecName) -> None:
        """Reads every value once. Raises `LayoutError` for a dtype that cannot travel, and `ProtocolError`
        that names a tensor with NaN or infinite values."""
        self._rows: list[tuple[Entry, torch.Tensor]] = []
        for name in sorted(tensors):
            tensor = tensors[name]
            if tensor.dtype not in DTYPES.values():
                raise LayoutError(f"tensor '{name}' is {tensor.dtype}, which cannot be sent")
            row = codec.flat(tensor)
            entry = Entry(name, tuple(tensor.shape), tensor.dtype, codec.wire_dtype(codec_name, name, row))
            self._rows.append((entry, row))
        self.table = encode_table([entry for entry, _ in self._rows])

    def blocks(self) -> Iterator[memoryview]:
        """The bytes, in pieces of at most `BLOCK_BYTES`."""
        for entry, row in self._rows:
            for start, end in _pieces(entry):
                yield codec.encode(row[start:end], entry.wire_dtype)

    async def send(self, wire: Wire, digest: Digest) -> None:
        """Sends the table and every block. Raises `WireError` when the stream breaks."""
        digest.update(self.table)
        await wire.send_payload(Kind.TABLE, self.table)
        for block in self.blocks():
            digest.update(block)
            await wire.send_block(block)


def _pieces(entry: Entry) -> Iterator[tuple[int, int]]:
    """Where each block of a tensor starts and ends, in elements."""
    step = BLOCK_BYTES // entry.wire_dtype.itemsize
    for start in range(0, entry.count, step):
        yield start, min(start + step, entry.count)


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


async def receive_tensors(wire: Wire, entries: Sequence[Entry], digest: Digest) -> dict[str, torch.Tensor]:
    """Receives the tensors of an accepted table into fresh memory, each allocated as its turn comes.

    Raises `WireError` when the stream breaks or memory is short, `ProtocolError` that names a tensor with NaN
    or infinite values; what was received so far is dropped.
    """
    scratch = torch.empty(BLOCK_BYTES, dtype=torch.uint8)
    tensors = {}
    for entry in entries:
        row = _allocate(entry)
        for start, end in _pieces(entry):
            await _receive_piece(wire, row[start:end], entry, scratch, digest)
        tensors[entry.name] = row.reshape(entry.shape)
    return tensors


def _allocate(entry: Entry) -> torch.Tensor:
    try:
        return torch.empty(entry.count, dtype=entry.dtype)
    except RuntimeError:
        raise WireError(f"no memory for tensor '{entry.name}' of {entry.size_bytes} bytes") from None


async def _receive_piece(wire: Wire, row: torch.Tensor, entry: Entry, scratch: torch.Tensor, digest: Digest) -> None:
    if entry.wire_dtype is entry.dtype:
        data = codec.view(row)
        await wire.receive_block(data)
    else:
        data = codec.view(scratch)[: row.numel() * entry.wire_dtype.itemsize]
        await wire.receive_block(data)
        row.copy_(scratch[: len(data)].view(entry.wire_dtype))
    digest.update(data)
    if not codec.is_finite(row):
        raise ProtocolError(f"tensor '{entry.name}' holds NaN or infinite values")


def new_digest() -> "hashlib._Hash":
    """SHA-256, for what must be whole across all its blocks."""
    return hashlib.sha256()
