"""The states that a donor keeps while they are downloaded: each taken once, and shared by all its downloaders."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto

from peers.errors import PeersError
from peers.exchange import Answer
from peers.manifest import Prepared, Snapshot, prepare

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ShelfLimits:
    """How many states are kept, and for how long. Memory: at most `most` times the state."""

    most: int = 2
    fresh_s: float = 5.0
    """A state younger than this is given to whoever asks next, if it is recent enough for that one."""
    again_s: float = 1.0
    """No state is taken sooner than this after the last."""
    share_s: float = 60.0
    """A state up to this age is given where no other may be taken."""
    idle_s: float = 45.0
    """One that nobody fetched from for so long is dropped. A broken download may resume till then."""
    life_s: float = 6 * 3600.0
    """None is given for longer; a stream that already fetches from it goes on."""


@dataclass(frozen=True, slots=True)
class Standing:
    """A kept state as `choose` sees it."""

    age_s: float
    idle_s: float
    """Since it was last asked for; 0 while somebody fetches from it."""
    in_use: bool
    recent: bool = True
    """Not of an earlier round than the newcomer can use."""


class Choice(Enum):
    """What becomes of a request for a manifest."""

    SHARE = auto()
    """The newest that is kept."""
    TAKE = auto()
    """A new one."""
    REPLACE = auto()
    """A new one, in place of the one that has been idle for longest."""
    FULL = auto()


def choose(kept: Sequence[Standing], limits: ShelfLimits) -> Choice:
    """Whether a newcomer gets a state that is kept, or a new one is taken. Pure.

    What is `again_s` old goes to anybody: else whoever asks for a round that never was could have one taken each time.
    """
    newest_s = min((one.age_s for one in kept), default=float("inf"))
    youngest_s = min((one.age_s for one in kept if one.recent), default=float("inf"))
    if youngest_s < limits.fresh_s or newest_s < limits.again_s:
        return Choice.SHARE
    if len(kept) < limits.most:
        return Choice.TAKE
    if youngest_s < limits.share_s:
        return Choice.SHARE
    return Choice.FULL if all(one.in_use for one in kept) else Choice.REPLACE


@dataclass(eq=False, slots=True)
class _Kept:
    prepared: Prepared
    taken_at: float
    used_at: float
    users: int = 0


class Shelf:
    """Takes states from the trainer on a worker thread, and keeps them within limits.

    Used on the event loop's thread only; the loop's clock is the clock.
    """

    def __init__(self, provide: Callable[[], Snapshot | None], limits: ShelfLimits) -> None:
        """`provide` is called on a worker thread; None: there is no state to give yet."""
        self._provide = provide
        self._limits = limits
        self._kept: list[_Kept] = []
        self._taking: asyncio.Task[Prepared | str] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def kept(self) -> int:
        """How many states are held now."""
        return len(self._kept)

    async def newest(self, least_round: int = 0) -> Prepared | tuple[Answer, str]:
        """A state for a newcomer, of `least_round` if we are so far, or the answer and the reason why there is none.

        Newcomers that ask while one is being taken get the same.
        """
        if self._taking is None:
            self._drop_old()
            choice = choose([self._standing(one, least_round) for one in self._kept], self._limits)
            if choice is Choice.FULL:
                return Answer.BUSY, f"{len(self._kept)} states are being downloaded from it already"
            if choice is Choice.SHARE:
                newest = max(self._kept, key=lambda one: one.taken_at)
                newest.used_at = self._now()
                self._look_later()
                return newest.prepared
            if choice is Choice.REPLACE:
                self._kept.remove(min((one for one in self._kept if not one.users), key=lambda one: one.used_at))
            self._taking = asyncio.create_task(self._take())
        taken = await asyncio.shield(self._taking)
        return (Answer.REFUSED, taken) if isinstance(taken, str) else taken

    def find(self, root: str) -> Prepared | None:
        """The kept state with that root; None where it was dropped, or never was."""
        self._drop_old()
        now, life_s = self._now(), self._limits.life_s
        young = (one.prepared for one in self._kept if now - one.taken_at < life_s)
        return next((prepared for prepared in young if prepared.manifest.root == root), None)

    @contextmanager
    def held(self, prepared: Prepared) -> Iterator[None]:
        """Keeps a state from being dropped as idle."""
        kept = next((one for one in self._kept if one.prepared is prepared), None)
        if kept is None:  # dropped meanwhile; the caller's reference is enough
            yield
            return
        kept.users += 1
        try:
            yield
        finally:
            kept.users -= 1
            kept.used_at = self._now()
            self._look_later()

    async def _take(self) -> Prepared | str:
        try:
            taken = await asyncio.to_thread(self._prepare)
            if isinstance(taken, str):
                return taken
            return self._keep(taken)
        finally:
            self._taking = None

    def _keep(self, prepared: Prepared) -> Prepared:
        same = next((one for one in self._kept if one.prepared.manifest.root == prepared.manifest.root), None)
        now = self._now()
        if same is None:
            same = _Kept(prepared, now, now)
            self._kept.append(same)
        same.taken_at = same.used_at = now
        self._look_later()
        return same.prepared

    def _prepare(self) -> Prepared | str:
        """On a worker thread: takes the state and makes it ready, or says why there is none."""
        try:
            snapshot = self._provide()
            return "it has no state to give yet" if snapshot is None else prepare(snapshot)
        except PeersError as error:
            return f"its own state is unfit: {error}"
        except Exception:
            _log.exception("no state for a newcomer: the trainer failed to give it")
            return "it failed to give its state"

    def _standing(self, kept: _Kept, least_round: int = 0) -> Standing:
        now = self._now()
        idle_s = 0.0 if kept.users else now - kept.used_at
        recent = kept.prepared.manifest.round >= least_round
        return Standing(now - kept.taken_at, idle_s, kept.users > 0, recent)

    def _drop_old(self) -> None:
        limits = self._limits
        standings = [(one, self._standing(one)) for one in self._kept]
        self._kept = [
            one for one, now in standings if now.in_use or (now.idle_s < limits.idle_s and now.age_s < limits.life_s)
        ]

    def _look_later(self) -> None:
        """Memory is freed even if nobody ever asks again."""
        if self._timer is None and self._kept:
            self._timer = asyncio.get_running_loop().call_later(self._limits.idle_s, self._look)

    def _look(self) -> None:
        self._timer = None
        self._drop_old()
        self._look_later()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
