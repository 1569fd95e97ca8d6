"""The network thread: results, errors, stopping and ending."""

import asyncio
import concurrent.futures
import logging
import signal
import threading
from pathlib import Path

import pytest

from peers.errors import UnreachableError
from peers.node import Peer, PeerOptions
from peers.thread import NetworkThread


async def value(number: int) -> int:
    await asyncio.sleep(0)
    return number


async def fail(error: Exception) -> None:
    raise error


class Stuck:
    """A coroutine that waits for ever, and cleans up when it is cancelled."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self.cleaned = threading.Event()

    async def run(self) -> None:
        try:
            self.started.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)
            self.cleaned.set()


def test_a_call_returns_what_the_coroutine_does() -> None:
    network = NetworkThread()
    assert network.call(value(3)) == 3
    assert network.call(value(4), stop=threading.Event()) == 4
    assert network.spawn(value(5)).result(5) == 5
    for error in (UnreachableError("gone"), TimeoutError("late")):
        with pytest.raises(type(error), match=str(error)):
            network.call(fail(error))
    network.close()


def test_the_loop_is_uvloops() -> None:
    network = NetworkThread()

    async def name() -> str:
        return type(asyncio.get_running_loop()).__module__

    assert network.call(name()) == "uvloop"
    network.close()


def test_stop_cancels_a_call_and_lets_it_clean_up() -> None:
    network, stuck, stop = NetworkThread(), Stuck(), threading.Event()

    def stop_it() -> None:
        assert stuck.started.wait(60)
        stop.set()

    stopper = threading.Thread(target=stop_it)
    stopper.start()
    with pytest.raises(concurrent.futures.CancelledError):
        network.call(stuck.run(), stop=stop)
    assert stuck.cleaned.is_set()
    stopper.join()
    with pytest.raises(concurrent.futures.CancelledError):
        network.call(Stuck().run(), stop=stop)
    network.close()


def test_a_result_that_came_all_the_same_is_not_lost() -> None:
    network, stop = NetworkThread(), threading.Event()

    async def stubborn() -> str:
        stop.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "kept"
        return "unreachable"

    assert network.call(stubborn(), stop=stop) == "kept"
    network.close()


def test_an_interrupt_cancels_the_call() -> None:
    network, stuck = NetworkThread(), Stuck()
    main = threading.get_ident()

    def interrupt() -> None:
        assert stuck.started.wait(60)
        signal.pthread_kill(main, signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        network.call(stuck.run())
    interrupter.join()
    assert stuck.cleaned.wait(60)
    network.close()


def test_a_crash_in_the_background_is_logged_and_a_failure_is_its_callers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    network = NetworkThread()
    with caplog.at_level(logging.DEBUG):
        crash, failure = network.spawn(fail(ValueError("a bug"))), network.spawn(fail(UnreachableError("no network")))
        concurrent.futures.wait([crash, failure])
        network.close()
    assert "a bug" in caplog.text
    assert "Traceback" in caplog.text
    assert "no network" not in caplog.text
    with pytest.raises(UnreachableError, match="no network"):
        failure.result()


def test_closing_cancels_what_runs_and_joins() -> None:
    network, stuck = NetworkThread(), Stuck()
    future = network.spawn(stuck.run())
    assert stuck.started.wait(60)
    before = threading.active_count()
    network.close()
    assert stuck.cleaned.is_set()
    with pytest.raises(concurrent.futures.CancelledError):
        future.result(5)
    assert threading.active_count() == before - 1
    network.close()
    with pytest.raises(RuntimeError, match="closed"):
        network.call(value(1))
    with pytest.raises(RuntimeError, match="closed"):
        network.spawn(value(1))


def test_a_peer_lives_on_it_and_a_stopped_start_leaves_nothing(tmp_path: Path) -> None:
    network = NetworkThread()
    peer = network.call(Peer.start(PeerOptions(tmp_path / "a.key", host="127.0.0.1")))
    assert peer.local_only
    network.call(peer.close())
    stop = threading.Event()
    nobody = f"/ip4/127.0.0.1/tcp/1/p2p/{peer.peer_id[:-1]}{'2' if peer.peer_id[-1] != '2' else '3'}"
    timer = threading.Timer(0.6, stop.set)
    timer.start()
    options = PeerOptions(tmp_path / "b.key", host="127.0.0.1", initial_peers=(nobody,), patience_s=30)
    with pytest.raises(concurrent.futures.CancelledError):
        network.call(Peer.start(options), stop=stop)
    timer.join()
    network.close()
