"""Parcels over pipes, under virtual time: whole or not at all, with the reason."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peers import courier
from peers.codec import CODECS, CodecName
from peers.courier import COURIER_PROTOCOL, Answered, Courier, Parcel
from peers.donor import Meta
from peers.errors import BehindError, PeersError, ProtocolError, RefusedError, UnreachableError
from peers.exchange import Layout, PeerId, layout_of
from peers.meter import Meter
from peers.pipes import Fault, FaultKind, PipeNetwork
from peers.wire import BLOCK_BYTES, Kind, Wire
from tests.virtual_time import run

RUN, DIGEST = "tiny", "d" * 64
BIG = 3 * BLOCK_BYTES // 4


def tensors(fill: float = 1.0) -> dict[str, torch.Tensor]:
    return {
        "exact": torch.full((3,), fill / 3, dtype=torch.float64),
        "weight": torch.full((BIG,), fill),
        "scalar": torch.tensor(fill),
    }


LAYOUT = layout_of(tensors())


def expect(peer: PeerId, meta: Meta) -> Layout:
    return LAYOUT


async def doubled(peer: PeerId, parcel: Parcel) -> Parcel:
    return Parcel({name: 2 * tensor for name, tensor in parcel.tensors.items()}, {"from": peer, **parcel.meta})


def courier_of(network: PipeNetwork, me: PeerId, *, digest: str = DIGEST, meter: Meter | None = None) -> Courier:
    transport = network.find(me) or network.join(me)
    return Courier(transport, run=RUN, digest=digest, meter=meter)


async def ask(
    network: PipeNetwork,
    parcel: Parcel | None = None,
    *,
    layout: Layout = LAYOUT,
    patience_s: float = 60.0,
    digest: str = DIGEST,
) -> Answered:
    """As learner L, of syncer S; no stream is left open on our side."""
    asker = courier_of(network, "L", digest=digest)
    try:
        return await asker.ask("S", parcel or Parcel(tensors()), layout, patience_s=patience_s)
    finally:
        transport = network.find("L")
        assert transport is not None
        assert transport.open_streams == 0


async def quiet(network: PipeNetwork) -> None:
    """The answerer's handlers all end."""
    syncer = network.find("S")
    assert syncer is not None
    await syncer.finished()


def test_a_parcel_is_answered_much_later_exactly() -> None:
    async def patient(peer: PeerId, parcel: Parcel) -> Parcel:
        await asyncio.sleep(500.0)
        return await doubled(peer, parcel)

    async def scenario() -> None:
        network, meter = PipeNetwork(), Meter()
        await courier_of(network, "S", meter=meter).serve(expect, patient)
        parcel = Parcel(tensors(), {"round": 7, "tokens": 1.5, "word": "yes"})
        answered = await ask(network, parcel, patience_s=600.0)
        assert answered.parcel.meta == {"from": "L", "round": 7, "tokens": 1.5, "word": "yes"}
        for name, tensor in tensors().items():
            came = answered.parcel.tensors[name]
            assert came.dtype == tensor.dtype
            assert torch.equal(came, 2 * tensor)
        await quiet(network)
        assert min(answered.bytes_sent, answered.bytes_received) > 4 * BIG

    run(scenario())


@pytest.mark.parametrize("codec", CODECS)
def test_every_codec_travels(codec: CodecName) -> None:
    """To its own precision: a learner's progress since is kept apart, so rounding does not add up."""

    async def same(peer: PeerId, parcel: Parcel) -> Parcel:
        return parcel

    async def scenario() -> None:
        network = PipeNetwork()
        generator = torch.Generator().manual_seed(0)
        values = {"weight": torch.randn(300, 200, generator=generator)}
        layout = layout_of(values)
        couriers = [Courier(network.join(peer), run=RUN, digest=DIGEST, codec=codec) for peer in "SL"]
        await couriers[0].serve(lambda peer, meta: layout, same)
        answered = await couriers[1].ask("S", Parcel(values), layout, patience_s=60.0)
        error = float((answered.parcel.tensors["weight"] - values["weight"]).abs().max())
        assert error <= {"fp16": 2e-3, "bf16": 2e-2, "int8": 0.1}.get(codec, 0.0)
        assert (error == 0) == (codec not in ("fp16", "bf16", "int8"))
        await quiet(network)

    run(scenario())


