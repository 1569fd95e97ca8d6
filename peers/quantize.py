"""Block quantization of flat tensors: int8 by itself, and 8 or 4 bits modulo a range. Pure: noise is an argument.

A row is a contiguous flat float32 or float64 tensor on the CPU, shape (n,), of finite values. It is cut into
blocks of `BLOCK` elements, the last one padded with zeros. All arithmetic is in the row's own dtype.

**int8.** A block travels as one float32 scale, its largest magnitude over 127, and a signed byte an element. Good for
differences; parameters themselves lose more than peers near consensus need.

**Modular** (Moniqua: Lu and De Sa, ICML 2020). Two peers whose values differ by less than half a range B need not
send the whole value, only where it lies within the range: the receiver knows the rest from its own value. Values sit
on a lattice of step `B / 2^bits`. The sender rounds its value to a lattice integer N, stochastically, so that the
lattice point is unbiased, and sends `N mod 2^bits`; the receiver takes the lattice point with that code nearest to
its own value. B is a multiple of the larger of the two sides' own largest movement in the block (`RANGE`), which each
announces as a bfloat16, rounded up, so both compute one step.

A range that was too small gives another multiple of B: wrong values, right codes. So each block carries a checksum
of the integers `N div 2^bits`, which are all that the receiver has to guess; a block that fails is to be sent again as
it is. A block in which neither side moved has no range: its checksum is over the values' own bits, and the receiver
takes its own values where they are the very same.

The sender goes on with its exact values, not with the restored ones. So the mean over peers is kept in expectation
only; but each replica gets half of the noise, no second copy of the model is held for each partner, and the loss that
was measured (docs/wire.md) is that of this form.
"""

from typing import Final

import torch

from peers import compiled
from peers.errors import ProtocolError
from peers.lattice import BLOCK as BLOCK
from peers.lattice import LEAST_BOUND as LEAST_BOUND
from peers.lattice import MOST_BOUND, NOISE_LEVELS, PART
from peers.lattice import Bits as Bits
from peers.lattice import Codes as Codes
from peers.lattice import blocks_in as blocks_in
from peers.torch_loops import in_blocks

RANGE: Final[dict[Bits, float]] = {8: 6.0, 4: 5.0}
"""B over the larger movement. Larger: coarser; smaller: more blocks sent again. Chosen in benchmarks/codecs.py."""


