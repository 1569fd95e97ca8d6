"""`StreamExchange` when streams break, stall and lie, and when peers see each other differently."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peers.codec import CodecName, encode
from peers.errors import DaemonError
from peers.exchange import Answer, Offer, PeerId, Slot, Swap, Tensors
from peers.hello import Hello, Reply
from peers.meter import Meter
from peers.pipes import Fault, FaultKind, PipeNetwork, PipeTransport
from peers.rendezvous import MAX_HELD_PER_PEER
from peers.stream_exchange import EXCHANGE_PROTOCOL, PROBE_PROTOCOL, StreamExchange
from peers.table import Entry, encode_table
from peers.wire import BLOCK_BYTES, Kind, Wire
from tests.virtual_time import run

BLOCKS = 3
BODY_BYTES = BLOCKS * BLOCK_BYTES
GRACE_S = 20.0
STALL_S = 10.0
KINDS = [FaultKind.CUT, FaultKind.GARBLE, FaultKind.DROP, FaultKind.DUPLICATE, FaultKind.STALL]


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((BODY_BYTES // 4,), value)}


def small(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((4,), value)}


@dataclass
class Pair:
    """Two peers on one network; A dials unless told otherwise."""

    network: PipeNetwork = field(default_factory=PipeNetwork)

    async def join(
        self,
        me: PeerId,
        *,
        run: str = "r",
        digest: str = "d",
        codec: CodecName = "fp32",
        meter: Meter | None = None,
        reachable: Callable[[PeerId], bool] = lambda peer: True,
    ) -> StreamExchange:
        exchange = StreamExchange(
            self.network.join(me),
            run=run,
            digest=digest,
            codec=codec,
            meter=meter,
            reachable=reachable,
            stall_s=STALL_S,
        )
        await exchange.start()
        return exchange

    def transport(self, peer: PeerId) -> PipeTransport:
        found = self.network.find(peer)
        assert found is not None
        return found

    async def at_rest(self) -> None:
        """Waits for the handlers, and checks that no stream is left open."""
        for peer in "AB":
            await self.transport(peer).finished()
        for peer in "AB":
            assert self.transport(peer).open_streams == 0

    def dials(self) -> list[tuple[PeerId, PeerId]]:
        return [(who, whom) for who, whom, protocol in self.network.dialled if protocol == EXCHANGE_PROTOCOL]


async def trade(a: StreamExchange, b: StreamExchange, make: Callable[[float], Tensors] = weights) -> tuple[Swap, Swap]:
    """What A gets and what B gets; A sends ones, B sends twos."""
    of_a, of_b = await asyncio.gather(
        a.swap(Slot(1), {b.me: Offer(make(1.0))}, timeout_s=GRACE_S),
        b.swap(Slot(1), {a.me: Offer(make(2.0))}, timeout_s=GRACE_S),
    )
    return of_a[b.me], of_b[a.me]


async def trade_under(*faults: Fault) -> tuple[Swap, Swap]:
    """A trade over one stream with these faults, after which nothing is left."""
    pair = Pair()
    a, b = await pair.join("A"), await pair.join("B")
    pair.network.order(EXCHANGE_PROTOCOL, *faults)
    swaps = await trade(a, b)
    await pair.at_rest()
    assert len(asyncio.all_tasks()) == 1
    return swaps


def check_whole(of_a: Swap, of_b: Swap) -> None:
    """Each side has all of the other's tensors, or none."""
    for swap, value in ((of_a, 2.0), (of_b, 1.0)):
        if swap.answer is Answer.ACCEPT:
            assert swap.tensors is not None
            assert torch.equal(swap.tensors["w"], weights(value)["w"])
        else:
            assert swap.tensors is None
            assert swap.reason


def assert_both(swaps: tuple[Swap, Swap], answer: Answer) -> None:
    assert [swap.answer for swap in swaps] == [answer, answer], [swap.reason for swap in swaps]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("back", [False, True], ids=["out", "back"])
