"""Told to stop, in every phase of a peer's life: in good order, in bounded time, and nothing left."""

import signal
import socket
import threading
import time

import pytest

from gasloc.recipe import load
from gasloc.stop import Stop
from peers.membership import MemberState, Status
from peers.node import Peer, PeerOptions, RunCard, Snapshot
from peers.thread import NetworkThread
from tests.processes import GaslocProcess, ProcessPool
from tests.small_recipe import write_small_recipe
from tests.test_swarm_processes import START_S, address_of, join, start, stop_in_order

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

END_S = 10.0
LOADED = 3.0
"""How much longer things may take where other tests share the machine."""


def told(process: GaslocProcess, number: signal.Signals) -> float:
    """Sends the signal; returns how long the end took. The code is 0 and nothing is complained of."""
    begun = time.monotonic()
    process.signal(number)
    assert process.wait(END_S * LOADED) == 0, process.describe()
    assert process.errors == []
    return time.monotonic() - begun


def test_before_p2pd_is_up(pool: ProcessPool) -> None:
    process = start(pool)
    lock = pool.folder / "first" / "lock"
    deadline = time.monotonic() + START_S
    while not lock.exists():
        assert time.monotonic() < deadline
        time.sleep(0.005)  # a file that appears is no event of ours
    told(process, signal.SIGHUP)
    assert process.events[-1]["event"] == "stopped"
    assert pool.leftovers() == []


def test_while_it_connects(pool: ProcessPool) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        silent.settimeout(START_S)
        nobody = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
        process = join(pool, "me", f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}/p2p/{nobody}")
        connection, _ = silent.accept()
        with connection:
            told(process, signal.SIGTERM)
    assert process.events[-1]["event"] == "stopped"
    assert pool.leftovers() == []


def test_while_it_downloads_the_state(pool: ProcessPool) -> None:
    recipe = load(str(write_small_recipe(pool.folder)))
    asked, free = threading.Event(), threading.Event()

    def provide() -> Snapshot | None:
        asked.set()
        free.wait(START_S)
        return None

    network = NetworkThread()
    donor = network.call(Peer.start(PeerOptions(pool.folder / "donor.key", host="127.0.0.1")))
    try:
        card = RunCard("small-1", recipe.digest, recipe.model_dump_json().encode())
        network.call(donor.enter(card, provide))
        network.call(donor.membership.publish(Status(5, MemberState.TRAINING)))
        process = join(pool, "me", donor.addresses[0])
        assert asked.wait(START_S), process.describe()
        told(process, signal.SIGINT)
        assert process.events[-1]["event"] == "stopped"
    finally:
        free.set()
        network.call(donor.close())
        network.close()


def test_in_the_middle_of_an_exchange(pool: ProcessPool) -> None:
    """Its partner is frozen, so it sits in the exchange."""
    first = start(pool, grace_s=60)
    partner = join(pool, "partner", address_of(first))
    first.event("round", START_S, lambda record: record["mixed"])
    partner.signal(signal.SIGSTOP)
    last = max(record["round"] for record in first.of("round"))
    first.event("exchange_started", START_S, lambda record: record["round"] > last)
    told(first, signal.SIGTERM)
    assert [record["event"] for record in first.events[-2:]] == ["checkpoint", "stopped"]
    partner.signal(signal.SIGCONT)
    stop_in_order([partner])


def test_as_it_finishes(pool: ProcessPool) -> None:
    process = start(pool, rounds=2)
    process.event("round", START_S, lambda record: record["round"] == 1)
    told(process, signal.SIGHUP)
    assert process.events[-1]["event"] in ("finished", "stopped")


def test_killed_it_can_be_started_again_at_once_at_the_same_port(pool: ProcessPool) -> None:
    first = start(pool)
    port = address_of(first).split("/tcp/")[1].split("/")[0]
    first.event("round", START_S)
    first.signal(signal.SIGKILL)
    first.wait(10)
    again = start(pool, "--port", port)
    assert f"/tcp/{port}/" in address_of(again)
    stop_in_order([again])
    assert pool.leftovers() == []


def test_a_second_sighup_is_the_same_terminal_going() -> None:
    with Stop() as stop:
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
        assert stop.event.is_set()


def test_under_nohup_the_terminal_may_go() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stop() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop.event.is_set()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
