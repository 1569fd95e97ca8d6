"""Whether peers stay together: the growth of their disagreement per round under the outer step, without gradients.

Below 1 disagreement dies out; at 1 and above peers drift apart however small the learning rates of the local steps
are. Pure and deterministic: random graphs come of a generator with a fixed seed.
"""

import math
from collections.abc import Callable
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from gasloc.errors import RecipeError

WARN_GROWTH = 0.97
"""A growth above this is warned about; at 1 it is refused."""

_HORIZON = 100
"""Rounds over which growth on random graphs is measured."""
_SEED = 0
_RANDOM = ("1-peer", "2-peer")
_STATIC = ("all-to-all", "ring", "exponential", "none")
_MOMENTUM_GRID = (0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0)

_Array = NDArray[np.float64]
_Round = Callable[[_Array, _Array, Callable[[_Array], _Array]], tuple[_Array, _Array]]
"""(state, memory, mix) -> (state, memory): one round of an outer rule on disagreements, (n, paths) each."""


class Verdict(StrEnum):
    OK = "ok"
    WARN = "warn"
    REFUSE = "refuse"


def stability(name: str, n: int, lr: float, momentum: float, mixes: int = 1, nesterov: bool = True) -> float:
    """Growth per round of the disagreement of n peers under the outer SGD step, `mixes` mixes a round.

        delta = theta - W theta;    buf = momentum * buf + delta;    theta -= lr * (delta + momentum * buf)

    Random graphs (`1-peer`, `2-peer`; a fresh one every mix): the geometric mean over paths of
    `||M_100 ... M_1||_F ** (1/100)`, where M_t carries the disagreement through round t. The Frobenius norm bounds
    the growth from any start within 100 rounds, so the figure errs to the safe side: by n**(1/200) against the
    limit of many rounds, 3 % for 512 peers. Static graphs: exact, by the eigenvalues of W. `none` gives 1, as
    nothing brings peers together, and so does not want to be judged; one peer gives 0.

    Raises `RecipeError` for an unknown topology, `ValueError` for n or mixes below 1.
    """
    _check(n, mixes)
    if name not in _RANDOM + _STATIC:
        raise RecipeError(f"topology '{name}' is unknown: its stability cannot be told")
    if n == 1:
        return 0.0
    if name in _RANDOM:
        return _propagate(name, n, mixes, _outer_round(lr, momentum, nesterov), 0.0)
    return _static_growth(_static_eigenvalues(name, n, mixes), lr, momentum, nesterov)


def published_stability(name: str, n: int, gamma: float, mixes: int = 1) -> float:
    """The same for the rule of `gasloc.published`, `theta' = W z + gamma * (z - previous z)`, random graphs only.

    It does not depend on the learning rate, which acts on gradients alone. Raises `RecipeError` for a topology
    other than `1-peer` and `2-peer`, `ValueError` for n or mixes below 1.
    """
    _check(n, mixes)
    if name not in _RANDOM:
        raise RecipeError(f"topology '{name}' is not a random graph: the published rule is judged on those only")
    if n == 1:
        return 0.0
    return _propagate(name, n, mixes, lambda z, previous, mix: (mix(z) + gamma * (z - previous), z), 1.0)


def safe_momentum(name: str, n: int, lr: float, mixes: int = 1, nesterov: bool = True) -> float | None:
    """The largest momentum of a small grid whose growth is not above 0.97; None where there is none."""
    for momentum in _MOMENTUM_GRID:
        if stability(name, n, lr, momentum, mixes, nesterov) <= WARN_GROWTH:
            return momentum
    return None


def verdict(growth: float, safe: float | None) -> tuple[Verdict, str]:
    """Whether to run with this growth, and why: refused at 1 and above (or not a number), warned above 0.97.

    `safe` is what `safe_momentum` gave, to be proposed; None: none is known.
    """
    advice = f"use outer momentum {safe:g} or less" if safe is not None else "use another topology or a lower rate"
    if not growth < 1:
        return Verdict.REFUSE, f"peers drift apart: disagreement is multiplied by {growth:.3f} a round; {advice}"
    if growth > WARN_GROWTH:
        return Verdict.WARN, f"peers come together slowly: disagreement is multiplied by {growth:.3f} a round; {advice}"
    return Verdict.OK, f"peers come together: disagreement is multiplied by {growth:.3f} a round"


def _check(n: int, mixes: int) -> None:
    if n < 1 or mixes < 1:
        raise ValueError(f"n is {n} and mixes {mixes}: both must be at least 1")


