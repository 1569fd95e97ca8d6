"""Local steps per peer: the formula, unknown times, and how the choice settles after a change."""

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gasloc.errors import RecipeError
from gasloc.pacing import (
    Pace,
    Transfer,
    beside_partners,
    busy_s,
    local_steps,
    own_transfer_s,
    round_length_s,
    smooth,
)
from gasloc.topology import row

# A busy machine may take any time for one example.
anytime = settings(deadline=None)

PEERS = 8
MAXIMUM = 10_000
UNKNOWN = [Pace(0.0, 1.0), Pace(math.nan, 1.0), Pace(math.inf, 1.0), Pace(-1.0, 1.0), Pace(1.0, math.nan)]

step_times_s = st.floats(1e-3, 100)
paces = st.builds(Pace, step_times_s, st.floats(0, 1_000))


def is_within_a_tenth(steps: int, pace: Pace, length_s: float) -> bool:
    """Whether a peer's round is as long as everybody's: not over by a tenth, nor a step and a tenth short."""
    wanted = (length_s - pace.exchange_time_s) / pace.step_time_s
    if steps == 1 and wanted < 2.25:
        return True
    return wanted - 1 - max(0.26, 0.11 * steps) <= steps <= wanted + max(0.26, 0.11 * steps)


def simulate(rounds: list[list[Pace]], reference_steps: int) -> list[list[int]]:
    """Peers that measure these true paces, smooth, publish and choose; their steps after each round."""
    averages = [Pace(0.0, math.nan)] * len(rounds[0])
    steps = [reference_steps] * len(rounds[0])
    chosen = []
    for measured in rounds:
        averages = [
            Pace(
                smooth(average.step_time_s, now.step_time_s),
                smooth(average.exchange_time_s, now.exchange_time_s),
            )
            for average, now in zip(averages, measured, strict=True)
        ]
        steps = [
            local_steps(own, averages, reference_steps, MAXIMUM, previous=before)[0]
            for own, before in zip(averages, steps, strict=True)
        ]
        chosen.append(steps)
    return chosen


def test_hand_worked_steps() -> None:
    members = [Pace(1.0, 3.0), Pace(1.0, 3.0), Pace(1.0, 3.0), Pace(10.0, 3.0), Pace(1.0, 30.0)]
    assert round_length_s(members, 30) == 33.0
    assert local_steps(members[0], members, 30, 100)[0] == 30
    assert local_steps(members[3], members, 30, 100)[0] == 3
    assert local_steps(members[4], members, 30, 100)[0] == 3
    assert local_steps(Pace(0.5, 3.0), members, 30, 100)[0] == 60
    assert local_steps(Pace(0.7, 3.0), members, 30, 100) == (
        42,
        "42 steps: a step takes 0.7 s and the exchange 3 s of a round of 33 s",
    )


@pytest.mark.parametrize(
    ("previous", "step_time_s", "steps", "words"),
    [
        # A round of 33 s, of which 3 s are exchange; 30 is the recipe's.
        (100, 0.3, 100, "as before"),
        (95, 0.3, 95, "as before"),
        (111, 0.3, 111, "as before"),
        (112, 0.3, 100, "100 steps:"),
        (89, 0.3, 100, "100 steps:"),
        (28, 1.05, 30, "the recipe's"),
        (28, 1.06, 28, "as before"),
        (30, 1.06, 30, "as before"),
        (30, 1.12, 26, "26 steps:"),
        (3, 11.1, 3, "as before"),
        (3, 11.2, 2, "2 steps:"),
        (3, 7.0, 3, "as before"),
        (3, 6.9, 4, "4 steps:"),
    ],
)
def test_damping_by_hand(previous: int, step_time_s: float, steps: int, words: str) -> None:
    members = [Pace(1.0, 3.0)] * 3
    found, reason = local_steps(Pace(step_time_s, 3.0), members, 30, 1_000, previous=previous)
    assert found == steps
    assert words in reason


def test_the_length_is_a_median_of_even_and_odd_members() -> None:
    assert round_length_s([Pace(1, 0), Pace(2, 0)], 10) == 15.0
    assert round_length_s([Pace(1, 0), Pace(2, 0), Pace(1e9, 0)], 10) == 20.0


def test_the_steps_are_clamped_and_say_so() -> None:
    members = [Pace(1.0, 1.0)] * 3
    steps, reason = local_steps(Pace(1.0, 1e9), members, 30, 100)
    assert steps == 1
    assert reason == "1 step, the least: a step takes 1 s and the exchange 1e+09 s of a round of 31 s"
    steps, reason = local_steps(Pace(1e-9, 0.0), members, 30, 100)
    assert steps == 100
    assert reason.startswith("100 steps, the most allowed: ")
    assert local_steps(Pace(1e-320, 0.0), members, 30, 100)[0] == 100


