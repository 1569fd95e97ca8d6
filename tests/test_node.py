"""`Peer`: started and closed as one, with a plain line for whatever is wrong."""

import asyncio
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

import peers
from peers import contact, node
from peers.errors import AddressError, DaemonError, IdentityError, NoDonorError, PeersError, UnreachableError
from peers.exchange import Answer, Offer, Slot
from peers.identity import Identity, peer_id_of
from peers.membership import MemberState, Status
from peers.node import Peer, RunCard, Snapshot
from tests.conftest import StartPeer

CARD = RunCard(run="tiny-1", digest="d" * 64, document=b'{"name": "tiny"}')
STRANGER = peer_id_of(bytes(range(32)))
JOINING = Status(0, MemberState.JOINING)


def nothing() -> Snapshot | None:
    return None


def port_of(peer: Peer) -> int:
    return int(peer.addresses[0].split("/")[4])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def test_a_swarm_of_four_from_first_contact_to_goodbye(start_peer: StartPeer) -> None:
    first = await start_peer("first")
    assert first.local_only
    assert first.reachable
    assert first.addresses == [f"/ip4/127.0.0.1/tcp/{port_of(first)}/p2p/{first.peer_id}"]
    state = {"weights": torch.arange(6.0).reshape(2, 3)}
    await first.enter(CARD, lambda: Snapshot(4, {"note": "x"}, state))
    await first.membership.publish(Status(4, MemberState.TRAINING))
    others = []
    for name in ("second", "third", "fourth"):
        peer = await start_peer(name, first.addresses[0])
        assert peer.warnings == []
        card = await peer.fetch_card()
        assert card == CARD
        await peer.enter(card, nothing)
        await peer.membership.publish(JOINING)
        others.append(peer)
    for peer in (first, *others):
        assert await peer.membership.wait_for(4, 10.0) == 4
    snapshot = await others[0].fetch_state()
    assert (snapshot.round, snapshot.meta) == (4, {"note": "x"})
    assert torch.equal(snapshot.tensors["weights"], state["weights"])
    a, b = others[1:]  # they joined the first only, and never met before
    one, two = {"x": torch.ones(3)}, {"x": torch.full((3,), 3.0)}
    of_a, of_b = await asyncio.gather(
        a.exchange.swap(Slot(1), {b.peer_id: Offer(one)}, timeout_s=10),
        b.exchange.swap(Slot(1), {a.peer_id: Offer(two)}, timeout_s=10),
    )
    assert of_a[b.peer_id].answer is of_b[a.peer_id].answer is Answer.ACCEPT
    received = of_a[b.peer_id].tensors
    assert received is not None
    assert torch.equal(received["x"], two["x"])
    assert a.meter.by_kind["exchange"].received_bytes == of_a[b.peer_id].bytes_received > 0
    assert first.meter.by_kind["state"].sent_bytes > 24
    await a.close()
    assert a.peer_id not in await b.membership.refresh()
    assert a.peer_id not in await first.membership.refresh()
    await a.close()


async def test_state_comes_from_the_highest_round_and_never_from_one_who_has_none(start_peer: StartPeer) -> None:
    first = await start_peer("first")
    await first.enter(CARD, lambda: Snapshot(9, {}, {"x": torch.ones(1)}))
    newcomer = await start_peer("newcomer", first.addresses[0])
    await newcomer.enter(CARD, nothing)
    await first.membership.publish(Status(9, MemberState.JOINING))
    await newcomer.membership.refresh()
    with pytest.raises(NoDonorError, match="no member of this run trains yet"):
        await newcomer.fetch_state()
    behind = await start_peer("behind", first.addresses[0])
    await behind.enter(CARD, lambda: Snapshot(5, {}, {"x": torch.zeros(1)}))
    await behind.membership.publish(Status(5, MemberState.TRAINING))
    await first.membership.publish(Status(9, MemberState.WAITING))
    await newcomer.membership.refresh()
    assert (await newcomer.fetch_state()).round == 9
    await first.close()
    assert (await newcomer.fetch_state()).round == 5


async def test_a_client_looks_on_and_is_not_seen(start_peer: StartPeer) -> None:
    first = await start_peer("first")
    await first.enter(CARD, nothing)
    await first.membership.publish(Status(2, MemberState.TRAINING, tokens=77))
    client = await start_peer("client", first.addresses[0], client_only=True)
    assert client.addresses == []
    assert not client.reachable
    await client.enter(await client.fetch_card(), nothing)
    assert await client.membership.wait_for(1, 10.0) == 1
    assert client.membership.members()[first.peer_id].status.tokens == 77
    assert set(await first.membership.refresh()) == {first.peer_id}


async def test_a_dead_address_beside_a_live_one_is_a_warning(start_peer: StartPeer) -> None:
    first = await start_peer("first")
    dead = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{STRANGER}"
    wrong = first.addresses[0].replace(first.peer_id, STRANGER)
    started = time.monotonic()
    peer = await start_peer("second", dead, wrong, first.addresses[0])
    assert time.monotonic() - started < 5
    assert peer.warnings == [
        f"initial peer {dead} is left out: connection refused",
        f"initial peer {wrong} is left out: answers with another id: {first.peer_id}",
    ]


