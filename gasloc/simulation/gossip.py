"""GASLoC rounds of one simulated worker: `1-peer`, `2-peer`, static graphs, all-to-all, `none`, and NoLoCo's pairs.

The trades are those of `gasloc.gossip`, which the trainer makes too; only who waits differs.
"""

import asyncio
import math
from collections.abc import Sequence

from gasloc import clipping, fragments, mixing
from gasloc.all_reduce import T, Trades, WithAny
from gasloc.gossip import Exchanged, Plan, exchanging
from gasloc.simulation.life import catch_up
from gasloc.simulation.rules import Gasloc
from gasloc.simulation.worker import Worker
from peers.exchange import Exchange, Slot, Tensors


async def gossip(worker: Worker) -> None:
    """Rounds of local steps, mixes and outer steps until the recipe's last."""
    while not worker.over:
        count = worker.begin_round()
        done = 0
        for step, parts in schedule(worker, count):
            await worker.train(step - done)
            done = step
            turn = (parts[0] - 1) % len(worker.world.parts)
            await _mix(worker, parts, turn)
        worker.end_round()
        await catch_up(worker)


def schedule(worker: Worker, count: int) -> list[tuple[int, list[int]]]:
    """The local steps of a round of `count` after which fragments are due, and which; the last step is one."""
    world = worker.world
    parts = len(world.parts)
    if not world.staggered or count < parts:  # a worker that takes few steps sends all at once
        return [(count, [*range(1, parts), 0])]
    due = [(step, fragments.due(step, count, parts)) for step in range(1, count + 1)]
    return [(step, indices) for step, indices in due if indices]


async def _mix(worker: Worker, parts: Sequence[int], turn: int) -> None:
    """Exchanges fragments together, and takes the outer step on each."""
    world = worker.world
    sent = [worker.rule.sent(part) for part in parts]
    phi = {name: tensor for part in sent for name, tensor in part.items()}
    slot = Slot(worker.round, turn)
    radius = _radius(worker, tuple(parts), phi)
    exchanged = await exchange(worker, phi, slot, graph=world.graph, mixes=world.recipe.mixes, radius=radius)
    known = worker.histories.get(tuple(parts), ())
    worker.histories[tuple(parts)] = clipping.remembered(known, [clip for _, clip in exchanged.clips])
    if exchanged.mixes_done:
        worker.traffic.distances.append(mixing.distance(phi, exchanged.mix))
    for part, tensors in zip(parts, sent, strict=True):
        worker.rule.take(part, {name: exchanged.mix[name] for name in tensors})


def _radius(worker: Worker, parts: tuple[int, ...], phi: Tensors) -> float:
    """As `gasloc.optimizer` chooses it; infinite for the other rules, which take the plain average."""
    rule = worker.rule
    if worker.world.recipe.exchange.mixing == "average" or not isinstance(rule, Gasloc):
        return math.inf
    start = {name: tensor for part in parts for name, tensor in rule.start(part).items()}
    allowance = clipping.pace_allowance(worker.steps_of_round, worker.world.recipe.local_steps)
    value, _ = clipping.radius(worker.histories.get(parts, ()), clipping.apart(start, phi) * allowance)
    return value


async def exchange(
    worker: Worker, phi: Tensors, slot: Slot, *, graph: str, mixes: int = 1, radius: float = math.inf
) -> Exchanged:
    """One exchange with those in sight, counted in the worker's traffic."""
    recipe = worker.world.recipe
    most_behind = 0 if worker.world.lockstep else recipe.stale_rounds
    plan = Plan(graph, recipe.seed, mixes, recipe.exchange.grace_s, most_behind)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    members = worker.world.members(worker)
    trades = exchanging(
        worker.peer,
        plan,
        phi,
        slot,
        members=members,
        note={"local_steps": float(worker.steps_of_round)},
        radius=radius,
    )
    exchanged = await traded(worker.exchange, trades, timeout_s=plan.grace_s)
    if exchanged.round > slot.round:
        worker.round = max(worker.round, exchanged.round)
    worker.traffic.exchange_s += loop.time() - began_s
    worker.traffic.add(exchanged.swaps)
    worker.traffic.clips += exchanged.clips
    worker.traffic.partners |= dict.fromkeys(exchanged.partners)
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
