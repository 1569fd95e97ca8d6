"""Which round a peer takes next, and whether it is so far behind that it needs fresh state. Pure decisions."""

from collections.abc import Collection, Mapping
from statistics import median_low

APART_S = 15.0
"""Who traded with us less than this ago is where we are: what it published may be older, by seconds and many rounds."""


def next_round(mine: int, others: Collection[int]) -> tuple[int, str]:
    """The round after `mine`, and why. `others`: the rounds that the other training members are in.

    Normally `mine + 1`. A peer behind the median of the others jumps to that median: an old round would find no
    partner. The lower median is taken, so that of two others one far ahead, or lying, moves nobody. A peer ahead
    goes on by one; nobody steps back.
    """
    following = mine + 1
    if not others:
        return following, f"no other member is training: round {following} follows {mine}"
    middle = median_low(others)
    if middle > following:
        return middle, f"behind: the others are at round {middle} by their median, we ended round {mine}; jumping there"
    if middle < mine:
        return following, f"ahead of the others' median round {middle}: round {following} follows {mine}"
    return following, f"in step with the others' median round {middle}: round {following} follows {mine}"


def fall_in(mine: int, partners: Collection[int], stale_rounds: int) -> tuple[int, str]:
    """The round to trade in where all partners are past round `mine`, and why; `mine` itself: none.

    `partners`: the rounds that they answered. The lower median of these is taken, as in `next_round`, so that a peer
    that is slow mixes with what it has, in the round that the others are in, instead of missing them in each. One
    that is more than `stale_rounds` behind stays: it takes the swarm's state before it mixes.
    """
    if not partners:
        return mine, "no partner said which round it is in"
    middle = median_low(partners)
    if middle <= mine:
        return mine, f"the partners are at round {middle}, which is not ahead of {mine}"
    if middle - mine > stale_rounds:
        return mine, f"{middle - mine} rounds behind the partners, more than {stale_rounds}: too old to mix"
    return middle, f"{middle - mine} rounds behind the partners, within {stale_rounds}: trading in theirs, {middle}"


def is_far_ahead(mine: int, others: Collection[int], stale_rounds: int) -> tuple[bool, str]:
    """Whether a peer in round `mine` went on so far without the others that it will not meet them again, and why.

    True where more than half of all members, this one included, are more than `stale_rounds` rounds behind `mine`.
    As the others go on by the median, which a few ahead do not move, such a peer would stay ahead, and mix with
    nobody; so it takes the swarm's round and state. Of two equal halves the one ahead stays, and the others jump
    to it. Raises `ValueError` for `stale_rounds` below 1.
    """
    if stale_rounds < 1:
        raise ValueError(f"stale_rounds is {stale_rounds}: it must be at least 1")
    behind = [other for other in others if mine - other > stale_rounds]
    if 2 * len(behind) <= len(others) + 1:
        return False, f"{len(behind)} of {len(others)} others are more than {stale_rounds} rounds behind: no majority"
    lead = mine - median_low(behind)
    return True, f"{lead} rounds ahead of most others, more than {stale_rounds}: taking the swarm's state"


def apart(
    mine: int, others: Mapping[str, int], met_s: Mapping[str, float], since_s: float, *, before_s: float
) -> list[int]:
    """The rounds of the others by peer id, for `is_far_ahead`; `mine` for those that may well be where we are.

    Those are whoever traded with us, by `met_s`, later than `before_s`; and everybody, where we came or took fresh
    state, at `since_s`, later than that. Seconds of any one clock; `before_s` is `APART_S` before now.
    """
    return [mine if max(met_s.get(peer, since_s), since_s) > before_s else round for peer, round in others.items()]


def latest_in_step(others: Collection[int], stale_rounds: int) -> int | None:
    """The latest round of a state that is in step with the others; None where nobody trains.

    A later one is of a member that went on without them, see `is_far_ahead`.
    """
    return median_low(others) + stale_rounds if others else None


def least_fresh(others: Collection[int], stale_rounds: int) -> int:
    """The earliest round of a state that is worth downloading: well within `stale_rounds` of the others' median.

    0 where nobody trains. A state at the limit itself would be too old again by the time it is here.
    """
    return max(median_low(others) - stale_rounds // 2, 0) if others else 0


def is_stale(mine: int, others: Collection[int], stale_rounds: int) -> tuple[bool, str]:
    """Whether our parameters are too old to mix with the others', and why.

    True where the (lower) median of the others is more than `stale_rounds` rounds ahead of `mine`: such a peer
    takes the swarm's state first. Raises `ValueError` for `stale_rounds` below 1.
    """
    if stale_rounds < 1:
        raise ValueError(f"stale_rounds is {stale_rounds}: it must be at least 1")
    if not others:
        return False, "no other member is training: there is nobody to be behind"
    lag = median_low(others) - mine
    if lag > stale_rounds:
        return True, f"{lag} rounds behind the others' median, more than {stale_rounds}: taking the swarm's state"
    if lag > 0:
        return False, f"{lag} rounds behind the others' median, within {stale_rounds}: keeping our own state"
    return False, "not behind the others' median: keeping our own state"
