"""One simulated worker: its place in the run, its local steps, and what it reports."""

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from gasloc import overlap, pacing, rounds, turns
from gasloc.clipping import Clipped
from gasloc.events import Evaluation, Event, Round
from gasloc.inner import learning_rate
from gasloc.pacing import Transfer
from gasloc.simulation.conditions import Conditions
from gasloc.simulation.rules import Rule
from gasloc.simulation.world import State, World
from gasloc.turns import Links, Turns
from peers.exchange import Answer, PeerId, Swap
from peers.memory_exchange import MemoryExchange

Emit = Callable[[Event], None]

MOST_STEPS = 4
"""With pacing, a worker takes at most this many times the recipe's local steps in a round, as in `gasloc.swarm`."""


@dataclass(slots=True)
class Traffic:
    """What a round's exchanges came to, at one worker."""

    partners: dict[PeerId, None] = field(default_factory=dict)
    failures: dict[str, None] = field(default_factory=dict)
    tried: bool = False
    asked: int = 0
    """Partners in the largest exchange."""
    distances: list[float] = field(default_factory=list)
    clips: list[tuple[PeerId, Clipped]] = field(default_factory=list)
    bytes_sent: int = 0
    bytes_received: int = 0
    exchange_s: float = 0.0
    """From sending to the outcome."""
    waited_s: float = 0.0
    """Of that, for how long the worker's training stood still."""
    overlap_steps: int = 0
    """The most local steps between sending and taking the outcome."""
    transfer_s: float = 0.0
    """Without the wait for partners that were late."""
    transfers: dict[PeerId, Transfer] = field(default_factory=dict)
    """The latest with each partner."""

    def add(self, swaps: Mapping[PeerId, Swap]) -> None:
        """Counts the outcome of one exchange."""
        self.tried = self.tried or bool(swaps)
        self.asked = max(self.asked, len(swaps))
        made = {
            peer: Transfer(swap.seconds, swap.ended_s) for peer, swap in swaps.items() if swap.answer is Answer.ACCEPT
        }
        self.transfers |= made
        self.transfer_s += pacing.busy_s(made.values()) if made else 0.0
        for peer, swap in swaps.items():
            self.bytes_sent += swap.bytes_sent
            self.bytes_received += swap.bytes_received
            if swap.answer is not Answer.ACCEPT:
                self.failures[f"{peer}: {swap.reason}"] = None

    @property
    def reason(self) -> str:
        """In words."""
        if not self.tried:
            return "nobody to mix with this round"
        return "; ".join([f"mixed with {len(self.partners)}", *self.failures])


@dataclass(frozen=True, slots=True)
class Ended:
    """A round whose local steps are done; exchanges of it may still be under way."""

    round: int
    next_round: int
    next_reason: str
    traffic: Traffic
    losses: list[tuple[int, float]]
    seconds: float


