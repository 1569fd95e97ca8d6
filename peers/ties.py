"""Whom we met before and where, and meeting them again when our DHT node has lost them."""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from peers import contact
from peers.address import Address, parse
from peers.backoff import pause_s
from peers.daemon import Daemon
from peers.dht import Dht
from peers.errors import PeersError
from peers.exchange import PeerId
from peers.membership import Member

EVERY_S = 5.0
_AT_ONCE = 8
_MAX_REMEMBERED = 256
_MEET_S = 10.0

_log = logging.getLogger(__name__)


class Ties:
    """Peers' addresses beyond their records' lives; and the connections to those peers, kept up.

    Without this, two halves of a swarm that were cut from each other would stay apart for ever.
    """

    def __init__(
        self,
        daemon: Daemon,
        dht: Dht,
        *,
        initial: Sequence[Address],
        cached: Sequence[Address],
        members: Callable[[], Mapping[PeerId, Member]],
    ) -> None:
        """`initial`: addresses that we were told; `cached`: of another time; `members`: those that are seen now."""
        self._daemon = daemon
        self._dht = dht
        self._told = [*initial, *cached]
        self._members = members
        self._remembered: dict[PeerId, Sequence[str]] = {}
        self._failures: dict[PeerId, int] = {}
        self._lost_at: dict[PeerId, float] = {}
        self._next_try: dict[PeerId, float] = {}

    def addresses_of(self, peer: PeerId) -> list[str]:
        """Where a peer may be dialled: what it published last, then what we were told at the start."""
        told = [str(address) for address in self._told if address.peer_id == peer]
        return [*self._remembered.get(peer, ()), *told]

    def remember(self) -> None:
        """Keeps the addresses of those that are members now."""
        for peer, member in self._members().items():
            if peer != self._daemon.peer_id and member.addresses:
                self._remembered.pop(peer, None)
                self._remembered[peer] = member.addresses
        for peer in list(self._remembered)[:-_MAX_REMEMBERED]:
            del self._remembered[peer]

    async def mend(self) -> None:
        """Meets again those that are lost and due; each after longer pauses, see `peers.backoff`.

        Lost is whom our DHT node does not know and who is not seen as a member; or all, where it knows nobody.
        """
        self.remember()
        await self._mend(self._members())

    async def _mend(self, seen: Collection[PeerId]) -> None:
        known = {*self._remembered, *(one.peer_id for one in self._told)} - {self._daemon.peer_id}
        unknown = {peer for peer in known if not self._dht.knows(peer)}
        alone = unknown == known
        lost = unknown if alone else unknown - set(seen)
        for peer in self._lost_at.keys() - lost:
            del self._lost_at[peer]
            self._failures.pop(peer, None)
            self._next_try.pop(peer, None)
        for peer in lost:
            self._lost_at.setdefault(peer, time.monotonic())
        due = [peer for peer in lost if time.monotonic() >= self._next_try.get(peer, 0.0)]
        random.shuffle(due)
        due.sort(key=lambda peer: self._next_try.get(peer, 0.0))  # those that wait for longest
        met = await asyncio.gather(*(self._meet(peer, alone=alone) for peer in due[:_AT_ONCE]))
        if any(met):
            await self._dht.explore()  # with it come those that it knows

    async def renew(self) -> None:
        """Meets again all that are lost, however short ago they were tried: it was we who were away."""
        self._failures.clear()
        self._next_try.clear()
        self._lost_at.clear()
        self.remember()
        await self._mend(())

    async def _meet(self, peer: PeerId, *, alone: bool) -> bool:
        began = time.monotonic()
        failures = self._failures.get(peer, 0)
        self._failures[peer] = failures + 1
        lost_s = began - self._lost_at.get(peer, began)
        pause = pause_s(failures, lost_s=lost_s, alone=alone, jitter=random.random(), first_s=EVERY_S)
        self._next_try[peer] = began + pause
        addresses = self.addresses_of(peer)
        first = failures % len(addresses) if addresses else 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_MEET_S):
                for text in [*addresses[first:], *addresses[:first]]:  # each comes first once, as the time may not do
                    try:
                        await contact.connect(parse(text), self._daemon, self._dht)
                        return True
                    except PeersError as error:
                        _log.debug("%s is still lost: %s", peer, error)
        return False
