"""Trades under the quantized codecs: bounds, bytes, blocks sent again, faults and lies."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gasloc.all_reduce import all_reduce
from gasloc.simulation.gossip import traded
from peers import compiled, modular, quantize
from peers.body import Body, NoDigest
from peers.codec import CODECS, CodecName
from peers.exchange import Answer, Offer, PeerId, Slot, Swap, Tensors, layout_of
from peers.hello import Hello
from peers.pipes import Fault, FaultKind, PipeNetwork
from peers.quantize import BLOCK, RANGE
from peers.stream_exchange import EXCHANGE_PROTOCOL, StreamExchange
from peers.table import MODULAR_BITS, Entry, Packing, encode_table
from peers.wire import Kind, Wire
from tests.virtual_time import run
from tests.worlds import World, play

GRACE_S = 20.0
STALL_S = 10.0
QUANTIZED: tuple[CodecName, ...] = ("int8", "modular8", "modular4")
MODULAR: tuple[CodecName, ...] = ("modular8", "modular4")
BITS = {codec: MODULAR_BITS[Packing(codec)] for codec in MODULAR}


async def join(network: PipeNetwork, me: PeerId, codec: CodecName) -> StreamExchange:
    exchange = StreamExchange(network.join(me), run="r", digest="d", codec=codec, stall_s=STALL_S)
    await exchange.start()
    return exchange


async def trade(codec: CodecName, of_a: Offer, of_b: Offer, *faults: Fault) -> tuple[Swap, Swap]:
    """What A gets and what B gets; nothing is left behind."""
    network = PipeNetwork()
    a, b = await join(network, "A", codec), await join(network, "B", codec)
    network.order(EXCHANGE_PROTOCOL, *faults)
    to_a, to_b = await asyncio.gather(
        a.swap(Slot(1), {"B": of_a}, timeout_s=GRACE_S), b.swap(Slot(1), {"A": of_b}, timeout_s=GRACE_S)
    )
    for peer in "AB":
        transport = network.find(peer)
        assert transport is not None
        await transport.finished()
    assert len(asyncio.all_tasks()) == 1
    return to_a["B"], to_b["A"]


def normal(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def start(seed: int = 0) -> dict[str, torch.Tensor]:
    """Tensors of every kind: matrices over one piece and not, and what is never quantized."""
    return {
        "embedding": normal((700, 500), seed),
        "square": normal((64, 64), seed + 1),
        "double": normal((60, 50), seed + 2, torch.float64),
        "ragged": normal((23, 31), seed + 3),
        "gain": normal((2_000,), seed + 4),
        "one": normal((1,), seed + 5),
        "scalar": normal((), seed + 6),
        "empty": torch.empty(0, 3),
        "little": normal((5, 5), seed + 7),
        "half": normal((40, 40), seed + 8).to(torch.bfloat16),
    }


LEFT_ALONE = ("gain", "one", "scalar", "empty", "little", "half")


def moved(origin: Tensors, seed: int, by: float = 1e-3) -> dict[str, torch.Tensor]:
    return {
        name: tensor + by * normal(tuple(tensor.shape), seed + number, tensor.dtype)
        for number, (name, tensor) in enumerate(origin.items())
    }


def in_blocks(tensor: torch.Tensor) -> torch.Tensor:
    row = tensor.reshape(-1).double()
    return torch.nn.functional.pad(row, (0, -row.numel() % BLOCK)).reshape(-1, BLOCK)


def limit(codec: CodecName, name: str, sent: Tensors, own: Tensors, origin: Tensors) -> torch.Tensor:
    """What the codec's own words allow, for each block of a tensor."""
    if codec in MODULAR:
        bits = BITS[codec]
        moves = [(in_blocks(values[name]) - in_blocks(origin[name])).abs().amax(1) for values in (sent, own)]
        step: torch.Tensor = torch.maximum(*moves) * (RANGE[bits] / 2**bits) * (1 + 2.0**-7)
        return step + 1e-6 * in_blocks(sent[name]).abs().amax(1)
    return in_blocks(sent[name]).abs().amax(1) / 254 * (1 + 2.0**-14) + 2.0**-100