def test_many_are_answered_at_once() -> None:
    """As by a syncer: everybody waits until the last has come."""

    async def scenario() -> None:
        network, came = PipeNetwork(), asyncio.Event()
        waiting: list[PeerId] = []

        async def together(peer: PeerId, parcel: Parcel) -> Parcel:
            waiting.append(peer)
            if len(waiting) == 5:
                came.set()
            await came.wait()
            return Parcel(parcel.tensors, {"count": len(waiting)})

        await courier_of(network, "S").serve(expect, together)
        answers = await asyncio.gather(
            *(
                courier_of(network, f"L{number}").ask("S", Parcel(tensors(float(number))), LAYOUT, patience_s=10)
                for number in range(5)
            )
        )
        assert [answer.parcel.meta["count"] for answer in answers] == [5] * 5
        assert [float(answer.parcel.tensors["scalar"]) for answer in answers] == [0, 1, 2, 3, 4]

    run(scenario())


def test_a_refusal_comes_before_a_tensor_travels() -> None:
    def unwanted(peer: PeerId, meta: Meta) -> Layout:
        raise RefusedError(f"{peer} is not wanted at round {meta['round']}")

    async def scenario() -> None:
        network, meter = PipeNetwork(), Meter()
        await courier_of(network, "S", meter=meter).serve(unwanted, doubled)
        with pytest.raises(RefusedError, match="L is not wanted at round 3"):
            await ask(network, Parcel(tensors(), {"round": 3}))
        await quiet(network)
        assert meter.total.received_bytes < 1000

    run(scenario())


@pytest.mark.parametrize("early", [True, False], ids=["before it is sent", "after it was sent"])
def test_being_behind_is_told_apart_from_other_refusals(early: bool) -> None:
    def first(peer: PeerId, meta: Meta) -> Layout:
        if early:
            raise BehindError("5 merges behind")
        return LAYOUT

    async def then(peer: PeerId, parcel: Parcel) -> Parcel:
        raise BehindError("5 merges behind")

    async def scenario() -> None:
        network = PipeNetwork()
        await courier_of(network, "S").serve(first, then)
        with pytest.raises(BehindError, match="5 merges behind"):
            await ask(network)
        await quiet(network)

    run(scenario())


def test_another_run_or_recipe_is_refused() -> None:
    async def scenario() -> None:
        network = PipeNetwork()
        await courier_of(network, "S").serve(expect, doubled)
        with pytest.raises(RefusedError, match=f"digest 'eee' against '{DIGEST}'"):
            await ask(network, digest="eee")

    run(scenario())


def test_another_layout_is_refused_by_both() -> None:
    async def shorter(peer: PeerId, parcel: Parcel) -> Parcel:
        return Parcel({"scalar": torch.tensor(1.0)})

    async def scenario() -> None:
        network = PipeNetwork()
        await courier_of(network, "S").serve(expect, shorter)
        with pytest.raises(RefusedError, match="exact"):
            await ask(network, Parcel({"scalar": torch.tensor(1.0)}))
        with pytest.raises(ProtocolError, match="exact"):
            await ask(network)
        await quiet(network)

    run(scenario())


def test_what_is_not_finite_is_not_sent() -> None:
    async def scenario() -> None:
        network = PipeNetwork()
        await courier_of(network, "S").serve(expect, doubled)
        with pytest.raises(ProtocolError, match="weight"):
            await ask(network, Parcel(tensors() | {"weight": torch.full((BIG,), float("nan"))}))
        assert network.dialled == []

    run(scenario())


def test_a_silent_answerer_is_given_up_after_the_patience_and_its_work_is_cancelled() -> None:
    async def scenario() -> None:
        network, cancelled = PipeNetwork(), asyncio.Event()

        async def never(peer: PeerId, parcel: Parcel) -> Parcel:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()
            return parcel

        await courier_of(network, "S").serve(expect, never)
        began = asyncio.get_running_loop().time()
        with pytest.raises(UnreachableError, match="S gave no answer within 30 s"):
            await ask(network, patience_s=30.0)
        assert asyncio.get_running_loop().time() - began == pytest.approx(30.0, abs=1.0)
        await cancelled.wait()
        await quiet(network)

    run(scenario())


