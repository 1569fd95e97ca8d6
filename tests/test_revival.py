"""p2pd dies under a peer, and time is lost: the rules, and real peers with real p2pds."""

import asyncio
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peers import daemon, revival
from peers.errors import DaemonError
from peers.exchange import Answer, Offer, Slot
from peers.membership import MemberState, Status
from peers.node import Peer, RunCard, Snapshot
from peers.revival import LATE_S, MOST_ENDS, WITHIN_S, Beat, Jump, judge
from tests.conftest import StartPeer

T = TypeVar("T")
CARD = RunCard(run="tiny-1", digest="d" * 64, document=b'{"name": "tiny"}')
STATE = {"x": torch.arange(6.0)}
TRAINING = Status(3, MemberState.TRAINING)
RESTART_S = 30.0
"""Far over the 5 s that it may take on a machine with time to spare."""


def state() -> Snapshot | None:
    return Snapshot(3, {}, STATE)


def daemon_of(peer: Peer) -> psutil.Process:
    (child,) = (one for one in psutil.Process().children() if str(peer._identity.path) in " ".join(one.cmdline()))
    return child


async def member(start_peer: StartPeer, name: str, *addresses: str) -> Peer:
    peer = await start_peer(name, *addresses)
    await peer.enter(CARD, state)
    await peer.membership.publish(TRAINING)
    return peer


async def until(find: Callable[[], T | None], timeout_s: float = RESTART_S) -> T:
    """What `find` gives once it gives anything."""
    async with asyncio.timeout(timeout_s):
        while True:
            found = find()
            if found:
                return found
            await asyncio.sleep(0.01)


async def notice(peer: Peer) -> str:
    (line,) = await until(peer.take_notices)
    return line


def sockets() -> list[str]:
    return [path.name for path in Path("/tmp").glob(f"hivemind-gasloc-{os.getpid()}-*-p2pd.sock")]


def round_of(seen: Peer, by: Peer) -> int:
    member = by.membership.members().get(seen.peer_id)
    return member.status.round if member else -1


async def trade(one: Peer, other: Peer, round: int) -> None:
    offer = {"x": torch.full((3,), float(round))}
    swaps = await asyncio.gather(
        one.exchange.swap(Slot(round), {other.peer_id: Offer(offer)}, timeout_s=20),
        other.exchange.swap(Slot(round), {one.peer_id: Offer(offer)}, timeout_s=20),
    )
    assert [swap.answer for found in swaps for swap in found.values()] == [Answer.ACCEPT] * 2, swaps


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=12).map(sorted))
def test_p2pd_is_started_again_unless_it_ends_again_and_again(ends: list[float]) -> None:
    again, reason = revival.restart(ends)
    recent = sum(1 for end in ends if end > ends[-1] - WITHIN_S)
    assert again == (recent < MOST_ENDS)
    assert f"{recent}" in reason


@given(st.floats(0, LATE_S), st.floats(-1.9, 1.9), st.floats(0, 1e9))
def test_a_beat_that_is_a_little_late_tells_of_nothing(late_s: float, drift_s: float, start_s: float) -> None:
    before = Beat(start_s, 1e9)
    after = Beat(start_s + 1.0 + late_s * 0.999, 1e9 + 1.0 + late_s + drift_s)
    assert judge(before, after, every_s=1.0)[0] is Jump.NONE


@given(st.floats(LATE_S + 1.01, 1e6), st.floats(-1e6, 1e6))
def test_a_late_beat_is_a_pause_whatever_the_clock_says(passed_s: float, wall_s: float) -> None:
    jump, line = judge(Beat(5.0, 1e9), Beat(5.0 + passed_s, 1e9 + wall_s), every_s=1.0)
    assert jump is Jump.PAUSED
    assert line == f"this peer did not run for {passed_s:.0f} s: was the machine asleep?"


@pytest.mark.parametrize(("set_by_s", "way"), [(300.0, "ahead by 300 s"), (-300.0, "back by 300 s")])
def test_a_clock_that_was_set_is_told(set_by_s: float, way: str) -> None:
    jump, line = judge(Beat(5.0, 1e9), Beat(6.0, 1e9 + 1.0 + set_by_s), every_s=1.0)
    assert jump is Jump.CLOCK_SET
    assert f"clock was set {way}" in line
    assert "NTP" in line


