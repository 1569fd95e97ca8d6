"""A learner's rounds: reports of fragments that are due, merges as they come, a result at each round's end."""

import math
import time
from collections.abc import Callable

import torch

from gasloc import rounds
from gasloc.learner import Learner, SyncerLink
from gasloc.progress import LAST, Progress
from gasloc.replica import Replica
from gasloc.rollback import Rollback, words
from gasloc.round_result import RoundResult
from gasloc.shared_state import SharedState


class LearnerRounds:
    """What a learner of Decoupled DiLoCo does after each local step; see `gasloc.learner`."""

    def __init__(
        self,
        learner: Learner,
        link: SyncerLink,
        replica: Replica,
        state: SharedState,
        rollback: Rollback,
        progress: Progress,
        *,
        blocking: bool,
        on_round: Callable[[RoundResult], None],
    ) -> None:
        """`blocking`: waits for each merge, the reference in tests."""
        self._learner = learner
        self._link = link
        self._replica = replica
        self._state = state
        self._rollback = rollback
        self._progress = progress
        self._blocking = blocking
        self._on_round = on_round
        self._exchange_s = 0.0
        rollback.before = learner.forget

    def after_step(self) -> None:
        """Takes what came, reports what is due; tells the round's result after its last step."""
        self._learner.count_step(self._progress.step_tokens)
        self._take_merges()
        due = self._progress.take_due(len(self._state.parts))
        if not due:
            return
        phi = self._rollback.phi(name for index in due for name in self._state.parts[index].names)
        for index in due:
            self._learner.report(index, phi, self._progress.round)
        if self._blocking:
            started = time.perf_counter()
            self._learner.wait(math.inf)
            self._exchange_s += time.perf_counter() - started
            self._take_merges()
        if LAST in due:
            self._on_round(self._end_round())

    def settle(self, timeout_s: float) -> None:
        """Has the syncer merge all that is left, and takes it: waits twice `timeout_s` at most."""
        learner = self._learner
        learner.wait(timeout_s)
        self._take_merges()
        names = [name for index in learner.unreported for name in self._state.parts[index].names]
        if names:
            phi = self._rollback.phi(names)
            for index in learner.unreported:
                learner.report(index, phi, max(self._progress.round - 1, 0))
            learner.wait(timeout_s)
            self._take_merges()

    def take_outcomes(self) -> None:
        """Nothing: merges that are under way are taken as they come, and tokens that they miss count again."""

    def drop(self) -> None:
        """Nothing: what is under way is dropped when other versions are loaded."""

    def restart(self) -> None:
        """After fresh state was taken: the round begins anew."""
        self._exchange_s = 0.0
        self._rollback.reasons.clear()

    def step_back(self) -> None:
        """Nothing: a syncer's versions know no slots."""

    @torch.no_grad()
    def _take_merges(self) -> None:
        if not self._learner.arrived():
            return
        anchor = self._state.anchor
        current = self._rollback.phi(anchor)  # the progress since is kept, so it must be finite
        with self._state.lock:
            values = self._learner.take(current)
            for name, value in values.items():
                anchor[name].copy_(value)
        self._replica.assign(values, {})

    def _end_round(self) -> RoundResult:
        outcome = self._learner.end_round()
        progress = self._progress
        next_round, next_reason = rounds.next_round(progress.round, self._link.others_rounds())
        reasons = self._rollback.end_round()
        result = RoundResult(
            round=progress.round,
            local_steps=progress.local_step,
            partners=tuple(outcome.swaps),
            swaps=outcome.swaps,
            mixes_tried=outcome.reported,
            mixes_done=outcome.merged,
            reason=outcome.reason + words(reasons),
            distance=outcome.distance,
            exchange_s=self._exchange_s,
            waited_s=self._exchange_s,
            bytes_sent=sum(swap.bytes_sent for swap in outcome.swaps.values()),
            bytes_received=sum(swap.bytes_received for swap in outcome.swaps.values()),
            next_round=next_round,
            next_reason=next_reason,
            rolled_back=len(reasons),
        )
        with self._state.lock:
            self._state.round = next_round
        progress.begin(next_round)
        self._exchange_s = 0.0
        return result
