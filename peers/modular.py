"""What modular codecs need beside the codes: bounds of movement, restoring, and blocks sent again.

Bounds travel as bfloat16, a block each, tensors in the table's order. A request is a bitmap, a bit for each block of
each modular tensor in that order, most significant bit first, padded with zeros to a whole byte.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from peers import codec, quantize
from peers.errors import ProtocolError
from peers.quantize import BLOCK, Bits
from peers.table import MODULAR_BITS, Entry, Packing
from peers.wire import BLOCK_BYTES, Wire

Bounds = Mapping[str, torch.Tensor]
"""Each modular tensor's bounds of movement, (blocks,) bfloat16."""

Steps = Mapping[str, torch.Tensor]
"""Each modular tensor's lattice steps, (blocks,) float32."""

PIECE_ELEMENTS = 2**18
"""Elements that are packed or restored at once, in a worker thread. More would not stay in the processor's cache."""

_CHECK_BYTES = 4
_RETRY_BITS: Bits = 8


def modular(entries: Sequence[Entry]) -> list[Entry]:
    """Those that travel modulo a range, in the table's order."""
    return [entry for entry in entries if entry.packing in MODULAR_BITS]


def steps(entries: Sequence[Entry], ours: Bounds, theirs: Bounds) -> dict[str, torch.Tensor]:
    """The steps of modular tensors. A side that gave no bounds for one did not move, as far as is known."""
    return {
        entry.name: quantize.steps(_bounds(entry, ours), _bounds(entry, theirs), MODULAR_BITS[entry.packing])
        for entry in entries
    }


def _bounds(entry: Entry, bounds: Bounds) -> torch.Tensor:
    given = bounds.get(entry.name)
    return torch.zeros(quantize.blocks_in(entry.count), dtype=torch.bfloat16) if given is None else given


