"""Cuts of the simulated network, and workers that went on without the others: they step back to the swarm's round."""

import asyncio
import itertools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gasloc import mixing
from gasloc.errors import UsageError
from gasloc.events import Round, Warned, as_line
from gasloc.rounds import APART_S
from gasloc.simulation import virtual_time
from gasloc.simulation.conditions import Conditions
from gasloc.simulation.cut import Cut
from gasloc.simulation.link import Link, Network
from gasloc.simulation.quadratic import QuadraticProblem
from gasloc.simulation.run import Simulation, Variant
from tests.simulations import Heard, play, tiny_recipe

STALE = 3
STEADY = [Conditions(bandwidth=1e3, latency_s=0.01)] * 5
HASTY = [Conditions(step_time_s=0.25, bandwidth=1e3, latency_s=0.01)] * 2
"""Four times as fast: they wait for the others as long as they see them."""
BEGIN_S, END_S = 22.0, 46.0


def recipe(**changes: Any) -> Any:
    values: dict[str, Any] = {
        "rounds": 30,
        "local_steps": 5,
        "stale_rounds": STALE,
        "topology": "2-peer",
        "inner": {"learning_rate": 0.02, "warmup_steps": 10, "weight_decay": 0.0},
        "evaluation": {"every_rounds": 100},
    }
    exchange = {"grace_s": 10.0} | changes.pop("exchange", {})
    return tiny_recipe(**values | changes, exchange=exchange)


def cut(*workers: int, begin_s: float = BEGIN_S, end_s: float = END_S) -> Variant:
    return Variant(cuts=(Cut(frozenset(workers), begin_s, end_s),))


def taken(heard: list[Heard]) -> list[tuple[str, float, str]]:
    """Who took the swarm's state, when and in what words."""
    return [
        (peer, now_s, event.message)
        for peer, now_s, event in heard
        if isinstance(event, Warned) and event.message.startswith("took the swarm's state")
    ]


def state_of(message: str) -> int:
    """The round of a state that was taken."""
    told, _, number = message.partition(":")[0].rpartition(" ")
    assert told == "took the swarm's state at round"
    return int(number)


def rounds_of(heard: list[Heard], peer: str, since_s: float = 0.0) -> list[tuple[float, Round]]:
    return [
        (now_s, event) for who, now_s, event in heard if who == peer and isinstance(event, Round) and now_s >= since_s
    ]


EVERY_WAY: list[tuple[tuple[int, ...], dict[str, Any], int | None]] = [
    ((6,), {"topology": "1-peer"}, None),
    ((5, 6), {"topology": "2-peer"}, None),
    ((5, 6), {"topology": "2-peer", "mixes": 2}, None),
    ((5, 6), {"topology": "2-peer", "fragments": 3}, None),
    ((5, 6), {"topology": "2-peer", "fragments": 3}, 4),
    ((6,), {"topology": "2-peer"}, 4),
    ((5, 6), {"topology": "all-to-all"}, None),
    ((5, 6), {"topology": "ring"}, None),
    ((5, 6), {"topology": "noloco"}, None),
]


@pytest.mark.parametrize(("side", "changes", "landing_steps"), EVERY_WAY, ids=str)
def test_those_that_went_ahead_behind_a_cut_step_back_to_the_swarms_round_and_state(
    side: tuple[int, ...], changes: dict[str, Any], landing_steps: int | None
) -> None:
    problem = QuadraticProblem(6, tensors=changes.get("fragments", 1))
    variant = Variant(cuts=(Cut(frozenset(side), BEGIN_S, END_S),), landing_steps=landing_steps)
    result, heard = play(recipe(**changes), problem, STEADY + HASTY, variant)
    whole, unmoved = play(recipe(**changes), problem, STEADY + HASTY, Variant(landing_steps=landing_steps))
    assert taken(unmoved) == []

    assert {peer for peer, _, _ in taken(heard)} == {f"worker-{number}" for number in side}
    assert len(taken(heard)) == len(side), "once each"
    steady = [f"worker-{number}" for number in range(5)]
    for peer, now_s, message in taken(heard):
        assert END_S <= now_s < END_S + 10.0
        now = max(max(event.next_round for at_s, event in rounds_of(heard, one) if at_s <= now_s) for one in steady)
        ahead = [event.next_round for at_s, event in rounds_of(heard, peer) if at_s <= now_s]
        assert ahead[-1] > now + 10, "it was far ahead"
        # a round whose exchange is under way is told when that ends, and the next has begun then
        state = state_of(message)
        assert now - 1 <= state <= now + 2, "theirs, not that of the other that went ahead"
        assert state <= rounds_of(heard, peer, now_s)[0][1].round <= now + 2, "it goes on in their round"
        assert "rounds ahead of most others, more than 3: taking the swarm's state" in message
        behind = [event for at_s, event in rounds_of(heard, peer) if BEGIN_S + 10.0 < at_s < END_S]
        assert behind
        assert not any(one in steady for event in behind for one in event.partners), "nothing comes through a cut"
        after = [event for _, event in rounds_of(heard, peer, now_s)]
        again = sum(any(one in steady for one in event.partners) for event in after)
        assert again >= 0.5 * len(after), "they meet again"
        assert [event.round for event in after] == sorted({event.round for event in after})
    assert mixing.spread(result.parameters) <= 1.5 * mixing.spread(whole.parameters) + 1e-12
    start = problem.validation_loss(problem.initial())
    assert all(problem.validation_loss(parameters) < 0.1 * start for parameters in result.parameters)


