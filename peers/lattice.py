"""What all ways of computing modular codes share: sizes, limits, the weights of checksums, and the noise.

See `peers.quantize`. Whatever is here is a part of the protocol, but for the noise, which is each sender's own.
"""

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

BLOCK = 512
"""Elements that share a scale, or a range."""

Bits = Literal[4, 8]

LEAST_BOUND = 2.0**-100
"""A movement below it is announced as it, so that no step is subnormal."""
MOST_BOUND = 2.0**100
LATTICE_LIMIT = 2.0**22
"""Up to here a float32 tells how many steps a value is when `magic` is added."""
LATTICE_MARGIN = 2.0**9
PART_BLOCKS = 512
"""Blocks that take their noise from one place. More than them at once leaves the cache; less costs calls."""
PART = PART_BLOCKS * BLOCK
"""Elements of so many blocks."""
NOISE_LEVELS = 2**18
UNMOVED_FACTOR = 0x9E3779B1
"""Odd multiples of it weigh the 16-bit parts of values in blocks without a range."""

_CHECK_SEED = 20200713
_NOISE_SEED = 20201130


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


@cache
def noise(dtype: torch.dtype) -> torch.Tensor:
    """Each of 2^18 levels in (-1/2, 1/2) once, in an order drawn once; from the start again for another part's length.

    A part takes them in order from a random place on. So each element's noise is uniform over all levels, in each part
    and trade anew. To draw as many would take several times as long as all the rest of encoding.
    """
    order = torch.randperm(NOISE_LEVELS, generator=torch.Generator().manual_seed(_NOISE_SEED))
    levels = ((order + 0.5) / NOISE_LEVELS - 0.5).to(dtype)
    return torch.cat([levels, levels[:PART]])


def magic(unit: int, dtype: torch.dtype) -> float:
    """What rounds a number to the nearest multiple of `unit`, a power of two, when it is added.

    The last bits of the sum, less those of `magic` itself, are then how many multiples. From -2^22 to 2^22 multiples.
    """
    return 1.5 * 2.0 ** (23 if dtype is torch.float32 else 52) * unit


def _check_weights() -> torch.Tensor:
    """(BLOCK,) int32: fixed, distinct odd integers below 2^24, drawn once for all peers."""
    order = torch.randperm(2**23, generator=torch.Generator().manual_seed(_CHECK_SEED))
    return (2 * order[:BLOCK] + 1).to(torch.int32)


WEIGHTS = _check_weights()
