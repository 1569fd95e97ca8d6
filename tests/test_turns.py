"""In which rounds a peer trades whose exchange takes longer than a round: rules by hand, and that they settle."""

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gasloc.pacing import Pace
from gasloc.turns import BUSY_SHARE, MOST_EVERY, Links, Turns, choose, late_after, least_exchange_s, of_round, spent_s

# A busy machine may take any time for one example.
anytime = settings(deadline=None)


def links(*exchanges_s: float) -> Links:
    """As measured one after another."""
    found = Links()
    for exchange_s in exchanges_s:
        found.count(exchange_s, 1, 1, Turns())
    return found


times_s = st.floats(1e-3, 1e3)
all_turns = st.builds(Turns, st.integers(1, MOST_EVERY), st.integers(0, 10_000))


def test_turns_by_hand() -> None:
    its = Turns(every=3, round=7)
    assert [round for round in range(12) if its.has(round)] == [1, 4, 7, 10]
    assert [its.next(round) for round in (0, 1, 2, 7, 8)] == [1, 1, 4, 7, 10]
    assert all(Turns().has(round) and Turns().next(round) == round for round in range(5))


@anytime
@given(all_turns, st.integers(0, 20_000))
def test_the_next_turn_is_the_first_that_is_one(its: Turns, round: int) -> None:
    following = its.next(round)
    assert its.has(following)
    assert round <= following < round + its.every
    assert not any(its.has(between) for between in range(round, min(following, round + 50)))
    assert its.has(following + its.every)


@pytest.mark.parametrize(
    ("exchange_s", "previous", "chosen", "words"),
    [
        # a round of 20 s, steps of 1 s; the coming round is 10
        (2.0, Turns(), Turns(), "in every round: an exchange takes 2 s of rounds of 20 s"),
        (21.0, Turns(), Turns(), "in every round"),
        (22.0, Turns(), Turns(3, 12), "in one round of 3: an exchange takes 22 s of rounds of 20 s"),
        (31.0, Turns(), Turns(4, 13), "in one round of 4"),
        # kept, by a tenth on either side
        (32.9, Turns(3, 9), Turns(3, 9), "as before"),
        (33.1, Turns(3, 9), Turns(4, 13), "in one round of 4"),
        (19.1, Turns(3, 9), Turns(3, 9), "as before"),
        (26.0, Turns(4, 9), Turns(3, 12), "in one round of 3"),
        (19.1, Turns(2, 9), Turns(2, 9), "as before"),
        # until a step fits in beside it
        (19.0, Turns(3, 9), Turns(), "in every round"),
        (1e9, Turns(), Turns(MOST_EVERY, 9 + MOST_EVERY), f"in one round of {MOST_EVERY}"),
    ],
)
def test_choices_by_hand(exchange_s: float, previous: Turns, chosen: Turns, words: str) -> None:
    found, reason = choose(links(exchange_s, exchange_s), 1.0, 20.0, previous=previous, round=10)
    assert found == chosen
    assert words in reason


@pytest.mark.parametrize("before_s", [[], [2.0], [2.0, 2.0]])
def test_one_exchange_that_took_long_is_followed_by_a_round_of_rest(before_s: list[float]) -> None:
    its, reason = choose(links(*before_s, 60.0), 1.0, 20.0, previous=Turns(), round=10)
    assert [its.has(round) for round in (10, 11)] == [False, True]
    assert "whether that lasts" in reason
    rested, _ = choose(links(*before_s, 60.0), 1.0, 20.0, previous=its, round=11)
    assert rested == its
    assert choose(links(*before_s, 60.0, 2.0), 1.0, 20.0, previous=its, round=12)[0] == Turns()
    assert choose(links(*before_s, 60.0, 50.0), 1.0, 20.0, previous=its, round=12)[0] == Turns(5, 16)


def test_a_slow_chip_alone_is_no_reason_to_rest() -> None:
    for previous in (Turns(), Turns(4, 9)):
        assert choose(links(5.0, 5.0), 30.0, 20.0, previous=previous, round=10)[0] == Turns()


