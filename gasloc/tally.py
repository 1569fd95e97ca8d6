"""The account of one gossip round: its exchanges summed up into a result."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from gasloc import mixing
from gasloc.clipping import Clipped
from gasloc.gossip import Exchanged, joined
from gasloc.rollback import words
from gasloc.round_result import RoundResult
from peers.exchange import Answer, PeerId, Swap, Tensors


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
    radius: float | None = None
    radius_reason: str = ""
    _moved_squared: float = 0.0
    _size_squared: float = 0.0

    def add(self, phi: Tensors, exchanged: Exchanged, seconds: float, radius: tuple[float, str]) -> None:
        """Counts an exchange of `phi`, which took `seconds`."""
        for peer, swap in exchanged.swaps.items():
            self.swaps[peer] = joined(self.swaps[peer], swap) if peer in self.swaps else swap
        self.partners |= dict.fromkeys(exchanged.partners)
        self.remarks |= dict.fromkeys(exchanged.remarks)
        self.clips += exchanged.clips
        self.mixes_tried += exchanged.mixes_tried
        self.mixes_done += exchanged.mixes_done
        self.exchange_s += seconds
        self.radius, self.radius_reason = radius
        if exchanged.mixes_done:
            size_squared = mixing.squared_norm(phi)
            self._moved_squared += mixing.distance(phi, exchanged.mix) ** 2 * size_squared
            self._size_squared += size_squared

    def result(
        self, *, round: int, local_steps: int, next_round: int, next_reason: str, rollbacks: tuple[str, ...]
    ) -> RoundResult:
        """All of it, at the round's end."""
        clipped = self._clipped()
        return RoundResult(
            round=round,
            local_steps=local_steps,
            partners=tuple(self.partners),
            swaps=self.swaps,
            mixes_tried=self.mixes_tried,
            mixes_done=self.mixes_done,
            reason="; ".join([_words(self.swaps, alone=self.alone), *self.remarks])
            + self._clip_words(clipped)
            + words(rollbacks),
            distance=(self._moved_squared / self._size_squared) ** 0.5 if self._size_squared else None,
            exchange_s=self.exchange_s,
            bytes_sent=sum(swap.bytes_sent for swap in self.swaps.values()),
            bytes_received=sum(swap.bytes_received for swap in self.swaps.values()),
            next_round=next_round,
            next_reason=next_reason,
            radius=self.radius if self.clips else None,
            excess=max((clip.excess for _, clip in self.clips), default=None),
            clipped=clipped,
            rolled_back=len(rollbacks),
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
