"""Block int8, and quantization modulo a range: bounds, what is caught, what is unbiased."""

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from peers import compiled, quantize
from peers.errors import ProtocolError
from peers.quantize import BLOCK, LEAST_BOUND, RANGE, Bits

BITS: tuple[Bits, ...] = (8, 4)
DTYPES = (torch.float32, torch.float64)


@pytest.fixture(scope="module", autouse=True, params=["torch", "compiled"])
def _way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Everything holds whichever way codes are computed."""
    with pytest.MonkeyPatch.context() as patch:
        fast = pytest.importorskip("peers.numba_loops") if request.param == "compiled" else None
        patch.setattr(compiled, "_fast", fast)
        yield


def random_row(count: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def noise(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def spread_out(step: torch.Tensor, count: int) -> torch.Tensor:
    """Each block's step, repeated for each of its elements, float64."""
    return step.double().repeat_interleave(BLOCK)[:count]


def over_there(
    sent: torch.Tensor, own: torch.Tensor, start: torch.Tensor, bits: Bits, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a receiver with `own` makes of `sent`; which blocks are wrong; the steps."""
    step = quantize.steps(quantize.movement_bounds(sent, start), quantize.movement_bounds(own, start), bits)
    values, wrong = quantize.decode(quantize.encode(sent, step, bits, noise(seed)), own, step, bits)
    assert values.dtype is own.dtype
    assert values.shape == own.shape
    assert wrong.shape == step.shape == (quantize.blocks_in(own.numel()),)
    return values, wrong, step


counts = st.one_of(st.integers(0, 3 * BLOCK + 5), st.sampled_from([BLOCK, 2 * BLOCK, 4 * BLOCK]))
seeds = st.integers(0, 2**31)


@given(
    count=counts,
    seed=seeds,
    scale=st.sampled_from([1e-8, 1e-3, 1.0, 1e5]),
    movement=st.sampled_from([1e-5, 1e-3, 0.1, 3.0]),
    bits=st.sampled_from(BITS),
    dtype=st.sampled_from(DTYPES),
)
@settings(max_examples=150, deadline=None)
def test_a_restored_value_is_within_a_step_or_its_block_is_marked(
    count: int, seed: int, scale: float, movement: float, bits: Bits, dtype: torch.dtype
) -> None:
    start = random_row(count, seed, dtype) * scale
    sent = start + random_row(count, seed + 1, dtype) * (scale * movement)
    own = start + random_row(count, seed + 2, dtype) * (scale * movement)
    values, wrong, step = over_there(sent, own, start, bits)
    right = ~wrong.repeat_interleave(BLOCK)[:count]
    error = (values.double() - sent.double()).abs()
    rounding = 2 * torch.finfo(dtype).eps * (sent.double().abs() + spread_out(step, count))
    assert bool((error <= spread_out(step, count) + rounding)[right].all())
    assert bool(values.isfinite().all())


@given(
    seed=seeds,
    share=st.floats(-0.999, 0.999),
    scale=st.sampled_from([1e-8, 1.0, 1e5]),
    bits=st.sampled_from(BITS),
    dtype=st.sampled_from(DTYPES),
)
@settings(max_examples=100, deadline=None)
def test_within_half_the_range_no_block_is_wrong(
    seed: int, share: float, scale: float, bits: Bits, dtype: torch.dtype
) -> None:
    count = 2 * BLOCK + 100
    sent = random_row(count, seed, dtype) * scale
    step = torch.full((3,), scale / 256)
    reach = (2 ** (bits - 1) - 1) * (scale / 256)
    own = sent + share * reach * random_row(count, seed + 1, dtype).clamp(-1, 1)
    codes = quantize.encode(sent, step, bits, noise(seed))
    values, wrong = quantize.decode(codes, own, step, bits)
    assert not wrong.any()
    assert float((values - sent).abs().max()) <= scale / 256 * 1.01


@given(seed=seeds, victims=st.integers(1, BLOCK), turns=st.integers(-3, 3).filter(bool), bits=st.sampled_from(BITS))
@settings(max_examples=100, deadline=None)
def test_values_beyond_the_range_are_caught(seed: int, victims: int, turns: int, bits: Bits) -> None:
    sent = random_row(3 * BLOCK, seed)
    step = torch.full((3,), 2.0**-10)
    own = sent.clone()
    own[BLOCK : BLOCK + victims] += turns * 2**bits * 2.0**-10
    values, wrong = quantize.decode(quantize.encode(sent, step, bits, noise(seed)), own, step, bits)
    assert wrong.tolist() == [False, True, False]
    assert float((values[BLOCK : BLOCK + victims] - sent[BLOCK : BLOCK + victims]).abs().min()) > 2**bits * 2.0**-11


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("signs", [(1, 1), (1, -1), (2, -1), (3, 3)])
def test_any_two_wrong_values_in_a_block_are_caught(bits: Bits, signs: tuple[int, int]) -> None:
    pairs = torch.combinations(torch.arange(0, BLOCK, 7))
    sent = random_row(BLOCK, 3).repeat(len(pairs))
    step = torch.full((len(pairs),), 2.0**-10)
    own = sent.clone().reshape(-1, BLOCK)
    own.scatter_add_(1, pairs, torch.tensor(signs).float().repeat(len(pairs), 1) * 2**bits * 2.0**-10)
    _, wrong = quantize.decode(quantize.encode(sent, step, bits, noise()), own.reshape(-1), step, bits)
    assert wrong.all()


def test_elements_are_rounded_independently() -> None:
    """Neither neighbours nor elements of other parts of a long row share their noise."""
    row = torch.full((4 * 2**18,), 0.5)
    step = torch.ones(quantize.blocks_in(row.numel()))
    up, _ = quantize.decode(quantize.encode(row, step, 8, noise(3)), row, step, 8)
    assert sorted(set(up.tolist())) == [0.0, 1.0]
    signs = 2 * up.double() - 1
    parts = signs.view(4, -1)
    limit = 5 / math.sqrt(parts.shape[1])
    for lag in (1, 2, 7, BLOCK):
        assert abs(float((signs[lag:] * signs[:-lag]).mean())) < limit
    for one in range(4):
        for other in range(one):
            assert abs(float((parts[one] * parts[other]).mean())) < limit


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", BITS)
def test_rounding_is_unbiased(bits: Bits, dtype: torch.dtype) -> None:
    # two values at each place within a step, and a thousand draws of noise for each
    places = torch.linspace(-2, 2, 2 * BLOCK, dtype=dtype)
    step = torch.ones(2)
    draws = 2_000
    generator = noise(7)
    total = torch.zeros(2 * BLOCK, dtype=torch.float64)
    for _ in range(draws):
        values, wrong = quantize.decode(quantize.encode(places, step, bits, generator), places, step, bits)
        assert not wrong.any()
        total += values
    error = total / draws - places
    # a single draw's standard deviation is at most half a step
    assert float(error.abs().max()) < 5 * 0.5 / math.sqrt(draws)
    assert abs(float(error.mean())) < 5 * 0.41 / math.sqrt(draws * 2 * BLOCK)


def test_large_values_are_rounded_without_bias_too() -> None:
    # at 2^18 steps a float32 still tells 32 places within a step; 16 steps, odd and even
    places = 2.0**18 + torch.arange(BLOCK, dtype=torch.float32) / 32
    generator = noise(11)
    total = torch.zeros(BLOCK, dtype=torch.float64)
    draws = 2_000
    for _ in range(draws):
        values, _ = quantize.decode(quantize.encode(places, torch.ones(1), 8, generator), places, torch.ones(1), 8)
        total += values
    error = total / draws - places
    assert abs(float(error.mean())) < 5 * 0.41 / math.sqrt(draws * BLOCK)
    assert float(error.abs().max()) < 1 / 64 + 5 * 0.5 / math.sqrt(draws)  # half of what the dtype tells apart


def test_lattice_points_are_kept_exactly() -> None:
    row = torch.arange(-BLOCK, BLOCK, dtype=torch.float32) / 4
    for bits in BITS:
        step = torch.full((2,), 0.25)
        values, wrong = quantize.decode(quantize.encode(row, step, bits, noise()), row + 0.3, step, bits)
        assert not wrong.any()
        assert torch.equal(values, row)


@pytest.mark.parametrize("bits", BITS)
def test_the_same_seed_gives_the_same_bytes(bits: Bits) -> None:
    row = random_row(5_000, 1)
    step = torch.full((quantize.blocks_in(5_000),), 0.01)
    one, same, other = (quantize.encode(row, step, bits, noise(seed)) for seed in (1, 1, 2))
    assert torch.equal(one.packed, same.packed)
    assert torch.equal(one.checks, same.checks)
    assert not torch.equal(one.packed, other.packed)


def test_two_receivers_restore_the_same_numbers() -> None:
    sent = random_row(4 * BLOCK, 1)
    step = torch.full((4,), 0.02)
    codes = quantize.encode(sent, step, 8, noise())
    first, _ = quantize.decode(codes, sent + 0.5, step, 8)
    second, _ = quantize.decode(codes, sent - 0.9, step, 8)
    assert torch.equal(first, second)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_in_which_nothing_moved_are_taken_where_equal(bits: Bits, dtype: torch.dtype) -> None:
    start = random_row(4 * BLOCK, 5, dtype)
    sent, own = start.clone(), start.clone()
    sent[:BLOCK] += 0.01
    own[:BLOCK] -= 0.001
    start[3 * BLOCK + 7] = sent[3 * BLOCK + 7] = 0.5
    own[3 * BLOCK + 7] = 0.25
    bounds = quantize.movement_bounds(sent, start)
    assert (bounds > 0).tolist() == [True, False, False, False]
    step = quantize.steps(bounds, bounds, bits)
    values, wrong = quantize.decode(quantize.encode(sent, step, bits, noise()), own, step, bits)
    assert wrong.tolist() == [False, False, False, True]
    assert torch.equal(values[BLOCK : 3 * BLOCK], sent[BLOCK : 3 * BLOCK])


def test_unmoved_blocks_that_differ_anywhere_are_caught() -> None:
    own = random_row(BLOCK, 1).repeat(BLOCK)
    sent = own.clone().reshape(BLOCK, BLOCK)
    sent.diagonal().view(torch.int32).bitwise_xor_(1)
    step = torch.zeros(BLOCK)
    _, wrong = quantize.decode(quantize.encode(sent.reshape(-1), step, 8, noise()), own, step, 8)
    assert wrong.all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(
    "start",
    [
        pytest.param(torch.full((1_000,), 1e5), id="1e5"),
        pytest.param(torch.full((1_000,), 1e-8), id="1e-8"),
        pytest.param(torch.zeros(1_000), id="zeros"),
        pytest.param(torch.cat([torch.full((999,), 1e-8), torch.tensor([1e5])]), id="outlier"),
        pytest.param(torch.full((1_000,), 3e38), id="largest"),
        pytest.param(torch.full((1_000,), 1e-42), id="subnormal"),
        pytest.param(torch.empty(0), id="empty"),
        pytest.param(torch.ones(1), id="one"),
    ],
)
def test_edges(start: torch.Tensor, bits: Bits) -> None:
    moved = random_row(start.numel(), 2).clamp(-3, 3) * 1e-3
    sent, own = start * (1 + moved), start * (1 - moved.flip(0))
    values, wrong, step = over_there(sent, own, start, bits)
    assert bool(values.isfinite().all())
    right = ~wrong.repeat_interleave(BLOCK)[: start.numel()]
    limit = spread_out(step, start.numel()) * 1.001 + sent.abs().double() * 1e-6
    assert bool(((values.double() - sent.double()).abs() <= limit)[right].all())


def test_values_too_fine_for_the_lattice_are_marked() -> None:
    sent = torch.ones(2 * BLOCK)
    sent[:BLOCK] = 2.0**24
    step = torch.ones(2)
    _, wrong = quantize.decode(quantize.encode(sent, step, 8, noise()), sent, step, 8)
    assert wrong.tolist() == [True, False]
    _, wrong = quantize.decode(quantize.encode(sent, step, 8, noise()), torch.ones(2 * BLOCK), step, 8)
    assert wrong.tolist() == [True, False]


@given(seed=seeds, count=st.integers(1, 3 * BLOCK), exponent=st.integers(-45, 38), dtype=st.sampled_from(DTYPES))
@example(seed=0, count=1, exponent=38, dtype=torch.float64)
@example(seed=19_314, count=1, exponent=-44, dtype=torch.float64)
@settings(max_examples=100, deadline=None)
def test_movement_bounds_are_rounded_up(seed: int, count: int, exponent: int, dtype: torch.dtype) -> None:
    start = torch.zeros(count, dtype=dtype)
    row = (random_row(count, seed, torch.float64).clamp(-3, 3) * 10.0**exponent).to(dtype)
    bounds = quantize.movement_bounds(row, start)
    quantize.check_bounds(bounds)
    largest = torch.nn.functional.pad(row.abs(), (0, -count % BLOCK)).reshape(-1, BLOCK).amax(1).double()
    got = bounds.double()
    assert bool(((got == 0) == (largest == 0)).all())
    usual = (largest >= LEAST_BOUND) & (largest <= 2.0**99)
    assert bool((got >= largest)[usual].all())
    assert bool((got <= largest * (1 + 2.0**-7 + 2.0**-20))[usual].all())
    assert bool((got[(largest > 0) & (largest < LEAST_BOUND)] == LEAST_BOUND).all())


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 1e-38, 1e38])
def test_bounds_that_nobody_announces_are_refused(value: float) -> None:
    with pytest.raises(ProtocolError, match="movement bound"):
        quantize.check_bounds(torch.tensor([1.0, value], dtype=torch.bfloat16))


@given(seed=seeds, bits=st.sampled_from(BITS))
@settings(max_examples=50, deadline=None)
def test_any_codes_with_any_bounds_restore_finite_values(seed: int, bits: Bits) -> None:
    generator = noise(seed)
    count = 2 * BLOCK + 9
    packed = torch.randint(0, 256, (quantize.packed_bytes(count, bits),), dtype=torch.uint8, generator=generator)
    checks = torch.randint(-(2**31), 2**31 - 1, (3,), generator=generator).to(torch.int32)
    near = random_row(count, seed) * 10.0 ** int(torch.randint(-30, 30, (1,), generator=generator))
    bounds = (2.0 ** torch.randint(-100, 101, (3,), generator=generator)).to(torch.bfloat16)
    quantize.check_bounds(bounds)
    step = quantize.steps(bounds, bounds, bits)
    values, wrong = quantize.decode(quantize.Codes(packed, checks), near, step, bits)
    assert bool(values.isfinite().all())
    assert wrong.all()


def test_bytes_of_each_width() -> None:
    assert [quantize.packed_bytes(count, 8) for count in (0, 1, 513)] == [0, 1, 513]
    assert [quantize.packed_bytes(count, 4) for count in (0, 1, 512, 513)] == [0, 1, 256, 257]
    codes = quantize.encode(random_row(513, 0), torch.ones(2), 4, noise())
    assert (codes.packed.dtype, codes.packed.numel()) == (torch.uint8, 257)
    assert (codes.checks.dtype, codes.checks.numel()) == (torch.int32, 2)


@pytest.mark.parametrize("bits", BITS)
def test_inputs_are_left_alone(bits: Bits) -> None:
    start, sent, own = random_row(700, 0), random_row(700, 1), random_row(700, 2)
    kept = [tensor.clone() for tensor in (start, sent, own)]
    over_there(sent, own, start, bits)
    quantize.int8_encode(sent)
    assert all(torch.equal(now, before) for now, before in zip((start, sent, own), kept, strict=True))


@pytest.mark.parametrize("bits", BITS)
def test_the_range_is_a_small_multiple_of_the_larger_movement(bits: Bits) -> None:
    ours, theirs = (torch.tensor(values, dtype=torch.bfloat16) for values in ([1.0, 0.25, 0.0], [0.5, 4.0, 0.0]))
    expected = [RANGE[bits] / 2**bits * larger for larger in (1.0, 4.0, 0.0)]
    assert quantize.steps(ours, theirs, bits).tolist() == expected == quantize.steps(theirs, ours, bits).tolist()


@given(
    count=counts,
    seed=seeds,
    exponent=st.integers(-45, 37),
    dtype=st.sampled_from(DTYPES),
    outlier=st.sampled_from([1.0, 1e3, 1e8]),
)
@settings(max_examples=150, deadline=None)
def test_int8_error_is_bounded_by_the_largest_of_the_block(
    count: int, seed: int, exponent: int, dtype: torch.dtype, outlier: float
) -> None:
    row = random_row(count, seed, torch.float64).clamp(-3, 3) * 10.0**exponent
    row[:1] *= outlier
    row = row.clamp(-3e38, 3e38).to(dtype)
    scales, codes = quantize.int8_encode(row)
    assert (scales.dtype, scales.shape) == (torch.float32, (quantize.blocks_in(count),))
    assert (codes.dtype, codes.shape) == (torch.int8, (count,))
    values = quantize.int8_decode(scales, codes, dtype)
    assert values.dtype is dtype
    largest = torch.nn.functional.pad(row.abs(), (0, -count % BLOCK)).reshape(-1, BLOCK).amax(1).double()
    limit = torch.clamp(spread_out(largest / 254 * (1 + 2.0**-14), count), min=2.0**-100)
    assert bool(((values.double() - row.double()).abs() <= limit).all())


def test_int8_keeps_zeros_and_the_largest() -> None:
    row = torch.zeros(2 * BLOCK)
    row[BLOCK] = -127.0
    values = quantize.int8_decode(*quantize.int8_encode(row), torch.float32)
    assert torch.equal(values, row)
    constant = torch.full((BLOCK,), 0.1)
    values = quantize.int8_decode(*quantize.int8_encode(constant), torch.float32)
    torch.testing.assert_close(values, constant, rtol=2e-7, atol=0)


@pytest.mark.parametrize("scale", [math.nan, math.inf])
def test_int8_of_bad_scales_is_not_finite(scale: float) -> None:
    values = quantize.int8_decode(torch.tensor([scale]), torch.ones(3, dtype=torch.int8), torch.float32)
    assert not values.isfinite().any()