def tensors_of(swap: Swap) -> Tensors:
    assert swap.answer is Answer.ACCEPT, swap.reason
    assert swap.tensors is not None
    return swap.tensors


def check_near(codec: CodecName, got: Tensors, sent: Tensors, own: Tensors, origin: Tensors) -> None:
    assert layout_of(got) == layout_of(sent)
    for name in sent:
        if name in LEFT_ALONE:
            assert torch.equal(got[name], sent[name]), name
        else:
            apart = (in_blocks(got[name]) - in_blocks(sent[name])).abs().amax(1)
            assert bool((apart <= limit(codec, name, sent, own, origin)).all()), name
            assert bool((apart > 0).any()), f"{name} was not quantized"


@pytest.mark.parametrize("codec", QUANTIZED)
def test_both_get_what_the_other_sent_within_the_codecs_bound(codec: CodecName) -> None:
    origin = start()
    ours, theirs = moved(origin, 10), moved(origin, 30)
    kept = [{name: tensor.clone() for name, tensor in tensors.items()} for tensors in (origin, ours, theirs)]
    to_a, to_b = run(trade(codec, Offer(ours, start=origin), Offer(theirs, start=origin)))
    check_near(codec, tensors_of(to_a), theirs, ours, origin)
    check_near(codec, tensors_of(to_b), ours, theirs, origin)
    for now, before in zip((origin, ours, theirs), kept, strict=True):
        assert all(torch.equal(now[name], before[name]) for name in before)
    assert (to_a.bytes_sent, to_a.bytes_received) == (to_b.bytes_received, to_b.bytes_sent)


def awkward() -> dict[str, torch.Tensor]:
    """What codecs stumble over, each large enough to be quantized where its kind is at all."""
    outlier = torch.full((40, 50), 1e-8)
    outlier[7, 7] = 1e5
    return {
        "large": 1e5 + normal((40, 50), 0),
        "tiny": 1e-8 * normal((40, 50), 1),
        "constant": torch.full((40, 50), 0.1),
        "zeros": torch.zeros(40, 50),
        "outlier": outlier,
        "turned": normal((50, 40), 2).t(),
        "strided": normal((40, 100), 3)[:, ::2],
        "bf16": normal((40, 50), 4).to(torch.bfloat16),
        "scalar": torch.tensor(0.3),
        "one": torch.full((1, 1), 0.3),
        "gain": normal((2_000,), 5),
        "empty": torch.empty(0, 50),
    }


RAW = ("bf16", "scalar", "one", "gain", "empty")
AWKWARD_BOUNDS: dict[CodecName, tuple[float, float]] = {"fp16": (2.0**-11, 2.0**-25), "bf16": (2.0**-8, 2.0**-134)}


@pytest.mark.parametrize("movement", [0.0, 1e-3])
@pytest.mark.parametrize("codec", CODECS)
def test_awkward_tensors_keep_the_codecs_bound(codec: CodecName, movement: float) -> None:
    origin = awkward()
    ours, theirs = (
        {name: tensor * (1 + movement * number) for name, tensor in origin.items()} for number in (1.0, 1.5)
    )
    to_a, to_b = run(trade(codec, Offer(ours, start=origin), Offer(theirs, start=origin)))
    for swap, sent, own in ((to_a, theirs, ours), (to_b, ours, theirs)):
        got = tensors_of(swap)
        assert layout_of(got) == layout_of(sent)
        for name, tensor in sent.items():
            apart = (in_blocks(got[name]) - in_blocks(tensor)).abs()
            if codec in AWKWARD_BOUNDS and tensor.dtype is torch.float32:
                relative, absolute = AWKWARD_BOUNDS[codec]
                assert bool((apart <= (relative * in_blocks(tensor).abs()).clamp(min=absolute)).all()), name
            elif codec in QUANTIZED and name not in RAW and not (codec in MODULAR and movement == 0):
                assert bool((apart.amax(1) <= limit(codec, name, sent, own, origin)).all()), name
            else:
                assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize("kind", ["memory", "pipes", "libp2p", "libp2p-asyncio"])
