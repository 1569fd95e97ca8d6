"""The run card and the state: whole from somebody, or a reason from everybody."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peers.codec import encode
from peers.donor import (
    CARD_PROTOCOL,
    MAX_CARD_BYTES,
    STATE_PROTOCOL,
    Donor,
    RunCard,
    Snapshot,
    fetch_card,
    fetch_state,
)
from peers.errors import NoDonorError, ProtocolError, RefusedError, UnreachableError
from peers.meter import Meter
from peers.pipes import Fault, FaultKind, PipeNetwork
from peers.table import Entry, encode_table
from peers.wire import BLOCK_BYTES, Kind, Wire
from tests.virtual_time import run

CARD = RunCard("tiny", "d" * 64, b'{"name":"tiny"}')
FLOATS = 3 * BLOCK_BYTES // 4


def snapshot(round: int = 7) -> Snapshot:
    tensors = {
        "theta/w": torch.arange(float(FLOATS)),
        "theta/scale": torch.tensor(1.5),
        "momentum/w": torch.zeros(2, 0),
        "steps": torch.tensor([3, 4]),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "mask": torch.tensor([True, False]),
    }
    return Snapshot(round, {"step": 105, "learning_rate": 3e-3, "name": "tiny"}, tensors)


def assert_same(left: Snapshot, right: Snapshot) -> None:
    assert left.round == right.round
    assert dict(left.meta) == dict(right.meta)
    assert left.tensors.keys() == right.tensors.keys()
    for name, tensor in left.tensors.items():
        assert tensor.dtype == right.tensors[name].dtype
        assert torch.equal(tensor, right.tensors[name])


async def donor(
    network: PipeNetwork,
    peer: str,
    provide: Callable[[], Snapshot | None] = snapshot,
    *,
    card: RunCard = CARD,
    max_downloads: int = 3,
    meter: Meter | None = None,
) -> None:
    await Donor(network.join(peer), card, provide, max_downloads=max_downloads, meter=meter).start()


async def fetch(network: PipeNetwork, *donors: str, limit_bytes: int = 2**30) -> Snapshot:
    """As a newcomer N, of the run that the card describes."""
    transport = network.find("N") or network.join("N")
    state = await fetch_state(
        transport,
        donors,
        run=CARD.run,
        digest=CARD.digest,
        limit_bytes=limit_bytes,
        prefixes=("theta/", "momentum/", "steps", "half", "mask"),
    )
    assert transport.open_streams == 0
    return state


def play(scenario: Callable[[PipeNetwork], Coroutine[Any, Any, None]]) -> None:
    async def in_network() -> None:
        await scenario(PipeNetwork())

    run(in_network())


def test_the_card_arrives() -> None:
    async def scenario(network: PipeNetwork) -> None:
        for size in (0, 15, MAX_CARD_BYTES):
            card = RunCard("tiny", "d" * 64, bytes(size))
            await donor(network, "A", card=card)
            assert await fetch_card(network.join("N"), "A", timeout_s=5.0) == card

    play(scenario)
    with pytest.raises(ValueError, match="1048577 bytes, over 1048576"):
        Donor(PipeNetwork().join("A"), RunCard("r", "d", bytes(MAX_CARD_BYTES + 1)), snapshot)


def test_a_peer_that_gives_no_card() -> None:
    async def silent(peer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async def scenario(network: PipeNetwork) -> None:
        newcomer = network.join("N")
        with pytest.raises(UnreachableError, match="A refused the connection"):
            await fetch_card(newcomer, "A", timeout_s=5.0)
        await network.join("B").serve(CARD_PROTOCOL, silent)
        with pytest.raises(UnreachableError, match="B did not give its run card within 5 s"):
            await fetch_card(newcomer, "B", timeout_s=5.0)

    play(scenario)


def speaks(*frames: Callable[[Wire], Awaitable[object]]) -> Callable[..., Coroutine[Any, Any, None]]:
    """A donor that says what it is told, whatever it is asked."""

    async def handler(peer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire = Wire(reader, writer, "state")
        await wire.receive_header(Kind.HEADER)
        for send in frames:
            await send(wire)
        await wire.linger(60.0)

    return handler


def header(**fields: object) -> Callable[[Wire], Awaitable[object]]:
    return lambda wire: wire.send_header(Kind.HEADER, {"answer": "accept", "reason": ""} | fields)


@pytest.mark.parametrize(
    ("fields", "error", "reason"),
    [
        ({"answer": "busy", "reason": "later\n"}, RefusedError, "busy: later"),
        ({"answer": None}, RefusedError, "None: no reason given"),
        ({"run": "r", "digest": "d", "size_bytes": MAX_CARD_BYTES + 1}, ProtocolError, "the limit is 1048576"),
        ({"run": "r", "digest": "d", "size_bytes": -1}, ProtocolError, "the limit"),
        ({"run": "r", "digest": "d", "size_bytes": True}, ProtocolError, "the limit"),
        ({"run": "", "digest": "d", "size_bytes": 0}, ProtocolError, "'run'"),
        ({"run": "r", "size_bytes": 0}, ProtocolError, "'digest'"),
        ({"run": "r\n", "digest": "d", "size_bytes": 0}, ProtocolError, "'run'"),
    ],
)
def test_what_is_not_a_card(fields: dict[str, object], error: type[Exception], reason: str) -> None:
    async def scenario(network: PipeNetwork) -> None:
        await network.join("A").serve(CARD_PROTOCOL, speaks(header(**fields)))
        newcomer = network.join("N")
        with pytest.raises(error, match=reason):
            await fetch_card(newcomer, "A", timeout_s=5.0)
        assert newcomer.open_streams == 0

    play(scenario)


def test_the_state_arrives_whole_and_exact() -> None:
    async def scenario(network: PipeNetwork) -> None:
        meter = Meter()
        await donor(network, "A", meter=meter)
        assert_same(await fetch(network, "A"), snapshot())
        found = network.find("A")
        assert found is not None
        await found.finished()
        assert meter.by_kind["state"].sent_bytes > 4 * FLOATS

    play(scenario)


def test_the_state_is_taken_on_another_thread() -> None:
    threads = []

    def provide() -> Snapshot:
        threads.append(threading.current_thread())
        return snapshot()

    async def scenario(network: PipeNetwork) -> None:
        await donor(network, "A", provide)
        await fetch(network, "A")

    play(scenario)
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()


@pytest.mark.parametrize("kind", [FaultKind.CUT, FaultKind.GARBLE, FaultKind.STALL, FaultKind.REFUSE, FaultKind.SILENT])
@pytest.mark.parametrize("at", [50, 400, 2 * BLOCK_BYTES, 4 * FLOATS])
def test_a_donor_that_fails_is_followed_by_the_next(kind: FaultKind, at: int) -> None:
    async def scenario(network: PipeNetwork) -> None:
        await donor(network, "A", lambda: snapshot(6))
        await donor(network, "B", lambda: snapshot(7))
        network.order(STATE_PROTOCOL, Fault(kind, after_bytes=at, back=True))
        assert_same(await fetch(network, "A", "B"), snapshot(7))
        assert asyncio.get_running_loop().time() < 30.0

    play(scenario)


@given(at=st.integers(0, 900), kind=st.sampled_from([FaultKind.CUT, FaultKind.GARBLE, FaultKind.STALL]))
def test_a_fault_at_any_byte_is_noticed(at: int, kind: FaultKind) -> None:
    """The whole answer with a small state: header, table, blocks and digest."""

    async def scenario(network: PipeNetwork) -> None:
        small = Snapshot(3, {"step": 1}, {"theta/w": torch.arange(8.0), "steps": torch.tensor([1, 2])})
        await donor(network, "A", lambda: small)
        network.order(STATE_PROTOCOL, Fault(kind, after_bytes=at, back=True))
        try:
            assert_same(await fetch(network, "A"), small)
        except NoDonorError:
            assert at < 450

    play(scenario)


def test_no_donor_lists_everybody_with_a_reason() -> None:
    def fails() -> Snapshot:
        raise OSError("the disk is gone")

    async def scenario(network: PipeNetwork) -> None:
        await donor(network, "A", lambda: None)
        await donor(network, "B", card=RunCard("other", CARD.digest, b""))
        await donor(network, "C", card=RunCard(CARD.run, "e" * 64, b""))
        await donor(network, "D", fails)
        await donor(network, "E", lambda: Snapshot(1, {}, {"theta/w": torch.tensor(float("nan"))}))
        await donor(network, "F", lambda: Snapshot(1, {}, {"virus": torch.zeros(1)}))
        await donor(network, "H", lambda: Snapshot(1, {"loss": float("inf")}))
        await donor(network, "I", lambda: Snapshot(1, {"long": "x" * 70_000}))
        await donor(network, "J", lambda: Snapshot(-1))
        with pytest.raises(NoDonorError) as caught:
            await fetch(network, *"ABCDEFGHIJ")
        for part in (
            "A: refused: it has no state to give yet",
            "B: refused: run 'tiny' against 'other'",
            "C: refused: digest 'dddd",
            "D: refused: it failed to give its state",
            "E: refused: its own state is unfit: tensor 'theta/w' holds NaN",
            "F: tensor 'virus' does not belong to a state",
            "G: G refused the connection",
            "H: refused: its own state is unfit: the state's meta 'loss' is neither",
            "I: refused: its own state is unfit: a state's meta of 70",
            "J: refused: its own state is unfit: the state's round",
        ):
            assert part in str(caught.value)
        with pytest.raises(NoDonorError, match="there is no donor"):
            await fetch(network)

    play(scenario)


def test_a_donor_that_is_busy_says_so() -> None:
    async def scenario(network: PipeNetwork) -> None:
        await donor(network, "A", max_downloads=1)
        network.order(STATE_PROTOCOL, Fault(FaultKind.STALL, after_bytes=BLOCK_BYTES, back=True))
        stalled = asyncio.create_task(fetch(network, "A"))
        await asyncio.sleep(1.0)
        with pytest.raises(NoDonorError, match="A: busy: 1 downloads are under way already"):
            await fetch_state(network.join("M"), ["A"], run=CARD.run, digest=CARD.digest)
        with pytest.raises(NoDonorError, match="no progress"):
            await stalled
        found = network.find("A")
        assert found is not None
        await found.finished()
        assert_same(await fetch(network, "A"), snapshot())

    play(scenario)


def test_a_slow_download_goes_on_as_long_as_it_moves() -> None:
    async def scenario(network: PipeNetwork) -> None:
        await donor(network, "A")
        network.order(STATE_PROTOCOL, Fault(FaultKind.SLOW, bytes_per_s=4 * FLOATS / 60, back=True))
        assert_same(await fetch(network, "A"), snapshot())
        assert asyncio.get_running_loop().time() > 55.0

    play(scenario)


def test_a_state_over_the_limit_is_refused_before_it_is_sent() -> None:
    async def scenario(network: PipeNetwork) -> None:
        await donor(network, "A")
        meter = Meter()
        with pytest.raises(NoDonorError, match="over the limit of 1000"):
            await fetch_state(network.join("N"), ["A"], run=CARD.run, digest=CARD.digest, limit_bytes=1000, meter=meter)
        assert meter.by_kind["state"].received_bytes < 1000

    play(scenario)


TABLE = encode_table([Entry("theta/w", (2,), torch.float32, torch.float32)])
VALUES = encode(torch.ones(2), torch.float32)


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([header(meta={})], "round is not a whole number"),
        ([header(round=-1, meta={})], "round is not a whole number"),
        ([header(round=1)], "meta is not an object"),
        ([header(round=1, meta={"x": None})], "meta 'x' is neither"),
        ([header(round=1, meta={"x": True})], "meta 'x' is neither"),
        (
            [
                header(round=1, meta={}),
                lambda wire: wire.send_payload(Kind.TABLE, TABLE),
                lambda wire: wire.send_block(VALUES),
                lambda wire: wire.send_header(Kind.DONE, {"sha256": "0" * 64}),
            ],
            "does not match its SHA-256",
        ),
        (
            [
                header(round=1, meta={}),
                lambda wire: wire.send_payload(Kind.TABLE, TABLE),
                lambda wire: wire.send_block(encode(torch.tensor([1.0, float("inf")]), torch.float32)),
            ],
            "'theta/w' holds NaN or infinite",
        ),
        ([header(round=1, meta={}), lambda wire: wire.abort("out of disk")], "out of disk"),
    ],
)
def test_what_is_not_a_state(frames: list[Callable[[Wire], Awaitable[object]]], reason: str) -> None:
    async def scenario(network: PipeNetwork) -> None:
        await network.join("A").serve(STATE_PROTOCOL, speaks(*frames))
        with pytest.raises(NoDonorError, match=reason):
            await fetch(network, "A")

    play(scenario)
