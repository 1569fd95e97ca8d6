"""One trade on one accepted stream: both sides send at once, check, acknowledge, and keep all or nothing.

Each direction carries: table, blocks, PROGRESS now and then while the other direction is still under way, and
DONE once all was received and is good; or ABORT with a reason, in place of any frame. Where tensors travel modulo a
range (see `quantize`), bounds of movement follow the table, and before DONE come a REQUEST for the blocks that could
not be restored, and those that the partner asked for. docs/wire.md tells it frame by frame.

A side keeps what it received only if it is whole and the partner's DONE came. What no protocol can exclude
remains: if the stream breaks while one DONE is on its way, one side keeps the new tensors and the other its
old ones. Each is whole.
"""

import asyncio
import contextlib
from collections.abc import Sequence

import torch

from peers import codec, modular
from peers.body import Body, NoDigest, check_layout, receive_table, receive_tensors
from peers.errors import ProtocolError, WireError
from peers.exchange import Layout
from peers.modular import Lattice, Restore, Steps
from peers.stall import StallLimit
from peers.table import MAX_TABLE_BYTES, Entry, layout
from peers.wire import MAX_HEADER_BYTES, Kind, Wire, decode_json

_LINGER_S = 2.0
_TABLE_SLACK_BYTES = 64 * 1024


