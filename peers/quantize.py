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
from functools import cache
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
_LATTICE_LIMIT = 2.0**22  # up to here a float32 tells how many steps a value is when `_magic` is added
_LATTICE_MARGIN = 2.0**9
_CHECK_SEED = 20200713
_NOISE_LEVELS = 2**18
_NOISE_SEED = 20201130
_PART_BLOCKS = 512  # what is worked on at once. More leaves the cache, less costs more calls than it saves


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
    largest = torch.empty(blocks_in(row.numel()), dtype=row.dtype, device=row.device)
    for first in range(0, len(largest), _PART_BLOCKS):
        part = slice(first * BLOCK, (first + _PART_BLOCKS) * BLOCK)
        largest[first : first + _PART_BLOCKS] = _largest_apart(row[part], start[part])
    moved = largest > 0  # before float32 takes the least of float64 for 0
    if largest.dtype is torch.float64:
        largest = (largest * (1 + 2.0**-22)).clamp_(max=2 * _MOST_BOUND).float()
    raised = largest.clamp(LEAST_BOUND, _MOST_BOUND)
    bits = raised.view(torch.int32).add_(0xFFFF).bitwise_and_(~0xFFFF)
    return torch.where(moved, bits.view(torch.float32), 0.0).to(torch.bfloat16)


