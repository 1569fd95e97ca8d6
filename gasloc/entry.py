"""Where the state of a peer that enters a swarm comes from. A pure decision."""

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from torch import Tensor

from gasloc import rounds
from peers.exchange import Tensors
from peers.membership import MemberState, Status


class Source(StrEnum):
    """Where the state comes from, or that it is too early to tell."""

    DONOR = "donor"
    """Downloaded from a member."""
    INITIAL = "initial"
    """The recipe's seed: nobody has ended a round yet."""
    CHECKPOINT = "checkpoint"
    """This peer's own, which is recent enough."""
    WAIT = "wait"
    """Look again: somebody is there, but has no state to give yet."""


class Replica(Protocol):
    """What a swarm needs of an optimizer; `gasloc.GaslocOptimizer` is one."""

    local_steps: int

    @property
    def round(self) -> int: ...

    def snapshot(self) -> tuple[int, dict[str, Tensor]]: ...

    def load_snapshot(self, round: int, tensors: Tensors) -> None: ...


@dataclass(frozen=True, slots=True)
class Entry:
    """How a peer came into the swarm, or caught up with it."""

    source: Source
    reason: str
    round: int
    members: int
    """Members seen, this one included."""
    size_bytes: int
    seconds: float


def decide(mine: int, others: Collection[Status], *, first: bool, stale_rounds: int) -> tuple[Source, str]:
    """The source and the reason in words.

    `mine`: the round of our own checkpoint, 0 without one. `others`: what the other members of the run
    publish. `first`: we begin the run, or bring it back, so it is right that nobody is there. Never `INITIAL`
    where anybody has ended a round, so that nobody's training is silently lost. Where there is a syncer, always
    `DONOR`: it has the newest state.
    """
    merging = [other.round for other in others if other.state is MemberState.MERGING]
    if merging:
        return Source.DONOR, f"the syncer is at round {max(merging)}"
    training = [other.round for other in others if other.state in (MemberState.TRAINING, MemberState.WAITING)]
    if mine > 0:
        stale, reason = rounds.is_stale(mine, training, stale_rounds)
        return (Source.DONOR if stale else Source.CHECKPOINT), reason
    furthest = max((other.round for other in others), default=0)
    if not others:
        if first:
            return Source.INITIAL, "this peer begins the run"
        return Source.WAIT, "its address answers, but no member's record is seen"
    if furthest == 0:
        return Source.INITIAL, "nobody has ended a round yet"
    if max(training, default=0) == 0:
        return Source.WAIT, f"a member is at round {furthest} but does not train yet"
    return Source.DONOR, f"the swarm is at round {max(training)}"