async def test_only_p2pd_dies_and_all_goes_on_at_the_same_address(start_peer: StartPeer) -> None:
    first = await member(start_peer, "first")
    second = await member(start_peer, "second", first.addresses[0])
    third = await member(start_peer, "third", first.addresses[0])
    for peer in (first, second, third):
        assert await peer.membership.wait_for(3, 20.0) == 3
    await trade(first, second, 1)
    address = second.addresses[0]
    dead = daemon_of(second)
    dead.kill()
    line = await notice(second)

    assert line.startswith("p2pd ended; restarted in ")
    assert second.alive()
    assert second.addresses[0] == address
    assert daemon_of(second).pid != dead.pid
    assert set(second.membership.members()) == {first.peer_id, second.peer_id, third.peer_id}, "it knows them again"
    for round, other in enumerate((first, third), 2):
        await trade(second, other, round)
    await second.membership.publish(Status(9, MemberState.TRAINING))
    for other in (first, third):
        await until(partial(lambda other: round_of(second, other) == 9, other))
    newcomer = await start_peer("newcomer", address)
    assert await newcomer.fetch_card() == CARD
    assert len(sockets()) == 4


async def test_an_exchange_under_way_ends_at_once_and_keeps_nothing(start_peer: StartPeer) -> None:
    first = await member(start_peer, "first")
    second = await member(start_peer, "second", first.addresses[0])
    await second.membership.wait_for(2, 20.0)
    big = {"x": torch.zeros(1 << 24)}
    swaps = [
        asyncio.create_task(one.exchange.swap(Slot(1), {other.peer_id: Offer(big)}, timeout_s=30))
        for one, other in ((first, second), (second, first))
    ]

    def under_way() -> bool:
        traffic = second.meter.by_kind.get("exchange")
        return traffic is not None and traffic.received_bytes > 1 << 20

    await until(under_way)
    daemon_of(second).kill()
    for swap in swaps:
        (outcome,) = (await asyncio.wait_for(swap, 30)).values()
        assert outcome.answer in (Answer.BROKEN, Answer.UNREACHABLE), outcome
        assert outcome.tensors is None
    await notice(second)
    await trade(first, second, 2)


async def test_p2pd_that_dies_again_and_again_is_given_up_with_the_reason(start_peer: StartPeer) -> None:
    peer = await member(start_peer, "me")
    for _ in range(MOST_ENDS - 1):
        daemon_of(peer).kill()
        await notice(peer)
    daemon_of(peer).kill()
    await until(lambda: not peer.alive())
    words = rf"p2pd, the network daemon, ended {MOST_ENDS} times within \d+ s; start this peer again"
    with pytest.raises(DaemonError, match=words):
        peer.take_notices()
    with pytest.raises(DaemonError, match=words):
        await peer.membership.publish(TRAINING)
    await peer.close()
    assert not sockets()
    assert (await start_peer("me")).peer_id == peer.peer_id


async def test_p2pd_that_cannot_be_started_again_is_given_up(
    start_peer: StartPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program took the port in the meantime."""
    peer = await member(start_peer, "me")
    port = int(peer.addresses[0].split("/")[4])

    def taken(host: str, wanted: int) -> None:
        assert (host, wanted) == ("127.0.0.1", port)
        raise DaemonError(f"127.0.0.1 port {wanted} is already in use")

    monkeypatch.setattr(daemon, "check_free", taken)
    daemon_of(peer).kill()
    await until(lambda: not peer.alive())
    words = rf"ended {MOST_ENDS} times within \d+ s, at last as 127.0.0.1 port {port} is already in use; "
    with pytest.raises(DaemonError, match=words):
        await peer.membership.publish(TRAINING)
    with pytest.raises(DaemonError):
        peer.take_notices()
    await peer.close()


async def test_a_status_published_while_p2pd_is_away_is_told_afterwards(start_peer: StartPeer) -> None:
    first = await member(start_peer, "first")
    second = await member(start_peer, "second", first.addresses[0])
    daemon_of(second).kill()
    await second._daemon.ended()
    await second.membership.publish(Status(8, MemberState.WAITING))
    await notice(second)
    await until(lambda: round_of(second, first) == 8)
