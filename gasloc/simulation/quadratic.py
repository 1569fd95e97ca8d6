"""Noisy quadratics, one optimum a worker: a problem small enough for a thousand workers, for studies of consensus.

Worker i draws `target_i + noise` as its batch and loses `1/2 sum_k h_k (x_k - batch_k)^2` on it, so the minimum of
the mean loss is the mean target. Curvatures h go from 1 down to 1 over the condition number, evenly on a log scale.
"""

import hashlib

import numpy as np
import torch
from torch import Tensor

from peers.exchange import PeerId, Tensors


class QuadraticProblem:
    """`tensors` named vectors of `dim` numbers each, all starting at 1.

    `diversity`: standard deviation of the workers' targets. `noise`: that of a batch around its target. Raises
    `ValueError` for counts below 1.
    """

    batched = True
    tokens_per_step = 1

    def __init__(
        self,
        dim: int = 16,
        *,
        tensors: int = 1,
        diversity: float = 0.1,
        noise: float = 0.1,
        condition: float = 10.0,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if dim < 1 or tensors < 1:
            raise ValueError(f"dim {dim} and tensors {tensors} must be at least 1")
        self._names = [f"x{index}" for index in range(tensors)]
        self._dim = dim
        self._diversity = diversity
        self._noise = noise
        self._seed = seed
        self._curvature = torch.logspace(0, -float(np.log10(condition)), dim, dtype=dtype)  # (dim,)
        self._targets: dict[PeerId, Tensor] = {}

    def initial(self) -> dict[str, Tensor]:
        return {name: torch.ones(self._dim, dtype=self._curvature.dtype) for name in self._names}

    def target(self, peer: PeerId) -> Tensor:  # -> (tensors, dim)
        """The worker's own optimum."""
        if peer not in self._targets:
            self._targets[peer] = self._diversity * self._normal(peer, 0)
        return self._targets[peer]

    def batch(self, peer: PeerId, step: int) -> Tensor:  # -> (tensors, dim)
        return self.target(peer) + self._noise * self._normal(peer, step + 1)

    def loss(self, parameters: Tensors, batch: Tensor) -> Tensor:
        terms = [self._curvature * (parameters[name] - batch[index]).square() for index, name in enumerate(self._names)]
        return 0.5 * torch.stack(terms).sum()

    def validation_loss(self, parameters: Tensors) -> float:
        """The loss against a target of 0, which the mean of many workers' targets is near."""
        return float(self.loss(parameters, torch.zeros(len(self._names), self._dim, dtype=self._curvature.dtype)))

    def _normal(self, peer: PeerId, step: int) -> Tensor:
        key = np.frombuffer(hashlib.sha256(f"{self._seed}:{peer}".encode()).digest()[:16], dtype="<u8")
        counter = np.array([0, 0, step, 0], dtype=np.uint64)
        generator = np.random.Generator(np.random.Philox(key=key.astype(np.uint64), counter=counter))
        drawn = generator.standard_normal((len(self._names), self._dim))
        return torch.from_numpy(drawn).to(self._curvature.dtype)