def test_of_two_equal_halves_the_one_ahead_stays_and_the_others_take_its_state() -> None:
    conditions = STEADY[:2] + HASTY
    _, heard = play(recipe(), QuadraticProblem(6), conditions, cut(2, 3))
    assert {peer for peer, _, _ in taken(heard)} == {"worker-0", "worker-1"}
    assert all("rounds behind the others' median" in message for _, _, message in taken(heard))
    for peer in ("worker-2", "worker-3"):
        gone = [event.round for _, event in rounds_of(heard, peer)]
        assert gone == sorted(set(gone))


def test_who_traded_a_moment_ago_is_not_taken_to_be_far_behind() -> None:
    _, heard = play(recipe(), QuadraticProblem(6), STEADY + HASTY, cut(6, end_s=29.0))
    ((_, now_s, _),) = taken(heard)
    told_s, met = max(
        (at_s, event.seconds) for at_s, event in rounds_of(heard, "worker-6") if event.mixed and at_s < now_s
    )
    assert told_s <= BEGIN_S
    assert told_s - met + APART_S <= now_s <= told_s + APART_S + 3.0, "at the first round's end after that"


def test_a_cut_that_does_not_heal_leaves_both_sides_to_themselves() -> None:
    _, heard = play(recipe(rounds=20), QuadraticProblem(6), STEADY + HASTY, cut(5, 6, end_s=math.inf))
    assert taken(heard) == []
    assert sum(event.name == "finished" for _, _, event in heard) == 7
    late = [event for number in range(7) for _, event in rounds_of(heard, f"worker-{number}", BEGIN_S + 10.0)]
    assert late
    assert all(event.mixed for event in late)
    sides = ({"worker-5", "worker-6"}, {f"worker-{number}" for number in range(5)})
    for peer, now_s, event in heard:
        if isinstance(event, Round) and now_s > BEGIN_S + 10.0:
            assert next(side for side in sides if peer in side) > set(event.partners)


def test_a_worker_that_is_repaired_behind_a_cut_waits_for_a_donor_until_it_heals() -> None:
    conditions = [*STEADY, Conditions(step_time_s=0.25, mtbf_s=20.0, mttr_s=1.0)]
    _, heard = play(recipe(rounds=30), QuadraticProblem(6), conditions, cut(5, begin_s=10.0, end_s=200.0))
    failed = [now_s for _, now_s, event in heard if isinstance(event, Warned) and event.message.startswith("failed")]
    assert any(now_s < 100.0 for now_s in failed)
    assert sum(event.name == "finished" for _, _, event in heard) == 6


def test_what_is_under_way_across_a_cut_breaks_and_what_waits_is_told() -> None:
    slow = [Conditions(bandwidth=12.0)] * 4  # 24 bytes take 2 s, after 5 s of steps
    _, heard = play(recipe(rounds=6), QuadraticProblem(6), slow, cut(0, begin_s=6.0, end_s=60.0))
    first = {peer: event for peer, _, event in heard if isinstance(event, Round) and event.round == 0}
    assert "worker-0 and worker-" in first["worker-0"].reason or "are cut apart" in first["worker-0"].reason
    assert first["worker-0"].partners == ()
    waiting = [Conditions(step_time_s=1.0 if number else 2.0, bandwidth=12.0) for number in range(2)]
    _, heard = play(recipe(rounds=6), QuadraticProblem(6), waiting, cut(0, begin_s=7.0, end_s=60.0))
    now_s, event = rounds_of(heard, "worker-1")[0]
    assert now_s == pytest.approx(7.0), "its wait ends with the cut"
    assert "cannot be reached" in event.reason


def test_the_same_cut_twice_leaves_the_same_bytes() -> None:
    def text() -> str:
        _, heard = play(recipe(rounds=30), QuadraticProblem(6), STEADY + HASTY, cut(5, 6))
        return "\n".join(f"{peer} {as_line(event, now_s)}" for peer, now_s, event in heard)

    assert text() == text()