async def test_addresses_that_do_not_answer_are_named_with_the_reason(
    start_peer: StartPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contact, "_CONNECT_S", 0.5)
    first = await start_peer("first")
    dead = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{STRANGER}"
    wrong = first.addresses[0].replace(first.peer_id, STRANGER)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        silent = f"/ip4/127.0.0.1/tcp/{listener.getsockname()[1]}/p2p/{STRANGER}"
        for addresses, reasons in (
            ([dead], ["connection refused"]),
            ([wrong], [f"answers with another id: {first.peer_id}"]),
            ([silent], ["silent for 0.5 s"]),
            ([dead, silent], ["connection refused", "silent for 0.5 s"]),
        ):
            started = time.monotonic()
            with pytest.raises(UnreachableError) as caught:
                await start_peer("second", *addresses, patience_s=0.5)
            assert time.monotonic() - started < 5
            pairs = zip(addresses, reasons, strict=True)
            assert str(caught.value) == "no initial peer answers: " + "; ".join(f"{a}: {r}" for a, r in pairs)


async def test_malformed_addresses_are_refused_before_anything_starts(start_peer: StartPeer) -> None:
    with pytest.raises(AddressError, match="'nonsense'"):
        await start_peer("me", "nonsense")
    with pytest.raises(AddressError, match="fixed port"):
        await Peer.start(node.PeerOptions(Path("/nonexistent/me.key"), announce=("203.0.113.5",)))


async def test_an_initial_peer_that_starts_a_moment_later_is_waited_for(start_peer: StartPeer, tmp_path: Path) -> None:
    port = free_port()
    later = Identity.load_or_create(tmp_path / "later.key").peer_id
    address = f"/ip4/127.0.0.1/tcp/{port}/p2p/{later}"
    impatient = asyncio.ensure_future(start_peer("early", address, patience_s=20))
    await start_peer("before")  # takes as long as the early one needs to be refused for the first time
    assert not impatient.done()
    await start_peer("later", port=port)
    early = await impatient
    assert early.warnings == []


async def test_one_identity_runs_once(start_peer: StartPeer) -> None:
    first = await start_peer("me")
    with pytest.raises(IdentityError, match=r"me\.key is in use by another running peer"):
        await start_peer("me")
    await first.close()
    again = await start_peer("me")
    assert again.peer_id == first.peer_id


async def test_a_copied_identity_is_told_when_it_joins_itself(start_peer: StartPeer, tmp_path: Path) -> None:
    first = await start_peer("me")
    (tmp_path / "copy.key").write_bytes((tmp_path / "me.key").read_bytes())
    (tmp_path / "copy.key").chmod(0o600)
    with pytest.raises(UnreachableError, match=r"it is this peer itself; another identity than .*copy\.key is needed"):
        await start_peer("copy", first.addresses[0])


async def test_a_failed_start_leaves_nothing_and_can_be_repeated(start_peer: StartPeer, tmp_path: Path) -> None:
    first = await start_peer("first")
    with pytest.raises(DaemonError, match="already in use"):
        await start_peer("second", port=port_of(first))
    dead = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{STRANGER}"
    with pytest.raises(UnreachableError):
        await start_peer("second", dead, patience_s=0)
    assert len(psutil.Process().children()) == 1
    await start_peer("second", first.addresses[0])


async def test_there_is_no_run_where_nobody_entered_one(start_peer: StartPeer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "_CARD_PATIENCE_S", 0.3)
    first = await start_peer("first")
    second = await start_peer("second", first.addresses[0])
    with pytest.raises(UnreachableError, match=f"no run to join: {first.peer_id}: it does not speak this protocol"):
        await second.fetch_card()
    asking = asyncio.create_task(second.fetch_card())
    await first.enter(CARD, nothing)
    assert await asking == CARD
    with pytest.raises(UnreachableError, match="there are no initial peers"):
        await first.fetch_card()


async def test_a_first_peer_that_was_restarted_is_met_again(
    start_peer: StartPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "_TIES_EVERY_S", 0.1)
    first = await start_peer("first")
    await first.enter(CARD, nothing)
    second = await start_peer("second", first.addresses[0])
    await second.enter(CARD, nothing)
    await second.membership.publish(Status(6, MemberState.TRAINING))
    port = port_of(first)
    await first.close()
    again = await start_peer("first", port=port)  # joins nobody: it is the first
    await again.enter(CARD, nothing)
    assert await again.membership.wait_for(1, 20.0) == 1
    assert again.membership.members()[second.peer_id].status.round == 6


def test_the_public_names_are_there_and_cost_nothing_until_used() -> None:
    assert all(getattr(peers, name) is not None for name in peers.__all__)
    assert sorted(peers.__all__) == peers.__all__ == dir(peers)
    assert issubclass(peers.UnreachableError, PeersError)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        getattr(peers, "nonsense".lower())
    script = "import sys, peers; sys.exit('torch' in sys.modules or 'hivemind' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=30)
