"""The outer step: what it changes, how its state travels, what it refuses."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gasloc import outer as outer_module
from gasloc.errors import ModelError
from gasloc.outer import MakeOptimizer, OuterStep, make_outer
from gasloc.recipe import OuterConfig

State = dict[str, Tensor]

MAKES: dict[str, MakeOptimizer] = {
    "nesterov": make_outer(OuterConfig(learning_rate=0.7, momentum=0.9)),
    "heavy-ball": make_outer(OuterConfig(learning_rate=0.7, momentum=0.9, nesterov=False)),
    "sgd": make_outer(OuterConfig(learning_rate=0.7, momentum=0.0)),
    "adam": make_outer(OuterConfig(optimizer="adam", learning_rate=0.1, momentum=0.9)),
}

every_make = pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)


def state(seed: int, dtype: torch.dtype = torch.float64) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {
        "layers.0.weight": torch.randn(3, 2, generator=generator, dtype=torch.float64).to(dtype),
        "gain": torch.randn((), generator=generator, dtype=torch.float64).to(dtype),
        "bias": torch.randn(4, generator=generator, dtype=torch.float64).to(dtype),
    }


def assert_equal(left: State, right: State) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


@settings(deadline=None)
@given(momentum=st.floats(0, 0.99), lr=st.floats(0.01, 2), seed=st.integers(0, 100))
def test_nesterov_is_the_documented_formula(momentum: float, lr: float, seed: int) -> None:
    theta = state(seed)
    outer = OuterStep(theta, make_outer(OuterConfig(learning_rate=lr, momentum=momentum)))
    expected, buf = state(seed), {name: torch.zeros_like(tensor) for name, tensor in theta.items()}
    for round in range(4):
        mix = state(1000 + round)
        outer.step(mix)
        for name, tensor in expected.items():
            delta = tensor - mix[name]
            buf[name] = momentum * buf[name] + delta
            expected[name] = tensor - lr * (delta + momentum * buf[name])
            torch.testing.assert_close(theta[name], expected[name], rtol=0, atol=1e-12)


@every_make
def test_step_changes_the_anchor_in_place_and_not_the_mix(make: MakeOptimizer) -> None:
    theta = state(0)
    places = {name: tensor.data_ptr() for name, tensor in theta.items()}
    mix = state(1)
    OuterStep(theta, make).step(mix)
    assert_equal(mix, state(1))
    for name, tensor in theta.items():
        assert tensor.data_ptr() == places[name]
        assert tensor.grad is None
        assert not torch.equal(tensor, state(0)[name])


def test_mix_equal_to_the_anchor_moves_nothing() -> None:
    theta = state(0)
    OuterStep(theta, MAKES["nesterov"]).step(state(0))
    assert_equal(theta, state(0))


def test_small_updates_of_a_half_precision_mix_are_not_swallowed() -> None:
    """A float32 anchor near 1 pulled by 1e-4 a round moves; a bf16 one, whose steps are 2**-8, would not."""
    theta = {"w": torch.ones(4)}
    outer = OuterStep(theta, make_outer(OuterConfig(learning_rate=1.0, momentum=0.0)))
    for _ in range(10):
        outer.step({"w": theta["w"] * (1 - 1e-4)})
    torch.testing.assert_close(theta["w"], torch.full((4,), (1 - 1e-4) ** 10), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64])
def test_anchor_must_be_float32_or_float64(dtype: torch.dtype) -> None:
    with pytest.raises(ModelError, match="anchor 'w' is torch"):
        OuterStep({"w": torch.zeros(2, dtype=dtype)}, MAKES["sgd"])


@pytest.mark.parametrize(
    ("mix", "message"),
    [
        ({"bias": torch.zeros(4)}, "'gain' is missing in the state of the mix"),
        (state(1) | {"bias": torch.zeros(5)}, r"'bias' of the mix has shape \(5,\), ours \(4,\)"),
        (state(1) | {"more": torch.zeros(1)}, "'more' of the mix is not in our own"),
    ],
)
def test_mix_that_does_not_fit_changes_nothing(mix: State, message: str) -> None:
    theta = state(0)
    outer = OuterStep(theta, MAKES["nesterov"])
    with pytest.raises(ModelError, match=message):
        outer.step(mix)
    assert_equal(theta, state(0))
    assert outer.momentum_tensors() == {}


@every_make
def test_momentum_travels_and_the_run_goes_on_bit_for_bit(make: MakeOptimizer) -> None:
    straight = state(0, torch.float32)
    outer = OuterStep(straight, make)
    for round in range(3):
        outer.step(state(10 + round, torch.float32))
    resumed = {name: tensor.clone() for name, tensor in straight.items()}
    sent = {name: tensor.clone() for name, tensor in outer.momentum_tensors().items()}
    other = OuterStep(resumed, make)
    other.load_momentum(sent)
    for round in range(3, 6):
        outer.step(state(10 + round, torch.float32))
        other.step(state(10 + round, torch.float32))
        assert_equal(resumed, straight)
    assert_equal(other.momentum_tensors(), outer.momentum_tensors())


def test_momentum_names() -> None:
    names = {}
    for kind, make in MAKES.items():
        outer = OuterStep(state(0), make)
        assert outer.momentum_tensors() == {}
        outer.step(state(1))
        names[kind] = {label for label in outer.momentum_tensors() if label.endswith("/bias")}
    assert names["nesterov"] == names["heavy-ball"] == {"momentum_buffer/bias"}
    assert names["sgd"] == set()
    assert names["adam"] == {"exp_avg/bias", "exp_avg_sq/bias", "step/bias"}


def test_loaded_momentum_is_a_copy_and_empty_means_a_fresh_start() -> None:
    outer = OuterStep(state(0), MAKES["nesterov"])
    outer.step(state(1))
    given_tensors = {name: tensor.clone() for name, tensor in outer.momentum_tensors().items()}
    kept = {name: tensor.clone() for name, tensor in given_tensors.items()}
    outer.load_momentum(given_tensors)
    outer.step(state(2))
    assert_equal(given_tensors, kept)
    outer.load_momentum({})
    assert outer.momentum_tensors() == {}


def drop(label: str) -> Callable[[State], State]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name != label}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (drop("exp_avg_sq/bias"), "'exp_avg_sq/bias' is missing"),
        (lambda tensors: tensors | {"exp_avg/other": torch.zeros(1)}, "'exp_avg/other' is unknown"),
        (lambda tensors: tensors | {"momentum_buffer/bias": torch.zeros(4)}, "'momentum_buffer/bias' is unknown"),
        (lambda tensors: tensors | {"exp_avg/bias": torch.zeros(5)}, r"shape \(5,\), expected \(4,\)"),
        (lambda tensors: tensors | {"exp_avg/bias": torch.zeros(())}, r"shape \(\), expected \(4,\)"),
        (lambda tensors: tensors | {"step/bias": torch.zeros(4)}, r"shape \(4,\), expected \(\)"),
    ],
)
def test_momentum_that_does_not_fit_changes_nothing(spoil: Callable[[State], State], message: str) -> None:
    theta = state(0)
    outer = OuterStep(theta, MAKES["adam"])
    outer.step(state(1))
    before = {name: tensor.clone() for name, tensor in outer.momentum_tensors().items()}
    with pytest.raises(ModelError, match=message):
        outer.load_momentum(spoil(dict(before)))
    assert_equal(outer.momentum_tensors(), before)


@every_make
def test_anchor_of_scalars_only(make: MakeOptimizer) -> None:
    theta = {"gain": torch.tensor(2.0)}
    outer = OuterStep(theta, make)
    outer.step({"gain": torch.tensor(1.0)})
    outer.load_momentum({name: tensor.clone() for name, tensor in outer.momentum_tensors().items()})
    outer.step({"gain": torch.tensor(1.0)})
    assert float(theta["gain"]) < 2


def test_any_optimizer_plugs_in() -> None:
    theta = state(0)
    outer = OuterStep(theta, lambda anchor: torch.optim.RMSprop(anchor, lr=0.1, momentum=0.5))
    outer.step(state(1))
    outer.load_momentum({name: tensor.clone() for name, tensor in outer.momentum_tensors().items()})
    outer.step(state(2))
    assert {label.partition("/")[0] for label in outer.momentum_tensors()} == {"step", "square_avg", "momentum_buffer"}


@every_make
def test_tensors_stepped_in_turn_end_as_all_at_once(make: MakeOptimizer, monkeypatch: pytest.MonkeyPatch) -> None:
    together, in_turn = state(0, torch.float32), state(0, torch.float32)
    at_once = OuterStep(together, make)
    monkeypatch.setattr(outer_module, "_GROUP_ELEMENTS", 1)
    one_by_one = OuterStep(in_turn, make)
    for round in range(3):
        at_once.step(state(10 + round, torch.float32))
        one_by_one.step(state(10 + round, torch.float32))
    assert_equal(in_turn, together)
    assert_equal(one_by_one.momentum_tensors(), at_once.momentum_tensors())


def test_an_optimizer_that_looks_at_all_gradients_at_once_sees_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outer_module, "_GROUP_ELEMENTS", 1)
    seen = []

    class Own(torch.optim.SGD):
        """Of a kind that nothing is known of."""

    def look(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        seen.append([parameter.grad is not None for parameter in optimizer.param_groups[0]["params"]])

    outer = OuterStep(state(0), lambda anchor: Own(anchor, lr=0.1))
    outer.optimizer.register_step_pre_hook(look)
    outer.step(state(1))
    assert seen == [[True, True, True]]


@every_make
@pytest.mark.parametrize("strided", ["anchor", "mix", "momentum"])
def test_strides_do_not_matter(make: MakeOptimizer, strided: str) -> None:
    def matrix(seed: int, what: str) -> State:
        tensor = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
        return {"w": tensor.T.contiguous().T if what == strided else tensor}

    plain, theta = matrix(0, ""), matrix(0, "anchor")
    one, other = OuterStep(plain, make), OuterStep(theta, make)
    for round in range(3):
        one.step(matrix(10 + round, ""))
        other.step(matrix(10 + round, "mix"))
        if strided == "momentum":
            momentum = other.momentum_tensors()
            other.load_momentum({name: entry.T.clone().T if entry.ndim else entry for name, entry in momentum.items()})
    torch.testing.assert_close(theta["w"], plain["w"], rtol=1e-6, atol=1e-7)
