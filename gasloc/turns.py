"""In which rounds a peer trades whose exchange takes longer than a round.

Such a peer would keep its partners in every round for longer than the others train. It trades in every n-th round
only, and says so in its record: in the others nobody is paired with it, and it trains alone. After a trade that took
longer than the round, it and its partners are late by so much, and take so many steps less in the next round, so that
nobody else waits. Pure: what peers measure and publish goes in. A peer decides for itself; the others only read what
it decided, so all who see the same records agree who trades in a round.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

from gasloc import pacing
from gasloc.overlap import unhidden_s
from gasloc.pacing import Pace

BUSY_SHARE = 0.5
"""Share of its time that a peer may spend on exchanges once one takes longer than a round."""

MOST_EVERY = 1_000
"""However slow a link is, its peer trades once in so many rounds: it learns so that the link is better again."""

_KEEP = 0.1
"""A decision is kept while times stay within this share of what asks for it. A peer that is late by no more of a
round is in time: its steps are damped by as much (`gasloc.pacing`)."""

_MOST_LATE = 2.0
"""Rounds."""


@dataclass(frozen=True, slots=True)
class Turns:
    """The rounds in which a peer trades: `round`, and every so many before and after it."""

    every: int = 1
    round: int = 0

    def has(self, round: int) -> bool:
        """Whether the peer trades in `round`."""
        return self.every <= 1 or (round - self.round) % self.every == 0

    def next(self, round: int) -> int:
        """The first round from `round` on in which it does."""
        return round if self.every <= 1 else round + (self.round - round) % self.every


class Links:
    """What a peer's own exchanges take, hidden behind training or not."""

    def __init__(self) -> None:
        self._recent_s: deque[float] = deque(maxlen=2)
        self.average_s = math.nan
        """A moving average, seconds; not a number before the first."""

    @property
    def latest_s(self) -> float:
        """The last one, seconds; not a number before the first."""
        return self._recent_s[-1] if self._recent_s else math.nan

    @property
    def lasting_s(self) -> float:
        """The shorter of the last two, seconds; not a number before there are two."""
        return min(self._recent_s) if len(self._recent_s) > 1 else math.nan

    def count(self, transfer_s: float, asked: int, came: int, its: Turns) -> None:
        """Counts a round's transfers with `came` of the `asked` partners; not a number: none came about.

        The link of a peer with turns is what takes long: it would have taken as much longer to carry all of them.
        """
        if math.isnan(transfer_s):
            return
        self.average_s = pacing.smooth(self.average_s, transfer_s)
        self._recent_s.append(transfer_s * asked / came if its.every > 1 else transfer_s)


def choose(links: Links, step_s: float, round_s: float | None, *, previous: Turns, round: int) -> tuple[Turns, str]:
    """The rounds in which a peer trades from `round` on, the one that comes next; and why.

    `step_s`: its local step; `round_s`: the members' round (`pacing.round_length_s`). An exchange that takes longer
    than the round, and with a step longer by a tenth, is made in every n-th round, n the least with
    `exchange_s <= BUSY_SHARE * n * round_s`; first n - 1 rounds pass. One alone that took so long is followed by a
    round of rest, and the next exchange tells whether it lasts. `previous` is kept while times are within a tenth of
    those that ask for it, and given up once an exchange and a step fit into a round. Where times are unknown, a peer
    trades in every round.
    """
    if round_s is None or not all(math.isfinite(time_s) and time_s > 0 for time_s in (links.latest_s, step_s, round_s)):
        return Turns(), "trading in every round: step, exchange or round time is not measured yet"
    lasting_s, latest_s = links.lasting_s, links.latest_s
    times = f"an exchange takes {latest_s:.3g} s of rounds of {round_s:.3g} s"
    resting = previous.every > 1
    if _is_long(lasting_s, step_s, round_s, resting=resting):
        wanted = min(lasting_s / (BUSY_SHARE * round_s), MOST_EVERY)
        if resting and (previous.every - 1) * (1 - _KEEP) < wanted <= previous.every * (1 + _KEEP):
            return previous, f"trading in one round of {previous.every}, as before: {times}"
        every = max(math.ceil(wanted), 2)
        return Turns(every, round + every - 1), f"trading in one round of {every}: {times}"
    if resting and not previous.has(round - 1):  # nothing new was learned since
        return previous, f"trading in one round of {previous.every}, as before: {times}"
    if _is_long(latest_s, step_s, round_s, resting=False):
        return Turns(2, round + 1), f"not trading for a round: {times}; the next one tells whether that lasts"
    return Turns(), f"trading in every round: {times}"


