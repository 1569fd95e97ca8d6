"""How tensors become bytes: fp32, fp16, bf16, block int8, and modular at 8 and 4 bits.

A codec chooses, tensor by tensor, the dtype or the packing in which the tensor travels; the receiver gets it back
in its own dtype. Whatever the codec, nothing is clipped: a float32 or float64 tensor that the narrow dtype cannot hold
travels in its own dtype instead, and the table says so. Tensors of 16 bits always travel as they are.

| codec  | float32, float64 travel as | error of a received value x                                         |
|--------|----------------------------|---------------------------------------------------------------------|
| `fp32` | themselves                 | 0; a float64 run stays exact                                        |
| `fp16` | float16, if abs(x) <= 65504 in the whole tensor | at most max(2^-11 abs(x), 2^-25)               |
| `bf16` | bfloat16, if abs(x) <= 3.38e38 in the whole tensor | at most max(2^-8 abs(x), 2^-134)            |
| `int8` | a byte an element, a scale a block | at most max(m/254 * (1 + 2^-14), 2^-100), m: largest of its block |
| `modular8` | a byte an element      | less than 6/256 of the larger movement in its block; unbiased        |
| `modular4` | half a byte an element | less than 5/16 of the larger movement in its block; unbiased         |

(Round to nearest, the modular ones stochastically; float64 adds its rounding to float32, 2^-24 abs(x), before that of
fp16 and bf16; the modular ones add the rounding of a bound, 2^-7 of it, and of their dtype.) The last three leave
tensors of less than two dimensions or 512 elements as they are, and the modular ones those that have no start
(`Offer.start`). See `quantize`. Integers and booleans are never converted. Bytes are little-endian, as torch holds
them on every platform it supports.
"""

from typing import Literal, get_args

import torch

from peers.errors import ProtocolError
from peers.table import FLOATING, MODULAR_BITS, Packing, packable

CodecName = Literal["fp32", "fp16", "bf16", "int8", "modular8", "modular4"]
CODECS: tuple[CodecName, ...] = get_args(CodecName)
MODULAR_CODECS: tuple[CodecName, ...] = ("modular8", "modular4")

_PACKINGS: dict[str, Packing] = {
    "int8": Packing.INT8,
    "modular8": Packing.MODULAR8,
    "modular4": Packing.MODULAR4,
}
_NARROW = {"fp16": torch.float16, "bf16": torch.bfloat16}
_WIDE = (torch.float32, torch.float64)
_FLOAT32_MAX = torch.finfo(torch.float32).max


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's values in one row, in CPU memory; copied only where they are elsewhere or strided."""
    return tensor.detach().to("cpu").contiguous().reshape(-1)


def wire_dtype(codec: CodecName, row: torch.Tensor) -> torch.dtype:
    """The dtype in which a flat tensor of finite values travels."""
    narrow = _NARROW.get(codec)
    if narrow is None or row.dtype not in _WIDE or not row.numel():
        return row.dtype
    least, most = torch.aminmax(row)
    largest = max(-float(least), float(most))
    return narrow if largest <= torch.finfo(narrow).max else row.dtype


def packing(codec: CodecName, shape: tuple[int, ...], row: torch.Tensor, *, has_start: bool) -> Packing:
    """How a flat tensor of finite values is packed. What int8's float32 scales cannot hold is not."""
    chosen = _PACKINGS.get(codec, Packing.PLAIN)
    if not packable(shape, row.dtype) or (chosen in MODULAR_BITS and not has_start):
        return Packing.PLAIN
    if chosen is Packing.INT8 and row.dtype is torch.float64 and float(row.abs().max()) > _FLOAT32_MAX:
        return Packing.PLAIN
    return chosen


def may_travel(dtype: torch.dtype, as_dtype: torch.dtype) -> bool:
    """Whether a tensor of `dtype` may arrive in `as_dtype`, by any codec."""
    return as_dtype is dtype or (dtype in _WIDE and as_dtype in _NARROW.values())


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite. Integers always are."""
    if not tensor.dtype.is_floating_point:
        return True
    # A finite sum proves it at 8 GiB/s; a sum that overflowed proves nothing, and is rare.
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())


def check_finite(name: str, row: torch.Tensor) -> None:
    """Raises `ProtocolError` that names the tensor when values are NaN or infinite."""
    if not is_finite(row):
        raise ProtocolError(f"tensor '{name}' holds NaN or infinite values")


def encode(row: torch.Tensor, as_dtype: torch.dtype) -> memoryview:
    """The bytes of a flat tensor, or of a slice of one, converted to `as_dtype`.

    Shares the tensor's memory where nothing needs converting.
    """
    return view(row.to(as_dtype))


def decode(data: bytes | bytearray | memoryview, as_dtype: torch.dtype, row: torch.Tensor) -> None:
    """Writes bytes that hold `as_dtype` values into `row`, a flat tensor of as many elements.

    Raises `ProtocolError` when the lengths differ.
    """
    if len(data) != row.numel() * as_dtype.itemsize:
        raise ProtocolError(f"{len(data)} bytes do not hold {row.numel()} values of {as_dtype}")
    arrived = torch.empty(row.numel(), dtype=as_dtype)
    view(arrived)[:] = data
    row.copy_(arrived)


def view(row: torch.Tensor) -> memoryview:
    """A flat, contiguous CPU tensor's own memory."""
    if not row.numel():
        return memoryview(bytearray())
    return row.view(torch.uint8).numpy().data


def floating(dtype: torch.dtype) -> bool:
    """Whether tensors of this dtype may be exchanged and averaged."""
    return dtype in FLOATING.values()