@pytest.mark.parametrize("codec", QUANTIZED)
def test_the_contract_holds_within_the_codecs_bound(kind: str, codec: CodecName, tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        origin = start()
        ours, theirs = moved(origin, 10), moved(origin, 30)
        a, b = await world.join(codec), await world.join(codec)
        of_a, of_b = await asyncio.gather(
            a.swap(Slot(1), {b.me: Offer(ours, start=origin)}, timeout_s=GRACE_S),
            b.swap(Slot(1), {a.me: Offer(theirs, start=origin)}, timeout_s=GRACE_S),
        )
        for swap, sent, own in ((of_a[b.me], theirs, ours), (of_b[a.me], ours, theirs)):
            if kind == "memory":
                assert all(torch.equal(tensors_of(swap)[name], sent[name]) for name in sent)
            else:
                check_near(codec, tensors_of(swap), sent, own, origin)

    play(kind, scenario, tmp_path)


@pytest.mark.parametrize(("codec", "share"), [("int8", 0.26), ("modular8", 0.27), ("modular4", 0.14)])
def test_bytes_against_fp32(codec: CodecName, share: float) -> None:
    origin = {"w": normal((1_000, 1_024), 0), "gain": torch.ones(1_024)}
    ours, theirs = moved(origin, 1), moved(origin, 2)
    for swap in run(trade(codec, Offer(ours, start=origin), Offer(theirs, start=origin))):
        assert swap.answer is Answer.ACCEPT
        assert swap.bytes_sent <= share * 4 * (1_024_000 + 1_024)


@pytest.mark.parametrize("codec", MODULAR)
def test_blocks_out_of_range_come_as_they_are(codec: CodecName) -> None:
    origin = {"w": normal((700, 500), 0), "x": normal((50, 51), 1), "y": normal((8, 64), 2)}
    ours, theirs = moved(origin, 10), moved(origin, 20)
    far = {"w": [0, 300, 683], "x": [4], "y": []}
    # both sides' starts differ there, which their movements do not tell
    theirs_start = {name: tensor.clone() for name, tensor in origin.items()}
    for name, blocks in far.items():
        for block in blocks:
            for tensor in (theirs[name], theirs_start[name]):
                tensor.view(-1)[block * BLOCK : (block + 1) * BLOCK] += 1.0
    to_a, to_b = run(trade(codec, Offer(ours, start=origin), Offer(theirs, start=theirs_start)))
    for swap, sent in ((to_a, theirs), (to_b, ours)):
        for name, blocks in far.items():
            got, exact = in_blocks(tensors_of(swap)[name]), in_blocks(sent[name])
            equal = (got == exact).all(1).nonzero().reshape(-1).tolist()
            assert equal == blocks
            assert float((got - exact).abs().max()) < 0.01


def test_at_4_bits_blocks_little_out_of_range_get_a_second_chance_in_8() -> None:
    origin = {"w": normal((700, 500), 0), "x": normal((50, 51), 1)}
    theirs_start = {name: tensor.clone() for name, tensor in origin.items()}
    for tensor in theirs_start.values():
        tensor.view(-1)[-3 * BLOCK :] += 0.05
    ours, theirs = moved(origin, 10), moved(theirs_start, 20)
    near, _ = run(trade("modular4", Offer(ours, start=origin), Offer(moved(origin, 20), start=origin)))
    to_a, to_b = run(trade("modular4", Offer(ours, start=origin), Offer(theirs, start=theirs_start)))
    for swap, sent in ((to_a, theirs), (to_b, ours)):
        got = tensors_of(swap)
        for name in origin:
            apart = (in_blocks(got[name]) - in_blocks(sent[name])).abs().amax(1)
            moves = torch.maximum(
                (in_blocks(ours[name]) - in_blocks(origin[name])).abs().amax(1),
                (in_blocks(theirs[name]) - in_blocks(theirs_start[name])).abs().amax(1),
            )
            assert bool((apart <= moves * (RANGE[4] / 16) * (1 + 2.0**-7) + 1e-6).all())
            assert bool((apart > 0).all())
    assert 0 < to_a.bytes_sent - near.bytes_sent < 8 * BLOCK * 2


@pytest.mark.parametrize("codec", MODULAR)
def test_strangers_get_all_blocks_as_they_are(codec: CodecName) -> None:
    origin, elsewhere = start(), start(100)
    ours, theirs = moved(origin, 10), moved(elsewhere, 30)
    to_a, to_b = run(trade(codec, Offer(ours, start=origin), Offer(theirs, start=elsewhere)))
    assert all(torch.equal(tensors_of(to_a)[name], theirs[name]) for name in theirs)
    assert all(torch.equal(tensors_of(to_b)[name], ours[name]) for name in ours)


@pytest.mark.parametrize("codec", MODULAR)
@pytest.mark.parametrize("movement", [0.0, 1e-3])
def test_without_a_start_values_are_exact(codec: CodecName, movement: float) -> None:
    origin = start()
    ours, theirs = moved(origin, 10, movement), moved(origin, 30, movement)
    to_a, to_b = run(trade(codec, Offer(ours), Offer(theirs, start=origin)))
    assert all(torch.equal(tensors_of(to_b)[name], ours[name]) for name in ours)
    if movement:
        check_near(codec, tensors_of(to_a), theirs, theirs, origin)
    else:
        assert all(torch.equal(tensors_of(to_a)[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("codec", CODECS)
def test_pieces_and_their_averages(codec: CodecName) -> None:
    """Scatter and gather: each sends another tensor than it expects, and restores from its own of that name."""
    origin = {"w[0:2000]": normal((1, 2_000), 0), "w[2000:5000]": normal((1, 3_000), 1)}
    ours, theirs = moved(origin, 2), moved(origin, 4)
    mine, yours = origin

    def offer(values: Tensors, sent: str, expected: str) -> Offer:
        near = {expected: values[expected]}
        return Offer({sent: values[sent]}, layout_of(near), start=origin, near=near)

    to_a, to_b = run(trade(codec, offer(ours, yours, mine), offer(theirs, mine, yours)))
    for swap, name, sent, own in ((to_a, mine, theirs, ours), (to_b, yours, ours, theirs)):
        got = tensors_of(swap)
        assert got.keys() == {name}
        if codec in QUANTIZED:
            check_near(codec, got, {name: sent[name]}, own, origin)
        else:
            torch.testing.assert_close(got[name], sent[name], rtol=2.0**-8, atol=0)


@pytest.mark.parametrize("codec", MODULAR)
def test_a_trade_that_is_repeated_gives_the_same_numbers(codec: CodecName) -> None:
    origin = start()
    ours, theirs = (Offer(moved(origin, seed), start=origin) for seed in (10, 30))
    first, again = (run(trade(codec, ours, theirs)) for _ in range(2))
    for one, other in zip(first, again, strict=True):
        assert all(torch.equal(tensors_of(one)[name], tensors_of(other)[name]) for name in origin)


def test_two_partners_get_other_noise() -> None:
    async def scenario() -> None:
        network = PipeNetwork()
        peers = [await join(network, me, "modular4") for me in "ABC"]
        origin = {"w": normal((100, 100), 0)}
        sent = {peer.me: moved(origin, number) for number, peer in enumerate(peers)}

        async def meet(peer: StreamExchange) -> dict[PeerId, Swap]:
            offers = {other.me: Offer(sent[peer.me], start=origin) for other in peers if other is not peer}
            return await peer.swap(Slot(1), offers, timeout_s=GRACE_S)

        of_a, of_b, of_c = await asyncio.gather(*map(meet, peers))
        for swaps in (of_a, of_b, of_c):
            for partner, swap in swaps.items():
                torch.testing.assert_close(tensors_of(swap)["w"], sent[partner]["w"], rtol=0, atol=2.5e-3)
        assert not torch.equal(tensors_of(of_a["C"])["w"], tensors_of(of_b["C"])["w"])

    run(scenario())


@settings(max_examples=80, deadline=None)
@given(
    kind=st.sampled_from([FaultKind.CUT, FaultKind.GARBLE, FaultKind.STALL]),
    at=st.integers(0, 1_000) | st.integers(0, 60_000),
    back=st.booleans(),
    codec=st.sampled_from(QUANTIZED),
)
def test_a_fault_at_any_byte_leaves_each_side_whole(kind: FaultKind, at: int, back: bool, codec: CodecName) -> None:
    """Table, bounds, codes, requests, blocks sent again, acknowledgements: all of it or nothing."""
    origin, theirs_start = {"w": normal((40, 512), 0)}, {"w": normal((40, 512), 0)}
    theirs_start["w"][:6] += 1.0
    theirs_start["w"][6:12] += 0.05
    ours, theirs = moved(origin, 1), moved(theirs_start, 2)
    fault = Fault(kind, after_bytes=at, back=back)
    swaps = run(
        trade(codec, Offer(ours, start=origin), Offer(theirs, start=theirs_start), fault), limit_s=GRACE_S + 3 * STALL_S
    )
    for swap, sent in zip(swaps, (theirs, ours), strict=True):
        if swap.answer is Answer.ACCEPT:
            assert float((tensors_of(swap)["w"] - sent["w"]).abs().max()) < 0.02
        else:
            assert swap.tensors is None
            assert swap.reason


Script = Callable[[Wire, Mapping[str, torch.Tensor]], Awaitable[None]]


def with_a_liar(script: Script, codec: CodecName = "modular8", *, near: bool = True) -> Swap:
    """What an honest B makes of a partner that says the right hello and then follows a script."""
    origin = {"w": normal((4, 512), 0)}

    async def scenario() -> Swap:
        network = PipeNetwork()
        b = await join(network, "B", codec)
        reader, writer = await network.join("A").dial("B", EXCHANGE_PROTOCOL, timeout_s=5.0)
        wire = Wire(reader, writer, "exchange")
        own = moved(origin, 1)
        offer = Offer(own, start=origin) if near else Offer({}, layout_of(own))
        swapping = asyncio.create_task(b.swap(Slot(1), {"A": offer}, timeout_s=GRACE_S))
        await wire.send_header(Kind.HEADER, Hello("r", "d", Slot(1), GRACE_S).to_json())
        await wire.receive_header(Kind.HEADER)
        await script(wire, origin)
        swap = (await swapping)["A"]
        wire.cut()
        return swap

    return run(scenario())


def liars_body(origin: Mapping[str, torch.Tensor]) -> Body:
    return Body(moved(origin, 5), "modular8", origin)


@pytest.mark.parametrize("bound", [float("nan"), float("inf"), -1.0])
def test_bounds_that_are_none_are_refused(bound: float) -> None:
    async def script(wire: Wire, origin: Mapping[str, torch.Tensor]) -> None:
        await wire.send_payload(Kind.TABLE, liars_body(origin).table)
        bounds = torch.full((4,), bound, dtype=torch.bfloat16)
        await wire.send_block(bounds.view(torch.uint8).numpy().data)
        await wire.skip_until(Kind.ABORT)

    swap = with_a_liar(script)
    assert swap.answer is Answer.REFUSED
    assert "movement bound" in swap.reason


def test_modular_tensors_where_nothing_is_near_are_refused() -> None:
    async def script(wire: Wire, origin: Mapping[str, torch.Tensor]) -> None:
        body = liars_body(origin)
        await wire.send_payload(Kind.TABLE, body.table)
        await wire.send_block(body.bounds["w"].view(torch.uint8).numpy().data)
        await wire.skip_until(Kind.ABORT)

    swap = with_a_liar(script, near=False)
    assert swap.answer is Answer.REFUSED
    assert "nothing near it" in swap.reason


@pytest.mark.parametrize("size", [0, 2, 60_000])
def test_a_request_of_another_length_is_refused(size: int) -> None:
    async def script(wire: Wire, origin: Mapping[str, torch.Tensor]) -> None:
        body = liars_body(origin)
        assert modular.request_bytes(modular.modular(body.entries)) == 1
        await wire.send_payload(Kind.TABLE, body.table)
        await wire.send_block(body.bounds["w"].view(torch.uint8).numpy().data)
        codes = quantize.encode(body.rows["w"], torch.ones(4), 8, torch.Generator())
        block = torch.cat([codes.checks.view(torch.uint8), codes.packed])
        await wire.send_block(block.numpy().data)
        await wire.send_payload(Kind.REQUEST, bytes(size))
        await wire.skip_until(Kind.ABORT)

    swap = with_a_liar(script)
    assert swap.answer is Answer.REFUSED
    assert f"request of {size} bytes" in swap.reason


@pytest.mark.parametrize("codec", MODULAR)
def test_values_sent_again_must_be_finite(codec: CodecName) -> None:
    async def script(wire: Wire, origin: Mapping[str, torch.Tensor]) -> None:
        body = Body(moved(origin, 5), codec, origin)
        await wire.send_payload(Kind.TABLE, body.table)
        await wire.send_block(body.bounds["w"].view(torch.uint8).numpy().data)
        codes = torch.zeros(4 * 4 + quantize.packed_bytes(4 * BLOCK, BITS[codec]), dtype=torch.uint8)
        await wire.send_block(codes.numpy().data)
        await wire.send_payload(Kind.REQUEST, bytes(1))
        if codec == "modular4":
            await wire.send_block(torch.zeros(4 * (4 + BLOCK), dtype=torch.uint8).numpy().data)
            await wire.send_payload(Kind.REQUEST, bytes(1))
        await wire.send_block(torch.full((4 * BLOCK,), torch.nan).view(torch.uint8).numpy().data)
        await wire.skip_until(Kind.ABORT)

    swap = with_a_liar(script, codec)
    assert swap.answer is Answer.REFUSED
    assert "'w' holds NaN" in swap.reason


@pytest.mark.parametrize(
    ("dtype", "shape"), [(torch.bfloat16, (64, 64)), (torch.float32, (4_096,)), (torch.float32, (2, 3))]
)
def test_what_is_never_quantized_is_refused_in_a_table(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    async def script(wire: Wire, origin: Mapping[str, torch.Tensor]) -> None:
        await wire.send_payload(Kind.TABLE, encode_table([Entry("w", shape, dtype, dtype, Packing.MODULAR4)]))
        await wire.skip_until(Kind.ABORT)

    swap = with_a_liar(script)
    assert swap.answer is Answer.REFUSED
    assert "cannot travel as modular4" in swap.reason


def test_tensors_near_must_fit_what_is_expected() -> None:
    async def scenario() -> None:
        exchange = await join(PipeNetwork(), "A", "modular8")
        offer = Offer({"w": torch.ones(3)}, {}, near={"x": torch.ones(2)})
        with pytest.raises(ValueError, match="another layout"):
            await exchange.swap(Slot(1), {"B": offer}, timeout_s=GRACE_S)

    run(scenario())


def test_a_start_of_another_shape_is_refused_by_name() -> None:
    async def scenario() -> Swap:
        exchange = await join(PipeNetwork(), "A", "modular8")
        offer = Offer({"w": torch.ones(30, 30)}, start={"w": torch.ones(30, 31)})
        return (await exchange.swap(Slot(1), {"B": offer}, timeout_s=GRACE_S))["B"]

    swap = run(scenario())
    assert swap.answer is Answer.REFUSED
    assert "'w' has shape [30, 30], but started as [30, 31]" in swap.reason


@pytest.mark.parametrize("codec", CODECS)
def test_a_body_without_a_start_goes_out_in_one_direction(codec: CodecName) -> None:
    """As parcels and states travel: exact under the modular codecs."""
    sent = {"w": normal((300, 1_000), 0)}

    async def scenario() -> Tensors:
        network = PipeNetwork()
        got: asyncio.Future[Tensors] = asyncio.get_running_loop().create_future()

        async def serve(peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            from peers.body import receive_table, receive_tensors

            wire = Wire(reader, writer, "state")
            got.set_result(await receive_tensors(wire, await receive_table(wire, NoDigest()), NoDigest()))

        await network.join("B").serve("/x", serve)
        _, writer = streams = await network.join("A").dial("B", "/x", timeout_s=5.0)
        await Body(sent, codec).send(Wire(*streams, "state"), NoDigest())
        tensors = await got
        writer.close()
        return tensors

    got = run(scenario())
    assert torch.equal(got["w"], sent["w"]) == (codec in ("fp32", *MODULAR))
    torch.testing.assert_close(got["w"], sent["w"], rtol=2.0**-8, atol=0.02)


@pytest.mark.parametrize("codec", CODECS)
def test_an_all_reduce_ends_near_the_mean(codec: CodecName) -> None:
    """Pieces of matrices are quantized on the way there and back; gains are not."""

    async def scenario() -> tuple[list[Tensors], list[int], Sequence[Tensors], Tensors]:
        network = PipeNetwork()
        peers = [await join(network, me, codec) for me in "ABC"]
        origin = {"w": normal((120, 300), 0), "gain": normal((900,), 1)}
        phis = [moved(origin, 10 * number) for number in range(1, 4)]
        reduced = await asyncio.gather(
            *(
                traded(peer, all_reduce(phi, "ABC", peer.me, Slot(1), note={}, start=origin), timeout_s=GRACE_S)
                for peer, phi in zip(peers, phis, strict=True)
            )
        )
        assert all(swap.answer is Answer.ACCEPT for each in reduced for swap in each.swaps.values())
        sent = [sum(swap.bytes_sent for swap in each.swaps.values()) for each in reduced]
        return [each.mix for each in reduced], sent, phis, origin

    mixes, sent, phis, origin = run(scenario())
    tolerance = {"fp32": 1e-6, "int8": 0.03, "modular8": 3e-4, "modular4": 3e-3}.get(codec, 0.04)
    assert layout_of(mixes[0]) == layout_of(origin)
    for name in origin:
        mean = torch.stack([phi[name] for phi in phis]).mean(0)
        exact = codec == "fp32" or (name == "gain" and codec in QUANTIZED)
        for mix in mixes:
            torch.testing.assert_close(mix[name], mean, rtol=0, atol=1e-6 if exact else tolerance)
    share = {"fp32": 1.0, "int8": 0.26, "modular8": 0.27, "modular4": 0.15}.get(codec, 0.5)
    gains = 4 * 900 * (1 - share) if codec in QUANTIZED else 0.0
    whole = 4 * (36_000 + 900)
    assert all(size_bytes <= (share * whole + gains) * 4 / 3 + 6_000 for size_bytes in sent)


@pytest.mark.parametrize("count", [BLOCK, 2 * BLOCK, 2 * BLOCK + 1, 3 * BLOCK - 1])
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_blocks_are_taken_and_put_back_where_they_were(count: int, data: st.DataObject) -> None:
    entry = Entry("w", (1, count), torch.float32, torch.float32, Packing.MODULAR8)
    size = quantize.blocks_in(count)
    wanted = torch.tensor(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    elements = wanted.repeat_interleave(BLOCK)[:count]
    row, into = torch.arange(float(count)), torch.zeros(count)
    for blocks, number in modular.again(entry, wanted):
        values = modular.taken(row, blocks)
        assert values.numel() == number
        modular.put(into, blocks, values)
    assert torch.equal(into, torch.where(elements, row, 0.0))
    assert [blocks.tolist() for blocks, _ in modular.again(entry, wanted)] in (
        [],
        [wanted.nonzero().flatten().tolist()],
    )


async def test_compiled_loops_are_loaded_in_a_worker_thread_and_only_for_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    loading = threading.Event()
    go_on = threading.Event()

    def prepare() -> str:
        loading.set()
        assert go_on.wait(20.0)
        return ""

    monkeypatch.setattr(compiled, "prepare", prepare)
    try:
        plain = await join(PipeNetwork(), "A", "fp32")
        await plain.close()
        assert not loading.is_set()
        network = PipeNetwork()
        one, other = [await join(network, me, "modular8") for me in ("A", "B")]
        assert await asyncio.to_thread(loading.wait, 20.0)
        tensors = {"w": torch.randn(2, BLOCK)}
        swaps = await asyncio.gather(  # while they load
            one.swap(Slot(1), {"B": Offer(tensors, start=tensors)}, timeout_s=GRACE_S),
            other.swap(Slot(1), {"A": Offer(tensors, start=tensors)}, timeout_s=GRACE_S),
        )
        assert [swap.answer for each in swaps for swap in each.values()] == [Answer.ACCEPT] * 2
        await one.close()
        await other.close()
    finally:
        go_on.set()
