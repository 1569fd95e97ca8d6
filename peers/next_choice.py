"""A peer that is left over in a slot finds another that is."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

from peers.exchange import Answer, PeerId, Slot, Swap
from peers.hello import Hello, Stage
from peers.partner_search import Meeting, PartnerSearch, discard
from peers.rendezvous import Opening, Rendezvous

_SURVEY_S = 2.0
_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 2.0

_MAYBE_LATER = (Answer.BEHIND, Answer.BUSY, Answer.ACCEPT)


class NextChoice:
    """Asks candidates whether they are left over too, and trades with the first that is; or is chosen by one.

    All candidates are probed at once, which binds nobody. Then those that are free are asked for the trade, one
    after another, which binds both. While this peer asks one it cannot be had by others, so nobody is ever in two
    trades; `Rendezvous` sees to it that no ring of askers waits for each other.
    """

    def __init__(self, search: PartnerSearch, rendezvous: Rendezvous) -> None:
        self._search = search
        self._rendezvous = rendezvous

    async def find(
        self, slot: Slot, candidates: Sequence[PeerId], note: Mapping[str, float], deadline: float
    ) -> tuple[Meeting | None, dict[PeerId, Swap]]:
        """An accepted stream with one that is left over, if any, and what the candidates answered last.

        Ends at `deadline`, by the event loop's clock, or once no candidate can be had any more. Cancelled, it
        leaves no stream open.
        """
        heard: dict[PeerId, Swap] = {}
        opening = self._rendezvous.open(slot)
        seeking = asyncio.create_task(self._seek(opening, candidates, note, deadline, heard))
        arrived = asyncio.create_task(opening.arrived.wait())
        try:
            await asyncio.wait({seeking, arrived}, return_when=asyncio.FIRST_COMPLETED)
            if opening.partner is None:
                met = await seeking
                return met, _declines(heard, met)
            await discard(seeking)
            incoming = opening.take()
            assert incoming is not None, "a stream is taken once"
            met = Meeting(opening.partner, incoming.wire, incoming.hello.note, incoming)
            return met, _declines(heard, met)
        finally:
            if not seeking.done():
                await discard(seeking)
            arrived.cancel()
            self._rendezvous.shut(opening)

    async def _seek(
        self,
        opening: Opening,
        candidates: Sequence[PeerId],
        note: Mapping[str, float],
        deadline: float,
        heard: dict[PeerId, Swap],
    ) -> Meeting | None:
        """Asks until one accepts, nobody is left to ask, or time is over."""
        loop = asyncio.get_running_loop()
        hello = self._search.hello(opening.slot, note, left_over=True)
        pause_s = _FIRST_PAUSE_S
        open_to_us = list(candidates)
        while open_to_us and loop.time() < deadline:
            heard |= await self._survey(open_to_us, hello, deadline)
            for peer in open_to_us:
                if opening.partner is not None:
                    return None
                if heard[peer].answer is Answer.ACCEPT:
                    met = await self._propose(opening, peer, hello, deadline)
                    if isinstance(met, Meeting):
                        return met
                    heard[peer] = met
                    if opening.held:  # somebody waits for us: it has the pause below to come in
                        break
            open_to_us = [peer for peer in open_to_us if heard[peer].answer in _MAYBE_LATER]
            if open_to_us:
                await asyncio.sleep(min(pause_s, max(deadline - loop.time(), 0.0)))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return None

    async def _survey(self, peers: Sequence[PeerId], hello: Hello, deadline: float) -> dict[PeerId, Swap]:
        """What each would answer now. One that is slow to say holds up nobody."""
        limit_s = min(_SURVEY_S, max(deadline - asyncio.get_running_loop().time(), 0.0))
        probes = {peer: asyncio.create_task(self._search.ask(peer, hello)) for peer in peers}
        try:
            await asyncio.wait(probes.values(), timeout=limit_s)
            return {
                peer: probe.result() if probe.done() else Swap(Answer.TIMEOUT, "did not answer in time")
                for peer, probe in probes.items()
            }
        finally:
            for probe in probes.values():
                probe.cancel()
            await asyncio.gather(*probes.values(), return_exceptions=True)

    async def _propose(self, opening: Opening, peer: PeerId, hello: Hello, deadline: float) -> Meeting | Swap:
        """Asks one for the trade; nobody else can have us until it has answered."""
        limit_s = asyncio.get_running_loop().time() + self._search.handshake_s
        stage = Stage.OPEN
        self._rendezvous.move(opening.slot, Stage.ASKING)
        try:
            met = await self._search.dial(peer, hello, min(deadline, limit_s))
            if isinstance(met, Meeting):
                stage = Stage.TAKEN
            return met
        finally:
            self._rendezvous.move(opening.slot, stage)


def _declines(heard: Mapping[PeerId, Swap], met: Meeting | None) -> dict[PeerId, Swap]:
    """The answers of all but the one that was met. Those who would have traded were not asked to."""
    unasked = "left over too, but another was met first" if met else "left over too, but not in time"
    return {
        peer: replace(swap, answer=Answer.BUSY, reason=unasked) if swap.answer is Answer.ACCEPT else swap
        for peer, swap in heard.items()
        if not (met and peer == met.partner)
    }
