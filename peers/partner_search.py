"""Finds a partner: one of two dials and waits for the other's answer, and the other looks whether it still comes."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from peers.errors import DaemonError, PeersError, ProtocolError, RefusedError, UnreachableError, WireError
from peers.exchange import Answer, PeerId, Slot, Swap
from peers.hello import MAX_PATIENCE_S, Hello, Reply, dials, words
from peers.meter import Meter
from peers.rendezvous import Incoming, Wait
from peers.transport import Transport
from peers.wire import Kind, Wire

EXCHANGE_PROTOCOL = "/gasloc/exchange/1"
PROBE_PROTOCOL = "/gasloc/probe/1"

_FIRST_PROBE_S = 0.25
_PROBE_EVERY_S = 2.0
_PROBES_BEFORE_DIALLING = 2
_LATE_ANSWER_S = 1.0


@dataclass(frozen=True, slots=True)
class Meeting:
    """An accepted stream: we dialled it, or the partner did (`incoming`)."""

    partner: PeerId
    wire: Wire
    note: Mapping[str, float]
    incoming: Incoming | None


@dataclass(slots=True)
class _Progress:
    """How far we are with finding a partner."""

    dialling: bool
    """A stream of ours is open, or being opened, and not yet answered."""
    heard: Reply | None = None
    """The partner's last answer to a probe."""
    probed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once a probe has ended, with an answer or without."""


class PartnerSearch:
    """Finds partners over a transport. See `hello` for who dials and for the answers."""

    def __init__(
        self,
        transport: Transport,
        *,
        run: str,
        digest: str,
        meter: Meter | None,
        reachable: Callable[[PeerId], bool],
        handshake_s: float,
    ) -> None:
        """For the arguments see `StreamExchange`."""
        self._transport = transport
        self._run = run
        self._digest = digest
        self._meter = meter
        self._reachable = reachable
        self.handshake_s = handshake_s

    def hello(self, slot: Slot, note: Mapping[str, float], *, left_over: bool = False) -> Hello:
        """What we say first in a slot; patience is set as it is sent."""
        return Hello(self._run, self._digest, slot, 0.0, note, left_over=left_over)

    async def find(self, wait: Wait, note: Mapping[str, float], deadline: float) -> Meeting | Swap:
        """An accepted stream with the partner that `wait` is for, or why there is none.

        Where both sides dialled, the stream of the lower id is used, unless it fails. `deadline` is by the event
        loop's clock. Cancelled, it leaves no stream open.
        """
        me, partner = self._transport.me, wait.partner
        me_reachable, partner_reachable = self._reachable(me), self._reachable(partner)
        progress = _Progress(dials(me, partner, me_reachable, partner_reachable))
        hello = self.hello(wait.slot, note)
        seeking = asyncio.create_task(
            self.dial(partner, hello, deadline)
            if progress.dialling
            else self._watch(partner, hello, deadline, progress, partner_reachable)
        )
        arrived = asyncio.create_task(wait.arrived.wait())
        try:
            await self._first(seeking, arrived, progress, wait, deadline)
            seeking.cancel()
            await asyncio.wait({seeking})
        except asyncio.CancelledError:
            await discard(seeking)
            raise
        finally:
            arrived.cancel()
        found = None if seeking.cancelled() else seeking.result()
        if isinstance(found, Meeting):
            return found
        incoming = wait.take()
        if incoming:
            return Meeting(partner, incoming.wire, incoming.hello.note, incoming)
        return found or _too_late(wait, progress.heard)

    async def _first(
        self,
        seeking: asyncio.Task[Meeting | Swap],
        arrived: asyncio.Task[Literal[True]],
        progress: _Progress,
        wait: Wait,
        deadline: float,
    ) -> None:
        """Waits until one of the two ways led to a decision."""
        left_s = deadline - asyncio.get_running_loop().time()
        if progress.dialling:
            left_s += self.handshake_s  # a dial ends by itself at the deadline, with a better reason
        both: set[asyncio.Task[object]] = {seeking, arrived}
        done, _ = await asyncio.wait(both, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        if arrived.done() and not seeking.done() and progress.dialling and self._transport.me < wait.partner:
            await asyncio.wait({seeking})
        elif not done and not progress.dialling:
            await self._hear_first_probe(both, progress)

    async def _hear_first_probe(self, both: set[asyncio.Task[object]], progress: _Progress) -> None:
        """At the deadline: an answer that is on its way says why the partner did not come. The first one is awaited."""
        probed = asyncio.create_task(progress.probed.wait())
        try:
            await asyncio.wait({*both, probed}, timeout=self.handshake_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            probed.cancel()

    async def dial(self, partner: PeerId, hello: Hello, deadline: float) -> Meeting | Swap:
        """Opens a stream and waits for the answer, up to a moment after the deadline."""
        loop = asyncio.get_running_loop()
        limit_s = min(self.handshake_s, max(deadline - loop.time(), 0.0))
        wire = None
        kept = False
        try:
            wire = await self._open(partner, EXCHANGE_PROTOCOL, limit_s)
            patience_s = min(max(deadline - loop.time(), 0.0), MAX_PATIENCE_S)
            async with asyncio.timeout(patience_s + min(_LATE_ANSWER_S, self.handshake_s)):
                reply = await _ask(wire, replace(hello, patience_s=patience_s))
            kept = reply.answer is Answer.ACCEPT
            return Meeting(partner, wire, reply.note, None) if kept else declined(reply)
        except (PeersError, TimeoutError) as error:
            return _unanswered(error)
        finally:
            if wire and not kept:
                wire.cut()

    async def _watch(
        self, partner: PeerId, hello: Hello, deadline: float, progress: _Progress, partner_reachable: bool
    ) -> Meeting | Swap:
        """Probes the partner that is to dial us, until it is known not to come.

        If it waits for us as well and does not dial, our views of who is reachable differ: then we dial.
        """
        waits_too = 0
        pause_s = _FIRST_PROBE_S
        while True:
            await asyncio.sleep(pause_s)
            pause_s = _PROBE_EVERY_S
            try:
                progress.heard = await self.probe(partner, hello)
            except (UnreachableError, DaemonError) as error:
                if partner_reachable or isinstance(error, DaemonError):
                    return _out_of_reach(error)
                continue
            except (ProtocolError, TimeoutError):
                continue
            finally:
                progress.probed.set()
            if progress.heard.answer is Answer.ACCEPT:
                waits_too += 1
                if waits_too >= _PROBES_BEFORE_DIALLING:
                    progress.dialling = True
                    return await self.dial(partner, hello, deadline)
            elif progress.heard.answer not in (Answer.BEHIND, Answer.BUSY):
                return declined(progress.heard)

    async def ask(self, partner: PeerId, hello: Hello) -> Swap:
        """What a hello would be answered, as the outcome of a trade that was not begun. `ACCEPT`: it would begin."""
        try:
            return declined(await self.probe(partner, hello))
        except (PeersError, TimeoutError) as error:
            return _unanswered(error)

    async def probe(self, partner: PeerId, hello: Hello) -> Reply:
        """Asks what a hello would be answered. Raises as `Transport.dial` does; `ProtocolError`, `TimeoutError`."""
        wire = await self._open(partner, PROBE_PROTOCOL, self.handshake_s)
        try:
            async with asyncio.timeout(self.handshake_s):
                return await _ask(wire, hello)
        finally:
            wire.cut()

    async def _open(self, partner: PeerId, protocol: str, timeout_s: float) -> Wire:
        reader, writer = await self._transport.dial(partner, protocol, timeout_s=timeout_s)
        return Wire(reader, writer, "exchange" if protocol == EXCHANGE_PROTOCOL else "probe", self._meter)


async def discard(seeking: "asyncio.Task[Meeting | Swap] | asyncio.Task[Meeting | None]") -> None:
    """Cancels a search; a stream that was accepted just then is cut."""
    seeking.cancel()
    seeking.add_done_callback(_cut_unused)
    await asyncio.wait({seeking})


def declined(reply: Reply) -> Swap:
    """A reply as the outcome of a trade that was not begun."""
    return Swap(reply.answer, reply.reason, their_round=reply.round, next_slot_s=reply.next_slot_s)


def _unanswered(error: PeersError | TimeoutError) -> Swap:
    """The outcome where a hello got no answer that counts. Raises any other error as it is."""
    match error:
        case UnreachableError() | DaemonError():
            return _out_of_reach(error)
        case TimeoutError():
            return Swap(Answer.TIMEOUT, "did not answer in time")
        case WireError():
            return Swap(Answer.UNREACHABLE, f"closed the stream before it answered: {error}")
        case ProtocolError():
            return Swap(Answer.REFUSED, f"its answer was refused: {error}", at_fault=True)
    raise error


async def _ask(wire: Wire, hello: Hello) -> Reply:
    try:
        await wire.send_header(Kind.HEADER, hello.to_json())
        return Reply.from_json(await wire.receive_header(Kind.HEADER))
    except RefusedError as error:  # an abort: it does not even look at hellos of ours
        return Reply(Answer.REFUSED, str(error))


def _out_of_reach(error: Exception) -> Swap:
    return Swap(Answer.UNREACHABLE, f"cannot be reached: {error}")


def _too_late(wait: Wait, heard: Reply | None) -> Swap:
    if heard and heard.answer is Answer.BEHIND:
        return declined(heard)
    return Swap(Answer.TIMEOUT, f"did not come to {words(wait.slot)} in time")


def _cut_unused(seeking: "asyncio.Task[Meeting | Swap] | asyncio.Task[Meeting | None]") -> None:
    if not seeking.cancelled() and not seeking.exception():
        found = seeking.result()
        if isinstance(found, Meeting):
            found.wire.cut()
