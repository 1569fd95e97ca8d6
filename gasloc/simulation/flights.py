"""A simulated worker's exchanges under way, while it trains on; by the rules of `gasloc.overlap`."""

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from gasloc import overlap
from gasloc.gossip import Exchanged
from gasloc.simulation.rules import Gasloc
from gasloc.simulation.worker import Ended, Traffic, Worker
from peers.exchange import Answer, Slot


@dataclass(slots=True, eq=False)
class _Flight:
    parts: Sequence[int]
    sent: list[dict[str, Tensor]]
    """A copy of each part."""
    work: asyncio.Task[Exchanged]
    traffic: Traffic
    bound: int
    """Local steps after which training waits."""
    age: int = 0
    """Local steps since it was sent."""
    ends: Ended | None = None
    """The round that ends with it."""


class Flights:
    """Exchanges under way, in the order of their beginning, and the choice of how long each may be."""

    def __init__(self, worker: Worker) -> None:
        recipe, world = worker.world.recipe, worker.world
        self._worker = worker
        self._rule = worker.rule if isinstance(worker.rule, Gasloc) else None
        self._choice = overlap.Choice(
            overlap.resolved(recipe.exchange.overlap, recipe.topology) if self._rule else "off",
            recipe.local_steps,
            len(world.parts) if world.staggered else 1,
        )
        self._choice.count_step(worker.conditions.step_time_s)
        self._flying: list[_Flight] = []
        self.reached: tuple[int, int] | None = None
        """Round and mix of the latest exchange."""

    def after_others(self, slot: Slot) -> Slot:
        """The slot, or where an exchange before it ended in its round or a later one, as partners were ahead, the
        first after that; as in `gasloc.gossip_rounds`."""
        if self.reached is None or (slot.round, slot.mix) > self.reached:
            return slot
        return replace(slot, round=self.reached[0] + (slot.mix <= self.reached[1]))

    def bound(self) -> int:
        """Local steps for which the exchange that begins now may be under way; 0: it is waited for."""
        forced = self._worker.world.landing_steps
        return self._choice.steps()[0] if forced is None or self._rule is None else forced

    async def train(self, count: int) -> None:
        """Takes local steps, and the outcomes that come meanwhile."""
        done = 0
        while self._flying and done < count:
            await self._worker.train(1)
            done += 1
            for flight in self._flying:
                flight.age += 1
            await self._land()
        if done < count:
            await self._worker.train(count - done)

    async def make_room(self, parts: Sequence[int]) -> None:
        """Waits for what is under way of these fragments, and takes it."""
        while any(set(parts) & set(flight.parts) for flight in self._flying):
            await self._take(self._flying[0])

    def begin(
        self,
        parts: Sequence[int],
        sent: list[dict[str, Tensor]],
        work: Coroutine[Any, Any, Exchanged],
        traffic: Traffic,
        bound: int,
    ) -> None:
        """Has `work` exchange copies of fragments while training goes on for at most `bound` steps."""
        before = [flight.work for flight in self._flying]
        task = asyncio.ensure_future(_in_turn(work, before))
        self._flying.append(_Flight(parts, sent, task, traffic, bound))

    def report(self, ended: Ended) -> None:
        """Has a round reported as soon as all of its exchanges have come to an end."""
        if self._flying and self._flying[-1].traffic is ended.traffic:
            self._flying[-1].ends = ended
        else:
            self._worker.report(ended)

    async def settle(self) -> None:
        """Waits for all that is under way, and takes it."""
        while self._flying:
            await self._take(self._flying[0])

    async def drop(self) -> None:
        """Waits for all that is under way, and takes none of it: the state that it was made from is gone."""
        for flight in self._flying:
            await asyncio.wait({flight.work})
            if flight.ends is not None:
                self._worker.report(flight.ends)
        self._flying.clear()

    def step_back(self) -> None:
        """After the state of an earlier round was taken: slots begin there anew. Nothing may be under way."""
        self.reached = None

    def stop(self) -> None:
        """Breaks off all that is under way."""
        for flight in self._flying:
            flight.work.cancel()

    def measure(self, exchanged: Exchanged, seconds: float) -> None:
        """Counts how long an exchange took."""
        accepted = [swap.seconds for swap in exchanged.swaps.values() if swap.answer is Answer.ACCEPT]
        self._choice.count_exchange(overlap.link_time_s(accepted, exchanged.mixes_done, seconds))

    async def _land(self) -> None:
        """Takes the outcomes that are there, and waits for those that may not be under way any longer."""
        forced = self._worker.world.landing_steps is not None
        while self._flying:
            first = self._flying[0]
            if first.age < first.bound and (forced or not first.work.done()):
                return
            await self._take(first)

    async def _take(self, flight: _Flight) -> None:
        assert self._rule is not None, "other rules wait for each exchange"
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        exchanged = await flight.work
        flight.traffic.waited_s += loop.time() - began_s
        flight.traffic.overlap_steps = max(flight.traffic.overlap_steps, flight.age)
        self._flying.remove(flight)
        for part, tensors in zip(flight.parts, flight.sent, strict=True):
            self._rule.take_late(part, {name: exchanged.mix[name] for name in tensors}, tensors)
        if flight.ends is not None:
            self._worker.report(flight.ends)


async def _in_turn(work: Coroutine[Any, Any, Exchanged], before: Sequence[asyncio.Task[Exchanged]]) -> Exchanged:
    """One exchange at a time, as on a live peer: slots must not decrease."""
    try:
        if before:
            await asyncio.wait(before)
    except BaseException:
        work.close()
        raise
    return await work
