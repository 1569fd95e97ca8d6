"""The inner optimizer: AdamW, its learning rate, clipping, and the device and precision it runs in."""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from gasloc.errors import UsageError
from gasloc.recipe import InnerConfig

DeviceChoice = Literal["auto", "cpu", "cuda", "mps"]


def make_inner(model: nn.Module, config: InnerConfig) -> torch.optim.AdamW:
    """AdamW over the model's trainable parameters (Loshchilov and Hutter, 1711.05101).

    Weight decay acts on matrices only, not on norms and biases. Runs as one fused kernel where the parameters'
    device has one.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    fused = bool(trainable) and all(p.device.type in ("cpu", "cuda") for p in trainable)
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        fused=fused,
    )


def learning_rate(step: int, config: InnerConfig, total_steps: int) -> float:
    """The rate of local step `step` (from 0): linear warm-up, then a cosine to `final_share` of the peak.

    A peer that goes on past `total_steps` keeps the final rate. A warm-up longer than the run is cut to it.
    """
    if step >= total_steps:
        return config.learning_rate * config.final_share
    warmup = min(config.warmup_steps, total_steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / (total_steps - warmup)
    share = config.final_share + (1 - config.final_share) * 0.5 * (1 + math.cos(math.pi * progress))
    return config.learning_rate * share


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Gives every parameter group the same rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def clip(model: nn.Module, config: InnerConfig) -> float:
    """Scales all gradients together to a norm of at most `clip_norm`; returns the norm before."""
    norm: Tensor = nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
    return float(norm)


def pick_device(choice: DeviceChoice | str) -> torch.device:
    """The device to train on; `auto` takes CUDA, then MPS, then the CPU. Raises `UsageError` where missing."""
    present = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if choice == "auto":
        return torch.device(next(kind for kind in ("cuda", "mps", "cpu") if present[kind]))
    if choice not in present:
        raise UsageError(f"device '{choice}' is unknown: choose one of {', '.join(get_args(DeviceChoice))}")
    if not present[choice]:
        raise UsageError(f"device '{choice}' is not there: this machine has no such device, or its torch no support")
    return torch.device(choice)


def autocast(device: torch.device) -> AbstractContextManager[object]:
    """bf16 where the device computes it natively, otherwise no change of precision.

    On the CPU off: there it is slower for small models, and a resume must repeat bit for bit.
    """
    if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.autocast("cuda", dtype=torch.bfloat16)
    return nullcontext()
