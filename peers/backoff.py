"""When to try a lost peer again: a pure schedule."""

FIRST_S = 5.0
SHORT_S = 600.0
"""Lost for less than this is lost for a short while."""
SHORT_LONGEST_S = 20.0
"""The longest pause for a peer that is lost for a short while."""
LONGEST_S = 240.0
"""The longest pause of all, reached after two hours."""
ALONE_LONGEST_S = 15.0
"""The longest pause of a peer that is cut off from everybody."""
_DOUBLINGS = 16


def pause_s(failures: int, *, lost_s: float, alone: bool, jitter: float, first_s: float = FIRST_S) -> float:
    """Seconds from one try to the next, after so many failed ones in a row; doubling, and bounded.

    `failures`: 0 or more. `lost_s`: how long the peer is lost by now; up to `SHORT_S` the pause is at most
    `SHORT_LONGEST_S`, then it grows with the time. `alone`: nobody at all is known, so there is nothing to lose by
    trying. `jitter`, from 0 to 1, takes up to a quarter off, so that peers that were cut off together do not come back
    together.
    """
    longest_s = min(SHORT_LONGEST_S * max(1.0, lost_s / SHORT_S), LONGEST_S)
    if alone:
        longest_s = ALONE_LONGEST_S
    return min(first_s * 2.0 ** min(failures, _DOUBLINGS), longest_s) * (1.0 - 0.25 * jitter)
