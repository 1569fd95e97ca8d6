"""DiLoCo (Douillard et al., 2023) in one process: the reference that other code is compared with."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Inner = Callable[[int, int, dict[str, Tensor]], Mapping[str, Tensor]]
"""(worker, round, theta) -> parameters after that worker's local steps; may change the copy it is given."""


def diloco(
    start: Mapping[str, Tensor],
    inner: Inner,
    make_outer: Callable[[list[Tensor]], torch.optim.Optimizer],
    *,
    workers: int,
    rounds: int,
) -> list[dict[str, Tensor]]:
    """The global parameters after each round: the mean outer gradient of all workers, one outer step."""
    theta = {name: tensor.clone() for name, tensor in start.items()}
    outer = make_outer(list(theta.values()))
    history = []
    for round in range(rounds):
        copies = [{name: tensor.clone() for name, tensor in theta.items()} for _ in range(workers)]
        results = [inner(worker, round, copy) for worker, copy in enumerate(copies)]
        for name, tensor in theta.items():
            tensor.grad = torch.stack([tensor - result[name] for result in results]).mean(dim=0)
        outer.step()
        history.append({name: tensor.clone() for name, tensor in theta.items()})
    return history
