"""A newcomer's download: whole and exact from one or several donors, whatever becomes of them, or all reasons."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from copy import deepcopy
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peers.caps import PIECE_BYTES
from peers.donor import STATE_PROTOCOL, RunCard, Snapshot
from peers.download import Progress
from peers.errors import NoDonorError
from peers.manifest import CHUNK_BYTES, prepare
from peers.membership import MemberState, Status
from peers.meter import Meter
from peers.node import Peer, PeerOptions
from peers.pipes import Fault, FaultKind, PipeNetwork
from peers.table import Entry, encode_table
from peers.wire import Kind, Wire
from tests.donors import (
    CARD,
    CHUNKS,
    FLOATS,
    STATE_BYTES,
    assert_same,
    donor,
    fetch,
    header,
    play,
    snapshot,
    speaks,
)

FAULTS = [FaultKind.CUT, FaultKind.GARBLE, FaultKind.STALL]
FRAMES = 1.001
"""What frames and headers add at most to the bytes of a state of this size."""
HALF = STATE_BYTES // 2


def chunk_dials(network: PipeNetwork, peer: str) -> int:
    """How often a donor was dialled for its state; the first time for its manifest."""
    return sum(whom == peer and protocol == STATE_PROTOCOL for _, whom, protocol in network.dialled)


def order_past_manifests(network: PipeNetwork, manifests: int, *faults: Fault) -> None:
    """A fault of the first stream of chunks, after so many that fetch manifests."""
    for _ in range(manifests):
        network.order(STATE_PROTOCOL)
    network.order(STATE_PROTOCOL, *faults)


def test_the_state_arrives_whole_and_exact() -> None:
    async def scenario(network: PipeNetwork) -> None:
        given, taken = Meter(), Meter()
        await donor(network, "A", meter=given)
        assert_same(await fetch(network, "A", meter=taken), snapshot())
        found = network.find("A")
        assert found is not None
        await found.finished()
        assert STATE_BYTES < taken.by_kind["state"].received_bytes < FRAMES * STATE_BYTES
        assert given.by_kind["state"].sent_bytes == taken.by_kind["state"].received_bytes

    play(scenario)


def test_states_without_tensors_and_of_one_number_arrive() -> None:
    async def scenario(network: PipeNetwork) -> None:
        for tensors in ({}, {"steps": torch.tensor(3)}, {"theta/": torch.zeros(0)}):
            state = Snapshot(1, {}, tensors)
            await donor(network, "A", partial(deepcopy, state))
            assert_same(await fetch(network, "A"), state)

    play(scenario)


def test_equal_donors_share_the_work() -> None:
    async def scenario(network: PipeNetwork) -> None:
        meters = {name: Meter() for name in "ABC"}
        for name, meter in meters.items():
            await donor(network, name, meter=meter)
        for _ in range(3):  # manifests; then each serves its chunks at 1 MiB/s
            network.order(STATE_PROTOCOL)
        for _ in range(3):
            network.order(STATE_PROTOCOL, Fault(FaultKind.SLOW, bytes_per_s=CHUNK_BYTES, back=True))
        taken = Meter()
        assert_same(await fetch(network, "A", "B", "C", meter=taken), snapshot())
        assert taken.by_kind["state"].received_bytes < FRAMES * STATE_BYTES
        for meter in meters.values():
            assert meter.by_kind["state"].sent_bytes > CHUNK_BYTES
        assert asyncio.get_running_loop().time() < 4.5, "6 s from one alone"

    play(scenario)


def test_a_slow_donor_is_not_waited_for_by_a_fast_one() -> None:
    async def scenario(network: PipeNetwork) -> None:
        await donor(network, "A")
        await donor(network, "B")
        network.order(STATE_PROTOCOL)
        network.order(STATE_PROTOCOL)
        network.order(STATE_PROTOCOL, Fault(FaultKind.SLOW, bytes_per_s=CHUNK_BYTES / 10, back=True))
        network.order(STATE_PROTOCOL, Fault(FaultKind.SLOW, bytes_per_s=CHUNK_BYTES, back=True))
        assert_same(await fetch(network, "A", "B"), snapshot())
        assert asyncio.get_running_loop().time() < 21.0, "the slow one alone needs 60 s"

    play(scenario)


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("at", [20, 400_000, CHUNK_BYTES + 5, HALF])
def test_chunks_of_a_donor_that_fails_come_from_its_equal(kind: FaultKind, at: int) -> None:
    """The bytes that came twice: no more than the one chunk that was on its way."""

    async def scenario(network: PipeNetwork) -> None:
        await donor(network, "A")
        await donor(network, "B")
        order_past_manifests(network, 2, Fault(kind, after_bytes=at, back=True))
        meter = Meter()
        assert_same(await fetch(network, "A", "B", meter=meter), snapshot())
        assert meter.by_kind["state"].received_bytes < FRAMES * STATE_BYTES + CHUNK_BYTES
        assert asyncio.get_running_loop().time() < 30.0

    play(scenario)


def test_a_donor_that_dies_at_half_leaves_its_verified_chunks() -> None:
    async def scenario(network: PipeNetwork) -> None:
        for name in "AB":
            await donor(network, name)
        for _ in range(2):
            network.order(STATE_PROTOCOL)
        for _ in range(2):
            network.order(STATE_PROTOCOL, Fault(FaultKind.SLOW, bytes_per_s=CHUNK_BYTES, back=True))
        meter, seen = Meter(), list[Progress]()

        def watch(progress: Progress) -> None:
            seen.append(progress)
            if progress.done_bytes >= HALF:
                network.leave("A")

        assert_same(await fetch(network, "A", "B", meter=meter, on_progress=watch), snapshot())
        assert meter.by_kind["state"].received_bytes < FRAMES * STATE_BYTES + CHUNK_BYTES
        done = [progress.done_bytes for progress in seen]
        assert done == sorted(done)
        assert done[-1] == seen[-1].total_bytes == STATE_BYTES
        assert any(progress.note.startswith("A: ") for progress in seen)
        assert any(set(progress.donors) == {"A", "B"} for progress in seen)
        assert seen[-1].round == 7

    play(scenario)


@pytest.mark.parametrize("kind", [FaultKind.CUT, FaultKind.STALL])
def test_a_broken_download_resumes_on_the_same_donor(kind: FaultKind) -> None:
    """Its state is kept meanwhile, though it has trained on."""

    async def scenario(network: PipeNetwork) -> None:
        rounds = iter((7, 8, 9))
        served = await donor(network, "A", lambda: snapshot(next(rounds)))
        order_past_manifests(network, 1, Fault(kind, after_bytes=HALF, back=True))
        meter = Meter()
        assert_same(await fetch(network, "A", meter=meter), snapshot(7))
        assert chunk_dials(network, "A") == 3
        assert meter.by_kind["state"].received_bytes < FRAMES * STATE_BYTES + CHUNK_BYTES
        assert served.shelf.kept == 1

    play(scenario)


@pytest.mark.parametrize("kind", [*FAULTS, FaultKind.REFUSE, FaultKind.SILENT])
@pytest.mark.parametrize("at", [50, HALF])
def test_where_nobody_has_the_rest_another_state_is_begun_and_it_is_told(kind: FaultKind, at: int) -> None:
    async def scenario(network: PipeNetwork) -> None:
        await donor(network, "A", lambda: snapshot(8))
        await donor(network, "B", lambda: snapshot(7))
        fault = Fault(kind, after_bytes=at, back=True)
        order_past_manifests(network, 2, fault)
        notes = []

        def watch(progress: Progress) -> None:
            notes.append(progress.note)
            if any("A" in note for note in notes[1:]):
                network.leave("A")  # it is not there to resume from

        assert_same(await fetch(network, "A", "B", on_progress=watch), snapshot(7))
        assert notes[0] == "downloading the state of round 8 from A"
        (begun,) = [note for note in notes if note.startswith("downloading the state of round 7 from B")]
        dropped = at == HALF and kind in FAULTS
        assert begun.endswith(" bytes of another state are dropped") == dropped
        assert asyncio.get_running_loop().time() < 60.0

    play(scenario)


@settings(max_examples=60)
@given(at=st.integers(0, 1500), kind=st.sampled_from(FAULTS), stream=st.integers(0, 1))
def test_a_fault_at_any_byte_is_survived_or_told(at: int, kind: FaultKind, stream: int) -> None:
    """With a small state: header, table, hashes; answer, chunk."""

    async def scenario(network: PipeNetwork) -> None:
        small = Snapshot(3, {"step": 1}, {"theta/w": torch.arange(8.0), "steps": torch.tensor([1, 2])})
        await donor(network, "A", lambda: small)
        order_past_manifests(network, stream, Fault(kind, after_bytes=at, back=True))
        if kind is FaultKind.GARBLE:
            with suppress(NoDonorError):
                assert_same(await fetch(network, "A"), small)
        else:
            assert_same(await fetch(network, "A"), small)

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
            "I: refused: its own state is unfit: the state's meta is over",
            "J: refused: its own state is unfit: the state's round",
        ):
            assert part in str(caught.value)
        with pytest.raises(NoDonorError, match="there is no donor"):
            await fetch(network)

    play(scenario)


def test_all_donors_die_in_the_middle() -> None:
    async def scenario(network: PipeNetwork) -> None:
        for name in "AB":
            await donor(network, name)

        def watch(progress: Progress) -> None:
            if progress.done_bytes >= HALF:
                network.leave("A")
                network.leave("B")

        for _ in range(2):
            network.order(STATE_PROTOCOL)
        for _ in range(2):
            network.order(STATE_PROTOCOL, Fault(FaultKind.SLOW, bytes_per_s=CHUNK_BYTES, back=True))
        with pytest.raises(NoDonorError, match="A: A refused the connection; B: B refused the connection"):
            await fetch(network, "A", "B", on_progress=watch)
        assert asyncio.get_running_loop().time() < 60.0

    play(scenario)


def test_the_highest_round_wins_and_of_equals_the_most_donors() -> None:
    async def scenario(network: PipeNetwork) -> None:
        for name, round in zip("ABCD", (7, 9, 9, 8), strict=True):
            await donor(network, name, partial(snapshot, round))
        notes = list[Progress]()
        assert (await fetch(network, *"ABCD", on_progress=notes.append)).round == 9
        assert notes[0].note == "downloading the state of round 9 from 2 donors that hold the same"

    play(scenario)


def test_where_no_two_can_be_equal_one_is_asked() -> None:
    async def scenario(network: PipeNetwork) -> None:
        shelves = [(await donor(network, name)).shelf for name in "ABC"]
        assert_same(await fetch(network, *"ABC", ask=1), snapshot())
        assert [shelf.kept for shelf in shelves] == [1, 0, 0]

    play(scenario)


def test_a_donor_that_is_busy_is_asked_again_until_it_is_free() -> None:
    async def scenario(network: PipeNetwork) -> None:
        await donor(network, "A", max_downloads=1)
        order_past_manifests(network, 1, Fault(FaultKind.SLOW, bytes_per_s=CHUNK_BYTES / 4, back=True))
        first = asyncio.create_task(fetch(network, "A"))
        await asyncio.sleep(1.0)
        assert_same(await fetch(network, "A", me="M"), snapshot())
        assert first.done()
        assert_same(await first, snapshot())
        dials = sum(who == "M" for who, _, _ in network.dialled)
        assert dials < 20, "it asks again after longer and longer pauses"

    play(scenario)


def test_a_donor_that_is_busy_for_too_long_is_given_up() -> None:
    async def scenario(network: PipeNetwork) -> None:
        await donor(network, "A", max_downloads=1)
        order_past_manifests(network, 1, Fault(FaultKind.SLOW, bytes_per_s=CHUNK_BYTES / 40, back=True))
        first = asyncio.create_task(fetch(network, "A"))
        await asyncio.sleep(1.0)
        with pytest.raises(NoDonorError, match="A: busy: 1 downloads are under way already"):
            await fetch(network, "A", me="M", busy_s=60.0)
        assert 60.0 <= asyncio.get_running_loop().time() < 75.0
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)

    play(scenario)


def test_a_newcomer_that_is_busy_elsewhere_goes_to_another() -> None:
    async def scenario(network: PipeNetwork) -> None:
        await donor(network, "A", max_downloads=1)
        await donor(network, "B", max_downloads=1)
        order_past_manifests(network, 1, Fault(FaultKind.SLOW, bytes_per_s=CHUNK_BYTES / 40, back=True))
        first = asyncio.create_task(fetch(network, "A"))
        await asyncio.sleep(1.0)
        assert_same(await fetch(network, "A", "B", me="M"), snapshot())
        assert asyncio.get_running_loop().time() < 5.0
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)

    play(scenario)


def test_a_slow_download_goes_on_as_long_as_it_moves() -> None:
    """Over what was once the limit, 600 s."""

    async def scenario(network: PipeNetwork) -> None:
        await donor(network, "A")
        order_past_manifests(network, 1, Fault(FaultKind.SLOW, bytes_per_s=STATE_BYTES / 700, back=True))
        seen = list[Progress]()
        assert_same(await fetch(network, "A", on_progress=seen.append), snapshot())
        assert asyncio.get_running_loop().time() > 650.0
        assert chunk_dials(network, "A") == 2
        assert seen[-1].bytes_per_s == pytest.approx(STATE_BYTES / 700, rel=0.02)

    play(scenario)


def test_a_cancelled_newcomer_leaves_nothing_behind() -> None:
    async def scenario(network: PipeNetwork) -> None:
        served = await donor(network, "A", max_downloads=1)
        found = network.find("A")
        assert found is not None
        for pause_s in (0.0, 0.01, 2.0):
            order_past_manifests(network, 1, Fault(FaultKind.SLOW, bytes_per_s=CHUNK_BYTES, back=True))
            download = asyncio.create_task(fetch(network, "A"))
            await asyncio.sleep(pause_s)
            download.cancel()
            with pytest.raises(asyncio.CancelledError):
                await download
            await found.finished()
            network.take_order(STATE_PROTOCOL)
            network.take_order(STATE_PROTOCOL)
        assert len(asyncio.all_tasks()) == 1
        assert_same(await fetch(network, "A"), snapshot())
        assert served.shelf.kept <= 2

    play(scenario)


def test_a_state_over_the_limit_is_refused_before_it_is_sent() -> None:
    async def scenario(network: PipeNetwork) -> None:
        await donor(network, "A")
        meter = Meter()
        with pytest.raises(NoDonorError, match=f"a state of {STATE_BYTES} bytes is over the limit of 1000"):
            await fetch(network, "A", limit_bytes=1000, meter=meter)
        assert meter.by_kind["state"].received_bytes < 2000

    play(scenario)


def row(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Entry:
    return Entry(name, shape, dtype, dtype)


TWO = encode_table([row("theta/w", (2,))])
HUGE = encode_table([row("theta/w", (2**40,))])
CONVERTED = encode_table([Entry("theta/w", (2,), torch.float32, torch.float16)])


def table(payload: bytes) -> Callable[[Wire], Awaitable[object]]:
    return lambda wire: wire.send_payload(Kind.TABLE, payload)


def block(data: bytes) -> Callable[[Wire], Awaitable[object]]:
    return lambda wire: wire.send_block(memoryview(data))


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([header(meta={}), table(TWO), block(bytes(32))], "round is not a whole number"),
        ([header(round=-1, meta={}), table(TWO), block(bytes(32))], "round is not a whole number"),
        ([header(round=1), table(TWO), block(bytes(32))], "meta is not an object"),
        ([header(round=1, meta={"x": None}), table(TWO), block(bytes(32))], "meta 'x' is neither"),
        ([header(round=1, meta={}), table(HUGE)], "is over the limit of 1073741824"),
        ([header(round=1, meta={}), table(CONVERTED)], "'theta/w' of a state does not travel as it is"),
        ([header(round=1, meta={}), table(TWO), block(bytes(64))], "a block of 64 bytes where 32 were due"),
        ([header(round=1, meta={}), lambda wire: wire.abort("out of disk")], "out of disk"),
        ([header(answer=["accept"])], r"\['accept'\]: no reason given"),
        ([header(answer="gone", reason="later\n")], "gone: later"),
        ([lambda wire: wire.send_header(Kind.PROGRESS, {})] * 301, "taking its state for too long"),
    ],
)
def test_what_is_not_a_manifest(frames: list[Callable[[Wire], Awaitable[object]]], reason: str) -> None:
    async def scenario(network: PipeNetwork) -> None:
        await network.join("A").serve(STATE_PROTOCOL, speaks(*frames))
        with pytest.raises(NoDonorError, match=reason):
            await fetch(network, "A")

    play(scenario)


def liar(of: Snapshot, spoil: Callable[[int, bytes], bytes]) -> Callable[..., Awaitable[None]]:
    """A donor that announces a state and gives chunks of its own making."""
    prepared = prepare(of)
    manifest = prepared.manifest

    async def handler(peer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire = Wire(reader, writer, "state")
        if "root" not in await wire.receive_header(Kind.HEADER):
            await header(round=manifest.round, meta=dict(manifest.meta))(wire)
            await wire.send_payload(Kind.TABLE, prepared.table)
            await wire.send_block(memoryview(manifest.hashes))
            await wire.linger(60.0)
            return
        await header()(wire)
        while True:
            request = await wire.receive_header(Kind.HEADER)
            first, count = request["first"], request["count"]
            assert isinstance(first, int)
            assert isinstance(count, int)
            for chunk in range(first, first + count):
                data = spoil(chunk, bytes(prepared.flat.read(*manifest.span(chunk))))
                for start in range(0, len(data), PIECE_BYTES):
                    await wire.send_block(memoryview(data[start : start + PIECE_BYTES]))

    return handler


def test_a_liar_is_named_and_its_equal_gives_the_rest() -> None:
    async def scenario(network: PipeNetwork) -> None:
        await network.join("A").serve(
            STATE_PROTOCOL, liar(snapshot(), lambda chunk, data: data if chunk < 1 else bytes(len(data)))
        )
        await donor(network, "B")
        for _ in range(3):
            network.order(STATE_PROTOCOL)
        network.order(STATE_PROTOCOL, Fault(FaultKind.SLOW, bytes_per_s=CHUNK_BYTES, back=True))
        notes, meter = list[Progress](), Meter()
        assert_same(await fetch(network, "A", "B", on_progress=notes.append, meter=meter), snapshot())
        assert any("A is given up: chunk " in p.note and "does not match its SHA-256" in p.note for p in notes)
        assert chunk_dials(network, "A") == 2, "it is not asked again"
        assert meter.by_kind["state"].received_bytes < FRAMES * STATE_BYTES + CHUNK_BYTES

    play(scenario)


def test_a_state_that_matches_its_hashes_and_is_not_finite_is_refused() -> None:
    """Our own donor would not give it; a liar makes hashes of what it likes."""
    state = Snapshot(9, {}, {"theta/w": torch.ones(4)})
    spoilt = Snapshot(9, {}, {"theta/w": torch.tensor([1.0, float("inf"), 1.0, 1.0])})

    hashes = hashlib.sha256(spoilt.tensors["theta/w"].numpy().tobytes()).digest()

    async def handler(peer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire = Wire(reader, writer, "state")
        if "root" not in await wire.receive_header(Kind.HEADER):
            await header(round=9, meta={})(wire)
            await wire.send_payload(Kind.TABLE, prepare(state).table)
            await wire.send_block(memoryview(hashes))
        else:
            await header()(wire)
            await wire.receive_header(Kind.HEADER)
            await wire.send_block(memoryview(spoilt.tensors["theta/w"].numpy().tobytes()))
        await wire.linger(60.0)

    async def scenario(network: PipeNetwork) -> None:
        await network.join("A").serve(STATE_PROTOCOL, handler)
        with pytest.raises(NoDonorError, match="A: tensor 'theta/w' holds NaN or infinite values"):
            await fetch(network, "A")
        await donor(network, "B")
        assert_same(await fetch(network, "A", "B"), snapshot())

    play(scenario)


def test_what_the_tests_assume() -> None:
    assert prepare(snapshot()).manifest.size_bytes == STATE_BYTES
    assert prepare(snapshot()).manifest.chunks == CHUNKS + 1
    assert snapshot().tensors["theta/w"].numel() == FLOATS


async def test_over_p2pd_a_download_goes_on_when_one_of_two_equal_donors_dies(tmp_path: Path) -> None:
    size_bytes = 16 * CHUNK_BYTES
    state = {"weights": torch.arange(size_bytes // 4, dtype=torch.float32)}
    async with AsyncExitStack() as stack:

        async def start(name: str, *initial: str) -> Peer:
            options = PeerOptions(
                identity_path=tmp_path / f"{name}.key",
                host="127.0.0.1",
                initial_peers=initial,
                serve_rate_bytes_per_s=4 * CHUNK_BYTES,  # so that it can die in the middle
            )
            peer = await Peer.start(options)
            stack.push_async_callback(peer.close)
            return peer

        first = await start("first")
        second = await start("second", first.addresses[0])
        for peer in (first, second):
            await peer.enter(CARD, lambda: Snapshot(4, {"note": "x"}, state))
            await peer.membership.publish(Status(4, MemberState.TRAINING))
        newcomer = await start("newcomer", first.addresses[0])
        await newcomer.enter(CARD, lambda: None)
        await newcomer.membership.publish(Status(0, MemberState.JOINING))
        assert await newcomer.membership.wait_for(3, 20.0) == 3
        seen = list[Progress]()

        def watch(progress: Progress) -> None:
            seen.append(progress)
            if len(progress.donors) == 2:
                second.abandon()

        got = await newcomer.fetch_state(on_progress=watch)
    assert (got.round, dict(got.meta)) == (4, {"note": "x"})
    assert torch.equal(got.tensors["weights"], state["weights"])
    assert "2 donors that hold the same" in seen[0].note
    assert any(progress.note.startswith(second.peer_id) for progress in seen), "it died in the middle"
    assert seen[-1].done_bytes == size_bytes
    assert newcomer.meter.by_kind["state"].received_bytes < FRAMES * size_bytes + CHUNK_BYTES