def _largest_apart(row: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """(blocks,), of one part; in kept memory where that is the CPU's."""
    if row.device.type != "cpu" or row.numel() % BLOCK:
        return _in_blocks(row - start).abs_().amax(1)
    apart = _scratch(row.numel() // BLOCK, row.dtype).units
    return torch.sub(_in_blocks(row), _in_blocks(start), out=apart).abs_().amax(1)


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
    """The codes of a row, rounded to the lattice with noise that `generator` chooses.

    The lattice point is less than `step` from the value, and on average equal to it: to 2^-19 of the step and the
    rounding of the dtype. Values over 2^22 steps get codes that fail at the receiver.
    """
    blocks = _in_blocks(row)
    packed = torch.empty(packed_bytes(blocks.numel(), bits), dtype=torch.uint8)
    checks = torch.empty(len(blocks), dtype=torch.int32)
    parts = zip(
        torch.split(blocks, _PART_BLOCKS),
        torch.split(_rates(step, row.dtype), _PART_BLOCKS),
        torch.split(checks, _PART_BLOCKS),
        torch.split(packed, packed_bytes(_PART_BLOCKS * BLOCK, bits)),
        strict=True,
    )
    for part, rates, sums, codes in parts:
        scratch = _scratch(len(part), row.dtype)
        shift = int(torch.randint(_NOISE_LEVELS, (1,), generator=generator))
        integers = _to_lattice(part, rates, shift, scratch)
        turns = torch.bitwise_right_shift(integers, bits, out=scratch.whole)
        torch.sum(turns.mul_(_WEIGHTS), 1, dtype=torch.int32, out=sums)
        _pack(integers, bits, codes)
    checks.sub_(_WEIGHED * (_offset(1, row.dtype) >> bits))
    _check_unmoved(checks, row, step)
    return Codes(packed[: packed_bytes(row.numel(), bits)], checks)


def _rates(step: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(blocks, 1): by what a value is multiplied to be in steps; 0 in blocks without a range."""
    return torch.where(step > 0, step.to(dtype).reciprocal(), 0.0)[:, None]


def _to_lattice(
    blocks: torch.Tensor,  # (blocks, BLOCK)
    rates: torch.Tensor,  # (blocks, 1)
    shift: int,
    scratch: "_Scratch",
) -> torch.Tensor:  # (blocks, BLOCK) int32
    """The lattice integers, over `_offset(1, dtype)`: the nearest after noise of (-1/2, 1/2) was added."""
    noise = _noise(blocks.dtype)[shift : shift + blocks.numel()].view(blocks.shape)
    units = torch.addcmul(noise, blocks, rates, out=scratch.units)
    if units.dtype is torch.float64:
        units.clamp_(-_LATTICE_LIMIT, _LATTICE_LIMIT)
    return _low_bits(units.add_(_magic(1, units.dtype)), scratch)


@cache
def _noise(dtype: torch.dtype) -> torch.Tensor:
    """Each of 2^18 levels in (-1/2, 1/2) once, in an order drawn once; from the start again for another part's length.

    A part takes them in order from a random place on. So each element's noise is uniform over all levels, in each part
    and trade anew. To draw as many would take several times as long as all the rest of encoding.
    """
    order = torch.randperm(_NOISE_LEVELS, generator=torch.Generator().manual_seed(_NOISE_SEED))
    levels = ((order + 0.5) / _NOISE_LEVELS - 0.5).to(dtype)
    return torch.cat([levels, levels[: _PART_BLOCKS * BLOCK]])


def _magic(unit: int, dtype: torch.dtype) -> float:
    """What rounds a number to the nearest multiple of `unit`, a power of two, when it is added.

    The last bits of the sum are then how many multiples: `_low_bits` less `_offset`. From -2^22 to 2^22 multiples.
    """
    return 1.5 * 2.0 ** (23 if dtype is torch.float32 else 52) * unit


@cache
def _offset(unit: int, dtype: torch.dtype) -> int:
    """The last 32 bits of `_magic` itself."""
    return int(_low_bits(torch.tensor([_magic(unit, dtype)], dtype=dtype)))


def _low_bits(sums: torch.Tensor, scratch: "_Scratch | None" = None) -> torch.Tensor:
    """The last 32 bits of each number, int32; in the same memory where they are all."""
    if sums.dtype is torch.float32:
        return sums.view(torch.int32)
    low = sums.view(torch.int64)
    return scratch.integers.copy_(low) if scratch else low.to(torch.int32)


@dataclass(frozen=True, slots=True)
class _Scratch:
    """Memory for one part of a row, (blocks, BLOCK) each, kept from part to part and call to call.

    What is allocated anew for each is given back to the system after each, and costs more than the arithmetic.
    """

    units: torch.Tensor
    integers: torch.Tensor
    whole: torch.Tensor


_kept = threading.local()


def _scratch(blocks: int, dtype: torch.dtype) -> _Scratch:
    """This thread's own, for so many blocks."""
    made = getattr(_kept, str(dtype), None)
    if made is None:
        dtypes = dtype, torch.int32, torch.int32
        made = _Scratch(*(torch.empty(_PART_BLOCKS, BLOCK, dtype=each) for each in dtypes))
        setattr(_kept, str(dtype), made)
    return made if blocks == _PART_BLOCKS else _Scratch(*(getattr(made, each.name)[:blocks] for each in fields(made)))


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
    if not near.numel():
        return torch.zeros(0, dtype=torch.bool)
    blocks = _in_blocks(near)
    shared = blocks.numel() == values.numel()
    out = (values if shared else torch.empty_like(blocks)).view(blocks.shape)
    code = _unpack(codes.packed, near.numel(), bits)
    steps, rates = step.to(near.dtype)[:, None], _rates(step, near.dtype)
    wrong = _beyond(blocks, rates)
    checks = torch.empty(len(blocks), dtype=torch.int32)
    used = rates * ~wrong[:, None]
    for first in range(0, len(blocks), _PART_BLOCKS):
        part = slice(first, first + _PART_BLOCKS)
        _restore(code[part], blocks[part], steps[part], used[part], out[part], checks[part], bits)
    checks.neg_().add_(_WEIGHED * _offset(2**bits, near.dtype))
    _check_unmoved(checks, near, step)
    unmoved = step == 0
    if bool(unmoved.any()):
        out[unmoved] = blocks[unmoved]
    if not shared:
        values.copy_(out.view(-1)[: values.numel()])
    return wrong.logical_or_(checks != codes.checks)


def _beyond(blocks: torch.Tensor, rates: torch.Tensor) -> torch.Tensor:
    """(blocks,) bool: those with a value of more steps than the lattice has."""
    least, most = torch.aminmax(blocks)
    limit = _LATTICE_LIMIT - _LATTICE_MARGIN
    if bool(torch.maximum(-least, most) * rates.max() < limit):
        return torch.zeros(len(blocks), dtype=torch.bool)
    return blocks.abs().amax(1) * rates[:, 0] >= limit


def _restore(
    code: torch.Tensor,  # (blocks, BLOCK) uint8
    near: torch.Tensor,  # (blocks, BLOCK)
    steps: torch.Tensor,  # (blocks, 1)
    rates: torch.Tensor,  # (blocks, 1)
    out: torch.Tensor,  # (blocks, BLOCK), overwritten
    sums: torch.Tensor,  # (blocks,) int32, overwritten
    bits: Bits,
) -> None:
    """Writes one part's lattice points, and the weighted sums of `_offset` less turns."""
    scratch, magic = _scratch(len(near), near.dtype), _magic(2**bits, near.dtype)
    codes = out.copy_(code)
    # what a code and our own value differ by is near a multiple of the range: the nearest one
    multiples = torch.addcmul(codes, near, rates, value=-1, out=scratch.units).add_(magic)
    weighted = torch.mul(_low_bits(multiples, scratch), _WEIGHTS, out=scratch.whole)
    torch.sum(weighted, 1, dtype=torch.int32, out=sums)
    codes.sub_(multiples.sub_(magic)).mul_(steps)


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


def _check_weights() -> torch.Tensor:
    """(BLOCK,) int32: fixed, distinct odd integers below 2^24, drawn once for all peers."""
    order = torch.randperm(2**23, generator=torch.Generator().manual_seed(_CHECK_SEED))
    return (2 * order[:BLOCK] + 1).to(torch.int32)


_WEIGHTS = _check_weights()
_WEIGHED = _WEIGHTS.sum(0, keepdim=True, dtype=torch.int32)
"""(1,): what 1 in each place comes to. Less than 2^31."""


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
