"""Ways to average differences of parameters: plain weighted mean, and radial-directional averaging.

A difference is an outer gradient `d_m = Theta - phi_m` of learner m, or `phi_j - theta_i` of a neighbour, as named
tensors. Inputs are never changed.
"""

import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from gasloc.mixing import check_floating, check_layout, mixing_dtype

_Tensors = Mapping[str, Tensor]


def weighted_mean(differences: Sequence[_Tensors], weights: Sequence[float]) -> dict[str, Tensor]:
    """`sum_m w_m d_m / sum_m w_m` for each tensor, in float32 (float64 stays float64): new tensors.

    Raises `ValueError` for no differences or a weight that is not above 0, `ModelError` where layouts differ.
    """
    shares = _shares(differences, weights)
    return {name: _mean([tensors[name] for tensors in differences], shares) for name in differences[0]}


def rda(differences: Sequence[_Tensors], weights: Sequence[float], plain: Collection[str] = ()) -> dict[str, Tensor]:
    """Radial-Directional Averaging of Decoupled DiLoCo: length and direction apart, for each tensor.

        r = sum_m w_m ||d_m|| / sum_m w_m        u = sum_m w_m d_m/||d_m||        Delta = r * u/||u||

    The mean of M nearly orthogonal gradients is shorter than any by about 1/sqrt(M); this one is not, so a good
    outer learning rate does not depend on M. Tensors named in `plain` (embeddings) get the plain weighted mean. A
    difference of 0 has no direction and only shortens r; where directions cancel, Delta is 0. Norms accumulate in
    float64; results are float32 (float64 stays float64). Raises as `weighted_mean` does.
    """
    shares = _shares(differences, weights)
    result = {}
    for name in differences[0]:
        tensors = [each[name] for each in differences]
        result[name] = _mean(tensors, shares) if name in plain else _radial_directional(tensors, shares)
    return result


def token_weights(tokens: Sequence[float], steps: Sequence[float]) -> list[float]:
    """Decoupled DiLoCo's weights `w_m = tokens_m * (tokens_m / steps_m)`: quantity times tokens a step.

    Not normalised. Raises `ValueError` where the lengths differ or a value is not a finite number above 0.
    """
    if len(tokens) != len(steps):
        raise ValueError(f"{len(tokens)} token counts for {len(steps)} step counts: give one of each a learner")
    for what, values in (("tokens", tokens), ("steps", steps)):
        for index, value in enumerate(values):
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{what} of learner {index} are {value}: leave out a learner that did nothing")
    return [count * (count / step) for count, step in zip(tokens, steps, strict=True)]


def _shares(differences: Sequence[_Tensors], weights: Sequence[float]) -> list[float]:
    if not differences:
        raise ValueError("there are no differences to average: give at least one")
    if len(differences) != len(weights):
        raise ValueError(f"{len(differences)} differences for {len(weights)} weights: give one weight each")
    for index, weight in enumerate(weights):
        if not (weight > 0 and math.isfinite(weight)):
            raise ValueError(f"weight {index} is {weight}: a weight is a finite number above 0")
    for name, tensor in differences[0].items():
        check_floating(name, tensor)
    for index, other in enumerate(differences[1:], start=1):
        check_layout(differences[0], other, of=f"difference {index}")
    total = math.fsum(weights)
    return [weight / total for weight in weights]


@torch.no_grad()
def _mean(tensors: Sequence[Tensor], factors: Sequence[float]) -> Tensor:
    """`sum_m factor_m * tensor_m`, on the device of the first."""
    first = tensors[0]
    total = torch.zeros_like(first, dtype=mixing_dtype(first))
    for tensor, factor in zip(tensors, factors, strict=True):
        total.add_(tensor.to(device=total.device, dtype=total.dtype), alpha=factor)
    return total


@torch.no_grad()
def _radial_directional(tensors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    norms = [float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) for tensor in tensors]
    radius = math.fsum(share * norm for share, norm in zip(shares, norms, strict=True))
    factors = [share / norm if norm > 0 else 0.0 for share, norm in zip(shares, norms, strict=True)]
    direction = _mean(tensors, factors)
    length = float(torch.linalg.vector_norm(direction, dtype=torch.float64))
    # Opposite directions cancel to rounding noise, which must not be blown up to the full radius.
    if length <= 8 * torch.finfo(direction.dtype).eps:
        return direction.zero_()
    return direction.mul_(radius / length)
