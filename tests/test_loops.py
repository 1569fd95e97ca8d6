"""Compiled loops and torch's operations: the same bits, whatever the values, and one place that chooses."""

import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from peers import compiled, quantize, torch_loops
from peers.lattice import BLOCK, LEAST_BOUND, MOST_BOUND, PART, Bits, Codes, blocks_in

numba_loops = pytest.importorskip("peers.numba_loops")

BITS: tuple[Bits, ...] = (8, 4)


def _torch_fuses() -> bool:
    """Whether torch multiplies and adds in one rounding here, as compiled loops always do."""
    third = torch.full((BLOCK,), 1 / 3)
    return bool((torch.addcmul(-(third * third), third, third) != 0).all())


fused = pytest.mark.skipif(not _torch_fuses(), reason="torch rounds products here, so rare ties fall otherwise")


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype is other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _random(generator: torch.Generator, count: int) -> torch.Tensor:
    return torch.randn(count, generator=generator)


def _rows(seed: int, count: int, scale: float, movement: float, far: float) -> tuple[torch.Tensor, ...]:
    """A start, what was sent and what the receiver has; some blocks unmoved, some far apart, some values odd."""
    generator = torch.Generator().manual_seed(seed)
    start = _random(generator, count) * scale
    sent, own = (start + _random(generator, count) * (scale * movement) for _ in range(2))
    for block in range(blocks_in(count)):
        chosen = slice(block * BLOCK, (block + 1) * BLOCK)
        kind = int(torch.randint(6, (1,), generator=generator))
        if kind == 0:
            sent[chosen], own[chosen] = start[chosen], start[chosen]
        elif kind == 1:
            sent[chosen] += far * scale
        elif kind == 2:
            own[chosen][::7] *= -1
        elif kind == 3:
            sent[chosen][:5] = torch.tensor([0.0, -0.0, 1e-42, -1e-45, 3e38])[: len(sent[chosen])]
    return start, sent, own


def _encoded(loops: Any, row: torch.Tensor, step: torch.Tensor, bits: Bits, shift: int) -> Codes:
    size = quantize.packed_bytes(row.numel(), bits)
    codes = Codes(torch.full((size,), 7, dtype=torch.uint8), torch.full((len(step),), 7, dtype=torch.int32))
    loops.encode(row, step, bits, shift, codes)
    return codes


counts = st.one_of(st.integers(1, 4 * BLOCK), st.sampled_from([BLOCK, 3 * BLOCK, 5 * BLOCK, 511, 513]))


@fused
@given(
    seed=st.integers(0, 2**31),
    count=counts,
    scale=st.sampled_from([1e-40, 1e-30, 1e-8, 0.02, 1.0, 1e5, 1e30]),
    movement=st.sampled_from([0.0, 1e-7, 1e-3, 0.1, 3.0]),
    far=st.sampled_from([0.0, 0.01, 1.0, 1e3]),
    bits=st.sampled_from(BITS),
    shift=st.integers(0, 2**18 - 1),
)
@settings(max_examples=300, deadline=None)
def test_both_come_to_the_same_bits(
    seed: int, count: int, scale: float, movement: float, far: float, bits: Bits, shift: int
) -> None:
    start, sent, own = _rows(seed, count, scale, movement, far)
    bounds = []
    for row in (sent, own):
        one, other = (loops.movement(row, start) for loops in (torch_loops, numba_loops))
        assert _same_bits(one[0], other[0])
        assert other[1]
        bounds.append(one[0])
    step = quantize.steps(bounds[0], bounds[1], bits)
    one, other = (_encoded(loops, sent, step, bits, shift) for loops in (torch_loops, numba_loops))
    assert torch.equal(one.packed, other.packed)
    assert torch.equal(one.checks, other.checks)
    _same_decoded(one, own, step, bits)


def _same_decoded(codes: Codes, own: torch.Tensor, step: torch.Tensor, bits: Bits) -> None:
    values = [torch.full_like(own, math.nan) for _ in range(2)]
    wrong = [
        loops.decode(codes, own, step, bits, into)
        for loops, into in zip((torch_loops, numba_loops), values, strict=True)
    ]
    assert torch.equal(*wrong)
    assert _same_bits(*values)
    assert values[0].isfinite().all() or not own.isfinite().all()


@fused
@given(seed=st.integers(0, 2**31), count=counts, bits=st.sampled_from(BITS), exponent=st.integers(-40, 38))
@settings(max_examples=100, deadline=None)
def test_any_codes_are_restored_alike(seed: int, count: int, bits: Bits, exponent: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (quantize.packed_bytes(count, bits),), dtype=torch.uint8, generator=generator)
    checks = torch.randint(-(2**31), 2**31 - 1, (blocks_in(count),), generator=generator).to(torch.int32)
    bounds = (2.0 ** torch.randint(-100, 101, (blocks_in(count),), generator=generator)).to(torch.bfloat16)
    own = _random(generator, count).clamp(-3, 3) * 10.0**exponent
    _same_decoded(Codes(packed, checks), own, quantize.steps(bounds, bounds, bits), bits)


@given(seed=st.integers(0, 2**31), count=counts, exponent=st.integers(-45, 38))
@example(seed=0, count=1, exponent=-45)
@settings(max_examples=100, deadline=None)
def test_bounds_of_any_movement_are_the_same(seed: int, count: int, exponent: int) -> None:
    row = (_random(torch.Generator().manual_seed(seed), count).double().clamp(-3, 3) * 10.0**exponent).float()
    bounds, finite = numba_loops.movement(row, torch.zeros(count))
    assert _same_bits(bounds, torch_loops.movement(row, torch.zeros(count))[0])
    assert finite == bool(row.isfinite().all())


