"""What a simulated worker sends at the end of its local steps, and what it makes of the mix: the outer rules.

Each holds a worker's outer state and writes the new parameters into the worker's own tensors. `names` are those of
the fragment at hand; a rule keeps apart state for each fragment.
"""

from collections.abc import Collection, Sequence
from typing import Protocol

import torch
from torch import Tensor

from gasloc import baselines, overlap, published
from gasloc.outer import MakeOptimizer, OuterStep
from peers.exchange import Tensors

Parts = Sequence[Collection[str]]
"""The fragments, as names of tensors."""


class Rule(Protocol):
    """One worker's outer state."""

    def sent(self, part: int) -> dict[str, Tensor]:
        """What travels of fragment `part` now. Not changed until `take`."""
        ...

    def take(self, part: int, mix: Tensors) -> None:
        """Ends the fragment's round with the mix of everyone's `sent`; sets the worker's parameters."""
        ...

    def state(self) -> dict[str, Tensor]:
        """All of it as copies, for a worker that starts anew."""
        ...

    def load(self, state: Tensors) -> None:
        """Takes over what another worker's `state` gave; sets the worker's parameters."""
        ...


class Gasloc:
    """The outer optimizer on `theta - mix`; see `gasloc.outer`."""

    def __init__(self, parameters: dict[str, Tensor], parts: Parts, make: MakeOptimizer) -> None:
        self._parameters = parameters
        self._anchors = [{name: parameters[name].clone() for name in part} for part in parts]
        self._steps = [OuterStep(anchor, make) for anchor in self._anchors]

    def sent(self, part: int) -> dict[str, Tensor]:
        return {name: self._parameters[name] for name in self._anchors[part]}

    def start(self, part: int) -> Tensors:
        """What `sent` was at the round's start. To be read only."""
        return self._anchors[part]

    def take(self, part: int, mix: Tensors) -> None:
        self._steps[part].step(mix)
        assign(self._parameters, self._anchors[part])

    def take_late(self, part: int, mix: Tensors, sent: dict[str, Tensor]) -> None:
        """As `take`, but keeps the progress since `sent`, a copy, was made; its memory is used up."""
        self._steps[part].step(mix)
        overlap.keep_progress(self._anchors[part], self._parameters, sent)
        assign(self._parameters, sent)

    def state(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = {}
        for anchor, step in zip(self._anchors, self._steps, strict=True):
            state |= {f"anchor/{name}": tensor.clone() for name, tensor in anchor.items()}
            state |= {f"outer/{name}": tensor.clone() for name, tensor in step.momentum_tensors().items()}
        return state

    def load(self, state: Tensors) -> None:
        outer = {name.removeprefix("outer/"): t for name, t in state.items() if name.startswith("outer/")}
        for anchor, step in zip(self._anchors, self._steps, strict=True):
            assign(anchor, {name: state[f"anchor/{name}"] for name in anchor})
            step.load_momentum({name: t for name, t in outer.items() if name.rpartition("/")[0] in anchor})
            assign(self._parameters, anchor)


class Published:
    """GASLoC's rule as published, in its Laplacian form; see `gasloc.published`."""

    def __init__(self, parameters: dict[str, Tensor], parts: Parts, lr: float, gamma: float) -> None:
        self._parameters = parameters
        self._parts = [list(part) for part in parts]
        self._lr = lr
        self._gamma = gamma
        self._theta = {name: tensor.clone() for name, tensor in parameters.items()}
        self._previous = {name: tensor.clone() for name, tensor in parameters.items()}

    def sent(self, part: int) -> dict[str, Tensor]:
        names = self._parts[part]
        theta = {name: self._theta[name] for name in names}
        return published.travelling(theta, {name: self._parameters[name] for name in names}, self._lr)

    def take(self, part: int, mix: Tensors) -> None:
        z = self.sent(part)
        previous = {name: self._previous[name] for name in z}
        assign(self._theta, published.step(mix, z, previous, self._gamma))
        assign(self._previous, z)
        assign(self._parameters, {name: self._theta[name] for name in z})

    def state(self) -> dict[str, Tensor]:
        return {f"anchor/{name}": tensor.clone() for name, tensor in self._theta.items()} | {
            f"previous/{name}": tensor.clone() for name, tensor in self._previous.items()
        }

    def load(self, state: Tensors) -> None:
        assign(self._theta, {name: state[f"anchor/{name}"] for name in self._theta})
        assign(self._previous, {name: state[f"previous/{name}"] for name in self._previous})
        assign(self._parameters, self._theta)


class Noloco:
    """NoLoCo's slow weights and momentum; see `gasloc.baselines`."""

    def __init__(self, parameters: dict[str, Tensor], parts: Parts, lr: float, momentum: float) -> None:
        self._parameters = parameters
        self._lr = lr
        self._momentum = momentum
        self._states = [baselines.noloco_start({name: parameters[name] for name in part}) for part in parts]

    def sent(self, part: int) -> dict[str, Tensor]:
        state = self._states[part]
        return baselines.noloco_travelling(state, {name: self._parameters[name] for name in state.slow})

    def take(self, part: int, mix: Tensors) -> None:
        state = baselines.noloco(self._states[part], mix, learning_rate=self._lr, momentum=self._momentum)
        self._states[part] = state
        assign(self._parameters, state.slow)

    def state(self) -> dict[str, Tensor]:
        result: dict[str, Tensor] = {}
        for state in self._states:
            result |= {f"anchor/{name}": tensor.clone() for name, tensor in state.slow.items()}
            result |= {f"momentum/{name}": tensor.clone() for name, tensor in state.momentum.items()}
        return result

    def load(self, state: Tensors) -> None:
        for held in self._states:
            assign(held.slow, {name: state[f"anchor/{name}"] for name in held.slow})
            assign(held.momentum, {name: state[f"momentum/{name}"] for name in held.momentum})
            assign(self._parameters, held.slow)


class Average:
    """The mix itself is the new state: plain gossip averaging, without an outer optimizer."""

    def __init__(self, parameters: dict[str, Tensor], parts: Parts) -> None:
        self._parameters = parameters
        self._parts = [list(part) for part in parts]

    def sent(self, part: int) -> dict[str, Tensor]:
        return {name: self._parameters[name] for name in self._parts[part]}

    def take(self, part: int, mix: Tensors) -> None:
        assign(self._parameters, mix)

    def state(self) -> dict[str, Tensor]:
        return {f"anchor/{name}": tensor.clone() for name, tensor in self._parameters.items()}

    def load(self, state: Tensors) -> None:
        assign(self._parameters, {name: state[f"anchor/{name}"] for name in self._parameters})


@torch.no_grad()
def assign(target: dict[str, Tensor], source: Tensors) -> None:
    """Copies values into tensors of the same names."""
    for name, tensor in source.items():
        target[name].copy_(tensor)
