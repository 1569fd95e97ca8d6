"""One simulation from a recipe and conditions to every worker's events and final model."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from gasloc.events import Event, Finished, RunStarted
from gasloc.fragments import fragment
from gasloc.inner import learning_rate
from gasloc.outer import make_outer
from gasloc.recipe import Recipe
from gasloc.simulation import virtual_time
from gasloc.simulation.algorithms import method_of, rule_of
from gasloc.simulation.compute import AdamW, Compute
from gasloc.simulation.conditions import Conditions
from gasloc.simulation.cut import Cut, check, hold
from gasloc.simulation.life import live
from gasloc.simulation.link import Network
from gasloc.simulation.problem import Problem
from gasloc.simulation.syncer import SYNCER, Syncer
from gasloc.simulation.worker import Worker
from gasloc.simulation.world import World
from peers.exchange import PeerId, Tensors

Listener = Callable[[PeerId, float, Event], None]
"""Called with the worker, the virtual time in seconds, and what happened."""


@dataclass(frozen=True, slots=True)
class Variant:
    """What a simulation may differ in beside the recipe."""

    staggered: bool = True
    """Each fragment at its own step of the round, or all at its end."""
    graph: str | None = None
    """The graph of `dadam` and `local-dadam`; None: the ring."""
    landing_steps: int | None = None
    """For studies: the outcome of every exchange is taken so many local steps late, however long it took."""
    cuts: tuple[Cut, ...] = ()
    """Partitions of the network."""


DEFAULT = Variant()


@dataclass(frozen=True, slots=True)
class Result:
    """What is left at the end; lists are in order of workers."""

    parameters: list[dict[str, Tensor]]
    seconds: float
    """Virtual."""
    sent_bytes: list[int]
    tokens: list[int]


class Simulation:
    """A simulation ready to run. A syncer has the best link of all workers.

    Raises `RecipeError` or `UsageError` for what cannot be, before anything runs.
    """

    def __init__(
        self,
        recipe: Recipe,
        problem: Problem,
        conditions: Sequence[Conditions],
        *,
        variant: Variant = DEFAULT,
        compute: Compute | None = None,
    ) -> None:
        """`compute` must be for `worker-0`, `worker-1` and so on; None: one of its own."""
        self.recipe = recipe
        method = method_of(recipe, variant.graph)
        check(variant.cuts, recipe.topology, len(conditions))
        peers = _peers(conditions)
        initial = problem.initial()
        sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in initial.items()}
        parts = list(fragment(sizes, recipe.fragments).parts)
        self._parameters = sum(tensor.numel() for tensor in initial.values())
        self._algorithm = method.algorithm
        self._cuts = variant.cuts
        self._listen: Listener | None = None
        links = {peer: each.link for peer, each in zip(peers, conditions, strict=True)}
        links[SYNCER] = max(links.values(), key=lambda link: (link.bandwidth, -link.latency_s))
        network = Network(links)
        self.world = World(
            recipe,
            problem,
            compute or Compute(problem, _adamw(recipe), peers),
            network,
            parts,
            method.graph,
            staggered=variant.staggered,
            lockstep=method.lockstep,
            pacing=recipe.pacing and method.paced,
            landing_steps=variant.landing_steps,
        )
        for peer, each in zip(peers, conditions, strict=True):
            rule = rule_of(recipe, self.world.compute, peer, parts)
            self.world.workers.append(Worker(peer, each, self.world, rule, self._emitter(peer)))
        if recipe.topology == "syncer":
            self.world.syncer = self._syncer(initial)

    def run(self, listen: Listener | None = None) -> Result:
        """Runs to the end, once; `listen` hears of every event.

        Raises `RunError` where the loss is not finite or every worker lost the state.
        """
        return run_together([self], listen)[0]

    async def live(self, listen: Listener | None) -> Result:
        """`run`, on a loop of virtual time."""
        self._listen = listen
        seconds = await self._all()
        workers = self.world.workers
        return Result(
            parameters=[{n: t.detach().clone() for n, t in w.trainee.parameters.items()} for w in workers],
            seconds=seconds,
            sent_bytes=[round(self.world.network.sent_bytes[worker.peer]) for worker in workers],
            tokens=[worker.tokens for worker in workers],
        )

    def _syncer(self, initial: Tensors) -> Syncer:
        world, recipe = self.world, self.recipe
        return Syncer(
            recipe,
            initial,
            world.parts,
            make_outer(recipe.outer),
            world.network,
            learners=lambda: [worker.conditions.step_time_s for worker in world.training()],
            most_learners=len(world.workers),
            parcel=world.parcel,
        )

    async def _all(self) -> float:
        cuts = [asyncio.ensure_future(hold(cut, self.world)) for cut in self._cuts]
        lives = [self._one(worker, number) for number, worker in enumerate(self.world.workers)]
        try:
            await asyncio.gather(*lives)
        finally:
            for cut in cuts:
                cut.cancel()
        return asyncio.get_running_loop().time()

    async def _one(self, worker: Worker, number: int) -> None:
        recipe = self.recipe
        worker.emit(
            RunStarted(
                peer=worker.peer,
                run=f"{recipe.name}-simulated",
                recipe=recipe.name,
                digest=recipe.digest,
                rounds=recipe.rounds,
                round=0,
                step=0,
                resumed=False,
                parameters=self._parameters,
                device="cpu",
                threads=1,
                pid=0,
                folder=worker.peer,
            )
        )
        if not await live(worker, self._algorithm, recipe.seed, number):
            return
        worker.emit(
            Finished(
                round=worker.round,
                step=worker.trainee.step,
                tokens=worker.tokens,
                model=f"{worker.peer}/model.safetensors",
                seconds=asyncio.get_running_loop().time() - worker.conditions.join_s,
            )
        )

    def _emitter(self, peer: PeerId) -> Callable[[Event], None]:
        def emit(event: Event) -> None:
            if self._listen is not None:
                self._listen(peer, asyncio.get_running_loop().time(), event)

        return emit


def beside(recipes: Sequence[Recipe], problem: Problem, conditions: Sequence[Conditions]) -> list[Simulation]:
    """One simulation a recipe, all of one problem and conditions; `run_together` has their steps taken together.

    Raises `ValueError` for recipes that do not train alike, and what `Simulation` raises.
    """
    first = recipes[0]
    alike = ("seed", "rounds", "local_steps", "data", "model", "inner", "evaluation")
    for recipe in recipes:
        for name in alike:
            if getattr(recipe, name) != getattr(first, name):
                raise ValueError(f"recipes to be simulated beside each other differ in {name}")
    shared = Compute(problem, _adamw(first), _peers(conditions), simulations=len(recipes))
    computes = [shared] + [Compute(problem, _adamw(first), _peers(conditions), beside=shared) for _ in recipes[1:]]
    return [
        Simulation(recipe, problem, conditions, compute=compute)
        for recipe, compute in zip(recipes, computes, strict=True)
    ]


def run_together(simulations: Sequence[Simulation], listen: Listener | None = None) -> list[Result]:
    """Runs simulations to their ends on one virtual clock, each once; see `Simulation.run`.

    What each comes to does not depend on the others, to the rounding of sums that are taken in other orders.
    """

    async def all_of_them() -> list[Result]:
        return await asyncio.gather(*(simulation.live(listen) for simulation in simulations))

    return virtual_time.run(all_of_them())


def _peers(conditions: Sequence[Conditions]) -> list[PeerId]:
    return [f"worker-{number}" for number in range(len(conditions))]


def _adamw(recipe: Recipe) -> AdamW:
    inner = recipe.inner
    return AdamW(
        beta1=inner.beta1,
        beta2=inner.beta2,
        epsilon=inner.epsilon,
        weight_decay=inner.weight_decay,
        clip_norm=inner.clip_norm,
        learning_rate=lambda step: learning_rate(step, inner, recipe.total_steps),
        local_steps=recipe.local_steps,
    )
