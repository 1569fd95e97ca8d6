"""Baselines to compare with: DDP, decentralized Adam, its local form, and NoLoCo, as pure update rules.

Each rule takes named tensors of one worker, and mixes that `gasloc.mixing.mix` made of a row of `gasloc.topology`.
All but `ddp` act on each element alone, so they hold as well for stacked workers: tensors with a first dimension
of workers, mixes stacked likewise. Inputs are never changed. Results are float32, float64 where the inputs are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gasloc.averaging import weighted_mean
from gasloc.errors import RecipeError
from gasloc.mixing import check_layout, mixing_dtype

_Tensors = Mapping[str, Tensor]

NOLOCO_LEARNING_RATE = 0.7
NOLOCO_MOMENTUM = 0.5

_SLOW, _DELTA = "slow/", "delta/"


def ddp(gradients: Sequence[_Tensors]) -> dict[str, Tensor]:
    """The mean of all workers' gradients, for one AdamW step that is the same everywhere. Clip after it.

    Synchronous data parallelism (Li et al., "PyTorch Distributed", arXiv 2006.15704): equal to one worker with the
    whole batch where the workers' batches are of one size.

    Raises `ValueError` for no gradients, `ModelError` where their names or shapes differ.
    """
    return weighted_mean(gradients, [1.0] * len(gradients))


def dadam(mix: _Tensors, before: _Tensors, after: _Tensors) -> dict[str, Tensor]:
    """Decentralized Adam, every step: `theta_i = mix_i(theta) + AdamW update of the own gradient`.

    `before` and `after` are the worker's own parameters around its AdamW step, which it takes on its own gradient
    at its own parameters; `mix` is the mix of everybody's `before`. The moments stay the worker's own. DADAM of
    Nazari, Tarzanagh and Michailidis (arXiv 1901.09109), with AdamW in the place of AMSGrad.

    Raises `ModelError` where names or shapes differ.
    """
    check_layout(before, after, of="the worker after its step")
    check_layout(before, mix, of="the mix")
    with torch.no_grad():
        return {name: _wide(mix[name]) + (_wide(after[name]) - _wide(before[name])) for name in before}


def local_dadam_mixes(step: int, local_steps: int) -> bool:
    """Whether local decentralized Adam mixes after local step `step`, counted from 1: every `local_steps` (H).

    The rule is AdamW steps alone, and after each H of them the parameters become their mix: no outer optimizer,
    moments stay the worker's own. With H = 1 the mix comes after the step, and in `dadam` before it. (Decentralized
    local training with Adam-type updates: LoDAdaC, arXiv 2604.09970, without its compression.)

    Raises `RecipeError` where H is under 1.
    """
    if local_steps < 1:
        raise RecipeError(f"local_steps = {local_steps}: a round has at least 1 step")
    return step > 0 and step % local_steps == 0


@dataclass(frozen=True, slots=True)
class NolocoState:
    """A worker's outer state. It trains from `slow` anew each round."""

    slow: dict[str, Tensor]
    """The slow weights s, float32 or float64."""
    momentum: dict[str, Tensor]
    """The momentum m, as `slow`."""


def noloco_start(theta: _Tensors) -> NolocoState:
    """The state at the first round: slow weights are the parameters, copied, and the momentum is 0."""
    slow = {name: _wide(tensor).clone() for name, tensor in theta.items()}
    return NolocoState(slow, {name: torch.zeros_like(tensor) for name, tensor in slow.items()})


def noloco_travelling(state: NolocoState, phi: _Tensors) -> dict[str, Tensor]:
    """What a worker sends its partner: slow weights as `slow/NAME` and `d = phi - s` as `delta/NAME`.

    Twice the bytes of a model. The slow weights are the state's own tensors, not copies. Raises `ModelError` where
    `phi`, the parameters after the local steps, does not fit.
    """
    check_layout(state.slow, phi, of="the worker after its local steps")
    with torch.no_grad():
        deltas = {f"{_DELTA}{name}": phi[name].to(slow) - slow for name, slow in state.slow.items()}
    return {f"{_SLOW}{name}": slow for name, slow in state.slow.items()} | deltas


def noloco(
    state: NolocoState,
    mix: _Tensors,
    *,
    learning_rate: float = NOLOCO_LEARNING_RATE,
    momentum: float = NOLOCO_MOMENTUM,
    consensus: float | None = None,
) -> NolocoState:
    """NoLoCo's outer step, on the mix of both partners' `noloco_travelling`. Returns the new state.

        m = momentum * m + learning_rate * mean(d) + consensus * (mean(s) - s)
        s = s + m

    Kolehmainen et al. (arXiv 2506.10911), who call it a modified Nesterov momentum; the last term draws the
    partners' slow weights together. In the authors' code the momentum is the heavy ball, and `consensus` is the
    learning rate, the default here. With a partner equal to oneself it is the heavy ball of one worker.

    Raises `ModelError` where `mix` does not fit the state.
    """
    pull = learning_rate if consensus is None else consensus
    expected = {f"{prefix}{name}": slow for prefix in (_SLOW, _DELTA) for name, slow in state.slow.items()}
    check_layout(expected, mix, of="the mix")
    slow, moved = {}, {}
    with torch.no_grad():
        for name, own in state.slow.items():
            mean_delta, mean_slow = mix[f"{_DELTA}{name}"].to(own), mix[f"{_SLOW}{name}"].to(own)
            moved[name] = momentum * state.momentum[name] + learning_rate * mean_delta + pull * (mean_slow - own)
            slow[name] = own + moved[name]
    return NolocoState(slow, moved)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to(mixing_dtype(tensor))