class Worker:
    """A worker's state and its steps. An algorithm drives it; `gasloc.simulation.life` starts and fails it."""

    def __init__(self, peer: PeerId, conditions: Conditions, world: World, rule: Rule, emit: Emit) -> None:
        self.peer = peer
        self.conditions = conditions
        self.world = world
        self.rule = rule
        self.emit = emit
        self.trainee = world.compute.trainees[peer]
        self.exchange: MemoryExchange
        """Set for as long as the worker is up."""
        self._state = State.AWAY
        self.round = 0
        self.earned = 0
        """The round that its parameters belong to: a jump to the others' round does not make them newer."""
        self.rounds_ended = 0
        """In all, over failures."""
        self.tokens = 0
        self.losses: list[tuple[int, float]] = []
        """Steps and mean loss of each stretch of training in this round."""
        self.pace = pacing.Pace(0.0, 0.0)
        """As the others know it: nothing before the first round's end."""
        self.turns = Turns()
        """The rounds in which it trades, as the others know them."""
        self._links = Links()
        self._late_s = 0.0
        """How much later than the others it begins the coming round."""
        self._planned: tuple[int, pacing.Pace] | None = None
        """The round that it is in, and its pace in it."""
        self.early_s = 0.0
        """How much sooner than others it is to trade this round, as a partner's link is slow; it waits for them."""
        self.steps_of_round = world.recipe.local_steps
        self.traffic = Traffic()
        self.histories: dict[tuple[int, ...], tuple[float, ...]] = {}
        """Accepted distances by fragments exchanged together; see `gasloc.clipping`."""
        self.met_s: dict[PeerId, float] = {}
        """When it traded with each last."""
        self.since_s = 0.0
        """When it took the state that it goes on from."""
        self._began_s = 0.0
        self._waits: list[asyncio.Future[None]] = []

    @property
    def state(self) -> State:
        """Where the worker stands."""
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        self._state = state
        self.world.states_changed()

    def next_step(self) -> asyncio.Future[None]:
        """Done when this worker begins its next step, or ends; `ConnectionError` if it fails before."""
        wait: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waits.append(wait)
        return wait

    def end_waits(self, error: Exception | None) -> None:
        """Ends the waits for this worker's next step."""
        waits, self._waits = self._waits, []
        for wait in waits:
            if wait.done():
                continue
            if error is None:
                wait.set_result(None)
            else:
                wait.set_exception(error)

    @property
    def over(self) -> bool:
        """Whether the recipe's last round is done."""
        return self.round >= self.world.recipe.rounds

    def rounds_apart(self) -> list[int]:
        """The others' rounds, for a worker that asks whether it went on without them; as `gasloc.company.Company`."""
        others = {other.peer: other.round for other in self.world.seen(self) if other is not self}
        before_s = asyncio.get_running_loop().time() - rounds.APART_S
        return rounds.apart(self.round, others, self.met_s, self.since_s, before_s=before_s)

    def begin_round(self) -> int:
        """Starts the clocks of a round; returns its number of local steps (H_i)."""
        self.traffic = Traffic()
        self.losses = []
        self._began_s = asyncio.get_running_loop().time()
        if not self.world.lockstep:
            self.trainee.local_step = 0
        self.trainee.round = self.round
        if self.world.pacing:
            self.steps_of_round = self._choose_steps()
        return self.steps_of_round

    def _choose_steps(self) -> int:
        """As `gasloc.pacer.Pacer`."""
        recipe = self.world.recipe
        paces = {worker.peer: worker.pace for worker in self.world.seen(self)} | {self.peer: self.pace}
        if self._pairs_once():
            near = {worker.peer: worker.turns for worker in self.world.near(self, self.round)}
            paces = turns.of_round(paces, near, self.world.graph, round=self.round, me=self.peer, seed=recipe.seed)
        own = paces[self.peer]
        self._planned = self.round, own
        self.early_s = max(own.exchange_time_s - self.pace.exchange_time_s, 0.0) if own.known else 0.0
        most = MOST_STEPS * recipe.local_steps
        steps, _ = pacing.local_steps(
            own, list(paces.values()), recipe.local_steps, most, previous=self.steps_of_round, late_s=self._late_s
        )
        return steps

    def _transfer_s(self, traffic: Traffic) -> float:
        """What a round's transfers tell of its own link; they are counted. As `gasloc.pacer.Pacer`."""
        if not self._pairs_once():
            return traffic.transfer_s if traffic.partners else math.nan
        training, round_s = self.world.seen(self), self._round_s()
        known = {
            worker.peer: max(worker.pace.exchange_time_s, turns.least_exchange_s(worker.turns, round_s))
            for worker in training
        }
        told = [replace(each, theirs_s=known.get(peer, math.nan)) for peer, each in traffic.transfers.items()]
        transfer_s = pacing.own_transfer_s(self._links.average_s, told)
        self._links.count(transfer_s, traffic.asked, len(told), self.turns)
        return transfer_s

    def _choose_turns(self, traffic: Traffic, steps: int, next_round: int) -> None:
        """How late it is for the next round, and in which it trades from now on. As `gasloc.pacer.Pacer`."""
        if self.world.pacing and self._pairs_once():
            step_s, round_s = self.conditions.step_time_s, self._round_s()
            self._late_s = self._lateness_s(traffic, steps, next_round, round_s)
            self.turns, _ = turns.choose(self._links, step_s, round_s, previous=self.turns, round=next_round)

    def _round_s(self) -> float | None:
        paces = {worker.peer: worker.pace for worker in self.world.seen(self)} | {self.peer: self.pace}
        return pacing.round_length_s(list(paces.values()), self.world.recipe.local_steps)

    def _lateness_s(self, traffic: Traffic, steps: int, next_round: int, round_s: float | None) -> float:
        """How late it is for the next round; as `gasloc.pacer.Pacer`."""
        began, own = self._planned or (next_round - 1, pacing.Pace(0.0, 0.0))
        alone = all(worker is self for worker in self.world.seen(self))
        if alone or traffic.overlap_steps or next_round > began + 1:
            return 0.0
        if not own.known:
            own = pacing.Pace(self.conditions.step_time_s, 0.0)
        transfers_s = pacing.busy_s(traffic.transfers.values())
        spent_s = turns.spent_s(own, transfers_s, traffic.waited_s, tried=traffic.tried)
        return turns.late_after(own, steps, spent_s, round_s, self._late_s)

    def _pairs_once(self) -> bool:
        recipe = self.world.recipe
        return self.world.graph != "all-to-all" and recipe.mixes == 1 and recipe.fragments == 1

    async def train(self, count: int) -> None:
        """Takes local steps; returns when this worker's machine would be done with them."""
        compute = self.world.compute
        steps = compute.ask(self.peer, count)
        try:
            await asyncio.sleep(count * self.conditions.step_time_s)
        except asyncio.CancelledError:
            compute.drop(steps)
            raise
        self.count(count, compute.finish(steps))

    def count(self, steps: int, loss: float) -> None:
        """Counts steps that were taken, and their mean loss."""
        self.losses.append((steps, loss))
        self.tokens += steps * self.world.problem.tokens_per_step

    def end_round(self) -> "Ended":
        """Moves on to the next round; returns what is to be reported of the one that ended."""
        ended = self.round
        self.earned = ended + 1
        self.round, next_reason = rounds.next_round(ended, self.world.others_rounds(self))
        self.rounds_ended += 1
        seconds = asyncio.get_running_loop().time() - self._began_s
        return Ended(ended, self.round, next_reason, self.traffic, self.losses, seconds)

    def report(self, ended: "Ended") -> None:
        """Reports a round whose exchanges have all come to an end, and evaluates where one is due."""
        recipe, traffic = self.world.recipe, ended.traffic
        count = sum(steps for steps, _ in ended.losses)
        unhidden_s = overlap.unhidden_s(self._transfer_s(traffic), traffic.waited_s)
        self.pace = pacing.Pace(self.conditions.step_time_s, pacing.smooth(self.pace.exchange_time_s, unhidden_s))
        self._choose_turns(traffic, count, ended.next_round)
        last_step = ended.round * recipe.local_steps + min(count, recipe.local_steps) - 1
        self.emit(
            Round(
                round=ended.round,
                step=self.trainee.step,
                loss=sum(steps * loss for steps, loss in ended.losses) / count,
                lr=learning_rate(last_step, recipe.inner, recipe.total_steps),
                local_steps=count,
                tokens=self.tokens,
                tokens_per_s=count * self.world.problem.tokens_per_step / max(ended.seconds, 1e-9),
                partners=tuple(traffic.partners),
                mixed=bool(traffic.partners),
                tried=traffic.tried,
                reason=traffic.reason,
                next_round=ended.next_round,
                next_reason=ended.next_reason,
                distance=sum(traffic.distances) / len(traffic.distances) if traffic.distances else None,
                bytes_sent=traffic.bytes_sent,
                bytes_received=traffic.bytes_received,
                exchange_s=traffic.exchange_s,
                waited_s=traffic.waited_s,
                overlap_steps=traffic.overlap_steps,
                seconds=ended.seconds,
                radius=traffic.clips[-1][1].radius if traffic.clips else None,
                excess=max((clip.excess for _, clip in traffic.clips), default=None),
                clipped=tuple(sorted({peer for peer, clip in traffic.clips if clip.shortened})),
            )
        )
        if ended.next_round >= recipe.rounds or ended.next_round % recipe.evaluation.every_rounds == 0:
            self.evaluate(ended.next_round)

    def evaluate(self, round: int) -> None:
        """Measures the loss on the held-out split, with `round` rounds done; takes no virtual time."""
        loss = self.world.problem.validation_loss(self.trainee.parameters)
        self.emit(Evaluation(round=round, step=self.trainee.step, validation_loss=loss, seconds=0.0))
