"""`Transport` in memory: asyncio streams joined in one process, with faults to order."""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto

from peers.errors import UnreachableError
from peers.exchange import PeerId
from peers.transport import Handler

_PIECE_BYTES = 64 * 1024
_SLOW_PIECES_PER_S = 10
_HIGH_WATER_BYTES = 256 * 1024

_log = logging.getLogger(__name__)


class FaultKind(Enum):
    """What goes wrong with a stream."""

    REFUSE = auto()
    """The dial fails at once."""
    SILENT = auto()
    """The dial gets no answer, until its time-out."""
    CUT = auto()
    """Both sides lose the stream once `after_bytes` went through."""
    GARBLE = auto()
    """The byte at offset `after_bytes` arrives with every bit turned."""
    DROP = auto()
    """`count` bytes from offset `after_bytes` on never arrive; those behind them do."""
    DUPLICATE = auto()
    """`count` bytes from offset `after_bytes` on arrive twice."""
    STALL = auto()
    """Nothing more arrives once `after_bytes` went through."""
    SLOW = auto()
    """`bytes_per_s` go through, from the start."""
    DELAY = auto()
    """Everything arrives `delay_s` later."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of one stream, in the direction away from its dialler, or `back` to it."""

    kind: FaultKind
    after_bytes: int = 0
    count: int = 1
    delay_s: float = 0.0
    bytes_per_s: float = 0.0
    back: bool = False


class PipeNetwork:
    """Peers that can dial each other in memory. Faults are ordered beforehand, each for one stream."""

    def __init__(self) -> None:
        self._transports: dict[PeerId, PipeTransport] = {}
        self._orders: list[tuple[str, tuple[Fault, ...]]] = []
        self._apart: frozenset[PeerId] = frozenset()
        self.dialled: list[tuple[PeerId, PeerId, str]] = []
        """Every dial: who, whom, which protocol."""

    def join(self, peer: PeerId) -> "PipeTransport":
        """A peer's transport. One that comes back replaces its earlier self."""
        transport = self._transports[peer] = PipeTransport(self, peer)
        return transport

    def leave(self, peer: PeerId) -> None:
        """The peer dies: its streams are cut, and it cannot be dialled from now on."""
        transport = self._transports.pop(peer, None)
        if transport:
            transport.cut()

    def part(self, peers: Collection[PeerId]) -> None:
        """Cuts these from the others: their streams to them break, and no dial comes through until `heal`."""
        self._apart = frozenset(peers)
        for transport in self._transports.values():
            transport.cut_from_those_apart()

    def heal(self) -> None:
        """Everybody can dial everybody again."""
        self._apart = frozenset()

    def order(self, protocol: str, *faults: Fault) -> None:
        """The next stream of `protocol` for which nothing was ordered yet will have these faults."""
        self._orders.append((protocol, faults))

    def take_order(self, protocol: str) -> tuple[Fault, ...]:
        """The faults of a stream that is being dialled."""
        for number, (wanted, faults) in enumerate(self._orders):
            if wanted == protocol:
                del self._orders[number]
                return faults
        return ()

    def are_apart(self, one: PeerId, other: PeerId) -> bool:
        """Whether a cut lies between two peers."""
        return (one in self._apart) != (other in self._apart)

    def find(self, peer: PeerId) -> "PipeTransport | None":
        """The transport of a peer that is alive."""
        return self._transports.get(peer)


