"""A replica that never lets out what is not finite: it goes back to the round's start instead."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from gasloc.errors import RunError
from gasloc.progress import Progress
from gasloc.replica import Replica
from gasloc.shared_state import SharedState
from peers.codec import is_finite
from peers.exchange import Tensors

_MOST = 3
"""The rollback in a row, without a whole round between them, that ends the run."""


class Rollback:
    """Reads a replica's parameters, and puts them back as they were at the round's start where they are broken."""

    def __init__(self, inner: Optimizer, replica: Replica, state: SharedState, progress: Progress) -> None:
        self._inner = inner
        self._inner_starts_empty = not inner.state
        self._replica = replica
        self._state = state
        self._progress = progress
        self._in_row = 0
        self.before: Callable[[], None]
        """Called before the parameters go back: what is under way holds progress that they are about to lose."""
        self.reasons: list[str] = []
        """Of this round's rollbacks."""

    def phi(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Parameters and buffers of these names as training left them; after a rollback where not finite.

        To be read only: they may be the model's own. Raises `RunError` as `back` does, or where the round's start
        is not finite itself.
        """
        wanted = tuple(names)
        phi = self._read(wanted)
        broken = not_finite(phi)
        if broken is None:
            return phi
        self.back(f"'{broken}' of the model is no longer finite")
        phi = self._read(wanted)
        broken = not_finite(phi)
        if broken is not None:
            raise RunError(
                f"round {self._progress.round}: '{broken}' was not finite at the round's start already, so nothing "
                "was sent; resume from the last checkpoint"
            )
        return phi

    @torch.no_grad()
    def back(self, why: str) -> None:
        """Puts the model back, and empties the inner optimizer's state; see `GaslocOptimizer.roll_back`."""
        self._in_row += 1
        if self._in_row >= _MOST:
            raise RunError(
                f"round {self._progress.round}: {why}, for the {_MOST}rd time in a row; "
                "lower the learning rate and resume from the last checkpoint"
            )
        self.reasons.append(why)
        self.before()
        self._replica.assign(self._state.anchor, self._state.buffers)
        self._empty_inner()
        self._inner.zero_grad(set_to_none=True)

    def end_round(self) -> tuple[str, ...]:
        """The reasons of the round's rollbacks; one without any breaks the row."""
        reasons, self.reasons = tuple(self.reasons), []
        if not reasons:
            self._in_row = 0
        return reasons

    def _read(self, names: tuple[str, ...]) -> dict[str, Tensor]:
        return self._replica.moved(self._state.anchor, names)

    def _empty_inner(self) -> None:
        if self._inner_starts_empty:  # it makes its state when it needs it
            self._inner.state.clear()
            return
        for state in self._inner.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    value.zero_()
                elif isinstance(value, int | float):
                    state[key] = type(value)(0)


def not_finite(tensors: Tensors) -> str | None:
    """The first tensor that holds what is not finite."""
    return next((name for name, tensor in tensors.items() if not is_finite(tensor)), None)


def words(reasons: Sequence[str]) -> str:
    """Rollbacks as the end of a round's reason."""
    return "".join(f"; rolled back to the round's start: {why}" for why in reasons)
