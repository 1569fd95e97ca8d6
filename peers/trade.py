"""One trade on one accepted stream: both sides send at once, check, acknowledge, and keep all or nothing.

Each direction carries: table, blocks, PROGRESS now and then while the other direction is still under way, and
DONE once all was received and is good; or ABORT with a reason, in place of any frame.

A side keeps what it received only if it is whole and the partner's DONE came. What no protocol can exclude
remains: if the stream breaks while one DONE is on its way, one side keeps the new tensors and the other its
old ones. Each is whole.
"""

import asyncio
import contextlib

import torch

from peers.body import Body, NoDigest, check_layout, receive_table, receive_tensors
from peers.errors import ProtocolError, WireError
from peers.exchange import Layout
from peers.stall import StallLimit
from peers.table import MAX_TABLE_BYTES
from peers.wire import Kind, Wire, decode_json

_LINGER_S = 2.0
_TABLE_SLACK_BYTES = 64 * 1024


class Trade:
    """Sends a body, and receives tensors of the expected layout."""

    def __init__(self, wire: Wire, body: Body, expect: Layout, *, stall_s: float) -> None:
        self._wire = wire
        self._body = body
        self._expect = expect
        self._stall_s = stall_s
        self._whole = asyncio.Event()
        """Set once nothing more is to be received: all came, or we refuse it."""
        self._refusal: str | None = None
        self._confirmed_bytes = 0

    async def run(self) -> dict[str, torch.Tensor]:
        """Returns the received tensors, acknowledged by both.

        Raises `WireError` when the stream breaks, `TimeoutError` when it stalls, `RefusedError` when the
        partner refuses, and `ProtocolError` (`LayoutError` for a layout) when we refuse what it sends, after
        telling it so. Whatever it raises, nothing of what was received is kept.
        """
        async with StallLimit(self._stall_s) as limit:
            self._wire.on_moved(limit.moved)
            sending = asyncio.ensure_future(self._send())
            receiving = asyncio.ensure_future(self._receive(limit))
            try:
                await asyncio.wait({sending, receiving}, return_when=asyncio.FIRST_EXCEPTION)
                if receiving.done():
                    await self._tell_refusal(receiving.exception(), sending)
                    tensors = await receiving
                    await sending
                    return tensors
                await sending
                return await receiving
            finally:
                self._wire.on_moved(None)
                await _end(sending, receiving)

    async def _tell_refusal(self, error: BaseException | None, sending: asyncio.Future[None]) -> None:
        if isinstance(error, ProtocolError) and not isinstance(error, WireError):
            self._refusal = str(error)
            self._whole.set()
            with contextlib.suppress(WireError, TimeoutError):
                await sending
                async with asyncio.timeout(_LINGER_S):
                    await self._wire.skip_until(Kind.ABORT, Kind.DONE)

    async def _send(self) -> None:
        await self._wire.send_payload(Kind.TABLE, self._body.table)
        for block in self._body.blocks():
            if self._refusal:
                break
            await self._wire.send_block(block)
        await self._report_until_whole()
        if self._refusal:
            await self._wire.abort(self._refusal)
        else:
            await self._wire.send_header(Kind.DONE, {})

    async def _report_until_whole(self) -> None:
        """Tells the partner what we received, so that it can tell a slow link from a dead one."""
        reported_bytes = 0
        while not self._whole.is_set():
            try:
                async with asyncio.timeout(self._stall_s / 4):
                    await self._whole.wait()
            except TimeoutError:
                if self._wire.received_bytes > reported_bytes:
                    reported_bytes = self._wire.received_bytes
                    await self._wire.send_header(Kind.PROGRESS, {"received_bytes": reported_bytes})

    async def _receive(self, limit: StallLimit) -> dict[str, torch.Tensor]:
        digest = NoDigest()
        expected_bytes = 2 * len(self._body.table) + _TABLE_SLACK_BYTES
        entries = await receive_table(self._wire, digest, limit_bytes=min(expected_bytes, MAX_TABLE_BYTES))
        check_layout(entries, self._expect)
        tensors = await receive_tensors(self._wire, entries, digest)
        self._whole.set()
        while True:
            kind, payload = await self._wire.receive(Kind.PROGRESS, Kind.DONE)
            if kind is Kind.DONE:
                return tensors
            self._confirm(payload, limit)

    def _confirm(self, payload: bytes, limit: StallLimit) -> None:
        """Counts what the partner received as progress: our side of the stream may be buffered far ahead."""
        claimed = decode_json(payload).get("received_bytes")
        if type(claimed) is not int or claimed > self._wire.sent_bytes:
            raise ProtocolError("the partner reports more than it was sent")
        limit.moved(max(claimed - self._confirmed_bytes, 0))
        self._confirmed_bytes = max(claimed, self._confirmed_bytes)


async def _end(*tasks: asyncio.Future[None] | asyncio.Future[dict[str, torch.Tensor]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
