"""GASLoC's outer rule after the rule as summarised publicly, kept beside ours so that a benchmark can compare them.

    z_t       = theta_t + lr * (phi_t - theta_t)
    theta_t+1 = z_t - alpha * Lap(z_t) + gamma * (z_t - z_t-1)        Lap: weighted graph Laplacian, I - W = alpha Lap

What travels is z, not phi: `z_t - alpha Lap(z_t)` is `W z_t`, a plain mix of everyone's z. The mean over peers
follows Nesterov exactly; with gamma above 0 the peers do not stay equal on a complete graph, and on 1-peer graphs
they drift apart at gamma 0.8 and above (`gasloc.topology.published_stability`).
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from gasloc.mixing import check_layout

_Tensors = Mapping[str, Tensor]


@torch.no_grad()
def travelling(theta: _Tensors, phi: _Tensors, lr: float) -> dict[str, Tensor]:
    """z of this round, which is what a peer sends: `theta + lr * (phi - theta)`, new tensors.

    `theta`: parameters at the start of the round. `phi`: after the local steps. Raises `ModelError` where the
    layouts differ.
    """
    check_layout(theta, phi, of="phi")
    return {name: torch.lerp(tensor, phi[name].to(tensor), lr) for name, tensor in theta.items()}


@torch.no_grad()
def step(mixed: _Tensors, z: _Tensors, previous: _Tensors, gamma: float) -> dict[str, Tensor]:
    """The parameters of the next round, `W z + gamma * (z - previous z)`: new tensors.

    `mixed`: this round's mix of everyone's z (`gasloc.mixing.mix`). `z`: our own, unmixed. `previous`: our own z of
    the round before; in the first round the start parameters, which makes the mean follow Nesterov from the first
    step. The caller keeps `z` for the next round. Raises `ModelError` where the layouts differ.
    """
    check_layout(mixed, z, of="z")
    check_layout(mixed, previous, of="the previous z")
    return {
        name: tensor + (z[name].to(tensor) - previous[name].to(tensor)).mul_(gamma) for name, tensor in mixed.items()
    }
