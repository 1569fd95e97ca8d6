"""`Exchange` over the streams of any `Transport`."""

import asyncio
import contextlib
import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch

from peers import codec
from peers.body import Body
from peers.codec import CodecName
from peers.errors import (
    DaemonError,
    GarbledError,
    LayoutError,
    ProtocolError,
    RefusedError,
    UnreachableError,
    WireError,
)
from peers.exchange import Answer, Offer, PeerId, Slot, Swap, Tensors, layout_of
from peers.hello import MAX_PATIENCE_S, Hello, Reply, dials, read_note, words
from peers.meter import Meter
from peers.rendezvous import Incoming, Rendezvous, Wait
from peers.trade import Trade
from peers.transport import Transport
from peers.wire import Kind, Wire

EXCHANGE_PROTOCOL = "/gasloc/exchange/1"
PROBE_PROTOCOL = "/gasloc/probe/1"

_FIRST_PROBE_S = 0.25
_PROBE_EVERY_S = 2.0
_PROBES_BEFORE_DIALLING = 2
_CLOSE_S = 2.0
_MAX_STREAMS = 512
_MAX_STREAMS_PER_PEER = 32

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Meeting:
    """An accepted stream: we dialled it, or the partner did (`incoming`)."""

    wire: Wire
    note: Mapping[str, float]
    incoming: Incoming | None


@dataclass(frozen=True, slots=True)
class _Bodies:
    """What one partner is sent, and our own values of what it sends: the same body where both send the same."""

    send: Body
    near: Body


@dataclass(slots=True)
class _Search:
    """How far we are with finding a partner."""

    dialling: bool
    """A stream of ours is open, or being opened, and not yet answered."""
    heard: Reply | None = None
    """The partner's last answer to a probe."""


