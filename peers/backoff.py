"""When to try a lost peer again: a pure schedule."""

FIRST_S = 5.0
LONGEST_S = 60.0
ALONE_LONGEST_S = 15.0
"""The longest pause of a peer that is cut off from everybody."""
_DOUBLINGS = 16


def pause_s(failures: int, *, alone: bool, jitter: float, first_s: float = FIRST_S) -> float:
    """Seconds until the next try, after so many failed ones in a row; doubling, and bounded.

    `failures`: 0 or more. `alone`: nobody at all is known, so there is nothing to lose by trying. `jitter`, from
    0 to 1, takes up to a quarter off, so that peers that were cut off together do not come back together.
    """
    longest_s = ALONE_LONGEST_S if alone else LONGEST_S
    return min(first_s * 2.0 ** min(failures, _DOUBLINGS), longest_s) * (1.0 - 0.25 * jitter)
