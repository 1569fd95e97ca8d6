"""How many local steps this peer takes beside those it sees, and in which rounds it trades.

`gasloc.pacing` and `gasloc.turns`, applied to a live swarm.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from gasloc import overlap, pacing, turns
from gasloc.pacing import Pace, Transfer, busy_s
from gasloc.recipe import Recipe
from gasloc.round_result import RoundResult
from gasloc.turns import Links, Turns
from peers.exchange import Answer, PeerId
from peers.membership import Member, Status

MOST_STEPS = 4
"""A fast peer takes at most this many times the recipe's local steps in a round."""


class Others(Protocol):
    """The members that a peer sees beside itself; `gasloc.company.Company` is one."""

    def training(self) -> Mapping[PeerId, Member]:
        """Those that train, or wait for a partner."""
        ...

    def turns(self, round: int) -> Mapping[PeerId, Turns]:
        """The turns of those that may be paired in `round` when it is theirs."""
        ...


class Pacer:
    """Chooses this peer's local steps, round by round, and the rounds in which it trades."""

    def __init__(self, recipe: Recipe, others: Others, me: PeerId) -> None:
        self._recipe = recipe
        self._others = others
        self._me = me
        self.early_s = 0.0
        """How much sooner than the others we are to trade this round, as a partner's link is slow: it waits for us."""
        self.turns = Turns()
        """The rounds in which this peer trades."""
        self._why_turns = ""
        self._links = Links()
        self._late_s = 0.0
        """How much later than the others we begin the coming round."""
        self._planned: tuple[int, Pace] | None = None
        """The round that we are in, and our pace in it."""

    def local_steps(self, own: Status, previous: int) -> tuple[int, str]:
        """How many local steps this peer takes in the coming round, and why.

        `own`: what this peer publishes; `previous`: what it took last.

        See `gasloc.pacing`. The recipe's number where it says no to pacing, or where nobody waits for anybody.
        """
        reference = self._recipe.local_steps
        if not self._paced():
            return reference, f"the recipe's {reference} steps: it has no pacing"
        paces = self._paces(own)
        if self._pairs_once():
            round, recipe = own.round, self._recipe
            near = {**self._others.turns(round), self._me: self.turns}
            paces = turns.of_round(paces, near, recipe.topology, round=round, me=self._me, seed=recipe.seed)
        mine = paces[self._me]
        self._planned = own.round, mine
        self.early_s = max(mine.exchange_time_s - own.exchange_time_s, 0.0) if mine.known else 0.0
        steps, reason = pacing.local_steps(
            mine, list(paces.values()), reference, MOST_STEPS * reference, previous=previous, late_s=self._late_s
        )
        if not self.turns.has(own.round):
            reason = f"{self._why_turns}, next in round {self.turns.next(own.round)}; {reason}"
        return steps, reason

    def count_round(self, own: Status, result: RoundResult) -> tuple[float, Turns]:
        """Learns from a round's transfers; `own`: what this peer published before it, with its step time of now.

        Returns the exchange time to publish, seconds: a moving average of what training could not hide of transfers
        alone, as the wait for a late partner must not make us look slow ourselves. And the rounds in which this peer
        trades from now on.
        """
        transfers = {
            peer: Transfer(swap.seconds, swap.ended_s)
            for peer, swap in result.swaps.items()
            if swap.answer is Answer.ACCEPT
        }
        transfers_s = busy_s(transfers.values())
        once = self._paced() and self._pairs_once()
        transfer_s = self._own_transfer_s(own, transfers, len(result.swaps)) if once else transfers_s
        unhidden_s = overlap.unhidden_s(transfer_s, result.waited_s)
        own = replace(own, exchange_time_s=pacing.smooth(own.exchange_time_s, unhidden_s))
        if once:
            round_s = self._round_s(own)
            self._late_s = self._lateness_s(own, result, transfers_s, round_s)
            self.turns, self._why_turns = turns.choose(
                self._links, own.step_time_s, round_s, previous=self.turns, round=result.next_round
            )
        return own.exchange_time_s, self.turns

    def _own_transfer_s(self, own: Status, transfers: Mapping[PeerId, Transfer], asked: int) -> float:
        """What transfers with partners, of those `asked`, tell of our own link; they are counted."""
        training, round_s = self._others.training(), self._round_s(own)
        told = []
        for peer, transfer in transfers.items():
            theirs_s = math.nan
            if peer in training:
                status = training[peer].status
                its = Turns(status.trade_every, status.trade_round)
                theirs_s = max(status.exchange_time_s, turns.least_exchange_s(its, round_s))
            told.append(replace(transfer, theirs_s=theirs_s))
        transfer_s = pacing.own_transfer_s(self._links.average_s, told)
        self._links.count(transfer_s, asked, len(told), self.turns)
        return transfer_s

    def _round_s(self, own: Status) -> float | None:
        return pacing.round_length_s(list(self._paces(own).values()), self._recipe.local_steps)

    def _lateness_s(self, own: Status, result: RoundResult, transfers_s: float, round_s: float | None) -> float:
        """How late this peer is for the next round: never where there is nobody else to be late for.

        Under overlap nobody is waited for at once; a jump is to others.
        """
        began, mine = self._planned or (result.round, Pace(0.0, 0.0))
        if not self._others.training() or result.overlap_steps or result.next_round > began + 1:
            return 0.0
        if not mine.known:
            mine = Pace(own.step_time_s, 0.0)
        spent_s = turns.spent_s(mine, transfers_s, result.waited_s, tried=bool(result.swaps))
        return turns.late_after(mine, result.local_steps, spent_s, round_s, self._late_s)

    def _paced(self) -> bool:
        return self._recipe.pacing and self._recipe.topology not in ("none", "syncer")

    def _paces(self, own: Status) -> dict[PeerId, Pace]:
        statuses = {peer: member.status for peer, member in self._others.training().items()} | {self._me: own}
        return {peer: Pace(status.step_time_s, status.exchange_time_s) for peer, status in statuses.items()}

    def _pairs_once(self) -> bool:
        """Whether a round has one exchange, with a few partners: a transfer tells then which side was slow."""
        return self._recipe.topology != "all-to-all" and self._recipe.mixes == 1 and self._recipe.fragments == 1
