"""Membership over real DHT nodes on loopback: seen, renewed, expired, withdrawn, and never forged."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID
from hivemind.utils import MSGPackSerializer

from peers.address import parse
from peers.daemon import Daemon
from peers.dht import Dht, key_bytes, now
from peers.errors import DaemonError, ProtocolError
from peers.exchange import PeerId
from peers.identity import Identity
from peers.libp2p import Libp2pTransport
from peers.membership import Member, Membership, MemberState, Status, look_pause_s
from peers.record import seal

RUN = "tiny"
DIGEST = "d" * 64
KEY = "gasloc/tiny/members"
LIFE_S = 1.5
TRAINING = Status(3, MemberState.TRAINING, step_time_s=0.5, tokens=1000, loss=2.5)


@dataclass
class Node:
    """One peer's DHT node and membership."""

    identity: Identity
    daemon: Daemon
    dht: Dht
    membership: Membership

    @property
    def id(self) -> PeerId:
        return self.identity.peer_id


StartNode = Callable[..., Awaitable[Node]]


@pytest.fixture
async def start_node(tmp_path: Path) -> AsyncIterator[StartNode]:
    """`await start_node(*nodes it joins, life_s=...)`; closes all at the end."""
    async with AsyncExitStack() as stack:
        names = iter("abcdefgh")

        async def start(*known: Node, life_s: float = LIFE_S, run: str = RUN, ahead_s: float = 0.0) -> Node:
            identity = Identity.load_or_create(tmp_path / f"{next(names)}.key")
            daemon = await Daemon.start(identity, host="127.0.0.1", port=0)
            stack.push_async_callback(daemon.close)
            transport = Libp2pTransport(daemon)
            stack.push_async_callback(transport.close)
            dht = await Dht.start(daemon, transport, max_life_s=60)
            stack.push_async_callback(dht.close)
            for other in known:
                await daemon.connect(parse((await other.daemon.addresses())[0]), 5.0)
                assert abs(await dht.join(other.id)) < 1
            await dht.explore()
            addresses = tuple(await daemon.addresses())
            membership = Membership(
                dht,
                identity,
                run=run,
                digest=DIGEST,
                addresses=lambda: addresses,
                life_s=life_s,
                renew_s=life_s / 5,
                refresh_s=0.1,
                clock=lambda: now() + ahead_s,
            )
            await membership.start()
            stack.push_async_callback(membership.close)
            return Node(identity, daemon, dht, membership)

        yield start


async def gone(node: Node, peer: PeerId, timeout_s: float = 10.0) -> None:
    """Waits until `node` no longer sees a peer."""
    async with asyncio.timeout(timeout_s):
        while peer in await node.membership.refresh():
            pass


async def put(node: Node, at: Node, *, subkey: PeerId, record: bytes, expires: float, key: str = KEY) -> bool:
    """Asks the DHT node `at` to store a record, as any stranger can."""
    answer = await node.dht._node.protocol.call_store(
        PeerID.from_base58(at.id),
        keys=[DHTID.generate(source=key)],
        values=[MSGPackSerializer.dumps(record)],
        expiration_time=[expires],
        subkeys=[subkey],
    )
    (stored,) = answer
    return bool(stored)


async def test_four_peers_see_each_other_whomever_they_joined(start_node: StartNode) -> None:
    a = await start_node(life_s=20)
    b = await start_node(a, life_s=20)
    c = await start_node(b, life_s=20)
    d = await start_node(a, life_s=20)
    nodes = [a, b, c, d]
    for number, node in enumerate(nodes):
        await node.membership.publish(Status(number, MemberState.JOINING))
    for node in nodes:
        assert await node.membership.wait_for(4, 10.0) == 4
        view = node.membership.members()
        assert {peer: member.status.round for peer, member in view.items()} == {
            other.id: number for number, other in enumerate(nodes)
        }
        assert all(member.digest == DIGEST and member.reachable for member in view.values())
        assert view[a.id].addresses == tuple(await a.daemon.addresses())
        assert all(0 < member.expires - now() <= 20 for member in view.values())
        assert not node.dht.validator.rejected


