"""Private runs and lists of peers: who is let in, what the others are told, and what nobody can do."""

import asyncio
import contextlib
import operator
import os
import signal
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from peers.access import (
    MAX_UNPROVEN_PER_PEER,
    OTHER_SECRET,
    PRIVATE,
    Access,
    GuardedTransport,
)
from peers.courier import Courier, Parcel
from peers.donor import Donor, RunCard, Snapshot, fetch_card
from peers.download import fetch_state
from peers.errors import (
    AccessError,
    NoDonorError,
    NotAdmittedError,
    PeersError,
    RefusedError,
    UnreachableError,
)
from peers.exchange import Answer, Layout, Offer, PeerId, Slot, Swap, layout_of
from peers.identity import peer_id_of
from peers.membership import MemberState, Status
from peers.meter import Meter
from peers.node import Peer, PeerOptions
from peers.pipes import Fault, FaultKind, PipeNetwork
from peers.stream_exchange import StreamExchange
from peers.transport import Transport
from peers.wire import Kind, Wire
from tests.processes import ProcessPool
from tests.small_recipe import write_small_recipe
from tests.virtual_time import run

SECRET = b"correct horse battery staple"
ECHO = "/test/echo/1"
A, B, C = (peer_id_of(bytes([number] * 32)) for number in (1, 2, 3))
CARD = RunCard(run="tiny-1", digest="d" * 64, document=b'{"name": "tiny"}')
STATE = {"weights": torch.arange(6.0).reshape(2, 3)}


