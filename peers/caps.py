"""How much of its link a donor gives away: a token bucket. Pure; the time is passed in."""

from peers.errors import PeersError

PIECE_BYTES = 32 * 1024
"""States are sent in pieces of this size, so that a capped stream moves evenly and a slow one shows progress."""
LEAST_RATE = 64 * 1024
"""Bytes per second. Below it, several downloads at once would look stalled to their newcomers."""
_BURST_S = 0.25


class CapError(PeersError):
    """Raised for a cap that cannot work."""


class TokenBucket:
    """Bytes per second shared by all who take from it, in the order in which they ask.

    Over any span of `t` seconds at most `burst_bytes + rate * t` bytes are given, where the burst is what the
    rate gives in a quarter of a second, at least one piece. What is taken beyond it is owed, and is waited for.
    """

    def __init__(self, rate_bytes_per_s: int, now: float) -> None:
        """`rate_bytes_per_s` 0: no limit. Raises `CapError` for one from 1 to `LEAST_RATE - 1`, or below 0."""
        check_rate(rate_bytes_per_s)
        self._rate = rate_bytes_per_s
        self.burst_bytes = max(_BURST_S * rate_bytes_per_s, float(PIECE_BYTES))
        self._tokens = self.burst_bytes
        self._filled_at = now

    def take(self, size_bytes: int, now: float) -> float:
        """Takes `size_bytes` (at most a piece); returns for how many seconds to wait before they are sent."""
        if not self._rate:
            return 0.0
        if now > self._filled_at:
            self._tokens = min(self.burst_bytes, self._tokens + self._rate * (now - self._filled_at))
            self._filled_at = now
        self._tokens -= size_bytes
        return max(0.0, -self._tokens / self._rate)


def check_rate(rate_bytes_per_s: int) -> None:
    """Raises `CapError` for a rate at which downloads could not go on; 0 means no limit."""
    if rate_bytes_per_s != 0 and rate_bytes_per_s < LEAST_RATE:
        raise CapError(
            f"a serving rate of {rate_bytes_per_s} bytes per second is under the least of {LEAST_RATE}; "
            "give more, or 0 for no limit"
        )
