"""The radius to which each fragment's partners are clipped, out of the history of their distances."""

import math
from collections.abc import Sequence
from typing import Literal

from gasloc import clipping
from gasloc.clipping import Clipped
from gasloc.progress import Progress
from peers.exchange import PeerId, Tensors

MixingRule = Literal["clipped", "average"]


class Radii:
    """Chooses radii by `gasloc.clipping`; infinite ones where the rule is to take the plain average."""

    def __init__(self, rule: MixingRule, fragments: int) -> None:
        self._clips = rule == "clipped"
        self._histories: list[tuple[float, ...]] = [()] * fragments
        """Accepted distances of each fragment, the latest last."""

    def choose(self, index: int, start: Tensors, phi: Tensors, progress: Progress) -> tuple[float, str]:
        """The radius for fragment `index`, which moved from `start` to `phi` this round, and why."""
        if not self._clips:
            return math.inf, "partners are not clipped"
        moved = clipping.apart(start, phi) * clipping.pace_allowance(progress.local_steps, progress.reference_steps)
        return clipping.radius(self._histories[index], moved)

    def remember(self, index: int, clips: Sequence[tuple[PeerId, Clipped]]) -> None:
        """Adds an exchange's distances to the fragment's history."""
        self._histories[index] = clipping.remembered(self._histories[index], [clip for _, clip in clips])
