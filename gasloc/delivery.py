"""Reports and merged fragments as they travel between a learner and its syncer: parcels of `peers.courier`."""

import asyncio
import concurrent.futures
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from gasloc.errors import RunError
from gasloc.learner import Delivery, Report
from peers.courier import Courier, Parcel
from peers.donor import Meta
from peers.errors import BehindError, PeersError, ProtocolError, RefusedError
from peers.exchange import PeerId, layout_of
from peers.thread import NetworkThread

PATIENCE_S = 120.0
"""How long a learner's report may wait for its merge."""
_LOOK_S = 0.05


@dataclass(slots=True)
class SyncTime:
    """How long a fragment takes there and back at this learner, without the syncer's waiting; as last measured."""

    seconds: float = math.nan


@dataclass(frozen=True, slots=True)
class ReportCard:
    """What a report says beside its tensors."""

    fragment: int
    version: int
    round: int
    tokens: float
    steps: float
    sync_time_s: float = math.nan
    """NaN where the learner has not measured it yet."""

    def meta(self) -> dict[str, int | float | str]:
        """As plain values."""
        meta: dict[str, int | float | str] = {
            "fragment": self.fragment,
            "version": self.version,
            "round": self.round,
            "tokens": self.tokens,
            "steps": self.steps,
        }
        if math.isfinite(self.sync_time_s):
            meta["sync_time_s"] = self.sync_time_s
        return meta


def read_card(meta: Meta) -> ReportCard:
    """What a learner says of its report. Raises `RefusedError` that names the first value that is none."""
    counts = {}
    for name in ("fragment", "version", "round"):
        value = meta.get(name)
        if type(value) is not int or not 0 <= value < 2**63:
            raise RefusedError(f"{name} = {value!r} is not a whole number from 0")
        counts[name] = value
    tokens, steps = _number(meta, "tokens"), _number(meta, "steps")
    sync_time_s = _number(meta, "sync_time_s") if "sync_time_s" in meta else math.nan
    return ReportCard(counts["fragment"], counts["version"], counts["round"], tokens, steps, sync_time_s)


def _number(meta: Meta, name: str) -> float:
    value = meta.get(name)
    if not isinstance(value, int | float) or value < 0:
        raise RefusedError(f"{name} = {value!r} is not a number from 0")
    return float(value)


async def deliver(
    courier: Courier, syncer: PeerId, report: Report, sync_time: SyncTime, *, patience_s: float
) -> Delivery:
    """Sends a report and waits for the merged fragment; measures the way there and back in `sync_time`.

    Raises what `Courier.ask` does, after `patience_s` without an answer at the latest.
    """
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    card = ReportCard(
        report.fragment, report.version, report.round, report.tokens, report.steps, sync_time_s=sync_time.seconds
    )
    answered = await courier.ask(
        syncer, Parcel(report.tensors, card.meta()), layout_of(report.tensors), patience_s=patience_s
    )
    meta = answered.parcel.meta
    seconds = loop.time() - began_s
    version, learners, held_s = meta.get("version"), meta.get("learners"), meta.get("held_s")
    if type(version) is not int or type(learners) is not int or not isinstance(held_s, int | float):
        raise ProtocolError(f"{syncer} answered without version, learners and time: {sorted(meta)}")
    if version < 0 or learners < 1 or held_s < 0:
        raise ProtocolError(f"{syncer} answered version {version} of {learners} learners, held for {held_s} s")
    held_s = min(float(held_s), seconds)
    sync_time.seconds = seconds - held_s
    return Delivery(
        syncer=syncer,
        fragment=report.fragment,
        version=version,
        tensors=answered.parcel.tensors,
        learners=learners,
        seconds=seconds,
        held_s=held_s,
        bytes_sent=answered.bytes_sent,
        bytes_received=answered.bytes_received,
    )


class Reporter:
    """Sends a learner's reports through the network thread: the part of `SyncerLink` that `Swarm` hands on."""

    def __init__(
        self,
        thread: NetworkThread,
        courier: Callable[[], Courier],
        syncer: Callable[[], PeerId],
        stop: threading.Event,
        *,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """`syncer` tells who it is now, and raises `PeersError` where there is none; on the network thread."""
        self._thread = thread
        self._courier = courier
        self._syncer = syncer
        self._stop = stop
        self._patience_s = patience_s
        self._sync_time = SyncTime()
        self._behind: str | None = None

    def send(self, report: Report) -> "Future[Delivery]":
        """Sends a report and returns at once; see `SyncerLink.send`."""
        merge: Future[Delivery] = Future()
        self._thread.spawn(self._deliver(report, merge))
        return merge

    def await_merges(self, merges: "Sequence[Future[Delivery]]", *, timeout_s: float) -> None:
        """Blocks until all are done, the time is over, or this peer is told to stop."""
        deadline = time.monotonic() + timeout_s
        while not self._stop.is_set():
            left_s = deadline - time.monotonic()
            if not concurrent.futures.wait(merges, timeout=max(min(left_s, _LOOK_S), 0.0)).not_done or left_s <= 0:
                return

    def take_behind(self) -> str | None:
        """Why the syncer refused a report as too old since this was last asked; None where it did not."""
        behind, self._behind = self._behind, None
        return behind

    async def _deliver(self, report: Report, merge: "Future[Delivery]") -> None:
        """Ends the future whatever happens. A syncer that is away is no fault to log."""
        try:
            syncer = self._syncer()
            delivery = await deliver(self._courier(), syncer, report, self._sync_time, patience_s=self._patience_s)
        except PeersError as error:
            if isinstance(error, BehindError):
                self._behind = str(error)
            merge.set_exception(error)
        except BaseException as error:  # the thread closes, or something of ours crashed
            merge.set_exception(RunError(f"the report was given up: {type(error).__name__}"))
            raise
        else:
            merge.set_result(delivery)