@pytest.mark.parametrize("block", [0, 1, 2])
def test_a_fault_in_any_block_leaves_both_sides_whole_old(kind: FaultKind, back: bool, block: int) -> None:
    fault = Fault(kind, after_bytes=1000 + block * BLOCK_BYTES, back=back)
    swaps = run(trade_under(fault))
    assert_both(swaps, Answer.BROKEN)
    check_whole(*swaps)
    # a link that breaks is nobody's fault; what is garbled, its sender wrote
    assert any(swap.at_fault for swap in swaps) == (kind in (FaultKind.GARBLE, FaultKind.DROP, FaultKind.DUPLICATE))
    for swap in swaps:
        assert swap.seconds <= 2 * STALL_S + 5.0


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    at=st.integers(0, 600) | st.integers(0, BODY_BYTES + 600) | st.integers(BODY_BYTES, BODY_BYTES + 600),
    back=st.booleans(),
)
def test_a_fault_at_any_byte_leaves_each_side_whole(kind: FaultKind, at: int, back: bool) -> None:
    """Hello, reply, table, blocks, acknowledgements: nobody mixes, nobody hangs, nothing is left behind."""
    swaps = run(trade_under(Fault(kind, after_bytes=at, back=back)), limit_s=GRACE_S + 3 * STALL_S)
    check_whole(*swaps)


@pytest.mark.parametrize("back", [False, True], ids=["out", "back"])
def test_a_slow_link_is_waited_for(back: bool) -> None:
    """30 s for one direction, nothing to do in the other: slow is not stalled."""
    swaps = run(trade_under(Fault(FaultKind.SLOW, bytes_per_s=BODY_BYTES / 30, back=back)))
    assert_both(swaps, Answer.ACCEPT)
    check_whole(*swaps)
    assert max(swap.seconds for swap in swaps) > 2 * STALL_S


def test_a_link_of_one_kilobyte_a_second_is_given_up() -> None:
    swaps = run(trade_under(Fault(FaultKind.SLOW, bytes_per_s=1000)))
    assert_both(swaps, Answer.BROKEN)
    assert max(swap.seconds for swap in swaps) < 4 * STALL_S


def test_a_long_way_is_no_fault() -> None:
    delay = Fault(FaultKind.DELAY, delay_s=0.4), Fault(FaultKind.DELAY, delay_s=0.4, back=True)
    swaps = run(trade_under(*delay))
    assert_both(swaps, Answer.ACCEPT)
    check_whole(*swaps)


def test_a_dial_that_is_refused_is_unreachable_at_once() -> None:
    of_a, of_b = run(trade_under(Fault(FaultKind.REFUSE)))
    assert of_a.answer is Answer.UNREACHABLE
    assert of_a.seconds < 1.0
    assert of_b.answer is Answer.PAIRED_ELSEWHERE  # its probe learns that A no longer waits
    assert of_b.seconds < 1.0


@pytest.mark.parametrize(
    ("other", "reason"),
    [(("s", "d"), "run 'r' against 's'"), (("r", "e"), "recipe digest d against e")],
    ids=["run", "recipe"],
)
def test_a_peer_of_another_run_or_recipe_is_refused_on_both_sides(other: tuple[str, str], reason: str) -> None:
    async def scenario() -> None:
        pair = Pair()
        of_a, of_b = await trade(await pair.join("A"), await pair.join("B", run=other[0], digest=other[1]))
        assert of_a.answer is Answer.REFUSED
        assert reason in of_a.reason
        assert of_b.answer is Answer.REFUSED
        await pair.at_rest()

    run(scenario())


