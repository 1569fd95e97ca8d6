"""Self-centred clipping: how far one partner may pull this peer in one mix.

ClippedGossip (He, Karimireddy and Jaggi, 2022, arXiv 2202.01545): the mix is taken of differences to oneself, each
shortened to at most a radius tau_i before it is weighted,

    mix_i = phi_i + sum_j W_ij clip(phi_j - phi_i, tau_i),      clip(d, tau) = d * min(1, tau / ||d||)

so one partner moves a peer by at most `W_ij tau_i` whatever it sends. Past `FAR` radii the pull falls again, as the
inverse of the distance (a redescending influence, as in robust statistics): clipping alone lets a partner that sends
its state times 100 pull with all of the radius each round, which *measured* costs most of what was learned. Nothing
is cut off, so two halves of a swarm that grew far apart still draw together. Lengths are over the whole state that
travels, in the parameters' own unit.

The radius is `FACTOR` times the longer of two lengths: this peer's own movement in the round, `||phi_i - theta_i||`,
and the median of the last `HISTORY` differences, each at most the radius of its time. In a healthy swarm partners lie
within about one own movement of each other, and nothing is clipped: *measured* with 8 workers of a byte model, 2-peer,
momentum 0.5, the median distance was 0.6 and the longest 1.4 own movements. The movement, scaled to the reference
number of local steps, gives a radius from the first round on. The median gives room to honest differences that one's
own movement does not show, such as partners with other data: where those exceed the first radius they are shortened at
first, and each widens the next radius, so within a few rounds they pass whole. Liars widen it too once they are half
of the trades in the history; that many are not defended against.

What it does not do: a liar inside the radius still pulls, by `W_ij tau_i` a round. And clipping is one-sided, so in a
round in which it acts the mean of all replicas is not kept.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gasloc.mixing import check_layout, squared_distance

_Tensors = Mapping[str, Tensor]

FACTOR = 2.0
"""The radius in units of the longer of own movement and median distance."""
HISTORY = 16
"""Accepted distances that the median is taken of, the latest."""

FAR = 10.0
"""Radii beyond which no honest partner is expected, and the pull falls with the distance."""

_TINY = 1e-30
"""Below this a factor is applied in two halves, since float32 ends at 1e-38."""


@dataclass(frozen=True, slots=True)
class Clipped:
    """What came of one partner's difference."""

    distance: float
    """||theirs - own|| as it came; not finite where theirs was not, or out of all bounds."""
    radius: float

    @property
    def shortened(self) -> bool:
        """Whether anything was changed."""
        return not self.distance <= self.radius

    @property
    def excess(self) -> float:
        """The distance in units of the radius; above 1 where it was shortened."""
        if not self.shortened:
            return self.distance / self.radius if self.radius > 0 else 0.0
        return self.distance / self.radius if self.radius > 0 and math.isfinite(self.distance) else math.inf

    @property
    def accepted(self) -> float:
        """The length that was mixed in."""
        if not self.shortened:
            return self.distance
        return self.radius * min(1.0, FAR / self.excess)


def radius(history: Sequence[float], own_movement: float) -> tuple[float, str]:
    """The radius for one exchange, and why, in words.

    `history`: what `remembered` keeps, oldest first, of which the last `HISTORY` count; `own_movement`:
    `||phi - theta||` of this round, times the `pace_allowance`. Both over the same tensors. Without any movement or
    history there is nothing to measure by, and the radius is 0: only equals are mixed in. Raises `ValueError` for a
    length that is negative or not finite.
    """
    recent = history[-HISTORY:]
    for length in (*recent, own_movement):
        if not (math.isfinite(length) and length >= 0):
            raise ValueError(f"a length of {length}: lengths are finite and not negative")
    median = statistics.median(recent) if recent else 0.0
    if own_movement == median == 0:
        return 0.0, "this peer did not move and has no history, so there is nothing to measure by"
    if own_movement >= median:
        return FACTOR * own_movement, f"{FACTOR:g} times our own movement of {own_movement:.3g}"
    return FACTOR * median, f"{FACTOR:g} times {median:.3g}, the median of the last {len(recent)} distances"


def pace_allowance(local_steps: int, reference_steps: int) -> float:
    """What to multiply a peer's own movement by before it is a measure for others: `max(1, reference / own)` steps.

    A peer that takes few steps moves little; with the others' steps it would have moved at most so many times as far.
    """
    return max(1.0, reference_steps / local_steps)


def remembered(history: Sequence[float], clips: Sequence[Clipped]) -> tuple[float, ...]:
    """The history with these trades' distances, each at most the radius of its time, cut to the last `HISTORY`.

    A radius of 0 stood for ignorance, and a distance that is not finite for garbage: neither is a measurement.
    """
    accepted = [min(each.distance, each.radius) for each in clips if each.radius > 0 and math.isfinite(each.distance)]
    return (*history, *accepted)[-HISTORY:]


@torch.no_grad()
def clip(own: _Tensors, theirs: _Tensors, radius: float) -> Clipped:
    """Moves `theirs`, in place, to at most `radius` from `own`; not a bit of it changes where it is as near already.

    Past `FAR` radii it is moved nearer still, to `radius * FAR / excess`.

    For float32 and float64; `own` is only read. Up to rounding the direction is kept. What is not finite, or so far
    that its distance is not, is replaced by `own`. Memory: a few MiB. Raises `ModelError` where layouts differ, and
    `ValueError` for a radius that is negative or not a number.
    """
    if not radius >= 0:
        raise ValueError(f"a radius of {radius}: a radius is not negative")
    check_layout(own, theirs, of="a partner")
    result = Clipped(apart(own, theirs), radius)
    if result.shortened:
        factor = result.accepted / result.distance if math.isfinite(result.distance) else 0.0
        for name, tensor in theirs.items():
            _shorten(tensor, own[name].to(tensor), factor)
    return result


def apart(left: _Tensors, right: _Tensors) -> float:
    """`||right - left||` over the tensors of `left`; see `gasloc.mixing.squared_norm`. Memory: a MiB."""
    return math.sqrt(squared_distance(left, right))


def _shorten(theirs: Tensor, own: Tensor, factor: float) -> None:
    """theirs = own + factor * (theirs - own), without a difference that could overflow."""
    if factor == 0:
        theirs.copy_(own)
    elif factor < _TINY:
        theirs.mul_(math.sqrt(factor)).mul_(math.sqrt(factor)).add_(own)
    else:
        theirs.mul_(factor).add_(own, alpha=1 - factor)
