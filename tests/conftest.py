"""Fixtures for all tests: none may leave a process or a socket behind; and real peers on loopback."""

import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import psutil
import pytest
import torch

from peers.daemon import Daemon
from peers.identity import Identity
from peers.node import Peer, PeerOptions
from peers.p2pd import Role
from tests.processes import ProcessPool

_MARK = "PEERS_TEST_SESSION"
_END_S = 8.0  # p2pd ends by itself within seconds when its parent was killed

StartPeer = Callable[..., Awaitable[Peer]]
StartDaemon = Callable[..., Awaitable[Daemon]]


@pytest.fixture(scope="session", autouse=True)
def _mark_processes() -> Iterator[None]:
    """Processes that tests start inherit this, so that orphans among them can be told from other people's."""
    os.environ[_MARK] = str(os.getpid())
    # a shell's background ignores these, and so would all that tests start
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)  # two test processes share two cores
    yield
    del os.environ[_MARK]


@pytest.fixture(autouse=True)
def nothing_left(_mark_processes: None) -> Iterator[None]:
    """Fails a test that leaves a child process, a p2pd or a unix socket behind."""
    before = _processes()
    yield
    left = [process for process in _processes() if process not in before]
    alive = wait_gone(left, _END_S)
    words = [_words(process) for process in alive]
    for process in alive:
        process.kill()
    wait_gone(alive, _END_S)
    sockets = sorted(path.name for path in Path("/tmp").glob(f"hivemind-gasloc-{os.getpid()}-*"))
    for name in sockets:
        (Path("/tmp") / name).unlink(missing_ok=True)
    assert not words, f"processes left behind: {words}"
    assert not sockets, f"sockets left behind: {sockets}"


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[ProcessPool]:
    """Real gasloc processes; fails a test that leaves one of them, its p2pd or a socket behind."""
    pool = ProcessPool(tmp_path)
    try:
        yield pool
        pool.check_nothing_left()
    finally:
        pool.close()


@pytest.fixture
async def start_peer(tmp_path: Path) -> AsyncIterator[StartPeer]:
    """Starts peers on 127.0.0.1: `await start_peer(name, *addresses, **options)`; closes them at the end."""
    async with AsyncExitStack() as stack:

        async def start(
            name: str, *initial_peers: str, port: int = 0, client_only: bool = False, patience_s: float = 5.0
        ) -> Peer:
            peer = await Peer.start(
                PeerOptions(
                    identity_path=tmp_path / f"{name}.key",
                    host="127.0.0.1",
                    port=port,
                    initial_peers=initial_peers,
                    client_only=client_only,
                    patience_s=patience_s,
                )
            )
            stack.push_async_callback(peer.close)
            return peer

        yield start


@pytest.fixture
async def start_daemon(tmp_path: Path) -> AsyncIterator[StartDaemon]:
    """Starts p2pd on 127.0.0.1: `await start_daemon(name, **options)`; closes them all at the end."""
    async with AsyncExitStack() as stack:

        async def start(
            name: str, *, port: int = 0, announce: tuple[str, ...] = (), client_only: bool = False
        ) -> Daemon:
            identity = Identity.load_or_create(tmp_path / f"{name}.key")
            role = Role.CLIENT if client_only else Role.MEMBER
            daemon = await Daemon.start(identity, host="127.0.0.1", port=port, announce=announce, role=role)
            stack.push_async_callback(daemon.close)
            return daemon

        yield start


def wait_gone(processes: list[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Waits until they have ended; returns those that have not. A zombie has: nobody may be there to reap it."""
    deadline = time.monotonic() + timeout_s
    while (alive := [process for process in processes if _runs(process)]) and time.monotonic() < deadline:
        time.sleep(0.02)  # the system has no event for the end of a process that is not our child
    return alive


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _processes() -> list[psutil.Process]:
    """Our children, and every p2pd that a process of this test session started, orphans included."""
    found = psutil.Process().children(recursive=True)
    for process in psutil.process_iter():
        try:
            if process.name() == "p2pd" and process.environ().get(_MARK) == str(os.getpid()):
                found.append(process)
        except psutil.Error:
            continue
    return list(dict.fromkeys(found))


def _words(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:200]}"
    except psutil.Error:
        return str(process.pid)
