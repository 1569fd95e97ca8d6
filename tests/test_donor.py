"""The run card, and what a donor gives of its state: within its caps, from states that it keeps within limits."""

import asyncio
import contextlib
import threading
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peers.caps import LEAST_RATE, PIECE_BYTES, CapError, TokenBucket
from peers.donor import (
    CARD_PROTOCOL,
    MAX_CARD_BYTES,
    MOST_CHUNKS_ASKED,
    STATE_PROTOCOL,
    Donor,
    RunCard,
    Snapshot,
    asked,
    fetch_card,
)
from peers.errors import NoDonorError, PeersError, ProtocolError, RefusedError, UnreachableError
from peers.manifest import CHUNK_BYTES
from peers.pipes import Fault, FaultKind, PipeNetwork
from peers.shelf import Choice, Shelf, ShelfLimits, Standing, choose
from peers.wire import Kind, Wire
from tests.donors import CARD, STATE_BYTES, assert_same, donor, fetch, header, play, snapshot, speaks
from tests.virtual_time import run


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


def test_newcomers_that_come_together_share_one_state() -> None:
    taken = []

    def provide() -> Snapshot:
        taken.append(1)
        return snapshot()

    async def scenario(network: PipeNetwork) -> None:
        served = await donor(network, "A", provide)
        states = await asyncio.gather(*(fetch(network, "A", me=me) for me in "KLM"))
        for state in states:
            assert_same(state, snapshot())
        assert served.shelf.kept == len(taken) == 1

    play(scenario)


def test_a_cap_on_bandwidth_is_kept_to_and_shared() -> None:
    rate = STATE_BYTES // 20

    async def scenario(network: PipeNetwork) -> None:
        await donor(network, "A", rate_bytes_per_s=rate)
        loop = asyncio.get_running_loop()
        assert_same(await fetch(network, "A"), snapshot())
        alone_s = loop.time()
        assert 19.5 < alone_s < 20.5
        for state in await asyncio.gather(*(fetch(network, "A", me=me) for me in "LM")):
            assert_same(state, snapshot())
        assert 39.0 < loop.time() - alone_s < 41.0

    play(scenario)


def test_at_the_least_rate_three_at_once_are_not_taken_for_dead() -> None:
    async def scenario(network: PipeNetwork) -> None:
        await donor(network, "A", rate_bytes_per_s=LEAST_RATE)
        for state in await asyncio.gather(*(fetch(network, "A", me=me) for me in "LMN")):
            assert_same(state, snapshot())
        expected_s = 3 * STATE_BYTES / LEAST_RATE
        assert expected_s - 5 < asyncio.get_running_loop().time() < expected_s + 5
        assert len(network.dialled) == 6, "no stream was ever opened twice"

    play(scenario)


@given(
    rate=st.integers(LEAST_RATE, 10**9),
    takes=st.lists(st.tuples(st.integers(1, PIECE_BYTES), st.floats(0.0, 2.0)), max_size=60),
)
def test_a_bucket_never_gives_more_than_its_rate(rate: int, takes: list[tuple[int, float]]) -> None:
    """Over every span that begins with a send: burst + rate * t, to rounding."""
    now, bucket = 100.0, TokenBucket(rate, 100.0)
    sends = []
    for size_bytes, pause_s in takes:
        now += pause_s
        now += bucket.take(size_bytes, now)
        sends.append((now, size_bytes))
    for first, (begun, _) in enumerate(sends):
        total_bytes = 0
        for at, size_bytes in sends[first:]:
            total_bytes += size_bytes
            assert total_bytes <= (bucket.burst_bytes + rate * (at - begun)) * (1 + 1e-6) + 1


def test_a_bucket_without_a_rate_and_rates_that_cannot_work() -> None:
    bucket = TokenBucket(0, 0.0)
    assert [bucket.take(10**9, 0.0) for _ in range(3)] == [0.0, 0.0, 0.0]
    for rate in (-1, 1, LEAST_RATE - 1):
        with pytest.raises(CapError, match="give more, or 0 for no limit"):
            TokenBucket(rate, 0.0)
        with pytest.raises(CapError):
            Donor(PipeNetwork().join("A"), CARD, snapshot, rate_bytes_per_s=rate)


LIMITS = ShelfLimits(most=2, fresh_s=5.0, share_s=60.0, idle_s=45.0, life_s=1000.0)


@pytest.mark.parametrize(
    ("kept", "choice"),
    [
        ([], Choice.TAKE),
        ([Standing(4.9, 0.0, True)], Choice.SHARE),
        ([Standing(5.0, 0.0, True)], Choice.TAKE),
        ([Standing(4.9, 0.0, True, recent=False)], Choice.TAKE),
        ([Standing(0.9, 0.0, True, recent=False)], Choice.SHARE),
        ([Standing(500.0, 0.0, True), Standing(59.0, 0.0, True, recent=False)], Choice.FULL),
        ([Standing(500.0, 40.0, False, recent=False), Standing(59.0, 0.0, True, recent=False)], Choice.REPLACE),
        ([Standing(500.0, 0.0, True), Standing(59.0, 0.0, True)], Choice.SHARE),
        ([Standing(500.0, 0.0, True), Standing(60.0, 0.0, True)], Choice.FULL),
        ([Standing(500.0, 0.0, True), Standing(60.0, 40.0, False)], Choice.REPLACE),
    ],
)
def test_whether_a_state_is_shared_or_taken_anew(kept: list[Standing], choice: Choice) -> None:
    assert choose(kept, LIMITS) is choice


