"""The newcomer's side of a download: the whole state, verified, from several donors at once.

Donors are asked for their manifests. Those with the same root serve different chunks of one state, and the chunks of
one that dies, stalls or lies are asked of the others. Where nobody with that root is left, the next state is begun.
The protocol is in `donor`, the decisions are in `chunk_plan`.
"""

import asyncio
import bisect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from peers import codec
from peers.chunk_plan import Group, Patience, Trouble, groups, next_request
from peers.donor_streams import ChunkStream, Newcomer, open_chunks, receive_manifest
from peers.errors import (
    BusyError,
    GarbledError,
    GoneError,
    NoDonorError,
    PeersError,
    ProtocolError,
    RefusedError,
    UnreachableError,
    WireError,
)
from peers.exchange import PeerId
from peers.manifest import MAX_STATE_BYTES, FlatState, Manifest, Snapshot, allocate
from peers.meter import Meter
from peers.transport import Transport

_MOST_MANIFESTS = 4
"""How often one donor is asked for its state anew."""
_OTHERS_S = 2.0
"""Once one manifest is here, the others that were asked have so long, or as long as the first took."""
_TELL_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a download is."""

    round: int
    done_bytes: int
    """Verified; bytes that were thrown away are not in it."""
    total_bytes: int
    bytes_per_s: float
    """Since this state was begun."""
    donors: tuple[PeerId, ...]
    """Those that give chunks now."""
    note: str = ""
    """What just changed, in words, such as a donor that was given up; mostly empty."""


OnProgress = Callable[[Progress], None]


async def fetch_state(
    transport: Transport,
    donors: Sequence[PeerId],
    *,
    run: str,
    digest: str,
    least_round: int = 0,
    ask: int = 4,
    stall_s: float = 10.0,
    dial_s: float = 5.0,
    busy_s: float = 300.0,
    limit_bytes: int = MAX_STATE_BYTES,
    prefixes: Sequence[str] = ("",),
    meter: Meter | None = None,
    on_progress: OnProgress = lambda progress: None,
) -> Snapshot:
    """The whole state from `donors`, which come in order of preference.

    `ask` of them at a time are asked what they hold; those that hold the same state give it together. Each of them
    has to take a copy of its state for that, so ask one where no two can be equal. Each tensor's name must start
    with one of `prefixes`, and all together must have at most `limit_bytes`, which is checked before anything
    is allocated. Every chunk's SHA-256 is verified as it comes; together they are the SHA-256 of the whole.

    A donor that is at `least_round` gives a state of that round or a later one, not one that it took earlier.

    There is no time limit for a download that goes on. A donor that makes no progress for `stall_s` is tried
    twice, one that breaks off is resumed, one that is busy is asked again for `busy_s`, one that lies is left out.
    `on_progress` is called on the loop's thread, about once a second and when something changes.

    Raises `NoDonorError` that lists each donor and its reason.
    """
    newcomer = Newcomer(transport, run, digest, dial_s, stall_s, limit_bytes, tuple(prefixes), meter, least_round)
    return await _Download(newcomer, donors, ask, busy_s, on_progress).run()


class _Partial:
    """A state on its way here."""

    def __init__(self, manifest: Manifest, begun_at: float) -> None:
        """Allocates it. Raises `WireError` where memory is short."""
        self.manifest = manifest
        self.rows = allocate(manifest.entries)
        self.flat = FlatState(self.rows)
        self.pending = list(range(manifest.chunks))
        """Chunks that nobody has been asked for, ascending."""
        self.missing = manifest.chunks
        self.done_bytes = 0
        self.begun_at = begun_at
        self.given: Counter[PeerId] = Counter()
        """Chunks, by donor."""
        self.active: list[PeerId] = []
        self.whole = asyncio.Event()
        self._returned = asyncio.Event()
        if not self.missing:
            self.whole.set()

    def take(self, rate_bytes_per_s: float) -> range:
        """Assigns the next request's chunks."""
        chosen = next_request(self.pending, max(1, len(self.active)), rate_bytes_per_s)
        del self.pending[: len(chosen)]
        return chosen

    def put_back(self, chunks: range) -> None:
        """Gives back those that did not come."""
        at = bisect.bisect(self.pending, chunks.start)
        self.pending[at:at] = chunks
        self._returned.set()

    def keep(self, donor: PeerId, chunk: int, data: memoryview) -> None:
        """Takes a chunk in. Raises `ProtocolError` where it is not the one in the manifest."""
        if not self.manifest.fits(chunk, data):
            raise ProtocolError(f"chunk {chunk} of the state does not match its SHA-256")
        self.flat.write(self.manifest.span(chunk)[0], data)
        self.given[donor] += 1
        self.done_bytes += len(data)
        self.missing -= 1
        if not self.missing:
            self.whole.set()

    async def wait_for_chunks(self) -> None:
        """Until there is something to ask for."""
        while not self.pending:
            self._returned.clear()
            await self._returned.wait()

    def finish(self) -> Snapshot:
        """The state, once whole; for a worker thread. Raises `ProtocolError` for values that are not finite."""
        tensors: dict[str, torch.Tensor] = {}
        for entry, row in zip(self.manifest.entries, self.rows, strict=True):
            if not codec.is_finite(row):
                raise ProtocolError(f"tensor '{entry.name}' holds NaN or infinite values")
            tensors[entry.name] = row.reshape(entry.shape)
        donors = tuple(donor for donor, chunks in self.given.items() if chunks)
        return Snapshot(self.manifest.round, self.manifest.meta, tensors, donors)


