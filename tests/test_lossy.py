"""A trade without a stream is one over a stream: the same values bit for bit, the same bytes but for their frames."""

import asyncio
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gasloc.all_reduce import all_reduce
from gasloc.simulation.gossip import traded
from peers import lossy
from peers.codec import CODECS, MODULAR_CODECS, CodecName
from peers.exchange import Answer, Exchange, Offer, PeerId, Slot, Swap, Tensors, layout_of
from peers.memory_exchange import MemoryExchange, MemoryHub
from peers.pipes import PipeNetwork
from peers.stream_exchange import StreamExchange
from tests import virtual_time

FRAMED_BYTES = 1_000
"""Of one side of a trade of few tensors: heads of frames, the table, hello or answer, DONE."""

SHAPES: dict[str, tuple[int, ...]] = {"a": (64, 40), "b": (3, 700), "gain": (600,), "small": (4, 8), "scalar": ()}


def values(seed: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> dict[str, torch.Tensor]:
    noise = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=noise) for name, shape in shapes.items()}


def moved(start: Tensors, seed: int, by: float = 0.01, strays: int = 0) -> dict[str, torch.Tensor]:
    """`start` after a round; every `strays`-th element of matrices goes so much further that ranges are too small."""
    steps = values(seed, {name: tuple(tensor.shape) for name, tensor in start.items()})
    result = {name: tensor + by * steps[name] for name, tensor in start.items()}
    if strays:
        for tensor in result.values():
            if tensor.dim() >= 2:
                tensor.reshape(-1)[::strays] += 100 * by
    return result


Trade = tuple[dict[PeerId, Offer], dict[PeerId, Offer]]


def streams(codec: CodecName) -> list[Exchange]:
    network = PipeNetwork()
    return [StreamExchange(network.join(me), run="r", digest="d", codec=codec) for me in "AB"]


def memory(codec: CodecName) -> list[Exchange]:
    hub = MemoryHub(codec=codec)
    return [MemoryExchange(hub, me) for me in "AB"]


async def swapped(exchanges: list[Exchange], a: Offer, b: Offer) -> tuple[Swap, Swap]:
    for exchange in exchanges:
        if isinstance(exchange, StreamExchange):
            await exchange.start()
    of_a, of_b = await asyncio.gather(
        exchanges[0].swap(Slot(3, 1), {"B": a}, timeout_s=60.0), exchanges[1].swap(Slot(3, 1), {"A": b}, timeout_s=60.0)
    )
    return of_a["B"], of_b["A"]


def both(codec: CodecName, a: Offer, b: Offer) -> tuple[tuple[Swap, Swap], tuple[Swap, Swap]]:
    return (
        virtual_time.run(swapped(streams(codec), a, b)),
        virtual_time.run(swapped(memory(codec), a, b)),
    )


def same(real: Swap, simulated: Swap) -> None:
    assert real.answer is simulated.answer is Answer.ACCEPT, (real.reason, simulated.reason)
    assert real.tensors is not None
    assert simulated.tensors is not None
    assert layout_of(real.tensors) == layout_of(simulated.tensors)
    for name, tensor in real.tensors.items():
        assert torch.equal(tensor, simulated.tensors[name]), name
    for sent, counted in (
        (real.bytes_sent, simulated.bytes_sent),
        (real.bytes_received, simulated.bytes_received),
    ):
        assert 0 < sent - counted < FRAMED_BYTES


@pytest.mark.parametrize("strays", [0, 97], ids=["near", "far"])
@pytest.mark.parametrize("codec", CODECS)
def test_a_simulated_trade_is_the_real_one(codec: CodecName, strays: int) -> None:
    start = values(0)
    start_b = moved(start, 9, by=0.001)
    a = Offer(moved(start, 1, strays=strays), start=start)
    b = Offer(moved(start_b, 2), start=start_b)
    real, simulated = both(codec, a, b)
    for one, other in zip(real, simulated, strict=True):
        same(one, other)


@pytest.mark.parametrize("codec", MODULAR_CODECS)
def test_blocks_out_of_range_come_again_and_are_counted(codec: CodecName) -> None:
    start = values(0)
    a = Offer(moved(start, 1), start=start)
    far = {name: tensor + 0.5 if tensor.dim() >= 2 else tensor for name, tensor in moved(start, 2).items()}
    real, simulated = both(codec, a, Offer(far, start={name: tensor - 0.005 for name, tensor in far.items()}))
    for one, other in zip(real, simulated, strict=True):
        same(one, other)
    near_swap = both(codec, a, Offer(moved(start, 2), start=start))[1][0]
    assert simulated[0].bytes_sent > near_swap.bytes_sent + 2_000
    assert simulated[0].tensors is not None
    apart = max(float((simulated[0].tensors[name] - far[name]).abs().max()) for name in far)
    assert apart < 0.1


