"""Told to stop, in every phase of a peer's life: in good order, in bounded time, and nothing left."""

import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from gasloc import checkpoint
from gasloc.loading import loading
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


@pytest.mark.parametrize(("number", "code"), [(signal.SIGHUP, 0), (signal.SIGINT, 130)])
def test_while_it_writes_a_checkpoint(pool: ProcessPool, number: signal.Signals, code: int) -> None:
    """Frozen with one half written, told again, and let go: at once or in order, the last whole one is there."""
    folder = pool.folder / "first" / "checkpoints"
    stop_in_order([once_round(start(pool))])
    before = checkpoint.load_latest(folder)
    assert before is not None
    process = frozen_as_it_writes(pool, folder)
    process.signal(number)
    process.signal(signal.SIGCONT)
    assert process.wait(END_S * LOADED) == code, process.describe()
    assert process.errors == []
    saved = checkpoint.load_latest(folder)
    assert saved is not None
    assert saved.skipped == ()
    assert saved.meta["step"] >= before.meta["step"]
    if code == 0:
        assert process.events[-1]["event"] == "stopped"
        assert half_written(folder) == []
        assert saved.meta["step"] == process.of("checkpoint")[-1]["step"]
    stop_in_order([once_round(start(pool))])
    assert half_written(folder) == []
    assert pool.leftovers() == []


def frozen_as_it_writes(pool: ProcessPool, folder: Path) -> GaslocProcess:
    """A peer that was told to stop, and frozen as its checkpoint lay there under its temporary name.

    It lies there for milliseconds, and no event tells of it, so it is looked for as often as can be, at several ends.
    """
    for _ in range(10):
        process = once_round(start(pool))
        process.signal(signal.SIGTERM)
        frozen = psutil.Process(process.pid)
        while process.code() is None:
            if not half_written(folder):
                continue
            frozen.suspend()
            while frozen.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
                pass
            if half_written(folder) and frozen.status() == psutil.STATUS_STOPPED:
                return process
            frozen.resume()
            break
        process.wait(END_S * LOADED)
    raise AssertionError(f"no half checkpoint was met; {process.describe()}")


def once_round(process: GaslocProcess) -> GaslocProcess:
    """The process, after its first round."""
    process.event("round", START_S)
    return process


def half_written(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if not path.name.startswith("checkpoint-")]


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


def test_while_python_loads_it_ends_without_a_traceback() -> None:
    script = (
        "import os, signal\n"
        "from gasloc.loading import loading\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "with loading():\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "", "")


def test_when_it_is_loaded_sigint_is_what_it_was() -> None:
    before = signal.getsignal(signal.SIGINT)
    for handler in (signal.default_int_handler, signal.SIG_IGN):
        signal.signal(signal.SIGINT, handler)
        try:
            with loading():
                assert signal.getsignal(signal.SIGINT) is (
                    signal.SIG_DFL if handler is signal.default_int_handler else signal.SIG_IGN
                )
            assert signal.getsignal(signal.SIGINT) is handler
        finally:
            signal.signal(signal.SIGINT, before)


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
