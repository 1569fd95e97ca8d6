"""`RecordLine`: what one holder of the members' records has told us, and what it has of ours."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from peers.exchange import PeerId
from peers.record import SIGNATURE_BYTES
from peers.record_log import Change, Page
from peers.record_wire import Ask

_NO_EPOCH = bytes(8)


@dataclass(frozen=True, slots=True)
class OwnRecord:
    """Our sealed record, to be held by others."""

    peer: PeerId
    record: bytes
    expires: float


class RecordLine:
    """Reads a holder's log from where it was read last, and brings it our record while it does not hold it."""

    def __init__(self, key: bytes, ask: Callable[[Ask], Awaitable[Page]]) -> None:
        """`ask` puts a question to the holder."""
        self._key = key
        self._ask = ask
        self._epoch = _NO_EPOCH
        self._number = 0
        self._held: float | None = None
        """The expiration of our record that it holds."""
        self._refused: float | None = None
        """The expiration of our record that it did not take, though it came in full."""
        self._body = b""
        """The body of our record that it holds."""
        self._turn = asyncio.Lock()

    def lacks(self, own: OwnRecord | None) -> bool:
        """Whether this record of ours is to be brought to the holder; not again where it refused it."""
        return own is not None and own.expires not in (self._held, self._refused)

    def reread(self) -> None:
        """The next page begins at the log's beginning, with every record in full."""
        self._epoch, self._number = _NO_EPOCH, 0

    async def read(self, own: OwnRecord | None) -> Page:
        """The next page; brings `own` where it is not held. Raises what `ask` raises."""
        async with self._turn:
            change = self._news(own)
            page = await self._ask(Ask(self._key, self._epoch, self._number, change))
            if page.epoch != self._epoch:
                self._epoch, self._held, self._refused, self._body = page.epoch, None, None, b""
            self._number = page.number
            if own is not None and change is not None:
                self._held = own.expires if page.held else None
                self._refused = own.expires if change.body and not page.held else None
                self._body = own.record[SIGNATURE_BYTES:] if page.held else b""
            return page

    def _news(self, own: OwnRecord | None) -> Change | None:
        if own is None or not self.lacks(own):
            return None
        known = own.record[SIGNATURE_BYTES:] == self._body
        return Change.of(own.peer, own.record, own.expires, body_known=known)