@pytest.mark.parametrize("unknown", UNKNOWN)
def test_an_unknown_own_pace_gives_the_reference_and_says_why(unknown: Pace) -> None:
    assert not unknown.known
    steps, reason = local_steps(unknown, [Pace(1.0, 1.0)], 30, 100, previous=7)
    assert steps == 30
    assert reason == "the recipe's 30 steps: own step or exchange time is not measured yet"
    assert local_steps(unknown, [Pace(1.0, 1.0)], 30, 20)[0] == 20


@pytest.mark.parametrize("unknown", UNKNOWN)
def test_unknown_members_are_left_out(unknown: Pace) -> None:
    known = [Pace(1.0, 3.0), Pace(2.0, 3.0), Pace(3.0, 3.0)]
    assert round_length_s([unknown, *known, unknown], 30) == round_length_s(known, 30)
    assert round_length_s([unknown], 30) is None
    assert local_steps(known[0], [unknown], 30, 100) == (
        30,
        "the recipe's 30 steps: no member has published its pace yet",
    )


@pytest.mark.parametrize(("reference", "maximum"), [(0, 10), (10, 0), (-3, 10)])
def test_a_round_without_steps_is_refused(reference: int, maximum: int) -> None:
    with pytest.raises(RecipeError, match=rf"local_steps = {reference}, at most {maximum}"):
        local_steps(Pace(1, 1), [Pace(1, 1)], reference, maximum)


@anytime
@given(paces, st.integers(1, 1_000), st.integers(1, 9))
def test_equal_peers_take_exactly_the_reference(pace: Pace, reference: int, count: int) -> None:
    assert local_steps(pace, [pace] * count, reference, 10_000)[0] == reference
    assert local_steps(pace, [pace] * count, reference, 10_000, previous=reference)[0] == reference


@anytime
@given(
    paces, st.lists(paces, min_size=1, max_size=9), st.integers(1, 1_000), st.integers(1, 1_000), st.integers(1, 1_000)
)
def test_the_steps_are_in_bounds_and_no_longer_than_the_round(
    own: Pace, members: list[Pace], reference: int, maximum: int, previous: int
) -> None:
    length_s = round_length_s(members, reference)
    assert length_s is not None
    steps, _ = local_steps(own, members, reference, maximum)
    assert 1 <= steps <= maximum
    slack_s = 2e-6 * reference * own.step_time_s
    if steps > 1:
        assert steps * own.step_time_s + own.exchange_time_s <= length_s + slack_s
    if steps < maximum:
        assert (steps + 1) * own.step_time_s + own.exchange_time_s > length_s - slack_s
    damped, _ = local_steps(own, members, reference, maximum, previous=previous)
    assert 1 <= damped <= maximum
    if 1 < damped < maximum:
        assert is_within_a_tenth(damped, own, length_s)


@anytime
@given(st.floats(0.01, 10), st.floats(0, 1), st.integers(1, 200), st.booleans())
def test_one_peer_that_slows_tenfold_and_recovers_settles_in_five_rounds(
    step_time_s: float, exchange_share: float, reference: int, slow_link: bool
) -> None:
    exchange_time_s = exchange_share * reference * step_time_s
    usual = Pace(step_time_s, exchange_time_s)
    slow = Pace(step_time_s, 10 * exchange_time_s) if slow_link else Pace(10 * step_time_s, exchange_time_s)
    others = [usual] * (PEERS - 1)
    chosen = simulate(
        [[*others, usual]] * 3 + [[*others, slow]] * 12 + [[*others, usual]] * 12,
        reference,
    )
    assert all(steps[:-1] == [reference] * (PEERS - 1) for steps in chosen), "nobody else is disturbed"
    mine = [steps[-1] for steps in chosen]
    assert mine[:3] == [reference] * 3
    slowing, recovering = mine[2:15], mine[14:]
    assert all(earlier >= later for earlier, later in itertools.pairwise(slowing)), "no swing on the way down"
    assert all(earlier <= later for earlier, later in itertools.pairwise(recovering)), "none on the way up"
    assert len(set(mine[3 + 4 : 15])) == 1, "settled by the fifth round after the change"
    length_s = reference * step_time_s + exchange_time_s
    assert is_within_a_tenth(mine[14], slow, length_s)
    assert mine[15 + 4 :] == [reference] * 8, "back at the recipe's steps by the fifth round"


