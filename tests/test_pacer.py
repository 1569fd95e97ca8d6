"""A peer's local steps and turns beside those that it sees, over rounds that are played."""

import itertools
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gasloc.pacer import Pacer
from gasloc.recipe import Recipe, parse
from gasloc.round_result import RoundResult
from gasloc.topology import row
from gasloc.turns import Turns
from peers.exchange import Answer, PeerId, Swap
from peers.membership import Member, MemberState, Status

PEERS = [f"peer-{number}" for number in range(8)]
SLOW = PEERS[0]
STEP_S = 1.0
LINK_S = 2.0


class Swarm:
    """Eight peers in step; what each publishes is seen by all others at once."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.round = 0
        self.status = {peer: Status(0, MemberState.TRAINING) for peer in PEERS}
        self.pacers = {peer: Pacer(recipe, Seen(self, peer), peer) for peer in PEERS}
        self.steps = dict.fromkeys(PEERS, recipe.local_steps)
        self.reasons: dict[PeerId, str] = {}

    def play(self, link_s: float) -> dict[PeerId, tuple[PeerId, ...]]:
        """A round in which the slow peer's link takes `link_s`, the others' take `LINK_S`; returns who traded."""
        round, recipe = self.round, self.recipe
        members = {peer for peer in PEERS if self.pacers[peer].turns.has(round)}
        traded, results = {}, {}
        for peer in PEERS:
            seen = members if peer in members else {peer}
            partners = tuple(
                sorted(
                    row(recipe.topology, round=round, members=seen, me=peer, seed=recipe.seed).keys() - {peer},
                )
            )
            times = {other: link_s if SLOW in (peer, other) else LINK_S for other in partners}
            waited_s = max(times.values(), default=0.0)
            results[peer] = ended(round, self.steps[peer], times, waited_s)
            traded[peer] = partners
        published = {}
        for peer, result in results.items():
            before = replace(self.status[peer], step_time_s=STEP_S)
            exchange_time_s, its = self.pacers[peer].count_round(before, result)
            published[peer] = replace(
                before,
                round=round + 1,
                exchange_time_s=exchange_time_s,
                trade_every=its.every,
                trade_round=its.round,
            )
        self.status, self.round = published, round + 1
        for peer, pacer in self.pacers.items():
            self.steps[peer], self.reasons[peer] = pacer.local_steps(self.status[peer], self.steps[peer])
        return traded


class Seen:
    """The others, as one peer sees them."""

    def __init__(self, swarm: Swarm, me: PeerId) -> None:
        self._swarm = swarm
        self._me = me

    def training(self) -> Mapping[PeerId, Member]:
        return {
            peer: Member(peer, status, self._swarm.recipe.digest, True, (), 0.0)
            for peer, status in self._swarm.status.items()
            if peer != self._me
        }

    def turns(self, round: int) -> Mapping[PeerId, Turns]:
        return {peer: Turns(one.status.trade_every, one.status.trade_round) for peer, one in self.training().items()}


def ended(round: int, steps: int, times_s: Mapping[PeerId, float], waited_s: float) -> RoundResult:
    return RoundResult(
        round=round,
        local_steps=steps,
        partners=tuple(times_s),
        swaps={peer: Swap(Answer.ACCEPT, "traded", seconds=seconds) for peer, seconds in times_s.items()},
        mixes_tried=bool(times_s),
        mixes_done=bool(times_s),
        reason="",
        distance=None,
        exchange_s=waited_s,
        bytes_sent=0,
        bytes_received=0,
        next_round=round + 1,
        next_reason="",
        waited_s=waited_s,
    )


def recipe(**changes: object) -> Recipe:
    return parse({"topology": "2-peer", "local_steps": 18, **changes})


@pytest.mark.parametrize("topology", ["1-peer", "2-peer"])
def test_a_link_longer_than_a_round_gets_turns_and_loses_them_again(topology: str) -> None:
    swarm = Swarm(recipe(topology=topology))
    for _ in range(4):
        swarm.play(LINK_S)
        assert set(swarm.steps.values()) == {18}
    # a round of 20 s, an exchange of 25: at first a round of rest, then one round of three
    traded = [swarm.play(25.0) for _ in range(13)]
    with_it = [4 + place for place, partners in enumerate(traded) if partners[SLOW]]
    assert with_it[:2] == [4, 6]
    assert {later - earlier for earlier, later in itertools.pairwise(with_it[1:])} == {3}
    for round, partners in enumerate(traded, 4):
        if round not in with_it:
            assert not any(SLOW in others for others in partners.values()), "all agree who rests"
    assert swarm.pacers[SLOW].turns.every == 3
    assert all(swarm.pacers[peer].turns == Turns() for peer in PEERS[1:]), "its partners know whose link it was"
    back = [swarm.play(LINK_S) for _ in range(8)]
    found = next(place for place, partners in enumerate(back) if partners[SLOW])
    assert found <= 2
    assert all(partners[SLOW] for partners in back[found:] if topology == "2-peer" or partners[SLOW])
    assert swarm.pacers[SLOW].turns == Turns()
    assert swarm.steps[SLOW] == 18


def test_after_a_trade_that_took_too_long_both_sides_take_fewer_steps_and_say_why() -> None:
    swarm = Swarm(recipe())
    for _ in range(4):
        swarm.play(LINK_S)
    for _ in range(3):
        traded = swarm.play(25.0)
    assert traded[SLOW], "the second slow one"
    # one step and 25 s in a round of 20 s: 6 s late, beside an exchange of 2 s
    assert {swarm.steps[peer] for peer in traded[SLOW]} == {12}
    # the first slow one made it 23 s late, the round of rest after it with one step 4 s; and no exchange comes
    assert swarm.steps[SLOW] == 10
    assert {swarm.steps[peer] for peer in PEERS if peer != SLOW and peer not in traded[SLOW]} == {18}
    words = "trading in one round of 3: an exchange takes 25 s of rounds of 20 s, next in round 9; 10 steps"
    assert swarm.reasons[SLOW].startswith(words)
    swarm.play(25.0)
    assert {swarm.steps[peer] for peer in PEERS if peer != SLOW} == {18}
    assert swarm.steps[SLOW] == 20


@pytest.mark.parametrize("changes", [{"topology": "all-to-all"}, {"mixes": 2}, {"fragments": 2}, {"pacing": False}])
def test_where_a_round_has_not_one_exchange_with_a_few_nobody_has_turns(changes: dict[str, object]) -> None:
    swarm = Swarm(recipe(**changes))
    for _ in range(6):
        swarm.play(50.0)
        assert all(pacer.turns == Turns() for pacer in swarm.pacers.values())


def test_without_pacing_the_steps_are_the_recipes() -> None:
    for changes in ({"pacing": False}, {"topology": "none"}):
        swarm = Swarm(recipe(**changes))
        steps, reason = swarm.pacers[SLOW].local_steps(swarm.status[SLOW], 3)
        assert steps == 18
        assert "no pacing" in reason


def test_a_round_without_a_trade_tells_nothing_of_the_link() -> None:
    swarm = Swarm(recipe())
    before = replace(swarm.status[SLOW], exchange_time_s=3.0)
    exchange_time_s, its = swarm.pacers[SLOW].count_round(before, ended(0, 18, {}, 0.0))
    assert exchange_time_s == 3.0
    assert its == Turns()


class Nobody:
    """The others that a peer sees that is alone."""

    def training(self) -> Mapping[PeerId, Member]:
        return {}

    def turns(self, round: int) -> Mapping[PeerId, Turns]:
        return {}


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=8))
def test_alone_a_peer_takes_the_recipes_steps_however_long_they_take(step_times_s: list[float]) -> None:
    """There is nobody to be late for."""
    pacer, status, steps = Pacer(recipe(), Nobody(), SLOW), Status(0, MemberState.TRAINING), 18
    for round, step_time_s in enumerate(step_times_s):
        before = replace(status, step_time_s=step_time_s)
        exchange_time_s, its = pacer.count_round(before, ended(round, steps, {}, 0.0))
        status = replace(before, round=round + 1, exchange_time_s=exchange_time_s)
        steps, _ = pacer.local_steps(status, steps)
        assert (steps, its) == (18, Turns())
