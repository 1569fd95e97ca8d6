"""Next choices over real p2pd daemons: members are dead, views differ, and those left over meet."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from itertools import combinations, count
from pathlib import Path

import torch

from gasloc import topology
from gasloc.gossip import Exchanged, Plan, exchanging
from gasloc.simulation.gossip import traded
from peers.exchange import Answer, Exchange, PeerId, Slot
from tests.worlds import Libp2pWorld

GRACE_S = 20.0


def partners(members: Collection[PeerId], me: PeerId, round: int) -> set[PeerId]:
    return set(topology.row("1-peer", round=round, members=members, me=me, seed=1)) - {me}


async def mix(exchange: Exchange, number: float, round: int, members: Collection[PeerId]) -> Exchanged:
    work = exchanging(
        exchange.me,
        Plan("1-peer", 1, 1, GRACE_S),
        {"w": torch.tensor([number])},
        Slot(round),
        members=members,
        note={},
    )
    return await traded(exchange, work, timeout_s=GRACE_S)


async def mix_all(
    exchanges: Sequence[Exchange], round: int, views: Mapping[PeerId, Collection[PeerId]]
) -> dict[PeerId, Exchanged]:
    works = [mix(exchange, float(number), round, views[exchange.me]) for number, exchange in enumerate(exchanges)]
    outcomes = await asyncio.gather(*works)
    return {exchange.me: outcome for exchange, outcome in zip(exchanges, outcomes, strict=True)}


async def test_two_whose_partners_are_dead_mix_with_each_other(tmp_path: Path) -> None:
    async with asyncio.timeout(60), AsyncExitStack() as stack:
        world = Libp2pWorld(tmp_path, stack)
        a, b, *dead = [await world.join() for _ in range(4)]
        for exchange in dead:
            await world.kill(exchange)
        everybody = [a.me, b.me, *(exchange.me for exchange in dead)]
        round = next(r for r in count() if b.me not in partners(everybody, a.me, r))
        took = await mix_all([a, b], round, dict.fromkeys([a.me, b.me], everybody))
        for me, other in ((a.me, b.me), (b.me, a.me)):
            assert took[me].partners == (other,), took[me]
            assert float(took[me].mix["w"]) == 0.5
            assert sorted(swap.answer for swap in took[me].swaps.values()) == [Answer.ACCEPT, Answer.UNREACHABLE]
            assert took[me].mixes_done == 1


async def test_of_three_left_over_by_a_dead_member_and_a_view_that_differs_two_meet(tmp_path: Path) -> None:
    async with asyncio.timeout(60), AsyncExitStack() as stack:
        world = Libp2pWorld(tmp_path, stack)
        exchanges = [await world.join() for _ in range(4)]
        *alive, dead = exchanges
        a, b, c = alive
        await world.kill(dead)
        everybody = [exchange.me for exchange in exchanges]
        differs = [a.me, c.me, dead.me]  # C does not see B

        def parts_all(round: int) -> bool:
            return partners(everybody, b.me, round) == {c.me} and partners(differs, c.me, round) == {dead.me}

        round = next(r for r in count() if parts_all(r))
        took = await mix_all(alive, round, {a.me: everybody, b.me: everybody, c.me: differs})
        mixed = {me for me, outcome in took.items() if outcome.partners}
        assert len(mixed) == 2, took
        (pair,) = [both for both in combinations(took, 2) if set(both) == mixed]
        assert took[pair[0]].partners == (pair[1],)
        assert took[pair[1]].partners == (pair[0],)
        assert sum(float(outcome.mix["w"]) for outcome in took.values()) == 3.0  # 0 + 1 + 2, whoever met
