"""`gasloc relay`: an address to join at, the run's card at second hand, and a clean end."""

import signal
from pathlib import Path

import pytest

from gasloc.run_folder import RunFolder
from peers.address import Address
from peers.checks import LookOptions, look
from peers.daemon import Daemon
from peers.identity import Identity, peer_id_of
from peers.node import Peer, PeerOptions, RunCard, Snapshot
from peers.p2pd import Role
from tests.conftest import StartPeer
from tests.processes import ProcessPool
from tests.small_recipe import write_small_recipe

START_S = 120.0
CARD = RunCard("tiny-1", "d" * 64, b'{"name": "tiny"}')


def no_state() -> Snapshot | None:
    return None


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_a_relay_learns_the_run_gives_it_to_newcomers_and_ends_cleanly(pool: ProcessPool) -> None:
    relay = pool.gasloc("relay", "--dir", pool.folder / "relay", "--host", "127.0.0.1")
    address = relay.line("others join by: ", START_S).split()[-1]
    assert relay.line("relay at ", 1) == f"relay at {address}"
    text = pool.folder / "text.txt"
    first = pool.gasloc(
        *("start", "--recipe", write_small_recipe(pool.folder, rounds=2000), "--data", text, "--peers", address),
        *("--dir", pool.folder / "first", "--host", "127.0.0.1", "--threads", "1", "--json"),
    )
    run = first.event("run_started", START_S)["run"]
    assert relay.line("run ", START_S) == f"run {run}, recipe small"
    second = pool.gasloc(
        *("join", "--peers", address, "--data", text, "--dir", pool.folder / "second"),
        *("--host", "127.0.0.1", "--threads", "1", "--json"),
    )
    assert second.event("run_started", START_S)["run"] == run
    assert second.event("round", START_S, lambda record: record["mixed"])
    for process in (relay, second, first):
        process.signal(signal.SIGINT)
    for process in (relay, second, first):
        assert process.wait(30) == 0, process.errors
    assert relay.errors == []
    folder = RunFolder(pool.folder / "relay")
    stored = folder.read_card()
    assert stored is not None
    assert stored.run == run
    assert folder.read_peers()
    folder.close()


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_only_its_p2pd_dies_and_newcomers_join_at_the_same_address(pool: ProcessPool) -> None:
    relay = pool.gasloc("relay", "--dir", pool.folder / "relay", "--host", "127.0.0.1")
    address = relay.line("others join by: ", START_S).split()[-1]
    text = pool.folder / "text.txt"
    first = pool.gasloc(
        *("start", "--recipe", write_small_recipe(pool.folder, rounds=100_000), "--data", text, "--peers", address),
        *("--dir", pool.folder / "first", "--host", "127.0.0.1", "--threads", "1", "--json"),
    )
    first.event("round", START_S)
    relay.line("run ", START_S)
    (daemon,) = relay.daemons()
    daemon.kill()
    relay.line("p2pd ended; restarted in ", START_S)
    second = pool.gasloc(
        *("join", "--peers", address, "--data", text, "--dir", pool.folder / "second"),
        *("--host", "127.0.0.1", "--threads", "1", "--json"),
    )
    assert second.event("round", START_S, lambda record: record["mixed"])
    for process in (relay, second, first):
        process.signal(signal.SIGINT)
    for process in (relay, second, first):
        assert process.wait(30) == 0, process.errors
    assert pool.leftovers() == []


async def test_a_card_is_found_at_whoever_is_connected(start_peer: StartPeer, tmp_path: Path) -> None:
    relay = await Peer.start(PeerOptions(tmp_path / "relay.key", host="127.0.0.1", relay=True))
    try:
        assert await relay.find_card() is None
        first = await start_peer("first", relay.addresses[0])
        assert await relay.find_card() is None
        await first.enter(CARD, no_state)
        assert await relay.find_card() == CARD
        await relay.enter(CARD, no_state)
        seen = await look(LookOptions((relay.addresses[0],), "127.0.0.1", 0, ask_card=True))
        assert seen.card == CARD
        assert await relay.membership.refresh() == {}
    finally:
        await relay.close()


async def test_cached_addresses_are_used_and_none_of_them_is_insisted_on(start_peer: StartPeer, tmp_path: Path) -> None:
    stranger = f"/ip4/127.0.0.1/tcp/1/p2p/{peer_id_of(bytes(32))}"
    alone = await Peer.start(
        PeerOptions(tmp_path / "alone.key", host="127.0.0.1", cached_peers=(stranger, "junk"), patience_s=0.0)
    )
    try:
        assert alone.warnings == ["nobody answers where the swarm was met before; they are tried again now and then"]
        both = await Peer.start(
            PeerOptions(
                tmp_path / "both.key",
                host="127.0.0.1",
                cached_peers=(stranger, alone.addresses[0]),
                patience_s=0.0,
            )
        )
        try:
            assert both.warnings == []
            assert both._dht.knows(alone.peer_id)
        finally:
            await both.close()
    finally:
        await alone.close()


@pytest.mark.parametrize("role", list(Role))
async def test_p2pd_starts_in_every_role(role: Role, tmp_path: Path) -> None:
    identity = Identity.load_or_create(tmp_path / "me.key")
    relays = [Address("/ip4/127.0.0.1/tcp/1", peer_id_of(bytes(32)))]
    daemon = await Daemon.start(identity, host="127.0.0.1", port=0, role=role, relays=relays)
    addresses = await daemon.addresses()
    await daemon.close()
    assert bool(addresses) == (role is not Role.CLIENT)
    assert not any("/tcp/0/" in address for address in addresses)