@anytime
@given(st.integers(1, 200), st.floats(0.1, 10), st.floats(0, 0.5), st.floats(0, 0.5))
def test_any_change_of_a_step_time_settles_in_five_rounds_without_a_swing(
    reference: int, factor: float, exchange_share: float, own_exchange_share: float
) -> None:
    others = [Pace(1.0, exchange_share * reference)] * (PEERS - 1)
    before = Pace(1.0, own_exchange_share * reference)
    after = Pace(factor, before.exchange_time_s)
    chosen = simulate([[*others, before]] * 8 + [[*others, after]] * 30, reference)
    mine = [steps[-1] for steps in chosen]
    differences = [later - earlier for earlier, later in itertools.pairwise(mine[7:])]
    assert all(change <= 0 for change in differences) or all(change >= 0 for change in differences)
    # After the fifth round the times are within 3 %, and the steps within a tenth and one step of what they want.
    assert all(abs(steps - mine[-1]) <= 2 + 0.17 * mine[-1] for steps in mine[8 + 4 :])
    length_s = round_length_s([*others, after], reference)
    assert length_s is not None
    assert is_within_a_tenth(mine[-1], after, length_s)


@anytime
@given(st.integers(0, 2**32), st.integers(4, 60), st.floats(0, 1), st.floats(2, 10))
def test_jitter_of_a_few_percent_does_not_make_the_steps_swing(
    seed: int, reference: int, exchange_share: float, slowness: float
) -> None:
    chance = random.Random(seed)
    usual = Pace(1.0, exchange_share * reference / 2)
    slow = Pace(slowness, usual.exchange_time_s)

    def jitter(pace: Pace) -> Pace:
        return Pace(
            pace.step_time_s * chance.uniform(0.985, 1.015), pace.exchange_time_s * chance.uniform(0.985, 1.015)
        )

    chosen = simulate(
        [[jitter(pace) for pace in [*[usual] * (PEERS - 1), slow]] for _ in range(60)],
        reference,
    )
    assert all(steps[:-1] == [reference] * (PEERS - 1) for steps in chosen)
    mine = [steps[-1] for steps in chosen]
    assert max(mine) - min(mine) <= max(1, round(0.15 * max(mine)))
    turns = sum(earlier != later for earlier, later in itertools.pairwise(mine[5:]))
    assert turns <= 2


def test_a_round_under_one_straggler_is_as_long_as_one_without() -> None:
    usual = Pace(0.1, 0.5)
    straggler = Pace(1.0, 0.5)
    chosen = simulate([[*[usual] * 7, straggler]] * 10, 30)[-1]
    lengths_s = [
        steps * pace.step_time_s + pace.exchange_time_s
        for steps, pace in zip(chosen, [*[usual] * 7, straggler], strict=True)
    ]
    assert chosen == [30] * 7 + [3]
    assert max(lengths_s) == pytest.approx(30 * 0.1 + 0.5, rel=1e-12)


def test_smoothing_by_hand() -> None:
    assert smooth(2.0, 4.0, 0.25) == 2.5
    assert smooth(2.0, 4.0, 1.0) == 4.0
    assert smooth(0.0, 4.0, 0.25) == 4.0
    assert smooth(math.nan, 4.0, 0.25) == 4.0
    assert smooth(2.0, 1.0, 0.5) == 1.5
    for nothing in (math.nan, math.inf, -1.0):
        assert smooth(2.0, nothing) == 2.0
    assert math.isnan(smooth(math.nan, math.nan))


def test_a_far_time_starts_the_average_anew_and_an_outlier_is_forgotten() -> None:
    assert smooth(2.0, 4.1, 0.25) == 4.1
    assert smooth(2.0, 0.9, 0.25) == 0.9
    assert smooth(2.0, 0.0, 0.25) == 0.0
    assert smooth(smooth(2.0, 50.0), 2.0) == 2.0


@pytest.mark.parametrize("share", [0.0, -0.1, 1.1, math.nan])
def test_a_share_that_is_no_share_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="share"):
        smooth(1.0, 2.0, share)


@anytime
@given(st.floats(1e-6, 1e6), st.floats(0, 1e6), st.floats(0.01, 1))
def test_a_smoothed_time_lies_between_the_two(previous: float, measured: float, share: float) -> None:
    average = smooth(previous, measured, share)
    tolerance = 1e-12 * max(previous, measured)
    assert min(previous, measured) - tolerance <= average <= max(previous, measured) + tolerance


