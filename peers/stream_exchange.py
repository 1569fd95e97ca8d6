"""`Exchange` over the streams of any `Transport`."""

import asyncio
import contextlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from peers import codec, compiled
from peers.bodies import Bodies, bodies, noise
from peers.codec import CodecName
from peers.errors import GarbledError, LayoutError, ProtocolError, RefusedError, WireError
from peers.exchange import Answer, Offer, PeerId, Slot, Swap, layout_of
from peers.hello import Hello, Reply, Stage, read_note, words
from peers.meter import Meter
from peers.next_choice import NextChoice
from peers.partner_search import EXCHANGE_PROTOCOL as EXCHANGE_PROTOCOL
from peers.partner_search import PROBE_PROTOCOL as PROBE_PROTOCOL
from peers.partner_search import Meeting, PartnerSearch
from peers.rendezvous import Rendezvous, Wait
from peers.trade import Trade
from peers.transport import Transport
from peers.wire import Kind, Wire

_CLOSE_S = 2.0
_MAX_STREAMS = 512
_MAX_STREAMS_PER_PEER = 32

T = TypeVar("T")

_log = logging.getLogger(__name__)


class StreamExchange:
    """Trades named tensors with partners over byte streams.

    Of two partners one dials (`hello.dials`) and waits for the other's answer; the other probes it, so that a
    partner that is gone is known at once. Those left over find each other as `next_choice` says. See `hello` for
    the answers and `trade` for what is kept when.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        run: str,
        digest: str,
        codec: CodecName = "fp32",
        meter: Meter | None = None,
        reachable: Callable[[PeerId], bool] = lambda peer: True,
        stall_s: float = 10.0,
        handshake_s: float = 5.0,
    ) -> None:
        """`reachable` tells, of any peer and of ourselves, whether others can dial it.

        `stall_s` ends a transfer that makes no progress (see `StallLimit`); `handshake_s` bounds each dial and
        each first word.
        """
        self._transport = transport
        self._codec = codec
        self._meter = meter
        self._stall_s = stall_s
        self._handshake_s = handshake_s
        self._rendezvous = Rendezvous(transport.me, run, digest)
        self._search = PartnerSearch(
            transport, run=run, digest=digest, meter=meter, reachable=reachable, handshake_s=handshake_s
        )
        self._next_choice = NextChoice(self._search, self._rendezvous)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._streams: Counter[PeerId] = Counter()
        self._closed = False

    @property
    def me(self) -> PeerId:
        """Our own peer id."""
        return self._transport.me

    async def start(self) -> None:
        """Accepts partners' streams and probes from now on; loads beside it what a modular codec is computed with."""
        if self._codec in codec.MODULAR_CODECS:
            asyncio.get_running_loop().run_in_executor(None, compiled.prepare)
        await self._transport.serve(EXCHANGE_PROTOCOL, self._on_stream)
        await self._transport.serve(PROBE_PROTOCOL, self._on_probe)

    async def close(self) -> None:
        """Ends every swap under way with `STOPPED`; later hellos are refused as from a peer that leaves."""
        self._closed = True
        self._rendezvous.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def step_back(self) -> None:
        """The next slot may be of any round: see `peers.hello.Place.step_back`. Not while a swap is under way."""
        self._rendezvous.place.step_back()

    async def swap(self, slot: Slot, offers: Mapping[PeerId, Offer], *, timeout_s: float) -> dict[PeerId, Swap]:
        """Trades with every partner in `offers`; see `Exchange.swap`.

        Raises `LayoutError` for tensors that are not floating point, `ProtocolError` for a note that cannot be
        sent, and `ValueError` for a slot earlier than the last or for ourselves as a partner. Own tensors
        that are not finite are sent to nobody: every partner's outcome is then `REFUSED`, naming the tensor.
        Cancelled, it closes its streams, keeps nothing and leaves nothing behind.
        """
        check_offers(self.me, offers)
        now = asyncio.get_running_loop().time()
        deadline = now + timeout_s
        self._rendezvous.place.reach(slot, now)
        waits = self._rendezvous.expect(slot, offers)
        self._rendezvous.move(slot, Stage.WAITING)
        try:
            made = await asyncio.to_thread(bodies, offers, self._codec)
            tasks = {
                partner: asyncio.create_task(self._settle(waits[partner], offer, made[partner], deadline))
                for partner, offer in offers.items()
            }
            return await self._all(tasks)
        except ProtocolError as error:
            return {partner: Swap(Answer.REFUSED, f"nothing was sent: our own {error}") for partner in offers}
        finally:
            for wait in waits.values():
                self._rendezvous.forget(wait)
            if self._rendezvous.place.stage(slot) is Stage.WAITING:
                self._rendezvous.move(slot, Stage.LEFT)

    async def swap_any(
        self, slot: Slot, candidates: Sequence[PeerId], offer: Offer, *, timeout_s: float
    ) -> dict[PeerId, Swap]:
        """Trades with one that is left over in `slot`, too; see `Exchange.swap_any`, and `swap` for what it raises."""
        offers = dict.fromkeys(candidates, offer)
        check_offers(self.me, offers)
        now = asyncio.get_running_loop().time()
        self._rendezvous.place.reach(slot, now)
        if not candidates:
            self._rendezvous.move(slot, Stage.OVER)
            return {}
        task = asyncio.create_task(self._settle_any(slot, candidates, offer, now + timeout_s))
        await self._until_done([task])
        if task.cancelled() and self._closed:
            return {peer: Swap(Answer.STOPPED, "this peer is leaving") for peer in offers}
        try:
            return task.result()
        except ProtocolError as error:
            return {peer: Swap(Answer.REFUSED, f"nothing was sent: our own {error}") for peer in offers}

    async def _settle_any(
        self, slot: Slot, candidates: Sequence[PeerId], offer: Offer, deadline: float
    ) -> dict[PeerId, Swap]:
        loop = asyncio.get_running_loop()
        started = loop.time()
        making = asyncio.ensure_future(asyncio.to_thread(bodies, {"": offer}, self._codec))
        try:
            met, heard = await self._next_choice.find(slot, candidates, offer.note, deadline)
            waited_s = loop.time() - started
            swaps = {peer: replace(swap, seconds=waited_s) for peer, swap in heard.items()}
            if met is not None:
                try:
                    body = (await making)[""]
                except BaseException:
                    _leave(met)
                    raise
                swaps[met.partner] = await self._trade(met, slot, offer, body)
            return swaps
        finally:
            making.cancel()
            await asyncio.gather(making, return_exceptions=True)

    async def _all(self, tasks: dict[PeerId, asyncio.Task[Swap]]) -> dict[PeerId, Swap]:
        await self._until_done(list(tasks.values()))
        return {partner: self._outcome(task) for partner, task in tasks.items()}

    async def _until_done(self, tasks: Sequence[asyncio.Task[T]]) -> None:
        """Waits for tasks that `close` is to end; cancelled, it ends them."""
        self._tasks.update(tasks)
        try:
            if tasks:
                await asyncio.wait(tasks)
        finally:
            self._tasks.difference_update(tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _outcome(self, task: asyncio.Task[Swap]) -> Swap:
        if task.cancelled() and self._closed:
            return Swap(Answer.STOPPED, "this peer is leaving")
        return task.result()

    async def _settle(self, wait: Wait, offer: Offer, body: Bodies, deadline: float) -> Swap:
        """One partner, from the first word to the outcome."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            met = await self._search.find(wait, offer.note, deadline)
            if isinstance(met, Meeting):
                self._rendezvous.move(wait.slot, Stage.TAKEN)
        finally:
            self._rendezvous.forget(wait)
        if isinstance(met, Swap):
            return replace(met, seconds=loop.time() - started)
        return await self._trade(met, wait.slot, offer, body)

    async def _trade(self, met: Meeting, slot: Slot, offer: Offer, body: Bodies) -> Swap:
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            swap = await self._send_and_receive(met, slot, offer, body)
        finally:
            _leave(met)
        return replace(
            swap,
            bytes_sent=met.wire.sent_bytes,
            bytes_received=met.wire.received_bytes,
            seconds=loop.time() - started,
            ended_s=loop.time() if swap.answer is Answer.ACCEPT else math.nan,
        )

    async def _send_and_receive(self, met: Meeting, slot: Slot, offer: Offer, body: Bodies) -> Swap:
        expect = layout_of(offer.send) if offer.expect is None else offer.expect
        try:
            if met.incoming:
                reply = Reply(Answer.ACCEPT, "expected", slot.round, offer.note)
                await met.wire.send_header(Kind.HEADER, reply.to_json())
            rounding = noise(self.me, met.partner, slot)
            trade = Trade(met.wire, body.send, expect, stall_s=self._stall_s, near=body.near, noise=rounding)
            tensors = await trade.run()
            await met.wire.close(_CLOSE_S)
        except TimeoutError:
            return Swap(Answer.BROKEN, f"the transfer made no progress for {self._stall_s:g} s")
        except RefusedError as error:
            return Swap(Answer.REFUSED, f"it refused: {error}")
        except WireError as error:
            return Swap(Answer.BROKEN, f"the transfer failed: {error}", at_fault=isinstance(error, GarbledError))
        except ProtocolError as error:
            return Swap(Answer.REFUSED, f"refused what it sent: {error}", at_fault=True)
        return Swap(Answer.ACCEPT, f"traded in {words(slot)}", tensors, met.note, slot.round)

    async def _on_stream(self, peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire = Wire(reader, writer, "exchange", self._meter)
        self._streams[peer] += 1
        try:
            hello = await self._hear(peer, wire)
            reply = await self._rendezvous.admit(peer, wire, hello) if hello else None
            if reply:
                await _say(wire, reply)
        finally:
            self._streams -= Counter([peer])

    async def _on_probe(self, peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire = Wire(reader, writer, "probe", self._meter)
        self._streams[peer] += 1
        try:
            hello = await self._hear(peer, wire)
            if hello:
                await _say(wire, self._rendezvous.answer(peer, hello))
        finally:
            self._streams -= Counter([peer])

    async def _hear(self, peer: PeerId, wire: Wire) -> Hello | None:
        """The hello of a stream that was opened to us; None where it was answered already, or is not worth it."""
        if self._streams.total() > _MAX_STREAMS or self._streams[peer] > _MAX_STREAMS_PER_PEER:
            await _say(wire, Reply(Answer.BUSY, "too many streams are open here", self._rendezvous.place.round))
            return None
        try:
            async with asyncio.timeout(self._handshake_s):
                return Hello.from_json(await wire.receive_header(Kind.HEADER))
        except (WireError, RefusedError, TimeoutError) as error:
            _log.debug("no hello from %s: %s", peer, error)
        except ProtocolError as error:
            await _say(wire, Reply(Answer.REFUSED, str(error)))
        return None


def check_offers(me: PeerId, offers: Mapping[PeerId, Offer]) -> None:
    """Raises for what a caller must not offer: see `StreamExchange.swap`."""
    if me in offers:
        raise ValueError(f"a peer does not trade with itself: {me}")
    for offer in offers.values():
        read_note(offer.note)
        if offer.near is not None and layout_of(offer.near) != offer.expect:
            raise ValueError("the tensors near what is expected have another layout than what is expected")
        for name, tensor in offer.send.items():
            if not codec.floating(tensor.dtype):
                raise LayoutError(f"tensor '{name}' is {tensor.dtype}: only floating-point tensors are exchanged")


def _leave(met: Meeting) -> None:
    """Closes a stream that is not used further."""
    met.wire.cut()
    if met.incoming:
        met.incoming.settle(None)


async def _say(wire: Wire, reply: Reply) -> None:
    """Answers a stream that is not used further."""
    with contextlib.suppress(WireError):
        await wire.send_header(Kind.HEADER, reply.to_json())
        await wire.linger(_CLOSE_S)