class StreamExchange:
    """Trades named tensors with partners over byte streams.

    Of two partners one dials (`hello.dials`) and waits for the other's answer; the other probes it, so that a
    partner that is gone is known at once. See `hello` for the answers and `trade` for what is kept when.
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
        self._run = run
        self._digest = digest
        self._meter = meter
        self._reachable = reachable
        self._stall_s = stall_s
        self._handshake_s = handshake_s
        self._rendezvous = Rendezvous(run, digest)
        self._tasks: set[asyncio.Task[Swap]] = set()
        self._streams: Counter[PeerId] = Counter()
        self._closed = False

    @property
    def me(self) -> PeerId:
        """Our own peer id."""
        return self._transport.me

    async def start(self) -> None:
        """Accepts partners' streams and probes from now on."""
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

    async def swap(self, slot: Slot, offers: Mapping[PeerId, Offer], *, timeout_s: float) -> dict[PeerId, Swap]:
        """Trades with every partner in `offers`; see `Exchange.swap`.

        Raises `LayoutError` for tensors that are not floating point, `ProtocolError` for a note that cannot be
        sent, and `ValueError` for a slot earlier than the last or for ourselves as a partner. Own tensors
        that are not finite are sent to nobody: every partner's outcome is then `REFUSED`, naming the tensor.
        Cancelled, it closes its streams, keeps nothing and leaves nothing behind.
        """
        check_offers(self.me, offers)
        deadline = asyncio.get_running_loop().time() + timeout_s
        self._rendezvous.place.reach(slot)
        waits = self._rendezvous.expect(slot, offers)
        self._rendezvous.announce()
        try:
            bodies = await asyncio.to_thread(_bodies, offers, self._codec)
            tasks = {
                partner: asyncio.create_task(self._settle(waits[partner], offer, bodies[partner], deadline))
                for partner, offer in offers.items()
            }
            return await self._all(tasks)
        except ProtocolError as error:
            return {partner: Swap(Answer.REFUSED, f"nothing was sent: our own {error}") for partner in offers}
        finally:
            for wait in waits.values():
                self._rendezvous.forget(wait)

    async def _all(self, tasks: dict[PeerId, asyncio.Task[Swap]]) -> dict[PeerId, Swap]:
        self._tasks.update(tasks.values())
        try:
            if tasks:
                await asyncio.wait(tasks.values())
        finally:
            self._tasks.difference_update(tasks.values())
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        return {partner: self._outcome(task) for partner, task in tasks.items()}

    def _outcome(self, task: asyncio.Task[Swap]) -> Swap:
        if task.cancelled() and self._closed:
            return Swap(Answer.STOPPED, "this peer is leaving")
        return task.result()

    async def _settle(self, wait: Wait, offer: Offer, body: _Bodies, deadline: float) -> Swap:
        """One partner, from the first word to the outcome."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            met = await self._meet(wait, offer, deadline)
        finally:
            self._rendezvous.forget(wait)
        if isinstance(met, Swap):
            return replace(met, seconds=loop.time() - started)
        started = loop.time()
        try:
            swap = await self._trade(met, wait, offer, body)
        finally:
            met.wire.cut()
            if met.incoming:
                met.incoming.settle(None)
        return replace(
            swap,
            bytes_sent=met.wire.sent_bytes,
            bytes_received=met.wire.received_bytes,
            seconds=loop.time() - started,
        )

    async def _trade(self, met: _Meeting, wait: Wait, offer: Offer, body: _Bodies) -> Swap:
        partner = wait.partner
        expect = layout_of(offer.send) if offer.expect is None else offer.expect
        try:
            if met.incoming:
                reply = Reply(Answer.ACCEPT, "expected", wait.slot.round, offer.note)
                await met.wire.send_header(Kind.HEADER, reply.to_json())
            noise = _noise(self.me, partner, wait.slot)
            trade = Trade(met.wire, body.send, expect, stall_s=self._stall_s, near=body.near, noise=noise)
            tensors = await trade.run()
            await met.wire.close(_CLOSE_S)
        except TimeoutError:
            return Swap(Answer.BROKEN, f"the transfer with {partner} made no progress for {self._stall_s:g} s")
        except RefusedError as error:
            return Swap(Answer.REFUSED, f"{partner} refused: {error}")
        except WireError as error:
            reason = f"the transfer with {partner} failed: {error}"
            return Swap(Answer.BROKEN, reason, at_fault=isinstance(error, GarbledError))
        except ProtocolError as error:
            return Swap(Answer.REFUSED, f"refused what {partner} sent: {error}", at_fault=True)
        return Swap(Answer.ACCEPT, f"traded in {words(wait.slot)}", tensors, met.note, wait.slot.round)

    async def _meet(self, wait: Wait, offer: Offer, deadline: float) -> _Meeting | Swap:
        """Finds the partner: an accepted stream, or why there is none.

        Where both sides dialled, the stream of the lower id is used, unless it fails.
        """
        me_reachable, partner_reachable = self._reachable(self.me), self._reachable(wait.partner)
        search = _Search(dials(self.me, wait.partner, me_reachable, partner_reachable))
        hello = Hello(self._run, self._digest, wait.slot, 0.0, offer.note)
        seeking = asyncio.create_task(
            self._dial(wait.partner, hello, deadline)
            if search.dialling
            else self._watch(wait.partner, hello, deadline, search, partner_reachable)
        )
        arrived = asyncio.create_task(wait.arrived.wait())
        try:
            await self._first(seeking, arrived, search, wait, deadline)
            seeking.cancel()
            await asyncio.wait({seeking})
        except asyncio.CancelledError:
            seeking.cancel()
            seeking.add_done_callback(_cut_unused)
            await asyncio.wait({seeking})
            raise
        finally:
            arrived.cancel()
        found = None if seeking.cancelled() else seeking.result()
        if isinstance(found, _Meeting):
            return found
        incoming = wait.take()
        if incoming:
            return _Meeting(incoming.wire, incoming.hello.note, incoming)
        return found or _too_late(wait, search.heard)

    async def _first(
        self,
        seeking: asyncio.Task[_Meeting | Swap],
        arrived: asyncio.Task[Literal[True]],
        search: _Search,
        wait: Wait,
        deadline: float,
    ) -> None:
        """Waits until one of the two ways led to a decision."""
        left_s = deadline - asyncio.get_running_loop().time()
        if search.dialling:
            left_s += self._handshake_s  # a dial ends by itself at the deadline, with a better reason
        both: set[asyncio.Task[object]] = {seeking, arrived}
        await asyncio.wait(both, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        if arrived.done() and not seeking.done() and search.dialling and self.me < wait.partner:
            await asyncio.wait({seeking})

    async def _dial(self, partner: PeerId, hello: Hello, deadline: float) -> _Meeting | Swap:
        """Opens a stream and waits for the answer, up to a moment after the deadline."""
        loop = asyncio.get_running_loop()
        limit_s = min(self._handshake_s, max(deadline - loop.time(), 0.0))
        wire = None
        kept = False
        try:
            wire = await self._open(partner, EXCHANGE_PROTOCOL, limit_s)
            patience_s = min(max(deadline - loop.time(), 0.0), MAX_PATIENCE_S)
            async with asyncio.timeout(patience_s + min(1.0, self._handshake_s)):
                reply = await _ask(wire, replace(hello, patience_s=patience_s))
            kept = reply.answer is Answer.ACCEPT
            return _Meeting(wire, reply.note, None) if kept else _declined(partner, reply)
        except (UnreachableError, DaemonError) as error:
            return Swap(Answer.UNREACHABLE, f"{partner} cannot be reached: {error}")
        except TimeoutError:
            return Swap(Answer.TIMEOUT, f"{partner} did not answer in time")
        except WireError as error:
            return Swap(Answer.UNREACHABLE, f"{partner} closed the stream before it answered: {error}")
        except ProtocolError as error:
            return Swap(Answer.REFUSED, f"refused the answer of {partner}: {error}", at_fault=True)
        finally:
            if wire and not kept:
                wire.cut()

    async def _watch(
        self, partner: PeerId, hello: Hello, deadline: float, search: _Search, partner_reachable: bool
    ) -> _Meeting | Swap:
        """Probes the partner that is to dial us, until it is known not to come.

        If it waits for us as well and does not dial, our views of who is reachable differ: then we dial.
        """
        waits_too = 0
        pause_s = _FIRST_PROBE_S
        while True:
            await asyncio.sleep(pause_s)
            pause_s = _PROBE_EVERY_S
            try:
                search.heard = await self._probe(partner, hello)
            except (UnreachableError, DaemonError) as error:
                if partner_reachable or isinstance(error, DaemonError):
                    return Swap(Answer.UNREACHABLE, f"{partner} cannot be reached: {error}")
                continue
            except (ProtocolError, TimeoutError):
                continue
            if search.heard.answer is Answer.ACCEPT:
                waits_too += 1
                if waits_too >= _PROBES_BEFORE_DIALLING:
                    search.dialling = True
                    return await self._dial(partner, hello, deadline)
            elif search.heard.answer not in (Answer.BEHIND, Answer.BUSY):
                return _declined(partner, search.heard)

    async def _probe(self, partner: PeerId, hello: Hello) -> Reply:
        """Asks what a hello would be answered. Raises as `Transport.dial` does; `ProtocolError`, `TimeoutError`."""
        wire = await self._open(partner, PROBE_PROTOCOL, self._handshake_s)
        try:
            async with asyncio.timeout(self._handshake_s):
                return await _ask(wire, hello)
        finally:
            wire.cut()

    async def _open(self, partner: PeerId, protocol: str, timeout_s: float) -> Wire:
        reader, writer = await self._transport.dial(partner, protocol, timeout_s=timeout_s)
        return Wire(reader, writer, "exchange" if protocol == EXCHANGE_PROTOCOL else "probe", self._meter)

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


def _bodies(offers: Mapping[PeerId, Offer], codec_name: CodecName) -> dict[PeerId, _Bodies]:
    """Each partner's bodies; tensors that go to several partners are read once."""
    made: dict[tuple[int, int], Body] = {}

    def body(tensors: Tensors, start: Tensors | None) -> Body:
        key = id(tensors), id(start)
        if key not in made:
            made[key] = Body(tensors, codec_name, start)
        return made[key]

    def near(offer: Offer) -> Tensors:
        return offer.send if offer.near is None or codec_name not in codec.MODULAR_CODECS else offer.near

    return {
        partner: _Bodies(body(offer.send, offer.start), body(near(offer), offer.start))
        for partner, offer in offers.items()
    }