def _is_long(exchange_s: float, step_s: float, round_s: float, *, resting: bool) -> bool:
    """Whether an exchange is too long for a round: by a tenth at first, and as long as no step has room beside it.

    Where all links are slow, under overlap, a round is as long as an exchange: then nobody's is longer than it.
    """
    whole_s = exchange_s + step_s
    if resting:
        return whole_s > round_s and exchange_s > BUSY_SHARE * round_s
    return whole_s > (1 + _KEEP) * round_s and exchange_s > round_s


def least_exchange_s(its: Turns, round_s: float | None) -> float:
    """The least that an exchange takes of one that chose these turns, seconds; 0 where that says nothing."""
    if its.every <= 1 or round_s is None:
        return 0.0
    return BUSY_SHARE * max(its.every - 1, 1) * round_s * (1 - _KEEP)


def of_round(
    paces: Mapping[str, Pace], near: Mapping[str, Turns], topology: str, *, round: int, me: str, seed: int
) -> dict[str, Pace]:
    """The paces with the exchange times of `round`: 0 for those who rest in it, else as `pacing.beside_partners`.

    `near`: those who may be paired in `round` were it everybody's turn, `me` included.
    """
    rest = {peer for peer, its in near.items() if not its.has(round)}
    found = {
        peer: replace(pace, exchange_time_s=0.0) if peer in rest and pace.known else pace
        for peer, pace in paces.items()
    }
    if me in rest:
        return found
    trading = {peer: paces[peer] for peer in near if peer in paces and peer not in rest}
    return found | pacing.beside_partners(trading, topology, round=round, me=me, seed=seed)


def late_after(own: Pace, steps: int, exchange_s: float, round_s: float | None, late_s: float) -> float:
    """How late a peer begins the round after, seconds: by what it did longer than the others. Negative: it is early.

    `own`: its pace as of the round that it ended; `steps`: what it took in it; `late_s`: how late it began it.
    `exchange_s`: for how long transfers were under way, on its own slow link or its partner's, as far as training could
    not hide it; where no trade came about, what was waited for one in vain, `own.exchange_time_s` at most; not a number
    where there was nobody to trade with: then it takes as long as the others. The wait for partners that were late
    themselves does not count, else those would make others take fewer steps, too, for nothing. A tenth of a round is
    in time, and more than two rounds are counted as two.
    """
    if round_s is None or not own.known:
        return 0.0
    spent_s = steps * own.step_time_s + (exchange_s if math.isfinite(exchange_s) else own.exchange_time_s)
    over_s = late_s + spent_s - round_s
    return max(min(over_s, _MOST_LATE * round_s), -_MOST_LATE * round_s) if abs(over_s) > _KEEP * round_s else 0.0


def spent_s(own: Pace, transfers_s: float, waited_s: float, *, tried: bool) -> float:
    """What a round's exchange took of a peer's time, as `late_after` wants it, seconds.

    `transfers_s`: for how long any was under way, not a number where none came about; `waited_s`: what training stood
    still for; `tried`: whether there was anybody to trade with.
    """
    if tried and math.isnan(transfers_s):
        return min(waited_s, own.exchange_time_s)
    return unhidden_s(transfers_s, waited_s)
