"""The account of one gossip round: its exchanges summed up into a result."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from gasloc import mixing
from gasloc.clipping import Clipped
from gasloc.gossip import Exchanged, joined
from gasloc.rollback import words
from gasloc.round_result import RoundResult
from peers.exchange import Answer, PeerId, Swap, Tensors


@dataclass(frozen=True, slots=True)
class Traded:
    """An exchange and what was measured of it."""

    exchanged: Exchanged
    seconds: float
    moved_squared: float
    """||mix - phi||^2; 0 where nobody mixed."""
    size_squared: float
    """||phi||^2; 0 as above."""

    @classmethod
    def measured(cls, phi: Tensors, exchanged: Exchanged, seconds: float) -> Self:
        """Compares `phi`, which was sent, with the mix."""
        if not exchanged.mixes_done:
            return cls(exchanged, seconds, 0.0, 0.0)
        size_squared = mixing.squared_norm(phi)
        return cls(exchanged, seconds, mixing.distance(phi, exchanged.mix) ** 2 * size_squared, size_squared)


@dataclass(frozen=True, slots=True)
class Ended:
    """A round whose local steps are done, and what follows it."""

    round: int
    local_steps: int
    next_round: int
    next_reason: str
    rollbacks: tuple[str, ...]


@dataclass(slots=True)
class Tally:
    """What a round's exchanges came to so far."""

    alone: bool
    """There is no network, by choice."""
    swaps: dict[PeerId, Swap] = field(default_factory=dict)
    partners: dict[PeerId, None] = field(default_factory=dict)
    remarks: dict[str, None] = field(default_factory=dict)
    clips: list[tuple[PeerId, Clipped]] = field(default_factory=list)
    mixes_tried: int = 0
    mixes_done: int = 0
    exchange_s: float = 0.0
    waited_s: float = 0.0
    overlap_steps: int = 0
    overlap_reason: str = ""
    radius: float | None = None
    radius_reason: str = ""
    _moved_squared: float = 0.0
    _size_squared: float = 0.0

    def add(self, traded: Traded, radius: tuple[float, str]) -> None:
        """Counts an exchange, in which partners were clipped to `radius`."""
        exchanged = traded.exchanged
        for peer, swap in exchanged.swaps.items():
            self.swaps[peer] = joined(self.swaps[peer], swap) if peer in self.swaps else swap
        self.partners |= dict.fromkeys(exchanged.partners)
        self.remarks |= dict.fromkeys(exchanged.remarks)
        self.clips += exchanged.clips
        self.mixes_tried += exchanged.mixes_tried
        self.mixes_done += exchanged.mixes_done
        self.exchange_s += traded.seconds
        self.radius, self.radius_reason = radius
        self._moved_squared += traded.moved_squared
        self._size_squared += traded.size_squared

    def wait(self, seconds: float, steps: int) -> None:
        """Counts how long training stood still for an outcome that it took `steps` local steps after sending."""
        self.waited_s += seconds
        self.overlap_steps = max(self.overlap_steps, steps)

    def result(self, ended: Ended) -> RoundResult:
        """All of it, once every exchange of the round has come to its end."""
        clipped = self._clipped()
        return RoundResult(
            round=ended.round,
            local_steps=ended.local_steps,
            partners=tuple(self.partners),
            swaps=self.swaps,
            mixes_tried=self.mixes_tried,
            mixes_done=self.mixes_done,
            reason="; ".join([_words(self.swaps, alone=self.alone), *self.remarks])
            + self._clip_words(clipped)
            + words(ended.rollbacks),
            distance=(self._moved_squared / self._size_squared) ** 0.5 if self._size_squared else None,
            exchange_s=self.exchange_s,
            bytes_sent=sum(swap.bytes_sent for swap in self.swaps.values()),
            bytes_received=sum(swap.bytes_received for swap in self.swaps.values()),
            next_round=ended.next_round,
            next_reason=ended.next_reason,
            radius=self.radius if self.clips else None,
            excess=max((clip.excess for _, clip in self.clips), default=None),
            clipped=clipped,
            rolled_back=len(ended.rollbacks),
            waited_s=self.waited_s,
            overlap_steps=self.overlap_steps,
            overlap_reason=self.overlap_reason,
        )

    def _clipped(self) -> dict[PeerId, float]:
        clipped: dict[PeerId, float] = {}
        for peer, clip in self.clips:
            if clip.shortened:
                clipped[peer] = max(clip.excess, clipped.get(peer, 0.0))
        return clipped

    def _clip_words(self, clipped: Mapping[PeerId, float]) -> str:
        far = ", ".join(f"{peer} at {excess:.3g}" for peer, excess in sorted(clipped.items()))
        return f"; clipped {far} times the radius, {self.radius:.3g}: {self.radius_reason}" if far else ""


def _words(swaps: Mapping[PeerId, Swap], *, alone: bool) -> str:
    if alone:
        return "alone, by choice"
    if not swaps:
        return "nobody to mix with this round"
    failed = [f"{peer}: {swap.reason}" for peer, swap in sorted(swaps.items()) if swap.answer is not Answer.ACCEPT]
    mixed = len(swaps) - len(failed)
    return f"mixed with {mixed} of {len(swaps)}" + "".join(f"; {reason}" for reason in failed)
