"""A simulated worker from its start to its end: it joins, fails, is repaired, and takes the run's state anew."""

import asyncio
import math
from collections.abc import Awaitable, Callable

from gasloc import rounds
from gasloc.errors import RunError
from gasloc.events import Joined, Warned
from gasloc.simulation.flights import Flights
from gasloc.simulation.worker import Worker
from gasloc.simulation.world import State
from peers.memory_exchange import MemoryExchange

Algorithm = Callable[[Worker], Awaitable[None]]

_RETRY_S = 1.0
"""How soon a worker that found no donor looks again, virtual seconds."""
_PATIENCE_S = 3600.0


async def live(worker: Worker, algorithm: Algorithm, seed: int, number: int) -> bool:
    """Runs a worker to the end of the recipe, through failures drawn from its conditions; False if it never gets there.

    A failure loses the worker's whole state: parameters, AdamW moments, outer state. After the repair it takes a
    donor's state, as a newcomer does. Raises `RunError` where nobody is left who has the state, and what
    `algorithm` raises.
    """
    conditions = worker.conditions
    await asyncio.sleep(conditions.join_s)
    for running_s, repair_s in conditions.lives(seed, number):
        if await _run(worker, algorithm, running_s):
            return True
        if math.isinf(repair_s):
            worker.emit(Warned(f"failed in round {worker.round}, for good"))
            return False
        worker.emit(Warned(f"failed in round {worker.round}; repaired in {repair_s:.0f} s"))
        await asyncio.sleep(repair_s)
    raise AssertionError("lives have no end")


async def _run(worker: Worker, algorithm: Algorithm, running_s: float) -> bool:
    """One life of at most `running_s` seconds. Whether the worker came to the end of the recipe in it."""
    world = worker.world
    task = asyncio.ensure_future(_work(worker, algorithm))
    done, _ = await asyncio.wait({task}, timeout=None if running_s == float("inf") else running_s)
    if done:
        task.result()
        return True
    world.network.cut(worker.peer)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    worker.state = State.AWAY
    worker.end_waits(ConnectionError(f"{worker.peer} is gone"))
    world.compute.reset(worker.peer)
    return False


async def _work(worker: Worker, algorithm: Algorithm) -> None:
    world = worker.world
    exchange = worker.exchange = MemoryExchange(world.hub, worker.peer)
    try:
        await _enter(worker)
        worker.state = State.TRAINING
        if worker.trainee.step == 0:
            worker.evaluate(worker.round)
        await algorithm(worker)
        worker.state = State.FINISHED
        worker.end_waits(None)
    finally:
        await exchange.close()


async def _enter(worker: Worker) -> None:
    """Takes over the run's state, unless nobody has trained yet."""
    world = worker.world
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    worker.state = State.JOINING
    fresh = world.untrained() and worker.trainee.step == 0
    size_bytes = 0 if fresh else await download(worker)
    worker.since_s = loop.time()
    worker.emit(
        Joined(
            round=worker.round,
            members=len(world.members(worker, worker.round)),
            source="initial" if fresh else "donor",
            reason="nobody has ended a round yet" if fresh else f"the swarm is at round {worker.round}",
            size_bytes=size_bytes,
            seconds=loop.time() - began_s,
        )
    )


async def download(worker: Worker) -> int:
    """Takes over a donor's state, from another donor if that one fails; returns its bytes.

    Raises `RunError` when no donor is found for an hour.
    """
    world = worker.world
    loop = asyncio.get_running_loop()
    give_up_s = loop.time() + _PATIENCE_S
    while loop.time() < give_up_s:
        donor = world.donor(worker)
        if donor is not None:
            round, state = donor.round, donor.rule.state()
            size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
            try:
                await world.network.hello(worker.peer, donor.peer)
                await world.network.transfer(donor.peer, worker.peer, size_bytes)
            except ConnectionError:
                continue
            worker.rule.load(state)
            worker.round = worker.earned = round
            worker.since_s = loop.time()
            if world.lockstep and not await _fall_in(worker, donor):
                continue
            return size_bytes
        await asyncio.sleep(_RETRY_S)
    raise RunError(
        f"{worker.peer}: no worker that has the run's state was up and in reach for {_PATIENCE_S:.0f} s; "
        "give more workers, or a longer --mtbf"
    )


async def _fall_in(worker: Worker, donor: Worker) -> bool:
    """For algorithms that trade at every step: takes the donor's state as it begins its next one.

    Returns whether that came about; not where the donor failed meanwhile.
    """
    if donor.state is State.TRAINING:
        begun = donor.next_step()
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await begun
        except (TimeoutError, ConnectionError):
            return False
    worker.rule.load(donor.rule.state())
    worker.round, worker.trainee.local_step = donor.round, donor.trainee.local_step
    return True


async def catch_up(worker: Worker, flights: Flights) -> None:
    """Takes the swarm's state where this worker is more than the recipe's `stale_rounds` away from it.

    That is behind the others' median, or ahead of most of them, having gone on without them: then it steps back to
    their round; see `gasloc.rounds`. Exchanges under way are dropped: what they were made from is replaced.
    """
    world, limit = worker.world, worker.world.recipe.stale_rounds
    stale, reason = rounds.is_stale(min(worker.round, worker.earned), world.others_rounds(worker), limit)
    ahead, why_ahead = rounds.is_far_ahead(worker.round, worker.rounds_apart(), limit)
    if ahead:
        await flights.drop()  # first, as their outcomes are of rounds that are gone through again
        await download(worker)
        flights.step_back()
        await worker.exchange.step_back()
        _tell_taken(worker, why_ahead)
    elif stale and not worker.over:
        await download(worker)
        _tell_taken(worker, reason)
        await flights.drop()


def _tell_taken(worker: Worker, reason: str) -> None:
    worker.emit(Warned(f"took the swarm's state at round {worker.round}: {reason}"))