def test_where_all_links_are_slow_under_overlap_nobody_rests() -> None:
    """A round is then as long as an exchange, to a few percent."""
    for exchange_s in (29.1, 30.0, 30.9):
        assert choose(links(exchange_s, exchange_s), 1.0, 30.0, previous=Turns(), round=10)[0] == Turns()


def test_without_times_a_peer_trades_in_every_round() -> None:
    for found, reason in (
        choose(links(), 1.0, 20.0, previous=Turns(), round=10),
        choose(links(22.0, 22.0), 1.0, None, previous=Turns(3, 9), round=10),
        choose(links(22.0, 22.0), math.inf, 20.0, previous=Turns(), round=10),
    ):
        assert found == Turns()
        assert "not measured yet" in reason


@anytime
@given(st.lists(times_s, min_size=1, max_size=3), times_s, times_s, all_turns, st.integers(1, 10_000))
def test_a_link_is_busy_for_its_share_at_most_and_a_choice_is_kept(
    exchanges_s: list[float], step_s: float, round_s: float, previous: Turns, round: int
) -> None:
    measured = links(*exchanges_s)
    first, reason = choose(measured, step_s, round_s, previous=Turns(), round=round)
    assert reason
    if first.every > 1:
        assert measured.latest_s + step_s > round_s
        lasting_s = measured.lasting_s
        assert not lasting_s > BUSY_SHARE * first.every * round_s * (1 + 1e-9) or first.every == MOST_EVERY
        assert first.next(round) == round + first.every - 1, "the others pass before it trades again"
        assert least_exchange_s(first, round_s) <= max(measured.latest_s, round_s / 2)
    assert choose(measured, step_s, round_s, previous=first, round=round + 1)[0] == first, "nothing new was measured"
    if len(exchanges_s) > 1 and len(set(exchanges_s)) == 1:  # at its turn, whatever it did before
        turn = previous.next(round)
        found, _ = choose(measured, step_s, round_s, previous=previous, round=turn + 1)
        assert choose(measured, step_s, round_s, previous=found, round=found.next(turn + 1) + 1)[0] == found


def played(exchanges_s: list[float], round_s: float, jitter: random.Random) -> list[Turns]:
    """A peer's turns after each round, in which its exchange would take so long; it measures only where it trades."""
    measured, its, heard = Links(), Turns(), []
    for round, exchange_s in enumerate(exchanges_s):
        if its.has(round):
            measured.count(exchange_s * jitter.uniform(0.985, 1.015), 2, 2, its)
        its, _ = choose(measured, 1.0, round_s, previous=its, round=round + 1)
        heard.append(its)
    return heard


@anytime
@given(st.integers(0, 2**32), st.floats(1.1, 4.0))
def test_turns_settle_by_the_second_trade_after_a_change_and_do_not_swing(seed: int, slow_rounds: float) -> None:
    round_s = 20.0
    slow_s = slow_rounds * round_s
    heard = played([2.0] * 6 + [slow_s] * 60 + [2.0] * 60, round_s, random.Random(seed))
    assert set(heard[:6]) == {Turns()}
    assert heard[6] == Turns(2, 8), "a round of rest at once"
    slowed = [its.every for its in heard[8:66]]
    assert min(slowed) > 1, "and with the second slow one for good"
    assert len(set(slowed)) <= 2, "jitter may move it by one"
    assert sum(earlier != later for earlier, later in itertools.pairwise(slowed)) <= 1
    back = next(place for place, its in enumerate(heard[66:]) if its == Turns())
    assert back < max(slowed), "at its first turn"
    assert set(heard[66 + back :]) == {Turns()}


