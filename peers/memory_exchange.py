"""`Exchange` in one process: no streams, the same answers, and the same values and bytes under every codec."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from peers import codec, lossy
from peers.bodies import Bodies, bodies, noise
from peers.codec import CodecName
from peers.errors import ProtocolError
from peers.exchange import Answer, Offer, PeerId, Slot, Swap, Tensors, layout_of
from peers.hello import Place, Stage, whereabouts, whereabouts_left_over, words
from peers.stream_exchange import check_offers
from peers.table import first_difference

Carry = Callable[[PeerId, PeerId, int], Awaitable[None]]
"""Takes as long as a link needs for so many bytes from the first peer to the second.

Raises `ConnectionError` when the link breaks.
"""

Reaches = Callable[[PeerId, PeerId], bool]
"""Whether one peer can reach another now; the same both ways."""


@dataclass(slots=True, eq=False)
class _Wait:
    offer: Offer
    bodies: Bodies | None
    """What is sent, made ready; None under fp32, which changes nothing."""
    outcome: asyncio.Future[Swap]
    transfer: asyncio.Task[None] | None = None
    """Set once the partner is there and bytes are under way."""

    def end(self, swap: Swap) -> None:
        if not self.outcome.done():
            self.outcome.set_result(swap)


@dataclass(slots=True, eq=False)
class _Look:
    """What a peer that is left over in a slot has to give: one trade, with whoever comes first."""

    candidates: Sequence[PeerId]
    wait: _Wait
    partner: PeerId | None = None
    """Set once the trade has begun."""


class MemoryHub:
    """The peers of one process that can reach each other. All must run on one event loop.

    With `carry` a trade takes the time that its links need; without, none. What arrives, and in how many bytes, is as
    over streams: see `peers.lossy`, also for which bytes are counted.
    """

    def __init__(
        self, carry: Carry | None = None, codec: CodecName = "fp32", reaches: Reaches = lambda one, other: True
    ) -> None:
        """Call `reach_changed` whenever `reaches` would answer otherwise than before."""
        self.carry = carry
        self.reaches = reaches
        self.codec: CodecName = codec
        self.members: dict[PeerId, MemoryExchange] = {}
        self.waiting: dict[PeerId, dict[tuple[MemoryExchange, Slot], None]] = {}
        """Who waits for a peer, or would have it as its next choice, and in which slots."""
        self.modular_blocks = 0
        """Blocks that were sent modulo a range so far."""
        self.resent_blocks = 0
        """Those of them that the first codes did not restore."""

    def reach_changed(self) -> None:
        """Has everybody who waits look again: a wait for one that cannot be reached any more ends, `UNREACHABLE`."""
        for exchange in list(self.members.values()):
            exchange._tell_others()


class MemoryExchange:
    """Trades tensors with the other members of a hub. Tensors are cloned as they change hands."""

    def __init__(self, hub: MemoryHub, me: PeerId) -> None:
        """Joins the hub. Raises `ValueError` when it has a member of that id."""
        if me in hub.members:
            raise ValueError(f"{me} is a member already")
        self._hub = hub
        self._me = me
        self._place = Place()
        self._waits: dict[tuple[Slot, PeerId], _Wait] = {}
        self._looks: dict[Slot, _Look] = {}
        hub.members[me] = self

    @property
    def me(self) -> PeerId:
        """Our own id."""
        return self._me

    async def close(self) -> None:
        """Leaves the hub: our swaps end with `STOPPED`, those that wait for us with `UNREACHABLE`."""
        self._hub.members.pop(self._me, None)
        waits = [*self._waits.values(), *(look.wait for look in self._looks.values())]
        await _stop([wait.transfer for wait in waits if wait.transfer])
        for wait in waits:
            wait.end(Swap(Answer.STOPPED, "this peer is leaving"))
        self._tell_others()

    async def step_back(self) -> None:
        """The next slot may be of any round: see `peers.hello.Place.step_back`. Not while a swap is under way."""
        self._place.step_back()

    async def swap(self, slot: Slot, offers: Mapping[PeerId, Offer], *, timeout_s: float) -> dict[PeerId, Swap]:
        """See `Exchange.swap` and, for what it raises, `StreamExchange.swap`."""
        check_offers(self._me, offers)
        loop = asyncio.get_running_loop()
        for partner in offers:
            if (slot, partner) in self._waits:
                raise ValueError(f"a swap with {partner} in {words(slot)} is under way already")
        began = loop.time()
        self._place.reach(slot, began)
        self._place.enter(slot, Stage.WAITING)
        try:
            made = self._ready(offers)
        except ProtocolError as error:
            self._tell_others()
            return {partner: Swap(Answer.REFUSED, f"nothing was sent: our own {error}") for partner in offers}
        waits = {partner: _Wait(offer, made.get(partner), loop.create_future()) for partner, offer in offers.items()}
        self._waits.update({(slot, partner): wait for partner, wait in waits.items()})
        for partner in waits:
            self._hub.waiting.setdefault(partner, {})[self, slot] = None
        try:
            for partner in waits:
                self._consider(slot, partner)
            self._tell_others()
            if waits:
                await asyncio.wait([wait.outcome for wait in waits.values()], timeout=timeout_s)
            for wait in waits.values():
                if wait.transfer:
                    await wait.outcome
            waited_s = loop.time() - began
            for partner, wait in waits.items():
                wait.end(self._too_late(slot, partner))
            return {partner: _timed(wait.outcome.result(), waited_s) for partner, wait in waits.items()}
        finally:
            for partner in waits:
                self._waits.pop((slot, partner), None)
                self._hub.waiting[partner].pop((self, slot), None)
            await _stop([wait.transfer for wait in waits.values() if wait.transfer and not wait.outcome.done()])
            if self._place.stage(slot) is Stage.WAITING:
                self._place.enter(slot, Stage.LEFT)

    async def swap_any(
        self, slot: Slot, candidates: Sequence[PeerId], offer: Offer, *, timeout_s: float
    ) -> dict[PeerId, Swap]:
        """See `Exchange.swap_any` and, for what it raises, `StreamExchange.swap_any`."""
        offers = dict.fromkeys(candidates, offer)
        check_offers(self._me, offers)
        loop = asyncio.get_running_loop()
        if slot in self._looks:
            raise ValueError(f"a search in {words(slot)} is under way already")
        began = loop.time()
        self._place.reach(slot, began)
        try:
            made = self._ready({"": offer} if candidates else {})
        except ProtocolError as error:
            self._move(slot, Stage.OVER)
            return {peer: Swap(Answer.REFUSED, f"nothing was sent: our own {error}") for peer in offers}
        if not candidates:
            self._move(slot, Stage.OVER)
            return {}
        look = self._looks[slot] = _Look(tuple(candidates), _Wait(offer, made.get(""), loop.create_future()))
        for peer in candidates:
            self._hub.waiting.setdefault(peer, {})[self, slot] = None
        try:
            self._place.enter(slot, Stage.OPEN)
            self._look_on(slot)
            self._tell_others()
            await asyncio.wait([look.wait.outcome], timeout=timeout_s)
            if look.wait.transfer:
                await look.wait.outcome
            waited_s = loop.time() - began
            swaps = {peer: self._would_say(slot, peer, waited_s) for peer in candidates if peer != look.partner}
            if look.partner is not None:
                swaps[look.partner] = look.wait.outcome.result()
            return swaps
        finally:
            for peer in candidates:
                self._hub.waiting[peer].pop((self, slot), None)
            del self._looks[slot]
            if look.partner is None:
                self._move(slot, Stage.OVER)
            if look.wait.transfer and not look.wait.outcome.done():
                await _stop([look.wait.transfer])

    def _move(self, slot: Slot, stage: Stage) -> None:
        """Enters another stage of a slot, and has those that wait for us look again, once this is through."""
        self._place.enter(slot, stage)
        asyncio.get_running_loop().call_soon(self._tell_others)

    def _ready(self, offers: Mapping[PeerId, Offer]) -> dict[PeerId, Bodies]:
        """What partners are sent, under a codec that changes it. Raises `ProtocolError` for what cannot be sent."""
        if self._hub.codec != "fp32":
            return bodies(offers, self._hub.codec)
        _check_finite(offers)
        return {}

    def _found(self, peer: PeerId) -> "MemoryExchange | None":
        """Another member; None where it is gone or cannot be reached."""
        return self._hub.members.get(peer) if self._hub.reaches(self._me, peer) else None

    def _tell_others(self) -> None:
        """Has those that wait for us look again."""
        for other, slot in list(self._hub.waiting.get(self._me, ())):
            if (slot, self._me) in other._waits:
                other._consider(slot, self._me)
            if slot in other._looks:
                other._look_on(slot)

    def _look_on(self, slot: Slot) -> None:
        """Begins the trade with our first candidate that is left over, too; ends the search if none can be any more."""
        look = self._looks[slot]
        if look.partner is not None or look.wait.outcome.done():
            return
        answers = set()
        for peer in look.candidates:
            other = self._found(peer)
            theirs = other._looks.get(slot) if other else None
            if other and theirs and theirs.partner is None and not theirs.wait.outcome.done():
                look.partner, theirs.partner = other.me, self._me
                self._trade(slot, look.wait, other, theirs.wait)
                return
            answers.add(whereabouts_left_over(slot, other._place)[0] if other else Answer.UNREACHABLE)
        if not answers & {Answer.BEHIND, Answer.ACCEPT}:
            look.wait.end(Swap(Answer.PAIRED_ELSEWHERE, "nobody else is left over"))

    def _would_say(self, slot: Slot, candidate: PeerId, waited_s: float) -> Swap:
        """A candidate's last answer, as far as it was not the one to trade with."""
        if self._me not in self._hub.members:
            return Swap(Answer.STOPPED, "this peer is leaving", seconds=waited_s)
        other = self._found(candidate)
        if other is None:
            return Swap(Answer.UNREACHABLE, "cannot be reached: it is not in this process", seconds=waited_s)
        answer, reason = whereabouts_left_over(slot, other._place)
        if answer is Answer.ACCEPT:
            answer, reason = Answer.BUSY, "left over too, while this peer mixes with another"
        return Swap(answer, reason, their_round=other._place.round, seconds=waited_s)

    def _consider(self, slot: Slot, partner: PeerId) -> None:
        """Ends our wait for a partner if that can be decided now."""
        wait = self._waits[slot, partner]
        other = self._found(partner)
        if wait.outcome.done() or wait.transfer:
            return
        if other is None:
            wait.end(Swap(Answer.UNREACHABLE, "cannot be reached: it is not in this process"))
            return
        theirs = other._waits.get((slot, self._me))
        if theirs and not theirs.outcome.done() and not theirs.transfer:
            self._trade(slot, wait, other, theirs)
            return
        answer, reason = whereabouts(slot, other._place)
        if answer is not Answer.BEHIND:
            wait.end(self._declined(answer, reason, other))

    def _trade(self, slot: Slot, ours: _Wait, other: "MemoryExchange", theirs: _Wait) -> None:
        """Both sides at once: both get the other's tensors, or neither does."""
        self._move(slot, Stage.TAKEN)
        other._move(slot, Stage.TAKEN)
        problem = _problem(ours.offer, theirs.offer) or _problem(theirs.offer, ours.offer)
        if problem:
            for wait in (ours, theirs):
                wait.end(Swap(Answer.REFUSED, problem))
            return
        try:
            swaps = self._traded(slot, other.me, ours, theirs)
        except ProtocolError as error:
            for wait in (ours, theirs):
                wait.end(Swap(Answer.REFUSED, str(error)))
            return
        if self._hub.carry is None:
            ended_s = asyncio.get_running_loop().time()
            ours.end(replace(swaps[0], ended_s=ended_s))
            theirs.end(replace(swaps[1], ended_s=ended_s))
            return
        carrying = self._carry(self._hub.carry, other, (ours, theirs), swaps)
        ours.transfer = theirs.transfer = asyncio.get_running_loop().create_task(carrying)

    def _traded(self, slot: Slot, partner: PeerId, ours: _Wait, theirs: _Wait) -> tuple[Swap, Swap]:
        """What each side gets in the end, ours first. Raises `ProtocolError` for what a receiver would refuse."""
        if ours.bodies is None or theirs.bodies is None:
            sent = tuple(size_bytes(wait.offer.send) for wait in (ours, theirs))
            return (
                _swap(slot, theirs.offer, _clone(theirs.offer.send), (sent[0], sent[1])),
                _swap(slot, ours.offer, _clone(ours.offer.send), (sent[1], sent[0])),
            )
        noises = noise(self.me, partner, slot), noise(partner, self.me, slot)
        there, back = lossy.traded(ours.bodies, theirs.bodies, noises)
        self._hub.modular_blocks += there.blocks + back.blocks
        self._hub.resent_blocks += there.resent + back.resent
        size = there.sent_bytes + back.returned_bytes, back.sent_bytes + there.returned_bytes
        return (
            _swap(slot, theirs.offer, back.tensors, size),
            _swap(slot, ours.offer, there.tensors, (size[1], size[0])),
        )

    async def _carry(
        self, carry: Carry, other: "MemoryExchange", waits: tuple[_Wait, _Wait], swaps: tuple[Swap, Swap]
    ) -> None:
        """Ends both waits once both directions have arrived, or with `BROKEN` when one cannot."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        ours, theirs = waits
        legs = [
            asyncio.ensure_future(carry(self.me, other.me, swaps[0].bytes_sent)),
            asyncio.ensure_future(carry(other.me, self.me, swaps[1].bytes_sent)),
        ]
        broken = "the transfer broke"
        try:
            await asyncio.gather(*legs)
        except ConnectionError as error:
            for wait in waits:
                wait.end(Swap(Answer.BROKEN, f"{broken}: {error}"))
        except asyncio.CancelledError:
            for wait in waits:
                wait.end(Swap(Answer.BROKEN, f"{broken}: one of them left"))
            raise
        else:
            ended_s = loop.time()
            ours.end(replace(swaps[0], seconds=ended_s - began, ended_s=ended_s))
            theirs.end(replace(swaps[1], seconds=ended_s - began, ended_s=ended_s))
        finally:
            for leg in legs:
                leg.cancel()

    def _too_late(self, slot: Slot, partner: PeerId) -> Swap:
        other = self._found(partner)
        if other is None:
            return Swap(Answer.UNREACHABLE, "left")
        _, reason = whereabouts(slot, other._place)
        return self._declined(Answer.BEHIND, reason, other)

    def _declined(self, answer: Answer, reason: str, other: "MemoryExchange") -> Swap:
        next_slot_s = other._place.next_slot_s(asyncio.get_running_loop().time())
        return Swap(answer, reason, their_round=other._place.round, next_slot_s=next_slot_s)


def _timed(swap: Swap, waited_s: float) -> Swap:
    """With the wait for a partner with which no transfer came to an end."""
    return swap if swap.answer is Answer.ACCEPT else replace(swap, seconds=waited_s)


def _swap(slot: Slot, given: Offer, tensors: Tensors, size_bytes: tuple[int, int]) -> Swap:
    """A trade that came about; bytes sent and received."""
    return Swap(
        Answer.ACCEPT,
        f"traded in {words(slot)}",
        tensors,
        dict(given.note),
        slot.round,
        bytes_sent=size_bytes[0],
        bytes_received=size_bytes[1],
    )


def size_bytes(tensors: Tensors) -> int:
    """Of named tensors as they are."""
    return sum(tensor.nbytes for tensor in tensors.values())


async def _stop(transfers: list[asyncio.Task[None]]) -> None:
    for transfer in transfers:
        transfer.cancel()
    await asyncio.gather(*transfers, return_exceptions=True)


def _problem(receiver: Offer, sender: Offer) -> str | None:
    """Why a receiver refuses what a sender offers; None where it does not."""
    expect = layout_of(receiver.send) if receiver.expect is None else receiver.expect
    return first_difference(expect, layout_of(sender.send))


def _check_finite(offers: Mapping[PeerId, Offer]) -> None:
    for offer in offers.values():
        for name, tensor in offer.send.items():
            if not codec.is_finite(tensor):
                raise ProtocolError(f"tensor '{name}' holds NaN or infinite values")


def _clone(tensors: Tensors) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}