class World:
    """Peers on pipes, each with an access of its own; B serves echoes."""

    def __init__(self) -> None:
        self.network = PipeNetwork()
        self.heard: list[bytes] = []

    def peer(self, name: PeerId, access: Access, *, meter: Meter | None = None) -> GuardedTransport:
        return GuardedTransport(self.network.join(name), access, meter=meter)

    async def settled(self) -> None:
        """Waits until B has done with every stream."""
        served = self.network.find(B)
        assert served is not None
        await served.finished()

    async def server(self, access: Access, name: PeerId = B) -> GuardedTransport:
        transport = self.peer(name, access)

        async def echo(peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.heard.append(await reader.read(100))
            writer.write(self.heard[-1])
            await writer.drain()

        await transport.serve(ECHO, echo)
        return transport


async def say(transport: Transport, peer: PeerId = B, word: bytes = b"hello") -> bytes:
    """What a peer echoes."""
    reader, writer = await transport.dial(peer, ECHO, timeout_s=5.0)
    writer.write(word)
    await writer.drain()
    try:
        return await reader.read(100)
    finally:
        writer.transport.abort()


def play(scenario: Callable[[World], Coroutine[Any, Any, None]]) -> None:
    run(scenario(World()), limit_s=120.0)


@pytest.mark.parametrize("secret", [SECRET, None])
def test_equals_talk(secret: bytes | None) -> None:
    async def scenario(world: World) -> None:
        await world.server(Access(secret))
        meter = Meter()
        assert await say(world.peer(A, Access(secret), meter=meter)) == b"hello"
        assert world.heard == [b"hello"]
        assert ("access" in meter.by_kind) == (secret is not None)

    play(scenario)


@pytest.mark.parametrize(
    ("mine", "theirs", "reason"),
    [
        (b"another secret, as long", SECRET, f"^{OTHER_SECRET}$"),
        (SECRET, b"another secret, as long", f"^{OTHER_SECRET}$"),
        (SECRET, None, "leave --secret-file out to join an open run|before it proved the secret"),
    ],
)
def test_a_dialler_with_a_secret_finds_out_at_once(mine: bytes, theirs: bytes | None, reason: str) -> None:
    async def scenario(world: World) -> None:
        server = await world.server(Access(theirs))
        with pytest.raises(UnreachableError, match=reason):
            await say(world.peer(A, Access(mine)))
        if theirs is not None:
            await world.settled()
            assert world.heard == []
            assert server.refused == {OTHER_SECRET: 1}

    play(scenario)


def test_every_conversation_without_the_secret_ends_with_one_plain_reason() -> None:
    async def scenario(world: World) -> None:
        member = world.peer(B, Access(SECRET))
        given: list[str] = []

        def provide() -> Snapshot:
            given.append("state")
            return Snapshot(3, {}, STATE)

        def expect(peer: PeerId, meta: object) -> Layout:
            given.append("parcel")
            return layout_of(STATE)

        async def answer(peer: PeerId, parcel: Parcel) -> Parcel:
            return parcel

        await Donor(member, CARD, provide).start()
        exchange = StreamExchange(member, run=CARD.run, digest=CARD.digest)
        await exchange.start()
        await Courier(member, run=CARD.run, digest=CARD.digest).serve(expect, answer)

        stranger = world.peer(A, Access())
        with pytest.raises(RefusedError, match=f"^{PRIVATE}$"):
            await fetch_card(stranger, B, timeout_s=5.0)
        with pytest.raises(NoDonorError, match=PRIVATE):
            await fetch_state(stranger, [B], run=CARD.run, digest=CARD.digest)
        with pytest.raises(RefusedError, match=f"^{PRIVATE}$"):
            await Courier(stranger, run=CARD.run, digest=CARD.digest).ask(
                B, Parcel(STATE), layout_of(STATE), patience_s=5.0
            )
        for reachable in (True, False):  # it dials; and it probes, and dials in the end
            dialled = {B} if reachable else {A}
            theirs = StreamExchange(
                stranger, run=CARD.run, digest=CARD.digest, reachable=partial(operator.contains, dialled)
            )
            slot, offers = Slot(2 - reachable), {B: Offer(STATE)}
            mine = asyncio.ensure_future(exchange.swap(slot, {A: Offer(STATE)}, timeout_s=5.0))
            swap = (await theirs.swap(slot, offers, timeout_s=5.0))[B]
            assert swap.answer is Answer.REFUSED
            assert PRIVATE in swap.reason
            assert swap.tensors is None
            assert (await mine)[A].tensors is None
        assert given == []

        friend = world.peer(C, Access(SECRET))
        assert await fetch_card(friend, B, timeout_s=5.0) == CARD
        snapshot = await fetch_state(friend, [B], run=CARD.run, digest=CARD.digest)
        assert torch.equal(snapshot.tensors["weights"], STATE["weights"])
        parcel = await Courier(friend, run=CARD.run, digest=CARD.digest).ask(
            B, Parcel(STATE), layout_of(STATE), patience_s=5.0
        )
        assert torch.equal(parcel.parcel.tensors["weights"], STATE["weights"])
        fellow = StreamExchange(friend, run=CARD.run, digest=CARD.digest)
        await fellow.start()
        slot = Slot(9)
        one, two = await asyncio.gather(
            exchange.swap(slot, {C: Offer(STATE)}, timeout_s=5.0), fellow.swap(slot, {B: Offer(STATE)}, timeout_s=5.0)
        )
        assert one[C].answer is two[B].answer is Answer.ACCEPT

    play(scenario)


def test_lists_apply_to_every_stream_out_and_in() -> None:
    async def scenario(world: World) -> None:
        await world.server(Access(denied=frozenset({A})))
        stranger = world.peer(A, Access())
        reader, writer = await stranger.dial(B, ECHO, timeout_s=5.0)
        with pytest.raises(RefusedError, match=f"^{A} is on the deny list of {B}$"):
            await Wire(reader, writer, "exchange").receive_header(Kind.HEADER)
        writer.transport.abort()
        with pytest.raises(NotAdmittedError, match=f"^{B} is on the deny list here$"):
            await say(world.peer(C, Access(denied=frozenset({B}))))
        with pytest.raises(NotAdmittedError, match=f"^{B} is not on the allow list here$"):
            await say(world.peer(C, Access(allowed=frozenset({A}))))
        assert world.network.dialled == [(A, B, ECHO)], "those that we do not deal with are not even dialled"
        assert await say(world.peer(C, Access(allowed=frozenset({B})))) == b"hello"
        await world.server(Access(SECRET, allowed=frozenset({A}), denied=frozenset({A})))
        for who in (A, C):
            with pytest.raises(NotAdmittedError, match=f"^{who} is (not )?on the .* list of {B}$"):
                await say(world.peer(who, Access(SECRET)))
        assert world.heard == [b"hello"]

    play(scenario)


def test_a_recorded_conversation_opens_nothing_a_second_time() -> None:
    async def scenario(world: World) -> None:
        await world.server(Access(SECRET))
        access = Access(SECRET)
        raw = world.network.join(A)
        reader, writer = await raw.dial(B, ECHO, timeout_s=5.0)
        wire = Wire(reader, writer, "test")
        nonce = bytes(32)
        await wire.send_header(Kind.HEADER, {"access": 1, "nonce": nonce.hex()})
        theirs = bytes.fromhex(str((await wire.receive_header(Kind.HEADER))["nonce"]))
        answer = access.proof("dialler", ECHO, A, B, nonce, theirs).hex()
        await wire.send_header(Kind.HEADER, {"proof": answer})
        writer.write(b"once")
        assert await reader.read(100) == b"once"
        wire.cut()
        for dialler in (A, C):  # the same words again, by itself and by another
            again = Wire(*await world.network.join(dialler).dial(B, ECHO, timeout_s=5.0), "test")
            await again.send_header(Kind.HEADER, {"access": 1, "nonce": nonce.hex()})
            assert (await again.receive_header(Kind.HEADER))["nonce"] != theirs.hex()
            await again.send_header(Kind.HEADER, {"proof": answer})
            with pytest.raises(RefusedError, match=OTHER_SECRET):
                await again.receive_header(Kind.HEADER)
            again.cut()
        assert world.heard == [b"once"]

    play(scenario)


def test_a_proof_cannot_be_reflected() -> None:
    """One that has no secret opens a second stream to let its victim answer its own question."""

    async def scenario(world: World) -> None:
        victim = await world.server(Access(SECRET))
        raw = world.network.join(A)

        async def reflect(peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked = Wire(reader, writer, "test")
            back = Wire(*await raw.dial(B, ECHO, timeout_s=5.0), "test")
            await back.send_header(Kind.HEADER, await asked.receive_header(Kind.HEADER))
            await asked.send_header(Kind.HEADER, await back.receive_header(Kind.HEADER))
            with contextlib.suppress(PeersError):
                await back.send_header(Kind.HEADER, await asked.receive_header(Kind.HEADER))
            back.cut()

        await raw.serve(ECHO, reflect)
        with pytest.raises(NotAdmittedError, match=OTHER_SECRET):
            await say(victim, A)
        assert world.heard == []

    play(scenario)


def test_every_part_counts_in_a_proof() -> None:
    parts = ["dialler", ECHO, A, B, bytes(32), bytes([1]) * 32]
    other = ["acceptor", ECHO + "1", B, A, bytes([2]) * 32, bytes([3]) * 32]
    changed = [[*parts[:number], other[number], *parts[number + 1 :]] for number in range(len(parts))]

    def proof(access: Access, values: list[Any]) -> bytes:
        return access.proof(*values)

    proofs = {proof(Access(SECRET), values) for values in (parts, *changed)}
    proofs.add(proof(Access(SECRET + b"!"), parts))
    proofs.add(proof(Access(SECRET), ["diall", "er" + ECHO, *parts[2:]]))
    assert len(proofs) == 9
    assert {len(each) for each in proofs} == {32}


def test_a_silent_stranger_is_let_go_and_too_many_of_one_are_not_waited_for() -> None:
    async def scenario(world: World) -> None:
        server = await world.server(Access(SECRET))
        raw = world.network.join(A)
        streams = [await raw.dial(B, ECHO, timeout_s=5.0) for _ in range(MAX_UNPROVEN_PER_PEER + 3)]
        loop = asyncio.get_running_loop()
        began = loop.time()
        for reader, _ in streams[MAX_UNPROVEN_PER_PEER:]:
            assert await reader.read() == b""
        assert loop.time() - began < 1
        assert server.refused["too many at once"] == 3
        assert await say(world.peer(C, Access(SECRET))) == b"hello", "others are served meanwhile"
        for reader, writer in streams[:MAX_UNPROVEN_PER_PEER]:
            with pytest.raises(RefusedError, match="no proof of the secret within 5 s"):
                await Wire(reader, writer, "test").receive_header(Kind.HEADER)
        for _, writer in streams:
            writer.transport.abort()
        await world.settled()
        assert not server._unproven

    play(scenario)


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("kind", [FaultKind.CUT, FaultKind.STALL, FaultKind.GARBLE])
def test_a_broken_proof_is_an_error_in_bounded_time(kind: FaultKind, back: bool) -> None:
    async def scenario(world: World) -> None:
        await world.server(Access(SECRET))
        meter = Meter()
        client = world.peer(A, Access(SECRET), meter=meter)
        assert await say(client) == b"hello"
        proof = meter.by_kind["access"]
        length = proof.received_bytes if back else proof.sent_bytes
        for after_bytes in range(0, length, 7):
            world.heard.clear()
            world.network.order(ECHO, Fault(kind, after_bytes, back=back))
            began = asyncio.get_running_loop().time()
            with contextlib.suppress(UnreachableError, OSError, TimeoutError):
                async with asyncio.timeout(15.0):
                    assert await say(client) != b"hello"
            assert asyncio.get_running_loop().time() - began <= 15
            assert world.heard in ([], [b""])

    run(scenario(World()), limit_s=3000.0)


def test_a_badge_is_one_peer_s_in_one_run() -> None:
    access = Access(SECRET)
    badges = {access.badge(run, digest, peer) for run in "ab" for digest in ("d", "e") for peer in (A, B)}
    assert len(badges) == 8
    assert Access(SECRET + b"!").badge("a", "d", A) not in badges
    assert {len(badge) for badge in badges} == {64}
    assert Access().badge("a", "d", A) == "d"


def write(path: Path, content: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_files_are_read(tmp_path: Path) -> None:
    secret = write(tmp_path / "s", SECRET + b"\n")
    allow = write(tmp_path / "allow", f"# friends\n{A}\n\n  {B}  # Bob\r\n".encode(), 0o644)
    deny = write(tmp_path / "deny", f"{C}".encode(), 0o644)
    access = Access.load(secret_file=secret, allow_file=allow, deny_file=deny)
    nonces = bytes(32), bytes(32)
    assert access.proof("dialler", ECHO, A, B, *nonces) == Access(SECRET).proof("dialler", ECHO, A, B, *nonces)
    assert access.objection(A) is access.objection(B) is None
    assert access.objection(C) == f"{C} is on the deny list"
    assert Access.load(allow_file=allow).objection(C) == f"{C} is not on the allow list"
    assert not Access.load().private
    assert Access.load(deny_file=write(tmp_path / "none", b"# nobody\n")).objection(A) is None


@pytest.mark.parametrize(
    ("flag", "content", "mode", "reason"),
    [
        ("secret_file", SECRET, 0o640, r"secret file .*/file can be read by others \(mode 640\); type: chmod 600"),
        ("secret_file", SECRET, 0o604, "can be read by others"),
        ("secret_file", b"short\n" + b" " * 40, 0o600, "holds 5 bytes, under 16; make one: openssl rand -hex 32 > "),
        ("secret_file", b"", 0o600, "holds 0 bytes"),
        ("secret_file", b"x" * 5000, 0o600, "over the limit of 4096 bytes"),
        ("allow_file", f"{A}\nnonsense\n".encode(), 0o644, "allow file .*/file, line 2: 'nonsense' is not a peer id"),
        ("deny_file", f"\n\n{A} {B}\n".encode(), 0o644, "deny file .*/file, line 3: .* is not a peer id"),
        ("deny_file", A[:-1].encode(), 0o644, "line 1: .* is not a peer id"),
        ("deny_file", b"\xff\xfe", 0o644, "is not a text"),
        ("deny_file", b"#" * (1 << 21), 0o644, "over the limit of 1048576 bytes"),
        ("allow_file", b"# nobody\n", 0o644, "names no peer, so nobody could take part"),
    ],
)
def test_a_bad_file_is_named_with_what_to_do(tmp_path: Path, flag: str, content: bytes, mode: int, reason: str) -> None:
    path = write(tmp_path / "file", content, mode)
    with pytest.raises(AccessError, match=reason) as caught:
        Access.load(**{flag: path})
    assert "\n" not in str(caught.value)


def test_what_is_not_a_file_is_refused_and_never_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path, reason in (
        (tmp_path / "absent", "No such file"),
        (tmp_path, "Is a directory"),
        (tmp_path / "pipe", "not a regular file"),
    ):
        with pytest.raises(AccessError, match=reason):
            Access.load(secret_file=path)


async def test_a_private_swarm_of_two_and_a_third(tmp_path: Path) -> None:
    """On real p2pd: without the secret no card, no state, no exchange, no membership; with it, all."""
    write(tmp_path / "s", SECRET)
    async with AsyncExitStack() as stack:

        async def start(name: str, *initial_peers: str, secret: bool = True, deny: Path | None = None) -> Peer:
            peer = await Peer.start(
                PeerOptions(
                    identity_path=tmp_path / f"{name}.key",
                    host="127.0.0.1",
                    initial_peers=initial_peers,
                    secret_file=tmp_path / "s" if secret else None,
                    deny_file=deny,
                )
            )
            stack.push_async_callback(peer.close)
            return peer

        first = await start("first")
        await first.enter(CARD, lambda: Snapshot(4, {}, STATE))
        await first.membership.publish(Status(4, MemberState.TRAINING))
        second = await start("second", first.addresses[0])
        assert await second.fetch_card() == CARD
        await second.enter(CARD, lambda: None)
        await second.membership.publish(Status(4, MemberState.TRAINING))
        assert (await second.fetch_state()).round == 4
        await asyncio.gather(first.membership.wait_for(2, 20.0), second.membership.wait_for(2, 20.0))
        swaps = await asyncio.gather(*(trade(one, other) for one, other in ((first, second), (second, first))))
        assert [swap.answer for swap in swaps] == [Answer.ACCEPT, Answer.ACCEPT]
        assert [first.objection(member) for member in first.membership.members().values()] == [None, None]

        third = await start("third", first.addresses[0], secret=False)
        with pytest.raises(NotAdmittedError, match=f"^{PRIVATE}$"):
            await third.fetch_card()
        await third.enter(CARD, lambda: None)  # suppose that it got the card elsewhere
        await third.membership.publish(Status(900, MemberState.TRAINING))
        await third.membership.wait_for(3, 20.0)
        assert all(
            member.digest != CARD.digest for peer, member in third.membership.members().items() if peer != third.peer_id
        )
        with pytest.raises(NoDonorError):
            await third.fetch_state()
        swap = await trade(third, first)
        assert swap.answer is not Answer.ACCEPT
        assert await first.membership.wait_for(3, 20.0) == 3
        stranger = first.membership.members()[third.peer_id]
        assert first.objection(stranger) == f"{third.peer_id} publishes no proof that it knows the secret"

        wary = await start("wary", first.addresses[0], deny=write(tmp_path / "deny", second.peer_id.encode()))
        await wary.enter(await wary.fetch_card(), lambda: None)
        assert await wary.membership.wait_for(2, 20.0) >= 2
        swap = await trade(wary, second)
        assert swap.answer is Answer.UNREACHABLE
        assert swap.reason.endswith(f"{second.peer_id} is on the deny list here")


async def trade(one: Peer, other: Peer) -> Swap:
    return (await one.exchange.swap(Slot(1), {other.peer_id: Offer(STATE)}, timeout_s=10.0))[other.peer_id]


@pytest.mark.processes
@pytest.mark.timeout(200)
def test_joining_a_private_run_takes_its_secret(tmp_path: Path) -> None:
    secret, other = write(tmp_path / "s", SECRET), write(tmp_path / "other", b"another secret, as long")
    recipe = write_small_recipe(tmp_path, rounds=2000)
    local = ("--host", "127.0.0.1", "--threads", "1", "--json", "--data", tmp_path / "text.txt")
    pool = ProcessPool(tmp_path)
    try:
        first = pool.gasloc("start", "--recipe", recipe, "--dir", tmp_path / "first", "--secret-file", secret, *local)
        listening = first.event("listening", 90.0)
        address = listening["addresses"][0]
        assert listening["join"] == f"gasloc join --peers {address} --secret-file {secret}"
        without = pool.gasloc("join", "--peers", address, "--dir", tmp_path / "without", *local)
        wrong = pool.gasloc("join", "--peers", address, "--dir", tmp_path / "wrong", "--secret-file", other, *local)
        second = pool.gasloc(
            "join",
            "--peers",
            address,
            "--dir",
            tmp_path / "second",
            *local,
            environment={"GASLOC_SECRET_FILE": str(secret)},
        )
        assert without.wait(60.0) == wrong.wait(60.0) == 1
        assert without.errors == [f"gasloc: {PRIVATE}"]
        assert wrong.errors == [f"gasloc: {OTHER_SECRET}"]
        second.event("round", 90.0, lambda record: record["mixed"])
        for process in (first, second):
            process.signal(signal.SIGINT)
        assert first.wait(30.0) == second.wait(30.0) == 0
        pool.check_nothing_left()
    finally:
        pool.close()