def test_those_who_rest_have_no_exchange_and_slow_nobody() -> None:
    paces = {f"peer-{number}": Pace(1.0, 30.0 if number == 0 else 2.0) for number in range(8)}
    near = {peer: Turns(3, 5) if peer == "peer-0" else Turns() for peer in paces}
    resting = of_round(paces, near, "2-peer", round=6, me="peer-1", seed=0)
    assert resting == {**paces, "peer-0": Pace(1.0, 0.0)}
    assert of_round(paces, near, "2-peer", round=6, me="peer-0", seed=0) == resting
    trading = of_round(paces, near, "2-peer", round=5, me="peer-1", seed=0)
    assert sum(pace.exchange_time_s == 30.0 for pace in trading.values()) == 3


def test_unknown_members_stay_unknown() -> None:
    paces = {"a": Pace(1.0, 2.0), "b": Pace(0.0, math.nan)}
    found = of_round(paces, {"a": Turns(2, 0), "b": Turns(2, 0)}, "2-peer", round=1, me="a", seed=0)
    assert found["a"] == Pace(1.0, 0.0)
    assert not found["b"].known


@pytest.mark.parametrize(
    ("steps", "exchange_s", "late_s", "after_s"),
    [
        # steps of 1 s, 5 s of exchange, a round of 20 s
        (15, 5.0, 0.0, 0.0),
        (15, 22.0, 0.0, 17.0),
        (1, 22.0, 0.0, 3.0),
        # within a tenth of a round is in time
        (15, 6.9, 0.0, 0.0),
        (15, 7.1, 0.0, 2.1),
        (15, 3.1, 0.0, 0.0),
        # made good by fewer steps, and by more of one that was early
        (3, 5.0, 12.0, 0.0),
        (1, 5.0, 30.0, 16.0),
        (22, 5.0, -7.0, 0.0),
        # there was nobody to trade with: in time
        (15, math.nan, 0.0, 0.0),
        # it went on early, as nobody came
        (1, 6.0, 3.0, -10.0),
        # two rounds at most
        (100, 5.0, 0.0, 40.0),
        (1, 5.0, -60.0, -40.0),
    ],
)
def test_how_late_a_peer_is(steps: int, exchange_s: float, late_s: float, after_s: float) -> None:
    assert late_after(Pace(1.0, 5.0), steps, exchange_s, 20.0, late_s) == pytest.approx(after_s)


@pytest.mark.parametrize(
    ("longest_s", "waited_s", "tried", "found_s"),
    [
        (4.0, 9.0, True, 4.0),
        # training hid all but a second of it
        (4.0, 1.0, True, 1.0),
        # nobody came
        (math.nan, 3.0, True, 3.0),
        (math.nan, 9.0, True, 5.0),
        (math.nan, 0.0, False, math.nan),
    ],
)
def test_what_an_exchange_took_of_a_round(longest_s: float, waited_s: float, tried: bool, found_s: float) -> None:
    assert spent_s(Pace(1.0, 5.0), longest_s, waited_s, tried=tried) == pytest.approx(found_s, nan_ok=True)


def test_a_peer_that_knows_no_times_is_not_late() -> None:
    assert late_after(Pace(0.0, 5.0), 15, 22.0, 20.0, 3.0) == 0.0
    assert late_after(Pace(1.0, 5.0), 15, 22.0, None, 3.0) == 0.0


def test_a_trade_with_fewer_partners_tells_of_one_with_all() -> None:
    measured = Links()
    for came in (1, 2):
        measured.count(20.0 * came, 2, came, Turns(3, 0))
    assert measured.lasting_s == measured.latest_s == 40.0
    measured.count(2.0, 2, 1, Turns())
    assert measured.latest_s == 2.0


def test_of_two_exchanges_the_shorter_one_lasts() -> None:
    measured = Links()
    assert all(map(math.isnan, (measured.latest_s, measured.lasting_s, measured.average_s)))
    heard = []
    for transfer_s in (30.0, 2.0, math.nan, 30.0, 2.0, 30.0, 31.0):
        measured.count(transfer_s, 1, 1, Turns())
        heard.append(measured.lasting_s)
    assert heard == pytest.approx([math.nan, 2.0, 2.0, 2.0, 2.0, 2.0, 30.0], nan_ok=True)
