"""What a replica tells of each round."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from peers.exchange import PeerId, Swap


@dataclass(frozen=True, slots=True)
class RoundResult:
    """What happened at the end of one round."""

    round: int
    local_steps: int
    partners: tuple[PeerId, ...]
    """Those whose parameters went into the mix."""
    swaps: Mapping[PeerId, Swap]
    """One a partner over all of the round's exchanges, without tensors."""
    mixes_tried: int
    """Mixes for which there was somebody to trade with; fragments that were due, for a learner."""
    mixes_done: int
    """Mixes into which at least one partner's parameters went; merged fragments taken, for a learner."""
    reason: str
    distance: float | None
    """||mix - phi|| / ||phi||: how far mixing moved this peer; None where nobody mixed."""
    exchange_s: float
    """Seconds from sending to the outcome, over all of the round's exchanges."""
    bytes_sent: int
    bytes_received: int
    next_round: int
    next_reason: str
    radius: float | None = None
    """How far from phi a partner may be before it is clipped, in the last exchange; None where nobody was measured."""
    excess: float | None = None
    """The farthest partner's distance in units of its radius; above 1 it was clipped. None as above."""
    clipped: Mapping[PeerId, float] = field(default_factory=dict)
    """Those that were clipped, with their largest excess."""
    rolled_back: int = 0
    """How often this peer put its own state back, since it was not finite."""

    waited_s: float = 0.0
    """What of `exchange_s` training stood still for: all of it, or what an overlap could not hide."""
    steps_since: int | None = None
    """Local steps since the result before this one; None: `local_steps`.

    Under overlap a round's outcome comes while the next one is trained, so steps of both lie between two results.
    """
    overlap_steps: int = 0
    """The most local steps that were taken between sending and taking the outcome (tau); 0: training waited."""
    overlap_reason: str = ""
    """Why training waited or did not, in the last exchange; see `gasloc.overlap`."""

    @property
    def tried(self) -> bool:
        """There was somebody to mix with."""
        return self.mixes_tried > 0

    @property
    def mixed(self) -> bool:
        """Somebody's parameters went into the mix."""
        return self.mixes_done > 0
