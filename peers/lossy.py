"""What a receiver gets of a body, and in how many bytes, without a stream: what `peers.trade` comes to, step by step.

Bytes are those of the tensors: values, codes, scales, checksums, bounds of movement, requests, and blocks sent again.
Not counted is what they travel in: the head of each frame, the table, the greetings and DONE.
"""

from dataclasses import dataclass, replace

import torch

from peers import modular, quantize
from peers.bodies import Bodies
from peers.body import Body
from peers.codec import CodecName, check_finite
from peers.errors import ProtocolError
from peers.exchange import Tensors
from peers.modular import PIECE_ELEMENTS, Lattice, Restore
from peers.table import Entry, Packing, layout

_BOUND_BYTES = 2


@dataclass(frozen=True, slots=True)
class Passage:
    """One direction of a trade."""

    tensors: dict[str, torch.Tensor]
    """As the receiver has them in the end; its own to keep."""
    sent_bytes: int
    """By the sender."""
    returned_bytes: int
    """By the receiver, so that they can be restored: bounds and requests."""
    blocks: int
    """Blocks that were sent modulo a range."""
    resent: int
    """Blocks of those that the first codes did not restore."""


def traded(one: Bodies, other: Bodies, noises: tuple[torch.Generator, torch.Generator]) -> tuple[Passage, Passage]:
    """Both directions of a trade: from one to the other, and from the other to the one; each with its own noise.

    Raises `ProtocolError` for what a receiver would refuse.
    """
    apart = layout(one.send.entries) != layout(other.send.entries)
    there = passed(one.send, other.near if apart else other.send, noises[0])
    back = passed(other.send, one.near if apart else one.send, noises[1])
    if not apart:  # the bounds of what a side sends are those of what it receives, too
        return there, back
    return _with_bounds(there), _with_bounds(back)


def _with_bounds(passage: Passage) -> Passage:
    """The receiver sends bounds of its own values, too."""
    return replace(passage, returned_bytes=passage.returned_bytes + _BOUND_BYTES * passage.blocks)


def passed(send: Body, near: Body, noise: torch.Generator) -> Passage:
    """One direction, `near` being the receiver's own values, whose bounds of movement the sender knows.

    Raises `ProtocolError` where modular tensors have nothing near them, or what arrives is not finite.
    """
    entries = modular.modular(send.entries)
    for entry in entries:
        if entry.name not in near.rows:
            raise ProtocolError(f"tensor '{entry.name}' is sent modulo a range, but the receiver has nothing near it")
    steps = modular.steps(entries, send.bounds, near.bounds)
    lattice, restore = Lattice(steps, noise), Restore(near.rows, steps)
    blocks = sum(quantize.blocks_in(entry.count) for entry in entries)
    sent_bytes = _BOUND_BYTES * blocks
    rows: dict[str, torch.Tensor] = {}
    for entry in send.entries:  # in the table's order: one noise runs through all
        rows[entry.name], size_bytes = _first(entry, send.rows[entry.name], lattice, restore)
        sent_bytes += size_bytes
    resent = sum(int(restore.wrong(entry).sum()) for entry in entries)
    if resent:
        for entry in modular.retried(entries):
            sent_bytes += _retry(entry, send.rows[entry.name], rows[entry.name], lattice, restore)
        for entry in entries:
            sent_bytes += _raw(entry, send.rows[entry.name], rows[entry.name], restore)
    for entry in send.entries:
        check_finite(entry.name, rows[entry.name])
    return Passage(
        tensors={entry.name: rows[entry.name].reshape(entry.shape) for entry in send.entries},
        sent_bytes=sent_bytes,
        returned_bytes=modular.request_bytes(entries) + modular.request_bytes(modular.retried(entries)),
        blocks=blocks,
        resent=resent,
    )


def alone(tensors: Tensors, codec: CodecName) -> tuple[dict[str, torch.Tensor], int]:
    """What arrives of tensors that are not traded, as by `peers.courier`, and their bytes.

    The modular codecs, which need the receiver's own values, send them as they are. Raises `ProtocolError` as `Body`.
    """
    body = Body(tensors, codec)
    passage = passed(body, body, torch.Generator())
    return passage.tensors, passage.sent_bytes


def _first(entry: Entry, row: torch.Tensor, lattice: Lattice, restore: Restore) -> tuple[torch.Tensor, int]:
    """What arrives of a tensor at first, in fresh memory, and its bytes."""
    if entry.packing is Packing.PLAIN:
        return row.to(entry.wire_dtype, copy=True).to(entry.dtype), entry.count * entry.wire_dtype.itemsize
    if entry.packing is Packing.INT8:
        scales, codes = quantize.int8_encode(row)
        return quantize.int8_decode(scales, codes, entry.dtype), codes.nbytes + scales.nbytes
    came = torch.empty_like(row)
    size_bytes = 0
    for start in range(0, entry.count, PIECE_ELEMENTS):
        piece = slice(start, start + PIECE_ELEMENTS)
        data = modular.encode_piece(entry, start, row[piece], lattice)
        restore.piece(entry, start, torch.frombuffer(data, dtype=torch.uint8), came[piece])
        size_bytes += data.nbytes
    return came, size_bytes


def _retry(entry: Entry, row: torch.Tensor, came: torch.Tensor, lattice: Lattice, restore: Restore) -> int:
    """Sends the blocks of a tensor that were not restored in more bits; returns their bytes."""
    size_bytes = 0
    for blocks, _ in modular.again(entry, restore.wrong(entry).clone()):
        data = modular.encode_retry(entry, modular.taken(row, blocks), blocks, lattice)
        modular.put(came, blocks, restore.retry(entry, blocks, torch.frombuffer(data, dtype=torch.uint8)))
        size_bytes += data.nbytes
    return size_bytes


def _raw(entry: Entry, row: torch.Tensor, came: torch.Tensor, restore: Restore) -> int:
    """Sends the blocks of a tensor that are still not restored as they are; returns their bytes."""
    size_bytes = 0
    for blocks, count in modular.again(entry, restore.wrong(entry)):
        modular.put(came, blocks, modular.taken(row, blocks))
        size_bytes += count * entry.dtype.itemsize
    return size_bytes
