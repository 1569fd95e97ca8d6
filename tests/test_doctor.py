"""`gasloc doctor`: what it says of what it found, and what it finds of real peers."""

import asyncio
import json
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gasloc import cli, diagnosis
from gasloc.diagnosis import Line
from gasloc.first_look import first_look
from peers.address import parse
from peers.checks import TIME_PROTOCOL, Contact, Look, LookOptions, ask_time, look
from peers.dialback import Dialback, DialbackLimit, certificate_id, judge, listener_id, read_answer
from peers.errors import IdentityError, ProtocolError, UnreachableError
from peers.identity import peer_id_of
from peers.libp2p import Libp2pTransport
from peers.node import Peer, PeerOptions, RunCard, Snapshot
from peers.p2pd import Role, to_binary
from peers.reachability import Standing, can_trade, dialable, tradable
from peers.wire import Kind, Wire
from tests.conftest import StartDaemon, StartPeer
from tests.test_cli import free_port

ME = peer_id_of(bytes(range(32)))
OTHER = peer_id_of(bytes(32))
LAN = f"/ip4/10.0.0.2/tcp/4001/p2p/{ME}"
LOOPBACK = f"/ip4/127.0.0.1/tcp/4001/p2p/{ME}"


def contact(*, ahead_s: float | None = 0.0, reason: str = "") -> Contact:
    return Contact(LAN, OTHER, reason, ahead_s)


def test_a_line_says_ok_or_fail_and_what_to_do() -> None:
    assert str(Line("port", True, "4001 is free")) == "ok    port        4001 is free"
    assert str(Line("disk", False, "full", "make room")) == "FAIL  disk        full: make room"
    assert Line("disk", False, "full", "make room").as_record() == {
        "check": "disk",
        "ok": False,
        "text": "full",
        "todo": "make room",
    }


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=9))
def test_the_clock_fails_by_the_median_of_the_offsets(offsets_s: list[float]) -> None:
    line = diagnosis.clock_line(Look(tuple(contact(ahead_s=offset_s) for offset_s in offsets_s)))
    assert line is not None
    median_s = sorted(offsets_s)[len(offsets_s) // 2]
    assert line.ok == (abs(median_s) <= diagnosis.CLOCK_TOLERANCE_S)
    assert line.ok or ("behind" in line.text) == (median_s > 0)


def test_a_clock_is_not_judged_by_who_does_not_tell_or_answer() -> None:
    assert diagnosis.clock_line(Look((contact(ahead_s=None), contact(ahead_s=99.0, reason="silent")))) is None


def test_memory_and_disk_are_compared_with_the_need() -> None:
    assert diagnosis.memory_line(2**30, 2**29).ok
    assert not diagnosis.memory_line(2**29, 2**30).ok
    assert diagnosis.memory_line(None, 2**30).ok
    assert diagnosis.memory_line(2**30, None).ok
    assert diagnosis.disk_line("/x", 2**30, 2**29).ok
    failed = diagnosis.disk_line("/x", 2**29, 2**30)
    assert (failed.ok, failed.todo) == (False, "make room, or choose another --dir")


def test_loopback_only_is_said_and_no_address_at_all_fails() -> None:
    assert "use --host 0.0.0.0" in diagnosis.address_lines([LOOPBACK])[-1].text
    assert len(diagnosis.address_lines([LAN, LOOPBACK])) == 2
    assert not diagnosis.address_lines([])[0].ok


@pytest.mark.parametrize(
    ("addresses", "observed", "reasons", "expected"),
    [
        ([LAN], ("10.0.0.2",), {LAN: ""}, True),
        ([LAN], ("10.0.0.2",), {LAN: "connection refused"}, False),
        ([LAN], ("10.9.9.9",), {LAN: "this peer is seen at 10.9.9.9"}, None),
        ([LOOPBACK], ("10.0.0.2",), {LOOPBACK: "this peer is seen at 10.0.0.2"}, False),
        ([LOOPBACK], ("127.0.0.1",), {LOOPBACK: ""}, True),
        ([LAN, LOOPBACK], ("10.0.0.2",), {LAN: "silent for 3 s", LOOPBACK: "seen elsewhere"}, False),
        ([LAN], (), {LAN: "this peer is seen at no IP"}, None),
    ],
)
def test_who_can_be_dialled(
    addresses: list[str], observed: tuple[str, ...], reasons: Mapping[str, str], expected: bool | None
) -> None:
    can, reason = dialable(addresses, Dialback(observed, reasons))
    assert can is expected
    assert reason
    assert diagnosis.dialback_line(Look((), None, tuple(addresses), Dialback(observed, reasons))).ok == bool(expected)


def test_nobody_tried_is_not_a_failure() -> None:
    assert dialable([LAN], None)[0] is None
    assert diagnosis.dialback_line(Look(addresses=(LAN,), dialback_refusal="busy")).ok


standings = st.builds(Standing, st.booleans(), st.booleans())


@given(standings, standings)
def test_trading_is_symmetric_and_needs_one_that_can_be_dialled_or_two_relayed(one: Standing, two: Standing) -> None:
    possible, reason = can_trade(one, two)
    assert can_trade(two, one) == (possible, reason)
    assert possible == (one.direct or two.direct or (one.relayed and two.relayed))


@given(standings, st.dictionaries(st.text(min_size=1, max_size=4), standings))
def test_members_are_parted_into_those_to_trade_with_and_reasons(me: Standing, others: dict[str, Standing]) -> None:
    can, why_not = tradable(me, others)
    assert can | why_not.keys() == others.keys()
    assert not can & why_not.keys()
    assert not (me.direct and why_not)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (LAN, ""),
        (f"/ip4/10.0.0.3/tcp/4001/p2p/{ME}", "seen at 10.0.0.2"),
        (f"/ip4/10.0.0.2/tcp/4001/p2p/{OTHER}", "another peer's"),
        (f"/dns4/victim.example/tcp/80/p2p/{ME}", "a name"),
        (f"/ip4/10.0.0.2/udp/4001/quic-v1/p2p/{ME}", "/udp"),
        (f"/ip4/10.0.0.2/tcp/1/p2p/{OTHER}/p2p-circuit/p2p/{ME}", "at a relay"),
    ],
)
def test_an_asker_has_only_itself_dialled(text: str, reason: str) -> None:
    said = judge(parse(text), ME, {"10.0.0.2"})
    assert (reason in said) if reason else said == ""


