"""Whom we met before and where, and meeting them again when our DHT node has lost them."""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence

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
        """Meets again those that our DHT node lost and that are due; each after longer pauses, see `peers.backoff`."""
        self.remember()
        known = {*self._remembered, *(one.peer_id for one in self._told)} - {self._daemon.peer_id}
        lost = [peer for peer in known if not self._dht.knows(peer)]
        alone = len(lost) == len(known)
        due = [peer for peer in lost if time.monotonic() >= self._next_try.get(peer, 0.0)]
        due = random.sample(due, min(len(due), _AT_ONCE))
        await asyncio.gather(*(self._meet(peer, alone=alone) for peer in due))
        for peer in self._next_try.keys() - set(lost):
            self._failures.pop(peer, None)
            del self._next_try[peer]

    async def renew(self) -> None:
        """Meets again all that are lost, however short ago they were tried: it was we who were away."""
        self._failures.clear()
        self._next_try.clear()
        await self.mend()

    async def _meet(self, peer: PeerId, *, alone: bool) -> None:
        for text in self.addresses_of(peer):
            try:
                await contact.connect(parse(text), self._daemon, self._dht)
                return
            except PeersError as error:
                _log.debug("%s is still lost: %s", peer, error)
        failures = self._failures[peer] = self._failures.get(peer, 0) + 1
        pause = pause_s(failures - 1, alone=alone, jitter=random.random(), first_s=EVERY_S)
        self._next_try[peer] = time.monotonic() + pause
