"""Modular codes in one pass over float32 values, compiled by numba. See `peers.quantize` for what they are.

Importing this compiles all, or loads what an earlier process compiled: see `peers.compiled`, which is to do it. Each
function does as the one of its name in `peers.torch_loops`, to the bit. Nothing here holds the interpreter's lock while
it works. Arrays are one row each, in memory as they lie; no value is ever more than read, multiplied, added and
compared, so nothing overflows but to infinity, and nothing is raised.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from peers.lattice import (
    BLOCK,
    LATTICE_LIMIT,
    LATTICE_MARGIN,
    LEAST_BOUND,
    MOST_BOUND,
    UNMOVED_FACTOR,
    WEIGHTS,
    Bits,
    Codes,
    blocks_in,
    magic,
    noise,
)

F = TypeVar("F", bound=Callable[..., Any])
Array = np.ndarray[tuple[int], np.dtype[Any]]

_I, _F = np.int32, np.float32  # numba's own arithmetic is in 64 bits unless each result is cut


def _bits_of(value: float) -> int:
    return int(np.float32(value).view(np.int32))


_MAGNITUDE = _I(0x7FFFFFFF)
_INFINITE = _I(_bits_of(np.inf))
_LEAST, _MOST = _I(_bits_of(LEAST_BOUND)), _I(_bits_of(MOST_BOUND))
_BELOW_BFLOAT16 = _I(0xFFFF)
_ADDER = _F(magic(1, torch.float32))
_ADDER_BITS = _I(_bits_of(float(_ADDER)))
_FAR = _F(LATTICE_LIMIT - LATTICE_MARGIN)
_LOW_NIBBLE = _I(15)


def _compiled(signature: str, function: F) -> F:
    """Compiles, or loads what was compiled before; where that cannot be kept or read, compiles without keeping it."""
    kept: Any = njit(signature, nogil=True, cache=True)
    anew: Any = njit(signature, nogil=True)
    try:
        found: F = kept(function)
    except Exception:  # a folder that cannot be written, a full disk, a file cut short: the reasons do not matter
        found = anew(function)
    return found


def _fused(context: Any, factor: Any, other: Any, addend: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), generate


def _as_integer(context: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.int32(types.float32), generate


def _as_float(context: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


_fma: Any = intrinsic(_fused)
"""`factor * other + addend` in one rounding, as torch's `addcmul` has it."""
_bits: Any = intrinsic(_as_integer)
"""A float32's own bits. Of two that are not negative, the larger has the larger bits; NaN has the largest."""
_float: Any = intrinsic(_as_float)
"""What has these bits."""


def _movement(row: Array, start: Array, bounds: Array) -> bool:
    largest_of_all = _I(0)
    for block in range(bounds.size):
        first = block * BLOCK
        values, before = row[first : first + BLOCK], start[first : first + BLOCK]
        largest = _I(0)
        for i in range(values.size):
            largest = max(largest, _I(_bits(_F(values[i] - before[i])) & _MAGNITUDE))
            largest_of_all = max(largest_of_all, _I(_bits(values[i]) & _MAGNITUDE))
        if largest == 0 or largest > _INFINITE:
            bounds[block] = 0
        else:
            bounds[block] = (min(max(largest, _LEAST), _MOST) + _BELOW_BFLOAT16) >> 16
    return bool(largest_of_all < _INFINITE)


def _unmoved_check(halves: Array) -> np.int32:
    total = np.int64(0)
    for i in range(halves.size):
        total += np.int64(halves[i]) * np.int64((2 * i + 1) * UNMOVED_FACTOR)
    return np.int32(total >> 16)


_check = _compiled("int32(int16[::1])", _unmoved_check)


