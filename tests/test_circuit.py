"""What a relay carries: as it states it, and as real p2pds of ours do."""

import asyncio
import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers import daemon as daemon_module
from peers.address import parse
from peers.circuit import HOP_PROTOCOL, MAX_MESSAGE_BYTES, Limit, ask_limit, read_answer
from peers.daemon import Daemon
from peers.errors import DaemonError, PeersError, ProtocolError, RefusedError, UnreachableError
from peers.identity import Identity
from peers.p2pd import RELAY_LIMIT, Plan, Role
from peers.pipes import PipeNetwork
from peers.sockets import Sockets
from tests.conftest import StartDaemon

LIBP2PS = Limit(time_s=120, data_bytes=128 * 1024)
"""Of p2pd's own relay service, which is there whatever we tell it."""
FORCED = "-forceReachabilityPublic=1"
"""Without it p2pd does not start the relay service that has our limits."""


def varint(number: int) -> bytes:
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def answer(limit: bytes | None, status: int = 100) -> bytes:
    place = field(3, field(1, 1_800_000_000) + field(2, b"\x04\x7f\x00\x00\x01"))
    return field(1, 2) + place + (field(4, limit) if limit is not None else b"") + field(5, status)


async def asked(network: PipeNetwork, message: bytes) -> Limit:
    async def relay(peer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.readexactly(3) == bytes([2, 8, 0])
        writer.write(message)

    await network.join("relay").serve(HOP_PROTOCOL, relay)
    return await ask_limit(*await network.join("me").dial("relay", HOP_PROTOCOL, timeout_s=1.0), 10.0)


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1))
def test_the_limit_is_read_out_of_the_answer(time_s: int, data_bytes: int) -> None:
    stated = answer(field(1, time_s) + field(2, data_bytes))
    assert read_answer(stated) == Limit(time_s, data_bytes)
    # fields that we do not know are stepped over, of whatever width
    assert read_answer(b"\x79" + bytes(8) + b"\x7d" + bytes(4) + stated) == Limit(time_s, data_bytes)


def test_a_relay_without_limits_states_none() -> None:
    assert read_answer(answer(None)) == read_answer(answer(b"")) == Limit(0, 0)


@given(st.binary(max_size=64))
def test_nonsense_raises_our_errors_only(message: bytes) -> None:
    with contextlib.suppress(PeersError):
        read_answer(message)


@given(st.data())
def test_an_answer_that_is_cut_is_no_answer(data: st.DataObject) -> None:
    whole = answer(field(1, 120) + field(2, 131072))
    with pytest.raises(ProtocolError):
        read_answer(whole[: data.draw(st.integers(0, len(whole) - 1))])


@pytest.mark.parametrize("message", [field(1, 2) + field(4, 7) + field(5, 100), answer(field(1, b"x"))])
def test_a_limit_that_is_not_two_numbers_is_refused(message: bytes) -> None:
    with pytest.raises(ProtocolError, match="not two numbers"):
        read_answer(message)


def test_a_relay_that_gives_no_place_says_so() -> None:
    with pytest.raises(RefusedError, match="status 200"):
        read_answer(answer(None, status=200))


async def test_a_relay_is_asked_on_a_stream() -> None:
    message = answer(field(1, 120) + field(2, 131072) + field(9, bytes(200)))
    assert await asked(PipeNetwork(), varint(len(message)) + message) == Limit(120, 131072)


@pytest.mark.parametrize("message", [b"", b"\x80", b"\x05\x08"])
async def test_a_relay_that_closes_without_an_answer_did_not_answer(message: bytes) -> None:
    with pytest.raises(UnreachableError, match="without an answer"):
        await asked(PipeNetwork(), message)


@pytest.mark.parametrize("message", [varint(MAX_MESSAGE_BYTES + 1), b"\x80\x80\x80\x80\x01"])
async def test_a_relay_does_not_fill_our_memory(message: bytes) -> None:
    with pytest.raises(ProtocolError, match="over the limit"):
        await asked(PipeNetwork(), message)


async def limit_of(asker: Daemon, relay: Daemon) -> Limit:
    await relay.connect(parse((await asker.addresses())[0]), 10.0)
    return await ask_limit(*await asker.open(relay.peer_id, HOP_PROTOCOL, 10.0), 10.0)


async def test_a_relay_of_ours_has_our_limits_each_time(start_daemon: StartDaemon, tmp_path: Path) -> None:
    asker = await start_daemon("asker")
    identity = Identity.load_or_create(tmp_path / "relay.key")
    relay = await Daemon.start(identity, host="127.0.0.1", port=0, role=Role.RELAY)
    try:
        assert await limit_of(asker, relay) == RELAY_LIMIT
        for _ in range(3):
            await relay.restart()
            assert await limit_of(asker, relay) == RELAY_LIMIT
    finally:
        await relay.close()


async def test_one_that_answers_with_libp2ps_limits_is_started_again(
    start_daemon: StartDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asker = await start_daemon("asker")
    assert await limit_of(asker, await start_daemon("member")) == LIBP2PS
    starts = lose_the_race(monkeypatch, times=2)
    identity = Identity.load_or_create(tmp_path / "relay.key")
    relay = await Daemon.start(identity, host="127.0.0.1", port=0, role=Role.RELAY)
    try:
        assert len(starts) >= 3
        assert await limit_of(asker, relay) == RELAY_LIMIT
    finally:
        await relay.close()


async def test_one_that_never_carries_enough_is_an_error_that_says_what_it_carries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon_module, "_MOST_RELAY_STARTS", 2)
    starts = lose_the_race(monkeypatch, times=2)
    identity = Identity.load_or_create(tmp_path / "relay.key")
    with pytest.raises(DaemonError, match="in 2 starts: it carries 131072 bytes and 120 s a connection"):
        await Daemon.start(identity, host="127.0.0.1", port=0, role=Role.RELAY)
    assert len(starts) == 2


def lose_the_race(monkeypatch: pytest.MonkeyPatch, *, times: int) -> list[list[str]]:
    """The next relays' own services will not be there; returns the command lines of all that were started."""
    starts: list[list[str]] = []
    command = Plan.command

    def worse(plan: Plan, identity: Identity, sockets: Sockets) -> list[str]:
        words = command(plan, identity, sockets)
        if FORCED not in words:
            return words
        starts.append(words)
        return [word for word in words if word != FORCED] if len(starts) <= times else words

    monkeypatch.setattr(Plan, "command", worse)
    return starts
