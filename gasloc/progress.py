"""Where a replica stands in its run, and which fragments that makes due."""

from dataclasses import dataclass, field

from gasloc import fragments
from gasloc.errors import UsageError

LAST = 0
"""The fragment at offset 0: due after the last step of the round, and the only one without fragments."""


@dataclass(slots=True)
class Progress:
    """A round, and the local steps taken in it. Raises `UsageError` for rounds without steps."""

    local_steps: int
    """Local steps a round; may change at any time."""
    step_tokens: float = 1.0
    """Tokens of one local step; may change at any time."""
    round: int = 0
    local_step: int = 0
    """Local steps taken in this round."""
    reference_steps: int = field(init=False)
    """Local steps a round as they were at first: those of the recipe, which a peer's own pace departs from."""

    def __post_init__(self) -> None:
        if self.local_steps < 1:
            raise UsageError(f"local_steps = {self.local_steps}: a round has at least 1 local step")
        self.reference_steps = self.local_steps

    def due(self, count: int) -> list[int]:
        """Which of `count` fragments to exchange after this local step, in the order of their turns."""
        if self.local_steps < count:  # a peer that takes few steps: all at once
            return [*range(1, count), LAST] if self.local_step >= self.local_steps else []
        return fragments.due(min(self.local_step, self.local_steps), self.local_steps, count)

    def begin(self, round: int) -> None:
        """Stands at the start of `round`."""
        self.round, self.local_step = round, 0