@pytest.mark.parametrize(
    ("previous", "transfers_s", "own_s"),
    [
        (1.0, [], math.nan),
        (1.0, [(math.nan, 1.0)], math.nan),
        # partners like us: the longer one, as our link carries both
        (1.0, [(1.1, 1.0), (1.3, 1.0)], 1.3),
        # a partner that says that it is slow, and is
        (1.0, [(1.1, 1.0), (10.0, 9.0)], 1.1),
        (1.0, [(10.0, 9.0)], math.nan),
        # the same before it has said so, or without an average of our own: the other partner tells
        (1.0, [(1.1, 1.0), (10.0, 1.0)], 1.1),
        (0.0, [(1.1, math.nan), (10.0, math.nan)], 1.1),
        # nobody else to tell: it counts as ours for now
        (1.0, [(10.0, 1.0)], 10.0),
        (0.0, [(10.0, 9.0)], 10.0),
        (math.nan, [(10.0, 9.0)], 10.0),
        # slower than even a slow partner accounts for
        (1.0, [(30.0, 9.0)], 30.0),
        # our own link is the slow one
        (10.0, [(9.0, 1.0), (10.0, 1.0)], 10.0),
        # and faster again, beside slow partners
        (10.0, [(1.0, 9.0)], 1.0),
    ],
)
def test_which_transfers_tell_of_our_own_link(
    previous: float, transfers_s: list[tuple[float, float]], own_s: float
) -> None:
    transfers = [Transfer(seconds, theirs_s=theirs_s) for seconds, theirs_s in transfers_s]
    assert own_transfer_s(previous, transfers) == pytest.approx(own_s, nan_ok=True)


@anytime
@given(st.floats(0, 100), st.lists(st.tuples(st.floats(0.01, 100), st.floats(0, 100)), max_size=6))
def test_our_own_link_is_one_of_the_transfers_and_near_the_shortest(
    previous: float, transfers_s: list[tuple[float, float]]
) -> None:
    own_s = own_transfer_s(previous, [Transfer(seconds, theirs_s=theirs_s) for seconds, theirs_s in transfers_s])
    counted = [seconds for seconds, _ in transfers_s]
    assert math.isnan(own_s) or own_s in counted
    # whoever has an average no larger than anybody's words is told nothing new by a transfer it cannot blame
    if transfers_s and all(theirs <= 2 * previous for _, theirs in transfers_s):
        assert own_s <= 2 * min(counted)


@pytest.mark.parametrize(
    ("spans", "busy"),
    [
        ([], math.nan),
        ([(2.0, 5.0)], 2.0),
        # at once, one after the other, and overlapping, whatever their order
        ([(2.0, 5.0), (2.0, 5.0)], 2.0),
        ([(1.0, 7.0), (2.0, 5.0)], 3.0),
        ([(1.5, 6.0), (1.6, 5.5)], 2.1),
        ([(3.0, 6.0), (1.0, 5.0)], 3.0),
        # ends that are not known
        ([(2.0, math.nan), (1.0, 5.0)], 2.0),
    ],
)
def test_a_link_is_busy_for_as_long_as_any_transfer_is_under_way(spans: list[tuple[float, float]], busy: float) -> None:
    assert busy_s([Transfer(*span) for span in spans]) == pytest.approx(busy, nan_ok=True)


@anytime
@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)), min_size=1, max_size=6), st.randoms())
def test_busy_time_lies_between_the_longest_and_the_sum(spans: list[tuple[float, float]], mixer: random.Random) -> None:
    busy = busy_s([Transfer(*span) for span in spans])
    assert max(seconds for seconds, _ in spans) - 1e-9 <= busy <= sum(seconds for seconds, _ in spans) + 1e-9
    mixer.shuffle(spans)
    assert busy_s([Transfer(*span) for span in spans]) == pytest.approx(busy)


def test_partners_that_come_apart_do_not_make_a_slow_link_look_faster() -> None:
    together = [Transfer(2.0, 10.0, 0.2), Transfer(2.0, 10.0, 0.2)]
    apart = [Transfer(1.5, 9.5, 0.2), Transfer(1.5, 10.0, 0.2)]
    assert own_transfer_s(2.0, together) == own_transfer_s(2.0, apart) == 2.0


def swarm(slow_s: float, count: int = PEERS) -> dict[str, Pace]:
    return {f"peer-{number}": Pace(1.0, slow_s if number == 0 else 1.0) for number in range(count)}


