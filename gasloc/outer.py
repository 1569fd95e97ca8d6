"""The outer step: any `torch.optim.Optimizer`, fed `theta - mix` as its gradient.

The momentum thus acts on mixed states, and it accelerates consensus as well as descent. With SGD and Nesterov:

    delta = theta - mix;    buf = momentum * buf + delta;    theta -= lr * (delta + momentum * buf)
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from gasloc import named_state
from gasloc.errors import ModelError
from gasloc.mixing import check_layout
from gasloc.recipe import OuterConfig

MakeOptimizer = Callable[[list[Tensor]], Optimizer]

_Tensors = Mapping[str, Tensor]

_GROUP_ELEMENTS = 1 << 20
"""Anchor tensors are stepped together up to so many elements: 4 MiB of gradient at a time, or one tensor's."""
_PARAMETER_BY_PARAMETER: tuple[type[Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
)
"""Optimizers that treat each parameter alone, so that some may be stepped before others. Not their subclasses."""
_FEDADAM_BETA2 = 0.99
_FEDADAM_EPSILON = 1e-3


def make_outer(config: OuterConfig) -> MakeOptimizer:
    """The recipe's outer optimizer, as a function of the anchor tensors.

    `sgd`: with Nesterov momentum unless the recipe says no; plain where momentum is 0. `adam`: beta1 is the
    recipe's momentum; beta2 0.99 and epsilon 1e-3 are those of FedAdam (Reddi et al., 2021), since outer
    gradients are small and few.
    """
    if config.optimizer == "adam":
        return lambda anchor: torch.optim.Adam(
            anchor,
            lr=config.learning_rate,
            betas=(config.momentum, _FEDADAM_BETA2),
            eps=_FEDADAM_EPSILON,
        )
    return lambda anchor: torch.optim.SGD(
        anchor,
        lr=config.learning_rate,
        momentum=config.momentum,
        nesterov=config.nesterov and config.momentum > 0,
        # one pass over memory instead of three; it takes tensors as rows of memory, whatever their strides
        fused=all(tensor.is_contiguous() for tensor in anchor),
    )


class OuterStep:
    """Takes outer steps on the anchor `theta`, the parameters at the start of a round. Changed in place.

    The anchor is the caller's: float32 or float64 tensors by name, whatever the model's own dtype, since a bf16
    tensor swallows small outer updates. `make` builds `optimizer` over them, in sorted order of names; it is
    called again, on a copy, where a loaded state is checked.

    Raises `ModelError` for an anchor tensor of any other dtype.
    """

    def __init__(self, anchor: dict[str, Tensor], make: MakeOptimizer) -> None:
        for name, tensor in anchor.items():
            if tensor.dtype not in (torch.float32, torch.float64):
                raise ModelError(f"anchor '{name}' is {tensor.dtype}: the outer state is float32 or float64")
        self._anchor = {name: anchor[name] for name in sorted(anchor)}
        self._make = make
        self.optimizer = make(list(self._anchor.values()))
        alone = type(self.optimizer) in _PARAMETER_BY_PARAMETER
        self._groups = _grouped(self._anchor, _GROUP_ELEMENTS) if alone else [list(self._anchor)]

    def step(self, mix: _Tensors) -> None:
        """One outer step with `theta - mix` as the gradient. Changes the anchor and the momentum, never `mix`.

        `mix` equal to the local result alone is the step of a peer without partners. Memory: gradients of a few MiB,
        or of the largest tensor; of the whole anchor for an optimizer that may look at all of them at once, which is
        any but torch's SGD, Adam, AdamW, Adagrad and RMSprop. Raises `ModelError` where `mix` does not fit; then
        nothing changed.
        """
        check_layout(self._anchor, mix, of="the mix")
        for names in self._groups:
            self._step(names, mix)

    @torch.no_grad()
    def _step(self, names: Sequence[str], mix: _Tensors) -> None:
        """A step of these tensors: optimizers pass over those without a gradient."""
        for name in names:
            theta = self._anchor[name]
            theta.grad = theta - mix[name].to(theta)
        try:
            self.optimizer.step()
        finally:
            for name in names:
                self._anchor[name].grad = None

    def momentum_tensors(self) -> dict[str, Tensor]:
        """The outer state by name: "momentum_buffer/w", or "exp_avg/w", "exp_avg_sq/w" and "step/w" for Adam.

        Shares memory with the optimizer: copy what must outlive the next step. Empty before the first step, and
        always for SGD without momentum. Hyper-parameters are not in it: they are the recipe's.
        """
        return named_state.state_tensors(self.optimizer, self._anchor)

    def load_momentum(self, tensors: _Tensors) -> None:
        """Replaces the whole outer state by copies of what `momentum_tensors` gave. Empty: as before any step.

        Raises `ModelError` that names the first tensor which is missing, unknown or of a wrong shape; then
        nothing was changed.
        """
        if tensors:
            self._check_complete(tensors)
        named_state.load_state_tensors(self.optimizer, self._anchor, tensors)

    def _check_complete(self, tensors: _Tensors) -> None:
        """An optimizer trusts its own state: half of Adam's would only fail at the next step, or go unused."""
        shapes = self._expected_shapes()
        for label in sorted(shapes.keys() ^ tensors.keys()):
            problem = "missing from" if label in shapes else "unknown in"
            raise ModelError(f"outer state: '{label}' is {problem} what was given: is it the same recipe?")
        for label, shape in shapes.items():
            if tensors[label].shape != shape:
                raise ModelError(
                    f"outer state: '{label}' has shape {tuple(tensors[label].shape)}, expected {tuple(shape)}"
                )

    def _expected_shapes(self) -> dict[str, torch.Size]:
        """What this optimizer keeps for the anchor, by name: entries of a tensor's own shape, and scalars.

        Found by a step on zeros like the smallest tensor; not like a scalar where there is a choice, since that
        would not tell a counter from a buffer.
        """
        tensors = self._anchor.values()
        smallest = min([tensor for tensor in tensors if tensor.ndim] or tensors, key=Tensor.numel)
        probe = torch.zeros_like(smallest)
        probe.grad = torch.zeros_like(smallest)
        optimizer = self._make([probe])
        optimizer.step()
        return {
            label: theta.shape if entry.ndim else torch.Size()
            for name, theta in self._anchor.items()
            for label, entry in named_state.state_tensors(optimizer, {name: probe}).items()
        }


def _grouped(anchor: Mapping[str, Tensor], most_elements: int) -> list[list[str]]:
    """The names in order, in groups of at most so many elements, or of one tensor."""
    groups: list[list[str]] = []
    left = 0
    for name, tensor in anchor.items():
        if not groups or tensor.numel() > left:
            groups.append([])
            left = most_elements
        groups[-1].append(name)
        left -= tensor.numel()
    return groups
