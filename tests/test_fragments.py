"""Fragments: a partition, balanced, each part due once a round."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gasloc.errors import RecipeError
from gasloc.fragments import due, fragment, offsets

# A busy machine may take any time for one example.
anytime = settings(deadline=None)

names = st.text("abcdefgh.", min_size=1, max_size=6)
layouts = st.dictionaries(names, st.integers(0, 10_000), min_size=1, max_size=24)


@st.composite
def schedules(draw: st.DrawFn) -> tuple[int, int]:
    """Count and local steps that fit."""
    local_steps = draw(st.integers(1, 60))
    return draw(st.integers(1, local_steps)), local_steps


def best_largest(sizes: list[int], count: int) -> int:
    """The largest part of the best cut, by trying every one."""
    return min(
        max(sum(size for size, part in zip(sizes, cut, strict=True) if part == index) for index in range(count))
        for cut in itertools.product(range(count), repeat=len(sizes))
    )


def test_hand_worked_cut() -> None:
    cut = fragment({"e": 5, "d": 5, "c": 4, "b": 3, "a": 3}, 2)
    # 5(d) | 5(e); 4(c) to the first; 3(a) to the second; 3(b) to the second, 8 against 9.
    assert cut.parts == (("c", "d"), ("a", "b", "e"))
    assert cut.sizes_bytes == (9, 11)
    assert cut.imbalance == pytest.approx(11 / 10, abs=1e-15)


def test_equal_tensors_are_cut_without_imbalance() -> None:
    cut = fragment({f"layer.{index}": 128 for index in range(24)}, 24)
    assert cut.imbalance == 1.0
    assert all(len(part) == 1 for part in cut.parts)


def test_a_large_embedding_is_reported_as_imbalance() -> None:
    cut = fragment({"embedding": 900, "x": 50, "y": 50}, 2)
    assert cut.sizes_bytes == (900, 100)
    assert cut.imbalance == pytest.approx(1.8, abs=1e-15)


@anytime
@given(layouts, st.data())
def test_each_tensor_is_in_exactly_one_part_and_no_part_is_empty(layout: dict[str, int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(layout)))
    cut = fragment(layout, count)
    assert len(cut.parts) == len(cut.sizes_bytes) == count
    assert sorted(name for part in cut.parts for name in part) == sorted(layout)
    assert all(cut.parts)
    assert all(list(part) == sorted(part) for part in cut.parts)
    assert cut.sizes_bytes == tuple(sum(layout[name] for name in part) for part in cut.parts)
    total = sum(layout.values())
    assert cut.imbalance == pytest.approx(max(cut.sizes_bytes) * count / total if total else 1.0)
    assert cut.imbalance >= 1 - 1e-12


@anytime
@given(layouts, st.data(), st.randoms(use_true_random=False))
def test_the_cut_does_not_depend_on_the_order_of_the_mapping(
    layout: dict[str, int], data: st.DataObject, chance: random.Random
) -> None:
    count = data.draw(st.integers(1, len(layout)))
    items = list(layout.items())
    chance.shuffle(items)
    assert fragment(dict(items), count) == fragment(layout, count)


@anytime
@given(st.lists(st.integers(0, 60), min_size=1, max_size=7), st.data())
def test_the_largest_part_is_within_grahams_bound_of_the_best(sizes: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, min(3, len(sizes))))
    cut = fragment({f"t{index}": size for index, size in enumerate(sizes)}, count)
    assert 3 * count * max(cut.sizes_bytes) <= (4 * count - 1) * best_largest(sizes, count)


@anytime
@given(layouts, st.data())
def test_parts_differ_by_at_most_the_largest_tensor(layout: dict[str, int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(layout)))
    cut = fragment(layout, count)
    for part, size_bytes in zip(cut.parts, cut.sizes_bytes, strict=True):
        # Without the last tensor it took, a part was no larger than any other is now.
        assert size_bytes - min(layout[name] for name in part) <= min(cut.sizes_bytes)


@pytest.mark.parametrize("count", [0, -1, 3, 100])
def test_a_count_that_the_tensors_cannot_fill_is_refused(count: int) -> None:
    with pytest.raises(RecipeError, match=rf"fragments = {count} for a model of 2 tensors.* from 1 to 2$"):
        fragment({"a": 1, "b": 2}, count)


def test_a_negative_size_is_refused_by_name() -> None:
    with pytest.raises(RecipeError, match="tensor 'b' has -2 bytes"):
        fragment({"a": 1, "b": -2}, 1)


def test_hand_worked_offsets() -> None:
    assert offsets(4, 4) == (0, 1, 2, 3)
    assert offsets(3, 15) == (0, 5, 10)
    assert offsets(4, 15) == (0, 3, 7, 11)
    assert offsets(3, 15, staggered=False) == (0, 0, 0)
    assert offsets(1, 15) == (0,)


@anytime
@given(schedules())
def test_offsets_are_different_and_spread_evenly(schedule: tuple[int, int]) -> None:
    count, local_steps = schedule
    found = offsets(count, local_steps)
    assert len(set(found)) == count
    assert all(0 <= offset < local_steps for offset in found)
    gaps = [later - earlier for earlier, later in itertools.pairwise((*found, local_steps))]
    assert max(gaps) - min(gaps) <= 1


@anytime
@given(schedules(), st.integers(1, 10_000), st.booleans())
def test_each_fragment_is_due_exactly_once_in_any_round_of_steps(
    schedule: tuple[int, int], first_step: int, staggered: bool
) -> None:
    count, local_steps = schedule
    window = range(first_step, first_step + local_steps)
    sent = [index for step in window for index in due(step, local_steps, count, staggered)]
    assert sorted(sent) == list(range(count))
    for step in window:
        for index in due(step, local_steps, count, staggered):
            assert step % local_steps == offsets(count, local_steps, staggered)[index]


@anytime
@given(st.integers(1, 60), st.integers(1, 10_000))
def test_as_many_fragments_as_steps_send_one_a_step(local_steps: int, step: int) -> None:
    assert due(step, local_steps, local_steps) == [step % local_steps]


@anytime
@given(schedules(), st.integers(1, 10_000))
def test_without_offsets_everything_goes_at_the_end_of_the_round(schedule: tuple[int, int], step: int) -> None:
    count, local_steps = schedule
    expected = list(range(count)) if step % local_steps == 0 else []
    assert due(step, local_steps, count, staggered=False) == expected
    assert bool(expected) == bool(due(step, local_steps, 1))


def test_nothing_is_due_before_the_first_step() -> None:
    assert due(0, 4, 4) == []
    assert due(0, 4, 4, staggered=False) == []
    with pytest.raises(ValueError, match="step -1"):
        due(-1, 4, 4)


def test_a_schedule_longer_than_the_round_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"fragments = 16 with local_steps = 15: a fragment schedule longer than H"):
        due(1, 15, 16)
    with pytest.raises(RecipeError, match=r"fragments = 0 with local_steps = 15: there is at least 1"):
        offsets(0, 15)
    with pytest.raises(RecipeError, match=r"local_steps = 0"):
        offsets(1, 0)