class _Download:
    """One call of `fetch_state`."""

    def __init__(
        self, newcomer: Newcomer, donors: Sequence[PeerId], ask: int, busy_s: float, on_progress: OnProgress
    ) -> None:
        self._newcomer = newcomer
        self._ask = ask
        self._busy_s = busy_s
        self._on_progress = on_progress
        self._due = dict.fromkeys(donors, 0.0)
        """From when on a donor may be asked for its manifest; one that is given up is not in it."""
        self._patience: dict[PeerId, Patience] = {}
        self._manifests: Counter[PeerId] = Counter()
        self._donors = tuple(dict.fromkeys(donors))
        self._reasons: dict[PeerId, str] = {}
        self._partial: _Partial | None = None
        self._told_at = -_TELL_EVERY_S

    async def run(self) -> Snapshot:
        while True:
            for group in groups(await self._survey()):
                snapshot = await self._fetch(group)
                if snapshot is not None:
                    return snapshot
            if not self._due:
                reasons = "; ".join(
                    f"{donor}: {self._reasons[donor]}" for donor in self._donors if donor in self._reasons
                )
                raise NoDonorError(f"nobody could give the state: {reasons or 'there is no donor'}")
            await asyncio.sleep(max(0.0, min(self._due.values()) - _now()))

    async def _survey(self) -> dict[PeerId, Manifest]:
        """Asks donors that are due for their manifests, `ask` at a time, until as many have answered or none is left.

        In order of preference.
        """
        begun, offers = _now(), dict[PeerId, Manifest]()
        asking: dict[asyncio.Task[Manifest], PeerId] = {}
        queue = [donor for donor, due in self._due.items() if due <= begun]
        patience_s: float | None = None
        try:
            while True:
                while queue and len(asking) + len(offers) < self._ask:
                    donor = queue.pop(0)
                    asking[asyncio.create_task(receive_manifest(self._newcomer, donor))] = donor
                done, _ = await _first_of(asking, patience_s)
                if not done:
                    break
                for task in done:
                    self._take_answer(asking.pop(task), task, offers)
                if offers and patience_s is None:
                    patience_s = max(_OTHERS_S, _now() - begun)
        finally:
            await _end(asking)
        return {donor: offers[donor] for donor in self._due if donor in offers}

    def _take_answer(self, donor: PeerId, task: asyncio.Task[Manifest], offers: dict[PeerId, Manifest]) -> None:
        error = task.exception()
        if error is None:
            offers[donor] = task.result()
            self._manifests[donor] += 1
            return
        if not isinstance(error, PeersError | TimeoutError):
            raise error
        account = self._patience.get(donor, Patience())
        self._patience[donor], pause_s = account.after(
            _trouble(error), progressed=False, now=_now(), most_busy_s=self._busy_s
        )
        self._set_back(donor, error, pause_s)

    def _set_back(self, donor: PeerId, error: BaseException, pause_s: float | None) -> None:
        """A donor failed: it is asked anew after a pause, or never."""
        self._reasons[donor] = self._newcomer.reason(error)
        if pause_s is None or self._manifests[donor] >= _MOST_MANIFESTS:
            self._due.pop(donor, None)
            self._tell(f"{donor} is given up: {self._reasons[donor]}")
        else:
            self._due[donor] = _now() + pause_s

    async def _fetch(self, group: Group) -> Snapshot | None:
        """The state that all donors of a group hold; None where none of them gave the rest of it."""
        partial = self._begin(group)
        if partial is None:
            return None
        drawing = {asyncio.create_task(self._draw(donor, partial)): donor for donor in group.donors}
        whole = asyncio.create_task(_until(partial.whole))
        try:
            while drawing and not partial.whole.is_set():
                done, _ = await asyncio.wait({*drawing, whole}, return_when=asyncio.FIRST_COMPLETED)
                for task in done - {whole}:
                    del drawing[task]
                    task.result()
        finally:
            await _end([*drawing, whole])
        if not partial.whole.is_set():
            return None
        self._tell("the state is whole")
        try:
            return await asyncio.to_thread(partial.finish)
        except ProtocolError as error:
            self._partial = None
            for donor in group.donors:
                self._set_back(donor, error, None)
            return None

    def _begin(self, group: Group) -> _Partial | None:
        """The state so far where it is the group's, or a new one; None where there is no memory for it."""
        old = self._partial
        if old is not None and old.manifest.root == group.manifest.root:
            return old
        dropped = old.done_bytes if old else 0
        old = self._partial = None  # its memory is free before the next is allocated
        try:
            self._partial = _Partial(group.manifest, _now())
        except WireError as error:
            for donor in group.donors:
                self._set_back(donor, error, None)
            return None
        anew = f"; {dropped} bytes of another state are dropped" if dropped else ""
        self._tell(f"downloading the state of round {group.manifest.round} from {_count(group.donors)}{anew}")
        return self._partial

    async def _draw(self, donor: PeerId, partial: _Partial) -> None:
        """Fetches chunks from one donor until the state is whole or the donor is given up."""
        account = Patience()
        while True:
            await partial.wait_for_chunks()
            before = partial.given[donor]
            try:
                await self._draw_stream(donor, partial)
                continue
            except (PeersError, TimeoutError) as error:
                trouble, progressed = _trouble(error), partial.given[donor] > before
                account, pause_s = account.after(trouble, progressed=progressed, now=_now(), most_busy_s=self._busy_s)
                if pause_s is None:
                    self._set_back(donor, error, 0.0 if isinstance(error, GoneError) else None)
                    return
                self._tell(f"{donor}: {self._newcomer.reason(error)}; trying again")
            await asyncio.sleep(pause_s)

    async def _draw_stream(self, donor: PeerId, partial: _Partial) -> None:
        """Fetches chunks over one stream until nothing is left to ask for."""
        rate = 0.0
        async with open_chunks(self._newcomer, donor, partial.manifest.root) as stream:
            partial.active.append(donor)
            try:
                while partial.pending:
                    chunks, begun = partial.take(rate), _now()
                    size_bytes = await self._draw_chunks(donor, stream, partial, chunks)
                    rate = size_bytes / max(_now() - begun, 1e-6)
                await stream.say_goodbye()
            finally:
                partial.active.remove(donor)

    async def _draw_chunks(self, donor: PeerId, stream: ChunkStream, partial: _Partial, chunks: range) -> int:
        came = 0
        size_bytes = 0
        try:
            await stream.ask(chunks)
            for chunk in chunks:
                start, end = partial.manifest.span(chunk)
                partial.keep(donor, chunk, await stream.receive(end - start))
                came += 1
                size_bytes += end - start
                self._tell()
        finally:
            if came < len(chunks):
                partial.put_back(chunks[came:])
        return size_bytes

    def _tell(self, note: str = "") -> None:
        partial, now = self._partial, _now()
        if partial is None or (not note and now - self._told_at < _TELL_EVERY_S):
            return
        self._told_at = now
        self._on_progress(
            Progress(
                round=partial.manifest.round,
                done_bytes=partial.done_bytes,
                total_bytes=partial.manifest.size_bytes,
                bytes_per_s=partial.done_bytes / max(now - partial.begun_at, 1e-6),
                donors=tuple(dict.fromkeys(partial.active)),
                note=note,
            )
        )


def _trouble(error: BaseException) -> Trouble:
    match error:
        case BusyError():
            return Trouble.BUSY
        case RefusedError():
            return Trouble.SAID_NO
        case TimeoutError():
            return Trouble.STALLED
        case GarbledError():
            return Trouble.LIED
        case UnreachableError() | WireError():
            return Trouble.BROKE
    return Trouble.LIED


def _count(donors: Sequence[PeerId]) -> str:
    return donors[0] if len(donors) == 1 else f"{len(donors)} donors that hold the same"


async def _first_of(
    tasks: "dict[asyncio.Task[Manifest], PeerId]", timeout_s: float | None
) -> "tuple[set[asyncio.Task[Manifest]], set[asyncio.Task[Manifest]]]":
    if not tasks:
        return set(), set()
    return await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)


async def _end(tasks: "Sequence[asyncio.Task[None]] | dict[asyncio.Task[Manifest], PeerId]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _until(event: asyncio.Event) -> None:
    await event.wait()


def _now() -> float:
    return asyncio.get_running_loop().time()