@pytest.mark.parametrize("topology", ["1-peer", "2-peer", "ring", "exponential"])
@pytest.mark.parametrize("round", range(4))
def test_partners_of_a_slow_link_begin_with_it_and_nobody_else_does(topology: str, round: int) -> None:
    paces = swarm(10.0)
    coming = beside_partners(paces, topology, round=round, me="peer-3", seed=7)
    partners = row(topology, round=round, members=paces, me="peer-0", seed=7)
    assert {peer for peer, pace in coming.items() if pace.exchange_time_s == 10.0} == partners.keys()
    steps = {peer: local_steps(pace, list(coming.values()), 30, 120, previous=30)[0] for peer, pace in coming.items()}
    assert steps == {peer: 21 if peer in partners else 30 for peer in paces}


def test_where_most_are_beside_the_slow_link_the_round_is_longer_instead() -> None:
    coming = beside_partners(swarm(10.0, count=3), "2-peer", round=0, me="peer-1", seed=0)
    assert round_length_s(list(coming.values()), 30) == 40.0
    assert local_steps(coming["peer-1"], list(coming.values()), 30, 120)[0] == 30


def test_unknown_members_stay_unknown_and_slow_nobody() -> None:
    paces = swarm(10.0) | {"peer-0": Pace(0.0, 10.0)}
    assert beside_partners(paces, "2-peer", round=0, me="peer-1", seed=0) == paces


def test_all_to_all_stays_as_it_is() -> None:
    assert beside_partners(swarm(10.0), "all-to-all", round=0, me="peer-1", seed=0) == swarm(10.0)


def test_a_large_swarm_looks_up_its_own_partners_alone() -> None:
    paces = swarm(10.0, count=1_000)
    partner = next(peer for peer in row("2-peer", round=0, members=paces, me="peer-0", seed=0) if peer != "peer-0")
    coming = beside_partners(paces, "2-peer", round=0, me=partner, seed=0)
    assert coming == paces | {partner: Pace(1.0, 10.0)}


def rounds_under_a_slow_link(seed: int, slow_s: float, topology: str) -> float:
    """A round's length with one link slow over that before, once settled.

    Peers measure, publish and choose over random graphs; a trade begins when both are there.
    """
    noise = random.Random(seed)
    names = [f"peer-{number}" for number in range(PEERS)]
    averages = dict.fromkeys(names, Pace(0.0, 0.0))
    steps = dict.fromkeys(names, 30)
    free_s = dict.fromkeys(names, 0.0)
    lengths_s = []
    for round in range(24):
        link_s = {name: slow_s if name == "peer-0" and round >= 8 else 1.0 for name in names}
        graph = {name: set(row(topology, round=round, members=names, me=name, seed=seed)) - {name} for name in names}
        ready_s = {name: free_s[name] + steps[name] * noise.uniform(0.99, 1.01) for name in names}
        took_s = {
            (name, other): max(link_s[name], link_s[other]) * noise.uniform(0.97, 1.0)
            for name in names
            for other in graph[name]
        }
        before_s = dict(free_s)
        free_s = {
            name: max([ready_s[name], *(max(ready_s[name], ready_s[o]) + took_s[name, o] for o in graph[name])])
            for name in names
        }
        averages = {
            name: Pace(
                smooth(averages[name].step_time_s, (ready_s[name] - before_s[name]) / steps[name]),
                smooth(
                    averages[name].exchange_time_s,
                    own_transfer_s(
                        averages[name].exchange_time_s,
                        [Transfer(took_s[name, o], theirs_s=averages[o].exchange_time_s) for o in graph[name]],
                    ),
                ),
            )
            for name in names
        }
        for name in names:
            coming = beside_partners(averages, topology, round=round + 1, me=name, seed=seed)
            steps[name], _ = local_steps(coming[name], list(coming.values()), 30, 120, previous=steps[name])
        lengths_s.append(max(free_s.values()) - max(before_s.values()))
    equal_s = sum(lengths_s[3:8]) / 5
    return sum(lengths_s[13:]) / len(lengths_s[13:]) / equal_s


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**32), st.floats(2, 25), st.sampled_from(["1-peer", "2-peer"]))
def test_a_peer_whose_link_turns_slow_delays_others_by_no_more_than_the_damping(
    seed: int, slow_s: float, topology: str
) -> None:
    assert rounds_under_a_slow_link(seed, slow_s, topology) <= 1.11


@pytest.mark.parametrize("topology", ["1-peer", "2-peer"])
@pytest.mark.parametrize("seed", range(3))
def test_a_peer_at_a_tenth_of_the_bandwidth_delays_nobody_after_five_rounds(seed: int, topology: str) -> None:
    assert rounds_under_a_slow_link(seed, 10.0, topology) <= 1.05