@pytest.mark.parametrize("place", [0, 510, BLOCK, 2 * BLOCK + 6])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_seen(bad: float, place: int) -> None:
    row = torch.ones(2 * BLOCK + 7)
    assert numba_loops.movement(row, row.clone())[1]
    row[place] = bad
    for start in (torch.ones_like(row), row.clone()):
        bounds, finite = numba_loops.movement(row, start)
        assert not finite
        assert _same_bits(bounds, torch_loops.movement(row, start)[0])


def test_a_start_that_is_not_finite_is_treated_alike() -> None:
    row, start = torch.ones(3 * BLOCK), torch.ones(3 * BLOCK)
    start[3], start[BLOCK], start[2 * BLOCK] = math.nan, math.inf, 3e38
    row[2 * BLOCK] = -3e38  # the difference overflows
    bounds, finite = numba_loops.movement(row, start)
    assert finite
    assert bounds.tolist() == torch_loops.movement(row, start)[0].tolist() == [0.0, MOST_BOUND, MOST_BOUND]


def test_the_least_movement_is_announced() -> None:
    row = torch.zeros(BLOCK)
    row[5] = 1e-45
    assert numba_loops.movement(row, torch.zeros(BLOCK))[0].tolist() == [LEAST_BOUND]


@fused
@pytest.mark.parametrize("bits", BITS)
def test_long_rows_take_noise_part_by_part(bits: Bits, monkeypatch: pytest.MonkeyPatch) -> None:
    row = _random(torch.Generator().manual_seed(1), 2 * PART + 3 * BLOCK + 5)
    step = torch.full((blocks_in(row.numel()),), 0.01)
    found = []
    for loops in (None, numba_loops):
        monkeypatch.setattr(compiled, "_fast", loops)
        found.append(quantize.encode(row, step, bits, torch.Generator().manual_seed(5)))
    assert torch.equal(found[0].packed, found[1].packed)
    assert torch.equal(found[0].checks, found[1].checks)


def test_what_does_not_fit_compiled_loops_goes_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_fast", numba_loops)
    assert compiled.loops_for(torch.zeros(3), torch.zeros(3)) is numba_loops
    odd = torch.zeros(4 * BLOCK + 1, dtype=torch.uint8)[1:].numpy().view("float32")
    others = [
        torch.zeros(BLOCK, dtype=torch.float64),
        torch.zeros(2 * BLOCK)[::2],
        torch.from_numpy(odd),
        torch.zeros(BLOCK, device="meta"),
    ]
    for other in others:
        assert compiled.loops_for(other) is torch_loops
        assert compiled.loops_for(torch.zeros(BLOCK), other) is torch_loops
    for start in others[1:3]:
        assert quantize.movement_bounds(torch.ones(BLOCK), start).tolist() == [1.0]
        step, near = torch.ones(1), start + 0.25
        codes = quantize.encode(start, step, 8, torch.Generator())
        assert quantize.decode(codes, near, step, 8)[0].tolist() == [0.0] * BLOCK


_ALONE = """
import sys
from peers import compiled, quantize
assert "numba" not in sys.modules
{before}
words = compiled.prepare()
assert compiled.prepare() == words
import torch
assert quantize.movement_bounds(torch.ones(3), torch.zeros(3)).tolist() == [1.0]
sys.stdout.write(words)
"""
_WRONG_KERNEL = """
import peers.lattice
from peers import numba_loops
peers.lattice.WEIGHTS.neg_()  # those that torch uses; the others were compiled with their own
numba_loops._WEIGHTS = peers.lattice.WEIGHTS.neg().numpy()
"""


def _words(before: str) -> str:
    """What `prepare` says in a process of its own, where warnings are errors."""
    command = [sys.executable, "-W", "error", "-c", _ALONE.format(before=before)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=80)
    assert ended.returncode == 0, ended.stderr
    assert not ended.stderr
    return ended.stdout


def test_numba_is_imported_when_it_is_used_and_compiles_without_warnings() -> None:
    assert _words("") == "compiled by numba"


def test_without_numba_torch_does_it() -> None:
    assert _words("sys.modules['numba'] = None").startswith("by torch, as numba is not to be had")


def test_where_nothing_can_be_kept_it_compiles_all_the_same() -> None:
    """Numba finds no folder for what it compiled: as on a read-only system, for a user without a home."""
    assert _words("import numba.core.caching as c; c.CacheImpl._locator_classes = []") == "compiled by numba"


def test_a_full_disk_or_a_spoilt_cache_does_not_matter() -> None:
    raising = "lambda *words: (_ for _ in ()).throw(OSError(28, 'full'))"
    before = f"import numba.core.caching as c; c.IndexDataCacheFile.{{}} = {raising}"
    assert _words(before.format("save")) == _words(before.format("load")) == "compiled by numba"


def test_loops_that_come_to_something_else_are_not_used() -> None:
    assert _words(_WRONG_KERNEL) == "by torch, as what numba compiled is wrong"


def test_rows_may_be_computed_in_several_threads_at_once() -> None:
    generator = torch.Generator().manual_seed(3)
    start, row, own = (_random(generator, PART) for _ in range(3))
    step = torch.full((PART // BLOCK,), 0.05)
    due = _encoded(numba_loops, row, step, 8, 11)

    def work(turn: int) -> bool:
        codes = _encoded(numba_loops, row, step, 8, 11)
        values = torch.empty_like(own)
        numba_loops.decode(codes, own, step, 8, values)
        return bool(torch.equal(codes.packed, due.packed) and torch.equal(codes.checks, due.checks))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(40)))
    assert numba_loops.movement(row, start)[1]
