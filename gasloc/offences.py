"""Peers that err again and again: for how long each is left alone, and why."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from peers.exchange import PeerId

FREE = 1
"""Offences that go without consequence: anything can happen once."""
FIRST_S = 30.0
LONGEST_S = 3_600.0


@dataclass(frozen=True, slots=True)
class SetAside:
    """What is held against a peer."""

    until: float
    """In the caller's clock, seconds; in the past where the peer may be paired again."""
    count: int
    """Offences that count now; 0 for one that is only silent."""
    reason: str
    """The last offence, and what follows from it, in words; or why it could not be traded with."""


@dataclass(slots=True)
class _Standing:
    count: int
    until: float
    reason: str


def penalty(offences: int) -> tuple[float, str]:
    """For how many seconds a peer is set aside after its latest offence, and why.

    Nothing for the first; then 30 s, doubled by each further one, up to an hour. Raises `ValueError` below 1.
    """
    if offences < 1:
        raise ValueError(f"{offences} offences: there must be one")
    if offences <= FREE:
        return 0.0, "its first offence"
    seconds = min(math.ldexp(FIRST_S, min(offences - FREE - 1, 64)), LONGEST_S)
    return seconds, f"its offence number {offences}, set aside for {seconds:g} s"


def with_silent(erred: Mapping[PeerId, SetAside], silent: Mapping[PeerId, tuple[str, float]]) -> dict[PeerId, SetAside]:
    """Those that erred and those that are set aside as they did not answer: why, and until when, in the same clock."""
    told = dict(erred)
    for peer, (why, until) in silent.items():
        known = erred.get(peer)
        if known is None:
            told[peer] = SetAside(until, 0, why)
        else:
            told[peer] = SetAside(max(until, known.until), known.count, f"{known.reason}; and now: {why}")
    return told


class Offences:
    """Counts offences by peer. Time comes as an argument, in seconds of any clock that does not go back.

    A trade without offence takes one off the count, so that a peer that is mended is soon as good as any.
    """

    def __init__(self) -> None:
        self._standing: dict[PeerId, _Standing] = {}

    def add(self, peer: PeerId, what: str, now: float) -> SetAside:
        """Counts an offence; returns what follows from it. While a peer is set aside its offences change nothing."""
        known = self._standing.setdefault(peer, _Standing(0, now, ""))
        if known.until > now:
            return SetAside(known.until, known.count, known.reason)
        known.count += 1
        seconds, reason = penalty(known.count)
        known.until = now + seconds
        known.reason = f"{what}; {reason}"
        return SetAside(known.until, known.count, known.reason)

    def forgive(self, peer: PeerId) -> None:
        """Takes one offence off a peer's count, after a trade in which it did nothing wrong."""
        known = self._standing.get(peer)
        if known is not None:
            known.count -= 1
            if known.count <= 0:
                del self._standing[peer]

    def barred(self, now: float) -> set[PeerId]:
        """The peers that are set aside now."""
        # a list first: trades may be made on another thread
        return {peer for peer, known in list(self._standing.items()) if known.until > now}

    def standing(self) -> dict[PeerId, SetAside]:
        """Everything that is held against anybody, those set aside and those that only have a count."""
        standing = list(self._standing.items())
        return {peer: SetAside(known.until, known.count, known.reason) for peer, known in standing}