def _outer_round(lr: float, momentum: float, nesterov: bool) -> _Round:
    def one_round(theta: _Array, buf: _Array, mix: Callable[[_Array], _Array]) -> tuple[_Array, _Array]:
        delta = theta - mix(theta)
        buf = momentum * buf + delta
        return theta - lr * (delta + momentum * buf if nesterov else buf), buf

    return one_round


def _propagate(name: str, n: int, mixes: int, one_round: _Round, memory_share: float) -> float:
    """Growth over the horizon from unit disagreement at every peer, each path (column) under graphs of its own.

    `memory_share`: the rule's memory before the first round, as a multiple of the state.
    """
    generator = np.random.default_rng(_SEED)
    paths = max(1, min(64, 8192 // n))
    blend = _blend_pairs if name == "1-peer" or n == 2 else _blend_ring

    def mix(values: _Array) -> _Array:
        for _ in range(mixes):
            order = np.argsort(generator.random(values.shape), axis=0)
            shuffled = blend(np.take_along_axis(values, order, axis=0))
            values = np.empty_like(values)
            np.put_along_axis(values, order, shuffled, axis=0)
        return values

    state = generator.standard_normal((n, paths))
    state -= state.mean(axis=0)
    state /= np.sqrt(np.square(state).mean(axis=0))
    memory = memory_share * state
    log_scale = np.zeros(paths)
    for _ in range(_HORIZON):
        state, memory = one_round(state, memory, mix)
        # The mean is neutral under every rule: left in, its rounding errors would outlive the disagreement.
        state = state - state.mean(axis=0)
        memory = memory - memory.mean(axis=0)
        scale = np.sqrt(np.square(state).sum(axis=0) + np.square(memory).sum(axis=0))
        if not scale.all():
            return 0.0
        state, memory, log_scale = state / scale, memory / scale, log_scale + np.log(scale)
    size = np.sqrt(np.square(state).sum(axis=0))
    return math.exp(float((log_scale + np.log(size)).mean()) / _HORIZON) if size.all() else 0.0


def _blend_pairs(values: _Array) -> _Array:
    """Mixes rows 0 and n//2, 1 and n//2 + 1, ...; the odd last row rests."""
    half = len(values) // 2
    means = (values[:half] + values[half : 2 * half]) / 2
    return np.concatenate([means, means, values[2 * half :]])


def _blend_ring(values: _Array) -> _Array:
    """Mixes each row with the one before and the one after it."""
    mixed: _Array = (values + np.roll(values, 1, axis=0) + np.roll(values, -1, axis=0)) / 3
    return mixed


def _static_eigenvalues(name: str, n: int, mixes: int) -> _Array:
    """Eigenvalues of W over the modes of disagreement, (rounds of one period, modes).

    The graphs of one topology share their eigenvectors (Fourier modes, or the characters of a hypercube), so a
    mode stays one through all rounds.
    """
    frequency = np.arange(1, n)
    if name == "all-to-all":
        return np.zeros((1, 1))
    if name == "none":
        return np.ones((1, 1))
    if name == "ring":
        return _circulant(n, frequency, 1)[None] ** mixes
    levels = n.bit_length() - 1
    if n == 1 << levels:
        turns = np.stack([(frequency >> level & 1 == 0).astype(np.float64) for level in range(levels)])
    else:
        turns = np.stack([_circulant(n, frequency, 1 << level) for level in range(levels)])
    first = np.arange(levels)
    return np.asarray(np.prod([turns[(first + mix) % levels] for mix in range(mixes)], axis=0))


def _circulant(n: int, frequency: NDArray[np.int64], distance: int) -> _Array:
    """Eigenvalues of the mix of p, p + distance and p - distance modulo n; of two peers, their mean."""
    if n == 2:
        return np.zeros(1)
    return np.asarray((1 + 2 * np.cos(2 * np.pi * frequency * distance / n)) / 3)


def _static_growth(eigenvalues: _Array, lr: float, momentum: float, nesterov: bool) -> float:
    """The largest spectral radius, per round, of the outer step on (theta, buf) over one period, mode by mode."""
    total = np.eye(2)[None]
    for gain in 1 - eigenvalues:
        step = np.empty((len(gain), 2, 2))
        step[:, 0, 0] = 1 - lr * gain * (1 + momentum if nesterov else 1)
        step[:, 0, 1] = -lr * momentum * (momentum if nesterov else 1)
        step[:, 1, 0] = gain
        step[:, 1, 1] = momentum
        total = step @ total
    radius = float(np.abs(np.linalg.eigvals(total)).max())
    return math.pow(radius, 1 / len(eigenvalues))
