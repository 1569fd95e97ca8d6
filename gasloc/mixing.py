"""Weighted mixing of named tensors, and how far apart replicas are. Inputs are never changed."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gasloc.errors import ModelError

_Tensors = Mapping[str, Tensor]

_SUM_TOLERANCE = 1e-9


def mix(own: _Tensors, received: Mapping[str, _Tensors], weights: Mapping[str, float], me: str) -> dict[str, Tensor]:
    """`sum_j W_ij phi_j` over oneself and the peers that answered: new tensors; the inputs stay as they are.

    `weights` is a row of the mixing matrix (`gasloc.topology.row`), `received` what came whole, by peer. The weight
    of a peer that did not answer goes to oneself; where both ends of a failed edge do so, the matrix of the round
    stays symmetric and doubly stochastic, so the mean of all replicas is kept.

    Sums are taken in float32 (float64 tensors stay float64), on the devices of `own`, and in sorted order of ids,
    so that peers with one set of inputs and equal weights get the same bits. With no answer the result equals
    `own` exactly. Memory: the result, and one tensor beside it.

    Raises `ModelError` that names the first tensor whose name, shape or kind does not fit (integers are never
    averaged), and `ValueError` for a row that is not one (negative, not summing to 1, or without the peer).
    """
    own_weight = _own_weight(received, weights, me)
    for peer, tensors in received.items():
        check_layout(own, tensors, of=f"peer {peer}")
    sources = {**received, me: own}
    shares = [(sources[peer], own_weight if peer == me else weights[peer]) for peer in sorted(sources)]
    return {name: _weighted_sum(name, own[name], shares) for name in own}


def distance(own: _Tensors, other: _Tensors) -> float:
    """`||other - own|| / ||own||` over all tensors, accumulated in float64. 0 for equal, inf if only own is 0.

    Raises `ModelError` where the layouts differ.
    """
    check_layout(own, other, of="the other")
    apart = sum(_square_norm(other[name].to(own[name].device).double() - own[name].double()) for name in own)
    size = sum(_square_norm(own[name].double()) for name in own)
    return _ratio(math.sqrt(apart), math.sqrt(size))


def squared_norm(tensors: _Tensors) -> float:
    """`||tensors||^2` over all of them, accumulated in float64."""
    return sum(_square_norm(tensor.double()) for tensor in tensors.values())


def spread(states: Sequence[_Tensors]) -> float:
    """The replica spread (consensus error): `mean_i ||theta_i - mean|| / ||mean||`, accumulated in float64.

    0, to rounding, for equal replicas. Raises `ModelError` where layouts differ, `ValueError` for no states.
    """
    if not states:
        raise ValueError("spread of no replicas is undefined: give at least one")
    first = states[0]
    for state in states[1:]:
        check_layout(first, state, of="a replica")
    apart = [0.0] * len(states)
    size = 0.0
    for name, tensor in first.items():
        mean = torch.zeros_like(tensor, dtype=torch.float64)
        for state in states:
            mean.add_(state[name].to(mean.device), alpha=1 / len(states))
        size += _square_norm(mean)
        for index, state in enumerate(states):
            apart[index] += _square_norm(state[name].to(mean.device).double() - mean)
    return _ratio(sum(map(math.sqrt, apart)) / len(states), math.sqrt(size))


def check_layout(own: _Tensors, other: _Tensors, *, of: str) -> None:
    """Raises `ModelError` that names the first difference in names or shapes, or the first integer tensor.

    `of` says whose tensors `other` are, for the message.
    """
    for name in sorted(own.keys() | other.keys()):
        if name not in other:
            raise ModelError(f"tensor '{name}' is missing in the state of {of}: is it the same model?")
        if name not in own:
            raise ModelError(f"tensor '{name}' of {of} is not in our own state: is it the same model?")
        ours, theirs = own[name], other[name]
        if ours.shape != theirs.shape:
            raise ModelError(
                f"tensor '{name}' of {of} has shape {tuple(theirs.shape)}, ours {tuple(ours.shape)}: "
                "is it the same model?"
            )
        for tensor in (ours, theirs):
            check_floating(name, tensor)


def check_floating(name: str, tensor: Tensor) -> None:
    """Raises `ModelError` for a tensor of integers, booleans or complex numbers."""
    if not tensor.is_floating_point():
        raise ModelError(f"tensor '{name}' holds {tensor.dtype}, which is never averaged: leave it out")


def _own_weight(received: Mapping[str, _Tensors], weights: Mapping[str, float], me: str) -> float:
    if me not in weights:
        raise ValueError(f"the weights have no entry for the peer itself, '{me}'")
    if me in received:
        raise ValueError(f"a state was received from the peer itself, '{me}'")
    for peer in received:
        if peer not in weights:
            raise ValueError(f"a state was received from '{peer}', which has no weight in this mix")
    for peer, weight in weights.items():
        if not weight >= 0:
            raise ValueError(f"the weight of '{peer}' is {weight}: weights are not negative")
    total = math.fsum(weights.values())
    if not abs(total - 1) <= _SUM_TOLERANCE:
        raise ValueError(f"the weights of '{me}' sum to {total}, not to 1")
    if not received:
        return 1.0
    return weights[me] + math.fsum(weight for peer, weight in weights.items() if peer != me and peer not in received)


def _weighted_sum(name: str, own: Tensor, shares: Sequence[tuple[_Tensors, float]]) -> Tensor:
    check_floating(name, own)
    total: Tensor | None = None
    with torch.no_grad():
        for tensors, weight in shares:
            value = tensors[name].to(device=own.device, dtype=mixing_dtype(own))
            if total is None:
                total = value * weight
            else:
                total.add_(value, alpha=weight)
    assert total is not None, "oneself is always among the shares"
    return total


def mixing_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which a tensor is mixed: float64 for float64, float32 for all others."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _square_norm(tensor: Tensor) -> float:
    flat = tensor.detach().reshape(-1)
    return float(torch.dot(flat, flat))


def _ratio(apart: float, size: float) -> float:
    if apart == 0:
        return 0.0
    return apart / size if size > 0 else math.inf
