"""Gossip rounds: what is due is exchanged with partners and takes its outer step, a result at each round's end."""

import time

import torch
from torch import Tensor
from torch.optim import Optimizer

from gasloc import rounds
from gasloc.gossip import Network, Plan, exchange
from gasloc.progress import LAST, Progress
from gasloc.radii import Radii
from gasloc.replica import Replica
from gasloc.rollback import Rollback
from gasloc.round_result import RoundResult
from gasloc.shared_state import SharedState, only
from gasloc.tally import Tally
from peers.exchange import Slot, Tensors


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
    ) -> None:
        self._network = network
        self._plan = plan
        self._inner = inner
        self._replica = replica
        self._state = state
        self._rollback = rollback
        self._progress = progress
        self._radii = radii
        self._tally = Tally(alone=network is None)
        rollback.before = _nothing_under_way

    @torch.no_grad()
    def after_step(self) -> RoundResult | None:
        """Exchanges what is due and takes its outer step; the round's result after its last step."""
        result = None
        for index in self._progress.due(len(self._state.parts)):
            mix = self._mixed(index)
            if index == LAST:
                result = self._end_round(mix)
            else:
                with self._state.lock:
                    self._take_outer_step(index, mix)
        return result

    def settle(self, timeout_s: float) -> None:
        """Nothing: every exchange ended in the step in which it began."""

    def restart(self) -> None:
        """After fresh state was taken: the round begins anew."""
        self._tally = Tally(alone=self._network is None)
        self._rollback.reasons.clear()

    def _mixed(self, index: int) -> Tensors:
        """Fragment `index` after mixing it with this round's partners. The last one brings the buffers."""
        self._inner.zero_grad(set_to_none=True)
        names = self._state.parts[index].names
        phi = self._rollback.phi((*names, *self._state.buffers) if index == LAST else names)
        return phi if self._network is None else self._trade(self._network, index, phi)

    def _trade(self, network: Network, index: int, phi: dict[str, Tensor]) -> Tensors:
        """What mixing with this round's partners makes of `phi`."""
        started = time.perf_counter()
        parts = len(self._state.parts)
        # fragments are due in the order 1, 2, ..., and 0 at the end
        slot = Slot(self._progress.round, (index - 1) % parts, f"fragment-{index}-" if parts > 1 else "")
        start = self._state.start(phi)
        radius = self._radii.choose(index, start, phi, self._progress)
        exchanged = exchange(
            network,
            self._plan,
            phi,
            slot,
            members=network.members(slot.round),
            note={"local_steps": float(self._progress.local_step)},
            radius=radius[0],
            start=start,
        )
        if exchanged.round > slot.round:  # we were behind, and mixed in our partners' round
            self._progress.round = exchanged.round
        self._radii.remember(index, exchanged.clips)
        self._tally.add(phi, exchanged, time.perf_counter() - started, radius)
        return exchanged.mix

    def _end_round(self, mix: Tensors) -> RoundResult:
        others = self._network.others_rounds() if self._network else []
        next_round, next_reason = rounds.next_round(self._progress.round, others)
        result = self._tally.result(
            round=self._progress.round,
            local_steps=self._progress.local_step,
            next_round=next_round,
            next_reason=next_reason,
            rollbacks=self._rollback.end_round(),
        )
        with self._state.lock:
            self._take_outer_step(LAST, mix)
            self._state.round = next_round
        self._progress.begin(next_round)
        self._tally = Tally(alone=self._network is None)
        return result

    def _take_outer_step(self, index: int, mix: Tensors) -> None:
        state, part = self._state, self._state.parts[index]
        part.outer.step(only(part.names, mix))
        if index == LAST:
            state.buffers = only(state.buffers, mix)
        self._replica.assign(only(part.names, state.anchor), state.buffers if index == LAST else {})


def _nothing_under_way() -> None:
    """Before a rollback: every exchange ended in the step in which it began."""