@pytest.mark.parametrize("codec", CODECS)
def test_two_sides_that_trade_other_tensors(codec: CodecName) -> None:
    """As in an all-reduce: each sends a piece that the other owns, and expects its own."""
    start = values(0, {"p": (1, 1_500), "q": (1, 1_111)})
    phi, other = moved(start, 1), moved(start, 2)
    first, second = {"p": phi["p"]}, {"q": phi["q"]}
    a = Offer(first, layout_of(second), start=start, near=second)
    b = Offer({"q": other["q"]}, layout_of({"p": other["p"]}), start=start, near={"p": other["p"]})
    real, simulated = both(codec, a, b)
    for one, other_swap in zip(real, simulated, strict=True):
        same(one, other_swap)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("codec", CODECS)
def test_other_dtypes(codec: CodecName, dtype: torch.dtype) -> None:
    start = {name: tensor.to(dtype) for name, tensor in values(0).items()}
    a = Offer({name: tensor.to(dtype) for name, tensor in moved(start, 1).items()}, start=start)
    b = Offer({name: tensor.to(dtype) for name, tensor in moved(start, 2).items()}, start=start)
    real, simulated = both(codec, a, b)
    for one, other in zip(real, simulated, strict=True):
        same(one, other)


@given(
    rows=st.integers(1, 3),
    columns=st.integers(0, 700),
    seed=st.integers(0, 99),
    started=st.tuples(st.booleans(), st.booleans()),
    codec=st.sampled_from(CODECS),
    strays=st.sampled_from([0, 7, 300]),
)
@settings(max_examples=25, deadline=None)
def test_whatever_the_shape(
    rows: int, columns: int, seed: int, started: tuple[bool, bool], codec: CodecName, strays: int
) -> None:
    start = values(seed, {"w": (rows, columns), "still": (2, 300)})
    a, b = moved(start, seed + 1, strays=strays), moved(start, seed + 2)
    a["still"] = b["still"] = start["still"]
    offers = [Offer(sent, start=start if has else None) for sent, has in zip((a, b), started, strict=True)]
    real, simulated = both(codec, offers[0], offers[1])
    for one, other in zip(real, simulated, strict=True):
        same(one, other)


@pytest.mark.parametrize("codec", CODECS)
def test_an_all_reduce_comes_to_the_same(codec: CodecName) -> None:
    start = values(0, {"w": (40, 50), "gain": (30,)})
    phis = [moved(start, 1), moved(start, 2)]
    members = ["A", "B"]

    async def mixes(exchanges: list[Exchange]) -> list[dict[str, torch.Tensor]]:
        for exchange in exchanges:
            if isinstance(exchange, StreamExchange):
                await exchange.start()
        reduced = await asyncio.gather(
            *(
                traded(exchange, all_reduce(phi, members, exchange.me, Slot(0), note={}, start=start), timeout_s=60.0)
                for exchange, phi in zip(exchanges, phis, strict=True)
            )
        )
        return [each.mix for each in reduced]

    for real, simulated in zip(
        virtual_time.run(mixes(streams(codec))), virtual_time.run(mixes(memory(codec))), strict=True
    ):
        assert all(torch.equal(tensor, simulated[name]) for name, tensor in real.items())


def test_fp32_passes_as_it_is_and_in_its_own_bytes() -> None:
    phi, other = values(1), values(2)
    of_a, of_b = virtual_time.run(swapped(memory("fp32"), Offer(phi), Offer(other)))
    size_bytes = 4 * sum(tensor.numel() for tensor in phi.values())
    assert of_a.bytes_sent == of_a.bytes_received == of_b.bytes_sent == size_bytes
    assert of_a.tensors is not None
    assert all(torch.equal(tensor, other[name]) for name, tensor in of_a.tensors.items())
    assert all(tensor.data_ptr() != other[name].data_ptr() for name, tensor in of_a.tensors.items())


@pytest.mark.parametrize("codec", ["int8", "modular4"])
def test_what_is_not_finite_is_sent_to_nobody(codec: CodecName) -> None:
    start = values(0)
    broken = moved(start, 1)
    broken["a"][0, 0] = float("nan")
    exchange = memory(codec)[0]
    swaps = virtual_time.run(exchange.swap(Slot(0), {"B": Offer(broken, start=start)}, timeout_s=1.0))
    assert swaps["B"].answer is Answer.REFUSED
    assert "'a'" in swaps["B"].reason


@pytest.mark.parametrize(("codec", "share"), [("fp32", 1.0), ("bf16", 0.5), ("int8", 0.26), ("modular4", 1.0)])
def test_what_travels_alone(codec: CodecName, share: float) -> None:
    """Modular codecs have nothing near it, so they leave it as it is."""
    tensors = values(0, {"w": (64, 512)})
    arrived, size_bytes = lossy.alone(tensors, codec)
    assert size_bytes <= share * 4 * 64 * 512
    assert torch.equal(arrived["w"], tensors["w"]) == (share == 1.0)
    assert torch.allclose(arrived["w"], tensors["w"], atol=0.02)
