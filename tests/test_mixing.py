"""Mixing and averaging of named tensors, their distances, and what they refuse."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gasloc import mixing
from gasloc.averaging import rda, token_weights, weighted_mean
from gasloc.errors import ModelError

State = dict[str, Tensor]


def state(seed: int, dtype: torch.dtype = torch.float64) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(5, 3, generator=generator, dtype=torch.float64).to(dtype),
        "scale": torch.randn((), generator=generator, dtype=torch.float64).to(dtype),
    }


def copies(*states: State) -> list[State]:
    return [{name: tensor.clone() for name, tensor in each.items()} for each in states]


def equal(left: State, right: State) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_weighted_sum_and_untouched_inputs() -> None:
    own, first, second = state(0), state(1), state(2)
    before = copies(own, first, second)
    mixed = mixing.mix(own, {"b": first, "c": second}, {"a": 0.5, "b": 0.25, "c": 0.25}, "a")
    for name in own:
        expected = 0.5 * own[name] + 0.25 * first[name] + 0.25 * second[name]
        torch.testing.assert_close(mixed[name], expected, rtol=0, atol=1e-15)
    assert all(equal(*pair) for pair in zip((own, first, second), before, strict=True))


def test_weight_of_the_silent_goes_to_oneself() -> None:
    own, other = state(0), state(1)
    mixed = mixing.mix(own, {"b": other}, {"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}, "a")
    for name in own:
        expected = (2 * own[name] + other[name]) / 3
        torch.testing.assert_close(mixed[name], expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("n", [1, 3, 7, 49])
def test_no_answer_gives_an_exact_copy(n: int) -> None:
    own = state(0, torch.float32)
    weights = {f"peer{index}": 1 / n for index in range(n)}
    mixed = mixing.mix(own, {}, weights, "peer0")
    assert equal(mixed, own)
    mixed["weight"].add_(1)
    assert equal(own, state(0, torch.float32)), "the result shares memory with the input"


@pytest.mark.parametrize("n", [2, 3, 7])
def test_peers_with_one_set_of_inputs_get_the_same_bits(n: int) -> None:
    states = {f"peer{index}": state(index, torch.float32) for index in range(n)}
    weights = dict.fromkeys(states, 1 / n)
    results = [
        mixing.mix(own, {peer: other for peer, other in states.items() if peer != me}, weights, me)
        for me, own in states.items()
    ]
    assert all(equal(results[0], result) for result in results)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_mixed_in_float32(dtype: torch.dtype) -> None:
    own, other = state(0, dtype), state(1, dtype)
    mixed = mixing.mix(own, {"b": other}, {"a": 0.5, "b": 0.5}, "a")
    for name in own:
        assert mixed[name].dtype == torch.float32
        torch.testing.assert_close(mixed[name], (own[name].float() + other[name].float()) / 2)


def test_result_is_no_part_of_autograd() -> None:
    own = {"w": torch.ones(2, requires_grad=True)}
    assert not mixing.mix(own, {"b": {"w": torch.zeros(2)}}, {"a": 0.5, "b": 0.5}, "a")["w"].requires_grad


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"weight": torch.zeros(5, 3)}, "tensor 'scale' is missing in the state of peer b"),
        (state(0) | {"extra": torch.zeros(1)}, "tensor 'extra' of peer b is not in our own"),
        (state(0) | {"weight": torch.zeros(3, 5)}, r"'weight' of peer b has shape \(3, 5\), ours \(5, 3\)"),
        (state(0) | {"weight": torch.zeros(5, 3, dtype=torch.int64)}, "'weight' holds torch.int64"),
    ],
)
def test_layouts_that_differ_are_named(other: State, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        mixing.mix(state(0), {"b": other}, {"a": 0.5, "b": 0.5}, "a")


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64])
def test_integers_are_never_averaged(dtype: torch.dtype) -> None:
    counter = {"counter": torch.zeros(2, dtype=dtype)}
    with pytest.raises(ModelError, match="'counter' holds"):
        mixing.mix(counter, {}, {"a": 1.0}, "a")
    with pytest.raises(ModelError, match="'counter' holds"):
        weighted_mean([counter], [1.0])


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"b": 1.0}, "no entry for the peer itself, 'a'"),
        ({"a": 1.0}, "received from 'b', which has no weight"),
        ({"a": 1.5, "b": -0.5}, "weight of 'b' is -0.5"),
        ({"a": 0.5, "b": math.nan}, "weight of 'b' is nan"),
        ({"a": 0.5, "b": 0.4}, "sum to 0.9, not to 1"),
    ],
)
def test_rows_that_are_none_are_refused(weights: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mixing.mix(state(0), {"b": state(1)}, weights, "a")


def test_own_state_cannot_be_received() -> None:
    with pytest.raises(ValueError, match="received from the peer itself"):
        mixing.mix(state(0), {"a": state(1)}, {"a": 1.0}, "a")


def test_distance_by_hand() -> None:
    own = {"x": torch.tensor([3.0, 0.0]), "y": torch.tensor([[4.0]])}
    other = {"x": torch.tensor([3.0, 1.0]), "y": torch.tensor([[4.0]])}
    assert mixing.distance(own, other) == pytest.approx(0.2, abs=1e-15)
    assert mixing.distance(own, own) == 0
    zero = {name: torch.zeros_like(tensor) for name, tensor in own.items()}
    assert mixing.distance(zero, zero) == 0
    assert mixing.distance(zero, own) == math.inf
    assert math.isnan(mixing.distance(own, own | {"y": torch.tensor([[math.nan]])}))


def test_spread_by_hand() -> None:
    """Replicas (3, 3) and (5, 5): mean (4, 4), each sqrt(2) away from it, which is 1/4 of its length."""
    first, second = {"w": torch.tensor([3.0, 3.0])}, {"w": torch.tensor([5.0, 5.0])}
    assert mixing.spread([first, second]) == pytest.approx(0.25, abs=1e-15)
    assert mixing.spread([first]) == 0
    assert mixing.spread([first, first, first]) < 1e-15


def test_spread_sees_small_differences_of_large_float32_tensors() -> None:
    base = torch.full((100_000,), 1000.0)
    replicas = [{"w": base}, {"w": base + 2**-10}]
    assert mixing.spread(replicas) == pytest.approx(2**-11 / 1000, rel=1e-6)


def test_spread_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="give at least one"):
        mixing.spread([])


@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 6), seed=st.integers(0, 1000), data=st.data())
def test_rda_of_equal_gradients_is_the_mean(count: int, seed: int, data: st.DataObject) -> None:
    weights = data.draw(st.lists(st.floats(0.01, 100), min_size=count, max_size=count))
    same = [state(seed)] * count
    averaged, mean = rda(same, weights), weighted_mean(same, weights)
    for name in mean:
        torch.testing.assert_close(averaged[name], mean[name], rtol=0, atol=1e-12)
        torch.testing.assert_close(averaged[name], same[0][name], rtol=0, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 6), seed=st.integers(0, 1000), data=st.data())
def test_rda_keeps_the_mean_length(count: int, seed: int, data: st.DataObject) -> None:
    weights = data.draw(st.lists(st.floats(0.01, 100), min_size=count, max_size=count))
    differences = [state(seed + index) for index in range(count)]
    before = copies(*differences)
    averaged = rda(differences, weights)
    norms = [float(each["weight"].norm()) for each in differences]
    expected = sum(weight * norm for weight, norm in zip(weights, norms, strict=True)) / sum(weights)
    assert float(averaged["weight"].norm()) == pytest.approx(expected, rel=1e-12)
    assert all(equal(*pair) for pair in zip(differences, before, strict=True))


def test_rda_by_hand() -> None:
    """Weights 1 and 3: r = (3 + 3 * 4) / 4 = 3.75; u = (1, 0) + 3 * (0, 1), of length sqrt(10)."""
    averaged = rda(
        [
            {"w": torch.tensor([3.0, 0.0], dtype=torch.float64)},
            {"w": torch.tensor([0.0, 4.0], dtype=torch.float64)},
        ],
        [1.0, 3.0],
    )
    expected = torch.tensor([3.75, 3 * 3.75], dtype=torch.float64) / math.sqrt(10)
    torch.testing.assert_close(averaged["w"], expected, rtol=0, atol=1e-12)


def test_rda_does_not_shrink_with_the_number_of_orthogonal_gradients() -> None:
    gradients = [{"w": row} for row in torch.eye(16, dtype=torch.float64)]
    assert float(rda(gradients, [1.0] * 16)["w"].norm()) == pytest.approx(1)
    assert float(weighted_mean(gradients, [1.0] * 16)["w"].norm()) == pytest.approx(1 / 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rda_of_zeros_and_of_opposites_is_zero(dtype: torch.dtype) -> None:
    zero = {"w": torch.zeros(3, dtype=dtype)}
    some = {"w": torch.tensor([0.1, 0.2, 0.3], dtype=dtype)}
    opposite = {"w": some["w"] * -0.3}
    assert not rda([zero, zero], [1.0, 2.0])["w"].any()
    assert not rda([some, opposite], [1.0, 1.0])["w"].any()
    torch.testing.assert_close(rda([some, zero], [1.0, 1.0])["w"], some["w"] / 2)


def test_rda_leaves_plain_tensors_to_the_mean() -> None:
    differences = [state(0), state(1)]
    averaged, mean = rda(differences, [1.0, 2.0], plain=["weight"]), weighted_mean(differences, [1.0, 2.0])
    assert torch.equal(averaged["weight"], mean["weight"])
    assert not torch.equal(averaged["scale"], mean["scale"])


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan, math.inf])
def test_weights_not_above_zero_are_refused(weight: float) -> None:
    for average in (rda, weighted_mean):
        with pytest.raises(ValueError, match="weight 1 is"):
            average([state(0), state(1)], [1.0, weight])


def test_averages_refuse_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="no differences"):
        rda([], [])
    with pytest.raises(ValueError, match="1 differences for 2 weights"):
        weighted_mean([state(0)], [1.0, 1.0])
    with pytest.raises(ModelError, match="'scale' is missing in the state of difference 1"):
        rda([state(0), {"weight": torch.zeros(5, 3)}], [1.0, 1.0])


def test_token_weights_by_hand() -> None:
    assert token_weights([100.0, 300.0], [10.0, 30.0]) == [1000.0, 3000.0]


def test_equal_tokens_give_the_mean() -> None:
    differences = [state(index) for index in range(4)]
    averaged = weighted_mean(differences, token_weights([512] * 4, [8] * 4))
    for name, tensor in averaged.items():
        mean = torch.stack([each[name] for each in differences]).mean(dim=0)
        torch.testing.assert_close(tensor, mean, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("tokens", "steps", "message"),
    [
        ([0], [1], "tokens of learner 0 are 0"),
        ([1, -5], [1, 1], "tokens of learner 1 are -5"),
        ([1], [0], "steps of learner 0 are 0"),
        ([1, 2], [1], "2 token counts for 1 step counts"),
        ([math.inf], [1], "tokens of learner 0 are inf"),
    ],
)
def test_token_weights_refuse(tokens: list[float], steps: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        token_weights(tokens, steps)


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 4),
    seed=st.integers(0, 1000),
    me=st.sampled_from(["0", "peer1", "z"]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_mixing_into_what_was_received_gives_the_same_bits(count: int, seed: int, me: str, dtype: torch.dtype) -> None:
    own = state(seed, dtype)
    received = {f"peer{index}.": state(seed + 1 + index, dtype) for index in range(count)}
    weights = dict.fromkeys((me, *received, "silent"), 1 / (count + 2))
    expected = mixing.mix(own, received, weights, me)
    memory = {tensor.data_ptr() for theirs in received.values() for tensor in theirs.values()}
    mixed = mixing.mix_received(own, received, weights, me)
    assert equal(mixed, expected)
    assert equal(own, state(seed, dtype)), "our own state is only read"
    assert {tensor.data_ptr() for tensor in mixed.values()} <= memory, "new memory was taken"


@pytest.mark.parametrize(
    "other",
    [torch.arange(6.0).reshape(2, 3).T, torch.arange(6.0, dtype=torch.float16).reshape(3, 2)],
    ids=["strided", "half"],
)
def test_what_cannot_hold_the_mix_is_not_used_for_it(other: Tensor) -> None:
    own, before = {"w": torch.ones(3, 2)}, other.clone()
    mixed = mixing.mix_received(own, {"b": {"w": other}}, {"a": 0.5, "b": 0.5}, "a")
    torch.testing.assert_close(mixed["w"], (before.float() + 1) / 2)
    assert torch.equal(other, before)


def test_mixing_without_an_answer_gives_an_exact_copy() -> None:
    own = state(0)
    mixed = mixing.mix_received(own, {}, {"a": 0.5, "b": 0.5}, "a")
    assert equal(mixed, own)
    assert mixed["weight"].data_ptr() != own["weight"].data_ptr()


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_change_no_bit_of_the_mix(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    own, other = {"w": torch.linspace(-1, 1, 200)}, {"w": torch.linspace(3, 9, 200)}
    whole = mixing.mix(own, {"b": other}, {"a": 0.5, "b": 0.5}, "a")
    apart = mixing.squared_distance(own, other)
    monkeypatch.setattr(mixing, "CHUNK", chunk)
    assert equal(whole, mixing.mix(own, {"b": other}, {"a": 0.5, "b": 0.5}, "a"))
    assert mixing.squared_distance(own, other) == pytest.approx(apart, rel=1e-5)


@pytest.mark.parametrize("value", [1e-25, 1e-20, 1e-3, 1.0, 1e18, 1e30])
def test_squares_that_float32_cannot_hold_are_summed_all_the_same(value: float) -> None:
    tensor = torch.full((1000,), value)
    assert mixing.squared_norm({"w": tensor}) == pytest.approx(1000 * value**2, rel=1e-5)
    assert mixing.squared_distance({"w": -tensor}, {"w": tensor}) == pytest.approx(4000 * value**2, rel=1e-5)


@pytest.mark.parametrize("count", [1_000, 1_000_000])
def test_lengths_of_long_tensors_are_as_exact_as_float64_gives_them(count: int) -> None:
    tensor = torch.randn(count, generator=torch.Generator().manual_seed(0)).abs()
    exact = float(tensor.double().square().sum())
    assert mixing.squared_norm({"w": tensor}) == pytest.approx(exact, rel=1e-5)
