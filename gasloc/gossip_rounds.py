"""Gossip rounds: what is due is exchanged with partners and takes its outer step, a result at each round's end.

Where training goes on during an exchange (`gasloc.overlap`), the exchange works on a copy of the fragment, and its
outcome is taken at the first local step after it came:

    theta_new = outer(theta, theta - mix);    model = theta_new + (current - phi)

Local steps count in the next round from the moment the last fragment is sent. The round's result is told when the
last of its outcomes was taken; until then the anchor, which newcomers get, is the start of the round before.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.optim import Optimizer

from gasloc import overlap, rounds
from gasloc.gossip import Network, Plan, exchange
from gasloc.heap import give_back
from gasloc.lane import Lane
from gasloc.overlap import Choice
from gasloc.progress import LAST, Progress
from gasloc.radii import Radii
from gasloc.replica import Replica
from gasloc.rollback import Rollback
from gasloc.round_result import RoundResult
from gasloc.shared_state import SharedState, only
from gasloc.tally import Ended, Tally, Traded
from peers.exchange import Answer, Slot, Tensors


@dataclass(slots=True, eq=False)
class _Flight:
    """An exchange under way."""

    index: int
    round: int
    sent: dict[str, Tensor]
    radius: tuple[float, str]
    tally: Tally
    bound: int
    """Local steps after which training waits for it."""
    outcome: "Future[Traded]"
    age: int = 0
    """Local steps since it was sent."""
    ends: Ended | None = None
    """The round that ends with it."""


class GossipRounds:
    """What a replica does after each local step in every topology but the syncer's."""

    def __init__(
        self,
        network: Network | None,
        plan: Plan,
        inner: Optimizer,
        replica: Replica,
        state: SharedState,
        rollback: Rollback,
        progress: Progress,
        radii: Radii,
        choice: Choice,
        on_round: Callable[[RoundResult], None],
    ) -> None:
        self._network = network
        self._plan = plan
        self._inner = inner
        self._replica = replica
        self._state = state
        self._rollback = rollback
        self._progress = progress
        self._radii = radii
        self._choice = choice
        self._on_round = on_round
        self._tally = Tally(alone=network is None)
        self._lane = Lane()
        self._flights: list[_Flight] = []
        """In the order in which they were sent, and come to their ends."""
        self._reached: tuple[int, int] | None = None
        """Round and turn of the latest exchange; the next has a later one, even where a partner took us ahead."""
        self._bound = 0
        """Local steps for which the exchange that begins now may be under way; 0: it is waited for."""
        self._restarts = 0
        self._gradient_bytes = sum(tensor.nbytes for tensor in state.anchor.values())
        self._mixed_bytes = 0
        """What the outcomes taken since the last local step held."""
        self._stepped_s: float | None = None
        self._steps_since = 0
        """Local steps since a result was told."""
        rollback.before = self._take_without_progress

    def after_step(self) -> None:
        """Takes what came, exchanges what is due, and tells of rounds that came to their end."""
        if self._stepped_s is not None:
            self._choice.count_step(time.perf_counter() - self._stepped_s)
        self._steps_since += 1
        for flight in self._flights:
            flight.age += 1
        while self._flights and (self._flights[0].outcome.done() or self._flights[0].age >= self._flights[0].bound):
            self._take(self._flights[0])
        restarts = self._restarts
        for index in self._progress.take_due(len(self._state.parts)):
            if not self._make_room(index, restarts):
                break
            self._exchange(index)
        freed_bytes, self._mixed_bytes = self._mixed_bytes, 0
        give_back(freed_bytes)
        self._stepped_s = time.perf_counter()

    def settle(self, timeout_s: float) -> None:
        """As `take_outcomes`: exchanges have time limits of their own."""
        self.take_outcomes()

    def take_outcomes(self) -> None:
        """Takes all that is under way; that ends by itself within the grace and its transfer."""
        while self._flights:
            self._take(self._flights[0])

    def drop(self) -> None:
        """Waits for all that is under way and takes none of it: what it was made from is to be replaced."""
        while self._flights:
            self._flights.pop(0).outcome.exception()

    def restart(self) -> None:
        """After fresh state was taken: the round begins anew."""
        self._tally = Tally(alone=self._network is None)
        self._rollback.reasons.clear()
        self._restarts += 1

    def step_back(self) -> None:
        """After the state of an earlier round was taken: slots begin there anew."""
        self._reached = None

    def _make_room(self, index: int, restarts: int) -> bool:
        """Takes what is under way of a fragment; all, where it will be waited for. False: a result led to a restart."""
        self._bound, self._tally.overlap_reason = self._choice.steps()
        while self._flights and (not self._bound or any(flight.index == index for flight in self._flights)):
            self._take(self._flights[0])
        return self._restarts == restarts

    @torch.no_grad()
    def _exchange(self, index: int) -> None:
        """Exchanges a fragment, or begins to. The last one brings the buffers."""
        self._inner.zero_grad(set_to_none=True)
        give_back(self._gradient_bytes)
        names = self._state.parts[index].names
        phi = self._rollback.phi((*names, *self._state.buffers) if index == LAST else names)
        if self._network is None:
            self._end_alone(index, phi)
        elif self._bound:
            sent = {name: tensor.clone() for name, tensor in phi.items()}
            flight = self._flight(self._network, index, sent, self._lane.run)
            self._flights.append(flight)
            if index == LAST:
                flight.ends = self._close_round()
        else:
            flight = self._flight(self._network, index, phi, _at_once)
            self._end(flight, flight.outcome.result(), {})

    def _flight(
        self,
        network: Network,
        index: int,
        phi: dict[str, Tensor],
        run: Callable[[Callable[[], Traded]], "Future[Traded]"],
    ) -> _Flight:
        """An exchange of `phi`, which must not change until its outcome is there, with this round's partners."""
        round, parts = self._progress.round, len(self._state.parts)
        start = self._state.start(phi)
        radius = self._radii.choose(index, start, phi, self._progress)
        members = network.members(round)
        note = {"local_steps": float(self._progress.local_step)}

        def work() -> Traded:
            began_s = time.perf_counter()
            # fragments are due in the order 1, 2, ..., and 0 at the end
            slot = self._next_slot(round, (index - 1) % parts, f"fragment-{index}-" if parts > 1 else "")
            exchanged = exchange(
                network, self._plan, phi, slot, members=members, note=note, radius=radius[0], start=start
            )
            self._reached = (max(slot.round, exchanged.round), slot.mix)
            return Traded.measured(phi, exchanged, time.perf_counter() - began_s)

        return _Flight(index, round, phi, radius, self._tally, self._bound, run(work))

    def _next_slot(self, round: int, turn: int, phase: str) -> Slot:
        """The slot of an exchange that begins now: later than all before it."""
        if self._reached is not None and (round, turn) <= self._reached:
            round = self._reached[0] + (turn <= self._reached[1])
        return Slot(round, turn, phase)

    def _take(self, flight: _Flight) -> None:
        """Waits for an outcome and takes it, with the progress since. Raises what the exchange raised."""
        began_s = time.perf_counter()
        try:
            traded = flight.outcome.result()
        except BaseException:
            self._flights.remove(flight)
            raise
        flight.tally.wait(time.perf_counter() - began_s, flight.age)
        with torch.no_grad():
            current = self._rollback.phi(self._state.parts[flight.index].names)
            if flight not in self._flights:  # the model went back to its start, which took the outcome
                return
            self._flights.remove(flight)
            self._end(flight, traded, current)

    def _take_without_progress(self) -> None:
        """Before the model goes back: what was sent was sound, what came after it is to be lost."""
        while self._flights:
            flight = self._flights.pop(0)
            self._end(flight, flight.outcome.result(), {})

    def _end(self, flight: _Flight, traded: Traded, current: Tensors) -> None:
        """Takes the outer step of an outcome; `current`: the fragment now, whose progress is kept. Empty: none is."""
        exchanged, tally, progress = traded.exchanged, flight.tally, self._progress
        # one that was behind mixed in its partners' round; where training is past that round, it goes on in the next
        progress.round = max(progress.round, exchanged.round + (progress.round > flight.round))
        if not flight.bound:
            tally.wait(traded.seconds, 0)
            flight.ends = self._close_round() if flight.index == LAST else None
        self._radii.remember(flight.index, exchanged.clips)
        tally.add(traded, flight.radius)
        accepted = [swap.seconds for swap in exchanged.swaps.values() if swap.answer is Answer.ACCEPT]
        self._choice.count_exchange(overlap.link_time_s(accepted, exchanged.mixes_done, traded.seconds))
        self._take_outer_step(flight.index, exchanged.mix, current, flight.sent)
        if flight.ends is not None:
            self._tell(tally, flight.ends)

    def _end_alone(self, index: int, phi: Tensors) -> None:
        tally = self._tally
        ended = self._close_round() if index == LAST else None
        self._take_outer_step(index, phi, {}, {})
        if ended is not None:
            self._tell(tally, ended)

    def _tell(self, tally: Tally, ended: Ended) -> None:
        """Tells of a round all of whose outcomes are taken; whoever listens may train."""
        now = self._progress.round
        if now > ended.next_round:  # its exchange was made in a later round than that in which it was sent
            reason = f"behind: our partners took us to their round, and training goes on in round {now}"
            ended = replace(ended, next_round=now, next_reason=reason)
        steps, self._steps_since = self._steps_since, 0
        with torch.enable_grad():
            self._on_round(replace(tally.result(ended), steps_since=steps))

    def _close_round(self) -> Ended:
        """Has local steps count in the next round from now on."""
        progress = self._progress
        others = self._network.others_rounds() if self._network else []
        next_round, reason = rounds.next_round(progress.round, others)
        ended = Ended(progress.round, progress.local_step, next_round, reason, self._rollback.end_round())
        progress.begin(next_round)
        self._tally = Tally(alone=self._network is None)
        return ended

    @torch.no_grad()
    def _take_outer_step(self, index: int, mix: Tensors, current: Tensors, sent: dict[str, Tensor]) -> None:
        """Moves the anchor, and the model with it. Buffers are taken as they were mixed, without progress."""
        state, part = self._state, self._state.parts[index]
        with state.lock:
            part.outer.step(only(part.names, mix))
            if index == LAST:
                state.buffers = only(state.buffers, mix)
                state.round = self._progress.round
        self._mixed_bytes += sum(tensor.numel() * tensor.element_size() for tensor in mix.values())
        theta: dict[str, Tensor] = only(part.names, state.anchor)
        if current:
            for name in part.names:
                # progress goes to what the model shows of theta: the rest stays in the anchor, and must not count twice
                shown = self._replica.shown(name, theta[name])
                overlap.keep_progress({name: shown}, current, {name: sent[name]})
            theta = only(part.names, sent)
        self._replica.assign(theta, state.buffers if index == LAST else {})


def _at_once(work: Callable[[], Traded]) -> "Future[Traded]":
    """Does it on this thread."""
    future: Future[Traded] = Future()
    future.set_result(work())
    return future
