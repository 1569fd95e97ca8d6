"""Codecs: within their stated bounds for any finite values, in any shape of memory."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from peers.body import Body
from peers.codec import CODECS, CodecName, decode, encode, flat, is_finite, may_travel, wire_dtype
from peers.errors import ProtocolError

finite = arrays.arrays(
    np.float32, st.integers(0, 40), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)
)


def travel(tensor: torch.Tensor, codec: CodecName) -> torch.Tensor:
    row = flat(tensor)
    as_dtype = wire_dtype(codec, row)
    received = torch.empty(row.numel(), dtype=tensor.dtype)
    decode(bytes(encode(row, as_dtype)), as_dtype, received)
    return received.reshape(tensor.shape)


@given(finite)
def test_fp32_is_exact(values: np.ndarray) -> None:
    tensor = torch.from_numpy(values)
    assert torch.equal(travel(tensor, "fp32").view(torch.int32), tensor.view(torch.int32))


@given(finite, st.sampled_from(["fp16", "bf16"]))
def test_narrow_codecs_keep_their_bounds(values: np.ndarray, codec: CodecName) -> None:
    tensor = torch.from_numpy(values)
    relative, absolute = {"fp16": (2.0**-11, 2.0**-25), "bf16": (2.0**-8, 2.0**-134)}[codec]
    error = (travel(tensor, codec).double() - tensor.double()).abs()
    assert bool((error <= (relative * tensor.double().abs()).clamp(min=absolute)).all())


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 0, 3), (5, 7)])
def test_every_dtype_and_shape(codec: CodecName, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.linspace(-2, 2, math.prod(shape), dtype=torch.float64).reshape(shape).to(dtype)
    received = travel(tensor, codec)
    assert received.dtype == dtype
    assert received.shape == tensor.shape
    assert torch.allclose(received.double(), tensor.double(), rtol=2**-8)
    if codec == "fp32" or dtype.itemsize == 2:
        assert torch.equal(received, tensor)


def test_float64_stays_exact_under_fp32() -> None:
    tensor = torch.tensor([1 + 2.0**-52, 1e300, 5e-324], dtype=torch.float64)
    assert torch.equal(travel(tensor, "fp32"), tensor)


@pytest.mark.parametrize(("codec", "largest", "over"), [("fp16", 65504.0, 65505.0), ("bf16", 3.3895e38, 3.4e38)])
def test_what_is_out_of_range_travels_wide_and_exact(codec: CodecName, largest: float, over: float) -> None:
    held = torch.tensor([largest, -1.0])
    assert wire_dtype(codec, held).itemsize == 2
    assert bool(torch.isfinite(travel(held, codec)).all())
    for sign in (1, -1):
        wide = torch.tensor([sign * over, 1 / 3])
        assert wire_dtype(codec, wide) is torch.float32
        assert torch.equal(travel(wide, codec), wide)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_what_is_not_finite_is_refused_by_name(codec: CodecName, bad: float, dtype: torch.dtype) -> None:
    with pytest.raises(ProtocolError, match="tensor 'first' holds NaN or infinite values"):
        Body({"first": torch.tensor([0.0, bad, 1.0], dtype=dtype)}, codec)


def test_finite_values_whose_sum_overflows_are_finite() -> None:
    assert is_finite(torch.full((100,), 3e38))
    assert is_finite(torch.full((100,), 60_000.0, dtype=torch.float16))
    assert not is_finite(torch.tensor([3e38, 3e38, math.inf]))
    assert not is_finite(torch.tensor([math.inf, -math.inf]))
    assert is_finite(torch.tensor([2**62, 2**62]))
    assert is_finite(torch.empty(0))


def test_strided_and_required_gradients() -> None:
    parameter = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4))
    assert torch.equal(travel(parameter.t()[1:], "fp32"), parameter.detach().t()[1:])
    assert not flat(parameter).requires_grad


def test_encoding_shares_memory_where_nothing_needs_converting() -> None:
    tensor = torch.zeros(4)
    data = encode(flat(tensor), torch.float32)
    tensor.fill_(1.0)
    assert bytes(data) == np.ones(4, np.float32).tobytes()


def test_another_length_is_refused() -> None:
    with pytest.raises(ProtocolError, match="5 bytes do not hold 2 values"):
        decode(b"12345", torch.float32, torch.zeros(2))


def test_which_conversions_exist() -> None:
    assert may_travel(torch.float64, torch.bfloat16)
    assert may_travel(torch.int64, torch.int64)
    assert not may_travel(torch.float16, torch.bfloat16)
    assert not may_travel(torch.float32, torch.float64)
