"""How many local steps a peer takes this round, so that its round is as long as everybody's.

A peer on a thin link or a slow chip takes fewer steps, and so do its partners of the round, for it is they whom a slow
transfer keeps as well. Nobody waits for anybody then, and a thin link costs two or three peers a few steps. Pure: the
times that peers publish go in, a number and its reason come out. The round's length follows from the reference H,
never from the numbers of steps that peers chose, so choices do not act on each other and cannot swing. (Dynamic local
updates, "DyLU", of Liu et al., arXiv 2401.09135, where the link's time counts as well.)
"""

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from gasloc import topology as topologies
from gasloc.errors import RecipeError

SMOOTHING_SHARE = 0.5
"""Weight of the newest measurement. Of a change after five rounds 3 % are left."""

_FAR = 2.0
"""A time that changes by more than this factor is another link or another load, not jitter."""

_WHOLE_GRAPH = 64
"""In larger swarms a few slow peers do not move the median, and only one's own partners are looked up."""

_KEEP = 0.1
"""The steps are kept while the wanted number stays within this share of them: times jitter by a few percent."""
_KEEP_STEPS = 0.25
"""The same for few steps, in steps."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a peer is, as moving averages."""

    step_time_s: float
    """Seconds of one local step. 0 or not finite: not measured yet."""
    exchange_time_s: float
    """Seconds of a round that go into the exchange and that training could not hide; without the wait for a
    partner that is late, and with partners on links no slower than one's own (`own_transfer_s`), else one slow peer
    would make the others look slow. May be 0; not finite: unknown."""

    @property
    def known(self) -> bool:
        """Whether both times are measured."""
        return _is_time(self.step_time_s) and self.step_time_s > 0 and _is_time(self.exchange_time_s)


def smooth(previous: float, measured: float, share: float = SMOOTHING_SHARE) -> float:
    """Moving average of a measured time, seconds: `previous + share * (measured - previous)`.

    A time more than twice or less than half the average starts the average anew: a lasting change is followed at
    once, and a single outlier is forgotten with the next measurement rather than over several rounds.

    A `previous` of 0 or not finite stands for no average yet, and `measured` is taken as it is. A `measured`
    that is negative or not finite is no measurement, and `previous` is kept. Raises `ValueError` for a share
    outside (0, 1].
    """
    if not 0 < share <= 1:
        raise ValueError(f"share {share} of the newest measurement is not in (0, 1]")
    if not _is_time(measured):
        return previous
    if not _is_time(previous) or not previous / _FAR <= measured <= previous * _FAR:
        return measured
    return previous + share * (measured - previous)


@dataclass(frozen=True, slots=True)
class Transfer:
    """Tensors traded with one partner, both ways at once."""

    seconds: float
    """How long it took."""
    ended_s: float = math.nan
    """When it ended, by the same clock as others of the round; not a number: unknown."""
    theirs_s: float = 0.0
    """The exchange time that the partner publishes, seconds; 0 or not finite: unknown."""


def busy_s(transfers: Collection[Transfer]) -> float:
    """For how long at least one of these was under way, seconds; NaN where there are none.

    That is what a link was busy that carried them, whether its partners came together or one after the other. Where
    an end is unknown they are taken to have been under way together: the longest counts.
    """
    if not all(math.isfinite(each.ended_s) for each in transfers):
        return max((each.seconds for each in transfers), default=math.nan)
    total_s, covered_s = 0.0, -math.inf
    for each in sorted(transfers, key=lambda each: each.ended_s - each.seconds):
        total_s += max(each.ended_s - max(each.ended_s - each.seconds, covered_s), 0.0)
        covered_s = max(covered_s, each.ended_s)
    return total_s if transfers else math.nan


def own_transfer_s(previous: float, transfers: Iterable[Transfer]) -> float:
    """What a round's transfers tell of one's own link, seconds; NaN where nothing.

    A transfer is as slow as the slower of the two links. So one that took more than twice as long as another is its
    partner's; and so is one whose partner is known to need more than twice our `previous` average, and that took no
    more than twice what the partner says. Of the others it counts how long they kept the link busy (`busy_s`). A
    `previous` of 0 or not finite stands for no average yet.
    """
    told = [
        each for each in transfers if _is_time(each.seconds) and not _explains(each.theirs_s, each.seconds, previous)
    ]
    shortest_s = min((each.seconds for each in told), default=math.nan)
    return busy_s([each for each in told if each.seconds <= _FAR * shortest_s])