def _encode(
    row: Array, step: Array, levels: Array, weights: Array, bits: int, packed: Array, checks: Array, halves: Array
) -> None:
    integers = np.empty(BLOCK, np.int32)
    none = _I(_ADDER_BITS >> bits)
    for block in range(step.size):
        first = block * BLOCK
        values, noises = row[first : first + BLOCK], levels[first : first + BLOCK]
        count = values.size
        codes = packed[first * bits // 8 : ((first + count) * bits + 7) // 8]
        if step[block] == 0:
            codes[:] = 0
            checks[block] = _check(halves[2 * first : 2 * (first + count)])
            continue
        rate = _F(_F(1) / step[block])
        total = _I(0)
        for i in range(count):
            integer = _bits(_F(_fma(values[i], rate, noises[i]) + _ADDER))  # over the adder's bits
            integers[i] = integer
            total = _I(total + _I(_I(_I(integer >> bits) - none) * weights[i]))
        checks[block] = total
        if bits == 8:
            for i in range(count):
                codes[i] = np.uint8(integers[i])
        else:
            integers[count:] = 0
            for i in range(codes.size):
                codes[i] = np.uint8(_I(integers[2 * i] & _LOW_NIBBLE) | _I(_I(integers[2 * i + 1] & _LOW_NIBBLE) << 4))


def _decode(
    packed: Array,
    checks: Array,
    near: Array,
    step: Array,
    weights: Array,
    bits: int,
    values: Array,
    wrong: Array,
    halves: Array,
) -> None:
    adder = _F(_ADDER * _F(1 << bits))
    adder_bits = _bits(adder)
    unpacked = np.empty(BLOCK, np.uint8)
    for block in range(step.size):
        first = block * BLOCK
        own, out = near[first : first + BLOCK], values[first : first + BLOCK]
        count = own.size
        if step[block] == 0:
            out[:] = own
            wrong[block] = _check(halves[2 * first : 2 * (first + count)]) != checks[block]
            continue
        codes = packed[first : first + count]
        if bits == 4:
            pairs = packed[first // 2 : first // 2 + (count + 1) // 2]
            for i in range(pairs.size):
                unpacked[2 * i] = pairs[i] & 15
                unpacked[2 * i + 1] = pairs[i] >> 4
            codes = unpacked[:count]
        lattice = _F(step[block])
        rate = _F(_F(1) / lattice)
        largest = _I(0)
        for i in range(count):
            largest = max(largest, _I(_bits(own[i]) & _MAGNITUDE))
        far = _F(_float(largest) * rate) >= _FAR
        if far:
            rate = _F(0)
        total = _I(0)
        for i in range(count):
            code = _F(codes[i])
            multiple = _F(_fma(_F(-own[i]), rate, code) + adder)
            total = _I(total + _I(_I(adder_bits - _bits(multiple)) * weights[i]))
            out[i] = _F(_F(code - _F(multiple - adder)) * lattice)
        wrong[block] = far or total != checks[block]


_compiled_movement = _compiled("boolean(float32[::1], float32[::1], uint16[::1])", _movement)
_compiled_encode = _compiled(
    "void(float32[::1], float32[::1], float32[::1], int32[::1], int32, uint8[::1], int32[::1], int16[::1])", _encode
)
_compiled_decode = _compiled(
    "void(uint8[::1], int32[::1], float32[::1], float32[::1], int32[::1], int32, float32[::1], boolean[::1],"
    " int16[::1])",
    _decode,
)

_WEIGHTS = WEIGHTS.numpy()


def movement(
    row: torch.Tensor,  # (n,) float32
    start: torch.Tensor,  # (n,) float32
) -> tuple[torch.Tensor, bool]:  # (blocks,) bfloat16
    """Each block's bound, and whether all of `row` is finite."""
    assert row.numel() == start.numel()
    bounds = torch.empty(blocks_in(row.numel()), dtype=torch.bfloat16)
    finite = _compiled_movement(row.numpy(), start.numpy(), bounds.view(torch.uint16).numpy())
    return bounds, finite


def encode(
    row: torch.Tensor,  # (n,) float32, one part at most
    step: torch.Tensor,  # (blocks,) float32
    bits: Bits,
    shift: int,
    codes: Codes,
) -> None:
    """Writes the codes of one part, with the noise that begins at `shift`."""
    levels = noise(torch.float32)[shift : shift + row.numel()]
    _check_sizes(codes, row, step, bits)
    values, packed, checks = row.numpy(), codes.packed.numpy(), codes.checks.numpy()
    _compiled_encode(values, step.numpy(), levels.numpy(), _WEIGHTS, bits, packed, checks, values.view(np.int16))


def decode(
    codes: Codes,
    near: torch.Tensor,  # (n,) float32
    step: torch.Tensor,  # (blocks,) float32
    bits: Bits,
    values: torch.Tensor,  # (n,) float32; overwritten
) -> torch.Tensor:  # (blocks,) bool
    """Writes the lattice points; returns which blocks are wrong."""
    _check_sizes(codes, near, step, bits)
    wrong = torch.empty(len(step), dtype=torch.bool)
    packed, checks, own = codes.packed.numpy(), codes.checks.numpy(), near.numpy()
    assert values.numel() == near.numel()
    halves = own.view(np.int16)
    _compiled_decode(packed, checks, own, step.numpy(), _WEIGHTS, bits, values.numpy(), wrong.numpy(), halves)
    return wrong


def _check_sizes(codes: Codes, row: torch.Tensor, step: torch.Tensor, bits: Bits) -> None:
    """Compiled loops do not look where memory ends."""
    assert codes.packed.numel() == -(-row.numel() * bits // 8)
    assert len(codes.checks) == len(step) == blocks_in(row.numel())
