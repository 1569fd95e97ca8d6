"""`Roll`: the members' records, read from the nodes that hold them, each checked once, so many at a time."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from peers.errors import DaemonError, PeersError, ProtocolError
from peers.exchange import PeerId
from peers.record import Checked, Member, RecordValidator, unseal
from peers.record_line import OwnRecord, RecordLine
from peers.record_log import Change

HOLDERS = 5
"""A record is brought to, and looked for at, so many nodes."""
MOST_CHECKS = 1024
"""About so many signatures are checked in one look, 0.1 ms each; what is left is read in the next."""
_MOST_TRIES = 10
_MOST_BROUGHT = 2
MOST_PAGES = 32
"""So many pages are read from one holder in one look, three times what may be checked; the rest in the next."""
_MOST_PAGES_S = 4.0
"""A slow holder is read for so long in one look; less than what a look may take, so that it keeps nothing from it."""
_AT_ONCE = 16
_PIECE = 64
_MOST_LINES = 16

_log = logging.getLogger(__name__)

Seen = Callable[[Sequence[Member]], Awaitable[None]]


class Holders(Protocol):
    """Who holds a key's records, and how they are asked; `peers.dht.Dht`."""

    validator: RecordValidator

    def holders(self, key: str) -> list[PeerId]: ...

    def line(self, key: str, holder: PeerId) -> RecordLine: ...

    def release(self, kept: Collection[PeerId]) -> None: ...

    async def forget(self, peer: PeerId) -> None: ...


@dataclass(slots=True)
class _Look:
    """One look at all holders."""

    own: OwnRecord | None
    known: Callable[[PeerId], float]
    seen: Seen
    checks_left: int = MOST_CHECKS


@dataclass(frozen=True, slots=True)
class _Job:
    """A record to be checked, and the latest good one of that peer."""

    change: Change
    latest: Checked | None


class Roll:
    """Reads what is new at the holders of a run's key, and brings them our own record."""

    def __init__(self, dht: Holders, key: str, raw_key: bytes) -> None:
        """`raw_key`: the key as signatures cover it."""
        self._dht = dht
        self._key = key
        self._key_bytes = raw_key
        self._lines: dict[PeerId, RecordLine] = {}
        self._checking = asyncio.Lock()

    async def consult(self, own: OwnRecord | None, known: Callable[[PeerId], float], seen: Seen) -> int:
        """Asks the holders nearest to the key; returns how many of them answered.

        `known` tells the expiration of a member's record that was seen before, and `seen` is told the newer ones, page
        by page. A holder that does not answer is forgotten, and the next nearest is asked in its place.
        """
        look = _Look(own, known, seen)
        tried: list[PeerId] = []
        answered: list[PeerId] = []
        while len(answered) < HOLDERS and len(tried) < _MOST_TRIES:
            untried = [holder for holder in self._dht.holders(self._key) if holder not in tried]
            asked = untried[: HOLDERS - len(answered)]
            if not asked:
                break
            tried += asked
            good = await asyncio.gather(*(self._ask(holder, look) for holder in asked))
            answered += [holder for holder, answers in zip(asked, good, strict=True) if answers]
        self._dht.release(answered)
        for holder in list(self._lines.keys() - set(answered))[: max(len(self._lines) - _MOST_LINES, 0)]:
            del self._lines[holder]
        return len(answered)

    async def _ask(self, holder: PeerId, look: _Look) -> bool:
        line = self._lines.setdefault(holder, self._dht.line(self._key, holder))
        brought = pages = 0
        until = asyncio.get_running_loop().time() + _MOST_PAGES_S
        try:
            while True:
                brought += line.lacks(look.own)
                page = await line.read(look.own)
                await self._take(page.changes, line, look)
                pages += 1
                in_time = pages < MOST_PAGES and asyncio.get_running_loop().time() < until
                on = page.more and look.checks_left > 0 and in_time
                if not on and (brought >= _MOST_BROUGHT or not line.lacks(look.own)):
                    return True
        except DaemonError as error:  # says nothing about the holder; whether p2pd comes back is the keeper's affair
            _log.debug("%s was not asked: %s", holder, error)
            return False
        except (PeersError, TimeoutError) as error:
            _log.debug("%s does not tell the members: %r", holder, error)
            await self._dht.forget(holder)
            return False

    async def _take(self, changes: Sequence[Change], line: RecordLine, look: _Look) -> None:
        async with self._checking:  # so that what one holder told is known when another tells it
            for start in range(0, len(changes), _PIECE):
                await self._take_piece(changes[start : start + _PIECE], line, look)

    async def _take_piece(self, changes: Sequence[Change], line: RecordLine, look: _Look) -> None:
        validator, key = self._dht.validator, self._key_bytes
        members: list[Member] = []
        jobs: list[_Job] = []
        for change in changes:
            latest = validator.latest(key, change.peer)
            if look.known(change.peer) >= change.expires:
                continue
            if latest is not None and latest.member.expires >= change.expires:
                members.append(latest.member)
            else:
                jobs.append(_Job(change, latest))
        look.checks_left -= len(jobs)
        if len(jobs) > _AT_ONCE:
            results = await asyncio.to_thread(_check_all, key, jobs)
        else:
            results = _check_all(key, jobs)
        for job, result in zip(jobs, results, strict=True):
            try:
                if isinstance(result, ProtocolError):
                    raise result
                validator.check_place(key, job.change.expires)
            except ProtocolError as error:
                validator.refuse(error)
                if not job.change.body:
                    line.reread()
            else:
                validator.keep(key, result)
                members.append(result.member)
        if members:
            await look.seen(members)


def _check_all(key: bytes, jobs: Sequence[_Job]) -> list[Checked | ProtocolError]:
    """On any thread."""
    return [_check(key, job) for job in jobs]


def _check(key: bytes, job: _Job) -> Checked | ProtocolError:
    change, latest = job.change, job.latest
    body = change.body or (latest.body if latest is not None else b"")
    record = change.signature + body
    try:
        return Checked(record, unseal(record, key, change.peer, change.expires, latest))
    except ProtocolError as error:
        return error
