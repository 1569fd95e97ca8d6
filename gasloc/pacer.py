"""How many local steps this peer takes beside those it sees: `gasloc.pacing` applied to a live swarm."""

import math

from gasloc import pacing
from gasloc.company import Company
from gasloc.recipe import Recipe
from gasloc.round_result import RoundResult
from peers.exchange import Answer, PeerId
from peers.membership import Status

MOST_STEPS = 4
"""A fast peer takes at most this many times the recipe's local steps in a round."""


class Pacer:
    """Chooses this peer's local steps, round by round."""

    def __init__(self, recipe: Recipe, company: Company, me: PeerId) -> None:
        self._recipe = recipe
        self._company = company
        self._me = me
        self.early_s = 0.0
        """How much sooner than the others we are to trade this round, as a partner's link is slow: it waits for us."""

    def local_steps(self, own: Status, previous: int) -> tuple[int, str]:
        """How many local steps this peer takes in the coming round, and why.

        `own`: what this peer publishes; `previous`: what it took last.

        See `gasloc.pacing`. The recipe's number where it says no to pacing, or where nobody waits for anybody.
        """
        reference = self._recipe.local_steps
        if not self._recipe.pacing or self._recipe.topology in ("none", "syncer"):
            return reference, f"the recipe's {reference} steps: it has no pacing"
        training = self._company.training()
        statuses = {self._me: own, **{peer: member.status for peer, member in training.items()}}
        paces = {peer: pacing.Pace(status.step_time_s, status.exchange_time_s) for peer, status in statuses.items()}
        if self._pairs_once():
            round = own.round
            near = {peer: paces[peer] for peer in self._company.pairable(round) if peer in paces}
            recipe = self._recipe
            paces |= pacing.beside_partners(near, recipe.topology, round=round, me=self._me, seed=recipe.seed)
        mine = paces[self._me]
        self.early_s = max(mine.exchange_time_s - own.exchange_time_s, 0.0) if mine.known else 0.0
        return pacing.local_steps(mine, list(paces.values()), reference, MOST_STEPS * reference, previous=previous)

    def transfer_s(self, own: Status, result: RoundResult) -> float:
        """How long our link took for a partner in the round, seconds; NaN where nothing was traded.

        Of transfers alone: the wait for a late partner must not make us look slow ourselves.
        """
        transfers_s = {peer: swap.seconds for peer, swap in result.swaps.items() if swap.answer is Answer.ACCEPT}
        if not self._pairs_once():
            return max(transfers_s.values(), default=math.nan)
        known = {peer: member.status.exchange_time_s for peer, member in self._company.training().items()}
        told = [(seconds, known.get(peer, math.nan)) for peer, seconds in transfers_s.items()]
        return pacing.own_transfer_s(own.exchange_time_s, told)

    def _pairs_once(self) -> bool:
        """Whether a round has one exchange, with a few partners: a transfer tells then which side was slow."""
        return self._recipe.topology != "all-to-all" and self._recipe.mixes == 1 and self._recipe.fragments == 1
