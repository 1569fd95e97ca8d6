"""When lost peers are tried again, and who counts as lost."""

from collections.abc import Collection
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers import contact
from peers.address import Address, parse
from peers.backoff import ALONE_LONGEST_S, FIRST_S, LONGEST_S, SHORT_LONGEST_S, SHORT_S, pause_s
from peers.daemon import Daemon
from peers.dht import Dht
from peers.errors import UnreachableError
from peers.exchange import PeerId
from peers.identity import peer_id_of
from peers.membership import Member, MemberState, Status
from peers.ties import Ties

ME, *OTHERS = (peer_id_of(bytes([number]) * 32) for number in range(25))

jitters = st.floats(0, 1)
lost = st.floats(0, 1e9)


class Nodes:
    """A DHT node's table, and p2pd's place in `Ties`: who is known, who was tried, and who answers."""

    peer_id = ME

    def __init__(self, known: Collection[PeerId], answering: Collection[PeerId] = ()) -> None:
        self.known = set(known)
        self.answering = set(answering)
        self.tried: list[PeerId] = []
        self.explored = 0

    def knows(self, peer: PeerId) -> bool:
        return peer in self.known

    async def explore(self) -> None:
        self.explored += 1

    async def connect(self, address: Address, daemon: Daemon, dht: Dht) -> float:
        self.tried.append(address.peer_id)
        if address.peer_id not in self.answering:
            raise UnreachableError("silent")
        self.known.add(address.peer_id)
        return 0.0


def ties(nodes: Nodes, met: Collection[PeerId], seen: Collection[PeerId], monkeypatch: pytest.MonkeyPatch) -> Ties:
    """Of a peer that met some, and sees some of them as members."""
    monkeypatch.setattr(contact, "connect", nodes.connect)
    addresses = [parse(f"/ip4/127.0.0.1/tcp/4001/p2p/{peer}") for peer in met]
    members = {peer: Member(peer, Status(1, MemberState.TRAINING), "", True, (), 0.0) for peer in seen}
    stand_in = cast(Daemon, nodes), cast(Dht, nodes)
    return Ties(*stand_in, initial=addresses, cached=(), members=lambda: members)


async def test_lost_is_who_is_neither_known_nor_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    known, seen, gone = OTHERS[:3]
    nodes = Nodes([known])
    made = ties(nodes, OTHERS[:3], [seen], monkeypatch)
    await made.mend()
    assert nodes.tried == [gone]
    await made.mend()
    assert nodes.tried == [gone], "it is not due again"
    await made.renew()
    assert sorted(nodes.tried) == sorted([gone, gone, seen]), "whoever was away itself trusts what it saw no more"


async def test_one_that_knows_nobody_tries_all(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes([], answering=OTHERS[:2])
    made = ties(nodes, OTHERS[:3], OTHERS[:3], monkeypatch)
    await made.mend()
    assert sorted(nodes.tried) == sorted(OTHERS[:3])
    assert nodes.known == set(OTHERS[:2])
    assert nodes.explored == 1


async def test_a_few_at_once_and_all_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes([])
    made = ties(nodes, OTHERS, (), monkeypatch)
    for tried in (8, 16, 24):
        await made.mend()
        assert len(nodes.tried) == len(set(nodes.tried)) == tried


@given(st.integers(0, 10_000), lost, st.booleans(), jitters)
def test_pauses_grow_and_are_bounded(failures: int, lost_s: float, alone: bool, jitter: float) -> None:
    pause = pause_s(failures, lost_s=lost_s, alone=alone, jitter=jitter)
    assert 0.75 * FIRST_S <= pause <= (ALONE_LONGEST_S if alone else LONGEST_S)
    assert pause_s(failures + 1, lost_s=lost_s, alone=alone, jitter=jitter) >= pause
    assert pause_s(failures, lost_s=2 * lost_s, alone=alone, jitter=jitter) >= pause
    assert pause_s(failures, lost_s=lost_s, alone=True, jitter=jitter) <= pause_s(
        failures, lost_s=lost_s, alone=False, jitter=jitter
    )


@given(st.integers(0, 10_000), st.floats(0, SHORT_S), jitters)
def test_who_is_lost_for_a_short_while_is_tried_every_twenty_seconds(
    failures: int, lost_s: float, jitter: float
) -> None:
    assert pause_s(failures, lost_s=lost_s, alone=False, jitter=jitter) <= SHORT_LONGEST_S == 20.0


@given(st.floats(0, 86_400 * 7), st.lists(jitters, min_size=1))
def test_a_week_of_trying_is_bounded_work(lost_s: float, jitter: list[float]) -> None:
    tries, passed_s = 0, 0.0
    while passed_s < lost_s:
        passed_s += pause_s(tries, lost_s=passed_s, alone=False, jitter=jitter[tries % len(jitter)])
        tries += 1
    least_s = 0.75 * SHORT_LONGEST_S
    assert tries <= 5 + min(lost_s, 2 * 3600) / least_s + lost_s / (0.75 * LONGEST_S)
