"""Who is in the run: our own record, kept alive, and a view of everybody's."""

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace

from peers.dht import Dht, key_bytes, now
from peers.errors import PeersError
from peers.exchange import PeerId
from peers.identity import Identity
from peers.record import Member as Member
from peers.record import MemberState as MemberState
from peers.record import Status as Status
from peers.record import seal
from peers.record_line import OwnRecord
from peers.roll import Roll

LIFE_S = 20.0
RENEW_S = 6.0
REFRESH_S = 1.0
MAX_LIVES = 3
"""No record is taken that lives longer than so many lives: a dead member must vanish."""
_FIND_S = 10.0
_STORE_S = 10.0
_GOODBYE_S = 2.0
_LATER_S = 0.001
_EARLY_S = 0.05
_SEEN_AT_ONCE = 8
_FIRST_SURVEY_S = 1.0
_LAST_SURVEY_S = 20.0

_log = logging.getLogger(__name__)


def look_pause_s(members: int, refresh_s: float) -> float:
    """How long to wait between two looks at so many members' records, seconds.

    A look reads what is new, from the nodes that hold them. With more than `_SEEN_AT_ONCE` members the pause grows
    with them, up to two and a half times `refresh_s`: these nodes answer everybody.
    """
    return refresh_s * min(max(1.0, members / _SEEN_AT_ONCE), 2.5)