SPEEDS = st.lists(st.sampled_from([0.25, 0.5, 1.0, 1.5, 4.0]), min_size=3, max_size=6)


@settings(max_examples=15, deadline=None)
@given(SPEEDS, st.sampled_from(["1-peer", "2-peer", "all-to-all", "ring"]), st.booleans(), st.sampled_from([1.0, 10.0]))
def test_nobody_steps_back_who_is_not_far_ahead_of_most(
    speeds: list[float], topology: str, pacing: bool, grace_s: float
) -> None:
    chosen = recipe(rounds=12, topology=topology, pacing=pacing, exchange={"grace_s": grace_s})
    _, heard = play(chosen, QuadraticProblem(2), [Conditions(step_time_s=seconds) for seconds in speeds])
    reached = {f"worker-{number}": 0 for number in range(len(speeds))}
    for peer, _, event in heard:
        if isinstance(event, Round):
            assert event.round >= reached[peer], "a round was gone through again without a word"
            reached[peer] = event.next_round
        elif isinstance(event, Warned):
            if "ahead of most others" in event.message:
                # of those that still train; none of them is earlier than it was told to be
                others = [round for other, round in reached.items() if other != peer and round < chosen.rounds]
                assert 2 * sum(reached[peer] - round > STALE for round in others) > len(others) + 1
            else:
                assert state_of(event.message) >= reached[peer], "only from far ahead does anybody step back"
            reached[peer] = state_of(event.message)


@pytest.mark.parametrize("topology", ["1-peer", "2-peer", "all-to-all"])
def test_with_pacing_nobody_gets_far_ahead(topology: str) -> None:
    speeds = [Conditions(step_time_s=seconds) for seconds in (1.0, 1.3, 0.5, 2.0, 4.0)]
    _, heard = play(recipe(topology=topology, pacing=True), QuadraticProblem(6), speeds)
    assert not [message for _, _, message in taken(heard) if "ahead" in message]
    for number in range(5):
        rounds = [event.round for _, event in rounds_of(heard, f"worker-{number}")]
        assert all(earlier < later for earlier, later in itertools.pairwise(rounds))


def test_a_network_is_parted_and_healed() -> None:
    async def scenario() -> None:
        network = Network({peer: Link(bandwidth=10.0) for peer in "abc"})
        crossing = asyncio.ensure_future(network.transfer("a", "b", 100))
        beside = asyncio.ensure_future(network.transfer("b", "c", 100))
        await asyncio.sleep(1.0)
        network.part(["a"])
        network.part("bc")
        network.heal("cb")
        assert (network.reaches("a", "b"), network.reaches("b", "c"), network.reaches("a", "a")) == (False, True, True)
        with pytest.raises(ConnectionError, match="a and b are cut apart"):
            await crossing
        with pytest.raises(ConnectionError, match="cut apart"):
            await network.transfer("b", "a", 1)
        with pytest.raises(ConnectionError, match="a cannot be reached"):
            await network.hello("c", "a")
        with pytest.raises(ValueError, match="not in list"):
            network.heal("b")
        network.heal(["a"])
        assert not network.parted
        await network.transfer("b", "a", 1)
        await beside

    virtual_time.run(scenario(), limit_s=60.0)


def test_a_transfer_on_the_far_side_of_a_second_cut_breaks() -> None:
    async def scenario() -> None:
        network = Network({peer: Link(bandwidth=10.0) for peer in "abc"})
        beside = asyncio.ensure_future(network.transfer("b", "c", 100))
        await asyncio.sleep(1.0)
        network.part("a")
        network.part("c")
        with pytest.raises(ConnectionError, match="b and c"):
            await beside

    virtual_time.run(scenario(), limit_s=60.0)


@pytest.mark.parametrize(
    ("changes", "workers", "words"),
    [
        ({}, (4,), "names worker 4, but there are 4 workers"),
        ({"topology": "ddp"}, (0,), "a cut with topology 'ddp'"),
        ({"topology": "syncer", "syncer": {"quorum": 2}}, (0,), "a cut with topology 'syncer'"),
    ],
)
def test_a_cut_that_cannot_be_is_refused(changes: dict[str, Any], workers: tuple[int, ...], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Simulation(recipe(**changes), QuadraticProblem(4), [Conditions()] * 4, variant=cut(*workers))


@pytest.mark.parametrize("span", [(-1.0, 5.0), (5.0, 5.0), (7.0, 5.0), (math.nan, 5.0), (1.0, math.nan)])
def test_times_of_a_cut_that_cannot_be_are_refused(span: tuple[float, float]) -> None:
    with pytest.raises(UsageError, match="it must begin at 0 s or later"):
        Cut(frozenset({0}), *span)
