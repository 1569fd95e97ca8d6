"""Brings incoming streams together with the swaps that wait for them."""

import asyncio
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from peers.exchange import Answer, PeerId, Slot
from peers.hello import Hello, Place, Reply, Stage, judge, words
from peers.wire import Wire

MAX_HELD = 256
MAX_HELD_PER_PEER = 8
_MAX_HOLD_S = 600.0


@dataclass(slots=True, eq=False)
class Incoming:
    """A stream that a partner opened, and its hello."""

    wire: Wire
    hello: Hello
    over: asyncio.Future[Reply | None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """None: the stream was used and closed. A reply: it was not used, and is to be answered so."""

    def settle(self, reply: Reply | None) -> None:
        """Ends the wait of the stream's handler."""
        if not self.over.done():
            self.over.set_result(reply)


@dataclass(slots=True, eq=False)
class Wait:
    """A swap's wait for one partner in one slot."""

    slot: Slot
    partner: PeerId
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    incoming: Incoming | None = None

    def offer(self, incoming: Incoming) -> None:
        """Hands over a stream. A partner that dials again means its newest stream."""
        if self.incoming:
            self.incoming.settle(Reply(Answer.BUSY, "a newer stream of yours is used"))
        self.incoming = incoming
        self.arrived.set()

    def take(self) -> Incoming | None:
        """The stream that arrived, if any; the caller settles it."""
        incoming, self.incoming = self.incoming, None
        return incoming


@dataclass(slots=True, eq=False)
class Opening:
    """What a peer that is left over in a slot has to give: one trade, with whoever comes first."""

    slot: Slot
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    partner: PeerId | None = None
    incoming: Incoming | None = None
    held: int = 0
    """Streams of others that are left over and wait for our decision."""

    def offer(self, partner: PeerId, incoming: Incoming) -> None:
        """Hands over the stream of the one that chose us."""
        self.partner, self.incoming = partner, incoming
        self.arrived.set()

    def take(self) -> Incoming | None:
        """The stream that arrived, if any; the caller settles it."""
        incoming, self.incoming = self.incoming, None
        return incoming


class Rendezvous:
    """What this peer waits for, and the streams that came too early.

    A hello for a slot that we have not reached is held, up to the dialler's patience, since we may get there
    soon. At most `MAX_HELD` are held, and `MAX_HELD_PER_PEER` of one peer; others are answered `busy`.

    Of those left over in a slot each asks one at a time, and while it does, one that asks it is held if its id is
    lower, and answered `busy` at once if not. So whoever is held waits for a higher id, no ring of them can wait
    for each other, and of two that ask each other the lower one's question is answered.
    """

    def __init__(self, me: PeerId, run: str, digest: str) -> None:
        self._me = me
        self._run = run
        self._digest = digest
        self.place = Place()
        self._waits: dict[tuple[Slot, PeerId], Wait] = {}
        self._openings: dict[Slot, Opening] = {}
        self._held: Counter[PeerId] = Counter()
        self._changed = asyncio.Event()
        self._closed = False

    def expect(self, slot: Slot, partners: Collection[PeerId]) -> dict[PeerId, Wait]:
        """Registers a wait for each partner. Raises `ValueError` when there is one already; then for none."""
        for partner in partners:
            if (slot, partner) in self._waits:
                raise ValueError(f"a swap with {partner} in {words(slot)} is under way already")
        waits = {partner: Wait(slot, partner) for partner in partners}
        self._waits.update({(slot, partner): wait for partner, wait in waits.items()})
        return waits

    def forget(self, wait: Wait) -> None:
        """Ends a wait, once. A stream that arrived and was not taken is answered that we no longer wait."""
        if self._waits.get((wait.slot, wait.partner)) is wait:
            del self._waits[wait.slot, wait.partner]
        incoming = wait.take()
        if incoming:
            incoming.settle(self.answer(wait.partner, incoming.hello))

    def open(self, slot: Slot) -> Opening:
        """From now on whoever is left over in `slot` may choose us. Raises `ValueError` when it is open already."""
        if slot in self._openings:
            raise ValueError(f"a search in {words(slot)} is under way already")
        opening = self._openings[slot] = Opening(slot)
        self.move(slot, Stage.OPEN)
        return opening

    def shut(self, opening: Opening) -> None:
        """Ends what `open` began, once: the trade has begun, or this peer goes on alone."""
        if self._openings.get(opening.slot) is opening:
            del self._openings[opening.slot]
            if self.place.stage(opening.slot) is not Stage.TAKEN:
                self.move(opening.slot, Stage.OVER)
        incoming = opening.take()
        if incoming:
            incoming.settle(Reply(Answer.PAIRED_ELSEWHERE, "it no longer looks for others", self.place.round))

    def move(self, slot: Slot, stage: Stage) -> None:
        """Enters another stage of a slot, and has every held stream judged again."""
        self.place.enter(slot, stage)
        self.announce()

    def announce(self) -> None:
        """Has every held stream judged again: we moved on, or close."""
        self._changed.set()
        self._changed = asyncio.Event()

    def close(self) -> None:
        """Answers every held stream, and all that come later, that this peer is leaving."""
        self._closed = True
        self.announce()

    def answer(self, peer: PeerId, hello: Hello) -> Reply:
        """What a hello would be answered now."""
        if self._closed:
            return Reply(Answer.REFUSED, "this peer is leaving", self.place.round)
        waiting = (hello.slot, peer) in self._waits
        answer, reason = judge(hello, run=self._run, digest=self._digest, place=self.place, waiting=waiting)
        next_slot_s = self.place.next_slot_s(asyncio.get_running_loop().time())
        return Reply(answer, reason, self.place.round, next_slot_s=next_slot_s)

    async def admit(self, peer: PeerId, wire: Wire, hello: Hello) -> Reply | None:
        """Hands a stream to the swap that waits for it, and returns None when that is over with it.

        Otherwise returns what the dialler is to be answered; for a stream that is early, after it was held.
        """
        deadline = asyncio.get_running_loop().time() + min(hello.patience_s, _MAX_HOLD_S)
        while True:
            reply = self.answer(peer, hello)
            if reply.answer is Answer.ACCEPT:
                incoming = Incoming(wire, hello)
                self._hand_over(peer, incoming)
                return await incoming.over
            undecided = hello.left_over and reply.answer is Answer.BUSY and peer < self._me
            if not (undecided or reply.answer is Answer.BEHIND) or self._closed:
                return reply
            if self._held.total() >= MAX_HELD or self._held[peer] >= MAX_HELD_PER_PEER:
                return Reply(Answer.BUSY, "too many streams wait here already", self.place.round)
            opening = self._openings.get(hello.slot) if undecided else None
            if opening:
                opening.held += 1
            try:
                if not await self._hold(peer, wire, deadline):
                    return reply
            finally:
                if opening:
                    opening.held -= 1

    def _hand_over(self, peer: PeerId, incoming: Incoming) -> None:
        slot = incoming.hello.slot
        if incoming.hello.left_over:
            self._openings[slot].offer(peer, incoming)
            self.move(slot, Stage.TAKEN)
        else:
            self._waits[slot, peer].offer(incoming)

    async def _hold(self, peer: PeerId, wire: Wire, deadline: float) -> bool:
        """Waits until we moved on (True), the dialler left or its patience ended (False)."""
        moved = asyncio.ensure_future(self._changed.wait())
        ended = asyncio.ensure_future(wire.ended())
        self._held[peer] += 1
        try:
            left_s = deadline - asyncio.get_running_loop().time()
            await asyncio.wait({moved, ended}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            return moved.done() and not ended.done()
        finally:
            self._held[peer] -= 1
            if not self._held[peer]:
                del self._held[peer]
            moved.cancel()
            ended.cancel()
            await asyncio.wait({moved, ended})
