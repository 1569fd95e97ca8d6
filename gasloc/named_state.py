"""The state of any torch optimizer as named tensors, and back.

torch numbers parameters; files and peers need names that stay true when the order changes. A state entry
`key` of parameter `name` is the tensor `key/name`, such as `exp_avg/layers.0.attention.query.weight`. A plain
number becomes a tensor without dimensions under `key#/name`, so that it comes back as a plain number.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gasloc.errors import ModelError

Hyperparameters = list[dict[str, Any]]
"""One entry a parameter group: its plain values, and under "params" the names of its parameters."""

_PLAIN = (bool, int, float, str, type(None))


def state_tensors(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The optimizer's state by name. Tensors are the optimizer's own, not copies.

    Entries that are None are left out. Raises `ModelError` for state that is neither tensor nor number, since
    such state cannot be written without pickling.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"{key}/{name}"] = value.detach()
            elif isinstance(value, float):
                tensors[f"{key}#/{name}"] = torch.tensor(value, dtype=torch.float64)
            elif isinstance(value, int):  # bool too: torch keeps it apart
                tensors[f"{key}#/{name}"] = torch.tensor(value)
            elif value is not None:
                raise ModelError(
                    f"{type(optimizer).__name__} keeps '{key}' of '{name}' as {type(value).__name__}: "
                    "only tensors and numbers can be saved"
                )
    return tensors


def load_state_tensors(optimizer: Optimizer, parameters: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Replaces the optimizer's state by copies of `tensors`. Hyperparameters stay as they are.

    Raises `ModelError`, with nothing changed, for a name that is not of this optimizer's parameters or a
    tensor that has neither its parameter's shape nor no dimensions at all.
    """
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    state: dict[Tensor, dict[str, Any]] = {}
    for full_name, value in tensors.items():
        key, _, name = full_name.partition("/")
        parameter = parameters.get(name)
        if parameter is None or id(parameter) not in held:
            raise ModelError(f"optimizer state '{full_name}' is of no parameter of this optimizer")
        if value.dim() and value.shape != parameter.shape:
            raise ModelError(
                f"optimizer state '{full_name}' has shape {tuple(value.shape)}, its parameter {tuple(parameter.shape)}"
            )
        entry = state.setdefault(parameter, {})
        if key.endswith("#"):
            if value.dim():
                raise ModelError(f"optimizer state '{full_name}' must be a number")
            entry[key.removesuffix("#")] = value.item()
        else:
            # a counter such as Adam's `step` lives where its optimizer put it, mostly on the CPU
            there = value.device if not value.dim() else parameter.device
            entry[key] = value.detach().to(there, copy=True, memory_format=torch.contiguous_format)
    numbers = _numbers(optimizer)
    optimizer.load_state_dict(
        {
            "state": {numbers[id(parameter)]: entry for parameter, entry in state.items()},
            "param_groups": optimizer.state_dict()["param_groups"],
        }
    )


def hyperparameters(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> Hyperparameters:
    """The plain values of each parameter group, fit for JSON; a learning rate kept as a tensor as its number."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    groups: Hyperparameters = []
    for group in optimizer.param_groups:
        plain: dict[str, Any] = {"params": [names[id(parameter)] for parameter in group["params"]]}
        for key, value in group.items():
            if key in ("params", "param_names"):
                continue
            if isinstance(value, Tensor) and not value.dim():
                plain[key] = value.item()
            elif isinstance(value, _PLAIN):
                plain[key] = value
            elif isinstance(value, tuple | list) and all(isinstance(part, _PLAIN) for part in value):
                plain[key] = list(value)
        groups.append(plain)
    return groups


def load_hyperparameters(
    optimizer: Optimizer, parameters: Mapping[str, Tensor], groups: Sequence[Mapping[str, Any]]
) -> None:
    """Sets each group's plain values. Raises `ModelError`, with nothing changed, if the groups differ."""
    ours = [group["params"] for group in hyperparameters(optimizer, parameters)]
    theirs = [list(group.get("params", ())) for group in groups]
    if ours != theirs:
        raise ModelError(
            f"the optimizer has {len(ours)} parameter groups that differ from the {len(theirs)} saved: "
            "build it as it was when saved"
        )
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for key, value in saved.items():
            if key == "params":
                continue
            present = group.get(key)
            if isinstance(present, Tensor):
                present.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(present, tuple) else value


def _numbers(optimizer: Optimizer) -> dict[int, int]:
    """The number that `Optimizer.state_dict` gives each parameter, by the parameter's `id`."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {id(parameter): number for number, parameter in enumerate(parameters)}
