"""What of a model travels, and in which precision."""

from collections.abc import Collection, Iterable

import torch
from torch import Tensor, nn

from gasloc.errors import ModelError
from peers.exchange import Tensors


class Replica:
    """A model's trainable parameters and floating-point buffers as named float32 CPU tensors.

    Tied parameters appear once, under their first name; two parameters that share one storage count as tied.
    Frozen parameters, integer buffers and buffers that are not persistent do not appear, nor do those that hold
    infinities as the model is made: masks, the same everywhere. float64 stays float64. The prefix that
    `torch.compile` puts before names is dropped, so that a peer that compiles agrees with one that does not.
    Raises `ModelError` for a model with nothing to train or with complex parameters.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._parameters = {plain_name(name): trainable[name] for name in _distinct(trainable.items())}
        persistent = model.state_dict().keys()
        state = [(n, b) for n, b in model.named_buffers() if n in persistent and b.is_floating_point()]
        self._buffer_names = _distinct((name, buffer) for name, buffer in state if buffer.isfinite().all())
        if not self._parameters:
            raise ModelError("the model has no parameter that requires a gradient: there is nothing to train")
        for name, parameter in self._parameters.items():
            if not parameter.is_floating_point():
                raise ModelError(f"parameter '{name}' is {parameter.dtype}: only real numbers can be mixed")

    def parameters(self) -> dict[str, Tensor]:
        """Copies of the parameters as they are."""
        return {
            name: _wide(p).to("cpu", copy=True, memory_format=torch.contiguous_format)
            for name, p in self._parameters.items()
        }

    def buffers(self) -> dict[str, Tensor]:
        """Copies of the buffers as they are."""
        return {name: _wide(b).to("cpu", copy=True) for name, b in self._present_buffers().items()}

    def moved(self, start: Tensors, names: Collection[str] | None = None) -> dict[str, Tensor]:
        """phi: the parameters after local training that began at `start`, and the buffers. To be read only.

        All of them, or those in `names`.

        For float32 and float64 on the CPU these are the model's own tensors, without a copy. Half precision
        rounds `start` when it is put into the model, so there phi = start + (now - rounded start): the
        rounding cancels, and an outer update too small for bf16 is not lost but carried on in `start`.
        """
        phi: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            if names is not None and name not in names:
                continue
            now = parameter.detach()
            if now.dtype in (torch.float32, torch.float64):
                phi[name] = now.to("cpu")
            else:
                rounded = start[name].to(now.dtype).to(torch.float32)
                phi[name] = start[name] + (now.to("cpu", torch.float32) - rounded)
        buffers = self._present_buffers().items()
        return phi | {name: _wide(b).to("cpu") for name, b in buffers if names is None or name in names}

    def shown(self, name: str, value: Tensor) -> Tensor:
        """A parameter's value as the model holds it: rounded to its precision. The same tensor where it is the same."""
        return value.to(self._parameters[name].dtype).to(value.dtype)

    @torch.no_grad()
    def assign(self, parameters: Tensors, buffers: Tensors) -> None:
        """Puts values, all or some, into the model in place: ties, views and an optimizer's references hold."""
        for name, value in parameters.items():
            self._parameters[name].copy_(value)
        present = self._present_buffers()
        for name, value in buffers.items():
            present[name].copy_(value)

    def _present_buffers(self) -> dict[str, Tensor]:
        """Looked up anew each time: a module may replace a buffer by another tensor."""
        present = dict(self._model.named_buffers())
        return {plain_name(name): present[name].detach() for name in self._buffer_names}


def _wide(tensor: Tensor) -> Tensor:
    """The tensor as float32, or as it is where it is float64."""
    return tensor.detach() if tensor.dtype == torch.float64 else tensor.detach().to(torch.float32)


def plain_name(name: str) -> str:
    """The name without the prefix that `torch.compile` puts before it."""
    return name.replace("_orig_mod.", "")


def _distinct(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """The names of those with a storage of their own; the first name of each wins."""
    seen: set[tuple[int, torch.Size, tuple[int, ...]]] = set()
    names = []
    for name, tensor in tensors:
        place = tensor.data_ptr(), tensor.shape, tensor.stride()
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        names.append(name)
    return names