class Membership:
    """Publishes our record and watches the others'.

    A record lives `life_s` and is renewed every `renew_s` whatever the trainer does; the view is refreshed
    every `refresh_s`. Both go on in tasks of their own from `start` to `close`. A member is alive until its
    record expires or says that it leaves.
    """

    def __init__(
        self,
        dht: Dht,
        identity: Identity,
        *,
        run: str,
        digest: str,
        badge: Callable[[PeerId], str] | None = None,
        addresses: Callable[[], Sequence[str]] = tuple,
        reachable: Callable[[], bool] = lambda: True,
        check: Callable[[], bool] = lambda: True,
        life_s: float = LIFE_S,
        renew_s: float = RENEW_S,
        refresh_s: float = REFRESH_S,
        clock: Callable[[], float] = now,
    ) -> None:
        """`badge` gives what a member publishes in place of the digest, where only members can know that; the
        view shows the digest in its place, and nothing for one that has only the digest.

        `addresses` and `reachable` tell what to publish about us now. `check` tells whether p2pd is up; it raises
        where p2pd is gone for good. `clock` gives unix seconds.
        """
        self._dht = dht
        self._identity = identity
        self._digest = digest
        self._badge = badge or (lambda peer: digest)
        self._addresses = addresses
        self._reachable = reachable
        self._check = check
        self._life_s = life_s
        self._renew_s = renew_s
        self._refresh_s = refresh_s
        self._clock = clock
        self._key = f"gasloc/{run}/members"
        self._key_bytes = key_bytes(self._key)
        self._roll = Roll(dht, self._key, self._key_bytes)
        self._own: OwnRecord | None = None
        """What holders are to hold of us."""
        self._stored_at = 0.0
        self._survey_pause_s = _FIRST_SURVEY_S
        self._status: Status | None = None
        self._view: dict[PeerId, Member] = {}
        self._set_aside: dict[PeerId, tuple[float, str]] = {}
        """The expiration of the record known then, and why."""
        self._changed = asyncio.Condition()
        self._publishing = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Watches from now on, and renews what was published."""
        self._dht.validator.key = self._key_bytes
        self._tasks = [
            asyncio.create_task(self._repeat(self._renew_when_due, self._until_due_s)),
            asyncio.create_task(self._repeat(self._look, lambda: look_pause_s(len(self._view), self._refresh_s))),
            asyncio.create_task(self._repeat(self._survey, lambda: self._survey_pause_s)),
        ]

    async def publish(self, status: Status) -> None:
        """Tells the swarm our status. It is renewed from then on, until the next one or `withdraw`.

        While p2pd is being started again, `wake` does it later. Raises `DaemonError` when p2pd has ended for good,
        and `ProtocolError` for a status that others would refuse, such as a negative round.
        """
        up = self._check()
        async with self._publishing:
            if up:
                await self._store(status, self._life_s)
            self._status = status

    async def wake(self) -> None:
        """Renews our record and looks at everybody's at once: after time in which we did neither."""
        await self._renew()
        with contextlib.suppress(TimeoutError):
            await self.refresh()

    async def refresh(self) -> dict[PeerId, Member]:
        """Looks for everybody's record now; returns the view as `members` does.

        Keeps the old view where nobody answers.
        """
        async with asyncio.timeout(_FIND_S):
            await self._consult()
        time = self._clock()
        self._view = {peer: member for peer, member in self._view.items() if member.expires > time}
        return self.members()

    def members(self) -> dict[PeerId, Member]:
        """Those that are alive and not set aside, as last seen; our own record included once published."""
        time = self._clock()
        return {
            peer: member
            for peer, member in self._view.copy().items()
            if member.expires > time
            and member.status.state is not MemberState.LEAVING
            and member.expires > self._set_aside.get(peer, (0.0,))[0]
        }

    def set_aside(self, peer: PeerId, reason: str) -> None:
        """Leaves a peer out of `members` until a record of it is seen that is newer than the one known now."""
        known = self._view.get(peer)
        if known:
            _log.info("%s is set aside: %s", peer, reason)
            self._set_aside[peer] = known.expires, reason

    def left_aside(self) -> dict[PeerId, tuple[str, float]]:
        """Those that `set_aside` leaves out now: why, and in how many seconds the record known of them runs out.

        A newer record ends it sooner; without one the peer is not a member after that.
        """
        time, view = self._clock(), self._view.copy()
        return {
            peer: (reason, expires - time)
            for peer, (expires, reason) in self._set_aside.copy().items()
            if peer in view and time < view[peer].expires <= expires
        }

    async def wait_for(self, count: int, timeout_s: float) -> int:
        """Waits until `count` members are seen, ourselves included; returns how many are, maybe fewer."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: len(self.members()) >= count)
        return len(self.members())

    async def withdraw(self) -> None:
        """Says goodbye: the others see us leave at their next look. Does nothing where nothing was published.

        The DHT cannot delete; the record says `leaving` until it expires, and is not renewed.
        """
        try:
            async with asyncio.timeout(_GOODBYE_S), self._publishing:
                status, self._status = self._status, None
                if status is not None and self._check():
                    leaving = Status(status.round, MemberState.LEAVING, tokens=status.tokens)
                    await self._store(leaving, 0.0)
        except (PeersError, TimeoutError) as error:
            _log.debug("could not say goodbye: %s", error)

    async def close(self) -> None:
        """Stops watching and renewing."""
        self._status = None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    async def _store(self, status: Status, life_s: float) -> None:
        """Only under `_publishing`: a renewal must not overtake a goodbye."""
        expires = self._expiration(life_s)
        me = self._identity.peer_id
        own = Member(me, status, self._badge(me), self._reachable(), tuple(self._addresses()), expires)
        record = seal(own, self._key_bytes, self._identity)
        self._view[me] = self._shown(self._dht.validator.read(record, self._key_bytes, me, expires))  # as others see it
        self._own = OwnRecord(me, record, expires)
        self._stored_at = asyncio.get_running_loop().time()
        async with self._changed:
            self._changed.notify_all()
        try:
            async with asyncio.timeout(_STORE_S):
                if not await self._consult():
                    _log.debug("our record was not stored: nobody answered")
        except TimeoutError:
            _log.debug("our record was not stored everywhere within %g s", _STORE_S)

    async def _consult(self) -> int:
        """Brings our record to those that hold the members' and do not have it, and reads theirs."""
        own = self._own if self._own and self._own.expires > self._clock() else None
        return await self._roll.consult(own, self._known_until, self._absorb)

    def _known_until(self, peer: PeerId) -> float:
        known = self._view.get(peer)
        return known.expires if known else -math.inf

    async def _absorb(self, members: Sequence[Member]) -> None:
        """Takes what was read into the view, unless it is known already."""
        for member in members:
            if self._known_until(member.peer_id) >= member.expires:
                continue
            if member.peer_id == self._identity.peer_id and member.peer_id in self._view:
                _log.warning(
                    "another peer uses our identity, %s: each needs a key file of its own", self._identity.peer_id
                )
            self._view[member.peer_id] = self._shown(member)
        async with self._changed:
            self._changed.notify_all()

    def _shown(self, member: Member) -> Member:
        """See `badge`."""
        if member.digest == self._badge(member.peer_id):
            return replace(member, digest=self._digest)
        return replace(member, digest="") if member.digest == self._digest else member

    def _expiration(self, life_s: float) -> float:
        """Later than any before, or the DHT would keep the old record; but no later than others accept."""
        wanted = self._clock() + life_s
        known = self._view.get(self._identity.peer_id)
        later = known.expires + _LATER_S if known else 0.0
        return later if wanted < later < self._clock() + MAX_LIVES * self._life_s else wanted

    async def _renew(self) -> None:
        async with self._publishing:
            if self._status and self._check():
                await self._store(self._status, self._life_s)

    async def _renew_when_due(self) -> None:
        if self._until_due_s() <= _EARLY_S:
            self._stored_at = asyncio.get_running_loop().time()  # there may be nothing to renew
            await self._renew()

    def _until_due_s(self) -> float:
        """Until our record has to be renewed, unless it is published anew before."""
        passed_s = asyncio.get_running_loop().time() - self._stored_at
        return min(max(self._renew_s - passed_s, _EARLY_S), self._renew_s)

    async def _survey(self) -> None:
        """At first often: newcomers know few nodes, and few know them."""
        self._survey_pause_s = min(2 * self._survey_pause_s, _LAST_SURVEY_S)
        if self._check():
            await self._dht.survey(self._key)

    async def _look(self) -> None:
        if self._check():
            await self.refresh()

    async def _repeat(self, action: Callable[[], Coroutine[None, None, None]], pause_s: Callable[[], float]) -> None:
        while True:
            try:
                await action()
            except (PeersError, TimeoutError) as error:
                _log.debug("%s failed, and will be tried again: %s", action.__name__, error)
            except Exception:
                _log.exception("%s failed, and will be tried again", action.__name__)
            await asyncio.sleep(pause_s())
