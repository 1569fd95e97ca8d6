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

import threading
from dataclasses import dataclass, fields
from typing import Literal

import torch

from peers.errors import ProtocolError

BLOCK = 512
"""Elements that share a scale, or a range."""

Bits = Literal[4, 8]

RANGE: dict[Bits, float] = {8: 6.0, 4: 5.0}
"""B over the larger movement. Larger: coarser; smaller: more blocks sent again. Chosen in benchmarks/codecs.py."""

LEAST_BOUND = 2.0**-100
"""A movement below it is announced as it, so that no step is subnormal."""
_MOST_BOUND = 2.0**100
_LATTICE_LIMIT = 2.0**23  # up to here a float32 holds every integer and its half
_LATTICE_MARGIN = 2.0**9
_CHECK_SEED = 20200713
_NOISE_LEVELS = 2**16
_PART_BLOCKS = 128  # what is encoded at once: it stays in a core's own cache with all that it takes


@dataclass(frozen=True, slots=True)
class Codes:
    """A row as it travels."""

    packed: torch.Tensor
    """(n,) uint8, or (ceil(n / 2),) for 4 bits: the even element in the low half of the byte."""
    checks: torch.Tensor
    """(blocks,) int32."""


def blocks_in(count: int) -> int:
    """The number of blocks of a row of `count` elements."""
    return -(-count // BLOCK)


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
    largest = _in_blocks(row - start).abs_().amax(1)
    if largest.dtype is torch.float64:
        largest = (largest * (1 + 2.0**-22)).clamp_(max=2 * _MOST_BOUND).float()
    raised = largest.clamp(LEAST_BOUND, _MOST_BOUND)
    bits = raised.view(torch.int32).add_(0xFFFF).bitwise_and_(~0xFFFF)
    return torch.where(largest > 0, bits.view(torch.float32), 0.0).to(torch.bfloat16)


def check_bounds(bounds: torch.Tensor) -> None:
    """Raises `ProtocolError` for bounds (any shape, bfloat16) that `movement_bounds` does not make."""
    values = bounds.float()
    fine = (values == 0) | ((values >= LEAST_BOUND) & (values <= _MOST_BOUND))
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
    """The codes of a row, rounded to the lattice with noise from `generator`.

    The lattice point is less than `step` from the value, and on average equal to it: to 2^-17 of the step and the
    rounding of the dtype. Values over 2^23 steps get codes that fail at the receiver.
    """
    blocks = _in_blocks(row)
    packed = torch.empty(packed_bytes(blocks.numel(), bits), dtype=torch.uint8)
    checks = torch.empty(len(blocks), dtype=torch.int32)
    divisors = torch.where(step > 0, step, torch.inf).to(row.dtype)[:, None]
    part_bytes = packed_bytes(_PART_BLOCKS * BLOCK, bits)
    noise: torch.Tensor | None = None
    for number, first in enumerate(range(0, len(blocks), _PART_BLOCKS)):
        part = slice(first, min(first + _PART_BLOCKS, len(blocks)))
        scratch = _scratch(part.stop - part.start, row.dtype)
        noise = _noise(scratch, generator) if noise is None else _turned(noise, part.stop - part.start, generator)
        integers = _to_lattice(blocks[part], divisors[part], noise, scratch)
        checks[part] = _checksums(torch.bitwise_right_shift(integers, bits, out=scratch.whole))
        _pack(integers, bits, packed[number * part_bytes :][:part_bytes])
    _check_unmoved(checks, row, step)
    return Codes(packed[: packed_bytes(row.numel(), bits)], checks)


def _to_lattice(
    blocks: torch.Tensor,  # (blocks, BLOCK)
    divisors: torch.Tensor,  # (blocks, 1), the steps; infinite where there is no range
    noise: torch.Tensor,  # (blocks, BLOCK) int16
    scratch: "_Scratch",
) -> torch.Tensor:  # (blocks, BLOCK) int32
    """The lattice integers: rounded up where the fraction and the noise, taken as of (0, 1), make one together."""
    units = torch.div(blocks, divisors, out=scratch.units).clamp_(-_LATTICE_LIMIT, _LATTICE_LIMIT)
    low = torch.floor(units, out=scratch.low)
    levels = scratch.noise.copy_(noise).add_((_NOISE_LEVELS + 1) / 2)
    units.sub_(low).add_(levels, alpha=1 / _NOISE_LEVELS).floor_()
    return scratch.integers.copy_(low.add_(units))


def _noise(scratch: "_Scratch", generator: torch.Generator) -> torch.Tensor:
    """(blocks, BLOCK) int16: uniform over all 2^16 levels, four to a 64-bit draw."""
    draws = scratch.draws.random_(-(2**63), None, generator=generator)
    return draws.view(torch.int16).view(scratch.units.shape)


def _turned(noise: torch.Tensor, blocks: int, generator: torch.Generator) -> torch.Tensor:
    """The noise for as many more blocks: each block's with its bits turned by a random mask of its own.

    Every value is uniform again, and any two are independent, of this part or of others. To draw all anew would take a
    third of the time of encoding.
    """
    masks = torch.empty(blocks, 1, dtype=torch.int16).random_(-(2**15), 2**15, generator=generator)
    return noise[:blocks].bitwise_xor_(masks)


@dataclass(frozen=True, slots=True)
class _Scratch:
    """Memory for one part of a row, kept from part to part and call to call.

    What is allocated anew for each is given back to the system after each, and costs more than the arithmetic.
    """

    units: torch.Tensor
    low: torch.Tensor
    noise: torch.Tensor
    draws: torch.Tensor
    integers: torch.Tensor
    whole: torch.Tensor


_kept = threading.local()


def _scratch(blocks: int, dtype: torch.dtype) -> _Scratch:
    """This thread's own, for so many blocks."""
    made = getattr(_kept, str(dtype), None)
    if made is None:
        shape = _PART_BLOCKS, BLOCK
        units, low = torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)
        integers, whole = torch.empty(shape, dtype=torch.int32), torch.empty(shape, dtype=torch.int32)
        draws = torch.empty(shape[0], BLOCK // 4, dtype=torch.int64)
        made = _Scratch(units, low, whole.view(torch.float32), draws, integers, whole)
        setattr(_kept, str(dtype), made)
    return _Scratch(*(getattr(made, each.name)[:blocks] for each in fields(made)))


def decode(
    codes: Codes,
    near: torch.Tensor,  # (n,) the receiver's own values
    step: torch.Tensor,  # (blocks,) float32
    bits: Bits,
) -> tuple[torch.Tensor, torch.Tensor]:  # (n,) of near's dtype; (blocks,) bool
    """The sender's lattice points restored from our own values, and which blocks are wrong.

    Right wherever the two sides' values differ by less than `(2^(bits-1) - 1) * step`, which is B/2 less the
    rounding. Then a restored value is less than `step` plus the rounding of its dtype from the sender's. A wrong
    block is marked, but for one in 2^32; what it holds is finite where `near` is, and of no use.
    """
    units = _in_units(near, step)
    beyond = units.abs().amax(1) >= _LATTICE_LIMIT - _LATTICE_MARGIN
    code = _unpack(codes.packed, near.numel(), bits)
    turns = units.sub_(code).mul_(2.0**-bits).round_()
    checks = _checksums(turns.to(torch.int32))
    _check_unmoved(checks, near, step)
    values = turns.mul_(2.0**bits).add_(code).mul_(step.to(near.dtype)[:, None])
    unmoved = step == 0
    if bool(unmoved.any()):
        values[unmoved] = _in_blocks(near)[unmoved]
    return values.reshape(-1)[: near.numel()], (checks != codes.checks) | beyond


def int8_encode(row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A row (n,) as scales (blocks,) float32 and codes (n,) int8, rounded to nearest.

    A value comes back with an error of at most `max(m / 254 * (1 + 2^-14), 2^-100)`, where m is the largest
    magnitude in its block. Values must be within float32's range.
    """
    blocks = _in_blocks(row)
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
    return _in_blocks(codes.to(dtype)).mul(scales.to(dtype)[:, None]).reshape(-1)[: codes.numel()]


def _in_blocks(row: torch.Tensor) -> torch.Tensor:
    """The row as (blocks, BLOCK); shares its memory where no padding is needed."""
    spare = -row.numel() % BLOCK
    return (torch.nn.functional.pad(row, (0, spare)) if spare else row).reshape(blocks_in(row.numel()), BLOCK)


def _in_units(row: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """The row over its steps, (blocks, BLOCK), fresh, within the lattice's limits; 0 in blocks without a range."""
    divisors = torch.where(step > 0, step, torch.inf).to(row.dtype)
    return (_in_blocks(row) / divisors[:, None]).clamp_(-_LATTICE_LIMIT, _LATTICE_LIMIT)


def _check_weights() -> torch.Tensor:
    """(BLOCK,) int32: fixed, distinct odd integers below 2^24, drawn once for all peers."""
    order = torch.randperm(2**23, generator=torch.Generator().manual_seed(_CHECK_SEED))
    return (2 * order[:BLOCK] + 1).to(torch.int32)


_WEIGHTS = _check_weights()


def _checksums(turns: torch.Tensor) -> torch.Tensor:
    """(blocks, BLOCK) int32, overwritten, to (blocks,) int32: a weighted sum modulo 2^32."""
    return turns.mul_(_WEIGHTS).sum(1, dtype=torch.int32)


def _check_unmoved(checks: torch.Tensor, row: torch.Tensor, step: torch.Tensor) -> None:
    """Replaces the checksums of blocks without a range by those of the values' own bits."""
    unmoved = step == 0
    if bool(unmoved.any()):
        halves = _in_blocks(row)[unmoved].view(torch.int16)
        weights = torch.arange(1, 2 * halves.shape[1], 2) * 0x9E3779B1  # modulo 2^64, like the sum
        checks[unmoved] = ((halves * weights).sum(1) >> 16).to(torch.int32)


def _pack(integers: torch.Tensor, bits: Bits, packed: torch.Tensor) -> None:
    """(blocks, BLOCK) int32, overwritten, to the bytes of their lower bits."""
    if bits == 8:
        packed.copy_(integers.view(-1))
        return
    pairs = integers.bitwise_and_(15).to(torch.uint8).view(torch.int16).view(-1)  # the even element in the low byte
    packed.copy_(pairs.bitwise_or_(pairs >> 4))


def _unpack(packed: torch.Tensor, count: int, bits: Bits) -> torch.Tensor:
    """Bytes to (blocks, BLOCK) codes, uint8; those of the padding are 0."""
    row = packed
    if bits == 4:
        pairs = packed.to(torch.int16)
        row = pairs.bitwise_or_(pairs << 4).bitwise_and_(0x0F0F).view(torch.uint8)
    if row.numel() > count:
        row = row[:count]
    return _in_blocks(row)
