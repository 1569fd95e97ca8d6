"""Whether the state that a newcomer was given is like that of the others: a liar can be a donor, too.

A state cannot be told by itself. But partners measure how far they are apart in each trade (`gasloc.clipping`), so the
first few of them tell. Until then the state is not passed on to other newcomers.
"""

from collections.abc import Iterable
from enum import StrEnum

LEAST_PARTNERS = 3
"""So many different partners must have been met before anything is concluded."""


class Opinion(StrEnum):
    """What the partners so far say of our state."""

    OPEN = "open"
    LIKE_OTHERS = "like the others"
    APART = "apart"


class Confirmation:
    """Collects what partners say of a state that was downloaded.

    Once confirmed, a state is not doubted again: who is far away later is judged by itself (`gasloc.offences`), however
    many they are. So many false members cannot talk a peer out of what it has, only one that is new.
    """

    def __init__(self) -> None:
        """Nothing was downloaded: there is nothing to doubt."""
        self._donors: set[str] = set()
        self._far: dict[str, bool] = {}
        self._open = False

    @property
    def open(self) -> bool:
        """Whether the state still waits for an opinion."""
        return self._open

    def begin(self, donors: Iterable[str]) -> None:
        """A state was taken over from these."""
        self._donors = set(donors)
        self._far.clear()
        self._open = True

    def hear(self, partner: str, *, far: bool) -> None:
        """A partner was met, and lay far away or not."""
        if self._open:
            self._far[partner] = far

    def conclude(self) -> tuple[Opinion, str]:
        """What most of the partners say, and in words; closes the matter where they find the state like theirs."""
        if not self._open:
            return Opinion.LIKE_OTHERS, "nothing was downloaded that is not confirmed"
        met, far = len(self._far), sum(self._far.values())
        if met < LEAST_PARTNERS or 2 * far == met:
            return Opinion.OPEN, f"{far} of {met} partners are far away: too early to tell"
        if 2 * far < met:
            self._open = False
            return Opinion.LIKE_OTHERS, f"{met - far} of {met} partners are near"
        return Opinion.APART, f"{far} of {met} partners are far away, so it is the state that this peer was given"

    def doubtful(self) -> set[str]:
        """Whose state not to take next: those who gave this one, and those who are near it."""
        return self._donors | {peer for peer, far in self._far.items() if not far}
