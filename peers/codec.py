"""How tensors become bytes: fp32, fp16, bf16.

A codec chooses, tensor by tensor, the dtype in which the tensor travels; the receiver gets it back in its own
dtype. Whatever the codec, nothing is clipped: a float32 or float64 tensor that the narrow dtype cannot hold
travels in its own dtype instead, and the table says so. Tensors of 16 bits always travel as they are.

| codec  | float32, float64 travel as | error of a received value x                                         |
|--------|----------------------------|---------------------------------------------------------------------|
| `fp32` | themselves                 | 0; a float64 run stays exact                                        |
| `fp16` | float16, if abs(x) <= 65504 in the whole tensor | at most max(2^-11 abs(x), 2^-25)               |
| `bf16` | bfloat16, if abs(x) <= 3.38e38 in the whole tensor | at most max(2^-8 abs(x), 2^-134)            |

(Round to nearest; float64 adds its rounding to float32, 2^-24 abs(x), before that.) Integers and booleans are
never converted. Bytes are little-endian, as torch holds them on every platform it supports.
"""

from typing import Literal, get_args

import torch

from peers.errors import ProtocolError
from peers.table import FLOATING

CodecName = Literal["fp32", "fp16", "bf16"]
CODECS: tuple[CodecName, ...] = get_args(CodecName)

_NARROW = {"fp16": torch.float16, "bf16": torch.bfloat16}
_WIDE = (torch.float32, torch.float64)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's values in one row, in CPU memory; copied only where they are elsewhere or strided."""
    return tensor.detach().to("cpu").contiguous().reshape(-1)


def wire_dtype(codec: CodecName, name: str, row: torch.Tensor) -> torch.dtype:
    """The dtype in which a flat tensor travels.

    Raises `ProtocolError` that names the tensor when it holds NaN or infinite values.
    """
    if not is_finite(row):
        raise ProtocolError(f"tensor '{name}' holds NaN or infinite values")
    narrow = _NARROW.get(codec)
    if narrow is None or row.dtype not in _WIDE or not row.numel():
        return row.dtype
    least, most = torch.aminmax(row)
    largest = max(-float(least), float(most))
    return narrow if largest <= torch.finfo(narrow).max else row.dtype


def may_travel(dtype: torch.dtype, as_dtype: torch.dtype) -> bool:
    """Whether a tensor of `dtype` may arrive in `as_dtype`, by any codec."""
    return as_dtype is dtype or (dtype in _WIDE and as_dtype in _NARROW.values())


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite. Integers always are."""
    if not tensor.dtype.is_floating_point:
        return True
    # A finite sum proves it at 8 GiB/s; a sum that overflowed proves nothing, and is rare.
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())


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
