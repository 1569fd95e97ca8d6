"""A limit on how long a transfer may go without progress."""

import asyncio
from types import TracebackType
from typing import Self

LEAST_BYTES_PER_S = 4096
"""Slower than this, a transfer counts as stalled: a partner cannot hold us by sending a byte at a time."""

_SLACK = 1.02
"""How much longer a transfer may stall, so that a timer is not set anew for each small piece."""


class StallLimit:
    """Ends the block under it when a transfer stalls.

    As an async context manager it raises `TimeoutError` at its end once `stall_s` passed in which fewer than
    `LEAST_BYTES_PER_S * stall_s` bytes were reported to `moved`. A transfer of any size that goes on faster is
    never ended. Uses the running loop's clock only.
    """

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._enough_bytes = LEAST_BYTES_PER_S * stall_s
        self._moved_bytes = 0
        self._timeout = asyncio.timeout(stall_s)

    def moved(self, size_bytes: int) -> None:
        """Reports progress, in either direction."""
        self._moved_bytes += size_bytes
        if self._moved_bytes < self._enough_bytes or self._timeout.expired():
            return
        self._moved_bytes = 0
        now, ends = asyncio.get_running_loop().time(), self._timeout.when()
        if ends is None or ends < now + self._stall_s:
            self._timeout.reschedule(now + self._stall_s * _SLACK)

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._timeout.__aexit__(kind, error, trace)
