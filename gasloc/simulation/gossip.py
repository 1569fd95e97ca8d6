"""GASLoC rounds of one simulated worker: `1-peer`, `2-peer`, static graphs, all-to-all, `none`, and NoLoCo's pairs.

The trades are those of `gasloc.gossip`, which the trainer makes too; only who waits differs.
"""

import asyncio
import math
from collections.abc import Sequence

from torch import Tensor

from gasloc import clipping, fragments, mixing
from gasloc.all_reduce import T, Trades, WithAny
from gasloc.gossip import Exchanged, Plan, exchanging
from gasloc.simulation.flights import Flights
from gasloc.simulation.life import catch_up
from gasloc.simulation.rules import Gasloc
from gasloc.simulation.worker import Traffic, Worker
from peers.exchange import Exchange, Slot, Tensors


async def gossip(worker: Worker) -> None:
    """Rounds of local steps, mixes and outer steps until the recipe's last."""
    flights = Flights(worker)
    try:
        while not worker.over:
            count = worker.begin_round()
            done = 0
            for step, parts in schedule(worker, count):
                await flights.train(step - done)
                done = step
                await _mix(worker, flights, parts)
            flights.report(worker.end_round())
            await catch_up(worker, flights)
        await flights.settle()
    finally:
        flights.stop()


def schedule(worker: Worker, count: int) -> list[tuple[int, list[int]]]:
    """The local steps of a round of `count` after which fragments are due, and which; the last step is one."""
    world = worker.world
    parts = len(world.parts)
    if not world.staggered or count < parts:  # a worker that takes few steps sends all at once
        return [(count, [*range(1, parts), 0])]
    due = [(step, fragments.due(step, count, parts)) for step in range(1, count + 1)]
    return [(step, indices) for step, indices in due if indices]


async def _mix(worker: Worker, flights: Flights, parts: Sequence[int]) -> None:
    """Exchanges fragments together, and takes the outer step on each; or begins to, while training goes on."""
    slot = Slot(worker.round, (parts[0] - 1) % len(worker.world.parts))
    traffic, bound = worker.traffic, flights.bound()
    if bound:
        await flights.make_room(parts)
    else:
        await flights.settle()
    sent = [worker.rule.sent(part) for part in parts]
    if bound:  # a copy: training goes on
        sent = [{name: tensor.clone() for name, tensor in part.items()} for part in sent]
    phi = {name: tensor for part in sent for name, tensor in part.items()}
    start = _start(worker, parts)
    radius = _radius(worker, tuple(parts), phi, start)
    work = _exchange(worker, flights, tuple(parts), phi, slot, traffic, radius, start)
    if bound:
        flights.begin(parts, sent, work, traffic, bound)
        return
    began_s = asyncio.get_running_loop().time()
    exchanged = await work
    traffic.waited_s += asyncio.get_running_loop().time() - began_s
    for part, tensors in zip(parts, sent, strict=True):
        worker.rule.take(part, {name: exchanged.mix[name] for name in tensors})


async def _exchange(
    worker: Worker,
    flights: Flights,
    parts: tuple[int, ...],
    phi: dict[str, Tensor],
    slot: Slot,
    traffic: Traffic,
    radius: float,
    start: Tensors | None,
) -> Exchanged:
    """One exchange of fragments together, and what is remembered of it."""
    slot = flights.after_others(slot)
    began_s = asyncio.get_running_loop().time()
    graph, mixes = worker.world.graph, worker.world.recipe.mixes
    exchanged = await exchange(worker, phi, slot, traffic, graph=graph, mixes=mixes, radius=radius, start=start)
    flights.measure(exchanged, asyncio.get_running_loop().time() - began_s)
    flights.reached = max(slot.round, exchanged.round), slot.mix
    known = worker.histories.get(parts, ())
    worker.histories[parts] = clipping.remembered(known, [clip for _, clip in exchanged.clips])
    if exchanged.mixes_done:
        traffic.distances.append(mixing.distance(phi, exchanged.mix))
    return exchanged


def _start(worker: Worker, parts: Sequence[int]) -> Tensors | None:
    """What the fragments were at the round's start; None under rules that keep no such thing."""
    if not isinstance(worker.rule, Gasloc):
        return None
    return {name: tensor for part in parts for name, tensor in worker.rule.start(part).items()}


def _radius(worker: Worker, parts: tuple[int, ...], phi: Tensors, start: Tensors | None) -> float:
    """As `gasloc.optimizer` chooses it; infinite for the other rules, which take the plain average."""
    if worker.world.recipe.exchange.mixing == "average" or start is None:
        return math.inf
    allowance = clipping.pace_allowance(worker.steps_of_round, worker.world.recipe.local_steps)
    value, _ = clipping.radius(worker.histories.get(parts, ()), clipping.apart(start, phi) * allowance)
    return value


async def exchange(
    worker: Worker,
    phi: Tensors,
    slot: Slot,
    traffic: Traffic,
    *,
    graph: str,
    mixes: int = 1,
    radius: float = math.inf,
    start: Tensors | None = None,
) -> Exchanged:
    """One exchange with those in sight, counted in `traffic`; for `start` see `gasloc.gossip.exchanging`."""
    recipe = worker.world.recipe
    most_behind = 0 if worker.world.lockstep else recipe.stale_rounds
    plan = Plan(graph, recipe.seed, mixes, recipe.exchange.grace_s, most_behind)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    members = worker.world.members(worker, slot.round)
    trades = exchanging(
        worker.peer,
        plan,
        phi,
        slot,
        members=members,
        note={"local_steps": float(worker.steps_of_round)},
        radius=radius,
        start=start,
    )
    exchanged = await traded(worker.exchange, trades, timeout_s=plan.grace_s + worker.early_s)
    if exchanged.round > slot.round:  # one further where we trained on: no round is exchanged twice
        worker.round = max(worker.round, exchanged.round + (worker.round > slot.round))
    worker.met_s |= dict.fromkeys(exchanged.partners, loop.time())
    traffic.exchange_s += loop.time() - began_s
    traffic.add(exchanged.swaps)
    traffic.clips += exchanged.clips
    traffic.partners |= dict.fromkeys(exchanged.partners)
    return exchanged


async def traded(exchange: Exchange, trades: Trades[T], *, timeout_s: float) -> T:
    """Makes the trades that are asked for over `exchange`, and returns what comes of them in the end.

    `timeout_s` is for requests that name none.
    """
    try:
        request = next(trades)
        while True:
            if isinstance(request, WithAny):
                swaps = await exchange.swap_any(
                    request.slot, request.candidates, request.offer, timeout_s=request.timeout_s
                )
            else:
                limit_s = timeout_s if request.timeout_s is None else request.timeout_s
                swaps = await exchange.swap(request.slot, request.offers, timeout_s=limit_s)
            request = trades.send(swaps)
    except StopIteration as end:
        result: T = end.value
        return result
