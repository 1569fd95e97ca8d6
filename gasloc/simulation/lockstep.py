"""Baselines that trade at every local step: DDP, and decentralized Adam."""

import asyncio
from collections.abc import Awaitable, Callable

from torch import Tensor

from gasloc import baselines
from gasloc.simulation.compute import Compute
from gasloc.simulation.gossip import exchange
from gasloc.simulation.rules import assign
from gasloc.simulation.worker import Worker
from peers.exchange import PeerId, Slot, Tensors


async def ddp(worker: Worker) -> None:
    """Gradients averaged over everybody at each step, then one AdamW step; see `gasloc.baselines.ddp`.

    The all-reduce follows the backward pass: no overlap of the two is assumed.
    """
    compute = worker.world.compute

    async def step(index: int) -> None:
        asked = compute.ask_gradient(worker.peer)
        try:
            await asyncio.sleep(worker.conditions.step_time_s)
        except asyncio.CancelledError:
            compute.drop(asked)
            raise
        worker.count(1, compute.finish(asked))
        gradient = {name: tensor.clone() for name, tensor in compute.gradient(worker.peer).items()}
        exchanged = await exchange(worker, gradient, Slot(worker.round, index), worker.traffic, graph="all-to-all")
        compute.update(worker.peer, exchanged.mix)

    await _steps(worker, step)


async def dadam(worker: Worker) -> None:
    """Decentralized Adam: at each step the mix of everybody's parameters, plus one's own AdamW update.

    What is mixed is known before the step, so the exchange goes on while the worker computes.
    """
    parameters = worker.trainee.parameters

    async def step(index: int) -> None:
        before = {name: tensor.clone() for name, tensor in parameters.items()}
        trading = asyncio.ensure_future(
            exchange(worker, before, Slot(worker.round, index), worker.traffic, graph=worker.world.graph)
        )
        try:
            await worker.train(1)
            exchanged = await trading
        finally:
            trading.cancel()
        assign(parameters, baselines.dadam(exchanged.mix, before, parameters))

    await _steps(worker, step)


async def _steps(worker: Worker, step: Callable[[int], Awaitable[None]]) -> None:
    """Rounds of steps until the recipe's last round; a newcomer begins in the middle of one."""
    while not worker.over:
        count = worker.begin_round()
        for index in range(worker.trainee.local_step, count):
            worker.end_waits(None)
            await step(index)
        worker.trainee.local_step = 0
        worker.report(worker.end_round())


class Lockstep:
    """The state of a worker that trades at every step: parameters and moments."""

    def __init__(self, compute: Compute, peer: PeerId) -> None:
        self._compute = compute
        self._peer = peer

    def sent(self, part: int) -> dict[str, Tensor]:
        """All parameters; there are no fragments."""
        return dict(self._compute.trainees[self._peer].parameters)

    def take(self, part: int, mix: Tensors) -> None:
        """Sets the parameters."""
        assign(self._compute.trainees[self._peer].parameters, mix)

    def state(self) -> dict[str, Tensor]:
        """Parameters, both moments and the count of updates."""
        trainee = self._compute.trainees[self._peer]
        mean, square = self._compute.moments(self._peer)
        state = {f"anchor/{name}": tensor.clone() for name, tensor in trainee.parameters.items()}
        return state | {"mean": mean.clone(), "square": square.clone(), "updates": mean.new_tensor(trainee.updates)}

    def load(self, state: Tensors) -> None:
        """Takes over another worker's `state`."""
        trainee = self._compute.trainees[self._peer]
        mean, square = self._compute.moments(self._peer)
        assign(trainee.parameters, {name: state[f"anchor/{name}"] for name in trainee.parameters})
        mean.copy_(state["mean"])
        square.copy_(state["square"])
        trainee.updates = int(state["updates"])
