"""Modular codes by torch's own operations: on any machine, in any dtype. See `peers.quantize` for what they are.

Each function does as the one of its name in `peers.numba_loops`, and comes to the same bits where torch multiplies and
adds in one rounding, as it does on processors that can.
"""

import threading
from dataclasses import dataclass, fields
from functools import cache

import torch

from peers.lattice import (
    BLOCK,
    LATTICE_LIMIT,
    LATTICE_MARGIN,
    LEAST_BOUND,
    MOST_BOUND,
    PART_BLOCKS,
    UNMOVED_FACTOR,
    WEIGHTS,
    Bits,
    Codes,
    blocks_in,
    magic,
    noise,
)

_WEIGHED = WEIGHTS.sum(0, keepdim=True, dtype=torch.int32)
"""(1,): what 1 in each place comes to. Less than 2^31."""


def movement(
    row: torch.Tensor,  # (n,)
    start: torch.Tensor,  # (n,) of the same dtype
) -> tuple[torch.Tensor, bool]:  # (blocks,) bfloat16
    """Each block's bound, and whether all of `row` was seen to be finite; False says nothing."""
    largest = torch.empty(blocks_in(row.numel()), dtype=row.dtype, device=row.device)
    for first in range(0, len(largest), PART_BLOCKS):
        part = slice(first * BLOCK, (first + PART_BLOCKS) * BLOCK)
        largest[first : first + PART_BLOCKS] = _largest_apart(row[part], start[part])
    moved = largest > 0  # before float32 takes the least of float64 for 0
    if largest.dtype is torch.float64:
        largest = (largest * (1 + 2.0**-22)).clamp_(max=2 * MOST_BOUND).float()
    raised = largest.clamp(LEAST_BOUND, MOST_BOUND)
    bits = raised.view(torch.int32).add_(0xFFFF).bitwise_and_(~0xFFFF)
    bounds = torch.where(moved, bits.view(torch.float32), 0.0).to(torch.bfloat16)
    return bounds, row.device.type == "cpu" and bool(row.sum().isfinite())


def _largest_apart(row: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """(blocks,), of one part; in kept memory where that is the CPU's."""
    if row.device.type != "cpu" or row.numel() % BLOCK:
        return in_blocks(row - start).abs_().amax(1)
    apart = _scratch(row.numel() // BLOCK, row.dtype).units
    return torch.sub(in_blocks(row), in_blocks(start), out=apart).abs_().amax(1)


def encode(
    row: torch.Tensor,  # (n,), one part at most
    step: torch.Tensor,  # (blocks,) float32
    bits: Bits,
    shift: int,
    codes: Codes,
) -> None:
    """Writes the codes of one part, with the noise that begins at `shift`."""
    blocks = in_blocks(row)
    scratch = _scratch(len(blocks), row.dtype)
    integers = _to_lattice(blocks, _rates(step, row.dtype), shift, scratch)
    turns = torch.bitwise_right_shift(integers, bits, out=scratch.whole)
    torch.sum(turns.mul_(WEIGHTS), 1, dtype=torch.int32, out=codes.checks)
    codes.checks.sub_(_WEIGHED * (_offset(1, row.dtype) >> bits))
    codes.packed.copy_(_packed(integers, bits)[: codes.packed.numel()])
    _check_unmoved(codes.checks, row, step)


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
    levels = noise(blocks.dtype)[shift : shift + blocks.numel()].view(blocks.shape)
    units = torch.addcmul(levels, blocks, rates, out=scratch.units)
    if units.dtype is torch.float64:
        units.clamp_(-LATTICE_LIMIT, LATTICE_LIMIT)
    return _low_bits(units.add_(magic(1, units.dtype)), scratch)


@cache
def _offset(unit: int, dtype: torch.dtype) -> int:
    """The last 32 bits of `magic` itself."""
    return int(_low_bits(torch.tensor([magic(unit, dtype)], dtype=dtype)))


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
        made = _Scratch(*(torch.empty(PART_BLOCKS, BLOCK, dtype=each) for each in dtypes))
        setattr(_kept, str(dtype), made)
    return made if blocks == PART_BLOCKS else _Scratch(*(getattr(made, each.name)[:blocks] for each in fields(made)))


def decode(
    codes: Codes,
    near: torch.Tensor,  # (n,)
    step: torch.Tensor,  # (blocks,) float32
    bits: Bits,
    values: torch.Tensor,  # (n,) of near's dtype; overwritten
) -> torch.Tensor:  # (blocks,) bool
    """Writes the lattice points; returns which blocks are wrong."""
    if not near.numel():
        return torch.zeros(0, dtype=torch.bool)
    blocks = in_blocks(near)
    shared = blocks.numel() == values.numel()
    out = (values if shared else torch.empty_like(blocks)).view(blocks.shape)
    code = _unpack(codes.packed, near.numel(), bits)
    steps, rates = step.to(near.dtype)[:, None], _rates(step, near.dtype)
    wrong = _beyond(blocks, rates)
    checks = torch.empty(len(blocks), dtype=torch.int32)
    used = rates * ~wrong[:, None]
    for first in range(0, len(blocks), PART_BLOCKS):
        part = slice(first, first + PART_BLOCKS)
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
    limit = LATTICE_LIMIT - LATTICE_MARGIN
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
    scratch, adder = _scratch(len(near), near.dtype), magic(2**bits, near.dtype)
    codes = out.copy_(code)
    # what a code and our own value differ by is near a multiple of the range: the nearest one
    multiples = torch.addcmul(codes, near, rates, value=-1, out=scratch.units).add_(adder)
    weighted = torch.mul(_low_bits(multiples, scratch), WEIGHTS, out=scratch.whole)
    torch.sum(weighted, 1, dtype=torch.int32, out=sums)
    codes.sub_(multiples.sub_(adder)).mul_(steps)


def in_blocks(row: torch.Tensor) -> torch.Tensor:
    """The row as (blocks, BLOCK); shares its memory where no padding is needed."""
    spare = -row.numel() % BLOCK
    return (torch.nn.functional.pad(row, (0, spare)) if spare else row).reshape(blocks_in(row.numel()), BLOCK)


def _check_unmoved(checks: torch.Tensor, row: torch.Tensor, step: torch.Tensor) -> None:
    """Replaces the checksums of blocks without a range by those of the values' own bits."""
    unmoved = step == 0
    if bool(unmoved.any()):
        halves = in_blocks(row)[unmoved].view(torch.int16)
        weights = torch.arange(1, 2 * halves.shape[1], 2) * UNMOVED_FACTOR  # modulo 2^64, like the sum
        checks[unmoved] = ((halves * weights).sum(1) >> 16).to(torch.int32)


def _packed(integers: torch.Tensor, bits: Bits) -> torch.Tensor:
    """(blocks, BLOCK) int32, overwritten, to what its lower bits are, (bytes,); wider integers stand for bytes."""
    if bits == 8:
        return integers.view(-1)
    pairs = integers.bitwise_and_(15).to(torch.uint8).view(torch.int16).view(-1)  # the even element in the low byte
    return pairs.bitwise_or_(pairs >> 4)


def _unpack(packed: torch.Tensor, count: int, bits: Bits) -> torch.Tensor:
    """Bytes to (blocks, BLOCK) codes, uint8; those of the padding are 0."""
    row = packed
    if bits == 4:
        pairs = packed.to(torch.int16)
        row = pairs.bitwise_or_(pairs << 4).bitwise_and_(0x0F0F).view(torch.uint8)
    if row.numel() > count:
        row = row[:count]
    return in_blocks(row)
