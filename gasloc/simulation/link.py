"""Simulated links: how long bytes take between two workers, under virtual time.

Each worker has one full-duplex link: `bandwidth` bytes per second up and as many down, and a one-way delay. A transfer
crosses the sender's up side and the receiver's down side; each side is shared equally by what crosses it at the
moment, and the transfer moves at the smaller of its two shares. A share that one end cannot use is not given to
others (no max-min fairness), so crowded all-to-all traffic is charged slightly too much rather than too little.
"""

import asyncio
import math
from collections.abc import Collection
from dataclasses import dataclass, field

from peers.exchange import PeerId


@dataclass(frozen=True, slots=True)
class Link:
    """One worker's connection. `bandwidth` in bytes per second each way, `latency_s` one way, in seconds."""

    bandwidth: float = math.inf
    latency_s: float = 0.0


@dataclass(eq=False, slots=True)
class _Transfer:
    sender: PeerId
    receiver: PeerId
    left_bytes: float
    done: asyncio.Future[None]
    rate: float = 0.0
    since_s: float = 0.0
    timer: asyncio.TimerHandle | None = None


@dataclass(eq=False, slots=True)
class _Side:
    """What crosses one direction of one link now, in order of its start."""

    transfers: dict[_Transfer, None] = field(default_factory=dict)


class Network:
    """All links. Use it on a running loop; time is the loop's."""

    def __init__(self, links: dict[PeerId, Link]) -> None:
        self._links = dict(links)
        self._up = {peer: _Side() for peer in links}
        self._down = {peer: _Side() for peer in links}
        self._dirty: dict[_Side, None] = {}
        self.sent_bytes: dict[PeerId, float] = dict.fromkeys(links, 0.0)
        """Bytes whose transfer each worker began, whether or not they arrived."""
        self._sides: list[frozenset[PeerId]] = []
        """Workers that are cut off from all others now, a set a cut."""

    def uploads(self, peer: PeerId) -> int:
        """Transfers that leave a worker now."""
        return len(self._up[peer].transfers)

    def busy(self, peer: PeerId) -> bool:
        """Whether anything crosses a worker's link now."""
        return bool(self._up[peer].transfers or self._down[peer].transfers)

    def cut(self, peer: PeerId) -> None:
        """Breaks every transfer from or to a worker: `ConnectionError` for those who wait for them."""
        for transfer in [*self._up[peer].transfers, *self._down[peer].transfers]:
            if not transfer.done.done():
                transfer.done.set_exception(ConnectionError(f"{peer} is gone"))

    def part(self, side: Collection[PeerId]) -> None:
        """Cuts these off from all others until `heal`, and breaks what is under way between the two sides."""
        self._sides.append(frozenset(side))
        for up in self._up.values():
            for transfer in up.transfers:
                self._check_reach(transfer)

    def heal(self, side: Collection[PeerId]) -> None:
        """Ends the cut that `part` began with the same workers. Raises `ValueError` where there is none."""
        self._sides.remove(frozenset(side))

    @property
    def parted(self) -> bool:
        """Whether there is a cut now."""
        return bool(self._sides)

    def reaches(self, one: PeerId, other: PeerId) -> bool:
        """Whether no cut lies between two of them now."""
        return all((one in side) == (other in side) for side in self._sides)

    def latency_s(self, one: PeerId, other: PeerId) -> float:
        """One-way delay between two workers: the sum of their links' delays, seconds."""
        return self._links[one].latency_s + self._links[other].latency_s

    async def hello(self, one: PeerId, other: PeerId) -> None:
        """A word from one worker to another and its answer: one round trip, no bytes to speak of.

        Raises `ConnectionError` where a cut lies between them then.
        """
        await asyncio.sleep(2 * self.latency_s(one, other))
        if not self.reaches(one, other):
            raise ConnectionError(f"{other} cannot be reached")

    async def transfer(self, sender: PeerId, receiver: PeerId, size_bytes: float) -> None:
        """Returns when the last byte has arrived. When cancelled, the rest is not sent and its share is free.

        Raises `ConnectionError` when either end is cut off on the way, or was before.
        """
        self.sent_bytes[sender] += size_bytes
        loop = asyncio.get_running_loop()
        transfer = _Transfer(sender, receiver, size_bytes, loop.create_future(), since_s=loop.time())
        self._up[sender].transfers[transfer] = None
        self._down[receiver].transfers[transfer] = None
        self._check_reach(transfer)
        self._changed(sender, receiver)
        try:
            await transfer.done
        finally:
            if transfer.timer is not None:
                transfer.timer.cancel()
            del self._up[sender].transfers[transfer]
            del self._down[receiver].transfers[transfer]
            self._changed(sender, receiver)
        await asyncio.sleep(self.latency_s(sender, receiver))

    def _check_reach(self, transfer: _Transfer) -> None:
        if not self.reaches(transfer.sender, transfer.receiver) and not transfer.done.done():
            transfer.done.set_exception(ConnectionError(f"{transfer.sender} and {transfer.receiver} are cut apart"))

    def _changed(self, sender: PeerId, receiver: PeerId) -> None:
        """Has the rates set anew, once for all that begins or ends at this moment."""
        if not self._dirty:
            asyncio.get_running_loop().call_soon(self._share_again)
        self._dirty[self._up[sender]] = None
        self._dirty[self._down[receiver]] = None

    def _share_again(self) -> None:
        """Sets anew the rates of what shares a side that changed."""
        sides, self._dirty = self._dirty, {}
        touched = {transfer: None for side in sides for transfer in side.transfers}
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        for transfer in touched:
            if transfer.done.done():
                continue
            rate = min(
                self._links[transfer.sender].bandwidth / len(self._up[transfer.sender].transfers),
                self._links[transfer.receiver].bandwidth / len(self._down[transfer.receiver].transfers),
            )
            if transfer.timer is not None:
                if rate == transfer.rate:
                    continue
                transfer.timer.cancel()
                transfer.left_bytes = max(0.0, transfer.left_bytes - transfer.rate * (now_s - transfer.since_s))
            transfer.rate, transfer.since_s = rate, now_s
            transfer.timer = loop.call_at(now_s + transfer.left_bytes / rate, _finish, transfer.done)


def _finish(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)