async def send_bounds(wire: Wire, entries: Sequence[Entry], bounds: Bounds) -> None:
    """Sends the bounds of modular tensors; nothing where there are none."""
    if entries:
        row = torch.cat([_bounds(entry, bounds) for entry in entries])
        for start in range(0, row.numel(), BLOCK_BYTES // 2):
            await wire.send_block(codec.view(row[start : start + BLOCK_BYTES // 2]))


async def receive_bounds(wire: Wire, entries: Sequence[Entry]) -> dict[str, torch.Tensor]:
    """The partner's bounds of these tensors. Raises `ProtocolError` for what is no bound."""
    row = torch.empty(_blocks_of(entries), dtype=torch.bfloat16)
    for start in range(0, row.numel(), BLOCK_BYTES // 2):
        await wire.receive_block(codec.view(row[start : start + BLOCK_BYTES // 2]))
    quantize.check_bounds(row)
    return _by_name(entries, row)


def _blocks_of(entries: Sequence[Entry]) -> int:
    return sum(quantize.blocks_in(entry.count) for entry in entries)


def _by_name(entries: Sequence[Entry], row: torch.Tensor) -> dict[str, torch.Tensor]:
    """Cuts what holds one element for each block of all these tensors."""
    cut, at = {}, 0
    for entry in entries:
        cut[entry.name] = row[at : at + quantize.blocks_in(entry.count)]
        at += quantize.blocks_in(entry.count)
    return cut


def piece_bytes(entry: Entry, count: int) -> int:
    """Bytes of a piece of `count` elements: checksums first, then codes."""
    return _CHECK_BYTES * quantize.blocks_in(count) + quantize.packed_bytes(count, MODULAR_BITS[entry.packing])


@dataclass(frozen=True, slots=True)
class Lattice:
    """On what the modular tensors of one body are rounded, and with which noise."""

    steps: Steps
    noise: torch.Generator


def retried(entries: Sequence[Entry]) -> list[Entry]:
    """Those whose blocks get a second chance in 8 bits, on the same lattice: a range 16 times as large.

    An eighth of the bytes that the values themselves would take, so that ranges may be chosen tight.
    """
    return [entry for entry in entries if entry.packing is Packing.MODULAR4]


def encode_retry(entry: Entry, row: torch.Tensor, blocks: torch.Tensor, lattice: Lattice) -> memoryview:
    """The bytes of chosen blocks, whose elements are `row`, in 8 bits."""
    return _encoded(row, lattice.steps[entry.name][blocks], _RETRY_BITS, lattice)


def retry_bytes(blocks: int, count: int) -> int:
    """Bytes of a second chance for so many blocks of `count` elements."""
    return _CHECK_BYTES * blocks + count


def encode_piece(entry: Entry, start: int, row: torch.Tensor, lattice: Lattice) -> memoryview:
    """The bytes of the piece that begins at element `start`, `row` (n,); of `piece_bytes` length."""
    step = lattice.steps[entry.name][_blocks(start, row.numel())]
    return _encoded(row, step, MODULAR_BITS[entry.packing], lattice)


def _encoded(row: torch.Tensor, step: torch.Tensor, bits: Bits, lattice: Lattice) -> memoryview:
    data = torch.empty(_CHECK_BYTES * step.numel() + quantize.packed_bytes(row.numel(), bits), dtype=torch.uint8)
    quantize.encode_into(_codes(data, step.numel()), row, step, bits, lattice.noise)
    return codec.view(data)


def _blocks(start: int, count: int) -> slice:
    """The blocks of a piece of `count` elements that begins at element `start`."""
    first = start // BLOCK
    return slice(first, first + quantize.blocks_in(count))


class Restore:
    """Restores a partner's modular tensors from our own values, and keeps which blocks came out wrong."""

    def __init__(self, near: Mapping[str, torch.Tensor], steps: Steps) -> None:
        """`near` holds our own values by name, flat; `steps` those of all modular tensors to come."""
        self._near = near
        self._steps = steps
        self._wrong = {name: torch.zeros(step.numel(), dtype=torch.bool) for name, step in steps.items()}

    def piece(self, entry: Entry, start: int, data: torch.Tensor, out: torch.Tensor) -> None:
        """Restores the piece that begins at element `start` into `out`, (n,) of the entry's dtype.

        `data` is (`piece_bytes`,) uint8.
        """
        blocks = _blocks(start, out.numel())
        near = self._near[entry.name][start : start + out.numel()]
        step = self._steps[entry.name][blocks]
        codes = _codes(data, step.numel())
        self._wrong[entry.name][blocks] = quantize.decode_into(codes, near, step, MODULAR_BITS[entry.packing], out)

    def retry(self, entry: Entry, blocks: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
        """The values of chosen blocks from their second chance; marks those that are still wrong."""
        step = self._steps[entry.name][blocks]
        near = taken(self._near[entry.name], blocks)
        values, self._wrong[entry.name][blocks] = quantize.decode(_codes(data, step.numel()), near, step, _RETRY_BITS)
        return values

    def request(self, entries: Sequence[Entry]) -> bytes:
        """The bitmap of wrong blocks of these tensors."""
        return np.packbits(torch.cat([self._wrong[entry.name] for entry in entries]).numpy()).tobytes()

    def wrong(self, entry: Entry) -> torch.Tensor:
        """(blocks,) bool."""
        return self._wrong[entry.name]


def _codes(data: torch.Tensor, blocks: int) -> quantize.Codes:
    """The codes of so many blocks, where they lie on the wire."""
    return quantize.Codes(data[_CHECK_BYTES * blocks :], data[: _CHECK_BYTES * blocks].view(torch.int32))


def request_bytes(entries: Sequence[Entry]) -> int:
    """The length of a request for blocks of these tensors."""
    return -(-_blocks_of(entries) // 8)


def read_request(payload: bytes, entries: Sequence[Entry]) -> dict[str, torch.Tensor]:
    """Which blocks of each tensor are asked for, (blocks,) bool. Raises `ProtocolError` for another length."""
    if len(payload) != request_bytes(entries):
        raise ProtocolError(f"a request of {len(payload)} bytes where {request_bytes(entries)} are due")
    bits = torch.from_numpy(np.unpackbits(np.frombuffer(payload, dtype=np.uint8)).astype(bool))
    return _by_name(entries, bits[: _blocks_of(entries)])


def again(entry: Entry, wanted: torch.Tensor) -> Iterator[tuple[torch.Tensor, int]]:
    """What goes into each frame of blocks that are sent again: their indices in order, and the count of their elements.

    `wanted` is (blocks,) bool.
    """
    group = BLOCK_BYTES // (BLOCK * entry.dtype.itemsize)
    last = quantize.blocks_in(entry.count) - 1
    spare = -entry.count % BLOCK
    indices = wanted.nonzero().reshape(-1)
    for at in range(0, indices.numel(), group):
        blocks = indices[at : at + group]
        yield blocks, BLOCK * blocks.numel() - (spare if int(blocks[-1]) == last else 0)


def taken(
    row: torch.Tensor,  # (n,)
    blocks: torch.Tensor,  # indices, ascending
) -> torch.Tensor:
    """The elements of chosen blocks, flat. Block by block: to pick each element costs ten times as much."""
    whole, split = _whole(row, blocks)
    picked = whole[blocks[:split]].reshape(-1)
    return picked if split == blocks.numel() else torch.cat([picked, row[whole.numel() :]])


def put(
    row: torch.Tensor,  # (n,), written to
    blocks: torch.Tensor,  # indices, ascending
    values: torch.Tensor,  # as `taken` gives them
) -> None:
    """Writes the elements of chosen blocks."""
    whole, split = _whole(row, blocks)
    whole[blocks[:split]] = values[: split * BLOCK].view(split, BLOCK)
    if split < blocks.numel():
        row[whole.numel() :] = values[split * BLOCK :]


def _whole(row: torch.Tensor, blocks: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The row without a last block that is short, (blocks, BLOCK); and how many of the chosen blocks it has."""
    count = row.numel() // BLOCK
    whole = row[: count * BLOCK].view(count, BLOCK)
    return whole, blocks.numel() - int(blocks.numel() > 0 and int(blocks[-1]) >= count)
