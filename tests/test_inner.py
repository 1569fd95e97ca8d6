"""The inner optimizer, its schedule, clipping, and the choice of device."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gasloc import inner, model
from gasloc.errors import UsageError
from gasloc.recipe import InnerConfig, ModelConfig


def decoder() -> model.Decoder:
    return model.build(ModelConfig(dim=16, layers=1, heads=2, key_value_heads=1, hidden_dim=24), 0)


def test_decay_acts_on_matrices_only_and_each_parameter_has_one_group() -> None:
    module = decoder()
    optimizer = inner.make_inner(module, InnerConfig(weight_decay=0.3))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert len(decay) == sum(len(group["params"]) for group in optimizer.param_groups)
    for name, parameter in module.named_parameters():
        assert decay.pop(id(parameter)) == (0.3 if parameter.dim() == 2 else 0.0), name
    assert not decay


def test_a_step_is_adamw_with_the_configured_numbers() -> None:
    module = nn.Linear(2, 2, bias=False).double()
    start = module.weight.detach().clone()
    config = InnerConfig(learning_rate=0.1, beta1=0.8, beta2=0.9, epsilon=1e-3, weight_decay=0.5)
    optimizer = inner.make_inner(module, config)
    gradients = [torch.tensor([[1.0, -2.0], [0.5, 0.0]], dtype=torch.float64), torch.ones(2, 2, dtype=torch.float64)]
    weight, first, second = start, torch.zeros_like(start), torch.zeros_like(start)
    for step, gradient in enumerate(gradients, 1):
        module.weight.grad = gradient.clone()
        optimizer.step()
        first = 0.8 * first + 0.2 * gradient
        second = 0.9 * second + 0.1 * gradient**2
        weight = weight * (1 - 0.1 * 0.5)
        weight = weight - 0.1 * (first / (1 - 0.8**step)) / ((second / (1 - 0.9**step)).sqrt() + 1e-3)
    torch.testing.assert_close(module.weight.detach(), weight, rtol=1e-12, atol=1e-12)


@given(
    warmup=st.integers(0, 50),
    total=st.integers(1, 300),
    share=st.floats(0, 1),
    peak=st.floats(1e-6, 1),
)
def test_the_rate_rises_to_its_peak_then_falls_to_its_share(warmup: int, total: int, share: float, peak: float) -> None:
    config = InnerConfig(learning_rate=peak, final_share=share, warmup_steps=warmup)
    rates = [inner.learning_rate(step, config, total) for step in range(total + 5)]
    top = min(warmup, total)
    assert all(0 <= rate <= peak * (1 + 1e-12) for rate in rates)
    assert all(low < high for low, high in pairwise(rates[:top]))
    assert all(high >= low - 1e-12 * peak for high, low in pairwise(rates[top:]))
    if top:
        assert rates[top - 1] == pytest.approx(peak)
        assert rates[0] == pytest.approx(peak / top)
    assert rates[total:] == pytest.approx([peak * share] * 5)


def test_halfway_down_the_cosine_is_the_mean() -> None:
    config = InnerConfig(learning_rate=1.0, final_share=0.2, warmup_steps=10)
    assert inner.learning_rate(60, config, 110) == pytest.approx(0.6)
    assert inner.learning_rate(35, config, 110) == pytest.approx(0.6 + 0.4 * math.cos(math.pi / 4))


def test_setting_a_rate_reaches_every_group() -> None:
    optimizer = inner.make_inner(decoder(), InnerConfig())
    inner.set_learning_rate(optimizer, 0.125)
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.125]


@pytest.mark.parametrize("limit", [0.5, 100.0])
def test_clipping_scales_all_gradients_together(limit: float) -> None:
    module = nn.Linear(3, 2)
    module.weight.grad = torch.full((2, 3), 2.0)
    module.bias.grad = torch.full((2,), 1.0)
    norm = inner.clip(module, InnerConfig(clip_norm=limit))
    assert norm == pytest.approx(math.sqrt(26))
    after = math.hypot(*module.weight.grad.flatten().tolist(), *module.bias.grad.tolist())
    assert after == pytest.approx(min(limit, math.sqrt(26)), rel=1e-4)
    assert (module.weight.grad[0, 0] / module.bias.grad[0]).item() == pytest.approx(2.0)


def test_the_device_is_found_or_refused_by_name() -> None:
    present = {"cpu"}
    present |= {"cuda"} if torch.cuda.is_available() else set()
    present |= {"mps"} if torch.backends.mps.is_available() else set()
    assert inner.pick_device("auto").type in present
    for kind in ("cpu", "cuda", "mps"):
        if kind in present:
            assert inner.pick_device(kind).type == kind
        else:
            with pytest.raises(UsageError, match=f"device '{kind}' is not there"):
                inner.pick_device(kind)
    with pytest.raises(UsageError, match="device 'tpu' is unknown: choose one of auto, cpu, cuda, mps"):
        inner.pick_device("tpu")


def test_the_cpu_computes_in_full_precision() -> None:
    module = nn.Linear(4, 4)
    with inner.autocast(torch.device("cpu")):
        assert module(torch.ones(1, 4)).dtype == torch.float32