async def test_eight_that_join_at_once_are_one_swarm(start_node: StartNode) -> None:
    first = await start_node(life_s=60)
    nodes = [first, *await asyncio.gather(*(start_node(first, life_s=60) for _ in range(7)))]
    await asyncio.gather(*(node.membership.publish(TRAINING) for node in nodes))
    for node in nodes:
        assert await node.membership.wait_for(8, 30) == 8


async def test_a_new_status_replaces_the_old_one(start_node: StartNode) -> None:
    a = await start_node()
    b = await start_node(a)
    assert a.membership.members() == {}
    for round_ in range(5):
        await a.membership.publish(Status(round_, MemberState.TRAINING))
        assert a.membership.members()[a.id].status.round == round_
        assert (await b.membership.refresh())[a.id].status.round == round_


@pytest.mark.parametrize("ahead_s", [2.0, -2.0])
async def test_a_clock_that_is_a_little_off_does_not_matter(start_node: StartNode, ahead_s: float) -> None:
    a = await start_node(life_s=20)
    b = await start_node(a, life_s=20, ahead_s=ahead_s)
    for node in (a, b):
        await node.membership.publish(TRAINING)
    for node in (a, b):
        assert set(await node.membership.refresh()) == {a.id, b.id}
    assert not a.dht.validator.rejected


@pytest.mark.parametrize("ahead_s", [60.0, -60.0, 300.0])
async def test_a_clock_that_is_far_off_hides_its_own_peer_and_harms_nobody(
    start_node: StartNode, ahead_s: float
) -> None:
    a = await start_node(life_s=20)
    b = await start_node(a, life_s=20)
    off = await start_node(a, life_s=20, ahead_s=ahead_s)
    for node in (a, b, off):
        await node.membership.publish(TRAINING)
    for node in (a, b):
        assert set(await node.membership.refresh()) == {a.id, b.id}
    assert (a.dht.validator.rejected.total() > 0) == (ahead_s > 0)


async def test_runs_do_not_see_each_other(start_node: StartNode) -> None:
    a = await start_node()
    b = await start_node(a, run="other")
    await a.membership.publish(TRAINING)
    await b.membership.publish(TRAINING)
    assert set(await a.membership.refresh()) == {a.id}
    assert set(await b.membership.refresh()) == {b.id}


async def test_a_record_is_renewed_without_the_trainer_and_expires_without_the_renewal(
    start_node: StartNode,
) -> None:
    a = await start_node()
    b = await start_node(a)
    await a.membership.publish(TRAINING)
    await b.membership.publish(TRAINING)
    first = (await b.membership.refresh())[a.id].expires
    async with asyncio.timeout(10):
        while (await b.membership.refresh())[a.id].expires < first + 2 * LIFE_S:
            pass
    await a.membership.close()  # as if the peer had died: no goodbye
    await gone(b, a.id)
    assert set(b.membership.members()) == {b.id}


async def test_a_goodbye_is_seen_at_once_and_a_return_as_well(start_node: StartNode) -> None:
    a = await start_node(life_s=20)
    b = await start_node(a, life_s=20)
    await a.membership.publish(TRAINING)
    assert a.id in await b.membership.refresh()
    await a.membership.withdraw()
    assert a.id not in await b.membership.refresh()
    assert a.id not in await a.membership.refresh()
    await a.membership.withdraw()
    await a.membership.publish(TRAINING)
    assert a.id in await b.membership.refresh()


async def test_a_renewal_does_not_overtake_a_goodbye(start_node: StartNode) -> None:
    a = await start_node(life_s=20)
    b = await start_node(a, life_s=20)
    for _ in range(10):
        await a.membership.publish(TRAINING)
        await asyncio.gather(a.membership._renew(), a.membership.withdraw(), a.membership._renew())
        assert a.id not in await b.membership.refresh()


