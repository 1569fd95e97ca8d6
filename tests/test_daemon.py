"""p2pd: started, connected with plain reasons, and ended with us however we end."""

import asyncio
import os
import socket
import sys
import time
from pathlib import Path

import psutil
import pytest

from peers.address import Address, parse
from peers.daemon import Daemon
from peers.errors import AddressError, DaemonError, UnreachableError
from peers.identity import Identity
from peers.reasons import plain_reason
from tests.conftest import StartDaemon, wait_gone

CHILD = """
import asyncio, pathlib, psutil, sys
from peers.daemon import Daemon
from peers.identity import Identity

async def main():
    identity = Identity.load_or_create(pathlib.Path(sys.argv[1]))
    daemon = await Daemon.start(identity, host="127.0.0.1", port=0)
    sys.stdout.write(f"{psutil.Process().children()[0].pid}\\n")
    sys.stdout.flush()
    await daemon.ended()

asyncio.run(main())
"""


def p2pd_of_ours() -> psutil.Process:
    (child,) = psutil.Process().children()
    return child


def sockets_of(pid: int) -> list[Path]:
    return list(Path("/tmp").glob(f"hivemind-gasloc-{pid}-*"))


async def test_it_listens_under_our_identity_and_ends_without_a_trace(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    daemon = await start_daemon("a")
    (address,) = await daemon.addresses()
    assert parse(address).peer_id == daemon.peer_id == Identity.load_or_create(tmp_path / "a.key").peer_id
    assert address.startswith("/ip4/127.0.0.1/tcp/")
    assert daemon.alive()
    process = p2pd_of_ours()
    assert os.getsid(process.pid) != os.getsid(0), "Ctrl-C must not reach p2pd"
    await daemon.close()
    await daemon.close()
    assert not process.is_running()
    assert not daemon.alive()
    assert not sockets_of(os.getpid())


async def test_a_client_listens_nowhere_and_can_dial(start_daemon: StartDaemon) -> None:
    server, client = await start_daemon("server"), await start_daemon("client", client_only=True)
    assert await client.addresses() == []
    await client.connect(parse((await server.addresses())[0]), 5.0)


async def test_what_is_announced_is_told_instead_of_what_is_found(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon("a", announce=("/ip4/203.0.113.5/tcp/4001",))
    assert await daemon.addresses() == [f"/ip4/203.0.113.5/tcp/4001/p2p/{daemon.peer_id}"]


async def test_each_failure_to_connect_has_its_reason(start_daemon: StartDaemon) -> None:
    here, there = await start_daemon("here"), await start_daemon("there")
    right = parse((await there.addresses())[0])
    stranger = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
    with socket.socket() as silent, socket.socket() as closed:
        for one in (silent, closed):
            one.bind(("127.0.0.1", 0))
        silent.listen()
        ports = {name: one.getsockname()[1] for name, one in (("silent", silent), ("closed", closed))}
        for address, reason in (
            (Address(f"/ip4/127.0.0.1/tcp/{ports['closed']}", right.peer_id), "connection refused"),
            (Address(f"/ip4/127.0.0.1/tcp/{ports['silent']}", right.peer_id), "silent for 0.5 s"),
            (Address(right.maddr, stranger), f"answers with another id: {there.peer_id}"),
            (Address(right.maddr, here.peer_id), "it is this peer itself"),
            (Address("/dns4/no-such-host.invalid/tcp/1", right.peer_id), "no such host name"),
        ):
            started = time.monotonic()
            with pytest.raises(UnreachableError) as caught:
                await here.connect(address, 0.5)
            assert str(caught.value) == reason
            assert time.monotonic() - started < 2
    await here.connect(right, 5.0)
    await here.connect(right, 5.0)


async def test_a_port_in_use_is_named(start_daemon: StartDaemon) -> None:
    first = await start_daemon("first")
    port = int((await first.addresses())[0].split("/")[4])
    with pytest.raises(DaemonError, match=f"port {port} is already in use; choose another"):
        await start_daemon("second", port=port)
    await first.close()
    again = await start_daemon("second", port=port)
    assert f"/tcp/{port}/" in (await again.addresses())[0]


async def test_a_host_that_is_not_ours_is_named(tmp_path: Path) -> None:
    identity = Identity.load_or_create(tmp_path / "a.key")
    with pytest.raises(DaemonError, match=r"203\.0\.113\.5.* is not an address of this machine"):
        await Daemon.start(identity, host="203.0.113.5", port=0)
    with pytest.raises(AddressError, match="'nowhere' is not an IP address"):
        await Daemon.start(identity, host="nowhere", port=0)


async def test_once_it_has_died_every_call_says_so(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon("a")
    p2pd_of_ours().kill()
    await daemon.ended()
    assert not daemon.alive()
    with pytest.raises(DaemonError, match="p2pd has ended"):
        await daemon.addresses()


async def test_it_ends_when_we_are_killed_and_the_next_start_sweeps_up(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    killed = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CHILD, str(tmp_path / "me.key"), stdout=asyncio.subprocess.PIPE
    )
    assert killed.stdout is not None
    orphan = psutil.Process(int(await killed.stdout.readline()))
    killed.kill()
    await killed.communicate()
    assert not wait_gone([orphan], 10)
    assert not sockets_of(killed.pid), "p2pd removes its own"
    with socket.socket(socket.AF_UNIX) as forgotten:
        forgotten.bind(f"/tmp/hivemind-gasloc-{killed.pid}-0badcafe-streams.sock")
    await start_daemon("next")
    assert not sockets_of(killed.pid)
    assert sockets_of(os.getpid())


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("failed to dial X:\n * [/ip4/1.2.3.4/tcp/1] dial tcp4: connect: connection refused", "connection refused"),
        ("x: peer id mismatch: expected A, but remote key matches B\n", "answers with another id: B"),
        ("failed to dial: context deadline exceeded", "silent for 5 s"),
        ("first line\nsomething new\n", "something new"),
        ("", "no reason given"),
    ],
)
def test_reasons_in_plain_words(message: str, reason: str) -> None:
    assert plain_reason(message, 5.0) == reason
