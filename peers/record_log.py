"""`RecordLog`: the members' records that a DHT node holds under one key, in the order in which they came.

Whoever read up to one place in it need only be told what came behind that place; and of a record that was merely
renewed only the signature and the new expiration, not the body, which it has.
"""

from bisect import bisect_right
from dataclasses import dataclass
from operator import itemgetter

from peers.exchange import PeerId
from peers.record import SIGNATURE_BYTES

MOST_MEMBERS = 1 << 17
"""A log takes no further members while it holds so many that are alive: ids cost a stranger nothing."""
MOST_CHANGES = 256
MOST_BYTES = 32 * 1024
"""How much one page tells."""


@dataclass(frozen=True, slots=True)
class Change:
    """A record that came, or a renewal of one."""

    peer: PeerId
    expires: float
    """Unix time, seconds."""
    signature: bytes
    body: bytes
    """Empty where it is the body of this peer's record that the reader was told before."""

    @classmethod
    def of(cls, peer: PeerId, record: bytes, expires: float, *, body_known: bool = False) -> "Change":
        """Splits a sealed record."""
        return cls(peer, expires, record[:SIGNATURE_BYTES], b"" if body_known else record[SIGNATURE_BYTES:])


@dataclass(frozen=True, slots=True)
class Page:
    """What came behind a place in a log."""

    epoch: bytes
    """Names the log; another one where its node was started anew."""
    number: int
    """The place up to which it was read now."""
    changes: tuple[Change, ...] = ()
    """Oldest first."""
    more: bool = False
    """Whether there is more behind `number` now."""
    held: bool = False
    """Whether the record that came with the question is held."""


@dataclass(slots=True)
class _Held:
    number: int
    body_number: int
    """When this body came first."""
    record: bytes
    expires: float


class RecordLog:
    """The latest record of each peer, numbered as they came. Checks nothing: what is noted here was checked."""

    def __init__(self, epoch: bytes) -> None:
        """`epoch`: 8 random bytes, others for each log."""
        self.epoch = epoch
        self._number = 0
        self._held: dict[PeerId, _Held] = {}
        self._order: list[tuple[int, PeerId]] = []
        """Each number and whose record it was; those of records that were replaced since are swept out now and then."""

    def note(self, peer: PeerId, record: bytes, expires: float, now: float) -> None:
        """Takes a peer's new record in place of its last. `now` and `expires`: unix seconds."""
        before = self._held.get(peer)
        if len(self._order) > 2 * len(self._held) + 64 or (before is None and len(self._held) >= MOST_MEMBERS):
            self._sweep(now)
        if before is None and len(self._held) >= MOST_MEMBERS:
            return
        self._number += 1
        body_number = self._number
        if before is not None and before.record[SIGNATURE_BYTES:] == record[SIGNATURE_BYTES:] and before.expires > now:
            body_number = before.body_number  # readers that were here since have it; one that expired, they may not
        self._held[peer] = _Held(self._number, body_number, record, expires)
        self._order.append((self._number, peer))

    def latest(self, peer: PeerId) -> tuple[bytes, float] | None:
        """A peer's record and its expiration; None where there is none. It may have expired."""
        held = self._held.get(peer)
        return (held.record, held.expires) if held else None

    def since(self, epoch: bytes, number: int, now: float) -> Page:
        """What came behind `number` and is alive at `now`, as much as fits on a page. All, where `epoch` is another."""
        number = min(number, self._number) if epoch == self.epoch else 0
        read, size = number, 0
        changes: list[Change] = []
        for place in range(bisect_right(self._order, number, key=itemgetter(0)), len(self._order)):
            at, peer = self._order[place]
            held = self._held.get(peer)
            if held is None or held.number != at or held.expires <= now:
                read = at
                continue
            if len(changes) == MOST_CHANGES or size >= MOST_BYTES:
                return Page(self.epoch, read, tuple(changes), more=True)
            change = Change.of(peer, held.record, held.expires, body_known=held.body_number <= number)
            changes.append(change)
            size += len(held.record)
            read = at
        return Page(self.epoch, read, tuple(changes))

    def _sweep(self, now: float) -> None:
        self._held = {peer: held for peer, held in self._held.items() if held.expires > now}
        self._order = sorted((held.number, peer) for peer, held in self._held.items())