def test_an_answerer_that_dies_while_it_is_waited_for_is_noticed_at_once() -> None:
    async def scenario() -> None:
        network, asked = PipeNetwork(), asyncio.Event()

        async def never(peer: PeerId, parcel: Parcel) -> Parcel:
            asked.set()
            await asyncio.Event().wait()
            return parcel

        await courier_of(network, "S").serve(expect, never)
        asking = asyncio.create_task(ask(network, patience_s=1000.0))
        await asked.wait()
        network.leave("S")
        with pytest.raises(UnreachableError, match="went away before it had answered"):
            await asking
        assert asyncio.get_running_loop().time() < 10

    run(scenario())


def test_nobody_there_is_unreachable() -> None:
    async def scenario() -> None:
        network = PipeNetwork()
        network.join("L")
        with pytest.raises(UnreachableError, match="refused"):
            await ask(network)

    run(scenario())


async def _with_fault(fault: Fault) -> None:
    """Whatever happens to a byte, the asker has all of the answer or a plain error, in bounded time."""
    network = PipeNetwork()
    handled: list[Mapping[str, torch.Tensor]] = []

    async def kept(peer: PeerId, parcel: Parcel) -> Parcel:
        handled.append(parcel.tensors)
        return await doubled(peer, parcel)

    await courier_of(network, "S").serve(expect, kept)
    network.order(COURIER_PROTOCOL, fault)
    with contextlib.suppress(PeersError):
        answered = await ask(network, patience_s=60.0)
        assert torch.equal(answered.parcel.tensors["weight"], 2 * tensors()["weight"])
    for came in handled:
        assert torch.equal(came["weight"], tensors()["weight"])
    await quiet(network)
    assert asyncio.get_running_loop().time() < 120


KINDS = [FaultKind.CUT, FaultKind.GARBLE, FaultKind.STALL]


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=15)
@given(at=st.one_of(st.integers(0, 1200), st.integers(0, 4 * BIG + 1000)))
def test_a_fault_at_any_byte_leaves_the_asker_whole(kind: FaultKind, back: bool, at: int) -> None:
    run(_with_fault(Fault(kind, after_bytes=at, back=back)))


Talk = Callable[[Wire], Awaitable[None]]


async def _says_nothing(wire: Wire) -> None:
    await wire.linger(1000.0)


async def _says_nonsense(wire: Wire) -> None:
    await wire.send_payload(Kind.HEADER, b"[1, 2]")
    await wire.linger(1000.0)


async def _has_bad_meta(wire: Wire) -> None:
    await wire.send_header(Kind.HEADER, {"run": RUN, "digest": DIGEST, "meta": {"round": [1]}})
    await wire.linger(1000.0)


async def _speaks_out_of_turn(wire: Wire) -> None:
    await wire.send_header(Kind.HEADER, {"run": RUN, "digest": DIGEST, "meta": {}})
    await wire.send_header(Kind.DONE, {})
    await wire.linger(1000.0)


@pytest.mark.parametrize("talk", [_says_nothing, _says_nonsense, _has_bad_meta, _speaks_out_of_turn])
def test_a_stranger_is_let_go_and_others_are_answered(talk: Talk, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        network = PipeNetwork()
        await courier_of(network, "S").serve(expect, doubled)
        stranger = network.join("X")
        reader, writer = await stranger.dial("S", COURIER_PROTOCOL, timeout_s=5)
        talking = asyncio.ensure_future(talk(Wire(reader, writer, "courier")))
        await ask(network)
        await quiet(network)
        await talking
        writer.transport.abort()
        assert asyncio.get_running_loop().time() < 60

    with caplog.at_level(logging.WARNING):
        run(scenario())
    assert not caplog.records


def test_too_many_at_once_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        network, asked, release = PipeNetwork(), asyncio.Event(), asyncio.Event()

        async def held(peer: PeerId, parcel: Parcel) -> Parcel:
            asked.set()
            await release.wait()
            return parcel

        await courier_of(network, "S").serve(expect, held)
        first = asyncio.create_task(courier_of(network, "K").ask("S", Parcel(tensors()), LAYOUT, patience_s=60))
        await asked.wait()
        with pytest.raises(RefusedError, match="1 parcels are open here already"):
            await ask(network)
        release.set()
        await first
        await ask(network)
        await quiet(network)

    monkeypatch.setattr(courier, "MAX_STREAMS", 1)
    run(scenario())
