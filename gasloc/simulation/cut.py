"""Cuts of a simulated network: some workers reach each other and nobody else for a while."""

import asyncio
import math
from collections.abc import Collection
from dataclasses import dataclass

from gasloc.errors import UsageError
from gasloc.simulation.world import World

_WHOLE = ("syncer", "ddp", "dadam")
"""Topologies that have no rule for workers that went on without the others."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A partition. Raises `UsageError` for times that cannot be."""

    workers: frozenset[int]
    """The numbers of those on one side; all others are on the other."""
    begin_s: float
    end_s: float = math.inf
    """When it heals, seconds; infinite: never."""

    def __post_init__(self) -> None:
        if not 0 <= self.begin_s < self.end_s:
            span = f"from {self.begin_s:g} s to {self.end_s:g} s"
            raise UsageError(f"a cut {span}: it must begin at 0 s or later, and end after that")


def cut_of(text: str) -> Cut:
    """A cut from a flag's value: `60-300:5,6` parts workers 5 and 6 from the others from 60 s to 300 s.

    Raises `UsageError` for what is written otherwise, or cannot be.
    """
    span, _, workers = text.partition(":")
    begin, _, end = span.partition("-")
    try:
        numbers = frozenset(int(worker) for worker in workers.split(","))
        return Cut(numbers, float(begin), float(end))
    except ValueError:
        raise UsageError(f"--cut {text!r} is not FROM-TO:WORKERS, such as 60-300:5,6 in seconds and numbers") from None


def check(cuts: Collection[Cut], topology: str, workers: int) -> None:
    """Raises `UsageError` where a cut names a worker that is not there, or would part those that cannot be parted."""
    if cuts and topology in _WHOLE:
        raise UsageError(f"a cut with topology '{topology}' is not simulated: leave out the cut, or choose another")
    unknown = sorted({number for cut in cuts for number in cut.workers} - set(range(workers)))
    if unknown:
        raise UsageError(f"a cut names worker {unknown[0]}, but there are {workers} workers, numbered from 0")


async def hold(cut: Cut, world: World) -> None:
    """Cuts the network when it is time, and heals it when it is time; on the loop of the simulation.

    What is under way across it breaks. From then on neither side sees the other, at once: views have no delay here.
    """
    side = [world.workers[number].peer for number in sorted(cut.workers)]
    await asyncio.sleep(cut.begin_s)
    world.network.part(side)
    world.hub.reach_changed()
    if math.isfinite(cut.end_s):
        await asyncio.sleep(cut.end_s - cut.begin_s)
        world.network.heal(side)
        world.hub.reach_changed()