async def test_a_peer_that_is_set_aside_comes_back_with_a_newer_record(start_node: StartNode) -> None:
    a = await start_node(life_s=20)
    b = await start_node(a, life_s=20)
    await a.membership.publish(TRAINING)
    await b.membership.publish(TRAINING)
    await b.membership.refresh()
    b.membership.set_aside(a.id, "did not answer")
    b.membership.set_aside("12D3KooWnobody", "never heard of")
    assert set(b.membership.members()) == {b.id}
    ((peer, (reason, left_s)),) = b.membership.left_aside().items()
    assert (peer, reason) == (a.id, "did not answer")
    assert 0 < left_s <= 20
    assert set(await a.membership.refresh()) == {a.id, b.id}
    await a.membership.publish(TRAINING)
    assert set(await b.membership.refresh()) == {a.id, b.id}
    assert b.membership.left_aside() == {}


async def test_waiting_ends_with_the_count_or_the_time(start_node: StartNode) -> None:
    a = await start_node(life_s=20)
    assert await a.membership.wait_for(1, 0.05) == 0
    b = await start_node(a, life_s=20)
    waiting = asyncio.create_task(a.membership.wait_for(2, 10.0))
    await a.membership.publish(TRAINING)
    await b.membership.publish(TRAINING)
    assert await waiting == 2
    assert await a.membership.wait_for(3, 0.05) == 2


async def test_forged_records_are_refused_and_counted_and_change_nothing(start_node: StartNode) -> None:
    a = await start_node(life_s=20)
    b = await start_node(a, life_s=20)
    liar = await start_node(a, b, life_s=20)
    for node in (a, b):
        await node.membership.publish(TRAINING)
    expires = now() + 25
    lie = Member(liar.id, Status(9, MemberState.TRAINING), DIGEST, True, (), expires)
    good = seal(lie, key_bytes(KEY), liar.identity)
    late = seal(Member(liar.id, TRAINING, DIGEST, True, (), now() + 1e6), key_bytes(KEY), liar.identity)
    forged: list[tuple[PeerId, bytes, float]] = [
        (b.id, good, expires),
        (b.id, b"junk" * 40, expires),
        (b.id, bytes(1_000_000), expires),
        (liar.id, good, expires + 10),
        (liar.id, late, now() + 1e6),
        (liar.id, good, float("inf")),
        ("somebody", good, expires),
    ]
    for count, (subkey, record, until) in enumerate(forged, 1):
        assert not await put(liar, a, subkey=subkey, record=record, expires=until)
        assert a.dht.validator.rejected.total() == count
    assert not await put(liar, a, subkey=liar.id, record=good, expires=expires, key="elsewhere")
    for node in (a, b):
        view = await node.membership.refresh()
        assert {peer: member.status for peer, member in view.items()} == {a.id: TRAINING, b.id: TRAINING}
    assert await put(liar, a, subkey=liar.id, record=good, expires=expires), "its own record is its right"
    assert await b.membership.wait_for(3, 15.0) == 3
    assert b.membership.members()[liar.id].status.round == 9


async def test_a_status_that_others_would_refuse_is_not_published(start_node: StartNode) -> None:
    a = await start_node()
    with pytest.raises(ProtocolError, match="round"):
        await a.membership.publish(Status(-1, MemberState.TRAINING))
    assert await a.membership.refresh() == {}


async def test_publishing_without_a_p2pd_says_so(tmp_path: Path) -> None:
    identity = Identity.load_or_create(tmp_path / "a.key")
    daemon = await Daemon.start(identity, host="127.0.0.1", port=0)
    transport = Libp2pTransport(daemon)
    dht = await Dht.start(daemon, transport, max_life_s=60)

    def check() -> bool:
        if not daemon.alive():
            raise DaemonError("p2pd has ended")
        return True

    membership = Membership(dht, identity, run=RUN, digest=DIGEST, check=check)
    await daemon.close()
    with pytest.raises(DaemonError):
        await membership.publish(TRAINING)
    await dht.close()
    await transport.close()


@pytest.mark.parametrize(("members", "pause_s"), [(0, 1.0), (8, 1.0), (12, 1.5), (20, 2.5), (10_000, 2.5)])
def test_large_runs_are_looked_at_less_often(members: int, pause_s: float) -> None:
    assert look_pause_s(members, 1.0) == pause_s
