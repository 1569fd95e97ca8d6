"""What simulated workers train: initial parameters, a loss, batches, and a measure of how good a model is."""

from typing import Protocol

from torch import Tensor

from peers.exchange import PeerId, Tensors


class Problem(Protocol):
    """One optimisation problem, shared by all workers. Pure: the same arguments give the same answer."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens in one batch."""
        ...

    @property
    def batched(self) -> bool:
        """Whether the steps of several workers run faster stacked than one after another.

        Decided by the problem's size alone and never by a measurement, so that a run repeats bit for bit.
        """
        ...

    def initial(self) -> dict[str, Tensor]:
        """The parameters that every worker starts from; new tensors."""
        ...

    def batch(self, peer: PeerId, step: int) -> Tensor:
        """The batch of a worker's local step `step`, from 0 over the whole run; the same shape each time."""
        ...

    def loss(self, parameters: Tensors, batch: Tensor) -> Tensor:
        """Mean training loss of one batch, a scalar; differentiable, and fit for `torch.func.vmap`."""
        ...

    def validation_loss(self, parameters: Tensors) -> float:
        """Loss on the held-out data, without gradients."""
        ...
