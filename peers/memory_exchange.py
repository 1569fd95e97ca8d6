"""`Exchange` in one process: no bytes, no streams, the same answers."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace

import torch

from peers import codec
from peers.exchange import Answer, Offer, PeerId, Slot, Swap, Tensors, layout_of
from peers.hello import Place, whereabouts, words
from peers.stream_exchange import check_offers
from peers.table import first_difference

Carry = Callable[[PeerId, PeerId, Tensors], Awaitable[int]]
"""Takes as long as a link needs for tensors from the first peer to the second; returns their bytes on the wire.

Raises `ConnectionError` when the link breaks.
"""


@dataclass(slots=True, eq=False)
class _Wait:
    offer: Offer
    outcome: asyncio.Future[Swap]
    transfer: asyncio.Task[None] | None = None
    """Set once the partner is there and bytes are under way."""

    def end(self, swap: Swap) -> None:
        if not self.outcome.done():
            self.outcome.set_result(swap)


class MemoryHub:
    """The peers of one process that can reach each other. All must run on one event loop.

    With `carry` a trade takes the time that its links need; without, none.
    """

    def __init__(self, carry: Carry | None = None) -> None:
        self.carry = carry
        self.members: dict[PeerId, MemoryExchange] = {}
        self.waiting: dict[PeerId, dict[tuple[MemoryExchange, Slot], None]] = {}
        """Who waits for a peer, and in which slots."""


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
        hub.members[me] = self

    @property
    def me(self) -> PeerId:
        """Our own id."""
        return self._me

    async def close(self) -> None:
        """Leaves the hub: our swaps end with `STOPPED`, those that wait for us with `UNREACHABLE`."""
        self._hub.members.pop(self._me, None)
        await _stop([wait.transfer for wait in self._waits.values() if wait.transfer])
        for wait in list(self._waits.values()):
            wait.end(Swap(Answer.STOPPED, "this peer is leaving"))
        self._tell_others()

    async def swap(self, slot: Slot, offers: Mapping[PeerId, Offer], *, timeout_s: float) -> dict[PeerId, Swap]:
        """See `Exchange.swap` and, for what it raises, `StreamExchange.swap`."""
        check_offers(self._me, offers)
        loop = asyncio.get_running_loop()
        for partner in offers:
            if (slot, partner) in self._waits:
                raise ValueError(f"a swap with {partner} in {words(slot)} is under way already")
        self._place.reach(slot)
        unfit = _unfit(offers)
        if unfit:
            self._tell_others()
            return {partner: Swap(Answer.REFUSED, f"nothing was sent: our own {unfit}") for partner in offers}
        waits = {partner: _Wait(offer, loop.create_future()) for partner, offer in offers.items()}
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
            return {
                partner: wait.outcome.result() if wait.outcome.done() else self._too_late(slot, partner)
                for partner, wait in waits.items()
            }
        finally:
            for partner in waits:
                self._waits.pop((slot, partner), None)
                self._hub.waiting[partner].pop((self, slot), None)
            await _stop([wait.transfer for wait in waits.values() if wait.transfer and not wait.outcome.done()])

    def _tell_others(self) -> None:
        """Has those that wait for us look again."""
        for other, slot in list(self._hub.waiting.get(self._me, ())):
            other._consider(slot, self._me)

    def _consider(self, slot: Slot, partner: PeerId) -> None:
        """Ends our wait for a partner if that can be decided now."""
        wait = self._waits[slot, partner]
        other = self._hub.members.get(partner)
        if wait.outcome.done() or wait.transfer:
            return
        if other is None:
            wait.end(Swap(Answer.UNREACHABLE, f"{partner} cannot be reached: it is not in this process"))
            return
        theirs = other._waits.get((slot, self._me))
        if theirs and not theirs.outcome.done() and not theirs.transfer:
            self._trade(slot, wait, other, theirs)
            return
        answer, reason = whereabouts(slot, other._place)
        if answer is not Answer.BEHIND:
            wait.end(Swap(answer, f"{partner}: {reason}", their_round=other._place.round))

    def _trade(self, slot: Slot, ours: _Wait, other: "MemoryExchange", theirs: _Wait) -> None:
        """Both sides at once: both get the other's tensors, or neither does."""
        problem = _problem(ours.offer, theirs.offer) or _problem(theirs.offer, ours.offer)
        if problem:
            for wait in (ours, theirs):
                wait.end(Swap(Answer.REFUSED, f"{self.me} and {other.me}: {problem}"))
            return
        swaps = (_traded(slot, theirs.offer), _traded(slot, ours.offer))
        if self._hub.carry is None:
            ours.end(swaps[0])
            theirs.end(swaps[1])
            return
        carrying = self._carry(self._hub.carry, other, (ours, theirs), swaps)
        ours.transfer = theirs.transfer = asyncio.get_running_loop().create_task(carrying)

    async def _carry(
        self, carry: Carry, other: "MemoryExchange", waits: tuple[_Wait, _Wait], swaps: tuple[Swap, Swap]
    ) -> None:
        """Ends both waits once both directions have arrived, or with `BROKEN` when one cannot."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        ours, theirs = waits
        legs = [
            asyncio.ensure_future(carry(self.me, other.me, ours.offer.send)),
            asyncio.ensure_future(carry(other.me, self.me, theirs.offer.send)),
        ]
        broken = f"the transfer of {self.me} and {other.me} broke"
        try:
            sent, came = await asyncio.gather(*legs)
        except ConnectionError as error:
            for wait in waits:
                wait.end(Swap(Answer.BROKEN, f"{broken}: {error}"))
        except asyncio.CancelledError:
            for wait in waits:
                wait.end(Swap(Answer.BROKEN, f"{broken}: one of them left"))
            raise
        else:
            seconds = loop.time() - began
            ours.end(replace(swaps[0], bytes_sent=sent, bytes_received=came, seconds=seconds))
            theirs.end(replace(swaps[1], bytes_sent=came, bytes_received=sent, seconds=seconds))
        finally:
            for leg in legs:
                leg.cancel()

    def _too_late(self, slot: Slot, partner: PeerId) -> Swap:
        other = self._hub.members.get(partner)
        if other is None:
            return Swap(Answer.UNREACHABLE, f"{partner} left")
        _, reason = whereabouts(slot, other._place)
        return Swap(Answer.BEHIND, f"{partner}: {reason}", their_round=other._place.round)


def _traded(slot: Slot, given: Offer) -> Swap:
    return Swap(Answer.ACCEPT, f"traded in {words(slot)}", _clone(given.send), dict(given.note), slot.round)


async def _stop(transfers: list[asyncio.Task[None]]) -> None:
    for transfer in transfers:
        transfer.cancel()
    await asyncio.gather(*transfers, return_exceptions=True)


def _problem(receiver: Offer, sender: Offer) -> str | None:
    """Why a receiver refuses what a sender offers; None where it does not."""
    expect = layout_of(receiver.send) if receiver.expect is None else receiver.expect
    return first_difference(expect, layout_of(sender.send))


def _unfit(offers: Mapping[PeerId, Offer]) -> str | None:
    for offer in offers.values():
        for name, tensor in offer.send.items():
            if not codec.is_finite(tensor):
                return f"tensor '{name}' holds NaN or infinite values"
    return None


def _clone(tensors: Tensors) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}
