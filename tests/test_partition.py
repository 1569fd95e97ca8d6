"""A swarm cut in two and healed, over in-memory streams and a virtual clock: both halves train, and merge again."""

import asyncio
from collections.abc import Collection, Mapping

import pytest
import torch

from gasloc import mixing
from gasloc.gossip import Exchanged, Plan, exchanging
from gasloc.outer import OuterStep
from gasloc.simulation.gossip import traded
from peers.errors import UnreachableError
from peers.exchange import PeerId, Slot
from peers.pipes import PipeNetwork
from peers.stream_exchange import StreamExchange
from tests.virtual_time import run

GRACE_S = 5.0
ROUND_S = 3.0
PEERS = [f"peer-{index}" for index in range(6)]
HALVES = PEERS[:3], PEERS[3:]
BROKEN = (ConnectionError, asyncio.IncompleteReadError)


class Replica:
    """A peer that is pulled towards a place of its own in its local steps, as its own data would pull it."""

    def __init__(self, number: int) -> None:
        self.anchor = {"w": torch.zeros(6, dtype=torch.float64)}
        self._pull = torch.eye(6, dtype=torch.float64)[number]
        self._outer = OuterStep(self.anchor, lambda tensors: torch.optim.SGD(tensors, 0.7, momentum=0.5, nesterov=True))

    def trained(self) -> dict[str, torch.Tensor]:
        """phi: a step of a tenth of the way."""
        return {"w": self.anchor["w"] + 0.1 * (self._pull - self.anchor["w"])}

    def take(self, mix: Mapping[str, torch.Tensor]) -> None:
        self._outer.step(mix)


def spread(replicas: Collection[Replica]) -> float:
    return mixing.spread([replica.anchor for replica in replicas])


async def one_round(
    exchanges: Mapping[PeerId, StreamExchange],
    replicas: Mapping[PeerId, Replica],
    topology: str,
    round: int,
    seen: Mapping[PeerId, Collection[PeerId]],
) -> dict[PeerId, tuple[Exchanged, float]]:
    """Local steps, exchange, outer step at every peer; each exchange and its seconds."""
    loop = asyncio.get_running_loop()

    async def at(me: PeerId) -> tuple[Exchanged, float]:
        await asyncio.sleep(ROUND_S)
        began = loop.time()
        phi = replicas[me].trained()
        work = exchanging(me, Plan(topology, 3, 1, GRACE_S), phi, Slot(round), members=seen[me], note={})
        exchanged = await traded(exchanges[me], work, timeout_s=GRACE_S)
        replicas[me].take(exchanged.mix)
        return exchanged, loop.time() - began

    return dict(zip(PEERS, await asyncio.gather(*map(at, PEERS)), strict=True))


def halves_of(topology: str, old_views_rounds: int) -> tuple[list[float], list[set[frozenset[PeerId]]], float]:
    """10 rounds together, 10 cut in two, 10 healed: spread and pairs of each round, and the longest exchange.

    For the first rounds of the cut everybody still sees the others' records.
    """

    async def scenario() -> tuple[list[float], list[set[frozenset[PeerId]]], float]:
        network = PipeNetwork()
        exchanges = {peer: StreamExchange(network.join(peer), run="r", digest="d") for peer in PEERS}
        for exchange in exchanges.values():
            await exchange.start()
        replicas = {peer: Replica(number) for number, peer in enumerate(PEERS)}
        spreads, pairs, longest = [], [], 0.0
        everybody = dict.fromkeys(PEERS, PEERS)
        by_half = {peer: half for half in HALVES for peer in half}
        for round in range(30):
            if round == 10:
                network.part(HALVES[0])
            if round == 20:
                network.heal()
            views = by_half if 10 + old_views_rounds <= round < 20 else everybody
            ended = await one_round(exchanges, replicas, topology, round, views)
            spreads.append(spread(replicas.values()))
            pairs.append({frozenset({me, other}) for me, (one, _) in ended.items() for other in one.partners})
            longest = max([longest, *(seconds for _, seconds in ended.values())])
        return spreads, pairs, longest

    return run(scenario())


@pytest.mark.parametrize("topology", ["1-peer", "2-peer"])
@pytest.mark.parametrize("old_views_rounds", [0, 3])
def test_halves_train_apart_and_the_spread_falls_after_the_heal(topology: str, old_views_rounds: int) -> None:
    spreads, pairs, longest = halves_of(topology, old_views_rounds)

    def across(rounds: range) -> int:
        return sum(len(pair & set(HALVES[0])) == 1 for round in rounds for pair in pairs[round])

    assert across(range(10)) > 0
    assert across(range(10, 20)) == 0, "nothing comes through a cut"
    assert across(range(20, 30)) > 0, "halves that see each other mix again"
    assert all(pairs[round] for round in range(13, 20)), "both halves go on by themselves"
    together, apart, healed = spreads[9], spreads[19], spreads[29]
    assert apart > 1.5 * together
    assert healed < 1.1 * together
    assert longest <= GRACE_S + 3.0, "nobody waits for the other half beyond the grace"


async def test_a_stream_under_way_breaks_at_the_cut() -> None:
    network = PipeNetwork()
    one, other = network.join("a"), network.join("b")
    heard = asyncio.Event()

    async def serve(peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with pytest.raises(BROKEN):
            await reader.readexactly(1)
        heard.set()

    await other.serve("/p", serve)
    reader, writer = await one.dial("b", "/p", timeout_s=1.0)
    await asyncio.sleep(0)
    network.part(["a"])
    with pytest.raises(BROKEN):
        await reader.readexactly(1)
    await asyncio.wait_for(heard.wait(), 5.0)
    with pytest.raises(UnreachableError, match="refused"):
        await one.dial("b", "/p", timeout_s=1.0)
    writer.close()
    network.heal()
    _, writer = await one.dial("b", "/p", timeout_s=1.0)
    writer.close()
    await other.finished()