@pytest.mark.parametrize("delays", [(0.0, 0.0), (0.3, 0.0), (0.0, 0.3)], ids=str)
def test_both_dial_and_one_stream_is_used(delays: tuple[float, float]) -> None:
    """Each thinks that only the other can be dialled."""

    async def scenario() -> None:
        pair = Pair()
        a = await pair.join("A", reachable=lambda peer: peer == "B")
        b = await pair.join("B", reachable=lambda peer: peer == "A")
        for delay_s in delays:
            pair.network.order(EXCHANGE_PROTOCOL, Fault(FaultKind.DELAY, delay_s=delay_s))
        swaps = await trade(a, b)
        assert_both(swaps, Answer.ACCEPT)
        check_whole(*swaps)
        assert sorted(pair.dials()) == [("A", "B"), ("B", "A")]
        await pair.at_rest()

    run(scenario())


def test_both_dial_and_the_only_stream_that_comes_through_is_used() -> None:
    async def scenario() -> None:
        pair = Pair()
        a = await pair.join("A", reachable=lambda peer: peer == "B")
        b = await pair.join("B", reachable=lambda peer: peer == "A")
        pair.network.order(EXCHANGE_PROTOCOL, Fault(FaultKind.SILENT))  # A's, which would go first
        swaps = await trade(a, b)
        assert_both(swaps, Answer.ACCEPT)
        await pair.at_rest()

    run(scenario())


def test_neither_dials_at_first_and_they_still_meet() -> None:
    """Each thinks that only itself can be dialled, and finds out that the other waits too."""

    async def scenario() -> None:
        pair = Pair()
        a = await pair.join("A", reachable=lambda peer: peer == "A")
        b = await pair.join("B", reachable=lambda peer: peer == "B")
        swaps = await trade(a, b)
        assert_both(swaps, Answer.ACCEPT)
        assert max(swap.seconds for swap in swaps) < 5.0
        await pair.at_rest()

    run(scenario())


views = st.sets(st.sampled_from("AB"))
moments = st.sampled_from([0.0, 0.05, 0.25, 0.3, 1.0])


@settings(max_examples=150, deadline=None)
@given(
    a_sees=views,
    b_sees=views,
    late_s=moments,
    a_is_late=st.booleans(),
    delays=st.lists(st.tuples(moments, moments), max_size=3),
)
def test_whatever_each_thinks_of_who_can_be_dialled_they_meet(
    a_sees: set[PeerId],
    b_sees: set[PeerId],
    late_s: float,
    a_is_late: bool,
    delays: list[tuple[float, float]],
) -> None:
    async def scenario() -> None:
        pair = Pair()
        a = await pair.join("A", reachable=a_sees.__contains__)
        b = await pair.join("B", reachable=b_sees.__contains__)
        for out_s, back_s in delays:
            faults = Fault(FaultKind.DELAY, delay_s=out_s), Fault(FaultKind.DELAY, delay_s=back_s, back=True)
            pair.network.order(EXCHANGE_PROTOCOL, *faults)
        early, late = (b, a) if a_is_late else (a, b)
        waiting = asyncio.create_task(early.swap(Slot(1), {late.me: Offer(small(1.0))}, timeout_s=GRACE_S))
        await asyncio.sleep(late_s)
        of_late = await late.swap(Slot(1), {early.me: Offer(small(2.0))}, timeout_s=GRACE_S)
        of_early = await waiting
        assert_both((of_early[late.me], of_late[early.me]), Answer.ACCEPT)
        await pair.at_rest()
        assert len(asyncio.all_tasks()) == 1

    run(scenario())


def test_a_partner_that_cannot_be_dialled_but_comes_is_not_given_up() -> None:
    async def scenario() -> None:
        pair = Pair()
        a = await pair.join("A", reachable=lambda peer: peer == "A")
        b = await pair.join("B", reachable=lambda peer: peer == "A")
        pair.network.order(PROBE_PROTOCOL, Fault(FaultKind.REFUSE))
        waiting = asyncio.create_task(a.swap(Slot(1), {"B": Offer(small(1.0))}, timeout_s=GRACE_S))
        await asyncio.sleep(1.0)
        of_b = await b.swap(Slot(1), {"A": Offer(small(2.0))}, timeout_s=GRACE_S)
        assert of_b["A"].answer is Answer.ACCEPT
        assert (await waiting)["B"].answer is Answer.ACCEPT

    run(scenario())