class Trade:
    """Sends a body, and receives tensors of the expected layout."""

    def __init__(
        self, wire: Wire, body: Body, expect: Layout, *, stall_s: float, near: Body, noise: torch.Generator
    ) -> None:
        """`near` holds our own values of what is expected, or is `body`; see `Offer.near`. `noise` rounds codes."""
        self._wire = wire
        self._body = body
        self._near = near
        self._noise = noise
        self._expect = expect
        self._stall_s = stall_s
        self._bounded = asyncio.Event()
        """Set once the partner's table and its bounds of what it sends are here."""
        self._met = asyncio.Event()
        """Set once its bounds of what we send are here, too."""
        self._came = asyncio.Event()
        """Set once all blocks came, some perhaps not restored."""
        self._asked = asyncio.Event()
        """Set once the partner told which blocks it could not restore."""
        self._retried = asyncio.Event()
        """Set once the blocks that we could not restore came in more bits."""
        self._asked_again = asyncio.Event()
        """Set once the partner told which of its blocks it could not restore even so."""
        self._whole = asyncio.Event()
        """Set once nothing more is to be received: all came, or we refuse it."""
        meetings = (self._bounded, self._met)
        self._milestones = (*meetings, self._came, self._asked, self._retried, self._asked_again, self._whole)
        self._refusal: str | None = None
        self._confirmed_bytes = 0
        self._reported_bytes = 0
        self._ours = modular.modular(body.entries)
        self._theirs: list[Entry] = []
        self._apart = False
        """Whether the two sides trade other tensors, so that bounds of one direction are none of the other's."""
        self._steps: Steps = {}
        """Of what we send."""
        self._restore = Restore({}, {})
        self._wanted: dict[str, torch.Tensor] = {}
        """Which blocks the partner asks for."""

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
            for event in self._milestones:
                event.set()
            with contextlib.suppress(WireError, TimeoutError):
                await sending
                async with asyncio.timeout(_LINGER_S):
                    await self._wire.skip_until(Kind.ABORT, Kind.DONE)

    async def _send(self) -> None:
        await self._wire.send_payload(Kind.TABLE, self._body.table)
        await modular.send_bounds(self._wire, self._ours, self._body.bounds)
        await self._bounded.wait()
        if self._apart:
            await modular.send_bounds(self._wire, self._theirs, self._near.bounds)
        await self._met.wait()
        lattice = Lattice(self._steps, self._noise)
        if not self._refusal:
            await self._send_blocks(lattice)
        await self._request(self._theirs, self._came)
        await self._send_retries(lattice)
        await self._request(modular.retried(self._theirs), self._retried)
        await self._send_raw()
        await self._report_until(self._whole)
        if self._refusal:
            await self._wire.abort(self._refusal)
        else:
            await self._wire.send_header(Kind.DONE, {})

    async def _send_blocks(self, lattice: Lattice) -> None:
        async with contextlib.aclosing(self._body.blocks_ahead(lattice)) as blocks:
            async for block in blocks:
                if self._refusal:
                    break
                await self._wire.send_block(block)

    async def _request(self, entries: Sequence[Entry], due: asyncio.Event) -> None:
        """Asks for the blocks of these tensors that could not be restored, once that is known."""
        if entries:
            await self._report_until(due)
            if not self._refusal:
                await self._wire.send_payload(Kind.REQUEST, self._restore.request(entries))

    async def _send_retries(self, lattice: Lattice) -> None:
        if self._ours:
            await self._report_until(self._asked)
        for entry in modular.retried(self._ours) if not self._refusal else ():
            for blocks, _ in modular.again(entry, self._wanted[entry.name]):
                row = modular.taken(self._body.rows[entry.name], blocks)
                await self._wire.send_block(await asyncio.to_thread(modular.encode_retry, entry, row, blocks, lattice))

    async def _send_raw(self) -> None:
        if self._ours:
            await self._report_until(self._asked_again)
        for entry in self._ours if not self._refusal else ():
            for blocks, _ in modular.again(entry, self._wanted[entry.name]):
                await self._wire.send_block(codec.view(modular.taken(self._body.rows[entry.name], blocks)))

    async def _report_until(self, event: asyncio.Event) -> None:
        """Tells the partner what we received, so that it can tell a slow link from a dead one."""
        while not event.is_set():
            try:
                async with asyncio.timeout(self._stall_s / 4):
                    await event.wait()
            except TimeoutError:
                if self._wire.received_bytes > self._reported_bytes:
                    self._reported_bytes = self._wire.received_bytes
                    await self._wire.send_header(Kind.PROGRESS, {"received_bytes": self._reported_bytes})

    async def _receive(self, limit: StallLimit) -> dict[str, torch.Tensor]:
        digest = NoDigest()
        expected_bytes = 2 * len(self._body.table) + _TABLE_SLACK_BYTES
        entries = await receive_table(self._wire, digest, limit_bytes=min(expected_bytes, MAX_TABLE_BYTES))
        check_layout(entries, self._expect)
        await self._receive_bounds(entries)
        tensors = await receive_tensors(self._wire, entries, digest, self._restore)
        self._came.set()
        await self._receive_request(self._ours, limit)
        self._asked.set()
        for entry in modular.retried(self._theirs):
            await self._receive_retry(entry, tensors[entry.name].view(-1), limit)
        self._retried.set()
        await self._receive_request(modular.retried(self._ours), limit)
        self._asked_again.set()
        for entry in self._theirs:
            await self._receive_raw(entry, tensors[entry.name].view(-1), limit)
        self._whole.set()
        await self._receive_after_progress(Kind.DONE, limit)
        return tensors

    async def _receive_bounds(self, entries: Sequence[Entry]) -> None:
        """Settles the steps of both directions. One set of bounds serves both where both trade the same tensors."""
        self._theirs = modular.modular(entries)
        bounds = await modular.receive_bounds(self._wire, self._theirs)
        self._apart = layout(entries) != layout(self._body.entries)
        near = self._near if self._apart else self._body
        for entry in self._theirs:
            if entry.name not in near.rows:
                raise ProtocolError(f"tensor '{entry.name}' is sent modulo a range, but we have nothing near it")
        self._restore = Restore(near.rows, modular.steps(self._theirs, near.bounds, bounds))
        self._bounded.set()
        if self._apart:
            bounds = await modular.receive_bounds(self._wire, self._ours)
        self._steps = modular.steps(self._ours, self._body.bounds, bounds)
        self._met.set()

    async def _receive_request(self, entries: Sequence[Entry], limit: StallLimit) -> None:
        if entries:
            payload = await self._receive_after_progress(Kind.REQUEST, limit, modular.request_bytes(entries))
            self._wanted.update(modular.read_request(payload, entries))

    async def _receive_retry(self, entry: Entry, row: torch.Tensor, limit: StallLimit) -> None:
        """The blocks of a tensor that could not be restored, in more bits."""
        for blocks, count in modular.again(entry, self._restore.wrong(entry).clone()):
            size_bytes = modular.retry_bytes(blocks.numel(), count)
            payload = await self._receive_after_progress(Kind.BLOCK, limit, size_bytes)
            data = torch.empty(size_bytes, dtype=torch.uint8)
            codec.decode(payload, torch.uint8, data)
            modular.put(row, blocks, await asyncio.to_thread(self._restore.retry, entry, blocks, data))

    async def _receive_raw(self, entry: Entry, row: torch.Tensor, limit: StallLimit) -> None:
        """The blocks of a tensor that could not be restored even so, as they are."""
        for blocks, count in modular.again(entry, self._restore.wrong(entry)):
            size_bytes = count * entry.dtype.itemsize
            payload = await self._receive_after_progress(Kind.BLOCK, limit, size_bytes)
            values = torch.empty(count, dtype=entry.dtype)
            codec.decode(payload, entry.dtype, values)
            codec.check_finite(entry.name, values)
            modular.put(row, blocks, values)

    async def _receive_after_progress(self, due: Kind, limit: StallLimit, limit_bytes: int = MAX_HEADER_BYTES) -> bytes:
        """The payload of the next frame that is not a report."""
        while True:
            kind, payload = await self._wire.receive(Kind.PROGRESS, due, limit_bytes=max(limit_bytes, MAX_HEADER_BYTES))
            if kind is due:
                return payload
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