@given(st.lists(st.tuples(st.floats(0, 200), st.sampled_from(["10.0.0.1", "10.0.0.2"])), max_size=200))
def test_dialling_is_rationed_for_each_and_for_all(asked: list[tuple[float, str]]) -> None:
    limit = DialbackLimit()
    granted = [(at, ip) for at, ip in sorted(asked) if not limit.refusal(ip, at)]
    for end, _ in granted:
        within = [ip for at, ip in granted if end - 60 < at <= end]
        assert len(within) <= 60
        assert max(within.count(ip) for ip in within) <= 6
    assert bool(granted) == bool(asked)


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=9,
)


@given(st.dictionaries(st.sampled_from(["observed", "results", "x"]), json_values))
def test_any_answer_is_read_or_refused(value: dict[str, object]) -> None:
    try:
        found = read_answer(value)
    except ProtocolError:
        return
    assert all(isinstance(reason, str) for reason in found.reasons.values())


@given(st.binary(max_size=400))
def test_any_certificate_is_read_or_refused(certificate: bytes) -> None:
    assert certificate_id(certificate) is None


def test_a_relays_address_is_written_as_p2pd_reads_it() -> None:
    raw = to_binary(f"/ip4/10.0.0.2/tcp/1/p2p/{ME}/p2p-circuit")
    assert raw.hex().startswith("040a000002060001a50326002408011220")
    assert raw.endswith(bytes(range(32)) + bytes.fromhex("a202"))


@pytest.fixture
async def swarm_of_one(start_peer: StartPeer) -> Peer:
    """A peer that is in a run."""
    peer = await start_peer("first")
    await peer.enter(RunCard("tiny-1", "d" * 64, b"{}"), no_state)
    return peer


def no_state() -> Snapshot | None:
    return None


async def test_a_look_finds_answers_clock_card_and_dials_back(swarm_of_one: Peer, start_peer: StartPeer) -> None:
    dead = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{OTHER}"
    wrong = swarm_of_one.addresses[0].replace(swarm_of_one.peer_id, OTHER)
    addresses = (dead, wrong, swarm_of_one.addresses[0])
    started = time.monotonic()
    seen = await look(LookOptions(addresses, "127.0.0.1", free_port(), own_id=ME, ask_card=True))
    assert time.monotonic() - started < 20
    reasons = ["connection refused", f"answers with another id: {swarm_of_one.peer_id}", ""]
    assert [one.reason for one in seen.contacts] == reasons
    (answering,) = seen.answering
    assert answering.clock_ahead_s is not None
    assert abs(answering.clock_ahead_s) < 1.0
    assert seen.taken is False
    assert seen.dialback is not None
    assert seen.dialback.dialled
    assert seen.dialback.observed == ("127.0.0.1",)
    assert seen.card is not None
    assert seen.card.run == "tiny-1"


