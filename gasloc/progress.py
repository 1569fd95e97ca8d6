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
    _taken: set[int] = field(init=False, default_factory=set)
    """The fragments of which this round's exchange has begun."""
    reference_steps: int = field(init=False)
    """Local steps a round as they were at first: those of the recipe, which a peer's own pace departs from."""

    def __post_init__(self) -> None:
        if self.local_steps < 1:
            raise UsageError(f"local_steps = {self.local_steps}: a round has at least 1 local step")
        self.reference_steps = self.local_steps

    def take_due(self, count: int) -> list[int]:
        """Which of `count` fragments to exchange after this local step, in the order of their turns.

        Each once a round, also where `local_steps` changes within it: those that were passed over come at its end.
        """
        due = [index for index in self._due(count) if index == LAST or index not in self._taken]
        if LAST in due:
            skipped = [index for index in range(1, count) if index not in self._taken and index not in due]
            due = [*skipped, *(index for index in due if index != LAST), LAST]
        self._taken.update(due)
        return due

    def begin(self, round: int) -> None:
        """Stands at the start of `round`."""
        self.round, self.local_step = round, 0
        self._taken.clear()

    def resume(self, round: int, local_step: int, count: int) -> None:
        """Stands within a round, with what was due of `count` fragments until there exchanged already."""
        self.begin(round)
        for self.local_step in range(1, local_step + 1):
            self.take_due(count)

    def _due(self, count: int) -> list[int]:
        if self.local_steps < count:  # a peer that takes few steps: all at once
            return [*range(1, count), LAST] if self.local_step >= self.local_steps else []
        return fragments.due(min(self.local_step, self.local_steps), self.local_steps, count)