def beside_partners(paces: Mapping[str, Pace], topology: str, *, round: int, me: str, seed: int) -> dict[str, Pace]:
    """The paces with the exchange times of `round`, each that of the slowest among a member and its partners.

    `paces`: those that may be paired in `round`, by id, `me` included. Known ones stay known. Nothing changes for
    `all-to-all`, where every transfer has waited for everybody already. In swarms of more than 64 the others' times
    stay as they are. What a partner says of itself is believed: one that lied could as well be slow.
    """
    if topology == "all-to-all":
        return dict(paces)
    members = sorted(paces)
    found = dict(paces)
    for peer in members if len(members) <= _WHOLE_GRAPH else [me]:
        together = topologies.row(topology, round=round, members=members, me=peer, seed=seed)
        times_s = [paces[other].exchange_time_s for other in together if paces[other].known]
        if paces[peer].known:
            found[peer] = replace(paces[peer], exchange_time_s=max(times_s))
    return found


def round_length_s(members: Sequence[Pace], reference_steps: int) -> float | None:
    """The round's length T in seconds: the median over members of `H * step_time + exchange_time`.

    Members (oneself included) whose pace is unknown are left out. None where no pace is known.
    """
    lengths_s = [reference_steps * pace.step_time_s + pace.exchange_time_s for pace in members if pace.known]
    return statistics.median(lengths_s) if lengths_s else None


def local_steps(
    own: Pace,
    members: Sequence[Pace],
    reference_steps: int,
    maximum: int,
    *,
    previous: int | None = None,
    late_s: float = 0.0,
) -> tuple[int, str]:
    """A peer's local steps H_i for the next round, and the reason in words.

    `H_i = clamp(floor((T - c_i - late_s) / s_i), 1, maximum)`, where T is `round_length_s`, c_i our exchange time and
    s_i our step time. `members` are everybody's paces, our own included. Unknown paces give the reference. `late_s`:
    how much later than the others we begin the round (`gasloc.turns.late_after`).

    `previous`, our steps of the last round, damps it: they are kept while the wanted number is within a tenth of
    them (or a quarter of a step), and the reference is taken when it is within half of that. So measurements
    that jitter by a few percent change nothing, and with times from `smooth` the steps settle within five rounds
    of a change, without overshoot. None gives the formula alone.

    Raises `RecipeError` where `reference_steps` or `maximum` is under 1.
    """
    if reference_steps < 1 or maximum < 1:
        raise RecipeError(f"local_steps = {reference_steps}, at most {maximum}: a round has at least 1 step")
    reference = min(reference_steps, maximum)
    if not own.known:
        return reference, f"the recipe's {reference} steps: own step or exchange time is not measured yet"
    length_s = round_length_s(members, reference_steps)
    if length_s is None:
        return reference, f"the recipe's {reference} steps: no member has published its pace yet"
    wanted = (length_s - own.exchange_time_s - late_s) / own.step_time_s
    # Equal peers want exactly H; rounding must not make that H - 1.
    wanted += 1e-6 * reference_steps
    times = f"a step takes {own.step_time_s:.3g} s and the exchange {own.exchange_time_s:.3g} s"
    round_words = f"of a round of {length_s:.3g} s"
    if wanted < 1:
        return 1, f"1 step, the least: {times} {round_words}"
    if wanted >= maximum + 1:
        return maximum, f"{maximum} steps, the most allowed: {times} {round_words}"
    if previous is not None and 1 <= previous <= maximum:
        if _near(wanted, reference, _margin(reference) / 2):
            return reference, f"{reference} steps, the recipe's: {times} {round_words}"
        if _near(wanted, previous, _margin(previous)):
            return previous, f"{previous} steps as before: {times} {round_words}"
    return math.floor(wanted), f"{math.floor(wanted)} steps: {times} {round_words}"


def _explains(theirs: float, seconds: float, previous: float) -> bool:
    """Whether the partner's link alone accounts for a transfer that took longer than ours usually do."""
    slower = math.isfinite(theirs) and 0 < previous < seconds and theirs > _FAR * previous
    return slower and seconds <= _FAR * theirs


def _near(wanted: float, steps: int, margin: float) -> bool:
    """Whether `steps` is the floor of `wanted`, give or take `margin` steps."""
    return steps - margin <= wanted < steps + 1 + margin


def _margin(steps: int) -> float:
    return max(_KEEP_STEPS, _KEEP * steps)


def _is_time(seconds: float) -> bool:
    return math.isfinite(seconds) and seconds >= 0