def packed_bytes(count: int, bits: Bits) -> int:
    """The number of bytes in which the codes of `count` elements travel."""
    return -(-count * bits // 8)


def movement_bounds(
    row: torch.Tensor,  # (n,)
    start: torch.Tensor,  # (n,) of the same dtype
) -> torch.Tensor:  # (blocks,) bfloat16
    """Each block's largest `abs(row - start)`, rounded up: over it by 2^-7 of it at most.

    0 only where nothing moved; otherwise at least `LEAST_BOUND` and at most 2^100.
    """
    return movement(row, start)[0]


def movement(
    row: torch.Tensor,  # (n,)
    start: torch.Tensor,  # (n,) of the same dtype
) -> tuple[torch.Tensor, bool]:  # (blocks,) bfloat16
    """`movement_bounds`, and whether all of `row` was seen to be finite on the way; False says nothing."""
    return compiled.loops_for(row, start).movement(row, start)


def check_bounds(bounds: torch.Tensor) -> None:
    """Raises `ProtocolError` for bounds (any shape, bfloat16) that `movement_bounds` does not make."""
    values = bounds.float()
    fine = (values == 0) | ((values >= LEAST_BOUND) & (values <= MOST_BOUND))
    if not bool(fine.all()):
        raise ProtocolError(f"a movement bound of {float(values[~fine][0])} is not 0 or from 2^-100 to 2^100")


def steps(
    ours: torch.Tensor,  # (blocks,) bfloat16
    theirs: torch.Tensor,  # (blocks,) bfloat16
    bits: Bits,
) -> torch.Tensor:  # (blocks,) float32
    """The lattice step of each block: `RANGE * max(ours, theirs) / 2^bits`. Exact, so equal on both sides."""
    return torch.maximum(ours, theirs).float().mul_(RANGE[bits] / 2**bits)


def encode(
    row: torch.Tensor,  # (n,)
    step: torch.Tensor,  # (blocks,) float32
    bits: Bits,
    generator: torch.Generator,
) -> Codes:
    """The codes of a row in fresh memory; see `encode_into`."""
    packed = torch.empty(packed_bytes(row.numel(), bits), dtype=torch.uint8)
    codes = Codes(packed, torch.empty(blocks_in(row.numel()), dtype=torch.int32))
    encode_into(codes, row, step, bits, generator)
    return codes


def encode_into(
    codes: Codes,
    row: torch.Tensor,  # (n,)
    step: torch.Tensor,  # (blocks,) float32
    bits: Bits,
    generator: torch.Generator,
) -> None:
    """Writes the codes of a row, rounded to the lattice with noise that `generator` chooses.

    The lattice point is less than `step` from the value, and on average equal to it: to 2^-19 of the step and the
    rounding of the dtype. Values over 2^22 steps get codes that fail at the receiver.
    """
    loops = compiled.loops_for(row)
    for first in range(0, row.numel(), PART):
        elements = row[first : first + PART]
        blocks = slice(first // BLOCK, first // BLOCK + blocks_in(elements.numel()))
        start = packed_bytes(first, bits)
        packed = codes.packed[start : start + packed_bytes(elements.numel(), bits)]
        shift = int(torch.randint(NOISE_LEVELS, (1,), generator=generator))
        loops.encode(elements, step[blocks], bits, shift, Codes(packed, codes.checks[blocks]))


def decode(
    codes: Codes,
    near: torch.Tensor,  # (n,) the receiver's own values
    step: torch.Tensor,  # (blocks,) float32
    bits: Bits,
) -> tuple[torch.Tensor, torch.Tensor]:  # (n,) of near's dtype; (blocks,) bool
    """The sender's lattice points restored from our own values, and which blocks are wrong; see `decode_into`."""
    values = torch.empty_like(near)
    return values, decode_into(codes, near, step, bits, values)


def decode_into(
    codes: Codes,
    near: torch.Tensor,  # (n,) the receiver's own values
    step: torch.Tensor,  # (blocks,) float32
    bits: Bits,
    values: torch.Tensor,  # (n,) of near's dtype; overwritten
) -> torch.Tensor:  # (blocks,) bool
    """Writes the sender's lattice points, restored from our own values; returns which blocks are wrong.

    Right wherever the two sides' values differ by less than `(2^(bits-1) - 1) * step`, which is B/2 less the
    rounding. Then a restored value is less than `step` plus the rounding of its dtype from the sender's. A wrong
    block is marked, but for one in 2^32; what it holds is finite where `near` is, and of no use.
    """
    return compiled.loops_for(near, values).decode(codes, near, step, bits, values)


def int8_encode(row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A row (n,) as scales (blocks,) float32 and codes (n,) int8, rounded to nearest.

    A value comes back with an error of at most `max(m / 254 * (1 + 2^-14), 2^-100)`, where m is the largest
    magnitude in its block. Values must be within float32's range.
    """
    blocks = in_blocks(row)
    largest = blocks.abs().amax(1)
    scales = torch.where(largest < LEAST_BOUND, 0.0, largest / 127).float()
    divisors = torch.where(scales > 0, scales, torch.inf).to(row.dtype)
    codes = (blocks / divisors[:, None]).round_().clamp_(-127, 127).to(torch.int8)
    return scales, codes.reshape(-1)[: row.numel()]


def int8_decode(
    scales: torch.Tensor,  # (blocks,) float32
    codes: torch.Tensor,  # (n,) int8
    dtype: torch.dtype,
) -> torch.Tensor:  # (n,) of dtype
    """The values; see `int8_encode`. A stranger's scales may make them non-finite."""
    return in_blocks(codes.to(dtype)).mul(scales.to(dtype)[:, None]).reshape(-1)[: codes.numel()]
