"""What the workers of one simulation share, and what each may see of the others."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from torch import Tensor

from gasloc import rounds
from gasloc.recipe import Recipe
from gasloc.simulation.compute import Compute
from gasloc.simulation.link import Network
from gasloc.simulation.problem import Problem
from peers import lossy
from peers.exchange import PeerId, Tensors
from peers.memory_exchange import MemoryHub

if TYPE_CHECKING:
    from gasloc.simulation.syncer import Syncer
    from gasloc.simulation.worker import Worker


class State(StrEnum):
    """Where a worker stands. Only those in training are paired; those in training or finished serve their state."""

    AWAY = "away"
    """Not joined yet, or failed."""
    JOINING = "joining"
    TRAINING = "training"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class World:
    """One simulation. Every worker sees the others that it can reach as they are, with no delay."""

    recipe: Recipe
    problem: Problem
    compute: Compute
    network: Network
    parts: list[tuple[str, ...]]
    """The fragments, as names of tensors."""
    graph: str
    """Who mixes with whom: a name of `gasloc.topology`."""
    staggered: bool = True
    """Each fragment at its own step of the round, or all at its end."""
    lockstep: bool = False
    """Workers trade at every step, so a newcomer has to begin a step with the others."""
    pacing: bool = False
    """Workers choose their local steps by `gasloc.pacing`."""
    landing_steps: int | None = None
    """Every outcome is taken exactly so many local steps after it was sent; None: as `gasloc.overlap` chooses."""
    workers: "list[Worker]" = field(default_factory=list)
    syncer: "Syncer | None" = None
    """Set where the recipe's topology is `syncer`."""
    hub: MemoryHub = field(init=False)
    _training: "list[Worker] | None" = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.hub = MemoryHub(self.carry, self.recipe.exchange.codec, self.network.reaches)

    def training(self) -> "list[Worker]":
        """The workers in training. Not to be changed."""
        if self._training is None:
            self._training = [worker for worker in self.workers if worker.state is State.TRAINING]
        return self._training

    def seen(self, me: "Worker") -> "list[Worker]":
        """Those of them that a worker can reach, itself included where it trains. Not to be changed."""
        training = self.training()
        if not self.network.parted:
            return training
        return [other for other in training if self.network.reaches(me.peer, other.peer)]

    def states_changed(self) -> None:
        """To be told whenever a worker's state changes."""
        self._training = None

    def near(self, me: "Worker", round: int) -> "list[Worker]":
        """Those that are about in `round`, and a worker itself."""
        reach = self.recipe.stale_rounds
        return [other for other in self.seen(me) if other is me or abs(other.round - round) <= reach]

    def members(self, me: "Worker", round: int) -> list[PeerId]:
        """Those that a worker may be paired with in `round`, itself included; as `gasloc.swarm.Swarm.members`."""
        if not me.turns.has(round):
            return [me.peer]
        return [other.peer for other in self.near(me, round) if other.turns.has(round)]

    def others_rounds(self, me: "Worker") -> list[int]:
        """The rounds that the other training workers in reach are in."""
        return [other.round for other in self.seen(me) if other is not me]

    def donor(self, me: "Worker") -> "Worker | None":
        """Who gives a worker the run's state: of those with the highest round, one with the fewest uploads.

        Those that went on without the others come last; see `gasloc.rounds.latest_in_step`.
        """
        latest = rounds.latest_in_step(self.others_rounds(me), self.recipe.stale_rounds)

        def rank(worker: "Worker") -> tuple[bool, int, int]:
            in_step = latest is None or worker.round <= latest
            return in_step, worker.round, -self.network.uploads(worker.peer)

        return max((w for w in self.workers if w is not me and self._serves(w, me)), key=rank, default=None)

    def _serves(self, donor: "Worker", to: "Worker") -> bool:
        return donor.state in (State.TRAINING, State.FINISHED) and self.network.reaches(donor.peer, to.peer)

    def untrained(self) -> bool:
        """Whether nobody has ended a round yet, so that a newcomer may start from the recipe's seed."""
        if self.lockstep:
            return all(worker.trainee.step == 0 for worker in self.workers)
        return all(worker.rounds_ended == 0 for worker in self.workers)

    def parcel(self, tensors: Tensors) -> tuple[dict[str, Tensor], int]:
        """What arrives at or from a syncer of these tensors under the recipe's codec, as a copy, and its bytes."""
        return lossy.alone(tensors, self.recipe.exchange.codec)

    async def carry(self, sender: PeerId, receiver: PeerId, size_bytes: int) -> None:
        """Takes bytes over the links, after a hello and its answer."""
        await self.network.hello(sender, receiver)
        await self.network.transfer(sender, receiver, size_bytes)