class PipeTransport:
    """One peer's end of a `PipeNetwork`."""

    def __init__(self, network: PipeNetwork, me: PeerId) -> None:
        self._network = network
        self._me = me
        self._handlers: dict[str, Handler] = {}
        self._ends: dict[_End, PeerId] = {}
        """Each stream's end on our side, and who is at the other."""
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def me(self) -> PeerId:
        """Our own id."""
        return self._me

    @property
    def open_streams(self) -> int:
        """How many streams are not yet closed on our side."""
        return sum(not end.is_closing() for end in self._ends)

    async def serve(self, protocol: str, handler: Handler) -> None:
        """See `Transport.serve`."""
        self._handlers[protocol] = handler

    async def dial(
        self, peer: PeerId, protocol: str, *, timeout_s: float
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """See `Transport.dial`."""
        self._network.dialled.append((self._me, peer, protocol))
        faults = self._network.take_order(protocol)
        kinds = {fault.kind for fault in faults}
        if FaultKind.SILENT in kinds:
            await asyncio.sleep(timeout_s)
            raise UnreachableError(f"{peer} did not answer within {timeout_s:g} s")
        other = self._network.find(peer)
        if other is None or FaultKind.REFUSE in kinds or self._network.are_apart(self._me, peer):
            raise UnreachableError(f"{peer} refused the connection")
        if protocol not in other._handlers:
            raise UnreachableError(f"{peer} does not speak {protocol}")
        near, far = _connect(faults)
        self._ends[near] = peer
        other._accept(self._me, protocol, far)
        return near.reader, near.writer

    def _accept(self, peer: PeerId, protocol: str, end: "_End") -> None:
        self._ends[end] = peer
        task = asyncio.get_running_loop().create_task(self._handle(peer, protocol, end))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _handle(self, peer: PeerId, protocol: str, end: "_End") -> None:
        try:
            await self._handlers[protocol](peer, end.reader, end.writer)
        except Exception:
            _log.exception("the handler of %s failed for %s", protocol, peer)
        finally:
            end.close()

    def cut(self) -> None:
        """Breaks every stream, and stops every handler."""
        for end in self._ends:
            end.abort()
        for task in self._tasks:
            task.cancel()

    def cut_from_those_apart(self) -> None:
        """Breaks every stream with a peer on the other side of a cut."""
        for end, peer in self._ends.items():
            if self._network.are_apart(self._me, peer):
                end.abort()

    async def finished(self) -> None:
        """Waits until every handler of an incoming stream has returned."""
        while self._tasks:
            await asyncio.wait(self._tasks)


class _End(asyncio.Transport):
    """One end of a pipe, as asyncio's streams see it. What is written here goes into `out`."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self.reader = asyncio.StreamReader(loop=self._loop)
        self.protocol = asyncio.StreamReaderProtocol(self.reader, loop=self._loop)
        self.out: _Flow
        self.into: _Flow
        self._closing = False
        self._lost = False

    def begin(self) -> None:
        """Makes the writer; both directions must be set."""
        self.protocol.connection_made(self)
        self.writer = asyncio.StreamWriter(self, self.protocol, self.reader, self._loop)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._closing:
            return
        if self.out.target.is_lost:
            self.lose(BrokenPipeError("the other side has closed"))
            return
        self.out.push(bytes(data))

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self.out.finish()

    def abort(self) -> None:
        self._closing = True
        self.out.drop()
        self.lose(None)
        self.out.finish()

    def lose(self, error: Exception | None) -> None:
        """Ends this side. Asyncio is told once."""
        self._closing = True
        if not self._lost:
            self._lost = True
            self.into.drop()
            self._loop.call_soon(self.protocol.connection_lost, error)

    @property
    def is_lost(self) -> bool:
        """Whether this side reads no more."""
        return self._lost

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.out.high_bytes = _HIGH_WATER_BYTES if high is None else high

    def get_write_buffer_size(self) -> int:
        return self.out.queued_bytes

    def pause_reading(self) -> None:
        self.into.paused = True

    def resume_reading(self) -> None:
        self.into.paused = False
        self.into.schedule()


class _Flow:
    """One direction of a pipe: a queue of pieces, each due at its time."""

    def __init__(self, source: _End, target: _End, faults: list[Fault]) -> None:
        self._loop = asyncio.get_running_loop()
        self._source = source
        self.target = target
        self._faults = faults
        self._pieces: deque[tuple[float, bytes]] = deque()
        self.queued_bytes = 0
        self._pushed_bytes = 0
        self._delivered_bytes = 0
        self._due = 0.0
        self._finished = False
        self._full = False
        self._timer: asyncio.TimerHandle | None = None
        self.high_bytes = _HIGH_WATER_BYTES
        self.paused = False

    def push(self, data: bytes) -> None:
        """Takes what the source wrote."""
        size = self._piece_bytes()
        for start in range(0, len(data), size):
            piece = data[start : start + size]
            arriving = self._altered(piece)
            self._pieces.append((self._when(len(arriving)), arriving))
            self._pushed_bytes += len(piece)
        self.queued_bytes += len(data)
        if self.queued_bytes > self.high_bytes and not self._full:
            self._full = True
            self._source.protocol.pause_writing()
        self.schedule()

    def finish(self) -> None:
        """Nothing more will be written: the target sees the end once all has arrived."""
        self._finished = True
        self.schedule()

    def drop(self) -> None:
        """Forgets what has not arrived."""
        self._pieces.clear()
        self.queued_bytes = 0
        self._relieve()

    def schedule(self) -> None:
        """Delivers as soon as the first piece is due."""
        if self._timer is None and not self._loop.is_closed():
            due = self._pieces[0][0] if self._pieces else self._due
            self._timer = self._loop.call_at(due, self._deliver)

    def _deliver(self) -> None:
        self._timer = None
        now = self._loop.time()
        while self._pieces and not self.paused and not self._stopped() and self._pieces[0][0] <= now:
            _, piece = self._pieces.popleft()
            self.queued_bytes -= len(piece)
            self._hand_over(piece)
        self._relieve()
        if self._pieces and not self.paused and not self._stopped():
            self.schedule()
        elif self._finished and not self._pieces and not self._stopped():
            self._end()

    def _hand_over(self, piece: bytes) -> None:
        cut = self._limit(FaultKind.CUT, len(piece))
        stall = self._limit(FaultKind.STALL, len(piece))
        arriving = piece[: min(cut, stall)]
        self._delivered_bytes += len(arriving)
        if arriving and not self.target.is_lost:
            self.target.protocol.data_received(arriving)
        if cut < len(piece):
            for end in (self._source, self.target):
                end.lose(ConnectionResetError("the stream was reset"))

    def _end(self) -> None:
        if not self.target.is_lost:
            with contextlib.suppress(AssertionError):
                self.target.protocol.eof_received()
        self._source.lose(None)

    def _relieve(self) -> None:
        if self._full and self.queued_bytes <= self.high_bytes // 4:
            self._full = False
            self._source.protocol.resume_writing()

    def _limit(self, kind: FaultKind, size: int) -> int:
        """How many of the next `size` bytes arrive before a fault of this kind."""
        offsets = [fault.after_bytes for fault in self._faults if fault.kind is kind]
        return min([size, *(max(offset - self._delivered_bytes, 0) for offset in offsets)])

    def _stopped(self) -> bool:
        return any(f.kind is FaultKind.STALL and self._delivered_bytes >= f.after_bytes for f in self._faults)

    def _altered(self, piece: bytes) -> bytes:
        """What arrives of the next bytes that are written."""
        for fault in self._faults:
            first = max(fault.after_bytes - self._pushed_bytes, 0)
            last = min(fault.after_bytes + fault.count - self._pushed_bytes, len(piece))
            if first >= last:
                continue
            if fault.kind is FaultKind.GARBLE:
                piece = piece[:first] + bytes(byte ^ 0xFF for byte in piece[first:last]) + piece[last:]
            elif fault.kind is FaultKind.DROP:
                piece = piece[:first] + piece[last:]
            elif fault.kind is FaultKind.DUPLICATE:
                piece = piece[:last] + piece[first:]
        return piece

    def _when(self, size: int) -> float:
        """When a piece arrives: later by its delay, and by its length on a slow stream."""
        now = self._loop.time()
        delay_s = sum(fault.delay_s for fault in self._faults if fault.kind is FaultKind.DELAY)
        self._due = max(self._due, now + delay_s)
        for fault in self._faults:
            if fault.kind is FaultKind.SLOW:
                self._due += size / fault.bytes_per_s
        return self._due

    def _piece_bytes(self) -> int:
        rates = [fault.bytes_per_s for fault in self._faults if fault.kind is FaultKind.SLOW]
        return max(1, min([_PIECE_BYTES, *(int(rate / _SLOW_PIECES_PER_S) for rate in rates)]))


def _connect(faults: tuple[Fault, ...]) -> tuple[_End, _End]:
    """Two ends: the dialler's and the acceptor's."""
    near, far = _End(), _End()
    near.out = far.into = _Flow(near, far, [fault for fault in faults if not fault.back])
    far.out = near.into = _Flow(far, near, [fault for fault in faults if fault.back])
    near.begin()
    far.begin()
    return near, far
