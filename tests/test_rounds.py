"""Which round comes next, and when a peer's state is too old."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gasloc.rounds import apart, fall_in, is_far_ahead, is_stale, latest_in_step, least_fresh, next_round

ROUNDS = st.integers(0, 10_000)


@pytest.mark.parametrize(
    ("mine", "others", "expected", "word"),
    [
        (3, [], 4, "no other member"),
        (3, [3], 4, "in step"),
        (3, [4], 4, "in step"),
        (3, [4, 4, 4], 4, "in step"),
        (3, [5], 5, "behind"),
        (3, [9, 9, 2], 9, "behind"),
        (3, [1_000_000, 4], 4, "in step"),  # one of two far ahead, or lying, moves nobody
        (3, [1_000_000, 4, 4], 4, "in step"),
        (9, [3, 3], 10, "ahead"),
        (0, [7, 8, 8, 9], 8, "behind"),
    ],
)
def test_next_round(mine: int, others: list[int], expected: int, word: str) -> None:
    found, reason = next_round(mine, others)
    assert found == expected
    assert word in reason
    assert str(expected) in reason
    assert "\n" not in reason


@settings(deadline=None)
@given(mine=ROUNDS, others=st.lists(ROUNDS, max_size=20))
def test_rounds_always_go_forward(mine: int, others: list[int]) -> None:
    found, _ = next_round(mine, others)
    assert found > mine
    assert found == mine + 1 or found in others


@settings(deadline=None)
@given(mine=ROUNDS, others=st.lists(ROUNDS, min_size=2, max_size=20))
def test_order_of_others_does_not_matter(mine: int, others: list[int]) -> None:
    assert next_round(mine, others) == next_round(mine, sorted(others))


@settings(deadline=None)
@given(start=st.lists(st.integers(0, 500), min_size=2, max_size=8))
def test_a_swarm_in_any_state_comes_into_step(start: list[int]) -> None:
    """Peers that take turns end within one round of each other."""
    rounds = list(start)
    for _ in range(3 * len(rounds)):
        slowest = min(range(len(rounds)), key=lambda index: (rounds[index], index))
        rounds[slowest], _ = next_round(rounds[slowest], rounds[:slowest] + rounds[slowest + 1 :])
    ahead = max(rounds) - sorted(rounds)[len(rounds) // 2]
    assert ahead <= max(1, max(start) - sorted(start)[(len(start) - 1) // 2])


@pytest.mark.parametrize(
    ("mine", "others", "limit", "stale"),
    [
        (3, [], 5, False),
        (3, [8], 5, False),
        (3, [9], 5, True),
        (3, [4, 100], 5, False),
        (3, [100, 100, 4], 5, True),
        (50, [3, 4], 5, False),
    ],
)
def test_is_stale(mine: int, others: list[int], limit: int, stale: bool) -> None:
    found, reason = is_stale(mine, others, limit)
    assert found is stale
    assert reason


def test_limit_must_be_a_round_at_least() -> None:
    with pytest.raises(ValueError, match="stale_rounds is 0"):
        is_stale(3, [9], 0)


@pytest.mark.parametrize(
    ("mine", "partners", "expected", "word"),
    [
        (3, [], 3, "no partner said"),
        (3, [3], 3, "not ahead"),
        (3, [5], 5, "trading in theirs"),
        (3, [5, 8], 5, "trading in theirs"),  # of two the one that is nearer
        (3, [8], 8, "within 5"),
        (3, [9], 3, "too old to mix"),
        (3, [10**9], 3, "too old to mix"),
    ],
)
def test_fall_in(mine: int, partners: list[int], expected: int, word: str) -> None:
    found, reason = fall_in(mine, partners, 5)
    assert found == expected
    assert word in reason
    assert "\n" not in reason


@settings(deadline=None)
@given(mine=ROUNDS, partners=st.lists(ROUNDS, max_size=8), limit=st.integers(1, 50))
def test_nobody_falls_back_and_nobody_too_old_falls_in(mine: int, partners: list[int], limit: int) -> None:
    found, _ = fall_in(mine, partners, limit)
    assert mine <= found <= mine + limit
    assert found == mine or found in partners


@pytest.mark.parametrize(
    ("others", "limit", "least"), [([], 5, 0), ([3], 5, 1), ([100], 5, 98), ([1], 9, 0), ([7, 90, 100], 1, 90)]
)
def test_a_state_worth_downloading_is_well_within_the_limit(others: list[int], limit: int, least: int) -> None:
    assert least_fresh(others, limit) == least
    assert not is_stale(least, others, limit)[0]


@pytest.mark.parametrize(
    ("mine", "others", "far"),
    [
        (100, [], False),
        (100, [90], False),  # of two the one behind jumps
        (100, [90, 90], True),
        (100, [95, 95, 95], False),  # within the limit of 5
        (100, [94, 94, 94], True),
        (100, [90, 90, 100], False),  # half and half: those behind jump
        (100, [90, 90, 90, 100], True),
        (100, [90, 90, 100, 100], False),
        (100, [0, 100, 100, 100], False),  # one that is slow, or lies, moves nobody
    ],
)
def test_is_far_ahead(mine: int, others: list[int], far: bool) -> None:
    found, reason = is_far_ahead(mine, others, 5)
    assert found == far
    assert ("taking the swarm's state" in reason) == far


def test_is_far_ahead_needs_a_limit() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        is_far_ahead(3, [1], 0)


def test_who_was_with_us_a_moment_ago_counts_as_where_we_are() -> None:
    others, met_s = {"met": 3, "long ago": 4, "never": 5}, {"met": 90.0, "long ago": 20.0}
    assert apart(50, others, met_s, 0.0, before_s=85.0) == [50, 4, 5]
    assert apart(50, others, met_s, 0.0, before_s=90.0) == [3, 4, 5]
    assert apart(50, others, met_s, 86.0, before_s=85.0) == [50, 50, 50], "we came just now, or took fresh state"
    assert apart(50, {}, met_s, 0.0, before_s=85.0) == []


@given(st.lists(st.integers(0, 1000), min_size=2, max_size=12), st.integers(1, 9))
@example([0, 1, 3], 1)
def test_a_swarm_whose_members_went_on_apart_comes_together(start: list[int], limit: int) -> None:
    """Each in its turn goes on by one, jumps, or takes the state of one that is in step.

    Of the last, more than half of all are at most the limit ahead; of the first, no more than half are further behind
    than that. So some member is near both, and they are twice the limit apart at most, and a round each for their turn.
    """
    mine = list(start)
    for _ in range(2 * len(mine) + 2):
        for index in range(len(mine)):
            others = mine[:index] + mine[index + 1 :]
            latest = latest_in_step(others, limit)
            assert latest is not None
            if is_far_ahead(mine[index], others, limit)[0] or is_stale(mine[index], others, limit)[0]:
                mine[index] = max(other for other in others if other <= latest)
            else:
                mine[index], _ = next_round(mine[index], others)
    assert max(mine) - min(mine) <= 2 * (limit + 1)
