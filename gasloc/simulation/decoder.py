"""The decoder on text as a simulated problem: the trainer's own model, sampler and held-out split."""

import torch
from torch import Tensor, nn
from torch.func import functional_call

from gasloc import sampler
from gasloc.corpus import Corpus
from gasloc.model import Decoder, build
from gasloc.recipe import Recipe
from peers.exchange import PeerId, Tensors

BATCHED_BELOW = 40_000_000
"""Parameters times tokens a step under which several workers' steps run faster stacked.

*Measured* with `benchmarks/simulator.py --crossing` on one CPU thread, 32 workers; time stacked over time in a loop:
1e6: 0.52, 8e6: 0.68, 2.8e7: 0.76, 3.2e7: 0.84; with 8 workers at 6.5e7: 1.3.
"""


class DecoderProblem:
    """Trains the recipe's decoder on a corpus. `dtype` float64 is for tests of equalities.

    Raises `DataError` where the corpus is too short for the context.
    """

    def __init__(self, recipe: Recipe, corpus: Corpus, dtype: torch.dtype = torch.float32) -> None:
        corpus.check(recipe.model.context_length)
        self._recipe = recipe
        self._corpus = corpus
        built = build(recipe.model, recipe.seed).to(dtype)
        self._initial = {name: p.detach().clone() for name, p in built.named_parameters()}
        # its own parameters are never read: those of a worker take their place
        self._model = _LossOf(built.requires_grad_(False))
        self.tokens_per_step = recipe.inner.batch_size * recipe.model.context_length
        size = sum(tensor.numel() for tensor in self._initial.values())
        self.batched = size * self.tokens_per_step < BATCHED_BELOW
        self._held_out = [
            torch.stack(pair)
            for pair in sampler.evaluation_batches(
                corpus.held_out,
                batches=recipe.evaluation.batches,
                batch_size=recipe.inner.batch_size,
                context_length=recipe.model.context_length,
            )
        ]

    def initial(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self._initial.items()}

    def batch(self, peer: PeerId, step: int) -> Tensor:  # -> (2, batch, context): inputs and targets
        pair = sampler.batch(
            self._corpus.train,
            peer_id=peer,
            step=step,
            seed=self._recipe.seed,
            batch_size=self._recipe.inner.batch_size,
            context_length=self._recipe.model.context_length,
        )
        return torch.stack(pair)

    def loss(self, parameters: Tensors, batch: Tensor) -> Tensor:
        loss: Tensor = functional_call(
            self._model, {f"decoder.{name}": tensor for name, tensor in parameters.items()}, (batch,)
        )
        return loss

    @torch.no_grad()
    def validation_loss(self, parameters: Tensors) -> float:
        losses = [float(self.loss(parameters, batch)) for batch in self._held_out]
        return sum(losses) / len(losses)


class _LossOf(nn.Module):
    """`functional_call` calls `forward`; ours is the loss."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, batch: Tensor) -> Tensor:
        return self.decoder.loss(batch[0], batch[1])