def _noise(me: PeerId, partner: PeerId, slot: Slot) -> torch.Generator:
    """The noise that rounds what we send: another in every trade, and the same if it is repeated."""
    words = repr((me, partner, slot.round, slot.mix, slot.phase)).encode()
    seed = int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little")
    return torch.Generator().manual_seed(seed)


async def _ask(wire: Wire, hello: Hello) -> Reply:
    try:
        await wire.send_header(Kind.HEADER, hello.to_json())
        return Reply.from_json(await wire.receive_header(Kind.HEADER))
    except RefusedError as error:  # an abort: it does not even look at hellos of ours
        return Reply(Answer.REFUSED, str(error))


async def _say(wire: Wire, reply: Reply) -> None:
    """Answers a stream that is not used further."""
    with contextlib.suppress(WireError):
        await wire.send_header(Kind.HEADER, reply.to_json())
        await wire.linger(_CLOSE_S)


def _declined(partner: PeerId, reply: Reply) -> Swap:
    return Swap(reply.answer, f"{partner}: {reply.reason}", their_round=reply.round)


def _too_late(wait: Wait, heard: Reply | None) -> Swap:
    if heard and heard.answer is Answer.BEHIND:
        return _declined(wait.partner, heard)
    return Swap(Answer.TIMEOUT, f"{wait.partner} did not come to {words(wait.slot)} in time")


def _cut_unused(seeking: asyncio.Task[_Meeting | Swap]) -> None:
    """A stream that was accepted just as we were cancelled."""
    if not seeking.cancelled() and not seeking.exception():
        found = seeking.result()
        if isinstance(found, _Meeting):
            found.wire.cut()