@given(st.lists(st.builds(Standing, st.floats(0, 1e4), st.floats(0, 45), st.booleans()), max_size=2))
def test_a_shelf_never_takes_more_than_it_may(kept: list[Standing]) -> None:
    choice = choose(kept, LIMITS)
    assert choice is not Choice.TAKE or len(kept) < LIMITS.most
    assert choice is not Choice.REPLACE or not all(one.in_use for one in kept)
    assert choice is not Choice.SHARE or kept


def test_kept_states_are_bounded_and_freed_without_being_asked() -> None:
    alive = list[weakref.ref[torch.Tensor]]()

    def provide() -> Snapshot:
        state = snapshot(len(alive))
        alive.append(weakref.ref(state.tensors["theta/w"]))
        return state

    async def scenario() -> None:
        shelf = Shelf(provide, LIMITS)
        for _ in range(20):
            await shelf.newest()
            await asyncio.sleep(30.0)
            assert shelf.kept <= LIMITS.most
            # tensors share their memory with what is kept, through numpy
            assert sum(one() is not None for one in alive) <= LIMITS.most
        await asyncio.sleep(LIMITS.idle_s * 2)
        assert shelf.kept == 0
        assert all(one() is None for one in alive)

    run(scenario())
    assert len(alive) > 5


def test_a_state_in_use_is_kept_and_past_its_life_it_is_not_given() -> None:
    async def scenario() -> None:
        shelf = Shelf(snapshot, LIMITS)
        prepared = await shelf.newest()
        assert not isinstance(prepared, tuple)
        with shelf.held(prepared):
            await asyncio.sleep(900.0)
            assert shelf.find(prepared.manifest.root) is prepared
            await asyncio.sleep(200.0)
            assert shelf.find(prepared.manifest.root) is None
        await asyncio.sleep(60.0)
        assert shelf.kept == 0

    run(scenario())


def test_with_all_places_taken_by_slow_downloads_a_newcomer_is_told_busy() -> None:
    async def scenario(network: PipeNetwork) -> None:
        rounds = iter(range(9))
        await donor(network, "A", lambda: snapshot(next(rounds)), max_downloads=9)
        slow = []
        for me in "KL":
            network.order(STATE_PROTOCOL)
            network.order(STATE_PROTOCOL, Fault(FaultKind.SLOW, bytes_per_s=CHUNK_BYTES / 50, back=True))
            slow.append(asyncio.create_task(fetch(network, "A", me=me)))
            await asyncio.sleep(70.0)
        with pytest.raises(NoDonorError, match="A: busy: 2 states are being downloaded from it already"):
            await fetch(network, "A", busy_s=5.0)
        assert [state.round for state in await asyncio.gather(*slow)] == [0, 1]
        assert (await fetch(network, "A")).round == 2

    play(scenario)


async def begin(network: PipeNetwork, me: str, root: str) -> Wire:
    transport = network.find(me) or network.join(me)
    reader, writer = await transport.dial("A", STATE_PROTOCOL, timeout_s=1.0)
    wire = Wire(reader, writer, "state")
    await wire.send_header(Kind.HEADER, {"run": CARD.run, "digest": CARD.digest, "root": root})
    return wire


def test_places_are_counted_by_newcomer_and_freed() -> None:
    async def scenario(network: PipeNetwork) -> None:
        served = await donor(network, "A", max_downloads=2)
        found = await served.shelf.newest()
        assert not isinstance(found, tuple)
        root = found.manifest.root
        wires = []
        for me, answer in (("K", "accept"), ("K", "accept"), ("K", "busy"), ("L", "accept"), ("M", "busy")):
            wires.append(await begin(network, me, root))
            assert (await wires[-1].receive_header(Kind.HEADER))["answer"] == answer
        await wires[3].send_header(Kind.DONE, {})
        wires[4].cut()
        await asyncio.sleep(0.1)
        wires.append(await begin(network, "M", root))
        assert (await wires[-1].receive_header(Kind.HEADER))["answer"] == "accept"
        gone = await begin(network, "K", "0" * 64)
        assert (await gone.receive_header(Kind.HEADER))["answer"] == "busy"
        for wire in [*wires, gone]:
            wire.cut()
        transport = network.find("A")
        assert transport is not None
        await transport.finished()
        gone = await begin(network, "K", "0" * 64)
        assert (await gone.receive_header(Kind.HEADER))["answer"] == "gone"
        gone.cut()

    play(scenario)


@pytest.mark.parametrize("silent", [True, False])
def test_a_newcomer_that_never_asks_is_let_go(silent: bool) -> None:
    """Also one that sends signs of life for ever."""

    async def scenario(network: PipeNetwork) -> None:
        served = await donor(network, "A", max_downloads=1)
        found = await served.shelf.newest()
        assert not isinstance(found, tuple)
        wire = await begin(network, "K", found.manifest.root)
        await wire.receive_header(Kind.HEADER)
        ended = asyncio.create_task(wire.ended())
        while not ended.done():
            await asyncio.sleep(2.0)
            if not silent:
                with contextlib.suppress(PeersError):
                    await wire.send_header(Kind.PROGRESS, {})
        assert asyncio.get_running_loop().time() < (15.0 if silent else 700.0)
        wire.cut()
        assert_same(await fetch(network, "A"), snapshot())

    play(scenario)


@given(
    st.dictionaries(
        st.sampled_from(["first", "count"]), st.none() | st.integers(-3, 100) | st.floats() | st.booleans() | st.text()
    ),
    st.integers(0, 99),
)
def test_no_request_reaches_past_the_state(request: dict[str, object], chunks: int) -> None:
    try:
        found = asked(request, chunks)
    except ProtocolError:
        return
    assert 0 < len(found) <= MOST_CHUNKS_ASKED
    assert 0 <= found.start < found.stop <= chunks
