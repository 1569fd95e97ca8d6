"""Clipping and the counting of offences, as pure functions."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gasloc import mixing
from gasloc.clipping import FACTOR, HISTORY, Clipped, apart, clip, pace_allowance, radius, remembered
from gasloc.errors import ModelError
from gasloc.offences import FIRST_S, LONGEST_S, Offences, penalty

lengths = st.floats(0, 1e12)
anytime = settings(deadline=None)


State = dict[str, Tensor]


def states(dtype: torch.dtype, limit: float = 1e6) -> st.SearchStrategy[tuple[State, State]]:
    """Two states of one layout: a vector and a matrix."""

    def made(values: list[float]) -> State:
        return {"a": torch.tensor(values[:3], dtype=dtype), "b": torch.tensor(values[3:], dtype=dtype).reshape(2, 2)}

    values = st.lists(st.floats(-limit, limit, width=32), min_size=7, max_size=7)
    return st.tuples(values, values).map(lambda both: (made(both[0]), made(both[1])))


def copied(state: State) -> State:
    return {name: tensor.clone() for name, tensor in state.items()}


def size(state: State) -> float:
    return math.sqrt(mixing.squared_norm(state))


# --- clip ------------------------------------------------------------------------------------------------------


@anytime
@given(both=states(torch.float32), limit=st.floats(0, 1e8))
def test_what_is_left_is_never_longer_than_the_radius(both: tuple[State, State], limit: float) -> None:
    own, theirs = both
    came = size(own) + size(theirs)
    result = clip(own, theirs, limit)
    assert apart(own, theirs) <= limit * (1 + 1e-5) + 1e-6 * came
    assert result.accepted <= limit or not result.shortened


@anytime
@given(both=states(torch.float32))
def test_inside_the_radius_not_a_bit_changes(both: tuple[State, State]) -> None:
    own, theirs = both
    before = copied(theirs)
    result = clip(own, theirs, apart(own, theirs))
    assert not result.shortened
    assert result.excess <= 1
    assert all(torch.equal(before[name], theirs[name]) for name in before)


@anytime
@given(both=states(torch.float64), share=st.floats(0.11, 0.99))
def test_the_direction_is_kept_and_the_length_is_the_radius(both: tuple[State, State], share: float) -> None:
    own, theirs = both
    before = copied(theirs)
    limit = share * apart(own, theirs)
    clip(own, theirs, limit)
    for name in before:
        wanted = own[name] + share * (before[name] - own[name])
        torch.testing.assert_close(theirs[name], wanted, rtol=1e-9, atol=1e-7)


@anytime
@given(both=states(torch.float64), scale=st.sampled_from([0.125, 0.5, 4.0, 1024.0]), share=st.floats(0.01, 2))
def test_all_lengths_scaled_it_does_the_same(both: tuple[State, State], scale: float, share: float) -> None:
    own, theirs = both
    large_own = {name: tensor * scale for name, tensor in own.items()}
    large_theirs = {name: tensor * scale for name, tensor in theirs.items()}
    limit = share * apart(own, theirs)
    small, large = clip(own, theirs, limit), clip(large_own, large_theirs, limit * scale)
    assert large.distance == small.distance * scale
    for name, tensor in theirs.items():
        assert torch.equal(large_theirs[name], tensor * scale)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3.4e38, -3.4e38, 1e30])
def test_absurd_values_leave_nothing_that_is_not_finite(value: float) -> None:
    own = {"w": torch.linspace(-1, 1, 50)}
    theirs = {"w": torch.full((50,), value)}
    result = clip(own, theirs, 0.5)
    assert result.shortened
    assert theirs["w"].isfinite().all()
    assert apart(own, theirs) <= 0.5 * (1 + 1e-5)


@pytest.mark.parametrize(
    ("excess", "left"), [(0.5, 0.5), (1.0, 1.0), (4.0, 1.0), (10.0, 1.0), (20.0, 0.5), (1e4, 1e-3)]
)
def test_past_ten_radii_the_pull_falls_with_the_distance(excess: float, left: float) -> None:
    own = {"w": torch.zeros(4, dtype=torch.float64)}
    theirs = {"w": torch.full((4,), excess, dtype=torch.float64)}
    result = clip(own, theirs, 2.0)
    assert result.excess == excess
    assert result.accepted == pytest.approx(2 * left)
    assert apart(own, theirs) == pytest.approx(2 * left)


def test_tensors_longer_than_a_chunk_are_measured_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixing, "CHUNK", 7)
    left, right = {"w": torch.zeros(5, 10)}, {"w": torch.full((5, 10), 2.0)}
    assert apart(left, right) == pytest.approx(2 * math.sqrt(50))
    assert apart({"w": torch.tensor(1.0)}, {"w": torch.tensor(4.0)}) == 3.0


def test_own_state_is_only_read_and_other_layouts_are_refused() -> None:
    own = {"w": torch.ones(3)}
    clip(own, {"w": torch.full((3,), 100.0)}, 1.0)
    assert torch.equal(own["w"], torch.ones(3))
    with pytest.raises(ModelError, match="'w' of a partner has shape"):
        clip(own, {"w": torch.ones(4)}, 1.0)
    for limit in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="a radius is not negative"):
            clip(own, {"w": torch.ones(3)}, limit)


def test_a_radius_of_nothing_lets_equals_in_and_nobody_else() -> None:
    own = {"w": torch.ones(3)}
    same, other = {"w": torch.ones(3)}, {"w": torch.zeros(3)}
    assert clip(own, same, 0.0) == Clipped(0.0, 0.0)
    assert clip(own, same, 0.0).excess == 0
    assert clip(own, other, 0.0).excess == math.inf
    assert torch.equal(other["w"], own["w"])


# --- radius ----------------------------------------------------------------------------------------------------


@anytime
@given(history=st.lists(lengths, max_size=40), own=lengths)
def test_the_radius_is_a_multiple_of_the_longer_length(history: list[float], own: float) -> None:
    value, reason = radius(history, own)
    assert value >= FACTOR * own
    assert value <= FACTOR * max([own, *history[-HISTORY:]])
    assert value == radius(history[-HISTORY:], own)[0]
    assert reason
    if own > 0:
        assert value > 0


@anytime
@given(honest=st.lists(st.floats(1, 2), min_size=9, max_size=9), wild=st.lists(lengths, min_size=7, max_size=7))
def test_fewer_than_half_of_the_history_cannot_widen_it(honest: list[float], wild: list[float]) -> None:
    value, _ = radius([*wild, *honest], 1.0)
    assert value <= FACTOR * 2


def test_its_reason_says_what_it_was_measured_by() -> None:
    assert radius([], 2.0) == (4.0, "2 times our own movement of 2")
    assert radius([1.0, 5.0, 9.0], 2.0) == (10.0, "2 times 5, the median of the last 3 distances")
    assert radius([], 0.0) == (0.0, "this peer did not move and has no history, so there is nothing to measure by")
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="lengths are finite"):
            radius([bad], 1.0)
        with pytest.raises(ValueError, match="lengths are finite"):
            radius([], bad)


def test_honest_partners_beyond_the_first_radius_pass_whole_within_a_few_rounds() -> None:
    """A peer that moves 1 a round among partners that are 8 away."""
    history: tuple[float, ...] = ()
    passed = []
    for _ in range(12):
        limit, _ = radius(history, 1.0)
        trades = [Clipped(8.0, limit)] * 2
        passed.append(not trades[0].shortened)
        history = remembered(history, trades)
    assert passed == [False] * (passed.index(True)) + [True] * (12 - passed.index(True))
    assert passed.index(True) <= 3


def test_a_peer_of_few_steps_measures_by_what_it_would_move_in_the_others_steps() -> None:
    assert [pace_allowance(steps, 15) for steps in (1, 5, 15, 60)] == [15.0, 3.0, 1.0, 1.0]


def test_what_is_remembered_is_what_was_accepted() -> None:
    clips = [Clipped(1.0, 2.0), Clipped(5.0, 2.0), Clipped(math.inf, 2.0), Clipped(3.0, 0.0)]
    assert remembered((7.0,), clips) == (7.0, 1.0, 2.0)
    assert remembered([0.0] * 20, clips)[-3:] == (0.0, 1.0, 2.0)
    assert len(remembered([0.0] * 20, clips)) == HISTORY


# --- offences --------------------------------------------------------------------------------------------------


@anytime
@given(count=st.integers(1, 10_000))
def test_the_penalty_grows_with_each_offence_up_to_an_hour(count: int) -> None:
    seconds, reason = penalty(count)
    assert 0 <= seconds <= LONGEST_S
    assert penalty(count + 1)[0] >= min(2 * seconds, LONGEST_S)
    assert reason


def test_the_first_offence_is_free() -> None:
    assert [penalty(count)[0] for count in (1, 2, 3, 4)] == [0.0, FIRST_S, 2 * FIRST_S, 4 * FIRST_S]
    with pytest.raises(ValueError, match="must be one"):
        penalty(0)


def test_an_offender_is_barred_for_its_time_and_no_longer() -> None:
    offences = Offences()
    offences.add("liar", "sent NaN", 100.0)
    assert offences.barred(100.0) == set()
    second = offences.add("liar", "sent NaN", 110.0)
    assert (second.until, second.count) == (140.0, 2)
    assert second.reason == "sent NaN; its offence number 2, set aside for 30 s"
    assert offences.barred(139.0) == {"liar"}
    assert offences.add("liar", "again", 120.0) == second  # it changes nothing while set aside
    assert offences.barred(140.0) == set()
    assert offences.standing() == {"liar": second}


def test_trades_without_offence_clear_a_peer() -> None:
    offences = Offences()
    for now in (0.0, 1.0):
        offences.add("mended", "garbled", now)
    offences.forgive("mended")
    assert offences.standing()["mended"].count == 1
    offences.forgive("mended")
    offences.forgive("mended")
    assert offences.standing() == {}
    assert offences.add("mended", "garbled", 100.0).until == 100.0