async def mute(peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A frozen peer: takes the stream and does nothing."""
    await reader.read()
    await asyncio.sleep(1000.0)


@pytest.mark.parametrize("me", ["A", "C"], ids=["dials", "is dialled"])
def test_a_frozen_partner_is_waited_for_no_longer_than_the_grace(me: PeerId) -> None:
    async def scenario() -> None:
        pair = Pair()
        frozen = pair.network.join("B")
        await frozen.serve(EXCHANGE_PROTOCOL, mute)
        await frozen.serve(PROBE_PROTOCOL, mute)
        exchange = await pair.join(me)
        swap = (await exchange.swap(Slot(1), {"B": Offer(small(1.0))}, timeout_s=GRACE_S))["B"]
        assert swap.answer is Answer.TIMEOUT
        assert swap.seconds < GRACE_S + 2.0
        assert pair.transport(me).open_streams == 0

    run(scenario())


class Stranger:
    """Speaks the protocol by hand, well or badly. Its id is lower than B's, so that it is to dial."""

    def __init__(self, pair: Pair) -> None:
        self._transport = pair.network.join("A")

    async def dial(self, protocol: str = EXCHANGE_PROTOCOL) -> Wire:
        return Wire(*await self._transport.dial("B", protocol, timeout_s=1.0), "exchange")

    async def say_hello(self, slot: Slot, *, patience_s: float = 5.0) -> Wire:
        wire = await self.dial()
        await wire.send_header(Kind.HEADER, Hello("r", "d", slot, patience_s).to_json())
        return wire


async def reply_to(wire: Wire) -> Reply:
    return Reply.from_json(await wire.receive_header(Kind.HEADER))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_liar_that_sends_no_numbers_is_refused_by_name_and_told(bad: float) -> None:
    async def scenario() -> None:
        pair = Pair()
        b = await pair.join("B")
        swapping = asyncio.create_task(b.swap(Slot(1), {"A": Offer(small(2.0))}, timeout_s=GRACE_S))
        wire = await Stranger(pair).say_hello(Slot(1))
        assert (await reply_to(wire)).answer is Answer.ACCEPT
        await wire.send_payload(Kind.TABLE, encode_table([Entry("w", (4,), torch.float32, torch.float32)]))
        await wire.send_block(encode(torch.tensor([1.0, bad, 1.0, 1.0]), torch.float32))
        await wire.receive(Kind.TABLE)
        await wire.receive(Kind.BLOCK)
        kind, payload = await wire.receive(Kind.ABORT)
        assert kind is Kind.ABORT
        assert b"'w' holds NaN or infinite values" in payload
        wire.cut()
        swap = (await swapping)["A"]
        assert swap.answer is Answer.REFUSED
        assert swap.tensors is None
        assert swap.at_fault
        assert "'w' holds NaN" in swap.reason

    run(scenario())


def test_a_liar_that_claims_to_have_received_more_than_was_sent_is_refused() -> None:
    async def scenario() -> None:
        pair = Pair()
        b = await pair.join("B")
        swapping = asyncio.create_task(b.swap(Slot(1), {"A": Offer(small(2.0))}, timeout_s=GRACE_S))
        wire = await Stranger(pair).say_hello(Slot(1))
        assert (await reply_to(wire)).answer is Answer.ACCEPT
        await wire.send_payload(Kind.TABLE, encode_table([Entry("w", (4,), torch.float32, torch.float32)]))
        await wire.send_block(memoryview(bytes(16)))
        await wire.send_header(Kind.PROGRESS, {"received_bytes": 2**60})
        assert (await swapping)["A"].answer is Answer.REFUSED
        wire.cut()

    run(scenario())


def test_a_partner_that_never_acknowledges_is_not_believed() -> None:
    async def scenario() -> None:
        pair = Pair()
        b = await pair.join("B")
        swapping = asyncio.create_task(b.swap(Slot(1), {"A": Offer(small(2.0))}, timeout_s=GRACE_S))
        wire = await Stranger(pair).say_hello(Slot(1))
        assert (await reply_to(wire)).answer is Answer.ACCEPT
        await wire.send_payload(Kind.TABLE, encode_table([Entry("w", (4,), torch.float32, torch.float32)]))
        await wire.send_block(memoryview(bytes(16)))
        swap = (await swapping)["A"]
        assert swap.answer is Answer.BROKEN
        assert swap.tensors is None
        assert "no progress for 10 s" in swap.reason
        assert not swap.at_fault
        wire.cut()

    run(scenario())


def test_a_stranger_that_says_nothing_or_nonsense_is_let_go() -> None:
    async def scenario() -> None:
        pair = Pair()
        await pair.join("B")
        stranger = Stranger(pair)
        for protocol in (EXCHANGE_PROTOCOL, PROBE_PROTOCOL):
            mute_wire, wire = await stranger.dial(protocol), await stranger.dial(protocol)
            await wire.send_header(Kind.HEADER, {"run": 7})
            reply = await reply_to(wire)
            assert reply.answer is Answer.REFUSED
            assert "'run' is not a printable text" in reply.reason
            wire.cut()
            await pair.transport("B").finished()
            mute_wire.cut()
        assert asyncio.get_running_loop().time() < 15.0
        assert pair.transport("B").open_streams == 0

    run(scenario())


def test_early_hellos_are_held_in_bounded_number_and_let_go_with_their_dialler() -> None:
    async def scenario() -> None:
        pair = Pair()
        await pair.join("B")
        stranger = Stranger(pair)
        held = [await stranger.say_hello(Slot(number)) for number in range(MAX_HELD_PER_PEER)]
        await asyncio.sleep(0.1)
        one_more = await stranger.say_hello(Slot(99))
        assert (await reply_to(one_more)).answer is Answer.BUSY
        one_more.cut()
        for wire in held:
            wire.cut()
        await pair.transport("B").finished()
        assert asyncio.get_running_loop().time() < 1.0
        patient = await stranger.say_hello(Slot(1), patience_s=3.0)
        assert (await reply_to(patient)).answer is Answer.BEHIND
        assert 3.0 <= asyncio.get_running_loop().time() < 4.0
        patient.cut()

    run(scenario())


def test_a_partner_that_dials_again_means_its_newest_stream() -> None:
    """Its first stream was lost on the way without our knowing."""

    async def scenario() -> None:
        pair = Pair()
        b = await pair.join("B", reachable=lambda peer: peer == "A")  # B dials A as well, in vain
        pair.network.order(EXCHANGE_PROTOCOL, Fault(FaultKind.SILENT))
        swapping = asyncio.create_task(b.swap(Slot(1), {"A": Offer(small(2.0))}, timeout_s=GRACE_S))
        await asyncio.sleep(0.1)
        wire = await Stranger(pair).say_hello(Slot(1))
        assert (await reply_to(wire)).answer is Answer.ACCEPT
        late = await Stranger(pair).say_hello(Slot(1))
        assert (await reply_to(late)).answer is Answer.PAIRED_ELSEWHERE
        wire.cut()
        late.cut()
        assert (await swapping)["A"].answer is Answer.BROKEN

    run(scenario())


def test_a_closed_exchange_refuses_and_lets_held_streams_go() -> None:
    async def scenario() -> None:
        pair = Pair()
        a, b = await pair.join("A"), await pair.join("B")
        waiting = asyncio.create_task(a.swap(Slot(1), {"B": Offer(small(1.0))}, timeout_s=GRACE_S))
        await asyncio.sleep(1.0)
        await b.close()
        swap = (await waiting)["B"]
        assert swap.answer is Answer.REFUSED
        assert "leaving" in swap.reason
        assert asyncio.get_running_loop().time() < 2.0
        await pair.at_rest()

    run(scenario())


@pytest.mark.parametrize("victim", ["A", "B"])
def test_cancelled_in_the_middle_of_a_transfer(victim: PeerId) -> None:
    async def scenario() -> None:
        pair = Pair()
        exchanges = {peer: await pair.join(peer) for peer in "AB"}
        pair.network.order(EXCHANGE_PROTOCOL, Fault(FaultKind.STALL, after_bytes=BLOCK_BYTES))
        tasks = {
            peer: asyncio.create_task(exchanges[peer].swap(Slot(1), {other: Offer(weights(1.0))}, timeout_s=GRACE_S))
            for peer, other in ("AB", "BA")
        }
        await asyncio.sleep(STALL_S / 2)
        tasks[victim].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks.pop(victim)
        for task in tasks.values():
            assert [swap.answer for swap in (await task).values()] == [Answer.BROKEN]
        await pair.at_rest()
        assert len(asyncio.all_tasks()) == 1

    run(scenario())


def test_one_swap_at_a_time_with_a_partner_in_a_slot() -> None:
    async def scenario() -> None:
        pair = Pair()
        a, b, c = [await pair.join(peer) for peer in "ABC"]
        first = asyncio.create_task(a.swap(Slot(1), {"B": Offer(small(1.0))}, timeout_s=GRACE_S))
        await asyncio.sleep(0.1)
        with pytest.raises(ValueError, match="with B in round 1 is under way already"):
            await a.swap(Slot(1), {"C": Offer(small(1.0)), "B": Offer(small(1.0))}, timeout_s=GRACE_S)
        assert (await c.swap(Slot(1), {"A": Offer(small(2.0))}, timeout_s=GRACE_S))["A"].answer is (
            Answer.PAIRED_ELSEWHERE
        )
        assert (await b.swap(Slot(1), {"A": Offer(small(2.0))}, timeout_s=GRACE_S))["A"].answer is Answer.ACCEPT
        assert (await first)["B"].answer is Answer.ACCEPT

    run(scenario())


class DeadDaemon(PipeTransport):
    """What dialling is like once our own p2pd has ended."""

    async def dial(
        self, peer: PeerId, protocol: str, *, timeout_s: float
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        raise DaemonError("p2pd has ended")


@pytest.mark.parametrize("partner", ["A", "C"])
def test_without_its_own_daemon_a_peer_reaches_nobody_and_goes_on(partner: PeerId) -> None:
    async def scenario() -> None:
        exchange = StreamExchange(DeadDaemon(PipeNetwork(), "B"), run="r", digest="d")
        swap = (await exchange.swap(Slot(1), {partner: Offer(small(1.0))}, timeout_s=GRACE_S))[partner]
        assert swap.answer is Answer.UNREACHABLE
        assert "p2pd has ended" in swap.reason
        assert swap.seconds < 1.0

    run(scenario())


def test_every_byte_is_metered() -> None:
    async def scenario() -> None:
        pair, meters = Pair(), (Meter(), Meter())
        of_a, of_b = await trade(await pair.join("A", meter=meters[0]), await pair.join("B", meter=meters[1]))
        for swap, meter in ((of_a, meters[0]), (of_b, meters[1])):
            assert swap.bytes_sent == meter.by_kind["exchange"].sent_bytes > BODY_BYTES
            assert swap.bytes_received == meter.by_kind["exchange"].received_bytes > BODY_BYTES
        assert (of_a.bytes_sent, of_a.bytes_received) == (of_b.bytes_received, of_b.bytes_sent)

    run(scenario())


@pytest.mark.parametrize(("codec", "share"), [("fp32", 1.0), ("fp16", 0.5), ("bf16", 0.5)])
def test_codecs_travel(codec: CodecName, share: float) -> None:
    async def scenario() -> None:
        pair = Pair()
        of_a, of_b = await trade(await pair.join("A", codec=codec), await pair.join("B", codec=codec))
        check_whole(of_a, of_b)
        assert of_a.answer is Answer.ACCEPT
        assert abs(of_a.bytes_sent - share * BODY_BYTES) < 1000

    run(scenario())
