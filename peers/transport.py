"""The seam between our protocols and whatever carries bytes: libp2p streams, or pipes in memory."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from peers.exchange import PeerId

Handler = Callable[[PeerId, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""Called once for each incoming stream, with the authenticated id of the peer that opened it."""


class Transport(Protocol):
    """Opens and accepts authenticated, ordered, full-duplex byte streams between peers."""

    @property
    def me(self) -> PeerId: ...

    async def serve(self, protocol: str, handler: Handler) -> None:
        """Accepts streams of `protocol` (such as "/gasloc/exchange/1") from now on.

        The stream is closed when the handler returns or raises; what it raises is logged, not passed on.
        """
        ...

    async def dial(
        self, peer: PeerId, protocol: str, *, timeout_s: float
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Opens a stream to a peer. Raises `UnreachableError` with the reason, within `timeout_s`."""
        ...
