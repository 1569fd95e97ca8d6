"""Weighted mixing of named tensors, and how far apart replicas are.

Everything goes by chunks that stay in a core's cache, so nothing the size of a model is made beside a result.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gasloc.errors import ModelError

_Tensors = Mapping[str, Tensor]

CHUNK = 1 << 18
"""Elements worked on at a time: 1 MiB of float32. *Measured* with 134M parameters: smaller is slower."""

_SUM_TOLERANCE = 1e-9
_SQUARES = (1e-30, 1e37)
"""Sums of squares that float32 holds without loss: beyond, single squares overflow or vanish."""


def mix(own: _Tensors, received: Mapping[str, _Tensors], weights: Mapping[str, float], me: str) -> dict[str, Tensor]:
    """`sum_j W_ij phi_j` over oneself and the peers that answered: new tensors; the inputs stay as they are.

    `weights` is a row of the mixing matrix (`gasloc.topology.row`), `received` what came whole, by peer. The weight
    of a peer that did not answer goes to oneself; where both ends of a failed edge do so, the matrix of the round
    stays symmetric and doubly stochastic, so the mean of all replicas is kept.

    Sums are taken in float32 (float64 tensors stay float64), on the devices of `own`, and in sorted order of ids,
    so that peers with one set of inputs and equal weights get the same bits. With no answer the result equals
    `own` exactly. Memory: the result, and a chunk beside it.

    Raises `ModelError` that names the first tensor whose name, shape or kind does not fit (integers are never
    averaged), and `ValueError` for a row that is not one (negative, not summing to 1, or without the peer).
    """
    sources, shares = _shares(own, received, weights, me)
    return {name: _weighted_sum(_empty(own[name]), name, sources, shares) for name in own}


def mix_received(
    own: _Tensors, received: Mapping[str, _Tensors], weights: Mapping[str, float], me: str
) -> dict[str, Tensor]:
    """As `mix`, to the bit, in the memory of what was received: `received` holds nothing of use afterwards.

    `own` stays as it is, and must share no memory with what was received. Memory: a chunk; new tensors only where
    no received one has the device, the dtype and the order in memory of the result.
    """
    sources, shares = _shares(own, received, weights, me)
    others = [received[peer] for peer in sorted(received)]
    return {
        name: _weighted_sum(_reusable(own[name], [each[name] for each in others]), name, sources, shares)
        for name in own
    }


def distance(own: _Tensors, other: _Tensors) -> float:
    """`||other - own|| / ||own||` over all tensors. 0 for equal, inf if only own is 0. Memory: a chunk.

    Raises `ModelError` where the layouts differ.
    """
    check_layout(own, other, of="the other")
    return _ratio(math.sqrt(squared_distance(own, other)), math.sqrt(squared_norm(own)))


@torch.no_grad()
def squared_distance(left: _Tensors, right: _Tensors) -> float:
    """`||right - left||^2` over the tensors of `left`; accumulated as `squared_norm` does. Memory: a chunk."""
    total = 0.0
    for name, tensor in left.items():
        # a buffer of our own: whether one is taken from the heap or from the system each time makes half the time
        scratch = torch.empty(min(CHUNK, tensor.numel()), dtype=tensor.dtype, device=tensor.device)
        for mine, theirs in zip(_chunks(tensor), _chunks(right[name]), strict=True):
            total += _square(torch.sub(theirs.to(mine), mine, out=scratch[: mine.numel()]))
    return total


@torch.no_grad()
def squared_norm(tensors: _Tensors) -> float:
    """`||tensors||^2` over all of them: within a chunk in the tensors' own precision, across chunks in float64.

    The relative error stays below 1e-5 for float32. A chunk whose squares float32 could not hold is summed in float64.
    """
    return sum(_square(chunk) for tensor in tensors.values() for chunk in _chunks(tensor))


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
        size += squared_norm({name: mean})
        for index, state in enumerate(states):
            apart[index] += squared_norm({name: state[name].to(mean.device).double() - mean})
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


def _shares(
    own: _Tensors, received: Mapping[str, _Tensors], weights: Mapping[str, float], me: str
) -> tuple[list[_Tensors], list[float]]:
    """States and their weights, in sorted order of ids; all checked."""
    own_weight = _own_weight(received, weights, me)
    for name, tensor in own.items():
        check_floating(name, tensor)
    for peer, tensors in received.items():
        check_layout(own, tensors, of=f"peer {peer}")
    sources = {**received, me: own}
    order = sorted(sources)
    return [sources[peer] for peer in order], [own_weight if peer == me else weights[peer] for peer in order]


@torch.no_grad()
def _weighted_sum(result: Tensor, name: str, sources: Sequence[_Tensors], shares: Sequence[float]) -> Tensor:
    """`sum_k shares[k] * sources[k][name]`, written to `result`, which may be one of the sources."""
    flat = [_chunks(tensors[name]) for tensors in sources]
    # a source that comes later in the sum must be whole until its turn
    beside = any(tensors[name].data_ptr() == result.data_ptr() for tensors in sources[1:])
    scratch = torch.empty(min(CHUNK, result.numel()) if beside else 0, dtype=result.dtype, device=result.device)
    for target, *values in zip(_chunks(result), *flat, strict=True):
        total = scratch[: target.numel()] if beside else target
        torch.mul(values[0].to(total), shares[0], out=total)
        for value, share in zip(values[1:], shares[1:], strict=True):
            total.add_(value.to(total), alpha=share)
        if beside:
            target.copy_(total)
    return result


def _empty(own: Tensor) -> Tensor:
    return torch.empty(own.shape, dtype=mixing_dtype(own), device=own.device)


def _reusable(own: Tensor, candidates: Sequence[Tensor]) -> Tensor:
    """The first of the candidates that can hold the mix, or a new tensor."""
    for tensor in candidates:
        if tensor.dtype == mixing_dtype(own) and tensor.device == own.device and tensor.is_contiguous():
            return tensor.detach()
    return _empty(own)


def _chunks(tensor: Tensor) -> Sequence[Tensor]:
    """Flat pieces of at most `CHUNK` elements; views, where the tensor is contiguous."""
    return torch.split(tensor.detach().reshape(-1), CHUNK)


def mixing_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which a tensor is mixed: float64 for float64, float32 for all others."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _square(chunk: Tensor) -> float:
    """`||chunk||^2` of a flat tensor."""
    if chunk.dtype in (torch.float32, torch.float64):
        square = float(torch.dot(chunk, chunk))
        if _SQUARES[0] <= square <= _SQUARES[1]:
            return square
    length = float(torch.linalg.vector_norm(chunk, dtype=torch.float64))
    return length * length


def _ratio(apart: float, size: float) -> float:
    if apart == 0:
        return 0.0
    return apart / size if size > 0 else math.inf
