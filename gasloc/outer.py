"""The outer step: any `torch.optim.Optimizer`, fed `theta - mix` as its gradient.

The momentum thus acts on mixed states, and it accelerates consensus as well as descent. With SGD and Nesterov:

    delta = theta - mix;    buf = momentum * buf + delta;    theta -= lr * (delta + momentum * buf)
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gasloc.errors import ModelError
from gasloc.mixing import check_layout
from gasloc.recipe import OuterConfig

MakeOptimizer = Callable[[list[Tensor]], Optimizer]

_Tensors = Mapping[str, Tensor]

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
    )


class OuterStep:
    """Takes outer steps on the anchor `theta`, the parameters at the start of a round. Changed in place.

    The anchor is the caller's: float32 or float64 tensors by name, whatever the model's own dtype, since a bf16
    tensor swallows small outer updates. `make` builds the optimizer over them, in sorted order of names.

    Raises `ModelError` for an anchor tensor of any other dtype.
    """

    def __init__(self, anchor: dict[str, Tensor], make: MakeOptimizer) -> None:
        for name, tensor in anchor.items():
            if tensor.dtype not in (torch.float32, torch.float64):
                raise ModelError(f"anchor '{name}' is {tensor.dtype}: the outer state is float32 or float64")
        self._anchor = {name: anchor[name] for name in sorted(anchor)}
        self._make = make
        self._optimizer = make(list(self._anchor.values()))

    def step(self, mix: _Tensors) -> None:
        """One outer step with `theta - mix` as the gradient. Changes the anchor and the momentum, never `mix`.

        `mix` equal to the local result alone is the step of a peer without partners. Memory: one gradient the
        size of the anchor while the step runs. Raises `ModelError` where `mix` does not fit; then nothing changed.
        """
        check_layout(self._anchor, mix, of="the mix")
        with torch.no_grad():
            for name, theta in self._anchor.items():
                theta.grad = theta - mix[name].to(theta)
        try:
            self._optimizer.step()
        finally:
            self._optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's own state dict, hyper-parameters included."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes a state dict of an optimizer over the same anchor. Raises `ValueError` where it does not fit."""
        self._optimizer.load_state_dict(state)

    def momentum_tensors(self) -> dict[str, Tensor]:
        """The optimizer's state as named tensors: "w/momentum_buffer", or "w/exp_avg", "w/exp_avg_sq", "w/step".

        Detached, sharing memory with the optimizer: copy what must outlive the next step. Plain numbers come as
        float64 scalars. Empty before the first step, and always for plain SGD. Hyper-parameters are not in it:
        they are the recipe's.
        """
        return {
            f"{name}/{key}": _as_tensor(value)
            for name, theta in self._anchor.items()
            for key, value in self._optimizer.state.get(theta, {}).items()
            if value is not None
        }

    def load_momentum(self, tensors: _Tensors) -> None:
        """Replaces the whole outer state by copies of what `momentum_tensors` gave. Empty: as before any step.

        Raises `ModelError` that names the first tensor which is missing, unknown or of a wrong shape; then
        nothing was changed.
        """
        fresh: dict[Tensor, dict[str, Any]] = {}
        if tensors:
            expected = self._expected_state()
            wanted = {f"{name}/{key}" for name in self._anchor for key in expected}
            for label in sorted(wanted ^ tensors.keys()):
                problem = "missing from" if label in wanted else "unknown in"
                raise ModelError(f"outer state: '{label}' is {problem} the given tensors: is it the same recipe?")
            for name, theta in self._anchor.items():
                fresh[theta] = {
                    key: _restore(f"{name}/{key}", tensors[f"{name}/{key}"], like, theta)
                    for key, like in expected.items()
                }
        self._optimizer.state.clear()
        self._optimizer.state.update(fresh)

    def _expected_state(self) -> dict[str, Any]:
        """The state that this optimizer keeps for one tensor, found by a step on zeros like the smallest.

        Not a scalar where there is a choice: its state would not tell a scalar counter from a buffer.
        """
        tensors = self._anchor.values()
        smallest = min([tensor for tensor in tensors if tensor.ndim] or tensors, key=Tensor.numel)
        probe = torch.zeros_like(smallest)
        probe.grad = torch.zeros_like(smallest)
        optimizer = self._make([probe])
        optimizer.step()
        return {key: value for key, value in optimizer.state.get(probe, {}).items() if value is not None}


def _as_tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    return torch.tensor(float(value), dtype=torch.float64)


def _restore(label: str, given: Tensor, like: Any, theta: Tensor) -> Any:
    """A copy of `given` in the form that the optimizer keeps it: `like` says which."""
    is_scalar = not isinstance(like, Tensor) or like.ndim == 0
    shape = torch.Size() if is_scalar else theta.shape
    if given.shape != shape:
        raise ModelError(f"outer state: '{label}' has shape {tuple(given.shape)}, expected {tuple(shape)}")
    if not isinstance(like, Tensor):
        return type(like)(given.item())
    return given.detach().to(device=like.device, dtype=like.dtype, copy=True)