async def test_an_identity_that_runs_elsewhere_is_found_and_one_that_crashed_is_not(
    swarm_of_one: Peer, start_peer: StartPeer, tmp_path: Path
) -> None:
    second = await start_peer("second", swarm_of_one.addresses[0])
    options = LookOptions((swarm_of_one.addresses[0],), "127.0.0.1", 0, own_id=second.peer_id)
    assert (await look(options)).taken is True
    copy = tmp_path / "copy.key"
    copy.write_bytes((tmp_path / "second.key").read_bytes())
    copy.chmod(0o600)
    joining = PeerOptions(copy, host="127.0.0.1", initial_peers=(swarm_of_one.addresses[0],))
    with pytest.raises(IdentityError, match=r"copy\.key: another running peer of this swarm has the same key"):
        await asyncio.to_thread(first_look, joining, threading.Event())
    second.abandon()
    await second._daemon.ended()
    assert (await look(options)).taken is False
    await asyncio.to_thread(first_look, joining, threading.Event())


async def test_a_listener_proves_its_id(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon("me")
    port = int((await daemon.addresses())[0].split("/")[4])
    assert await asyncio.to_thread(listener_id, "127.0.0.1", port, 3.0) == daemon.peer_id
    with pytest.raises(UnreachableError, match="connection refused"):
        await asyncio.to_thread(listener_id, "127.0.0.1", free_port(), 3.0)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400\r\n\r\n" * 3, b""])
async def test_a_listener_that_is_no_peer_is_told_from_one(answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(answer)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(UnreachableError, match="not a peer"):
            await asyncio.to_thread(listener_id, "127.0.0.1", port, 3.0)


async def test_a_clock_that_is_off_is_measured(
    start_daemon: StartDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, client = await start_daemon("server"), await start_daemon("client")
    here, there = Libp2pTransport(client), Libp2pTransport(server)
    real = time.time

    async def ahead(peer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire = Wire(reader, writer, "time")
        await wire.receive_header(Kind.HEADER)
        await wire.send_header(Kind.HEADER, {"time": real() + 60.0})
        await wire.linger(1.0)

    await there.serve(TIME_PROTOCOL, ahead)
    await client.connect(parse((await server.addresses())[0]), 5.0)
    offset_s = await ask_time(here, server.peer_id)
    assert abs(offset_s - 60.0) < 1.0
    line = diagnosis.clock_line(Look((contact(ahead_s=offset_s),)))
    assert line is not None
    assert line.text.endswith("s behind the swarm's")
    assert not line.ok
    await here.close()
    await there.close()


def test_doctor_without_a_swarm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    arguments = ["doctor", "--dir", str(tmp_path), "--host", "127.0.0.1", "--port", str(port), "--recipe", "tiny"]
    assert cli.run([*arguments, "--json"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {record["check"] for record in records} == {"recipe", "port", "p2pd", "address", "memory", "disk"}
    assert all(record["ok"] for record in records)
    assert not list(tmp_path.iterdir())
    assert not any("/tcp/0/" in record["text"] for record in records)


def test_doctor_tells_what_is_wrong_and_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "identity.key").write_bytes(b"nonsense")
    (tmp_path / "identity.key").chmod(0o600)
    dead = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{OTHER}"
    arguments = ["--dir", str(tmp_path), "--host", "127.0.0.1", "--peers", dead, "--recipe", "huge"]
    assert cli.run(["doctor", *arguments]) == 1
    failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAIL")]
    assert [line.split()[1] for line in failed] == ["recipe", "identity", "peer"]
    assert f"{dead}: connection refused: ask for" in failed[2]


async def test_a_port_in_use_is_a_failure_and_the_rest_is_looked_at(
    start_daemon: StartDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = (await (await start_daemon("me")).addresses())[0].split("/")[4]
    code = await asyncio.to_thread(cli.run, ["doctor", "--host", "127.0.0.1", "--port", taken])
    lines = capsys.readouterr().out.splitlines()
    assert code == 1
    assert next(line for line in lines if line.startswith("FAIL")).split()[1] == "port"
    assert any(line.startswith("ok    p2pd") for line in lines)


async def test_a_visitor_and_a_hidden_peer_hold_nothing(tmp_path: Path, start_peer: StartPeer) -> None:
    first = await start_peer("first")
    hidden = await Peer.start(
        PeerOptions(
            tmp_path / "hidden.key",
            host="127.0.0.1",
            initial_peers=(first.addresses[0],),
            undialable="a firewall",
        )
    )
    try:
        assert hidden.warnings == ["others cannot dial this peer, so it dials them: a firewall"]
        assert not hidden.reachable
        assert hidden.standing == Standing(direct=False, relayed=False)
        assert not first._dht.knows(hidden.peer_id)
        assert hidden._dht.knows(first.peer_id)
    finally:
        await hidden.close()


def test_roles_of_a_peer() -> None:
    assert PeerOptions(Path("x")).role is Role.MEMBER
    assert PeerOptions(Path("x"), undialable="because").role is Role.HIDDEN
    assert PeerOptions(Path("x"), client_only=True).role is Role.CLIENT
    assert PeerOptions(Path("x"), relay=True).role is Role.RELAY
