"""The decoder: shape, causality, positions, initialisation, and that every peer builds the same bytes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gasloc import model as decoder
from gasloc.recipe import ModelConfig

SMALL = ModelConfig(vocabulary_size=31, dim=16, layers=2, heads=4, key_value_heads=2, hidden_dim=24, context_length=12)


def tokens(batch: int = 2, length: int = 12, seed: int = 0) -> Tensor:
    return torch.randint(31, (batch, length), generator=torch.Generator().manual_seed(seed))


def test_logits_have_one_row_a_position_and_one_column_a_token() -> None:
    model = decoder.build(SMALL, 0)
    assert model(tokens()).shape == (2, 12, 31)
    assert model(tokens(length=5)).shape == (2, 5, 31)


def test_a_position_sees_itself_and_the_past_only() -> None:
    model = decoder.build(SMALL, 0).double()
    before = tokens(1)
    after = before.clone()
    after[0, 7] = (after[0, 7] + 1) % 31
    moved = (model(after) - model(before)).abs().amax(dim=(0, 2))  # (T,)
    assert moved[:7].max() == 0
    assert moved[7:].min() > 0


def test_attention_depends_on_distance_not_on_place() -> None:
    """Rotary positions: the product of a query at i and a key at j depends on i - j alone."""
    cos, sin = decoder.rotations(32, 8, 10_000.0)
    generator = torch.Generator().manual_seed(1)
    query, key = torch.randn(2, 1, 1, 1, 8, generator=generator, dtype=torch.float64)
    query, key = (each.expand(1, 1, 32, 8) for each in (query, key))
    products = (decoder.rotate(query, cos, sin) @ decoder.rotate(key, cos, sin).transpose(-1, -2))[0, 0]
    for distance in (0, 1, 5, 20):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(products.diagonal(0)[0], products.diagonal(5)[0])


def test_grouped_heads_equal_full_attention_with_the_shared_heads_copied() -> None:
    grouped = decoder.build(SMALL, 3).double()
    full = decoder.build(SMALL.model_copy(update={"key_value_heads": 4}), 3).double()
    state = grouped.state_dict()
    for name, tensor in state.items():
        if "attention.key" in name or "attention.value" in name:
            heads = tensor.view(2, 4, 16)  # (G, H, D)
            state[name] = heads.repeat_interleave(2, dim=0).reshape(16, 16)
    full.load_state_dict(state)
    torch.testing.assert_close(full(tokens()), grouped(tokens()), rtol=1e-12, atol=1e-12)


def test_the_loss_is_cross_entropy_and_starts_near_that_of_a_guess() -> None:
    model = decoder.build(SMALL, 0)
    inputs, targets = tokens(8), tokens(8, seed=1)
    loss = model.loss(inputs, targets)
    by_hand = -model(inputs).log_softmax(-1).gather(-1, targets[..., None]).mean()
    torch.testing.assert_close(loss, by_hand)
    assert loss.item() == pytest.approx(math.log(31), abs=0.1)


@pytest.mark.parametrize("tied", [True, False])
def test_every_peer_builds_the_same_bytes_and_leaves_the_global_generator_alone(tied: bool) -> None:
    config = SMALL.model_copy(update={"tied_embeddings": tied})
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = decoder.build(config, 5)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    second, other = decoder.build(config, 5), decoder.build(config, 6)
    for (name, one), two, third in zip(first.named_parameters(), second.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two), name
        assert one.dim() < 2 or not torch.equal(one, third), name
    assert (first.head.weight is first.embedding.weight) is tied


def test_initial_sizes_follow_depth() -> None:
    config = ModelConfig(dim=64, layers=8, heads=4, key_value_heads=2, hidden_dim=128)
    for name, parameter in decoder.build(config, 0).named_parameters():
        if parameter.dim() < 2:
            assert torch.equal(parameter, torch.ones_like(parameter))
            continue
        writes = "attention.output" in name or "feed_forward.down" in name
        assert parameter.std().item() == pytest.approx(0.02 / 4 if writes else 0.02, rel=0.1), name
        assert abs(parameter.mean().item()) < 0.003


@settings(max_examples=25, deadline=None)
@given(
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2), (4, 4), (6, 3)]),
    head_dim=st.sampled_from([2, 4, 8]),
    layers=st.integers(1, 3),
    hidden=st.integers(1, 20),
    vocabulary=st.integers(2, 40),
    tied=st.booleans(),
)
def test_the_count_is_that_of_the_model(
    heads: tuple[int, int], head_dim: int, layers: int, hidden: int, vocabulary: int, tied: bool
) -> None:
    config = ModelConfig(
        vocabulary_size=vocabulary,
        dim=heads[0] * head_dim,
        layers=layers,
        heads=heads[0],
        key_value_heads=heads[1],
        hidden_dim=hidden,
        context_length=4,
        tied_embeddings=tied,
    )
    model = decoder.build(config, 0)
    assert decoder.parameter_count(config) == sum(parameter.numel() for parameter in model.parameters())
    assert model(torch.zeros(1, 4, dtype=torch.int64)).isfinite().all()


def test_it_learns_to_repeat() -> None:
    """A model that can look back learns that the second half of a sequence is its first half."""
    torch.manual_seed(0)
    config = ModelConfig(vocabulary_size=8, dim=32, layers=2, heads=4, key_value_heads=2, hidden_dim=64)
    model = decoder.build(config, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(2)
    for _ in range(300):
        half = torch.randint(8, (32, 5), generator=generator)
        sequence = torch.cat((half, half), dim=1)
        logits = model(sequence[:, :-1])[:, 4:]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), sequence[:, 5:].flatten())
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.4, f"a guess costs {math.log(8):.2f}"


def test_rope_tables_are_neither_saved_nor_trained() -> None:
    model = decoder.build(SMALL, 0)
    assert not {"cos", "sin"} & model.state_dict().keys()
    assert model.cos.shape == (12, 2)
    assert model.cos[0].tolist() == [1.0, 1.0]
    assert model.sin[1, 0].item() == pytest.approx(math.sin(1.0))
