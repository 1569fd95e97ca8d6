"""What `benchmarks.straggler` makes of the rounds that its peers report. Pure."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

Curve = Sequence[tuple[float, float]]
"""(seconds since the run's first step, validation loss), in order of time."""

_TOLERANCE = 0.1
"""Local steps within this share of their later median count as settled, and one step more or less always."""


@dataclass(frozen=True, slots=True)
class PeerRound:
    """A round as its peer reported it. Times by one clock, the machine's."""

    peer: int
    round: int
    began_s: float
    ended_s: float
    local_steps: int
    beside_straggler: bool
    """The straggler was among those that it traded with."""
    transfer_s: float
    """The longest of its transfers; NaN where there was none."""
    waited_s: float
    """All that training stood still for."""
    loss_before: float
    """On the held-out split, at the round's start."""

    @property
    def seconds(self) -> float:
        return self.ended_s - self.began_s


def within(rounds: Iterable[PeerRound], began_s: float, ended_s: float, discard: int) -> dict[int, list[PeerRound]]:
    """Whole rounds within a span of time, by peer, in order; without each peer's first `discard`."""
    found: dict[int, list[PeerRound]] = {}
    for each in sorted(rounds, key=lambda each: each.began_s):
        if each.began_s >= began_s and each.ended_s <= ended_s:
            found.setdefault(each.peer, []).append(each)
    return {peer: each[discard:] for peer, each in sorted(found.items()) if len(each) > discard}


def mean_round_s(rounds: Sequence[PeerRound]) -> float:
    """Seconds that pass for one peer's round on average, with whatever lies between rounds."""
    return (rounds[-1].ended_s - rounds[0].began_s) / len(rounds)


def median_round_s(rounds: Sequence[PeerRound]) -> float:
    """The median round of one peer, seconds."""
    return statistics.median(each.seconds for each in rounds)


def settled_after(steps: Sequence[int]) -> int | None:
    """Rounds until a peer's local steps stay near what they are later; None where they do not.

    Later: the median of the second half. Near: within a tenth, or one step. The rounds that are left must be half
    of all at least.
    """
    if not steps:
        return None
    later = statistics.median(steps[len(steps) // 2 :])
    margin = max(1.0, _TOLERANCE * later)
    far = [index for index, count in enumerate(steps) if abs(count - later) > margin]
    settled = far[-1] + 1 if far else 0
    return settled if settled <= len(steps) // 2 else None


def reversals(steps: Sequence[int]) -> int:
    """How often a row of local steps turned from rising to falling or back: 0 or 1 where nothing swings."""
    moves = [after - before for before, after in pairwise(steps) if after != before]
    return sum((first > 0) != (second > 0) for first, second in pairwise(moves))


def loss_curve(rounds: Iterable[PeerRound], began_s: float) -> list[tuple[float, float]]:
    """The mean over peers of each one's latest validation loss, at every time when one changed.

    Begins when every peer has one.
    """
    rounds = list(rounds)
    peers = {each.peer for each in rounds}
    latest: dict[int, float] = {}
    curve = []
    for each in sorted(rounds, key=lambda each: each.began_s):
        latest[each.peer] = each.loss_before
        if len(latest) == len(peers):
            curve.append((each.began_s - began_s, statistics.fmean(latest.values())))
    return curve


def time_to(curve: Curve, loss: float) -> float:
    """When a curve first is at `loss` or under it, seconds; infinity where it never is."""
    return next((time for time, value in curve if value <= loss), math.inf)


def common_loss(curves: Mapping[str, Curve]) -> float:
    """The lowest loss that all of the curves reach."""
    return max(min(loss for _, loss in curve) for curve in curves.values())
