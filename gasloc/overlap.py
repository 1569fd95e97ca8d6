"""Whether training goes on while an exchange runs, for how many local steps at most, and what is kept of them.

What is sent is phi, the parameters when they are due. When their mix comes after `tau` more local steps,

    theta_new = outer(theta, theta - mix)                 # as without overlap
    model     = theta_new + (current - phi)               # the local progress since is kept

`tau = 0` is the blocking form. Overlap is not free: the progress that is kept was made from parameters that knew
nothing of the partners'. `choose` weighs that against the time saved. Pure: times come in as numbers.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from gasloc.errors import RecipeError

Overlap = Literal["auto", "off"] | int
"""`auto`: by `choose`; `off`: never; a number: always, and after so many local steps training waits."""

COST = 0.16
"""Share of a round's progress that a staleness of a whole round (tau = H) costs; in proportion below.

*Measured* by `benchmarks/overlap.py`, 8 workers, 2-peer, H = 15, three seeds of 24 rounds, as rounds of blocking
training lost: see benchmarks/results/overlap.md. Seeds scatter by up to 5 % about this line.
"""

MARGIN = 0.02
"""A choice is kept while no other makes more than this share more progress in a second."""

RECENT = 5
"""Exchanges and rounds of which the median is taken: one that is out of line changes nothing."""

_RECENT_STEPS = 31


def cost(share: float) -> float:
    """The share of a round's progress that is lost where outcomes are applied `share` (tau / H) of a round late."""
    return min(COST * share, 1.0)


def choose(
    exchange_s: float, step_s: float, local_steps: int, *, fragments: int = 1, previous: int | None = None
) -> tuple[int, str]:
    """How many local steps may pass while an exchange is under way before training waits, and why. 0: wait at once.

    `exchange_s` is what one exchange takes, of one fragment where there are several, each once in a round of
    `local_steps` (H) steps of `step_s`. Of all numbers of steps up to those that hide the whole exchange, the one
    with the most progress in a second is taken:

        (1 - cost(tau / H)) / (H * step_s + fragments * max(0, exchange_s - tau * step_s))

    `previous`, the choice before, is kept while that is within `MARGIN` of the best. Times that are not positive
    and finite are unknown, and the exchange is waited for. Raises `RecipeError` for counts below 1.
    """
    if local_steps < 1 or fragments < 1:
        raise RecipeError(f"local_steps = {local_steps}, fragments = {fragments}: there is at least 1 of each")
    if not (_is_time(exchange_s) and _is_time(step_s)):
        return 0, "waiting for each exchange: step and exchange times are not measured yet"
    hiding = min(math.ceil(exchange_s / step_s - 1e-9), local_steps)

    def progress(steps: int) -> float:
        waited_s = fragments * max(0.0, exchange_s - steps * step_s)
        return (1 - cost(steps / local_steps)) * local_steps * step_s / (local_steps * step_s + waited_s)

    best = max(range(hiding + 1), key=lambda steps: (progress(steps), -steps))
    times = f"an exchange takes {exchange_s:.3g} s, {local_steps} steps of {step_s:.3g} s a round"
    if previous is not None and progress(min(previous, hiding)) >= progress(best) * (1 - MARGIN):
        return previous, f"{_words(previous)}, as before: {times}"
    gain = progress(best) / progress(0) - 1
    return best, f"{_words(best)}: {times}" + (f"; {gain:.1%} more progress in a second than waiting" if best else "")


def resolved(overlap: Overlap, topology: str) -> Overlap:
    """What a recipe's `overlap` comes to in a topology.

    `auto` waits in all-to-all, which is DiLoCo to the bit then; what staleness costs was measured among partners only.
    """
    return "off" if overlap == "auto" and topology == "all-to-all" else overlap


@torch.no_grad()
def keep_progress(theta: Mapping[str, Tensor], current: Mapping[str, Tensor], sent: dict[str, Tensor]) -> None:
    """Turns `sent` into `theta + (current - sent)`, in place; the others are only read.

    All by name, of one shape and dtype each. Without progress (`current` equal to `sent`) it is `theta`.
    Memory: nothing.
    """
    for name, tensor in sent.items():
        torch.sub(current[name], tensor, out=tensor)
        tensor.add_(theta[name])


def link_time_s(accepted_s: Sequence[float], mixes: int, whole_s: float) -> float:
    """What an exchange took without the wait for partners that were late, seconds.

    `accepted_s`: transfers with each partner; `mixes`: how many came about, one after another; `whole_s`: from
    sending to the outcome. Not a number where nothing was transferred.
    """
    return min(max(accepted_s) * max(mixes, 1), whole_s) if accepted_s else math.nan


def unhidden_s(transfer_s: float, waited_s: float) -> float:
    """What of a round's transfers training could not hide, seconds: what a peer publishes and paces by.

    `waited_s`: what training stood still for. Not a number where `transfer_s` is none: nothing was measured.
    """
    return transfer_s if math.isnan(transfer_s) else min(transfer_s, waited_s)


class Choice:
    """One peer's choice from exchange to exchange, by its own measurements alone: peers need not agree."""

    def __init__(self, overlap: Overlap, reference_steps: int, fragments: int) -> None:
        """`reference_steps`: the recipe's local steps a round, so that pacing and overlap do not act on each other.

        Raises `RecipeError` for a number of steps below 0.
        """
        if not isinstance(overlap, str) and overlap < 0:
            raise RecipeError(f"overlap = {overlap}: give 'auto', 'off' or a number of steps from 0")
        self._overlap = overlap
        self._reference_steps = reference_steps
        self._fragments = fragments
        self._steps_s: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._exchanges_s: deque[float] = deque(maxlen=RECENT)
        self._previous: int | None = None

    def count_step(self, seconds: float) -> None:
        """Counts the time of one local step."""
        self._steps_s.append(seconds)

    def count_exchange(self, seconds: float) -> None:
        """Counts the `link_time_s` of one exchange; what is not a number is no measurement."""
        if math.isfinite(seconds):
            self._exchanges_s.append(seconds)

    def steps(self) -> tuple[int, str]:
        """The choice for the exchange that begins now, and why; see `choose`."""
        if self._overlap == "off":
            return 0, "waiting for each exchange: overlap is off"
        if self._overlap != "auto":
            return self._overlap, f"{_words(self._overlap)}: the recipe says so"
        self._previous, reason = choose(
            _median(self._exchanges_s),
            _median(self._steps_s),
            self._reference_steps,
            fragments=self._fragments,
            previous=self._previous if self._exchanges_s else None,
        )
        return self._previous, reason


def _median(seconds: Sequence[float]) -> float:
    return statistics.median(seconds) if seconds else math.nan


def _is_time(seconds: float) -> bool:
    return math.isfinite(seconds) and seconds > 0


def _words(steps: int) -> str:
    return f"at most {steps} steps during an exchange" if steps else "waiting for each exchange"
